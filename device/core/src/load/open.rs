//! Opening a checkpoint as its tensors are to lie on the device.

use std::path::Path;

use super::{LoadOptions, full_name};
use crate::device::Device;
use crate::model::{ModelError, ModelFile, ModelTensor};

/// Opens the checkpoint at `path`, to be loaded as `options` say: elements of six bits get a byte
/// each ([`ModelFile::spread`]), so that they have planes and views.
///
/// * Those of a tensor that a [rule](super::FormatRule) matches stay packed: it says what their
///   bytes are.
/// * So do those that `device` holds packed, since an earlier program loaded them: the checkpoint
///   is compared with what is there.
///
/// # Errors
///
/// As [`ModelFile::open`].
pub fn open(path: &Path, options: &LoadOptions, device: Option<&Device>) -> Result<ModelFile, ModelError> {
    let held = |tensor: &ModelTensor| device?.place_of(&full_name(&tensor.name, options));
    let is_spread = |tensor: &ModelTensor| match held(tensor) {
        Some((_, length)) if !options.replace => length != tensor.length,
        _ => !options.formats.iter().any(|rule| rule.pattern.matches(&tensor.name)),
    };
    Ok(ModelFile::open(path)?.spread_where(is_spread))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::ops::ControlFlow;
    use std::sync::Arc;

    use lamina_codec::format::Format;
    use lamina_codec::testing::bytes;
    use lamina_reference::{Format as Slow, Scales, expanded};
    use lamina_store::image::Image;

    use super::*;
    use crate::device::DeviceConfig;
    use crate::files::{FileLayout, Model, Precision, held, keep_checkpoint};
    use crate::load::tests::checkpoint;
    use crate::load::{Decision, carry_out, decide};
    use crate::model::sixes::tests::slow;

    /// MXFP6 of three blocks of the device, in the file.
    const PACKED: usize = 3 * 3072;

    fn mxfp6() -> (tempfile::NamedTempFile, Vec<u8>) {
        let scales: Vec<u8> = (0..384).map(|at| [127, 0, 255, 120, 254][at % 5]).collect();
        let tensors = [
            ("l.weight", "F6_E3M2", &[12, 1024][..], bytes(3, PACKED)),
            ("l.weight_scale", "U8", &[12, 32], scales.clone()),
        ];
        (checkpoint(&tensors).0, scales)
    }

    /// One that notes what its tensors were loaded from.
    fn device() -> Device {
        let config = DeviceConfig::new(16 << 20, 16 << 20);
        Device::open(Image::in_memory(config.superblock()).unwrap(), &config).unwrap()
    }

    /// Starts a device with the file, which is opened as it is or for the device.
    fn start(device: &Device, path: &Path, options: &LoadOptions, as_it_is: bool) -> Decision {
        let file = if as_it_is { ModelFile::open(path) } else { open(path, options, Some(device)) };
        let loads = [(file.unwrap(), options.clone())];
        let decision = decide(device, &loads, |_| ControlFlow::Continue(())).unwrap().remove(0);
        let [(file, options)] = &loads;
        carry_out(device, file, options, decision.clone(), |_| ControlFlow::Continue(())).unwrap();
        keep_checkpoint(device, file, options, "m", None).unwrap();
        decision
    }

    fn shown(device: &Device, model: &Model, precision: &str) -> Option<Vec<u8>> {
        let file = &model.manifest.files[0];
        let layout = match precision {
            "full" => FileLayout::new(device, model, file),
            precision => {
                let precision = Precision::parse(precision, &BTreeMap::new()).unwrap();
                FileLayout::at(device, model, file, &precision, &Arc::default())
            }
        };
        let layout = layout.ok()?;
        let mut bytes = vec![0xa5; usize::try_from(layout.bytes()).unwrap()];
        layout.read(device, 0, &mut bytes).unwrap();
        Some(bytes)
    }

    #[test]
    fn six_bits_have_planes_and_the_file_is_shown_as_that_of_a_model() {
        let ((file, scales), device) = (mxfp6(), device());
        let options = LoadOptions { views: vec!["e2m1".to_owned()], ..LoadOptions::default() };
        assert!(matches!(start(&device, file.path(), &options, false), Decision::Load { .. }));
        let info = device.tensor("l.weight").unwrap();
        assert_eq!(
            (info.format, info.length, &info.shape[..]),
            (Format::Fp6E3m2, 12 * 1024, &[12, 1024][..])
        );
        let elements = slow(&bytes(3, PACKED));
        let mut there = vec![0; elements.len()];
        device.read_base(info.dpa, &mut there).unwrap();
        assert!(there == elements);
        assert!(device.view_of("l.weight", "e2m1").is_ok());
        // The image says so, and the file is to the bit, whole and put together.
        assert!(matches!(start(&device, file.path(), &options, false), Decision::Keep { .. }));
        let [model] = &held(&device)[..] else { panic!("one model") };
        assert!(shown(&device, model, "full").unwrap() == std::fs::read(file.path()).unwrap());
        let want = expanded(Slow::Fp6E3m2, &elements, 12 * 1024, 32, Scales::Powers(&scales));
        assert!(shown(&device, model, "bf16").unwrap().ends_with(&want));
        // Gone by itself, it takes its model with it.
        device.remove_tensor("l.weight").unwrap();
        assert!(held(&device).is_empty());
    }

    #[test]
    fn what_a_rule_speaks_of_lies_as_in_the_file() {
        let ((file, _), device) = (mxfp6(), device());
        let options =
            LoadOptions { formats: vec!["*.weight=opaque".parse().unwrap()], ..LoadOptions::default() };
        start(&device, file.path(), &options, false);
        let info = device.tensor("l.weight").unwrap();
        assert_eq!((info.format, info.length), (Format::Opaque, PACKED as u64));
        let mut there = vec![0; PACKED];
        device.read_base(info.dpa, &mut there).unwrap();
        assert!(there == bytes(3, PACKED));
    }

    #[test]
    fn what_an_earlier_program_loaded_packed_is_known_again_and_stays_so_until_it_is_replaced() {
        let ((file, _), device) = (mxfp6(), device());
        let options = LoadOptions::default();
        start(&device, file.path(), &options, true);
        assert!(matches!(start(&device, file.path(), &options, false), Decision::Keep { .. }));
        let [model] = &held(&device)[..] else { panic!("one model") };
        assert!(shown(&device, model, "full").unwrap() == std::fs::read(file.path()).unwrap());
        // Its elements are bytes: nothing can be put together, or cut.
        assert!(shown(&device, model, "bf16").is_none() && shown(&device, model, "e2m1").is_none());
        let options = LoadOptions { replace: true, ..options };
        assert!(matches!(start(&device, file.path(), &options, false), Decision::Load { .. }));
        assert_eq!(device.tensor("l.weight").unwrap().format, Format::Fp6E3m2);
    }
}
