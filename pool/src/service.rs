//! A thread that does a node's duty.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::PoolError;
use crate::pool::Pool;

/// How long it sleeps between two turns.
const SLEEP: Duration = Duration::from_millis(1);

/// A thread that calls [`Pool::serve`] until this is dropped, or the node is fenced.
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
                pool.serve()?;
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
