//! How many planes a read of a model by a map fetches, row by row.

use std::collections::BTreeMap;

use lamina_codec::format::Format;
use lamina_codec::view::View;

use super::error::FilesError;
use super::map::PrecisionMap;
use super::plan::{ModelPlan, is_checkpoint};

/// Elements that follow each other and have one precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planes {
    /// How many.
    pub elements: u64,
    /// Their format.
    pub format: Format,
    /// The planes that are fetched of each: all of a format that cannot give the view.
    pub fetched: u32,
}

impl ModelPlan {
    /// What a read of all tensors by `map` fetches, in the order of the files and their rows. Bytes
    /// that the device has no format for are left out.
    ///
    /// # Errors
    ///
    /// A rule that fits nothing of this model, or whose view is none.
    pub fn planes(&self, name: &str, map: &PrecisionMap) -> Result<Vec<Planes>, FilesError> {
        self.check(&[], &BTreeMap::from([(name.to_owned(), map.clone())]))?;
        let mut all = Vec::new();
        for file in self.files.iter().filter(|file| is_checkpoint(&file.path)) {
            for tensor in file.file.tensors() {
                let Ok(format) = tensor.format.parse::<Format>() else { continue };
                if format == Format::Opaque {
                    continue;
                }
                let rows = tensor.shape.first().copied().unwrap_or(1);
                let row = tensor.shape.iter().skip(1).copied().fold(1, u64::saturating_mul);
                let mut push = |rows: u64, fetched: u32| {
                    let elements = rows.saturating_mul(row);
                    if elements > 0 {
                        all.push(Planes { elements, format, fetched });
                    }
                };
                let mut at = 0;
                for (rows, view) in map.views_of(&tensor.name, &tensor.shape) {
                    let mask = View::parse(format, view).map(|view| view.mask().0.count_ones());
                    push(rows.start - at, format.bits());
                    push(rows.end - rows.start, mask.unwrap_or(format.bits()));
                    at = rows.end;
                }
                push(rows - at, format.bits());
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::files::MapRule;

    fn rule(name: &str, rows: Option<&str>, view: &str) -> MapRule {
        let rows = rows.map(str::to_owned);
        MapRule { name: name.to_owned(), rows, experts: Vec::new(), view: view.to_owned() }
    }

    #[test]
    fn rows_fetch_the_planes_of_the_first_rule_that_is_about_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let tensor = |dtype: &str, shape: &str, from: u32, to: u32| {
            format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}"#)
        };
        let header = format!(
            r#"{{"a":{},"b":{},"c":{},"d":{}}}"#,
            tensor("BF16", "[8,4]", 0, 64),
            tensor("F32", "[4]", 64, 80),
            tensor("I64", "[2]", 80, 96),
            tensor("BF16", "[0,4]", 96, 96),
        );
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([0; 96]);
        fs::write(&path, bytes).unwrap();
        let plan = ModelPlan::open(&path, "m").unwrap();
        let map = |rules: &[MapRule]| PrecisionMap { rules: rules.to_vec() };
        let of = |elements, format, fetched| Planes { elements, format, fetched };
        let (bf16, fp32) = (Format::Bf16, Format::Fp32);
        // Rows 2 and 3 are at one of 12 planes, those behind them at 9; the first are full.
        let planes =
            plan.planes("x", &map(&[rule("a", Some("2..4"), "e8m3"), rule("a", Some("2..8"), "e8m0")]));
        assert_eq!(planes.unwrap(), [of(8, bf16, 16), of(8, bf16, 12), of(16, bf16, 9), of(4, fp32, 32)]);
        // A rule for all fetches less of what can give its view.
        let planes = plan.planes("x", &map(&[rule("*", None, "e8m10")])).unwrap();
        assert_eq!(planes, [of(32, bf16, 16), of(4, fp32, 19)]);
        let refused = |rules: &[MapRule]| plan.planes("x", &map(rules)).unwrap_err().to_string();
        assert!(refused(&[rule("nothing", None, "e8m3")]).contains("matches none"));
        assert!(refused(&[rule("a", Some("0..9"), "e8m3")]).contains("0..9"));
        assert!(refused(&[rule("a", None, "other")]).contains("other"));
    }
}
