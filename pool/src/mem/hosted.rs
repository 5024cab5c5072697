//! A host of Lamina's that is not coherent with the others: a mapping of its own `base`, and the
//! control port, whose `flush` and `invalidate` do what `clwb` and `clflush` do elsewhere.
//!
//! A flush or an invalidation is remembered, and the next fence asks the device for all of them,
//! each run of neighbouring lines by one request. A request costs far more than an instruction:
//! this is for finding what is missing, not for speed.

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use super::{CxlMem, LINE, Map, MemError, inside};
use crate::mutex::locked;

/// How long the device may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Who flushes and invalidates.
pub trait Port: Send + Sync {
    /// Asks for `flush` or `invalidate` of a range and returns when it is done.
    ///
    /// # Errors
    /// [`MemError::Port`].
    fn request(&self, op: &'static str, at: u64, length: u64) -> Result<(), MemError>;
}

/// Who takes another host's access away.
pub trait Revoke: Send + Sync {
    /// Takes the access of the host of this name away. When it returns, none of that host's stores
    /// can reach the region any more.
    ///
    /// # Errors
    /// [`MemError::Port`], [`MemError::Revoked`].
    fn revoke(&self, host: &str) -> Result<(), MemError>;
}

/// The control port of a host as a Unix socket: an object of JSON a line, each way.
#[derive(Debug)]
pub struct Socket {
    stream: Mutex<BufReader<UnixStream>>,
}

impl Socket {
    /// Connects.
    ///
    /// # Errors
    /// [`MemError::Map`].
    pub fn connect(path: &Path) -> Result<Self, MemError> {
        let open = || {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(TIMEOUT))?;
            stream.set_write_timeout(Some(TIMEOUT))?;
            Ok(stream)
        };
        let stream = open().map_err(|cause| MemError::Map { what: path.display().to_string(), cause })?;
        Ok(Self { stream: Mutex::new(BufReader::new(stream)) })
    }

    fn ask(&self, request: &serde_json::Value) -> Result<(), MemError> {
        let request = request.to_string();
        let fail = |why: String| MemError::Port { request: request.clone(), why };
        let mut stream = self.stream.lock().map_err(|_| fail("an earlier request failed".into()))?;
        let mut line = String::new();
        let asked = stream.get_mut().write_all(format!("{request}\n").as_bytes());
        let answered = asked.and_then(|()| stream.read_line(&mut line));
        let reply = answered.and_then(|_| Ok(serde_json::from_str::<serde_json::Value>(&line)?));
        let reply = reply.map_err(|why| {
            // An answer that comes late is not the next request's.
            let _ = stream.get_ref().shutdown(Shutdown::Both);
            fail(why.to_string())
        })?;
        match (&reply["ok"], &reply["revoked"]) {
            (serde_json::Value::Bool(true), _) => Ok(()),
            (_, serde_json::Value::Bool(true)) => Err(MemError::Revoked),
            _ => Err(fail(line.trim().to_owned())),
        }
    }
}

impl Port for Socket {
    fn request(&self, op: &'static str, at: u64, length: u64) -> Result<(), MemError> {
        self.ask(&serde_json::json!({ "op": op, "offset": at, "length": length }))
    }
}

impl Revoke for Socket {
    fn revoke(&self, host: &str) -> Result<(), MemError> {
        self.ask(&serde_json::json!({ "op": "revoke", "host": host }))
    }
}

/// What the next fence asks for.
#[derive(Debug, Default)]
struct Waiting {
    flush: Vec<(u64, u64)>,
    invalidate: Vec<(u64, u64)>,
}

/// A host's own memory of a region.
#[derive(Debug)]
pub struct Hosted<P = Socket> {
    map: Map,
    port: P,
    waiting: Mutex<Waiting>,
    /// Held while the device is asked. A fence waits for what another thread's has taken up: that
    /// is among the flushes it stands for.
    asking: Mutex<()>,
}

impl<P: Port> Hosted<P> {
    /// Memory behind a mapping of the host's `base`.
    pub fn new(map: Map, port: P) -> Self {
        Self { map, port, waiting: Mutex::default(), asking: Mutex::default() }
    }

    fn wait(
        &self,
        at: u64,
        length: u64,
        of: impl Fn(&mut Waiting) -> &mut Vec<(u64, u64)>,
    ) -> Result<(), MemError> {
        inside(at, length, self.bytes())?;
        let first = at / LINE * LINE;
        let end = (at + length).next_multiple_of(LINE).min(self.bytes());
        if length > 0 {
            of(&mut locked(&self.waiting)).push((first, end));
        }
        Ok(())
    }

    fn ask(&self, op: &'static str, ranges: &[(u64, u64)]) -> Result<(), MemError> {
        let mut ranges = ranges.to_vec();
        ranges.sort_unstable();
        let mut ranges = ranges.into_iter().peekable();
        while let Some((first, mut end)) = ranges.next() {
            while let Some((_, next)) = ranges.next_if(|range| range.0 <= end) {
                end = end.max(next);
            }
            self.port.request(op, first, end - first)?;
        }
        Ok(())
    }
}

impl<P: Port> CxlMem for Hosted<P> {
    fn bytes(&self) -> u64 {
        self.map.bytes()
    }

    fn coherent(&self) -> bool {
        false
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MemError> {
        self.map.load(at, into)
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        self.map.store(at, from)
    }

    fn ntstore(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        self.map.store(at, from)?;
        self.flush(at, from.len() as u64)
    }

    fn flush(&self, at: u64, length: u64) -> Result<(), MemError> {
        self.wait(at, length, |waiting| &mut waiting.flush)
    }

    fn invalidate(&self, at: u64, length: u64) -> Result<(), MemError> {
        self.wait(at, length, |waiting| &mut waiting.invalidate)
    }

    fn fence(&self) -> Result<(), MemError> {
        let _one = locked(&self.asking);
        let Waiting { flush, invalidate } = std::mem::take(&mut *locked(&self.waiting));
        let done = self.ask("flush", &flush).and_then(|()| self.ask("invalidate", &invalidate));
        if done.is_err() {
            // Another thread's may be among them: its fence is to fail too, or to do them.
            let mut waiting = locked(&self.waiting);
            let Waiting { flush: flushes, invalidate: invalidations } = &mut *waiting;
            for (ranges, again) in [(flushes, flush), (invalidations, invalidate)] {
                ranges.extend(again);
                ranges.sort_unstable();
                ranges.dedup();
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;
    use crate::mem::Lines;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(&'static str, u64, u64)>>);

    impl Port for Arc<Recorder> {
        fn request(&self, op: &'static str, at: u64, length: u64) -> Result<(), MemError> {
            self.0.lock().unwrap().push((op, at, length));
            Ok(())
        }
    }

    fn map() -> Map {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        Map::new(&file, Path::new("a file"), None).unwrap()
    }

    #[test]
    fn neighbours_are_asked_for_at_once_and_stores_go_before_loads() {
        let recorder = Arc::new(Recorder::default());
        let lines = Lines::new(Arc::new(Hosted::new(map(), recorder.clone())));
        lines.invalidate(0, 8).unwrap();
        lines.ntstore(256, &[1; 64]).unwrap();
        lines.flush(130, 100).unwrap();
        lines.flush(1024, 1).unwrap();
        assert!(recorder.0.lock().unwrap().is_empty());
        lines.fence().unwrap();
        assert_eq!(
            *recorder.0.lock().unwrap(),
            [("flush", 128, 192), ("flush", 1024, 64), ("invalidate", 0, 64)]
        );
    }

    /// Says that it is asked, and answers when it is let, with an error if it is told so.
    struct Slow {
        asked: Sender<(&'static str, u64)>,
        fails: Mutex<Receiver<bool>>,
    }

    impl Port for Slow {
        fn request(&self, op: &'static str, at: u64, _: u64) -> Result<(), MemError> {
            self.asked.send((op, at)).unwrap();
            let fails = self.fails.lock().unwrap().recv().unwrap();
            if fails { Err(MemError::Revoked) } else { Ok(()) }
        }
    }

    #[test]
    fn a_fence_waits_for_flushes_that_another_threads_fence_has_taken_up() {
        for fails in [false, true] {
            let ((asked, is_asked), (answer, fail)) = (channel(), channel());
            let memory = Hosted::new(map(), Slow { asked, fails: Mutex::new(fail) });
            memory.flush(64, 64).unwrap();
            std::thread::scope(|scope| {
                let first = scope.spawn(|| memory.fence());
                assert_eq!(is_asked.recv().unwrap(), ("flush", 64));
                let second = scope.spawn(|| memory.fence());
                std::thread::sleep(Duration::from_millis(100));
                let is_early = second.is_finished();
                answer.send(fails).unwrap();
                // If the other fails, what it has not done is asked for again.
                answer.send(false).unwrap();
                assert_eq!(first.join().unwrap().is_err(), fails);
                assert!(second.join().unwrap().is_ok());
                assert!(!is_early, "the line was not flushed yet");
                assert_eq!(is_asked.try_recv().is_ok(), fails);
            });
        }
    }

    #[test]
    fn an_answer_that_comes_late_is_not_taken_for_the_next_requests() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ctl");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let socket = Socket::connect(&path).unwrap();
        let mut device = BufReader::new(listener.accept().unwrap().0);
        let timeout = Some(Duration::from_millis(50));
        socket.stream.lock().unwrap().get_ref().set_read_timeout(timeout).unwrap();
        assert!(matches!(socket.request("flush", 0, 64), Err(MemError::Port { .. })));
        let mut line = String::new();
        device.read_line(&mut line).unwrap();
        let _ = device.get_mut().write_all(b"{\"ok\":true}\n");
        assert!(matches!(socket.request("flush", 64, 64), Err(MemError::Port { .. })));
    }

    #[test]
    fn a_host_that_was_revoked_is_told_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ctl");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let device = std::thread::spawn(move || {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            stream.get_mut().write_all(b"{\"ok\":false,\"error\":\"no\",\"revoked\":true}\n").unwrap();
            line
        });
        let answer = Socket::connect(&path).unwrap().revoke("other");
        assert!(matches!(answer, Err(MemError::Revoked)), "{answer:?}");
        let asked: serde_json::Value = serde_json::from_str(&device.join().unwrap()).unwrap();
        assert_eq!(asked, serde_json::json!({ "op": "revoke", "host": "other" }));
    }

    #[test]
    fn the_ports_no_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ctl");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let device = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut stream = BufReader::new(stream);
            let mut asked = Vec::new();
            for answer in ["{\"ok\":true}\n", "{\"ok\":false,\"error\":\"no\"}\n"] {
                let mut line = String::new();
                stream.read_line(&mut line).unwrap();
                asked.push(serde_json::from_str::<serde_json::Value>(&line).unwrap());
                stream.get_mut().write_all(answer.as_bytes()).unwrap();
            }
            asked
        });
        let memory = Hosted::new(map(), Socket::connect(&path).unwrap());
        memory.flush(64, 64).unwrap();
        memory.fence().unwrap();
        memory.invalidate(64, 64).unwrap();
        assert!(matches!(memory.fence(), Err(MemError::Port { .. })));
        let asked = device.join().unwrap();
        assert_eq!(asked[0], serde_json::json!({ "op": "flush", "offset": 64, "length": 64 }));
        assert_eq!(asked[1]["op"], "invalidate");
    }
}
