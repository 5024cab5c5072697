//! A stream whose peer must take what it is sent.
//!
//! A write that cannot go on for a given time fails with `TimedOut`. Reads wait as long as they
//! did.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A stream with a bound on how long a write waits for its peer.
#[derive(Debug)]
pub(super) struct BoundedWrites<S> {
    stream: S,
    max_wait: Duration,
    /// When a write that waits has waited long enough.
    end: Option<Pin<Box<Sleep>>>,
}

impl<S> BoundedWrites<S> {
    /// `stream`, whose writes wait at most `max_wait`.
    pub(super) fn new(stream: S, max_wait: Duration) -> Self {
        Self { stream, max_wait, end: None }
    }

    /// What a write gives: it went on, or waits, but not for ever.
    fn bounded<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.end = None;
            return written;
        }
        let max_wait = self.max_wait;
        let end = self.end.get_or_insert_with(|| Box::pin(sleep(max_wait)));
        ready!(end.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer takes nothing of its answer")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for BoundedWrites<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for BoundedWrites<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.bounded(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.bounded(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(context);
        self.bounded(context, closed)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    fn run<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
    }

    #[test]
    fn a_peer_that_takes_nothing_fails_the_write_and_one_that_is_slow_does_not() {
        run(async {
            let (ours, mut theirs) = duplex(16);
            let mut stream = BoundedWrites::new(ours, Duration::from_millis(20));
            let why = stream.write_all(&[1; 64]).await.unwrap_err();
            assert_eq!(why.kind(), io::ErrorKind::TimedOut);
            let mut taken = [0; 16];
            theirs.read_exact(&mut taken).await.unwrap();
            assert_eq!(taken, [1; 16]);

            let (ours, mut theirs) = duplex(16);
            let mut stream = BoundedWrites::new(ours, Duration::from_secs(60));
            let (written, taken) = tokio::join!(
                async {
                    let written = stream.write_all(&[2; 4096]).await;
                    drop(stream);
                    written
                },
                async {
                    let mut taken = Vec::new();
                    theirs.read_to_end(&mut taken).await.unwrap();
                    taken
                }
            );
            written.unwrap();
            assert_eq!(taken, [2; 4096]);
        });
    }
}
