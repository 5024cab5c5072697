//! What a viewer sees, pushed: `GET /live`, server-sent events for the page and `lamina top`.
//!
//! * One snapshot a [tick](TICK) for all viewers, while there are any; each is computed, compared
//!   with the one before and put into words once. Viewers share the bytes.
//! * A viewer's first event is `whole`, those after it are `tick`. Both have the same form: a tick
//!   has those rows of tensors and views that changed, and the names of those that went. The rest,
//!   which is short, is always there.
//! * A viewer that does not keep up misses ticks, and gets a `whole` when it reads again. Nothing
//!   is kept for it, and nobody waits for it.

mod snapshot;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use hyper::body::{Body, Frame};
use serde::Serialize;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use self::snapshot::Snapshot;
use super::control::Control;

/// How often viewers are told.
pub(super) const TICK: Duration = Duration::from_secs(1);
/// Viewers at once: each has one of the API's connections for as long as it looks.
pub(super) const VIEWERS: usize = 24;
/// Events that may wait for a viewer.
const WAITING: usize = 2;

/// A device as viewers see it.
#[derive(Clone)]
pub(super) struct Live {
    control: Control,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    viewers: Vec<Viewer>,
    /// The last snapshot, and when it was made; none while nobody looks.
    last: Option<(Instant, Snapshot)>,
    /// It as an event, once somebody wanted it whole.
    whole: Option<Bytes>,
}

/// Where a viewer is told.
struct Viewer {
    events: Sender<Bytes>,
    /// Whether it missed a tick.
    behind: bool,
}

/// There are as many viewers as there may be.
#[derive(Debug)]
pub(super) struct TooMany;

impl Live {
    pub(super) fn new(control: Control) -> Self {
        Self { control, state: Arc::default() }
    }

    /// A new viewer's events, of which the first waits already. Sleeps where the device's counters
    /// do; ticks are made by a task of this runtime.
    ///
    /// # Errors
    /// When there are too many viewers.
    pub(super) fn watch(&self, runtime: &tokio::runtime::Handle) -> Result<Watched, TooMany> {
        let mut state = self.lock();
        state.viewers.retain(|viewer| !viewer.events.is_closed());
        if state.viewers.len() >= VIEWERS {
            return Err(TooMany);
        }
        let first = state.last.is_none();
        if first {
            state.last = Some((Instant::now(), Snapshot::of(&self.control)));
        }
        let (events, watched) = channel(WAITING);
        // It is empty, and its end is here.
        let _ = events.try_send(state.whole());
        state.viewers.push(Viewer { events, behind: false });
        if first {
            let live = self.clone();
            runtime.spawn(async move { live.tick().await });
        }
        Ok(Watched(watched))
    }

    /// Tells viewers, until there are none.
    async fn tick(self) {
        loop {
            tokio::time::sleep(TICK).await;
            let live = self.clone();
            let told = tokio::task::spawn_blocking(move || live.tell()).await;
            if !told.unwrap_or_else(|why| {
                tracing::error!("viewers cannot be told: {why}");
                let mut state = self.lock();
                state.viewers.clear();
                state.last = None;
                false
            }) {
                return;
            }
        }
    }

    /// Tells viewers what is now: whether there are any.
    fn tell(&self) -> bool {
        // Whoever comes meanwhile waits for this.
        let mut state = self.lock();
        state.viewers.retain(|viewer| !viewer.events.is_closed());
        if state.viewers.is_empty() {
            (state.last, state.whole) = (None, None);
            return false;
        }
        let now = (Instant::now(), Snapshot::of(&self.control));
        let tick = match &state.last {
            Some((at, last)) => event("tick", &now.1.since(last, now.0.duration_since(*at))),
            None => event("whole", &now.1.whole()),
        };
        (state.last, state.whole) = (Some(now), None);
        let mut viewers = std::mem::take(&mut state.viewers);
        viewers.retain_mut(|viewer| {
            let told = if viewer.behind { state.whole() } else { tick.clone() };
            match viewer.events.try_send(told) {
                Ok(()) => viewer.behind = false,
                Err(TrySendError::Full(_)) => viewer.behind = true,
                Err(TrySendError::Closed(_)) => return false,
            }
            true
        });
        state.viewers = viewers;
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The last snapshot as an event.
    fn whole(&mut self) -> Bytes {
        let last = self.last.as_ref().map(|(_, last)| last);
        let whole = self.whole.get_or_insert_with(|| event("whole", &last.map(Snapshot::whole)));
        whole.clone()
    }
}

/// An event of a stream: its data is one line, as JSON has none.
fn event(name: &str, data: &impl Serialize) -> Bytes {
    let mut text = format!("event: {name}\ndata: ").into_bytes();
    // A `Vec` takes everything, and what is written are numbers and names.
    if let Err(why) = serde_json::to_writer(&mut text, data) {
        tracing::error!("an update could not be encoded: {why}");
    }
    text.extend(b"\n\n");
    text.into()
}

/// The body of an answer that goes on.
#[derive(Debug)]
pub(super) struct Watched(pub(super) Receiver<Bytes>);

impl Body for Watched {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}

#[cfg(test)]
mod tests;
