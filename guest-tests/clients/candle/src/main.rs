//! candle loads a model of bf16 from a mount: `lamina-candle MODEL.safetensors FOLDER`, where
//! FOLDER has the same model in the mount. The references are what candle loads from the disk, its
//! elements cut or cast here.

use std::{collections::HashMap, env, path::PathBuf};

use candle_core::{DType, Device, Error, Result, Tensor, bail, safetensors::MmapedSafetensors};
use half::bf16;

/// A precision's spelling in the file's name, and what becomes of a tensor.
type Precision = (&'static str, fn(&Tensor) -> Result<Tensor>);

const PRECISIONS: [Precision; 4] = [
    ("", |tensor| Ok(tensor.clone())),
    ("@e8m3", |tensor| cut(tensor, 3)),
    ("@e8m1", |tensor| cut(tensor, 1)),
    // With so many guard planes nothing of bf16 is left out.
    ("@fp8_e4m3fn+g4", |tensor| tensor.clamp(-448f32, 448f32)?.to_dtype(DType::F8E4M3)),
];

/// The tensor with that many bits of each mantissa, the rest zeros.
fn cut(tensor: &Tensor, mantissa: u32) -> Result<Tensor> {
    let kept = u16::MAX << (7 - mantissa);
    let bits = |element: bf16| bf16::from_bits(element.to_bits() & kept);
    let elements: Vec<bf16> = tensor.flatten_all()?.to_vec1()?.into_iter().map(bits).collect();
    Tensor::from_vec(elements, tensor.shape(), tensor.device())
}

/// The tensors of a file, by a mapping of it.
fn load(path: &PathBuf) -> Result<HashMap<String, Tensor>> {
    // SAFETY: nobody writes to the file while this runs.
    let mapped = unsafe { MmapedSafetensors::new(path) }?;
    mapped
        .tensors()
        .into_iter()
        .map(|(name, _)| Ok((name.clone(), mapped.load(&name, &Device::Cpu)?)))
        .collect()
}

/// The tensor's elements, as their bits.
fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    let flat = tensor.flatten_all()?;
    match tensor.dtype() {
        DType::BF16 => Ok(flat.to_vec1::<bf16>()?.into_iter().map(|one| one.to_bits().into()).collect()),
        // Exact in fp32, but for the NaN, of which weights have none.
        _ => Ok(flat.to_dtype(DType::F32)?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect()),
    }
}

fn main() -> Result<()> {
    let paths: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    let [model, folder] = paths.as_slice() else { bail!("usage: lamina-candle MODEL.safetensors FOLDER") };
    let stem = model.file_stem().ok_or_else(|| Error::Msg("the model has no name".into()))?.to_string_lossy();
    let whole = load(model)?;
    for (spelling, reference) in PRECISIONS {
        let shown = load(&folder.join(format!("{stem}{spelling}.safetensors")))?;
        if shown.len() != whole.len() {
            bail!("{spelling}: {} tensors, and the model has {}", shown.len(), whole.len());
        }
        for (name, tensor) in &shown {
            let wanted = reference(&whole[name])?;
            let same = tensor.dtype() == wanted.dtype() && tensor.dims() == wanted.dims();
            if !same || bits(tensor)? != bits(&wanted)? {
                bail!("{name} is not the same at the precision {spelling:?}");
            }
        }
    }
    println!("candle: {} tensors at {} precisions are right", whole.len(), PRECISIONS.len());
    Ok(())
}
