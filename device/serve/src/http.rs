//! HTTP connections for the API: accepting them, with bounds on what a peer may take.
//!
//! * At most [`CONNECTIONS`] at once on each listener. When all places are taken and somebody else
//!   comes, the oldest connection whose request is not being performed gives its place up, and if
//!   there is none the oldest whose request's body is waited for: peers that stay silent, talk
//!   slowly or leave their answers unread keep nobody out.
//! * A request's header has [`HEADER_TIME`] to arrive, which is also how long an idle connection is
//!   kept, and a peer that takes nothing of its answer for [`ANSWER_TIME`] is dropped (see
//!   [`BoundedWrites`]).

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::Request;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::asker::Asker;
use super::bounded_writes::BoundedWrites;

/// Connections open at once.
pub(super) const CONNECTIONS: usize = 64;
/// How long a request's header may take, and how long an idle connection is kept.
const HEADER_TIME: Duration = Duration::from_secs(30);
/// How long a peer may take nothing of its answer.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// What is waited after a failed `accept`, for example when descriptors ran out, and before another
/// connection is told to give way.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A connection, as its server and the one who makes room see it.
#[derive(Debug, Default)]
struct Peer {
    /// Whether it asked anything yet.
    requested: AtomicBool,
    /// Whether what it asked is being performed.
    served: AtomicBool,
    /// Whether more of what it asks is waited for: nothing was done yet.
    awaited: AtomicBool,
    /// Whether it was told to give its place up.
    evicted: AtomicBool,
    give_way: Notify,
}

/// The connections of a listener, oldest first.
#[derive(Debug, Default)]
struct Peers(VecDeque<Weak<Peer>>);

impl Peers {
    fn add(&mut self) -> Arc<Peer> {
        let peer = Arc::new(Peer::default());
        self.0.retain(|peer| peer.strong_count() > 0);
        self.0.push_back(Arc::downgrade(&peer));
        peer
    }

    /// Tells the oldest whose request is not being performed to give its place up, and those that
    /// are still asking only if there is no other.
    fn make_room(&self) {
        let oldest = |waits: &dyn Fn(&Peer) -> bool| {
            let gives_way = |peer: &Arc<Peer>| waits(peer) && !peer.evicted.swap(true, Ordering::Relaxed);
            self.0.iter().filter_map(Weak::upgrade).find(gives_way)
        };
        let idle = oldest(&|peer| !peer.served.load(Ordering::Relaxed));
        if let Some(peer) = idle.or_else(|| oldest(&|peer| peer.awaited.load(Ordering::Relaxed))) {
            peer.give_way.notify_one();
        }
    }
}

/// A request's body, of which its peer is told whether it is waited for.
struct Awaited {
    body: Incoming,
    peer: Arc<Peer>,
}

impl hyper::body::Body for Awaited {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        self.peer.awaited.store(polled.is_pending(), Ordering::Relaxed);
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        self.peer.awaited.store(false, Ordering::Relaxed);
    }
}

/// Serves whoever `accept` brings, for ever: each connection with what it may ask, which is found
/// out once it has a place, and with who asks, which requests have as an extension.
pub(super) async fn serve<S, R, A>(accept: impl Fn() -> A) -> Infallible
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    R: Future<Output = Router> + Send + 'static,
    A: Future<Output = io::Result<(S, Option<Asker>, R)>>,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let mut peers = Peers::default();
    loop {
        let (stream, asker, router) = match accept().await {
            Ok(accepted) => accepted,
            Err(why) => {
                tracing::warn!("accepting a connection failed: {why}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let place = place(&places, &peers).await;
        let peer = peers.add();
        tokio::spawn(async move {
            converse(router.await, stream, asker, &peer).await;
            drop(place);
        });
    }
}

/// A place for one more connection, at another's cost if need be.
async fn place(places: &Arc<Semaphore>, peers: &Peers) -> Option<OwnedSemaphorePermit> {
    if let Ok(place) = Arc::clone(places).try_acquire_owned() {
        return Some(place);
    }
    loop {
        peers.make_room();
        let freed = Arc::clone(places).acquire_owned();
        if let Ok(place) = tokio::time::timeout(ACCEPT_PAUSE, freed).await {
            // The semaphore is never closed.
            return place.ok();
        }
    }
}

/// Answers a connection's requests until it ends or has to give way.
pub(crate) async fn answer<S>(router: Router, stream: S)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    converse(router, stream, None, &Arc::default()).await;
}

async fn converse<S>(router: Router, stream: S, asker: Option<Asker>, peer: &Arc<Peer>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = TowerToHyperService::new(router);
    let state = Arc::clone(peer);
    let counted = service_fn(move |request: Request<Incoming>| {
        let mut request = request.map(|body| Body::new(Awaited { body, peer: Arc::clone(&state) }));
        if let Some(asker) = &asker {
            request.extensions_mut().insert(asker.clone());
        }
        let (state, answer) = (Arc::clone(&state), service.call(request));
        state.requested.store(true, Ordering::Relaxed);
        state.served.store(true, Ordering::Relaxed);
        async move {
            let answer = answer.await;
            state.served.store(false, Ordering::Relaxed);
            answer
        }
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIME)
            // A peer may close its sending side once it has asked.
            .half_close(true)
            .serve_connection(TokioIo::new(BoundedWrites::new(stream, ANSWER_TIME)), counted)
    );
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = peer.give_way.notified() => {
            if !peer.requested.load(Ordering::Relaxed) || peer.awaited.load(Ordering::Relaxed) {
                tracing::debug!("a connection that has not asked gives way");
                return;
            }
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(why) = served {
        tracing::debug!("a connection ended early: {why}");
    }
}
