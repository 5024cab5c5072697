//! What a model's configuration says of its numbers, held against what its tensors are.
//!
//! Shapes and dtypes say how a tensor is stored ([`scaled`](crate::model::scaled)); the
//! configuration is only believed where it agrees.

use serde::Deserialize;

use super::layout::FileLayout;
use super::manifest::{FileEntry, Model};
use super::plan::{ModelPlan, PlannedFile};
use crate::device::Device;
use crate::model::Scheme;

/// The file that says it.
const NAME: &str = "config.json";
/// The longest that is read, in bytes.
const MAX_BYTES: u64 = 16 << 20;

#[derive(Deserialize)]
struct Config {
    quantization_config: Option<Quantization>,
}

#[derive(Deserialize)]
struct Quantization {
    quant_method: Option<String>,
    quant_algo: Option<String>,
    bits: Option<u64>,
}

impl Quantization {
    /// The scheme that it names, if that is one of those that are known.
    fn scheme(&self) -> Option<Scheme> {
        let named =
            |name: &str| Scheme::ALL.into_iter().find(|scheme| scheme.name().eq_ignore_ascii_case(name));
        [&self.quant_algo, &self.quant_method].into_iter().flatten().find_map(|name| named(name))
    }
}

/// Where GPTQ's programs say how they quantised, besides [`NAME`].
const QUANTISED: &str = "quantize_config.json";
/// What the format is called whose zeros are what they say.
const SECOND: &str = "gptq_v2";

/// What is added to the zeros of a model of GPTQ as they are stored. Its first format has them less
/// 1; the second says in its configuration that it is that.
pub(super) fn more_zeros(device: &Device, model: &Model) -> u8 {
    let said = |file: &FileEntry| -> Option<String> {
        let layout = FileLayout::new(device, model, file).ok()?;
        let mut text = vec![0; usize::try_from(layout.bytes().min(MAX_BYTES)).ok()?];
        layout.read(device, 0, &mut text).ok()?;
        let config: serde_json::Value = serde_json::from_slice(&text).ok()?;
        let of = config.get("quantization_config").unwrap_or(&config);
        Some(of.get("checkpoint_format")?.as_str()?.to_owned())
    };
    let files = model.manifest.files.iter();
    let mut formats = files.filter(|file| file.path == NAME || file.path == QUANTISED).filter_map(said);
    u8::from(!formats.any(|format| format == SECOND))
}

impl ModelPlan {
    /// A line if the configuration says of the model's numbers what they are not.
    pub fn configuration_remark(&self) -> Option<String> {
        let file = self.files.iter().find(|file| file.path == NAME)?;
        let length = file.file.opened().len().min(MAX_BYTES);
        let mut text = vec![0; usize::try_from(length).ok()?];
        file.file.read_raw(0, &mut text).ok()?;
        // What is no JSON is somebody else's business.
        let config: Config = serde_json::from_slice(&text).ok()?;
        let said = config.quantization_config?;
        let scheme = said.scheme()?;
        let mut found: Vec<Scheme> =
            self.files.iter().flat_map(PlannedFile::scaled).map(|scaled| scaled.scheme).collect();
        found.dedup();
        if !found.contains(&scheme) {
            let are = match found.first() {
                Some(other) => format!("by their shapes they are {other}, and kept so"),
                None => "no tensor is; each is kept as its dtype says".to_owned(),
            };
            return Some(format!("{NAME}: quantization_config says {scheme}, but {are}"));
        }
        let bits = said.bits.filter(|bits| *bits != 4 && matches!(scheme, Scheme::Gptq | Scheme::Awq))?;
        Some(format!(
            "{NAME}: quantization_config says {bits} bits, but tensors are of 4 by their shapes, and kept so"
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::load::tests::checkpoint;

    fn remark(folder: &Path, config: &str) -> Option<String> {
        std::fs::write(folder.join(NAME), config).unwrap();
        ModelPlan::open(folder, "m").unwrap().configuration_remark()
    }

    #[test]
    fn a_configuration_that_lies_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let says = |method: &str| format!(r#"{{"quantization_config":{{"quant_method":"{method}"}}}}"#);
        let write = |tensors: &[(&str, &str, &[u64], Vec<u8>)]| {
            std::fs::copy(checkpoint(tensors).0.path(), &path).unwrap();
        };
        write(&[("l.weight", "BF16", &[2, 2], vec![1; 8])]);
        assert_eq!(
            remark(folder.path(), &says("mxfp4")).unwrap(),
            "config.json: quantization_config says mxfp4, but no tensor is; each is kept as its dtype says"
        );
        for other in [says("bitsandbytes"), "{}".to_owned(), "no JSON".to_owned(), "[]".to_owned()] {
            assert_eq!(remark(folder.path(), &other), None, "{other}");
        }
        write(&[
            ("l.qweight", "I32", &[8, 8], vec![1; 256]),
            ("l.qzeros", "I32", &[2, 1], vec![1; 8]),
            ("l.scales", "F16", &[2, 8], vec![1; 32]),
        ]);
        assert_eq!(remark(folder.path(), &says("gptq")), None);
        assert_eq!(
            remark(folder.path(), &says("awq")).unwrap(),
            "config.json: quantization_config says awq, but by their shapes they are gptq, and kept so"
        );
        let bits = r#"{"quantization_config":{"quant_method":"gptq","bits":8}}"#;
        assert_eq!(
            remark(folder.path(), bits).unwrap(),
            "config.json: quantization_config says 8 bits, but tensors are of 4 by their shapes, and kept so"
        );
    }
}
