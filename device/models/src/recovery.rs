//! The journal: whoever looks at an image that a process left finds the old entry whole, or the new
//! one in the index or in the journal.
//!
//! A process that is killed leaves the stores that it made, in any order that its fences allow. So
//! what may be left is what another thread may see.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use loom::thread;

use crate::publication::{forget, record};
use crate::sync::{Ordering, fence};

/// A record and an entry of two words each, old (0) or new (1).
#[derive(Default)]
struct Image {
    count: AtomicU64,
    recorded: [AtomicU64; 2],
    entry: [AtomicU64; 2],
}

fn put(words: &[AtomicU64; 2]) {
    for word in words {
        word.store(1, Relaxed);
    }
}

fn get(words: &[AtomicU64; 2]) -> [u64; 2] {
    let words = words.each_ref().map(|word| word.load(Relaxed));
    fence(Ordering::Acquire);
    words
}

#[test]
fn an_entry_that_is_half_written_is_whole_in_the_journal() {
    loom::model(|| {
        let image = Arc::new(Image::default());
        let writer = Arc::clone(&image);
        let writer = thread::spawn(move || {
            record(|| put(&writer.recorded), |count| writer.count.store(count, Relaxed), 1);
            put(&writer.entry);
            forget(|count| writer.count.store(count, Relaxed));
        });
        let entry = get(&image.entry);
        let count = image.count.load(Relaxed);
        fence(Ordering::Acquire);
        if count == 1 {
            assert_eq!(get(&image.recorded), [1, 1], "a record counts before it is whole");
        } else if entry != [0, 0] {
            assert_eq!(get(&image.entry), [1, 1], "a record is forgotten before its entry is whole");
        }
        writer.join().unwrap();
        assert_eq!((get(&image.entry), image.count.load(Relaxed)), ([1, 1], 0));
    });
}
