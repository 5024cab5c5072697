//! The API's stream of updates.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;

use crate::args::ApiAt;
use crate::client::{self, Connection};
use crate::status::NoDevice;

/// Bytes that one update may have.
const MAX_UPDATE: usize = 256 << 20;
/// Without an update for so long, the device is taken to be gone: there is one each second.
const SILENCE: Duration = Duration::from_secs(10);

/// A stream that was opened.
#[derive(Debug)]
pub(super) struct Stream {
    body: Incoming,
    _connection: Connection,
    events: Events,
}

impl Stream {
    /// Opens the one of the device at `api`.
    ///
    /// # Errors
    /// When no device answers there, or it has no such stream.
    pub(super) async fn open(api: &ApiAt) -> Result<Self> {
        let (body, connection) = client::open(api, "/live").await?;
        Ok(Self { body, _connection: connection, events: Events::default() })
    }

    /// The next update. May be given up at any time: then nothing is lost.
    ///
    /// # Errors
    /// When the device went away, or sends something else.
    pub(super) async fn next<U: DeserializeOwned>(&mut self) -> Result<U> {
        loop {
            if let Some(data) = self.events.next() {
                return serde_json::from_slice(&data).context("the device's update is not understood");
            }
            let frame = tokio::time::timeout(SILENCE, self.body.frame()).await;
            let frame = frame.with_context(|| NoDevice("the device is silent".to_owned()))?;
            let Some(frame) = frame else { bail!(NoDevice("the device went away".to_owned())) };
            let frame = frame.with_context(|| NoDevice("the device went away".to_owned()))?;
            if let Ok(data) = frame.into_data() {
                self.events.add(&data)?;
            }
        }
    }
}

/// Events as they arrive, in pieces.
#[derive(Debug, Default)]
struct Events {
    bytes: Vec<u8>,
    /// Up to here no event ends.
    looked: usize,
}

impl Events {
    fn add(&mut self, bytes: &[u8]) -> Result<()> {
        if self.bytes.len().saturating_add(bytes.len()) > MAX_UPDATE {
            bail!("the device's update has more than {MAX_UPDATE} bytes");
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// The data of the next whole event.
    fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let end = self.bytes[self.looked..].windows(2).position(|two| two == b"\n\n");
            let Some(end) = end.map(|end| self.looked + end) else {
                self.looked = self.bytes.len().saturating_sub(1);
                return None;
            };
            let event: Vec<u8> = self.bytes.drain(..end + 2).collect();
            self.looked = 0;
            let data = event.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"data: "));
            if let Some(data) = data {
                return Some(data.to_vec());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_wherever_they_are_cut() {
        let text = b"event: whole\ndata: {\"a\": 1}\n\n: nothing\n\nevent: tick\ndata: 2\n\ndata: 3";
        for cut in 1..text.len() {
            let mut events = Events::default();
            let mut found = Vec::new();
            for piece in text.chunks(cut) {
                events.add(piece).unwrap();
                found.extend(std::iter::from_fn(|| events.next()));
            }
            assert_eq!(found, [b"{\"a\": 1}".to_vec(), b"2".to_vec()], "{cut}");
        }
    }
}
