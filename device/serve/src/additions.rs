//! What a program adds to the API of a device that it serves. Serving itself knows neither traces
//! nor models.

use std::fmt::Debug;
use std::sync::Arc;

use axum::body::Bytes;
use tokio::sync::mpsc::Sender;

use lamina_device::device::Device;

/// Pieces of a recording that may wait for who takes it.
pub(super) const WAITING: usize = 16;

/// Records what requests move.
pub trait Recorder: Debug + Send + Sync {
    /// Begins to record, and sends the trace there, piece by piece, until it is told to stop or
    /// nobody takes it. Its last piece ends the trace.
    ///
    /// # Errors
    /// Why it does not: it records already, for example.
    fn begin(&self, device: &Arc<Device>, to: Sender<Bytes>) -> Result<(), String>;

    /// Stops; what was moved before this is in the trace. Whether anything was being recorded.
    fn stop(&self) -> bool;
}

/// All that is added.
#[derive(Clone, Debug, Default)]
pub struct Additions {
    /// Who records.
    pub recorder: Option<Arc<dyn Recorder>>,
    /// A page for planners, in HTML.
    pub planner: Option<Arc<str>>,
}
