//! Work of one request on several cores.

use parking_lot::Mutex;

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
