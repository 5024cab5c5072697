//! A disk: which bytes of the device, or of a guest's partition, it shows, and what may be done to
//! them.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::control::{Control, ControlError};
use crate::disks::{DiskInfo, Partition, ServedDisk, Shows};
use lamina_device::window::ViewInfo;

use super::config::{SECTOR, SERIAL_BYTES};
use super::partitions::{self, MARGIN};

/// A disk that is being served.
pub struct Disk {
    control: Control,
    shows: Shown,
    bytes: u64,
    serial: String,
    socket: PathBuf,
    connected: AtomicBool,
    /// Requests that made their handler panic.
    panics: AtomicU64,
}

/// What a disk shows, found.
enum Shown {
    Base,
    Views,
    View(ViewInfo),
}

impl ServedDisk for Disk {
    fn info(&self) -> DiskInfo {
        let partitions = match &self.shows {
            Shown::Views => self.partitions(),
            Shown::Base | Shown::View(_) => Vec::new(),
        };
        DiskInfo {
            serial: self.serial.clone(),
            socket: self.socket.clone(),
            shows: match &self.shows {
                Shown::Base => Shows::Base,
                Shown::Views => Shows::Views,
                Shown::View(view) => Shows::View { tensor: view.tensor.clone(), view: view.view.clone() },
            },
            guest: self.control.place().map(|place| place.name().to_owned()),
            gone: matches!(&self.shows, Shown::View(view) if !self.control.has_view(view)),
            bytes: self.bytes,
            read_only: self.read_only(),
            connected: self.connected.load(Ordering::Relaxed),
            partitions,
        }
    }
}

impl Disk {
    /// The disk of a device that shows this.
    ///
    /// # Errors
    ///
    /// When there is no such tensor or it cannot give the view.
    pub(crate) fn new(control: Control, shows: Shows, socket: &Path) -> Result<Self, ControlError> {
        let (shows, bytes, serial) = match shows {
            Shows::Base => (Shown::Base, length(&control.base()), "lamina-base".to_owned()),
            Shows::Views => {
                (Shown::Views, length(&control.views_window()) + 2 * MARGIN, "lamina-views".to_owned())
            }
            Shows::View { tensor, view } => {
                let view = control.create_view(&tensor, &view)?;
                // A view keeps its place, which is a multiple of 2 MiB, as long as there is one.
                let serial = format!("lamina-v{}", view.offset / lamina_abi::VIEW_ALIGN);
                let bytes = view.length.next_multiple_of(4096).max(4096);
                (Shown::View(view), bytes, serial)
            }
        };
        let (socket, connected) = (socket.to_owned(), AtomicBool::new(false));
        Ok(Self { control, shows, bytes, serial, socket, connected, panics: AtomicU64::new(0) })
    }

    /// Requests that made their handler panic; each was answered with an error.
    pub fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    pub(super) fn count_panic(&self) {
        self.panics.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn set_connected(&self, connected: bool) {
        self.connected.store(connected, Ordering::Relaxed);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn read_only(&self) -> bool {
        !matches!(self.shows, Shown::Base)
    }

    pub(super) fn serial(&self) -> [u8; SERIAL_BYTES] {
        let mut padded = [0; SERIAL_BYTES];
        let length = self.serial.len().min(SERIAL_BYTES);
        padded[..length].copy_from_slice(&self.serial.as_bytes()[..length]);
        padded
    }

    /// Where `length` bytes from `sector` on begin, if they are whole sectors of this disk.
    pub(super) fn place(&self, sector: u64, length: u64) -> Option<u64> {
        let offset = sector.checked_mul(SECTOR)?;
        let inside = offset.checked_add(length)? <= self.bytes && length.is_multiple_of(SECTOR);
        inside.then_some(offset)
    }

    /// Fills `out` from `offset` of the disk on; the range is inside it.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), ControlError> {
        match &self.shows {
            Shown::Base => self.control.read_base(offset, out),
            Shown::Views => self.read_views(offset, out),
            Shown::View(view) => self.read_view(view, offset, out),
        }
    }

    /// Stores `data`; the range is inside the base disk.
    pub(super) fn write(&self, offset: u64, data: &[u8]) -> Result<(), ControlError> {
        self.control.write_base(offset, data)
    }

    /// The coherence fence, over everything.
    pub(super) fn flush(&self) -> Result<(), ControlError> {
        self.control.flush(0, None)
    }

    /// Frees a range of the base disk: it reads as zeros afterwards.
    pub(super) fn discard(&self, offset: u64, length: u64) -> Result<(), ControlError> {
        self.control.discard(offset, length)
    }

    /// The device numbers of the file systems that serve the windows and the device's files.
    pub(super) fn mount_numbers(&self) -> io::Result<Vec<u64>> {
        self.control.mount_numbers()
    }

    /// Whether its reads may wait for pages that the host has to write back first.
    pub(super) fn may_wait(&self) -> bool {
        !self.control.exports().is_empty()
    }

    fn partitions(&self) -> Vec<Partition> {
        partitions::partitions(self.control.views())
    }

    /// The views window, with the partition table before and behind it.
    fn read_views(&self, offset: u64, out: &mut [u8]) -> Result<(), ControlError> {
        let window = MARGIN..self.bytes - MARGIN;
        let end = offset + out.len() as u64;
        if offset < window.start || end > window.end {
            let (first, last) = partitions::table(&self.partitions(), self.bytes);
            copy_part(&first, 0, offset, out);
            copy_part(&last, window.end, offset, out);
        }
        let (from, to) = (offset.max(window.start), end.min(window.end));
        if from < to {
            let index = |at: u64| usize::try_from(at - offset).expect("inside a slice");
            self.control.read_views(from - window.start, &mut out[index(from)..index(to)])?;
        }
        Ok(())
    }

    /// One view, and zeros behind it to the end of its last page.
    fn read_view(&self, view: &ViewInfo, offset: u64, out: &mut [u8]) -> Result<(), ControlError> {
        self.read_view_by(view, offset, out, |from, shown| self.control.read_views(from, shown))
    }

    /// The same, with what reads the views window.
    fn read_view_by(
        &self,
        view: &ViewInfo,
        offset: u64,
        out: &mut [u8],
        read: impl FnOnce(u64, &mut [u8]) -> Result<(), ControlError>,
    ) -> Result<(), ControlError> {
        // Its place may be another's by now.
        self.check_view(view)?;
        let visible = view.length.saturating_sub(offset).min(out.len() as u64);
        let (shown, rest) = out.split_at_mut(usize::try_from(visible).expect("at most a slice's length"));
        rest.fill(0);
        if shown.is_empty() {
            return Ok(());
        }
        let done = read(view.offset + offset, shown);
        // Or became so while pages under it were written back, before anything was read.
        self.check_view(view).inspect_err(|_| shown.fill(0))?;
        done
    }

    fn check_view(&self, view: &ViewInfo) -> Result<(), ControlError> {
        if self.control.has_view(view) {
            return Ok(());
        }
        Err(ControlError::ViewGone { tensor: view.tensor.clone(), view: view.view.clone() })
    }
}

fn length(window: &Range<u64>) -> u64 {
    window.end - window.start
}

/// Copies what of `bytes`, which lie at `at` of the disk, falls into `out`, which begins at
/// `offset`.
fn copy_part(bytes: &[u8], at: u64, offset: u64, out: &mut [u8]) {
    let (from, to) = (offset.max(at), (offset + out.len() as u64).min(at + bytes.len() as u64));
    if from < to {
        let index = |place: u64, start: u64| usize::try_from(place - start).expect("inside a slice");
        out[index(from, offset)..index(to, offset)].copy_from_slice(&bytes[index(from, at)..index(to, at)]);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lamina_codec::format::Format;
    use lamina_device::device::{Device, DeviceConfig};
    use lamina_device::layout::Layout;
    use lamina_device::tensor::TensorSpec;

    use super::*;

    const BYTES: usize = 4096;

    /// A device with these bytes in tensors `a` and `b`, and a disk of a view of `a`.
    fn disk(a: u8, b: u8) -> Disk {
        let device = Device::new(DeviceConfig::new(8 << 20, 8 << 20)).unwrap();
        for (name, dpa, byte) in [("a", 0, a), ("b", 1 << 20, b)] {
            let spec = TensorSpec {
                name: name.to_owned(),
                dpa: Some(dpa),
                length: BYTES as u64,
                elements: None,
                shape: Vec::new(),
                format: Format::Bf16,
                layout: Layout::Weight,
                codec: None,
                base: None,
            };
            device.create_tensor(spec).unwrap();
            device.write_base(dpa, &vec![byte; BYTES]).unwrap();
        }
        let shows = Shows::View { tensor: "a".to_owned(), view: "full".to_owned() };
        Disk::new(Control::new(Arc::new(device)), shows, Path::new("/socket")).unwrap()
    }

    #[test]
    fn nothing_is_shown_of_a_view_that_took_the_place_while_pages_were_written_back() {
        let disk = disk(1, 2);
        let Shown::View(view) = &disk.shows else { panic!("it shows a view") };
        let mut out = vec![9; BYTES];
        disk.read_view(view, 0, &mut out).unwrap();
        assert_eq!(out, [1; BYTES]);
        let replaced = |from, shown: &mut [u8]| {
            disk.control.remove_view("a", "full").unwrap();
            assert_eq!(disk.control.create_view("b", "full").unwrap().offset, view.offset);
            disk.control.read_views(from, shown).unwrap();
            assert_eq!(shown, [2; BYTES]);
            Ok(())
        };
        assert!(disk.read_view_by(view, 0, &mut out, replaced).is_err());
        assert_eq!(out, [0; BYTES]);
        let why = disk.read_view(view, 0, &mut out).unwrap_err();
        assert!(matches!(why, ControlError::ViewGone { .. }), "{why}");
        assert!(disk.info().gone);
    }

    #[test]
    fn a_view_of_a_tensor_that_was_resized_is_said_to_be_gone() {
        let disk = disk(1, 2);
        let Shown::View(view) = &disk.shows else { panic!("it shows a view") };
        assert!(!disk.info().gone);
        disk.control.resize_tensor("a", 2 * BYTES as u64).unwrap();
        let why = disk.read_view(view, 0, &mut [0; BYTES]).unwrap_err().to_string();
        assert!(why.contains("a,full") && why.contains("serve it anew"), "{why}");
        assert!(disk.info().gone);
    }
}
