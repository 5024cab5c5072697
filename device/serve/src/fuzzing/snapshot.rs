//! Fuzz target for snapshots: streams that may come from anywhere.

use std::path::Path;

use super::image::{CONFIG, visit};
use super::memory_file;
use lamina_device::device::Device;
use lamina_store::image::Image;
use lamina_store::snapshot::{HEAD_BYTES, fill, head};

/// Restores a snapshot, and uses the device if there is one: a byte of flags (1: mend the extents'
/// checks), then the stream.
pub fn snapshot(data: &[u8]) {
    let Some((flags, stream)) = data.split_first() else { return };
    let mut stream = stream.to_vec();
    if flags & 1 == 1 {
        mend(&mut stream);
    }
    let file = memory_file();
    if fill(&mut stream.as_slice(), &file).is_err() {
        return;
    }
    let Ok(Some(image)) = Image::from_file(file, Path::new("snapshot")) else { return };
    if let Ok(device) = Device::open(image, &CONFIG) {
        visit(device);
    }
}

/// Makes the extents' checks right.
fn mend(stream: &mut [u8]) {
    let mut at = 16;
    while let Some(found) = stream.get(at..at + HEAD_BYTES) {
        let word = |at: usize| u64::from_le_bytes(*found[at..].first_chunk().expect("eight bytes"));
        let (place, length) = (word(0), usize::try_from(word(8)).unwrap_or(usize::MAX));
        let data = at + HEAD_BYTES;
        let Some(bytes) = data.checked_add(length).and_then(|end| stream.get(data..end)) else { return };
        let head = head(place, bytes);
        stream[at..data].copy_from_slice(&head);
        at = data + length;
    }
}
