//! A guest port: what a guest may ask of the device, over a virtio-serial port named
//! `org.lamina.ctl`.
//!
//! Each export has one, and it answers for that alone: its own tensors, views, window and counters,
//! in its own offsets and names.
//!
//! QEMU connects the port to this Unix socket (`-chardev socket,path=…`), so a connection is a
//! guest, or a guest that was started again. One JSON object a line each way, one answer to each
//! line, in order:
//!
//! | request | answer |
//! |---|---|
//! | `{"op":"flush"}`, with `"offset"` and `"length"` for a part | `{"ok":true}` when the fence holds |
//! | `{"op":"invalidate"}`, likewise | `{"ok":true}` when what the host held there is dropped; where windows are coherent there is nothing to drop |
//! | `{"op":"tensors"}`, with `"from"` and `"most"` for those from a DPA on | `{"ok":true,"tensors":[…]}` |
//! | `{"op":"views"}`, likewise by offset | `{"ok":true,"views":[…]}` |
//! | `{"op":"view","tensor":…,"spelling":…}` | `{"ok":true,"view":{…}}` of the view made, or found |
//! | `{"op":"remove_view","tensor":…,"spelling":…}` | `{"ok":true}` |
//! | `{"op":"create_tensors","tensors":[{"name":…,"length":…,"format":…},…]}` | `{"ok":true,"tensors":[…]}`: all of them, or none |
//! | `{"op":"resize_tensor","name":…,"length":…}` | `{"ok":true,"tensor":{…}}` |
//! | `{"op":"remove_tensor","name":…}` | `{"ok":true}` |
//! | `{"op":"detach_tensor","name":…}` | `{"ok":true,"tensor":{…}}` of the tensor, which has no base any more |
//! | `{"op":"stats"}` | `{"ok":true,"stats":{…}}` |
//! | `{"op":"evict","ranges":[[offset,length],…]}` | `{"ok":true}` when these parts of the views window are in no cache; what passes its end is ignored |
//! | `{"op":"revoke","host":…}` | `{"ok":true}` when this other host has no access any more |
//! | anything else | `{"ok":false,"error":"…"}` |
//!
//! Who asks again what it got no answer to says so of `create_tensors`, `remove_tensor` and
//! `remove_view`: `"again":true`. Then what comes is found if it is there as asked for, and what
//! goes may have gone. The others may be asked again as they are.
//!
//! A guest is not trusted: a line has at most [`MAX_LINE`] bytes, what is longer or no request gets
//! an error and the connection goes on with the next line. Empty lines are ignored; a guest program
//! may send one to end what a killed one left unfinished.

use std::convert::Infallible;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lamina_abi::DIRECTORY_BYTES;
use lamina_device::device::DeviceError;
use lamina_device::tensor::{TensorError, TensorInfo, TensorSpec};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, spawn_blocking};

use super::ServeError;
use super::control::{Control, ControlError};
use super::socket::OwnedSocket;

/// Bytes a request's line may have.
pub const MAX_LINE: usize = 64 << 10;
/// Connections served at once; further ones wait.
const CONNECTIONS: usize = 16;

/// A guest port that is being served. Dropping it ends it.
#[derive(Debug)]
pub struct GuestPort {
    path: PathBuf,
    task: JoinHandle<Infallible>,
}

/// A request.
#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
enum Request {
    Flush {
        #[serde(default)]
        offset: u64,
        length: Option<u64>,
    },
    Invalidate {
        #[serde(default)]
        offset: u64,
        length: Option<u64>,
    },
    Tensors {
        #[serde(default)]
        from: u64,
        most: Option<usize>,
    },
    Views {
        #[serde(default)]
        from: u64,
        most: Option<usize>,
    },
    View {
        tensor: String,
        spelling: String,
    },
    RemoveView {
        tensor: String,
        spelling: String,
        #[serde(default)]
        again: bool,
    },
    CreateTensors {
        tensors: Vec<TensorSpec>,
        #[serde(default)]
        again: bool,
    },
    ResizeTensor {
        name: String,
        length: u64,
    },
    RemoveTensor {
        name: String,
        #[serde(default)]
        again: bool,
    },
    DetachTensor {
        name: String,
    },
    Stats {},
    /// Takes another host's access away.
    Revoke {
        host: String,
    },
    Evict {
        ranges: Vec<(u64, u64)>,
    },
}

impl GuestPort {
    /// Serves `control` on a Unix socket at `path`. Must be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// When the socket is in use or cannot be made.
    pub fn serve(control: Control, path: &Path) -> Result<Self, ServeError> {
        Ok(Self::run(control, OwnedSocket::bind(path)?, path))
    }

    /// Serves `control` on a socket that listens at `path` already and stays when this ends. Must
    /// be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// When the socket cannot be used.
    pub fn adopt(control: Control, listener: UnixListener, path: &Path) -> Result<Self, ServeError> {
        Ok(Self::run(control, OwnedSocket::adopt(listener, path)?, path))
    }

    fn run(control: Control, socket: OwnedSocket, path: &Path) -> Self {
        Self { path: path.to_owned(), task: tokio::spawn(accept(control, socket)) }
    }

    /// The socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for GuestPort {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(control: Control, socket: OwnedSocket) -> Infallible {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await;
        match socket.listener.accept().await {
            Ok((stream, _)) => {
                let control = control.clone();
                tokio::spawn(async move {
                    if let Err(why) = talk(&control, stream).await {
                        tracing::debug!("a guest's connection ended: {why}");
                    }
                    drop(place);
                });
            }
            Err(why) => {
                tracing::warn!(path = %socket.path().display(), "accepting a guest failed: {why}");
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        }
    }
}

/// Answers a connection's lines until its end.
pub(crate) async fn talk(
    control: &Control,
    stream: impl AsyncRead + AsyncWrite + Unpin,
) -> std::io::Result<()> {
    let (reading, mut writing) = tokio::io::split(stream);
    let mut reading = BufReader::new(reading);
    let mut line = Vec::new();
    while let Some(fits) = next_line(&mut reading, &mut line).await? {
        let answer = if !fits {
            refusal(&format!("the line has more than {MAX_LINE} bytes"))
        } else if line.trim_ascii().is_empty() {
            continue;
        } else {
            answer(control, &line).await
        };
        let mut answer = answer.to_string();
        answer.push('\n');
        writing.write_all(answer.as_bytes()).await?;
    }
    Ok(())
}

/// Reads the next line without its end. `Some(false)`: it was longer than it may be, and thrown
/// away. `None`: the end.
async fn next_line(
    reading: &mut (impl AsyncBufReadExt + Unpin),
    line: &mut Vec<u8>,
) -> std::io::Result<Option<bool>> {
    line.clear();
    let mut fits = true;
    loop {
        let bytes = reading.fill_buf().await?;
        if bytes.is_empty() {
            // What has no line end was not sent to the end.
            return Ok(None);
        }
        let end = bytes.iter().position(|&byte| byte == b'\n');
        let piece = &bytes[..end.unwrap_or(bytes.len())];
        fits &= line.len() + piece.len() <= MAX_LINE;
        if fits {
            line.extend_from_slice(piece);
        }
        let taken = end.map_or(bytes.len(), |end| end + 1);
        reading.consume(taken);
        if end.is_some() {
            return Ok(Some(fits));
        }
    }
}

async fn answer(control: &Control, line: &[u8]) -> Value {
    let request = match serde_json::from_slice(line) {
        Ok(request) => request,
        Err(why) => return refusal(&format!("no request: {why}")),
    };
    let control = control.clone();
    match spawn_blocking(move || perform(&control, request)).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(why)) => {
            let mut answer = refusal(&why.to_string());
            if matches!(why, ControlError::Revoked { .. }) {
                answer["revoked"] = json!(true);
            }
            answer
        }
        Err(why) => {
            tracing::error!("a guest's request failed: {why}");
            refusal("the device failed; its log says how")
        }
    }
}

fn perform(control: &Control, request: Request) -> Result<Value, ControlError> {
    if !matches!(request, Request::Stats {}) {
        control.may_ask()?;
    }
    Ok(match request {
        Request::Flush { offset, length } => {
            control.flush(offset, length)?;
            json!({ "ok": true })
        }
        Request::Invalidate { offset, length } => {
            control.invalidate(offset, length)?;
            json!({ "ok": true })
        }
        Request::Tensors { from, most } => {
            json!({ "ok": true, "tensors": page(control.tensors(), from, most, |tensor| tensor.dpa) })
        }
        Request::Views { from, most } => {
            json!({ "ok": true, "views": page(control.views(), from, most, |view| view.offset) })
        }
        Request::View { tensor, spelling } => {
            json!({ "ok": true, "view": control.create_view(&tensor, &spelling)? })
        }
        Request::RemoveView { tensor, spelling, again } => {
            removed(control, again, control.remove_view(&tensor, &spelling).map(drop))?
        }
        Request::CreateTensors { tensors, again } => {
            let found = if again { found(control, &tensors) } else { None };
            let tensors = match found {
                Some(found) => {
                    show(control)?;
                    found
                }
                None => control.create_tensors(tensors)?,
            };
            json!({ "ok": true, "tensors": tensors })
        }
        Request::ResizeTensor { name, length } => {
            json!({ "ok": true, "tensor": control.resize_tensor(&name, length)? })
        }
        Request::RemoveTensor { name, again } => removed(control, again, control.remove_tensor(&name))?,
        Request::DetachTensor { name } => {
            json!({ "ok": true, "tensor": control.detach_tensor(&name)? })
        }
        Request::Revoke { host } => {
            control.revoke(&host)?;
            json!({ "ok": true })
        }
        Request::Stats {} => json!({ "ok": true, "stats": control.own_stats() }),
        Request::Evict { ranges } => {
            control.evict(ranges)?;
            json!({ "ok": true })
        }
    })
}

/// What of `all`, which are in the order of `place`, is at or behind `from`: `most` of them, and
/// those that share the last one's place.
fn page<T>(all: Vec<T>, from: u64, most: Option<usize>, place: impl Fn(&T) -> u64) -> Vec<T> {
    let mut page: Vec<T> = Vec::new();
    for one in all.into_iter().filter(|one| place(one) >= from) {
        let is_full = most.is_some_and(|most| page.len() >= most.max(1));
        if is_full && page.last().is_none_or(|last| place(last) != place(&one)) {
            break;
        }
        page.push(one);
    }
    page
}

/// The tensors that were asked for, if all are there as they were.
fn found(control: &Control, specs: &[TensorSpec]) -> Option<Vec<TensorInfo>> {
    let found = specs.iter().map(|spec| {
        let info = control.tensor(&spec.name).ok()?;
        let same = info.length == spec.length
            && info.format == spec.format
            && info.layout == spec.layout
            && spec.dpa.is_none_or(|dpa| dpa == info.dpa)
            && spec.codec.is_none_or(|codec| codec == info.codec)
            && spec.base == info.base
            && (spec.shape.is_empty() || spec.shape == info.shape);
        same.then_some(info)
    });
    found.collect()
}

/// The answer when something was to be removed. Who asks `again` may have had it removed before.
fn removed(control: &Control, again: bool, done: Result<(), ControlError>) -> Result<Value, ControlError> {
    match done {
        Err(why) if again && is_gone(&why) => show(control)?,
        done => done?,
    }
    Ok(json!({ "ok": true }))
}

/// Waits until no page cache has a directory or views from before. A worker that died may have made
/// a change and not come to that; the next one drops all of them, but answers meanwhile.
fn show(control: &Control) -> Result<(), ControlError> {
    control.evict(std::iter::once((0, DIRECTORY_BYTES)))
}

/// Whether something was refused because what should go is not there.
fn is_gone(why: &ControlError) -> bool {
    matches!(
        why,
        ControlError::Device(
            DeviceError::UnknownView { .. } | DeviceError::Tensor(TensorError::Unknown { .. })
        )
    )
}

fn refusal(error: &str) -> Value {
    json!({ "ok": false, "error": error })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use lamina_codec::format::Format;
    use lamina_device::device::{Device, DeviceConfig, Partition};

    use super::*;
    use crate::export::Place;
    use crate::fuse::{Mount, MountOptions};
    use crate::held_mount::fuse_present;
    use crate::mount_point::MountPoint;

    #[test]
    fn the_documents_name_every_request() {
        // What serde says of a request that there is not: the names of those there are.
        let known = serde_json::from_str::<Request>(r#"{"op":"nothing"}"#).unwrap_err().to_string();
        let known: Vec<_> = known.split('`').skip(1).step_by(2).filter(|name| *name != "nothing").collect();
        assert!(known.len() > 10, "{known:?}");
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let document = std::fs::read_to_string(format!("{root}/docs/attach.md")).unwrap();
        let (_, section) = document.split_once("## What a guest may ask").unwrap();
        for name in known {
            assert!(section.contains(&format!("`{name}`")), "docs/attach.md: {name}");
            assert!(include_str!("guest_port.rs").contains(&format!("//! | `{{\"op\":\"{name}\"")), "{name}");
        }
    }

    #[test]
    fn a_guest_makes_no_tensor_of_the_devices_own_names() {
        let device = Arc::new(Device::new(DeviceConfig::new(1 << 20, 8 << 20)).unwrap());
        let control = Control::new(Arc::clone(&device));
        let control = control.of_export(Partition::first(Arc::clone(&device)), Place::Root);
        for again in [false, true] {
            let tensors = vec![TensorSpec::new("/.lamina/files/log0", Some(0), 4096, Format::Bf16)];
            let refused = perform(&control, Request::CreateTensors { tensors, again }).unwrap_err();
            assert!(refused.to_string().contains("the device's own"), "{refused}");
        }
        assert!(device.hidden_tensors().is_empty());
    }

    #[test]
    fn what_was_done_before_a_worker_died_shows_when_it_is_asked_again() {
        if let Err(why) = fuse_present() {
            return lamina_skipped::test(why);
        }
        let folder = tempfile::tempdir().unwrap();
        let device = Arc::new(Device::new(DeviceConfig::new(1 << 20, 8 << 20)).unwrap());
        let point = MountPoint::prepare(&folder.path().join("mount")).unwrap();
        let mount = Mount::new(&device, point, &MountOptions::default()).unwrap();
        let control = Control::new(Arc::clone(&device));
        mount.tell(&control);
        let control = control.of_export(Partition::first(Arc::clone(&device)), Place::Root);
        let views = File::open(mount.views_path()).unwrap();
        let names = || {
            let mut page = vec![0; 4096];
            views.read_exact_at(&mut page, 0).unwrap();
            lamina_abi::decode(&page).unwrap().tensors.len()
        };
        let tensors = vec![TensorSpec::new("w", Some(0), 4096, Format::Bf16)];
        assert_eq!(names(), 0);
        // A worker that died did it, and told no page cache.
        device.create_tensors(tensors.clone()).unwrap();
        perform(&control, Request::CreateTensors { tensors, again: true }).unwrap();
        assert_eq!(names(), 1);
        device.remove_tensor("w").unwrap();
        perform(&control, Request::RemoveTensor { name: "w".into(), again: true }).unwrap();
        assert_eq!(names(), 0);
    }
}
