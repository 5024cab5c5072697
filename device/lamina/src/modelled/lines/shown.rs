//! What the windows show: which tensor's bytes, in which view, lie behind a line.

use anyhow::{Context, Result};
use lamina_codec::view::View;
use lamina_device::tensor::TensorInfo;
use lamina_model::trace;
use serde_json::Value;

use super::places::Window;

/// A range of a window that is one tensor's, or a view of one.
struct Shown {
    window: Window,
    start: u64,
    end: u64,
    /// Where its tensor begins in the base window.
    base: u64,
    /// Its view, by number.
    view: usize,
}

/// All that the windows show.
pub(super) struct Map {
    /// By window and start.
    shown: Vec<Shown>,
    views: Vec<trace::View>,
}

impl Map {
    /// From what the device tells of tensors and views.
    pub(super) fn new(tensors: Value, views: &Value) -> Result<Self> {
        let tensors: Vec<TensorInfo> =
            serde_json::from_value(tensors).context("what the device tells of tensors")?;
        // What is no tensor's is bytes.
        let mut map = Self { shown: Vec::new(), views: vec![trace::View::full(8)] };
        for tensor in &tensors {
            let view = map.number(trace::View::full(tensor.format.bits()));
            let (start, end) = (tensor.dpa, tensor.dpa.saturating_add(tensor.length));
            map.shown.push(Shown { window: Window::Base, start, end, base: start, view });
        }
        for view in views.as_array().into_iter().flatten() {
            let tensor = tensors.iter().find(|tensor| view["tensor"] == *tensor.name);
            let place = view["offset"].as_u64().zip(view["length"].as_u64());
            let (Some(tensor), Some((start, length))) = (tensor, place) else { continue };
            let spelling = view["view"].as_str().unwrap_or_default();
            let shown = View::parse(tensor.format, spelling)
                .with_context(|| format!("the view {spelling:?} of {}", tensor.name))?;
            let number = map.number(said(spelling, &shown));
            let (end, base) = (start.saturating_add(length), tensor.dpa);
            map.shown.push(Shown { window: Window::Views, start, end, base, view: number });
        }
        map.shown.sort_by_key(|shown| (shown.window == Window::Views, shown.start));
        Ok(map)
    }

    /// The views, as a trace says them.
    pub(super) fn views(&self) -> &[trace::View] {
        &self.views
    }

    /// The bytes of the base window behind `length` bytes at `offset` of a window: where, how many,
    /// and the number of the view. None where the views window shows nothing, as in its directory.
    pub(super) fn behind(&self, window: Window, offset: u64, length: u64) -> Option<(u64, u64, u32)> {
        let key = |shown: &Shown| (shown.window == Window::Views, shown.start);
        let behind = self.shown.partition_point(|shown| key(shown) <= (window == Window::Views, offset));
        let found = behind.checked_sub(1).and_then(|at| self.shown.get(at));
        let found = found.filter(|shown| shown.window == window && offset < shown.end);
        let Some(shown) = found else {
            return (window == Window::Base).then_some((offset, length, 0));
        };
        let view = &self.views[shown.view];
        let scaled = |bytes: u64| u128::from(bytes) * u128::from(view.bits);
        let link = u128::from(view.link_bits);
        let within = offset - shown.start;
        let end = (within + length).min(shown.end - shown.start);
        let (from, to) = (scaled(within) / link, scaled(end).div_ceil(link));
        let from = u64::try_from(from).ok()?;
        let length = u64::try_from(to).ok()?.saturating_sub(from).max(1);
        Some((shown.base.checked_add(from)?, length, u32::try_from(shown.view).ok()?))
    }

    fn number(&mut self, view: trace::View) -> usize {
        self.views.iter().position(|known| *known == view).unwrap_or_else(|| {
            self.views.push(view);
            self.views.len() - 1
        })
    }
}

/// A view as a trace says it: planes are counted from the most significant on.
fn said(spelling: &str, view: &View) -> trace::View {
    let full = trace::View::full(view.format().bits());
    let planes = u64::from(view.mask().0.reverse_bits() >> (32 - full.bits)) & full.planes;
    trace::View { name: spelling.to_owned(), planes, link_bits: view.bits(), ..full }
}

#[cfg(test)]
mod tests {
    use lamina_codec::{Codec, format::Format};
    use lamina_device::layout::Layout;
    use serde_json::json;

    use super::*;

    fn map() -> Map {
        let tensor = |name: &str, dpa: u64, length: u64, format| TensorInfo {
            name: name.to_owned(),
            dpa,
            length,
            elements: 1,
            shape: Vec::new(),
            format,
            layout: Layout::Weight,
            codec: Codec::Tree,
            base: None,
        };
        let tensors = json!([tensor("a", 4096, 8192, Format::Bf16), tensor("b", 16384, 4096, Format::Fp32)]);
        let view = |tensor: &str, view: &str, offset: u64, length: u64| json!({ "tensor": tensor, "view": view, "offset": offset, "length": length });
        let views = json!([
            view("b", "e8m7", 65536, 4096),
            view("a", "e8m3:packed", 131_072, 6144),
            view("a", "e8m3", 262_144, 8192),
            view("gone", "full", 524_288, 64)
        ]);
        Map::new(tensors, &views).unwrap()
    }

    #[test]
    fn a_line_of_the_base_is_its_tensor_s_or_bytes() {
        let map = map();
        let named = |(at, length, view): (u64, u64, u32)| {
            let view = &map.views()[view as usize];
            (at, length, view.bits, view.name.as_str())
        };
        let base = |offset| named(map.behind(Window::Base, offset, 64).unwrap());
        assert_eq!(base(0), (0, 64, 8, "full"));
        assert_eq!(base(4096), (4096, 64, 16, "full"));
        assert_eq!(base(12_224), (12_224, 64, 16, "full"));
        assert_eq!(base(12_288), (12_288, 64, 8, "full"));
        assert_eq!(base(16_384), (16_384, 64, 32, "full"));
    }

    #[test]
    fn a_line_of_a_view_is_the_elements_that_it_shows() {
        let map = map();
        let views = |offset| map.behind(Window::Views, offset, 64);
        // The directory, and between views.
        assert_eq!(views(0), None);
        assert_eq!(views(131_072 + 6144), None);
        let (at, length, view) = views(262_144 + 128).unwrap();
        assert_eq!((at, length, map.views()[view as usize].planes), (4096 + 128, 64, 0xfff));
        // Twelve bits of sixteen: 64 bytes show 85 and a part.
        let (at, length, view) = views(131_072 + 64).unwrap();
        assert_eq!((at, length, map.views()[view as usize].link_bits), (4096 + 85, 86, 12));
        let (at, length, _) = views(65_536 + 4032).unwrap();
        assert_eq!((at, length), (16_384 + 4032, 64));
        // A view of what is gone is nobody's.
        assert_eq!(views(524_288), None);
    }
}
