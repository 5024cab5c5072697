//! Handing a guest's line on to the device's [guest port](super::guest_port), for guests that have
//! no serial port.
//!
//! All that a guest may ask is checked there, and in one place. So this may live in another process
//! than the device, outlives the device's workers, and asks again when one dies.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::peer;

/// Bytes an answer of the device may have.
const MAX_ANSWER: u64 = 16 << 20;
/// How long a device may be gone before its guests are told.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How often a request is made of somebody who goes over it: it may be what ends the device.
const MAX_TRIES: usize = 8;
/// How long a request may take. A flush of many dirty pages is the slowest.
const LIMIT: Duration = Duration::from_secs(120);

/// What the guest port at `port` answers to a line. While nobody listens there, or when the device
/// dies meanwhile, this asks again: every request may be made twice, and says so the second time.
pub(super) async fn answer(port: &Path, line: Vec<u8>) -> Vec<u8> {
    answer_of(port, line, TIMEOUT).await
}

/// The same of a device that may be gone for as long as `timeout`.
async fn answer_of(port: &Path, mut line: Vec<u8>, timeout: Duration) -> Vec<u8> {
    let mut again = repeated(&line);
    line.push(b'\n');
    let (mut gone_since, mut left) = (Instant::now(), MAX_TRIES);
    let asking = async {
        loop {
            let mut sent = false;
            let exchanged = exchange(port, &line, &mut sent).await;
            if sent {
                // Somebody was there until now, however long that took.
                gone_since = Instant::now();
                left -= 1;
            }
            if let Some(again) = again.take_if(|_| sent) {
                line = again;
            }
            match exchanged {
                Ok(answer) if answer.last() == Some(&b'\n') => return answer,
                Ok(answer) if answer.len() as u64 > MAX_ANSWER => {
                    return refusal(&format!("the answer has more than {MAX_ANSWER} bytes"));
                }
                Ok(_) => tracing::debug!("the device went while it was asked"),
                Err(why) => tracing::debug!("the device does not answer: {why}"),
            }
            if left == 0 || gone_since.elapsed() > timeout {
                return refusal("nobody answers for the device: is `lamina` still running?");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let mut answer = tokio::time::timeout(LIMIT, asking)
        .await
        .unwrap_or_else(|_| refusal(&format!("the device did not answer within {} s", LIMIT.as_secs())));
    if answer.last() == Some(&b'\n') {
        answer.pop();
    }
    answer
}

/// The line that asks for the same once more, of a request that may have been done without an
/// answer and is not the same to do twice. It is none if it is not one of these.
fn repeated(line: &[u8]) -> Option<Vec<u8>> {
    let mut request: Map<String, Value> = serde_json::from_slice(line).ok()?;
    let known = ["create_tensors", "remove_tensor", "remove_view"];
    request.get("op").and_then(Value::as_str).filter(|op| known.contains(op))?;
    request.insert("again".to_owned(), Value::Bool(true));
    let mut line = serde_json::to_vec(&request).ok()?;
    line.push(b'\n');
    Some(line)
}

/// Sends a line and returns the one that comes back, or what came of it. `sent` is whether the
/// other side may have it.
async fn exchange(port: &Path, line: &[u8], sent: &mut bool) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(port).await?;
    peer::check(&stream, port)?;
    *sent = true;
    stream.write_all(line).await?;
    let mut answer = Vec::new();
    BufReader::new(stream.take(MAX_ANSWER + 1)).read_until(b'\n', &mut answer).await?;
    Ok(answer)
}

/// An answer that says no.
pub(super) fn refusal(why: &str) -> Vec<u8> {
    json!({ "ok": false, "error": why }).to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn a_request_that_is_made_twice_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let port = folder.path().join("port");
        let listener = UnixListener::bind(&port).unwrap();
        let device = async {
            let mut lines: Vec<Value> = Vec::new();
            for answer in [&b""[..], b"{\"ok\":tr", b"{\"ok\":true}\n"] {
                let (stream, _) = listener.accept().await.unwrap();
                let mut stream = BufReader::new(stream);
                let mut line = Vec::new();
                stream.read_until(b'\n', &mut line).await.unwrap();
                lines.push(serde_json::from_slice(&line).unwrap());
                // Then it dies, or has answered.
                stream.write_all(answer).await.unwrap();
            }
            lines
        };
        let remove = json!({ "op": "remove_tensor", "name": "t" });
        let (answered, lines) = tokio::join!(answer(&port, remove.to_string().into_bytes()), device);
        assert_eq!(answered, b"{\"ok\":true}");
        let again = json!({ "op": "remove_tensor", "name": "t", "again": true });
        assert_eq!(lines, [remove, again.clone(), again]);
    }

    #[tokio::test]
    async fn a_request_that_outlasted_the_timeout_is_made_again_all_the_same() {
        const TIMEOUT: Duration = Duration::from_millis(500);
        let folder = tempfile::tempdir().unwrap();
        let port = folder.path().join("port");
        let listener = UnixListener::bind(&port).unwrap();
        let device = async {
            for answer in [&b""[..], b"", b"{}\n"] {
                let (stream, _) = listener.accept().await.unwrap();
                let mut stream = BufReader::new(stream);
                stream.read_until(b'\n', &mut Vec::new()).await.unwrap();
                tokio::time::sleep(2 * TIMEOUT).await;
                stream.write_all(answer).await.unwrap();
            }
        };
        let answered = answer_of(&port, b"{\"op\":\"flush\"}".to_vec(), TIMEOUT);
        let (answered, ()) = tokio::time::timeout(20 * TIMEOUT, async { tokio::join!(answered, device) })
            .await
            .expect("it is not asked again");
        assert_eq!(answered, b"{}");
    }

    #[test]
    fn what_may_be_done_twice_stays_as_it_is() {
        for line in [&br#"{"op":"flush","offset":0}"#[..], br#"{"op":"view"}"#, b"no request", b"[1]", b""] {
            assert_eq!(repeated(line), None);
        }
    }
}
