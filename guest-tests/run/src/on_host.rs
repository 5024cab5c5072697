//! The guest's program as a process of the host.

use std::{
    process::{Child, Command},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use lamina_qemu::Outcome;

/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// The program. Dropping it ends it.
pub(crate) struct OnHost {
    child: Mutex<Child>,
    begun: Instant,
}

impl OnHost {
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        let child = command.spawn().context("cannot start the guest's program on the host")?;
        Ok(Self { child: Mutex::new(child), begun: Instant::now() })
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its number.
    pub(crate) fn pid(&self) -> u32 {
        self.child().id()
    }

    pub(crate) fn wait(&self, limit: Duration) -> Result<Outcome> {
        while self.begun.elapsed() < limit {
            if let Some(status) = self.child().try_wait()? {
                let seconds = self.begun.elapsed().as_secs_f64();
                return Ok(Outcome { status: status.code(), boot_seconds: None, seconds });
            }
            thread::sleep(LOOK);
        }
        self.kill();
        bail!("the guest's program did not end within {} s and was killed", limit.as_secs());
    }

    pub(crate) fn kill(&self) {
        let mut child = self.child();
        // The only error is that it has ended already.
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Drop for OnHost {
    fn drop(&mut self) {
        self.kill();
    }
}
