//! What this thread did while it held the map alone, for tests of the bounds, and where it is to
//! fail next.

use std::{cell::Cell, time::Duration};

use nix::time::{ClockId, clock_gettime};

use super::DeviceError;

thread_local! {
    static LONGEST: Cell<(Duration, u64)> = const { Cell::new((Duration::ZERO, 0)) };
    static TO_FAIL: Cell<Option<Step>> = const { Cell::new(None) };
}

/// A step of making or removing a tensor that may find no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Coding a KV window block by block.
    Uncode,
    /// Saving the tables without the tensor.
    Forget,
}

/// Has this thread fail there, from now on.
pub(super) fn fail(step: Option<Step>) {
    TO_FAIL.set(step);
}

pub(super) fn may_fail(step: Step) -> Result<(), DeviceError> {
    if TO_FAIL.get() == Some(step) { Err(DeviceError::Full) } else { Ok(()) }
}

/// The map is held alone as long as this is there.
pub(super) struct Hold {
    begun: Duration,
}

impl Hold {
    pub(super) fn begin() -> Self {
        Self { begun: now() }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let (longest, most) = LONGEST.get();
        LONGEST.set((longest.max(now().saturating_sub(self.begun)), most));
    }
}

/// The charges of so many blocks were moved in one hold.
pub(super) fn moved(blocks: u64) {
    let (longest, most) = LONGEST.get();
    LONGEST.set((longest, most.max(blocks)));
}

/// The longest hold since this was last asked, and the most blocks whose charges were moved in one.
pub(super) fn longest() -> (Duration, u64) {
    LONGEST.take()
}

/// The processor's time that this thread has used: other threads' load is not in it.
fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("every system has it").into()
}
