//! A model of a GGUF file, made into what the device loads: a checkpoint of bf16 tensors under the
//! decoder's names, and a vocabulary.
//!
//! The file's tensors are quantised, mostly; the device is given the numbers they stand for, each
//! as the bf16 nearest to it, by code of this project. So what is measured is of that bf16 model.

use std::{
    env, fs,
    io::{BufWriter, Write as _},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use lamina_llama::{Tokenizer, Weight, gguf::Model};
use serde_json::json;

use crate::files;

/// The model that has a name: it is fetched, and `./x` says here where it is.
pub const SMOLLM2: &str = "smollm2";
/// Where `./x` says it.
pub const PLACE: &str = "LAMINA_SMOLLM2";

/// A model made ready.
pub struct Converted {
    /// Its tensors in a safetensors file.
    pub checkpoint: PathBuf,
    /// Its vocabulary.
    pub tokenizer: PathBuf,
    /// Holds both.
    _folder: tempfile::TempDir,
}

/// The GGUF file that `model` names, if it names one: a file of that kind, or [`SMOLLM2`].
///
/// # Errors
/// When nobody fetched the model of that name.
pub fn named(model: &Path) -> Result<Option<PathBuf>> {
    if model == Path::new(SMOLLM2) {
        let Some(place) = env::var_os(PLACE) else {
            bail!("{PLACE} does not say where {SMOLLM2} is: start this through ./x, which fetches it");
        };
        return Ok(Some(place.into()));
    }
    Ok(model.extension().is_some_and(|kind| kind == "gguf").then(|| model.to_owned()))
}

/// Makes the model in `path` ready.
///
/// # Errors
/// When it is no model that the decoder knows, or there is no space for it.
pub fn convert(path: &Path) -> Result<Converted> {
    let file = files::read(path, u64::MAX)?;
    let model = Model::read(&file)
        .with_context(|| format!("{} is no model that --workload decode can run", path.display()))?;
    let vocabulary = serde_json::to_vec(model.vocabulary())?;
    // Here, where the file that it came of is known.
    Tokenizer::parse(&vocabulary, model.config().vocab_size)
        .with_context(|| format!("the vocabulary of {} is none", path.display()))?;
    let folder = tempfile::Builder::new().prefix("lamina-model-").tempdir()?;
    let (checkpoint, tokenizer) =
        (folder.path().join("bf16.safetensors"), folder.path().join("tokenizer.json"));
    fs::write(&tokenizer, vocabulary).context("cannot write the vocabulary")?;
    write(&model, &checkpoint)
        .with_context(|| format!("cannot write {} as bf16 to {}", path.display(), checkpoint.display()))?;
    Ok(Converted { checkpoint, tokenizer, _folder: folder })
}

fn write(model: &Model<'_>, path: &Path) -> Result<()> {
    let config = model.config();
    let mut header = serde_json::Map::new();
    let text = serde_json::to_string(&config)?;
    header.insert("__metadata__".to_owned(), json!({ "config": text, "name": model.name() }));
    let mut end = 0;
    for weight in Weight::all(&config) {
        let (start, shape) = (end, weight.dimensions(&config));
        end += 2 * shape.iter().product::<u64>();
        let entry = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] });
        header.insert(weight.name(), entry);
    }
    let mut header = serde_json::to_string(&header)?;
    // Tensors begin at a multiple of eight bytes, as the format asks for.
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut out = BufWriter::new(fs::File::create(path)?);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for weight in Weight::all(&config) {
        out.write_all(&model.bf16(weight)?)?;
    }
    Ok(out.flush()?)
}
