//! What the fuzz targets do with their input; `fuzz/` and the tests here call the same functions.
//!
//! Each takes any bytes and panics if a promise is broken: what was stored comes back, damage is an
//! error. Checksums are mended first where a bit of the input says so, because no fuzzer finds its
//! way past them.

mod disk;
mod fuse;
mod image;
mod mailbox;
mod models;
mod peers;
mod snapshot;

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;

use nix::sys::memfd::{MFdFlags, memfd_create};

pub use self::{
    disk::disk,
    fuse::fuse,
    image::image,
    mailbox::mailbox,
    models::{models, precisions},
    peers::{api, guest},
    snapshot::snapshot,
};
use lamina_codec::block::{Bundle, MAX_BUNDLE, MAX_CHECKS, Stored};
use lamina_codec::format::Format;
use lamina_codec::kv::KvLayout;
use lamina_codec::packkv::{PackedWindow, TOKENS};
use lamina_codec::plane::{self, PlaneMask};
use lamina_codec::{BLOCK_BYTES, BlockWords};
use lamina_codec::{Codec, Decoder, Encoder, internals};
use lamina_device::device::{Device, DeviceConfig, TensorSpec};
use lamina_device::layout::Layout;
use lamina_device::model::{ModelError, ModelFile};
use lamina_store::entry::{ENTRY_BYTES, Entry, Place, Version};

/// The bytes that no error's text comes to, whatever the input.
const MAX_MESSAGE: usize = 16 << 10;

/// Codes a block and wants it back, whole and by any mask: format, codec, whether word-major, mask
/// (4 bytes), then the words, repeated to fill the block.
pub fn round_trip(data: &[u8]) {
    let Some((&[format, codec, by_words, a, b, c, d], pattern)) = data.split_first_chunk() else { return };
    let format = Format::ALL[usize::from(format) % Format::ALL.len()];
    let codec = Codec::ALL[usize::from(codec) % Codec::ALL.len()];
    let mut words: BlockWords = [0; BLOCK_BYTES];
    words.iter_mut().zip(pattern.iter().cycle()).for_each(|(word, byte)| *word = *byte);

    let (mut encoder, mut decoder, mut bundle) = (Encoder::new(), Decoder::new(), Bundle::new());
    let by_words = by_words & 1 == 1 || format == Format::Opaque;
    if by_words {
        encoder.words(codec, &words, &mut bundle);
    } else {
        encoder.block(format, codec, &words, &mut bundle);
    }
    let Some(stored) = &bundle.stored else {
        assert!(words.iter().all(|byte| *byte == 0), "a block was taken for zeros");
        return;
    };
    assert_eq!(stored.bytes(), bundle.bytes().len(), "the description has another length");
    let place = Place { segment: 9, stored: stored.clone(), lossy: false, difference: false };
    let entry = Entry { epoch: 7, place: Some(place) };
    let holds = |version: &Version| by_words || version.holds(format);
    for version in [Version::One, Version::Two].into_iter().filter(holds) {
        assert_eq!(Entry::decode(version, &entry.encode(version)).as_ref(), Ok(&entry), "the entry changed");
    }

    let mut back = [0; BLOCK_BYTES];
    let all = PlaneMask::all(format);
    decoder.block(stored, all, &fetched(stored, all, bundle.bytes()), &mut back).expect("it is intact");
    assert!(back == words, "the words changed");
    if !by_words {
        let mask = PlaneMask(u32::from_le_bytes([a, b, c, d]) & all.0);
        let fetched = fetched(stored, mask, bundle.bytes());
        decoder.block(stored, mask, &fetched, &mut back).expect("it is intact");
        let (mut split, mut want) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
        plane::split(format, &words, &mut split);
        plane::join(format, &plane::select(format, mask, &split), &mut want);
        assert!(back == want, "the planes {:#x} changed", mask.0);
        plane::join_block(format, mask, &split, &mut want);
        assert!(back == want, "the planes {:#x} of a block changed", mask.0);
    }
}

/// Decodes an index entry and a bundle that nobody may have written: a byte of flags (1: mend the
/// entry's checksum, 2: mend those of the stored bytes, 4: of version 2), a mask (4 bytes), the
/// entry (64 bytes), then the bundle.
pub fn stored(data: &[u8]) {
    let Some((&[flags, a, b, c, d], data)) = data.split_first_chunk() else { return };
    let Some((entry, bytes)) = data.split_first_chunk::<ENTRY_BYTES>() else { return };
    let mut entry = *entry;
    if flags & 1 == 1 {
        entry[10..14].fill(0);
        let check = crc32c::crc32c(&entry);
        entry[10..14].copy_from_slice(&check.to_le_bytes());
    }
    let version = if flags & 4 == 4 { Version::Two } else { Version::One };
    let decoded = Entry::decode(version, &entry);
    let Ok(Entry { place: Some(Place { segment, mut stored, lossy, difference }), epoch }) = decoded else {
        return;
    };
    let mut bundle = [0; MAX_BUNDLE];
    let length = bytes.len().min(MAX_BUNDLE);
    bundle[..length].copy_from_slice(&bytes[..length]);
    if flags & 2 == 2 {
        mend(&mut stored, &mut bundle);
    }
    assert!(stored.bytes() <= MAX_BUNDLE, "a bundle of {} bytes", stored.bytes());
    let mask = PlaneMask(u32::from_le_bytes([a, b, c, d]));
    stored.runs(mask, |run| assert!(run.end <= stored.bytes(), "{run:?} is outside the bundle"));
    let mut words = [0; BLOCK_BYTES];
    // Right or wrong, it comes to an end. What decodes can be stored again under the same
    // description.
    let _ = Decoder::new().block(&stored, mask, &bundle, &mut words);
    let again = Entry { epoch, place: Some(Place { segment, stored, lossy, difference }) };
    assert_eq!(Entry::decode(version, &again.encode(version)).as_ref(), Ok(&again), "the entry changed");
}

/// Reads a packed KV window that nobody may have written, and computes with it: whatever the
/// processor, products are those of what comes back.
pub fn packed(data: &[u8]) {
    let Ok(window) = PackedWindow::new(data) else { return };
    let query = vec![0.5; window.channels()];
    let channels = u32::try_from(query.len()).map_or(f64::INFINITY, f64::from);
    for group in window.groups() {
        let side = group.side();
        let levels = side.unpack();
        let dots = side.dot(0..query.len(), &query);
        for (token, dot) in dots.iter().enumerate() {
            let of = levels.tokens()[token];
            let sum: f64 = levels.row(token).iter().map(|level| f64::from(*level) + f64::from(of.zero)).sum();
            let (want, size) = (sum * f64::from(of.scale()) / 2.0, channels * 4e4 * f64::from(of.scale()));
            assert!(size > 1e37 || (f64::from(*dot) - want).abs() <= size * 1e-4, "{dot}, not {want}");
        }
        let _ = group.dot(0..query.len(), &query);
        group.weigh(0..query.len(), &[0.5; TOKENS], &mut query.clone());
    }
}

/// Opens a checkpoint and reads from every tensor: a flag byte, then the file; or, if the flag's
/// lowest bit is set, the header's text, behind which come as many bytes as the flag's other bits
/// say.
pub fn header(data: &[u8]) {
    let Some((flags, text)) = data.split_first() else { return };
    let contents = if flags & 1 == 1 {
        let tail = vec![0x5a; usize::from(flags >> 1)];
        [&(text.len() as u64).to_le_bytes(), text, &tail].concat()
    } else {
        text.to_vec()
    };
    checkpoint(&contents);
}

/// Opens a GGUF file, which begins with its magic number before `data`, and reads from every
/// tensor.
pub fn gguf(data: &[u8]) {
    checkpoint(&[b"GGUF", data].concat());
}

fn checkpoint(contents: &[u8]) {
    let mut file = memory_file();
    file.write_all(contents).expect("memory for a file");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let model = match ModelFile::open(path.as_ref()) {
        Ok(model) => model,
        Err(why) => {
            assert!(why.to_string().len() < MAX_MESSAGE, "an endless message");
            return;
        }
    };
    let mut covered = 0;
    for tensor in model.tensors() {
        covered += tensor.length;
        let mut bytes = vec![0; usize::try_from(tensor.length).expect("within the file").min(64)];
        model.read(tensor, 0, &mut bytes).expect("the header was checked against the file");
        let past = model.read(tensor, tensor.length, &mut [0]);
        assert!(matches!(past, Err(ModelError::PastTensor { .. })), "a read past the tensor's end");
    }
    assert!(covered <= contents.len() as u64, "tensors overlap");
}

/// An empty file in memory.
fn memory_file() -> File {
    File::from(memfd_create("fuzzing", MFdFlags::MFD_CLOEXEC).expect("memory for a file"))
}

/// The configuration of a small device.
fn small_config() -> DeviceConfig {
    DeviceConfig { open_windows: 2, ..DeviceConfig::new(256 << 10, 16 << 20) }
}

/// A small device with a tensor `w`, a KV tensor `c.k` and a view of each.
fn small() -> Device {
    let device = Device::new(small_config()).expect("memory for a device");
    fill(&device);
    device
}

/// Makes the tensors and views of a small device, with something in them and behind them.
fn fill(device: &Device) {
    let kv = Layout::Kv(KvLayout::rows(64, 32));
    for (name, dpa, length, layout) in
        [("w", 0, (96 << 10) + 6, Layout::Weight), ("c.k", 128 << 10, 64 << 10, kv)]
    {
        let shape = if name == "c.k" { vec![512, 64] } else { Vec::new() };
        let (format, elements, codec) = (Format::Bf16, None, None);
        let spec = TensorSpec {
            name: name.to_owned(),
            dpa: Some(dpa),
            length,
            elements,
            shape,
            format,
            layout,
            codec,
            base: None,
        };
        device.create_tensor(spec).expect("there is room");
        device.create_view(name, "e8m3").expect("there is room");
    }
    for at in [0, 64 << 10, 128 << 10, 176 << 10, 224 << 10] {
        let bytes: Vec<u8> = (0..16_384_u32).map(|i| (i.wrapping_mul(i) >> 9).to_le_bytes()[0]).collect();
        device.write_base(at, &bytes).expect("there is room");
    }
}

/// The bundle's bytes at the places of `mask`'s runs, noise elsewhere.
fn fetched(stored: &Stored, mask: PlaneMask, bytes: &[u8]) -> Box<[u8; MAX_BUNDLE]> {
    let mut bundle = Box::new([0xa5; MAX_BUNDLE]);
    stored.runs(mask, |run| bundle[run.clone()].copy_from_slice(&bytes[run]));
    bundle
}

/// Makes the checks of the stored bytes right.
fn mend(stored: &mut Stored, bundle: &mut [u8; MAX_BUNDLE]) {
    if let Stored::Words { length, check, .. } = stored {
        *check = crc32c::crc32c(&bundle[..usize::from(*length)]);
    }
    if let Stored::Planes(planes) = stored {
        let count = planes.format.planes();
        let mut at = usize::from(planes.head.length);
        internals::mend(&mut bundle[..at]);
        for index in 0..count {
            if index == 1 && planes.joint.length > 0 {
                let end = at + usize::from(planes.joint.length);
                planes.joint.check = crc32c::crc32c(&bundle[at..end]);
                at = end;
            }
            let end = at + usize::from(planes.lengths[index]);
            if at == end {
                continue;
            }
            let computed = internals::check(&bundle[at..end]);
            at = end;
            if count <= MAX_CHECKS {
                planes.checks[index] = computed;
            } else {
                bundle[at..at + 2].copy_from_slice(&computed.to_le_bytes());
                at += 2;
            }
        }
    }
}

#[cfg(test)]
mod tests;
