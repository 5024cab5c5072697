//! A tensor of six-bit elements that lies on the device with one in a byte, shown as its file has
//! it: four in three bytes.

use std::sync::Arc;

use crate::device::{Device, DeviceError, TensorView};
use crate::model::sixes::{BYTES, ELEMENTS, elements, gather};

/// A tensor, ready to be packed.
pub(super) struct Packed {
    view: Arc<TensorView>,
}

impl Packed {
    /// What a view of a tensor makes, if that has a byte for each of the elements in `bytes`.
    pub(super) fn new(view: TensorView, bytes: u64) -> Option<Self> {
        (elements(bytes) == Some(view.bytes())).then(|| Self { view: Arc::new(view) })
    }

    /// Fills `out` with the tensor's bytes from `from` on.
    ///
    /// # Errors
    ///
    /// As [`Device::read_view_of`].
    pub(super) fn read(&self, device: &Device, from: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let group = BYTES as u64;
        let inside = usize::try_from(from % group).expect("fewer than three");
        let groups = (inside + out.len()).div_ceil(BYTES);
        let (mut elements, mut packed) = (vec![0; groups * ELEMENTS], vec![0; groups * BYTES]);
        device.read_view_of(&self.view, from / group * ELEMENTS as u64, &mut elements)?;
        gather(&elements, &mut packed);
        out.copy_from_slice(&packed[inside..][..out.len()]);
        Ok(())
    }

    /// The view of its elements.
    pub(super) fn view(&self) -> &Arc<TensorView> {
        &self.view
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use lamina_codec::format::Format;
    use lamina_codec::testing::bytes;
    use lamina_codec::view::View;
    use lamina_reference::view_bytes;

    use super::super::expand::tests::{Tensor, at, held, loaded, tensors, whole};
    use super::super::{FileLayout, Loading, MapRule, Precision, PrecisionMap};
    use super::*;
    use crate::load::tests::checkpoint;
    use crate::model::sixes::tests::slow;

    /// Elements of three blocks and some, of a group, and of none, between tensors of odd lengths.
    fn all() -> [Tensor<'static>; 6] {
        [
            ("a", "U8", &[3], bytes(1, 3)),
            ("b", "F6_E2M3", &[3, 5004], bytes(5, 3 * 3753)),
            ("c", "F6_E3M2", &[4], vec![0xff; 3]),
            ("d", "U8", &[1], vec![7]),
            ("e", "F6_E3M2", &[2500, 2], bytes(4, 3750)),
            ("f", "F6_E3M2", &[0, 2], Vec::new()),
        ]
    }

    /// The elements one bit at a time, as a view of them, and so packed again.
    fn masked(format: &str, spelling: &str, packed: &[u8]) -> Vec<u8> {
        let elements = slow(packed);
        let format = format.parse().unwrap();
        let shown = view_bytes(format, spelling, &elements, elements.len() as u64).unwrap();
        let bit = |at: usize| shown[at / 6] >> (at % 6) & 1;
        (0..packed.len()).map(|byte| (0..8).map(|k| bit(byte * 8 + k) << k).sum()).collect()
    }

    #[test]
    fn packed_elements_lie_in_a_byte_each_and_come_back_to_the_bit() {
        let all = all();
        let (device, model) = held(&all);
        let file = std::fs::read(checkpoint(&all).0.path()).unwrap();
        let layout = FileLayout::new(&device, &model, &model.manifest.files[0]).unwrap();
        assert!(whole(&device, &layout) == file);
        for (name, dtype, _, packed) in &all[1..5] {
            let info = device.tensor(&format!("m/{name}")).unwrap();
            if *dtype == "U8" {
                continue;
            }
            let wanted = if *dtype == "F6_E2M3" { Format::Fp6E2m3 } else { Format::Fp6E3m2 };
            assert_eq!((info.format, info.length), (wanted, packed.len() as u64 / 3 * 4));
            let mut elements = vec![0; usize::try_from(info.length).unwrap()];
            device.read_base(info.dpa, &mut elements).unwrap();
            assert!(elements == slow(packed), "{name}");
        }
        // Any part of the file is that part, wherever in three bytes it begins and ends.
        for from in (0..file.len()).step_by(241).chain(file.len() - 40..file.len()) {
            for length in [1, 2, 3, 4, 5, 100, 4096, 12_289] {
                let mut part = vec![0xa5; length.min(file.len() - from)];
                layout.read(&device, from as u64, &mut part).unwrap();
                assert!(part == file[from..from + part.len()], "{length} bytes at {from}");
            }
        }
        // In planes it takes no more than in the file, but for blocks that it does not fill.
        let (stored, bytes) = (layout.stored(&device).unwrap(), layout.bytes());
        assert!(stored > 0 && stored < bytes + 4096 && layout.charged() > 0, "{stored} of {bytes}");
        assert!(layout.traffic().bytes > 0);
    }

    #[test]
    fn packed_elements_are_shown_at_precisions_and_packed() {
        let all = all();
        let (device, model) = held(&all);
        for (spelling, given) in [("e2m2", 3), ("e2m1+g1", 1), ("e1m2+d2", 2), ("e1m1+d1+g1", 1), ("e3m0", 2)]
        {
            let layout = at(&device, &model, spelling);
            assert_eq!(layout.shown(), (given, 5 - given), "{spelling}");
            let shown = tensors(&whole(&device, &layout));
            for (name, dtype, shape, packed) in &all {
                let format = if *dtype == "F6_E2M3" { "fp6_e2m3" } else { "fp6_e3m2" };
                let has = *dtype != "U8" && View::parse(format.parse().unwrap(), spelling).is_ok();
                let want = if has { masked(format, spelling, packed) } else { packed.clone() };
                let shape: Vec<_> = shape.iter().map(|n| usize::try_from(*n).unwrap()).collect();
                assert!(shown[*name] == ((*dtype).to_owned(), shape, want), "{name} at {spelling}");
            }
        }
    }

    #[test]
    fn a_map_shows_all_of_a_packed_tensor_or_leaves_it_full() {
        let rule = |name: &str, rows: Option<&str>, view: &str| MapRule {
            name: name.to_owned(),
            rows: rows.map(str::to_owned),
            experts: Vec::new(),
            view: view.to_owned(),
        };
        let rules = vec![rule("b", None, "e2m1"), rule("e", Some("0..7"), "e2m1")];
        let loading = Loading {
            views: vec!["e2m0".to_owned()],
            maps: BTreeMap::from([("map".to_owned(), PrecisionMap { rules })]),
            base: None,
        };
        let all = all();
        let (device, model) = loaded(&all, &loading).unwrap();
        let map = Precision::Map("map".to_owned());
        let file = &model.manifest.files[0];
        let layout = FileLayout::at(&device, &model, file, &map, &Arc::default()).unwrap();
        let shown = tensors(&whole(&device, &layout));
        assert_eq!(layout.shown(), (1, 4));
        assert!(shown["b"].2 == masked("fp6_e2m3", "e2m1", &all[1].3) && shown["e"].2 == all[4].3);
        // What no tensor of it has is refused beforehand.
        let loading = Loading { views: vec!["e4m0".to_owned()], ..Loading::default() };
        assert!(loaded(&all, &loading).is_err());
    }
}
