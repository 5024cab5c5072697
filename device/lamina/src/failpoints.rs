//! What tests make happen to a device that is being stopped, in builds with debug assertions;
//! others have nothing of this.

use std::time::Duration;

/// Milliseconds that the last sync takes longer.
const SYNC: &str = "LAMINA_FAULT_SYNC";
/// Milliseconds that a worker which is to stop may say nothing.
const STOP: &str = "LAMINA_FAULT_STOP";

fn milliseconds(name: &str) -> Option<Duration> {
    std::env::var(name).ok()?.parse().ok().map(Duration::from_millis)
}

/// Sleeps before the last sync, if that is to.
pub(crate) fn sync() {
    if let Some(time) = milliseconds(SYNC) {
        std::thread::sleep(time);
    }
}

/// How long a worker that is to stop may say nothing, if that is not as usual.
pub(crate) fn stop() -> Option<Duration> {
    milliseconds(STOP)
}
