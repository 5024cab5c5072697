//! A thread that does a node's duty.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::PoolError;
use crate::pool::Pool;

/// How long it sleeps between two turns.
const SLEEP: Duration = Duration::from_millis(1);

/// A thread that calls [`Pool::serve`] until this is dropped, or the node is fenced. Who is stopped
/// may hold a lock for longer than a wait takes: it goes on nevertheless, and does later what it
/// could not do.
#[derive(Debug)]
pub struct Service {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), PoolError>>>,
}

impl Service {
    /// Starts it.
    pub fn start(pool: Arc<Pool>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                match pool.serve() {
                    Ok(()) | Err(PoolError::Timeout(_)) => {}
                    Err(why) => return Err(why),
                }
                std::thread::sleep(SLEEP);
            }
            Ok(())
        });
        Self { stop, thread: Some(thread) }
    }

    /// Stops it, and says what stopped it before.
    ///
    /// # Errors
    /// What [`Pool::serve`] gave.
    pub fn stop(mut self) -> Result<(), PoolError> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(done)) => done,
            _ => Ok(()),
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::AtomicU64;
    use std::time::Instant;

    use super::*;
    use crate::host::Host;
    use crate::layout::Geometry;
    use crate::local::{self, Processes};

    /// A machine whose waits fail soon, and which counts its steps of waiting.
    pub(crate) struct Hasty(pub(crate) Processes, pub(crate) Arc<AtomicU64>);

    impl Host for Hasty {
        fn now(&self) -> u64 {
            self.0.now()
        }

        fn relax(&self, turns: u32) {
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.relax(turns);
        }

        fn timeout(&self) -> u64 {
            self.0.timeout()
        }

        fn max_wait(&self) -> u64 {
            20
        }

        fn is_gone(&self, node: u32, incarnation: u32) -> bool {
            self.0.is_gone(node, incarnation)
        }

        fn revoke(&self, node: u32, incarnation: u32) -> bool {
            self.0.revoke(node, incarnation)
        }
    }

    pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
        let began = Instant::now();
        while !holds() {
            assert!(began.elapsed() < Duration::from_secs(20), "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_lock_that_is_held_for_longer_than_a_wait_delays_a_recovery_and_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        local::create(&path, &Geometry::fitting(8 << 20)).unwrap();
        let memory = local::memory(&path).unwrap();
        let nodes = Pool::geometry(memory.clone()).unwrap().nodes;
        let host = Processes::claim(local::open_file(&path).unwrap(), nodes, None).unwrap();
        let (node, waited) = (host.node(), Arc::new(AtomicU64::new(0)));
        let host = Hasty(host, Arc::clone(&waited));
        let manager = Arc::new(Pool::attach(memory, Arc::new(host), node).unwrap());
        let (stopped, dead) = (Pool::open(&path).unwrap(), Pool::open(&path).unwrap());
        let held = stopped.member.acquire(1).unwrap();
        drop(dead);
        let service = Service::start(Arc::clone(&manager));
        until("nobody waits", || waited.load(Ordering::Relaxed) > 0);
        // By then it has given up.
        std::thread::sleep(Duration::from_millis(100));
        let before = waited.load(Ordering::Relaxed);
        until("nobody waits any more", || waited.load(Ordering::Relaxed) > before);
        let recoveries = || manager.counts.recoveries.load(Ordering::Relaxed);
        assert_eq!(recoveries(), 0);
        held.release().unwrap();
        until("nobody is recovered", || recoveries() == 1);
        service.stop().unwrap();
        assert!(Pool::open(&path).is_ok());
    }
}
