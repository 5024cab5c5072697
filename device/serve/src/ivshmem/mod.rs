//! Guests that see the windows as shared memory of PCI devices (ivshmem) ask the device through a
//! mailbox and a doorbell.
//!
//! The windows themselves need no server: QEMU maps the mount's files. What is served here is the
//! third device, in the place of an ivshmem server (QEMU's docs/specs/ivshmem-spec): a Unix socket
//! at which each QEMU gets a small memory of its own, the [mailbox](lamina_abi::mailbox), and two
//! eventfds, one to ring the device and one by which the device rings.
//!
//! * A request is a line of the [guest port](super::guest_port), and is handed on to one: all that
//!   a guest may ask is checked there, and in one place. So this may live in another process than
//!   the device, outlives the device's workers, and asks again when one dies. QEMU cannot connect
//!   anew to a server that went away.
//! * A guest is not trusted, and neither is its QEMU: the mailbox cannot be made shorter, it is
//!   read and written by system calls rather than through a mapping, every length in it is bounded
//!   before it is used, and what was read once is not read again.
//! * Guests do not know of each other: each is told of the device and of itself.

pub(crate) mod mailbox;
pub(crate) mod peer;

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};

use super::ServeError;
use super::socket::OwnedSocket;
use mailbox::Mailbox;
use peer::Peer;

/// Guests served at once; further ones wait.
const GUESTS: usize = 16;

/// An ivshmem server. Dropping it ends it, for guests that are connected too.
#[derive(Debug)]
pub struct IvshmemServer {
    path: PathBuf,
    task: JoinHandle<Infallible>,
}

impl IvshmemServer {
    /// Serves mailboxes on a Unix socket at `path`, for the device whose guest port listens at
    /// `port`. Must be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// When the socket is in use or cannot be made.
    pub fn serve(path: &Path, port: &Path) -> Result<Self, ServeError> {
        let socket = OwnedSocket::bind(path)?;
        Ok(Self { path: path.to_owned(), task: tokio::spawn(accept(socket, port.to_owned())) })
    }

    /// The socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for IvshmemServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(socket: OwnedSocket, port: PathBuf) -> Infallible {
    let places = Arc::new(Semaphore::new(GUESTS));
    // Ends with this task.
    let mut guests = JoinSet::new();
    loop {
        let place = Arc::clone(&places).acquire_owned().await;
        while guests.try_join_next().is_some() {}
        match socket.listener.accept().await {
            Ok((stream, _)) => {
                let port = port.clone();
                guests.spawn(async move {
                    let served = async {
                        let mailbox = Mailbox::new()?;
                        Peer::greet(stream, mailbox)?.serve(&port).await
                    };
                    if let Err(why) = served.await {
                        tracing::warn!("a guest's mailbox is closed: {why}");
                    }
                    drop(place);
                });
            }
            Err(why) => {
                tracing::warn!(path = %socket.path().display(), "accepting a guest failed: {why}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}
