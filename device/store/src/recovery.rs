//! Recovery scan: what the entries of an image name, when it is opened. A guest waits meanwhile, so
//! several threads share the work.
//!
//! * Parts of the index that were never written are holes in the file, and are not looked at.
//! * Every entry is checked, because a damaged one would claim another's segment; what is stored is
//!   checked when it is read.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
};

use super::{
    StoreError, checkpoint,
    entry::{self, Entry},
    image::Image,
    index::Index,
    segments::{Claimed, Claims},
};

/// Blocks that a thread looks at before it takes others.
const PIECE: u64 = 1 << 14;
/// Threads at most.
const MAX_THREADS: usize = 16;

/// What was found: what each thread made of its entries, and the blocks whose entries are damaged.
pub(super) type Scanned<T> = (Vec<T>, Vec<u64>);

/// Claims what the entries in `index` name. `found` is told of every block that holds data. An
/// entry whose segment cannot be its own is made one that does not check, so that nobody follows or
/// frees it.
pub(super) fn scan<T: Default + Send>(
    index: &Index,
    claims: &Claims,
    found: impl Fn(&mut T, u64, &Entry) + Sync,
) -> Scanned<T> {
    let pieces: Vec<Range<u64>> = index.populated().into_iter().flat_map(pieces).collect();
    let next = AtomicUsize::new(0);
    let look = || {
        let (mut all, mut damaged) = (T::default(), Vec::new());
        while let Some(piece) = pieces.get(next.fetch_add(1, Relaxed)) {
            for block in piece.clone() {
                match index.get(block) {
                    Ok(Entry { place: None, .. }) => {}
                    Ok(entry) if claim(index, claims, block, &entry) => found(&mut all, block, &entry),
                    _ => damaged.push(block),
                }
            }
        }
        (all, damaged)
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS).min(pieces.len());
    let scanned: Vec<_> = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(look)).collect();
        let others_looked = |other: thread::ScopedJoinHandle<'_, _>| {
            other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        std::iter::once(look()).chain(others.into_iter().map(others_looked)).collect()
    });
    let (all, damaged): (Vec<_>, Vec<_>) = scanned.into_iter().unzip();
    let mut damaged: Vec<_> = damaged.into_iter().flatten().collect();
    damaged.sort_unstable();
    (all, damaged)
}

/// Claims what the checkpoints of an image name besides: segments that were freed since they were
/// made, each with its bytes.
pub(super) fn scan_checkpoints(
    index: &Index,
    claims: &Claims,
    image: &Image,
) -> Result<Vec<(u64, usize)>, StoreError> {
    let mut held = Vec::new();
    let Some(head) = image.head().filter(|_| image.superblock().checkpoints) else { return Ok(held) };
    let copies = image.copies()?;
    // The last one first: what the one before names may be another's by now. It has to be looked at
    // too, as a killed process may not have brought the last one's header to the disk.
    for (copy, _) in head.headers() {
        checkpoint::differing(index, &copies[copy], |block, entry| {
            let Ok(Entry { place: Some(place), .. }) = Entry::decode(index.version(), entry) else { return };
            let bytes = place.stored.bytes();
            if bytes > 0 && claims.claim(place.segment, bytes, block) == Claimed::Yes {
                held.push((place.segment, bytes));
            }
        });
    }
    Ok(held)
}

fn pieces(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let starts = (0..(range.end - range.start).div_ceil(PIECE)).map(move |piece| range.start + piece * PIECE);
    starts.map(move |start| start..range.end.min(start + PIECE))
}

fn claim(index: &Index, claims: &Claims, block: u64, entry: &Entry) -> bool {
    let Some(place) = &entry.place else { return true };
    let claimed = claims.claim(place.segment, place.stored.bytes(), block);
    if claimed != Claimed::Yes {
        tracing::error!(
            block,
            segment = place.segment,
            ?claimed,
            "an entry names a segment that is not its own"
        );
        index.put(&index.watch(), block, &entry::DAMAGED);
    }
    claimed == Claimed::Yes
}
