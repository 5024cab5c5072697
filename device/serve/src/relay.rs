//! Handing a guest's line on to the device's [guest port](super::guest_port), for guests that have
//! no serial port.
//!
//! All that a guest may ask is checked there, and in one place. So this may live in another process
//! than the device, outlives the device's workers, and asks again when one dies.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::peer;

/// Bytes an answer of the device may have.
const MAX_ANSWER: u64 = 16 << 20;
/// How long a device may be gone before its guests are told.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long a request may take. A flush of many dirty pages is the slowest.
const LIMIT: Duration = Duration::from_secs(120);

/// What the guest port at `port` answers to a line. While nobody listens there, or when the device
/// dies meanwhile, this asks again: every request may be made twice.
pub(super) async fn answer(port: &Path, mut line: Vec<u8>) -> Vec<u8> {
    line.push(b'\n');
    let begun = Instant::now();
    let asking = async {
        loop {
            match exchange(port, &line).await {
                Ok(answer) if answer.last() == Some(&b'\n') => return answer,
                Ok(answer) if answer.len() as u64 > MAX_ANSWER => {
                    return refusal(&format!("the answer has more than {MAX_ANSWER} bytes"));
                }
                Ok(_) => tracing::debug!("the device went while it was asked"),
                Err(why) => tracing::debug!("the device does not answer: {why}"),
            }
            if begun.elapsed() > TIMEOUT {
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

/// Sends a line and returns the one that comes back, or what came of it.
async fn exchange(port: &Path, line: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(port).await?;
    peer::check(&stream, port)?;
    stream.write_all(line).await?;
    let mut answer = Vec::new();
    BufReader::new(stream.take(MAX_ANSWER + 1)).read_until(b'\n', &mut answer).await?;
    Ok(answer)
}

/// An answer that says no.
pub(super) fn refusal(why: &str) -> Vec<u8> {
    json!({ "ok": false, "error": why }).to_string().into_bytes()
}
