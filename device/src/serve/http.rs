//! HTTP connections for the API: accepting them, with bounds on what a peer may take.
//!
//! At most [`CONNECTIONS`] at once on each listener, further ones wait in the backlog; a request's header has
//! [`HEADER_TIME`] to arrive, so a peer that opens a connection and says nothing does not keep its place for ever.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;

/// Connections open at once.
const CONNECTIONS: usize = 64;
/// How long a request's header may take, and how long an idle connection is kept.
const HEADER_TIME: Duration = Duration::from_secs(30);
/// What is waited after a failed `accept`, for example when descriptors ran out.
const BREATH: Duration = Duration::from_millis(50);

/// Serves `router` to whoever `accept` brings, for ever.
pub(super) async fn serve<S, A>(router: Router, accept: impl Fn() -> A) -> Infallible
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    A: Future<Output = io::Result<S>>,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await;
        let stream = match accept().await {
            Ok(stream) => stream,
            Err(why) => {
                tracing::warn!("accepting a connection failed: {why}");
                tokio::time::sleep(BREATH).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIME)
                // A peer may close its sending side once it has asked.
                .half_close(true)
                .serve_connection(TokioIo::new(stream), service)
                .await;
            if let Err(why) = served {
                tracing::debug!("a connection ended early: {why}");
            }
            drop(place);
        });
    }
}
