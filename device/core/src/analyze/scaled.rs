//! Block-scaled tensors: what a value takes, elements and scales together.

use std::collections::BTreeMap;

use serde::Serialize;

use super::report::{float, short};
use super::work::{Subject, Sums};
use crate::model::{ModelFile, Scheme, scaled};
use lamina_codec::Codec;

/// The block-scaled tensors of one scheme.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ScaledReport {
    /// `mxfp4`, `mxfp6`, `mxfp8`, `nvfp4`, `gptq` or `awq`.
    pub scheme: &'static str,
    /// How many there are.
    pub tensors: u64,
    /// Their values.
    pub values: u64,
    /// Bytes of their elements.
    pub element_bytes: u64,
    /// Bytes of their scales, and of zeros and factors.
    pub scale_bytes: u64,
    /// Bits that a value takes, all counted, before coding.
    pub bits: Option<f64>,
    /// And by codec.
    pub codecs: BTreeMap<&'static str, Option<f64>>,
}

/// The block-scaled tensors among the subjects, scheme by scheme.
pub(super) fn reports(
    models: &[ModelFile],
    subjects: &[Subject<'_>],
    sums: &[Sums],
    codecs: &[Codec],
) -> Vec<ScaledReport> {
    let mut found: BTreeMap<&str, (ScaledReport, Vec<u64>)> = BTreeMap::new();
    let mut before = 0;
    for model in models {
        for scaled in scaled::find(model.tensors()).0 {
            let scheme = scaled.scheme.name();
            let (report, stored) = found.entry(scheme).or_insert_with(|| {
                (ScaledReport { scheme, ..ScaledReport::default() }, vec![0; codecs.len()])
            });
            report.tensors += 1;
            let elements = subjects[before + scaled.elements].tensor;
            report.values += match scaled.scheme {
                // As many as the shape says, which the header was held against.
                Scheme::Mxfp6 | Scheme::Mxfp8 => elements.shape.iter().product(),
                Scheme::Mxfp4 | Scheme::Nvfp4 | Scheme::Gptq | Scheme::Awq => 2 * elements.length,
            };
            for part in scaled.parts() {
                let bytes = subjects[before + part].tensor.file_length();
                let sum =
                    if part == scaled.elements { &mut report.element_bytes } else { &mut report.scale_bytes };
                *sum += bytes;
                for (stored, coded) in stored.iter_mut().zip(&sums[before + part].own.coded) {
                    *stored += coded.stored_bytes;
                }
            }
        }
        before += model.tensors().len();
    }
    let finished = found.into_values().map(|(mut report, stored)| {
        let bits = |bytes: u64| (report.values > 0).then(|| 8.0 * float(bytes) / float(report.values));
        report.bits = short(bits(report.element_bytes + report.scale_bytes));
        let of = codecs.iter().zip(&stored);
        report.codecs = of.map(|(codec, stored)| (codec.name(), short(bits(*stored)))).collect();
        report
    });
    finished.collect()
}
