//! Parts of a window `base` that are of a class: chunks of a pool.
//!
//! * They are said by the attribute by which parts of files are ([`PART`]), so whoever has the
//!   file needs nothing else. Of each the device has a tensor, of which readers take views.
//! * A part of no class has none. What lies in a tensor of a pool that was made with a class stays
//!   what that is.
//! * A worker does it, and the kernel holds a lock of the file meanwhile, which writing back by
//!   `msync` takes too. So it waits for nothing of the kernel's: pages of the directory, and of
//!   views that go, are dropped soon after. Nor for who may wait for the kernel: what lies in a
//!   tensor that comes or goes is EBUSY, to be said again.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use lamina_abi::DIRECTORY_BYTES;
use lamina_codec::format::Format;
use lamina_device::device::{DeviceError, Partition};
use lamina_device::layout::Layout;
use lamina_device::tensor::{TensorError, TensorInfo, TensorSpec};
use lamina_device::window::ViewInfo;
#[cfg(doc)]
use lamina_files::PART;
use lamina_files::said_of_part;

use super::export::Export;
use super::files;
use super::ranges::place;

/// What the names of tensors of pools begin with. Behind it is where they begin.
pub(super) const TENSOR: &str = "pool@";

/// Has a part of an export's window be of a class from now on, as the value of [`PART`] says. The
/// other exports may show the same.
pub(super) fn set_class(export: &Export, exports: &[Arc<Export>], value: &[u8]) -> io::Result<()> {
    let (range, class) = said_of_part(value).map_err(|why| files::said(&why))?;
    let partition = export.partition();
    if range.end > partition.base_bytes() {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    let mut views = Vec::new();
    let done = change(partition, &range, class, &mut views);
    let shown = exports.iter().filter(|other| other.partition().base() == partition.base());
    for other in shown {
        other.coherence().drop_views_soon(std::iter::once(0..DIRECTORY_BYTES).chain(views.iter().cloned()));
    }
    done.map_err(|why| {
        let number = match &why {
            DeviceError::Tensor(TensorError::Overlap { .. } | TensorError::Exists { .. }) => libc::EEXIST,
            DeviceError::Tensor(_) => libc::EINVAL,
            DeviceError::Busy { .. } => libc::EBUSY,
            why if why.is_no_room() => libc::ENOSPC,
            why => {
                tracing::error!("a part of a window cannot be of a class: {why}");
                libc::EIO
            }
        };
        io::Error::from_raw_os_error(number)
    })
}

/// Removes the tensors of pools that lie in a range, and makes one of it if it is of a class. Where
/// views were that are gone is added to `views`. If that cannot be, what was removed comes back.
fn change(
    partition: &Partition,
    range: &Range<u64>,
    class: Option<(Format, Layout)>,
    views: &mut Vec<Range<u64>>,
) -> Result<(), DeviceError> {
    if range.is_empty() {
        // Only whether that can be was asked.
        return Ok(());
    }
    let mut inside = partition.tensors();
    inside.retain(|tensor| {
        let is_inside = tensor.dpa >= range.start && tensor.dpa + tensor.length <= range.end;
        is_inside && tensor.name.starts_with(TENSOR)
    });
    let wanted = class.map(|(format, layout)| {
        let name = format!("{TENSOR}{:#x}", range.start);
        let spec = TensorSpec::new(name, Some(range.start), range.end - range.start, format);
        TensorSpec { layout, ..spec }
    });
    if let Some(wanted) = &wanted {
        // What was removed comes back with its views elsewhere, perhaps, and not if the process
        // dies before.
        let names: Vec<_> = inside.iter().map(|tensor| tensor.name.clone()).collect();
        partition.may_replace(&names, wanted.clone())?;
    }
    let mut removed = Vec::with_capacity(inside.len());
    let done = inside.into_iter().try_for_each(|tensor| {
        let shown = partition.remove_tensor_now(&tensor.name)?;
        views.extend(shown.iter().map(place));
        removed.push((tensor, shown));
        Ok(())
    });
    let done = done.and_then(|()| match wanted {
        Some(wanted) => partition.create_tensor_now(wanted).map(drop),
        None => Ok(()),
    });
    if done.is_err() {
        for (tensor, shown) in removed {
            let name = tensor.name.clone();
            if let Err(why) = make_again(partition, tensor, &shown) {
                tracing::warn!("{name}, which was to be another part, is gone: {why}");
            }
        }
    }
    done
}

/// Makes a tensor that was removed, and its views.
fn make_again(partition: &Partition, tensor: TensorInfo, views: &[ViewInfo]) -> Result<(), DeviceError> {
    let TensorInfo { name, dpa, length, elements, shape, format, layout, codec, base } = tensor;
    partition.create_tensor_now(TensorSpec {
        name: name.clone(),
        dpa: Some(dpa),
        length,
        elements: Some(elements),
        shape,
        format,
        layout,
        codec: Some(codec),
        base,
    })?;
    views.iter().try_for_each(|view| partition.create_view(&name, &view.view).map(drop))
}

#[cfg(test)]
mod tests {
    use lamina_device::device::{Device, DeviceConfig};

    use super::*;

    const BF16: Option<(Format, Layout)> = Some((Format::Bf16, Layout::Weight));

    fn partition() -> Partition {
        Partition::first(Arc::new(Device::new(DeviceConfig::new(16 << 20, 16 << 20)).unwrap()))
    }

    #[test]
    fn a_class_that_is_refused_leaves_the_parts_and_their_views() {
        let partition = partition();
        let mut gone = Vec::new();
        change(&partition, &(0..65536), BF16, &mut gone).unwrap();
        partition.create_view("pool@0x0", "e8m3").unwrap();
        partition.create_tensor(TensorSpec::new("t", Some(131_072), 4096, Format::Bf16)).unwrap();
        let there = (partition.tensors(), partition.views());
        for range in [0..262_144, 0..131_073, 0..65537] {
            let refused = change(&partition, &range, BF16, &mut gone);
            assert!(matches!(refused, Err(DeviceError::Tensor(_))), "{range:?}: {refused:?}");
            assert_eq!(
                (partition.tensors(), partition.views(), gone.len()),
                (there.0.clone(), there.1.clone(), 0)
            );
        }
        change(&partition, &(0..131_072), BF16, &mut gone).unwrap();
        assert_eq!((partition.tensors()[0].length, partition.views().len(), gone.len()), (131_072, 0, 1));
    }

    #[test]
    fn parts_that_were_removed_when_the_next_one_could_not_be_come_back() {
        let partition = partition();
        let mut gone = Vec::new();
        for at in [0, 65536] {
            change(&partition, &(at..at + 65536), BF16, &mut gone).unwrap();
            partition.write_base(at, &vec![7; 65536]).unwrap();
        }
        let view = partition.create_view("pool@0x0", "e8m3").unwrap();
        let derived = TensorSpec::new("derived", Some(1 << 20), 65536, Format::Bf16);
        partition.create_tensor(TensorSpec { base: Some("pool@0x10000".to_owned()), ..derived }).unwrap();
        let there = (partition.tensors(), partition.views());
        change(&partition, &(0..131_072), None, &mut gone).unwrap_err();
        assert_eq!((partition.tensors(), partition.views(), gone), (there.0, there.1, vec![place(&view)]));
        let mut found = vec![0; 131_072];
        partition.read_base(0, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == 7));
    }
}
