//! Serving vhost-user connections on a socket, one after another.
//!
//! * One connection is served at a time, as a device has one user; another one waits until that has
//!   gone, and the log says so.
//! * Dropping [`Connections`] lets what is being done end, and closes the connection. Neither is
//!   waited for longer than [`TIMEOUT`]: what does not end by then, because a guest or its monitor
//!   holds it up, is left to end by itself.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vhost::vhost_user::{Error as ProtocolError, Listener};
use vhost_user_backend::{
    Error as DaemonError, ShutdownHandle, VhostUserBackend, VhostUserDaemon, VringMutex,
};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::event::{EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier};

/// How long the end of a connection may take.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

/// After how long the log says that a connection waits. One that comes as another goes does not.
const WAIT_BEFORE_WARNING: Duration = Duration::from_secs(1);

/// The guest's memory.
pub(crate) type Memory = GuestMemoryMmap<()>;
/// A ring, as vhost-user gives it.
pub(crate) type Ring = VringMutex<GuestMemoryAtomic<Memory>>;

/// What wakes the threads of a connection's queues when it ends. A backend keeps it to its own end.
///
/// `vhost-user-backend` 0.24 takes a consumer's descriptor for a number and never closes it: that
/// is done here. Each of its threads holds the backend until it has waited for the last time, so
/// nobody waits on a number that is another file's by then.
#[derive(Default)]
pub(super) struct ExitEvents(Mutex<Vec<OwnedFd>>);

impl ExitEvents {
    /// An event for one more thread. The consumer is not to be dropped, only to be taken apart.
    pub(super) fn add(&self) -> Option<(EventConsumer, EventNotifier)> {
        let flags = EventFlag::CLOEXEC | EventFlag::NONBLOCK;
        let (consumer, notifier) = new_event_consumer_and_notifier(flags).ok()?;
        // SAFETY: whoever asked for the event gives the descriptor up without closing it.
        let owned = unsafe { OwnedFd::from_raw_fd(consumer.as_raw_fd()) };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(owned);
        Some((consumer, notifier))
    }
}

/// What a connection is to.
pub(super) trait Served: Send + Sync + 'static {
    /// One connection's part of it.
    type Backend: VhostUserBackend<Bitmap = (), Vring = Ring> + 'static;

    /// The part of a new connection, whose guest has this memory.
    fn backend(&self, memory: &GuestMemoryAtomic<Memory>) -> Self::Backend;

    /// Has it begin nothing more. Never waits.
    fn stop(backend: &Self::Backend);

    /// Waits for what it does after [`Self::stop`], until `deadline`: whether it does nothing any
    /// more.
    fn is_quiet_by(backend: &Self::Backend, deadline: Instant) -> bool;

    /// Somebody connected, or went.
    fn set_connected(&self, connected: bool);
}

/// A device's connections. Dropping it ends them.
pub(super) struct Connections<S: Served> {
    /// Closed to wake the thread.
    stop: Option<UnixStream>,
    current: Arc<Mutex<Current<S>>>,
    thread: Option<JoinHandle<()>>,
}

/// The connection that is being served.
struct Current<S: Served> {
    connection: Option<(Arc<S::Backend>, ShutdownHandle)>,
    stopping: bool,
}

impl<S: Served> Connections<S> {
    /// Serves those who connect to `listener`, which does not block, by a thread of this name.
    pub(super) fn serve(served: Arc<S>, listener: UnixListener, name: String) -> io::Result<Self> {
        let current = Arc::new(Mutex::new(Current { connection: None, stopping: false }));
        let (stop, stopped) = UnixStream::pair()?;
        let run = {
            let current = Arc::clone(&current);
            move || accept(&*served, &listener, &stopped, &current)
        };
        let thread = thread::Builder::new().name(name).spawn(run)?;
        Ok(Self { stop: Some(stop), current, thread: Some(thread) })
    }
}

impl<S: Served> Connections<S> {
    /// Takes no more connections, and has the one there is begin nothing more. Never waits.
    pub(super) fn stop(&mut self) {
        drop(self.stop.take());
        let mut current = lock(&self.current);
        current.stopping = true;
        if let Some((backend, _)) = &current.connection {
            S::stop(backend);
        }
    }

    /// Closes the connection after [`Self::stop`], when nothing is done for it any more, or at
    /// `deadline`.
    pub(super) fn close_by(&self, deadline: Instant) {
        let connection = lock(&self.current).connection.take();
        if let Some((backend, shutdown)) = connection {
            // Only then may the other side look at what was given back.
            if !S::is_quiet_by(&backend, deadline) {
                tracing::warn!("a guest's request does not come to an end, and is left");
            }
            shutdown.shutdown();
        }
    }
}

impl<S: Served> Drop for Connections<S> {
    fn drop(&mut self) {
        let deadline = Instant::now() + TIMEOUT;
        self.stop();
        self.close_by(deadline);
        let Some(thread) = self.thread.take() else { return };
        while !thread.is_finished() {
            if Instant::now() >= deadline {
                tracing::warn!("a vhost-user connection does not end, and is left");
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        // A panic was logged by the panic hook.
        let _ = thread.join();
    }
}

fn lock<S: Served>(current: &Mutex<Current<S>>) -> MutexGuard<'_, Current<S>> {
    current.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves connections until `stopped` is closed.
fn accept<S: Served>(served: &S, listener: &UnixListener, stopped: &UnixStream, current: &Mutex<Current<S>>) {
    loop {
        match wait(listener, stopped) {
            Ok(true) => {}
            Ok(false) => return,
            Err(why) => {
                tracing::error!("a vhost-user socket cannot be waited on, it is closed: {why}");
                return;
            }
        }
        if let Err(why) = connection(served, listener, current) {
            tracing::warn!("a vhost-user connection ended: {why}");
            // What failed at once would fail again at once.
            thread::sleep(std::time::Duration::from_millis(50));
        }
        served.set_connected(false);
    }
}

/// Whether somebody wants to connect; `false` if it is time to stop.
fn wait(listener: &UnixListener, stopped: &UnixStream) -> io::Result<bool> {
    loop {
        let mut descriptors = [
            PollFd::new(listener.as_fd(), PollFlags::POLLIN),
            PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut descriptors, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(why) => return Err(why.into()),
        }
        if descriptors[1].any().unwrap_or(true) {
            return Ok(false);
        }
        if descriptors[0].any().unwrap_or(false) {
            return Ok(true);
        }
    }
}

/// Serves a connection by `serve`, and says in the log if another one waits for its end.
fn watched<T>(listener: &UnixListener, serve: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        let watching = UnixStream::pair().and_then(|(served, ended)| {
            let watch = move || warn_of_another(listener, &ended);
            thread::Builder::new().name("vhost-user-waiting".into()).spawn_scoped(scope, watch)?;
            Ok(served)
        });
        if let Err(why) = &watching {
            tracing::debug!("nobody looks whether another connection waits: {why}");
        }
        let done = serve();
        drop(watching);
        done
    })
}

/// Warns once if somebody waits at `listener`, unless `ended` is closed before.
fn warn_of_another(listener: &UnixListener, ended: &UnixStream) {
    let still_served = || {
        let mut end = [PollFd::new(ended.as_fd(), PollFlags::POLLIN)];
        // The next connection is taken only after the end of this one.
        matches!(
            poll(&mut end, PollTimeout::try_from(WAIT_BEFORE_WARNING).unwrap_or(PollTimeout::MAX)),
            Ok(0)
        )
    };
    if matches!(wait(listener, ended), Ok(true)) && still_served() {
        let address = listener.local_addr().ok();
        let bound = address.as_ref().and_then(SocketAddr::as_pathname).unwrap_or(Path::new(""));
        // It may be bound through a descriptor of its folder, perhaps of another process.
        let path = fs::canonicalize(bound)
            .unwrap_or_else(|_| bound.file_name().map(PathBuf::from).unwrap_or_default());
        tracing::warn!(
            path = %path.display(),
            "another connection waits: one guest at a time is served, and this socket has one"
        );
    }
}

/// Takes a connection and serves it to its end.
fn connection<S: Served>(
    served: &S,
    listener: &UnixListener,
    current: &Mutex<Current<S>>,
) -> Result<(), DaemonError> {
    let memory = GuestMemoryAtomic::new(Memory::new());
    let backend = Arc::new(served.backend(&memory));
    let mut daemon = VhostUserDaemon::new("vhost-user-connection".to_owned(), Arc::clone(&backend), memory)?;
    let mut accepting = Listener::from(listener.try_clone().map_err(DaemonError::StartDaemon)?);
    daemon.start(&mut accepting)?;
    drop(accepting);
    served.set_connected(true);
    {
        let mut current = lock(current);
        match daemon.shutdown_handle() {
            Some(shutdown) if current.stopping => {
                S::stop(&backend);
                shutdown.shutdown();
            }
            shutdown => current.connection = shutdown.map(|shutdown| (backend, shutdown)),
        }
    }
    let ended = watched(listener, || daemon.wait());
    lock(current).connection = None;
    match ended {
        Err(DaemonError::HandleRequest(ProtocolError::Disconnected | ProtocolError::PartialMessage)) => {
            Ok(())
        }
        ended => ended,
    }
}
