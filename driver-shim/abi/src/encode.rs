//! Writing a directory.

use crate::{
    DIRECTORY_BYTES, Directory, DirectoryError, HEADER_BYTES, Layout, MAGIC, TENSOR_RECORD_BYTES, VERSION,
    VIEW_RECORD_BYTES,
};

/// The bytes of `directory`, `used_bytes` of them (the rest of the 2 MiB is zero).
///
/// # Errors
/// [`DirectoryError::Full`] when it does not fit.
pub fn encode(directory: &Directory) -> Result<Vec<u8>, DirectoryError> {
    let tensors_offset = HEADER_BYTES;
    let views_offset = tensors_offset + directory.tensors.len() * TENSOR_RECORD_BYTES;
    let text_offset = views_offset + directory.views.len() * VIEW_RECORD_BYTES;
    let text_bytes: usize =
        directory.tensors.iter().map(|t| t.name.len() + t.shape.len() + t.format.len()).sum::<usize>()
            + directory.views.iter().map(|v| v.spelling.len()).sum::<usize>();
    let used = text_offset + text_bytes;
    if used as u64 > DIRECTORY_BYTES {
        return Err(DirectoryError::Full { needed: used as u64 });
    }

    let mut writer = Writer { bytes: Vec::with_capacity(used), text: Vec::new(), text_offset };
    writer.bytes.extend_from_slice(&MAGIC);
    writer.u32(VERSION);
    writer.u32(0); // the checksum, filled in last
    writer.u64(directory.generation);
    writer.u64(used as u64);
    writer.u64(directory.base_bytes);
    writer.u64(directory.views_bytes);
    writer.size(directory.tensors.len());
    writer.size(TENSOR_RECORD_BYTES);
    writer.size(directory.views.len());
    writer.size(VIEW_RECORD_BYTES);
    writer.u64(tensors_offset as u64);
    writer.u64(views_offset as u64);
    writer.u64(text_offset as u64);
    writer.u32(directory.is_incomplete.into());
    writer.bytes.resize(HEADER_BYTES, 0);
    for tensor in &directory.tensors {
        writer.u64(tensor.dpa);
        writer.u64(tensor.length);
        writer.u64(tensor.elements);
        writer.text(&tensor.name);
        writer.text(&tensor.shape);
        writer.text(&tensor.format);
        let fields = match tensor.layout {
            Layout::Weight => [0; 6],
            Layout::Kv { channels, window, stride, groups, paged_tokens } => {
                [1, channels, window, stride, groups, paged_tokens]
            }
        };
        for field in fields {
            writer.u32(field);
        }
        writer.u32(tensor.lossy.into());
        writer.u32(0);
    }
    for view in &directory.views {
        writer.u64(view.offset);
        writer.u64(view.length);
        writer.u64(view.elements);
        writer.text(&view.spelling);
        writer.u32(view.tensor);
        writer.u32(view.bits);
        writer.bytes.extend_from_slice(&view.scale_exp.to_le_bytes());
        writer.bytes.extend_from_slice(&[0; 20]);
    }
    let Writer { mut bytes, text, .. } = writer;
    bytes.extend_from_slice(&text);
    let checksum = crc32c::crc32c(&bytes);
    bytes[12..16].copy_from_slice(&checksum.to_le_bytes());
    Ok(bytes)
}

struct Writer {
    bytes: Vec<u8>,
    text: Vec<u8>,
    text_offset: usize,
}

impl Writer {
    fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// A count or offset inside the directory, at most [`DIRECTORY_BYTES`] by the check in
    /// [`encode`].
    fn size(&mut self, value: usize) {
        self.u32(u32::try_from(value).expect("bounded by DIRECTORY_BYTES"));
    }

    fn text(&mut self, text: &str) {
        self.size(self.text_offset + self.text.len());
        self.size(text.len());
        self.text.extend_from_slice(text.as_bytes());
    }
}
