//! Fuzz target for images: files that may come from anywhere, or were damaged in any way.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::LazyLock;

use lamina_abi::{DIRECTORY_BYTES, VIEW_ALIGN};

use super::{fill, memory_file, small_config};
use lamina_codec::BLOCK_BYTES;
use lamina_device::device::{Device, DeviceConfig, DeviceError};
use lamina_store::entry::ENTRY_BYTES;
use lamina_store::image::{Image, STAGE_BYTES};

/// What an image is opened with.
pub(super) static CONFIG: LazyLock<DeviceConfig> = LazyLock::new(small_config);
/// The image of a small device.
static WHOLE: LazyLock<Whole> = LazyLock::new(|| Whole::new(false));
/// One with checkpoints, that changed since the last of them. Its parts are where those of the
/// other are.
static CHECKPOINTED: LazyLock<Whole> = LazyLock::new(|| Whole::new(true));

/// Parts of an image, by number.
const SUPERBLOCK: usize = 0;
const TABLES: usize = 1;
const JOURNAL: usize = 3;
const STAGING: usize = 4;
const INDEX: usize = 6;
const TEXTS: Range<usize> = 9..11;
const COPIES: Range<usize> = 11..13;
/// Where the state is, and the headers of the checkpoints.
const STATE_AT: u64 = 8 << 10;
const HEADERS_AT: [u64; 2] = [12 << 10, 16 << 10];
/// Bytes of a file that has room for whatever its superblock says.
const VAST: u64 = 1 << 44;
/// Bytes of a window that are looked at.
const LOOKED_AT: u64 = 1 << 20;

/// An image that a device made.
struct Whole {
    bytes: u64,
    /// Pages that are not zeros, each with its place.
    pages: Vec<(u64, Vec<u8>)>,
    parts: [Range<u64>; 13],
}

impl Whole {
    fn new(checkpoints: bool) -> Self {
        let image = Image::in_memory(CONFIG.superblock()).expect("memory for an image");
        let image = if checkpoints { image.on_disk() } else { image };
        let device = Device::open(image.clone(), &CONFIG).expect("memory for a device");
        fill(&device);
        device.sync().expect("memory is never synced in vain");
        // Leaves a window of the KV tensor open.
        device.write_base((190 << 10) + 5, &[7; 100]).expect("there is room");
        device.inject_poison(64 << 10, 1).expect("inside the window");
        let bytes = image.file().metadata().expect("a file in memory").len();
        let mut pages = Vec::new();
        for at in (0..bytes).step_by(BLOCK_BYTES) {
            let mut page = vec![0; BLOCK_BYTES];
            image.file().read_exact_at(&mut page, at).expect("inside the file");
            if page.iter().any(|byte| *byte != 0) {
                pages.push((at, page));
            }
        }
        Self { bytes, pages, parts: image.parts() }
    }
}

/// Changes the image of a small device and uses what it became: a byte of flags (1, 2, 4, 8: mend
/// the checks of superblock, tables, journal and staged windows, and of entries; 16: the file is as
/// long as anybody may say; 32: it has checkpoints, and their headers' checks are mended; 64: it
/// has, and the host crashed), then changes, each a part, a place in it (4 bytes), a length (2
/// bytes) and the bytes.
pub fn image(data: &[u8]) {
    let Some((flags, mut rest)) = data.split_first() else { return };
    let file = memory_file();
    let whole = if flags & 0x60 == 0 { &*WHOLE } else { &*CHECKPOINTED };
    file.set_len(if flags & 16 == 0 { whole.bytes } else { VAST }).expect("a hole takes no memory");
    for (at, page) in &whole.pages {
        file.write_all_at(page, *at).expect("memory for a page");
    }
    let mut entries = Vec::new();
    while let Some((&[part, a, b, c, d, low, high], bytes)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes([low, high])).min(bytes.len());
        let (bytes, after) = bytes.split_at(length);
        rest = after;
        let number = usize::from(part) % WHOLE.parts.len();
        let part = &WHOLE.parts[number];
        let at = u64::from(u32::from_le_bytes([a, b, c, d])) % (part.end - part.start);
        let bytes =
            &bytes[..bytes.len().min(usize::try_from(part.end - part.start - at).unwrap_or(usize::MAX))];
        file.write_all_at(bytes, part.start + at).expect("memory for a change");
        if number == INDEX || COPIES.contains(&number) {
            entries.push(part.start + at / ENTRY_BYTES as u64 * ENTRY_BYTES as u64);
        }
    }
    let image = Mended { file: &file };
    if flags & 1 == 1 {
        image.superblock();
    }
    if flags & 2 == 2 {
        image.tables();
    }
    if flags & 4 == 4 {
        image.journal();
        image.staged();
    }
    if flags & 32 == 32 {
        image.headers();
    }
    if flags & 64 == 64 {
        image.put(STATE_AT, &[0; 64]);
    }
    if flags & 8 == 8 {
        for at in entries {
            image.entry(at);
        }
    }
    let Ok(Some(image)) = Image::from_file(file, Path::new("image")) else { return };
    match Device::open(image, &CONFIG) {
        Ok(device) => visit(device),
        Err(why) => assert!(why.to_string().len() < 16 << 10, "an endless message"),
    }
}

/// Looks at all that a device shows, and uses it; then the next process finds the same.
pub(super) fn visit(device: Device) {
    let image = device.image().expect("it was opened").clone();
    let shown = base(&device);
    views(&device);
    for tensor in device.tensors() {
        assert!(device.base_bytes() - tensor.dpa >= tensor.length, "{tensor:?} passes the window");
    }
    let (stats, poison) = (device.stats(), device.poison());
    assert!(poison.len() as u64 <= device.base_bytes() / BLOCK_BYTES as u64);
    let windows = stats.kv_windows;
    assert!(windows.open <= windows.max_open, "{} open windows", windows.open);
    drop(device);

    let device = Device::open(image, &CONFIG).expect("it was opened before");
    assert!(base(&device) == shown, "the next process finds something else");
    // A part of each block, which opens a window where it is a KV tensor's, then all of each.
    for (inside, length, poisoned) in [(5, 100, true), (0, BLOCK_BYTES, false)] {
        for block in (0..device.base_bytes().min(LOOKED_AT)).step_by(BLOCK_BYTES) {
            let (at, data): (_, Vec<u8>) = (block + inside, (0_u8..64).cycle().take(length).collect());
            match device.write_base(at, &data) {
                Ok(()) => {
                    let mut back = vec![0; length];
                    device.read_base(at, &mut back).expect("inside the window");
                    assert!(back == data, "a store was lost");
                }
                Err(why) => assert!(why.is_no_room() || poisoned && Device::is_damage(&why), "{why}"),
            }
        }
    }
    let flushed = device.flush(0, device.base_bytes());
    assert!(flushed.as_ref().map_or_else(DeviceError::is_no_room, |()| true), "{flushed:?}");
    views(&device);
}

/// Reads the directory and of every view.
fn views(device: &Device) {
    device.read_views(0, &mut vec![0; BLOCK_BYTES]).expect("a directory");
    for view in device.views() {
        assert!(view.offset >= DIRECTORY_BYTES && view.offset.is_multiple_of(VIEW_ALIGN), "{view:?}");
        assert!(device.has_view(&view), "{view:?} is lost");
        for at in [0, view.length / 2, view.length.saturating_sub(1)] {
            device.read_views(view.offset + at, &mut [0; 1]).expect("inside the view");
        }
    }
}

/// The first of the base window, and its last block.
fn base(device: &Device) -> Vec<u8> {
    let bytes = device.base_bytes();
    let mut all = vec![0; usize::try_from(bytes.min(LOOKED_AT)).expect("1 MiB")];
    device.read_base(0, &mut all).expect("inside the window");
    let mut last = vec![0; BLOCK_BYTES];
    device.read_base(bytes - BLOCK_BYTES as u64, &mut last).expect("inside the window");
    all.extend(last);
    all
}

/// An image whose checks are made right.
struct Mended<'a> {
    file: &'a File,
}

impl Mended<'_> {
    fn bytes(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, at).expect("inside the file");
        bytes
    }

    fn word(&self, at: u64) -> u64 {
        u64::from_le_bytes(*self.bytes(at, 8).first_chunk().expect("eight bytes"))
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at).expect("inside the file");
    }

    fn superblock(&self) {
        let page = self.bytes(WHOLE.parts[SUPERBLOCK].start, 4096);
        self.put(8, &crc32c::crc32c(&page[12..]).to_le_bytes());
    }

    /// Those of checkpoints, of which each has the length of a text at 24 and its check at 32, and
    /// its own check over all from 16 on.
    fn headers(&self) {
        for (header, text) in HEADERS_AT.into_iter().zip(TEXTS) {
            let length = usize::try_from(self.word(header + 24)).unwrap_or(usize::MAX);
            if length <= 1 << 20 {
                let check = crc32c::crc32c(&self.bytes(WHOLE.parts[text].start, length));
                self.put(header + 32, &u64::from(check).to_le_bytes());
            }
            self.put(header + 8, &u64::from(crc32c::crc32c(&self.bytes(header + 16, 32))).to_le_bytes());
        }
        let state = crc32c::crc32c(&self.bytes(STATE_AT + 16, 44));
        self.put(STATE_AT + 8, &u64::from(state).to_le_bytes());
    }

    /// Both places: number, length, check, and the text behind 64 bytes.
    fn tables(&self) {
        let part = &WHOLE.parts[TABLES];
        for place in [part.start, part.start + (part.end - part.start) / 2] {
            let length = usize::try_from(self.word(place + 8)).unwrap_or(usize::MAX);
            if length <= 1 << 20 {
                let numbered = crc32c::crc32c(&self.bytes(place, 8));
                let check = crc32c::crc32c_append(numbered, &self.bytes(place + 64, length));
                self.put(place + 16, &u64::from(check).to_le_bytes());
            }
        }
    }

    /// The records of the first stripes and of a window: count, first block, check, and the entries
    /// behind 64 bytes.
    fn journal(&self) {
        let part = &WHOLE.parts[JOURNAL];
        for record in (0..8).chain([1024]).map(|record| part.start + record * 128) {
            let count = usize::try_from(self.word(record)).unwrap_or(usize::MAX);
            if (1..=256).contains(&count) {
                let first = crc32c::crc32c(&self.bytes(record + 8, 8));
                let check = crc32c::crc32c_append(first, &self.bytes(record + 64, count * ENTRY_BYTES));
                self.put(record + 16, &u64::from(check).to_le_bytes());
            }
        }
    }

    /// The places of staged windows: blocks, first block, check of both.
    fn staged(&self) {
        let part = &WHOLE.parts[STAGING];
        for place in (part.start..part.end).step_by(STAGE_BYTES) {
            let check = crc32c::crc32c(&self.bytes(place, 16));
            self.put(place + 16, &u64::from(check).to_le_bytes());
        }
    }

    fn entry(&self, at: u64) {
        let mut entry = self.bytes(at, ENTRY_BYTES);
        entry[10..14].fill(0);
        self.put(at + 10, &crc32c::crc32c(&entry).to_le_bytes());
    }
}
