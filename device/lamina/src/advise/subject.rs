//! The model that is judged: its shape, its words, and its tensors at any mixture of precisions.

use std::{borrow::Cow, convert::Infallible, fs, ops::Range, path::Path};

use anyhow::{Context, Result, bail, ensure};
use lamina_codec::{
    BLOCK_BYTES, BlockWords, Codec, Encoder,
    block::Bundle,
    format::Format,
    plane::{self, PlaneMask},
    view::View,
};
use lamina_device::model::ModelFile;
use lamina_llama::{Config, Memory, Tokenizer, Weight, gguf};

/// Bytes of an element.
const ELEMENT: usize = 2;

/// A model in memory.
pub(crate) struct Subject {
    pub(crate) config: Config,
    pub(crate) tokenizer: Tokenizer,
    /// In the order of [`Weight::all`].
    tensors: Vec<Tensor>,
    /// Tensors that are not bf16 in the file.
    pub(crate) converted: usize,
}

/// A tensor in bf16.
struct Tensor {
    /// Its name in the file.
    name: String,
    bytes: Vec<u8>,
}

/// What has a precision of its own: rows of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) weight: Weight,
    /// All of the tensor's, or a head's.
    pub(crate) rows: Range<usize>,
    /// Whether these are all.
    pub(crate) whole: bool,
}

impl Subject {
    /// Opens `path`; `tokenizer` is for a checkpoint that has no words.
    ///
    /// # Errors
    /// When it is no model that the decoder runs.
    pub(crate) fn open(path: &Path, tokenizer: Option<&Path>) -> Result<Self> {
        if path.extension().is_some_and(|kind| kind == "gguf") {
            ensure!(tokenizer.is_none(), "--tokenizer: a GGUF file has its own");
            return Self::of_gguf(path);
        }
        let Some(tokenizer) = tokenizer else {
            bail!("{} has no vocabulary: give one with --tokenizer", path.display());
        };
        Self::of_safetensors(path, tokenizer)
    }

    fn of_gguf(path: &Path) -> Result<Self> {
        let file = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let model = gguf::Model::read(&file)
            .with_context(|| format!("{} is no model that the decoder can run", path.display()))?;
        let config = model.config();
        let words = serde_json::to_vec(model.vocabulary())?;
        let tokenizer = Tokenizer::parse(&words, config.vocab_size)?;
        let all = Weight::all(&config);
        let matrices = all.iter().filter(|weight| weight.shape(&config).0 > 1);
        let converted = matrices.filter(|weight| !model.is_bf16(**weight)).count();
        let tensor =
            |weight: &Weight| Ok(Tensor { name: gguf::name_of(*weight)?, bytes: model.bf16(*weight)? });
        let tensors = all.iter().map(tensor).collect::<Result<_>>()?;
        Ok(Self { config, tokenizer, tensors, converted })
    }

    fn of_safetensors(path: &Path, tokenizer: &Path) -> Result<Self> {
        let file = ModelFile::open(path)?;
        let shape = file.metadata().get("config").with_context(|| {
            format!(
                "{} is no model that the decoder can run: its metadata has no `config`, Llama's shape as llama2.c writes it. \
                 A model of another kind can be given as GGUF",
                path.display()
            )
        })?;
        let config = Config::from_json(shape)?;
        let words = fs::read(tokenizer).with_context(|| format!("cannot read {}", tokenizer.display()))?;
        let tokenizer = Tokenizer::parse(&words, config.vocab_size)
            .with_context(|| format!("{} does not fit the model", tokenizer.display()))?;
        let tensor = |weight: Weight| {
            let name = weight.name();
            let found = file.tensors().iter().find(|tensor| tensor.name == name);
            let found = found.with_context(|| format!("{} has no tensor {name}", path.display()))?;
            let (rows, columns) = weight.shape(&config);
            let wanted = ELEMENT * rows * columns;
            ensure!(
                found.format == Format::Bf16.name() && found.length == wanted as u64,
                "{name} has {} bytes of {}; the model's shape wants {wanted} of bf16",
                found.length,
                found.format
            );
            ensure!(
                weight.fits(&config, &found.shape),
                "{name} has the shape {:?}; the model's wants {:?}",
                found.shape,
                weight.dimensions(&config)
            );
            let mut bytes = vec![0; wanted];
            file.read(found, 0, &mut bytes)?;
            Ok(Tensor { name, bytes })
        };
        let tensors = Weight::all(&config).into_iter().map(tensor).collect::<Result<_>>()?;
        Ok(Self { config, tokenizer, tensors, converted: 0 })
    }

    /// What gets a precision of its own: the matrices, with `by_head` those of Q, K and V by head.
    pub(crate) fn parts(&self, by_head: bool) -> Vec<Part> {
        let mut parts = Vec::new();
        for weight in Weight::all(&self.config) {
            let (rows, _) = weight.shape(&self.config);
            // Too few weights to be worth a rule.
            if weight.is_gain() {
                continue;
            }
            let head = self.config.head_size();
            if by_head && weight.has_heads() && rows > head {
                let heads = (0..rows / head).map(|index| index * head..(index + 1) * head);
                parts.extend(heads.map(|rows| Part { weight, rows, whole: false }));
            } else {
                parts.push(Part { weight, rows: 0..rows, whole: true });
            }
        }
        parts
    }

    /// The part's tensor, as the file calls it.
    pub(crate) fn name(&self, part: &Part) -> &str {
        &self.tensors[part.weight.index(&self.config)].name
    }

    /// Weights of a part.
    pub(crate) fn weights(&self, part: &Part) -> usize {
        part.rows.len() * part.weight.shape(&self.config).1
    }

    /// The part's elements in its tensor.
    fn elements(&self, part: &Part) -> Range<usize> {
        let columns = part.weight.shape(&self.config).1;
        part.rows.start * columns..part.rows.end * columns
    }

    /// The model with these parts at these precisions, and all else in full.
    pub(crate) fn at<'a>(&self, parts: impl IntoIterator<Item = (&'a Part, &'a View)>) -> Mixed<'_> {
        let mut tensors: Vec<Cow<'_, [u8]>> =
            self.tensors.iter().map(|tensor| Cow::Borrowed(&tensor.bytes[..])).collect();
        for (part, view) in parts {
            let elements = self.elements(part);
            let bytes = tensors[part.weight.index(&self.config)].to_mut();
            show(view, &mut bytes[ELEMENT * elements.start..ELEMENT * elements.end]);
        }
        Mixed(tensors)
    }

    /// Stored bytes that reading all tensors once fetches, these parts at these precisions and all
    /// else in full. A block that several parts share gives each its planes.
    pub(crate) fn fetched<'a>(&self, parts: impl IntoIterator<Item = (&'a Part, &'a View)>) -> u64 {
        let full = View::parse(Format::Bf16, "full").expect("every format has it").mask();
        let blocks = |tensor: &Tensor| tensor.bytes.len().div_ceil(BLOCK_BYTES);
        let mut masks: Vec<Vec<Option<PlaneMask>>> =
            self.tensors.iter().map(|tensor| vec![None; blocks(tensor)]).collect();
        for (part, view) in parts {
            let elements = self.elements(part);
            let first = ELEMENT * elements.start / BLOCK_BYTES;
            let last = (ELEMENT * elements.end).div_ceil(BLOCK_BYTES);
            for mask in &mut masks[part.weight.index(&self.config)][first..last] {
                *mask = Some(mask.map_or(view.mask(), |mask| mask.with(view.mask())));
            }
        }
        let (mut encoder, mut bundle, mut bytes) = (Encoder::new(), Bundle::new(), 0);
        for (tensor, masks) in self.tensors.iter().zip(masks) {
            for (block, mask) in tensor.bytes.chunks(BLOCK_BYTES).zip(masks) {
                let mut words: BlockWords = [0; BLOCK_BYTES];
                words[..block.len()].copy_from_slice(block);
                encoder.block(Format::Bf16, Codec::Tree, &words, &mut bundle);
                if let Some(stored) = &bundle.stored {
                    stored.runs(mask.unwrap_or(full), |run| bytes += run.len() as u64);
                }
            }
        }
        bytes
    }
}

/// Makes bf16 what the view shows of it.
fn show(view: &View, bytes: &mut [u8]) {
    for block in bytes.chunks_mut(BLOCK_BYTES) {
        let mut words: BlockWords = [0; BLOCK_BYTES];
        words[..block.len()].copy_from_slice(block);
        plane::clear_outside(Format::Bf16, view.mask(), &mut words);
        view.render_in_place(&mut words);
        block.copy_from_slice(&words[..block.len()]);
    }
}

/// Tensors, each at precisions of its own.
pub(crate) struct Mixed<'a>(Vec<Cow<'a, [u8]>>);

impl Memory for Mixed<'_> {
    type Error = Infallible;

    fn load(&self, index: usize, offset: usize, into: &mut [u8]) -> Result<(), Infallible> {
        into.copy_from_slice(&self.0[index][offset..offset + into.len()]);
        Ok(())
    }
}
