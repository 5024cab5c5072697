//! Paged caches in which a token's row is not in one piece: `[blocks, groups, block, part]`.
//!
//! vLLM's HND layout keeps, in each of its blocks, a head's parts of all the block's tokens side by
//! side, and its interleaved layouts keep K of a block's tokens before their V. Both are rows cut
//! in `groups` parts. The transform puts the parts of a token together first; what is behind the
//! last whole paged block of a window stays as it is.

/// How rows are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Paged {
    /// Parts of a row.
    pub groups: usize,
    /// Tokens of a paged block.
    pub block: usize,
    /// Bytes of a part.
    pub part: usize,
}

impl Paged {
    /// Bytes of a paged block.
    pub(super) const fn block_bytes(&self) -> usize {
        self.groups * self.block * self.part
    }

    /// Each part's place in paged order and in rows.
    fn parts(&self, length: usize) -> impl Iterator<Item = (usize, usize)> {
        let Self { groups, block, part } = *self;
        let blocks = length / self.block_bytes();
        (0..blocks).flat_map(move |page| {
            (0..groups).flat_map(move |group| {
                (0..block).map(move |token| {
                    let (before, first) = (page * groups * block, group * block + token);
                    ((before + first) * part, (before + token * groups + group) * part)
                })
            })
        })
    }

    /// Paged order to rows.
    pub(super) fn gather_rows(&self, from: &[u8], to: &mut [u8]) {
        let whole = from.len() - from.len() % self.block_bytes();
        for (paged, row) in self.parts(from.len()) {
            to[row..row + self.part].copy_from_slice(&from[paged..paged + self.part]);
        }
        to[whole..].copy_from_slice(&from[whole..]);
    }

    /// Rows to paged order.
    pub(super) fn scatter_rows(&self, from: &[u8], to: &mut [u8]) {
        let whole = from.len() - from.len() % self.block_bytes();
        for (paged, row) in self.parts(from.len()) {
            to[paged..paged + self.part].copy_from_slice(&from[row..row + self.part]);
        }
        to[whole..].copy_from_slice(&from[whole..]);
    }
}
