//! Fuzz targets for what peers send to a device that is served: API requests, lines on the guest
//! port.
//!
//! Each input meets a device of its own with a tensor, a KV tensor and a view.

use std::sync::{Arc, LazyLock};

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex, split};
use tokio::runtime::{Builder, Runtime};

use super::small;
use crate::{Control, api::router, guest_port, http};
use lamina_device::device::Device;

pub(super) static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("threads"));

/// Sends bytes to whoever `serves` the other end, and returns what came back until that end was
/// closed.
pub(super) async fn exchange<F: Future<Output = ()> + Send + 'static>(
    data: &[u8],
    serves: impl FnOnce(DuplexStream) -> F,
) -> Vec<u8> {
    let (ours, theirs) = duplex(64 << 10);
    let served = tokio::spawn(serves(theirs));
    let (mut reading, mut writing) = split(ours);
    let mut answer = Vec::new();
    let send = async {
        // Who serves may hang up before all of it is sent.
        let _ = writing.write_all(data).await;
        let _ = writing.shutdown().await;
    };
    let (read, ()) = tokio::join!(reading.read_to_end(&mut answer), send);
    read.expect("a pipe within this process");
    served.await.expect("who serves panicked");
    answer
}

/// The device still does what it is for.
pub(super) fn works(device: &Device) {
    // A peer may have asked for poison, which is damage to who reads it.
    let poisoned = !device.poison().is_empty();
    let tensors = device.tensors();
    assert!(tensors.len() <= 2 + usize::from(u8::MAX), "{} tensors", tensors.len());
    for at in (0..device.base_bytes()).step_by(64 << 10) {
        device.read_base(at, &mut [0; 4096]).expect("within the window");
    }
    device.write_base(0, &[0x5a; 4096]).expect("there is room");
    let mut back = [0; 4096];
    device.read_base(0, &mut back).expect("within the window");
    assert!(back == [0x5a; 4096], "a store was lost");
    let damaged = device.stats().requests.damaged_reads;
    assert!(damaged == 0 || poisoned, "{damaged} reads found damage");
}

/// Bytes to the API's socket. Every answer is HTTP, and none says that the device failed.
pub fn api(data: &[u8]) {
    // What is pushed to viewers does not end.
    let live = b"/live";
    if data.windows(live.len()).any(|part| part == live) {
        return;
    }
    let device = Arc::new(small());
    let router = router(Control::new(Arc::clone(&device)));
    let answer = RUNTIME.block_on(exchange(data, |stream| http::answer(router, stream)));
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1."), "no HTTP");
    let failed = b"HTTP/1.1 500";
    assert!(!answer.windows(failed.len()).any(|part| part == failed), "{}", String::from_utf8_lossy(&answer));
    works(&device);
}

/// Bytes to the guest port. Every line that says something gets one answer, a JSON object.
pub fn guest(data: &[u8]) {
    let device = Arc::new(small());
    let control = Control::new(Arc::clone(&device));
    let answer = RUNTIME.block_on(exchange(data, |stream| async move {
        guest_port::talk(&control, stream).await.expect("a pipe within this process");
    }));
    let answers: Vec<&[u8]> = answer.split_inclusive(|byte| *byte == b'\n').collect();
    // A line without an end was not sent to the end, and one past the bound is answered whatever it
    // holds.
    let lines = data.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n"));
    let said = lines.filter(|line| !line.trim_ascii().is_empty() || line.len() > guest_port::MAX_LINE + 1);
    assert_eq!(answers.len(), said.count(), "{}", String::from_utf8_lossy(&answer));
    for answer in answers {
        let answer: Value = serde_json::from_slice(answer).expect("an answer is JSON");
        assert!(answer["ok"].is_boolean(), "{answer}");
        assert!(answer["error"] != "the device failed; its log says how", "{answer}");
    }
    let own = ["w", "c.k"];
    assert_eq!(device.tensors().iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>(), own);
    works(&device);
}
