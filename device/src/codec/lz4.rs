//! LZ4: of planes by [`short`], of what is longer through `lz4_flex`, with the hash table kept in the thread.

mod short;

use std::cell::RefCell;

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};

use crate::BLOCK_BYTES;

struct Context {
    table: CompressTable,
    scratch: Vec<u8>,
}

thread_local! {
    static CONTEXT: RefCell<Context> = RefCell::new(Context {
        table: CompressTable::small(),
        scratch: vec![0; get_maximum_output_size(BLOCK_BYTES)],
    });
}

pub(super) fn compress(input: &[u8], out: &mut [u8]) -> Option<usize> {
    assert!(input.len() <= BLOCK_BYTES && out.len() >= input.len());
    if input.len() <= short::MOST {
        return short::compress(input, out);
    }
    CONTEXT.with_borrow_mut(|Context { table, scratch }| {
        let length = compress_into_with_table(input, scratch, table)
            .expect("the scratch holds the worst case of a block");
        (length < input.len()).then(|| {
            out[..length].copy_from_slice(&scratch[..length]);
            length
        })
    })
}

pub(super) fn decompress(stored: &[u8], out: &mut [u8]) -> Result<usize, String> {
    decompress_into(stored, out).map_err(|error| error.to_string())
}
