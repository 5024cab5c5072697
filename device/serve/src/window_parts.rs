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
use lamina_device::tensor::{TensorError, TensorSpec};
#[cfg(doc)]
use lamina_files::PART;
use lamina_files::said_of_part;

use super::export::Export;
use super::files;
use super::ranges::place;

/// What the names of tensors of pools begin with. Behind it is where they begin.
const TENSOR: &str = "pool@";

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
/// views were that are gone is added to `views`.
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
    for tensor in partition.tensors() {
        let is_inside = tensor.dpa >= range.start && tensor.dpa + tensor.length <= range.end;
        if is_inside && tensor.name.starts_with(TENSOR) {
            let shown = partition.remove_tensor_now(&tensor.name)?;
            views.extend(shown.iter().map(place));
        }
    }
    let Some((format, layout)) = class else { return Ok(()) };
    partition.create_tensor_now(TensorSpec {
        layout,
        ..TensorSpec::new(
            format!("{TENSOR}{:#x}", range.start),
            Some(range.start),
            range.end - range.start,
            format,
        )
    })?;
    Ok(())
}
