//! The figures of an analysis, as they are printed and as `--json` gives them.
//!
//! `plane_ratios` begin with the most significant plane and `planes` names them in the same order:
//! `s`, then `e7` to `e0`, then `m6` to `m0`; value bits of integers are `v`, and bits of a byte
//! above a float of six are `z`. Numbers are rounded to six places.

use std::collections::BTreeMap;

use serde::Serialize;

use super::layers::KvReport;
use super::rounding::GROUP;
use super::scaled::{self, ScaledReport};
use super::tally::{Coded, Tally, Windows};
use super::work::{Rounded, Subject, Sums, WORD_CODECS};
use crate::layout::Layout;
use crate::model::ModelFile;
use lamina_codec::Codec;
use lamina_codec::format::Format;
use lamina_codec::kv::KvLayout;

/// All figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Every tensor, in the order of files and bytes.
    pub tensors: Vec<TensorReport>,
    /// All tensors together.
    pub total: TotalReport,
    /// The block-scaled tensors, scheme by scheme.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scaled: Vec<ScaledReport>,
    /// What looks like a block-scaled tensor and is none: a line each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
    /// The KV caches layer by layer, if they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv: Option<KvReport>,
}

/// The figures of a tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorReport {
    /// The file it is in.
    pub file: String,
    /// Its name.
    pub name: String,
    /// Its format.
    pub format: Format,
    /// What it was taken for.
    pub layout: Layout,
    /// Its planes.
    #[serde(flatten)]
    pub figures: Figures,
    /// Ratios of lz4 and zstd over words.
    pub word_major: BTreeMap<&'static str, Option<f64>>,
    /// After rounding; only for fp32, fp16 and bf16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rounded: Option<RoundedReport>,
}

/// The figures of all tensors.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TotalReport {
    /// Bytes before coding.
    pub logical_bytes: u64,
    /// By codec.
    pub codecs: BTreeMap<&'static str, TotalCodec>,
    /// The ratio that the limits of all tensors give together; opaque bytes count as they are.
    pub entropy_limit: Option<f64>,
    /// Ratios of lz4 and zstd over words.
    pub word_major: BTreeMap<&'static str, Option<f64>>,
    /// The tensors of each format together, planes and all.
    pub formats: Vec<FormatReport>,
    /// All rounded tensors together, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rounded: Option<RoundedReport>,
}

/// What a codec makes of all tensors.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TotalCodec {
    /// Bytes before to bytes after.
    pub ratio: Option<f64>,
    /// Bytes after.
    pub stored_bytes: u64,
    /// The ratio as a part of the limit's; more than 1 beyond it.
    pub of_limit: Option<f64>,
}

/// The figures of the tensors of a format.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FormatReport {
    /// The format.
    pub name: Format,
    /// Its planes.
    #[serde(flatten)]
    pub figures: Figures,
}

/// The figures of rounded values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoundedReport {
    /// As `fp8_e4m3fn`.
    pub fp8: Figures,
    /// The exponent of the power of two by which fp8 values are divided; a tensor's own, so none in
    /// the total.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fp8_scale_exp: Option<i32>,
    /// As int4.
    pub int4: Figures,
    /// Elements that share an int4 scale.
    pub int4_group: usize,
}

/// The figures of blocks of one format.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Elements.
    pub elements: u64,
    /// Bytes before coding.
    pub logical_bytes: u64,
    /// The ratio at which only sign, mantissa and the exponent's entropy are stored.
    pub entropy_limit: Option<f64>,
    /// Names of the planes, most significant first; none of opaque bytes.
    pub planes: Vec<String>,
    /// By codec.
    pub codecs: BTreeMap<&'static str, CodecReport>,
}

/// What a codec makes of blocks of one format.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CodecReport {
    /// Bytes before to bytes after.
    pub ratio: Option<f64>,
    /// The same of each plane, most significant first.
    pub plane_ratios: Vec<Option<f64>>,
    /// Bytes after.
    pub stored_bytes: u64,
    /// The ratio as a part of the limit's; more than 1 beyond it.
    pub of_limit: Option<f64>,
    /// The part of the bytes before coding that is saved.
    pub savings: Option<f64>,
    /// The part that is saved of what as many elements take in bf16; not for opaque bytes and fp32.
    pub savings_vs_bf16: Option<f64>,
    /// How the windows of KV caches were coded; only where there are some.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub windows: Option<WindowsReport>,
}

/// How the windows of KV caches were coded, each in the way that takes least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WindowsReport {
    /// Windows coded in address order, as weights are.
    pub plain: u64,
    /// Windows coded channel by channel.
    pub channels: u64,
    /// Windows coded channel by channel, exponents as differences: the paper's pipeline.
    pub deltas: u64,
    /// Rows left out because they repeat an earlier one of their window.
    pub repeated_rows: u64,
}

impl WindowsReport {
    fn new(windows: &Windows) -> Option<Self> {
        let [plain, channels, deltas] = windows.coded;
        let some = plain + channels + deltas > 0;
        some.then_some(Self { plain, channels, deltas, repeated_rows: windows.repeated_rows })
    }
}

impl Report {
    pub(super) fn new(
        models: &[ModelFile],
        subjects: &[Subject<'_>],
        sums: &[Sums],
        codecs: &[Codec],
        kv: Option<KvLayout>,
    ) -> Self {
        let tensors: Vec<_> = subjects
            .iter()
            .zip(sums)
            .map(|(subject, sums)| TensorReport {
                file: subject.model.path().display().to_string(),
                name: subject.tensor.name.clone(),
                format: sums.own.format,
                layout: subject.layout,
                figures: Figures::new(&sums.own),
                word_major: word_major(sums.own.logical_bytes, sums.words),
                rounded: sums.rounded.as_ref().map(|rounded| RoundedReport::new(rounded, true)),
            })
            .collect();
        let kv = kv.map(|layout| KvReport::new(layout, &tensors));
        let scaled = scaled::reports(models, subjects, sums, codecs);
        let remarks = models.iter().flat_map(|model| {
            let path = model.path().display();
            model.remarks().iter().map(move |remark| format!("{path}: {remark}"))
        });
        let (remarks, total) = (remarks.collect(), TotalReport::new(sums, codecs));
        Self { tensors, total, scaled, remarks, kv }
    }
}

impl TotalReport {
    fn new(sums: &[Sums], codecs: &[Codec]) -> Self {
        let owns = || sums.iter().map(|sums| &sums.own);
        let logical_bytes = owns().map(|own| own.logical_bytes).sum();
        let limit = ratio(logical_bytes, owns().map(|own| own.limit_bits).sum::<f64>() / 8.0);
        let codecs = codecs.iter().enumerate().map(|(index, codec)| {
            let stored_bytes = owns().map(|own| own.coded[index].stored_bytes).sum();
            let ratio = ratio(logical_bytes, float(stored_bytes));
            (codec.name(), TotalCodec { ratio: short(ratio), stored_bytes, of_limit: of(ratio, limit) })
        });
        let formats = Format::ALL.into_iter().filter_map(|format| {
            let mut ours = owns().filter(|own| own.format == format && own.elements > 0);
            let mut all = ours.next()?.clone();
            ours.for_each(|own| all.add(own));
            Some(FormatReport { name: format, figures: Figures::new(&all) })
        });
        let mut rounded = sums.iter().filter_map(|sums| sums.rounded.as_ref());
        let rounded = rounded.next().map(|first| {
            let mut all = first.clone();
            rounded.for_each(|rounded| {
                all.fp8.add(&rounded.fp8);
                all.int4.add(&rounded.int4);
            });
            RoundedReport::new(&all, false)
        });
        let words = sums.iter().fold([0; 2], |[a, b], sums| [a + sums.words[0], b + sums.words[1]]);
        Self {
            logical_bytes,
            codecs: codecs.collect(),
            entropy_limit: short(limit),
            word_major: word_major(logical_bytes, words),
            formats: formats.collect(),
            rounded,
        }
    }
}

impl RoundedReport {
    fn new(rounded: &Rounded, one: bool) -> Self {
        Self {
            fp8: Figures::new(&rounded.fp8),
            fp8_scale_exp: one.then_some(rounded.scale_exp),
            int4: Figures::new(&rounded.int4),
            int4_group: GROUP,
        }
    }
}

impl Figures {
    fn new(tally: &Tally) -> Self {
        let limit = ratio(tally.logical_bytes, tally.limit_bits / 8.0);
        // For opaque bytes it is nothing but their number.
        let limit = limit.filter(|_| tally.format != Format::Opaque);
        let report = |coded: &Coded| {
            let (stored, planes) = (float(coded.stored_bytes), tally.format.planes());
            let plane_bytes = float(tally.elements) / 8.0;
            let of_plane = |stored: &f64| (*stored > 0.0).then_some(plane_bytes / *stored);
            let overall = ratio(tally.logical_bytes, stored);
            let saved = |of: u64| (of > 0).then(|| 1.0 - stored / float(of));
            let bf16_bytes =
                if tally.format == Format::Opaque { 0 } else { tally.elements.saturating_mul(2) };
            CodecReport {
                ratio: short(overall),
                plane_ratios: coded.planes[..planes].iter().rev().map(of_plane).map(short).collect(),
                stored_bytes: coded.stored_bytes,
                of_limit: of(overall, limit),
                savings: short(saved(tally.logical_bytes)),
                savings_vs_bf16: short(saved(bf16_bytes)),
                windows: WindowsReport::new(&coded.windows),
            }
        };
        Self {
            elements: tally.elements,
            logical_bytes: tally.logical_bytes,
            entropy_limit: short(limit),
            planes: plane_names(tally.format),
            codecs: tally.coded.iter().map(|coded| (coded.codec.name(), report(coded))).collect(),
        }
    }
}

/// Names of a format's planes, most significant first.
fn plane_names(format: Format) -> Vec<String> {
    let planes = u32::try_from(format.planes()).expect("at most 32");
    if planes == 0 {
        return Vec::new();
    }
    let all_exponent = format.exponent_bits() == planes;
    let sign = format.sign_plane().unwrap_or(if all_exponent { planes } else { planes - 1 });
    let name = |plane: u32| match plane {
        plane if plane == sign => "s".to_owned(),
        // Above the sign of a float that does not fill its byte.
        zero if zero > sign => format!("z{zero}"),
        value if !format.is_float() && !all_exponent => format!("v{value}"),
        mantissa if mantissa < format.mantissa_bits() => format!("m{mantissa}"),
        exponent => format!("e{}", exponent - format.mantissa_bits()),
    };
    (0..planes).rev().map(name).collect()
}

fn word_major(logical_bytes: u64, stored: [u64; 2]) -> BTreeMap<&'static str, Option<f64>> {
    let ratios = stored.map(|stored| short(ratio(logical_bytes, float(stored))));
    WORD_CODECS.into_iter().map(Codec::name).zip(ratios).collect()
}

pub(super) fn ratio(before: u64, after: f64) -> Option<f64> {
    (before > 0 && after > 0.0).then(|| float(before) / after)
}

fn of(ratio: Option<f64>, limit: Option<f64>) -> Option<f64> {
    short(Some(ratio? / limit?))
}

/// Six places, so that the order in which threads add up does not show.
pub(super) fn short(number: Option<f64>) -> Option<f64> {
    number.map(|number| (number * 1e6).round() / 1e6)
}

#[expect(clippy::cast_precision_loss, reason = "exact up to 8 PiB, and a ratio needs no more")]
pub(super) fn float(count: u64) -> f64 {
    count as f64
}
