//! Reading the directory by loads.
//!
//! The device may rewrite the directory while it is read. A checksum tells, and then it is read
//! again, a few times with growing pauses. Only as many bytes are loaded as the header says are
//! used.
//!
//! It has room for a few ten thousand tensors and says if there are more: of these the control port
//! tells ([`complete`]).

use std::{collections::HashMap, thread, time::Duration};

use lamina_abi::{DIRECTORY_BYTES, Directory, DirectoryError, HEADER_BYTES, Layout, TensorEntry, ViewEntry};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{Ctl, CtlError, Error, Window};

/// Reads before giving up.
const ATTEMPTS: u32 = 8;
/// Entries that the control port lists at a time.
const PAGE: usize = 1000;

/// The directory at the start of the views window.
///
/// # Errors
/// [`Error::Directory`] when the window does not begin with a directory, or it stays damaged.
pub fn read(views: &Window) -> Result<Directory, Error> {
    let wrap = |cause| Error::Directory { path: views.path().into(), cause };
    let mut attempt = 1;
    loop {
        match once(views) {
            Ok(directory) => return Ok(directory),
            Err(error) if attempt == ATTEMPTS || !may_be_a_race(&error) => return Err(wrap(error)),
            Err(error) => tracing::debug!(%error, attempt, "reading the directory again"),
        }
        thread::sleep(Duration::from_millis(1 << attempt));
        attempt += 1;
    }
}

/// A directory as `directory`, with all tensors and views that the control port tells of.
///
/// # Errors
/// [`Error::Ctl`].
pub fn complete(directory: &Directory, ctl: &mut Ctl) -> Result<Directory, Error> {
    let tensors = listed(ctl, "tensors", Ctl::tensors, |tensor: &Tensor| tensor.dpa)?;
    let tensors: Vec<TensorEntry> = tensors.into_iter().map(Into::into).collect();
    let places: HashMap<&str, u32> = tensors.iter().map(|tensor| tensor.name.as_str()).zip(0_u32..).collect();
    let views = listed(ctl, "views", Ctl::views, |view: &View| view.offset)?;
    // One whose tensor came after the tensors were listed is of a directory to come.
    let views = views.into_iter().filter_map(|view| {
        let tensor = *places.get(view.tensor.as_str())?;
        let View { spelling, offset, length, elements, bits, scale_exp, .. } = view;
        Some(ViewEntry { tensor, spelling, offset, length, elements, bits, scale_exp })
    });
    let views = views.collect();
    Ok(Directory { tensors, views, is_incomplete: false, ..directory.clone() })
}

/// All that the control port lists, a page at a time.
fn listed<T: DeserializeOwned>(
    ctl: &mut Ctl,
    what: &str,
    ask: impl Fn(&mut Ctl, u64, usize) -> Result<Value, CtlError>,
    place: impl Fn(&T) -> u64,
) -> Result<Vec<T>, Error> {
    let (mut found, mut from) = (Vec::new(), 0);
    loop {
        let mut reply = ask(ctl, from, PAGE)?;
        let rows = reply.get_mut(what).map(Value::take).unwrap_or_default();
        let page: Vec<T> =
            serde_json::from_value(rows).map_err(|why| ctl.no_reply(why.to_string().as_bytes()))?;
        let next = page.last().filter(|_| page.len() >= PAGE).map(&place);
        found.extend(page);
        // A device that lists the same again has no end.
        match next.filter(|last| *last >= from).and_then(|last| last.checked_add(1)) {
            Some(next) => from = next,
            None => return Ok(found),
        }
    }
}

/// A tensor as the control port lists it.
#[derive(Deserialize)]
struct Tensor {
    name: String,
    dpa: u64,
    length: u64,
    elements: u64,
    shape: Vec<u64>,
    format: String,
    layout: Kind,
}

/// Its layout.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
enum Kind {
    Weight {},
    Kv(Rows),
    LossyKv(Rows),
}

#[derive(Deserialize)]
struct Rows {
    channels: u32,
    window: u32,
    stride: Option<u32>,
    paged: Option<Paged>,
}

#[derive(Deserialize)]
struct Paged {
    groups: u32,
    block: u32,
}

/// A view as the control port lists it.
#[derive(Deserialize)]
struct View {
    tensor: String,
    #[serde(rename = "view")]
    spelling: String,
    offset: u64,
    length: u64,
    elements: u64,
    bits: u32,
    scale_exp: i32,
}

impl From<Tensor> for TensorEntry {
    fn from(tensor: Tensor) -> Self {
        let Tensor { name, dpa, length, elements, shape, format, layout } = tensor;
        let lossy = matches!(layout, Kind::LossyKv(_));
        let layout = match layout {
            Kind::Weight {} => Layout::Weight,
            Kind::Kv(rows) | Kind::LossyKv(rows) => Layout::Kv {
                channels: rows.channels,
                window: rows.window,
                stride: rows.stride.unwrap_or(rows.channels),
                groups: rows.paged.as_ref().map_or(1, |paged| paged.groups),
                paged_tokens: rows.paged.map_or(1, |paged| paged.block),
            },
        };
        let shape = shape.iter().map(u64::to_string).collect::<Vec<_>>().join("x");
        Self { name, shape, format, dpa, length, elements, layout, lossy }
    }
}

/// Whether a writer could be the cause. Behind a sound checksum nothing is, nor where the header is
/// not ours at all.
fn may_be_a_race(error: &DirectoryError) -> bool {
    matches!(error, DirectoryError::Checksum { .. } | DirectoryError::Bound { field: "used_bytes", .. })
}

fn once(views: &Window) -> Result<Directory, DirectoryError> {
    let limit = views.bytes().min(DIRECTORY_BYTES);
    let mut bytes = loaded(views, limit.min(HEADER_BYTES as u64));
    if let Some(used) = bytes.get(24..32).and_then(|field| field.try_into().ok()).map(u64::from_le_bytes)
        && bytes.starts_with(&lamina_abi::MAGIC)
        && used <= limit
    {
        bytes = loaded(views, used.max(HEADER_BYTES as u64).min(limit));
    }
    lamina_abi::decode(&bytes)
}

/// The first `length` bytes of the window, fewer if it is shorter.
fn loaded(views: &Window, length: u64) -> Vec<u8> {
    let Ok(span) = views.span(0, length) else { return Vec::new() };
    let mut bytes = vec![0; span.len()];
    span.volatile().copy_to(&mut bytes);
    bytes
}
