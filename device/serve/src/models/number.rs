//! The numbers of inodes under `models/`: bit 62, then the model's number (20 bits), its entry (16)
//! and the precision (26). They mean the same to every process that serves the device.

use lamina_codec::format::Format;
use lamina_codec::view::Kind;
use lamina_device::files::{Manifest, Precision};

/// The folder `models` itself.
pub(crate) const MODELS: u64 = 1 << 62;

const ID_SHIFT: u32 = 42;
const ENTRY_SHIFT: u32 = 26;
const ID_BITS: u32 = 20;
const ENTRY_BITS: u32 = 16;
/// Where a precision's kind begins.
const KIND_SHIFT: u32 = 20;
/// The kind of truncated and rounded elements; the kinds of converted ones follow, in order.
const TOP: u64 = 1;
const TARGETS: [Format; 3] = [Format::Bf16, Format::Fp8E4m3fn, Format::Fp8E5m2];
/// The kind of maps.
const MAP: u64 = 5;
/// What is added to scale exponents, whose magnitude is at most this.
const SCALE_BIAS: i32 = 64;

/// Its model's number.
pub(super) fn model_of(inode: u64) -> u32 {
    u32::try_from(inode >> ID_SHIFT & ((1 << ID_BITS) - 1)).unwrap_or(0)
}

/// Its entry.
pub(super) fn entry_of(inode: u64) -> usize {
    usize::try_from(inode >> ENTRY_SHIFT & ((1 << ENTRY_BITS) - 1)).unwrap_or(0)
}

/// Its precision, as [`code`] has it.
pub(super) fn code_of(inode: u64) -> u64 {
    inode & ((1 << ENTRY_SHIFT) - 1)
}

/// The number of a model's entry at a precision.
pub(super) fn of(id: u32, entry: usize, code: u64) -> Option<u64> {
    let entry = u64::try_from(entry).ok().filter(|entry| *entry < 1 << ENTRY_BITS)?;
    Some(MODELS | u64::from(id) << ID_SHIFT | entry << ENTRY_SHIFT | code)
}

/// The number of a precision; 0 is none.
pub(super) fn code(manifest: &Manifest, precision: &Precision) -> Option<u64> {
    let small = |number: u32| (number < 32).then_some(u64::from(number));
    match precision {
        Precision::Map(name) => {
            let at = manifest.maps.keys().position(|map| map == name)?;
            Some(MAP << KIND_SHIFT | u64::try_from(at).ok().filter(|at| *at < 1 << KIND_SHIFT)?)
        }
        Precision::View(Kind::Top { exponent, exponent_guard, mantissa, guard, .. }, _) => {
            let kept = small(*exponent)? << 10 | small(*mantissa)? << 5;
            Some(TOP << KIND_SHIFT | small(*exponent_guard)? << 15 | kept | small(*guard)?)
        }
        Precision::View(Kind::Converted { target, guard, scale }, _) => {
            let at = TARGETS.iter().position(|format| format == target)? as u64;
            let scale = u64::try_from(scale.checked_add(SCALE_BIAS)?).ok().filter(|scale| *scale < 256)?;
            Some((TOP + 1 + at) << KIND_SHIFT | small(*guard)? << 8 | scale)
        }
        Precision::View(..) => None,
    }
}

/// The precision of a number; none is 0's, and none of what [`code`] does not give.
pub(super) fn precision(manifest: &Manifest, code: u64) -> Option<Precision> {
    let fields = code & ((1 << KIND_SHIFT) - 1);
    let field = |shift: u32, bits: u32| u32::try_from(fields >> shift & ((1 << bits) - 1)).unwrap_or(0);
    match code >> KIND_SHIFT {
        TOP => Precision::of_kind(Kind::Top {
            exponent: field(10, 5),
            exponent_guard: field(15, 5),
            mantissa: field(5, 5),
            guard: field(0, 5),
            packed: false,
        }),
        MAP => Some(Precision::Map(manifest.maps.keys().nth(usize::try_from(fields).ok()?)?.clone())),
        kind => {
            let target = *TARGETS.get(usize::try_from(kind.checked_sub(TOP + 1)?).ok()?)?;
            let scale = i32::try_from(field(0, 8)).unwrap_or(0) - SCALE_BIAS;
            Precision::of_kind(Kind::Converted { target, guard: field(8, 5), scale })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use lamina_device::files::PrecisionMap;

    use super::*;

    #[test]
    fn every_precision_has_a_number_that_says_which() {
        let maps = ["small", "x"].map(|name| (name.to_owned(), PrecisionMap::default()));
        let maps = BTreeMap::from(maps);
        let manifest =
            Manifest { name: "m".into(), id: 7, files: Vec::new(), views: Vec::new(), maps, base: None };
        let mut seen = std::collections::BTreeSet::new();
        for name in [
            "e8m3",
            "e8m0",
            "e0m0",
            "e8m23",
            "e8m3+g2",
            "e8m3+g20",
            "e4m3+d1",
            "e4m3+d2",
            "e6m3+d2+g3",
            "bf16",
            "bf16+g3",
            "fp8_e4m3fn",
            "fp8_e4m3fn+g4",
            "fp8_e4m3fn@3",
            "fp8_e5m2@-64",
            "fp8_e5m2+g5@64",
            "small",
            "x",
        ] {
            let requested = Precision::parse(name, &manifest.maps).unwrap();
            let code = code(&manifest, &requested).unwrap();
            assert!(code > 0 && code < 1 << ENTRY_SHIFT && seen.insert(code), "{name}");
            assert_eq!(precision(&manifest, code), Some(requested), "{name}");
            let inode = of(7, 65_535, code).unwrap();
            assert_eq!((model_of(inode), entry_of(inode), code_of(inode)), (7, 65_535, code));
        }
        assert_eq!(of(7, 65_536, 0), None);
        for none in [0, 6 << KIND_SHIFT, MAP << KIND_SHIFT | 2, (1 << ENTRY_SHIFT) - 1] {
            assert_eq!(precision(&manifest, none), None, "{none:#x}");
        }
        assert!(Precision::parse("e8m3:packed", &manifest.maps).is_none());
        for none in ["", "full", "int4", "e9m3", "e8m3+g2 ", "../e8m3"] {
            assert!(Precision::parse(none, &manifest.maps).is_none(), "{none}");
        }
    }
}
