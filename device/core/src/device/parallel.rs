//! Work of one request on several cores.

use parking_lot::{Condvar, Mutex};

/// Threads that work on one request.
pub(super) fn threads() -> usize {
    rayon::current_num_threads()
}

/// Does `work` with every item, on this thread and on others of a pool that the process shares.
/// Returns when all is done. If the pool is busy, this thread does it all.
pub(super) fn for_each<T: Send>(items: impl ExactSizeIterator<Item = T> + Send, work: impl Fn(T) + Sync) {
    let others = items.len().min(threads()).saturating_sub(1);
    let items = Mutex::new(items);
    let drain = || {
        loop {
            // Not in the condition of a loop, which would hold the lock while it works.
            let Some(item) = items.lock().next() else { break };
            work(item);
        }
    };
    if others == 0 {
        return drain();
    }
    rayon::in_place_scope(|scope| {
        for _ in 0..others {
            scope.spawn(|_| drain());
        }
        drain();
    });
}

/// Does `work` with every item, as [`for_each`] does, and `then` on this thread with what it gave,
/// in the order of the items and while others are still worked on. The first error of `then` ends
/// it; some items behind may have been worked on by then.
///
/// # Errors
/// The first one of `then`.
pub(super) fn in_order<T: Send, D: Send, E>(
    items: impl ExactSizeIterator<Item = T> + Send,
    work: impl Fn(T) -> D + Sync,
    mut then: impl FnMut(D) -> Result<(), E>,
) -> Result<(), E> {
    let count = items.len();
    let others = count.min(threads()).saturating_sub(1);
    if others == 0 {
        return items.map(work).try_for_each(then);
    }
    let items = Mutex::new(items.enumerate());
    let finished = Finished { state: Mutex::new(State::of(count)), changed: Condvar::new() };
    let take = || items.lock().next();
    rayon::in_place_scope(|scope| {
        for _ in 0..others {
            scope.spawn(|_| {
                let _told = TellOfPanic(&finished);
                while let Some((turn, item)) = take() {
                    finished.put(turn, work(item));
                }
            });
        }
        let mut each = |turn| loop {
            if let Some(done) = finished.take(turn) {
                return then(done);
            }
            match take() {
                Some((next, item)) if next == turn => return then(work(item)),
                Some((next, item)) => finished.put(next, work(item)),
                None => return then(finished.wait_for(turn)),
            }
        };
        let ended = (0..count).try_for_each(&mut each);
        if ended.is_err() {
            while take().is_some() {}
        }
        ended
    })
}

/// What was worked on and is not yet its turn.
struct Finished<D> {
    state: Mutex<State<D>>,
    changed: Condvar,
}

struct State<D> {
    done: Vec<Option<D>>,
    panicked: bool,
}

impl<D> State<D> {
    fn of(count: usize) -> Self {
        Self { done: (0..count).map(|_| None).collect(), panicked: false }
    }
}

impl<D> Finished<D> {
    fn put(&self, turn: usize, done: D) {
        self.state.lock().done[turn] = Some(done);
        self.changed.notify_one();
    }

    fn take(&self, turn: usize) -> Option<D> {
        self.state.lock().done[turn].take()
    }

    fn wait_for(&self, turn: usize) -> D {
        let mut state = self.state.lock();
        loop {
            if let Some(done) = state.done[turn].take() {
                return done;
            }
            assert!(!state.panicked, "a thread panicked that worked on the same request");
            self.changed.wait(&mut state);
        }
    }
}

/// Lets nobody wait for a thread that panicked.
struct TellOfPanic<'f, D>(&'f Finished<D>);

impl<D> Drop for TellOfPanic<'_, D> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.state.lock().panicked = true;
            self.0.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_worked_on_anywhere_comes_in_order(count in 0..300_usize, ends in 0..400_usize) {
            let mut came = Vec::new();
            let ended = in_order(0..count, |item| item * 2, |done| {
                came.push(done);
                if done == ends * 2 { Err(done) } else { Ok(()) }
            });
            let expected = count.min(ends + 1);
            prop_assert_eq!(came, (0..expected).map(|item| item * 2).collect::<Vec<_>>());
            prop_assert_eq!(ended, if ends < count { Err(ends * 2) } else { Ok(()) });
        }
    }

    #[test]
    fn a_panic_of_one_thread_is_one_of_all() {
        let work = |item: usize| assert!(item != 70, "no good");
        let caught = std::panic::catch_unwind(|| in_order(0..200, work, |()| Ok::<_, ()>(())));
        assert!(caught.is_err());
    }
}
