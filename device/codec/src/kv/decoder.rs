//! Bundles to a window.

use super::{
    bases,
    block_set::BlockSet,
    delta::{self, Columns, Field},
    order::{ByColumns, Order},
    repeats::Repeats,
    shape::{MAX_BLOCKS, Shape},
};
use crate::{
    BLOCK_BYTES, Decoder,
    block::{BlockError, MAX_BUNDLE, Stored},
    head::Head,
    lines::Lines,
    plane::{self, PlaneMask},
    workspace::BlockDecoder,
};

/// What a window is decoded in.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Blocks in the order they are coded in.
    blocks: Lines<u8>,
    runs: Vec<u16>,
    bases: Vec<u8>,
}

/// Numbers of blocks of a window.
type Blocks = [u64; MAX_BLOCKS / 64];

/// Puts a window together from its blocks as they are fetched, in order.
pub struct WindowDecoder<'a> {
    shape: &'a Shape,
    whole: Order,
    /// Without the rows that are known to repeat.
    order: Order,
    mask: PlaneMask,
    /// The planes of the exponent, which differences have.
    exponent: PlaneMask,
    /// It receives the window.
    out: &'a mut Vec<u8>,
    decoder: &'a mut BlockDecoder,
    scratch: &'a mut Scratch,
    /// Blocks that were added.
    added: Blocks,
    /// Of these, those whose differences are left to be undone at the end, by the bases in the
    /// scratch.
    different: Blocks,
    /// Whether the blocks are channel-major; unknown until one holds something.
    transformed: Option<bool>,
    repeats: Option<Repeats>,
    /// The columns of blocks, if one was different.
    columns: Option<ByColumns>,
}

/// A window whose blocks contradict each other, or its shape.
const fn wrong(what: &'static str) -> BlockError {
    BlockError::Window { what }
}

impl<'a> WindowDecoder<'a> {
    /// The planes in `mask` of the window of `shape` that begins `before` blocks behind the
    /// tensor's beginning and has `blocks` blocks, which takes the place of what is in `out`.
    ///
    /// # Panics
    /// If these are more than [`MAX_BLOCKS`].
    pub fn new(
        decoder: &'a mut Decoder,
        shape: &'a Shape,
        before: u64,
        blocks: usize,
        mask: PlaneMask,
        out: &'a mut Vec<u8>,
    ) -> Self {
        assert!(blocks <= MAX_BLOCKS, "{blocks} blocks of a window");
        out.resize(blocks * BLOCK_BYTES, 0);
        let order = shape.order(before, blocks);
        Self {
            shape,
            whole: order,
            order,
            mask: PlaneMask(mask.0 & PlaneMask::all(shape.format()).0),
            exponent: PlaneMask(shape.field().map_or(0, |field| field.mask)),
            out,
            decoder: &mut decoder.block,
            scratch: &mut decoder.window,
            added: [0; _],
            different: [0; _],
            transformed: None,
            repeats: None,
            columns: None,
        }
    }

    /// The planes to fetch of a block that is stored so.
    pub fn wanted(&self, stored: &Stored) -> PlaneMask {
        match stored {
            // Kept in another format than the tensor's, or as words: only the whole block says what
            // the planes are.
            Stored::Planes(planes) if planes.format != self.shape.format() => PlaneMask(u32::MAX),
            Stored::Words { .. } | Stored::Packed { .. } => PlaneMask(u32::MAX),
            Stored::Planes(planes) if planes.head.delta && self.wants_exponent() => {
                PlaneMask(self.mask.0 | self.exponent.0)
            }
            Stored::Planes(_) => self.mask,
        }
    }

    /// Whether the blocks that were added are channel by channel; unknown if there were none.
    pub fn transformed(&self) -> Option<bool> {
        self.transformed
    }

    fn wants_exponent(&self) -> bool {
        self.mask.0 & self.exponent.0 != 0
    }

    /// Adds block `block`, of which `bundle` holds the planes `fetched`, those of [`Self::wanted`]
    /// or more. Blocks of zeros are not added.
    ///
    /// # Errors
    /// [`BlockError`] when what was fetched is damaged.
    pub fn add(
        &mut self,
        block: usize,
        stored: &Stored,
        fetched: PlaneMask,
        bundle: &[u8; MAX_BUNDLE],
    ) -> Result<(), BlockError> {
        let format = self.shape.format();
        let head = match stored {
            Stored::Planes(planes) => planes.head,
            Stored::Words { .. } | Stored::Packed { .. } => Head::default(),
        };
        let transformed = head.length > 0;
        if self.transformed.is_some_and(|before| before != transformed) {
            return Err(wrong("blocks are coded in different ways"));
        }
        self.transformed = Some(transformed);
        // In address order it is where it belongs at once.
        let blocks = if transformed {
            self.scratch.blocks.make_at_least(self.out.len());
            &mut self.scratch.blocks[..]
        } else {
            &mut self.out[..]
        };
        let words = &mut blocks.as_chunks_mut::<BLOCK_BYTES>().0[block];
        let mut found = None;
        stored.decode(self.decoder, fetched, bundle, words, &mut found)?;
        self.added[block / 64] |= 1 << (block % 64);
        let same_format = matches!(stored, Stored::Planes(planes) if planes.format == format);
        if !transformed {
            if !same_format {
                plane::clear_outside(format, self.mask, words);
            }
            return Ok(());
        }
        if !same_format {
            return Err(wrong("a block has another format"));
        }
        let found = found.as_ref().ok_or(wrong("a block has no head"))?;
        if found.repeats && block != 0 {
            return Err(wrong("repeated rows are named behind the first block"));
        }
        let mut details = found.details;
        if found.repeats {
            let list = Repeats::read(self.whole.rows(), details);
            let (repeats, rest) = list.ok_or(wrong("the repeated rows do not fit the window"))?;
            self.order = repeats.compact_order(&self.whole);
            self.repeats = Some(repeats);
            details = rest;
        }
        if head.delta {
            let field = self.shape.field().ok_or(wrong("integers have no exponent"))?;
            details =
                self.bases(field, block, fetched, details).ok_or(wrong("the bases do not fit the block"))?;
        }
        if details.is_empty() { Ok(()) } else { Err(wrong("a head has bytes behind its details")) }
    }

    /// Reads the bases of a block of differences, and undoes these now or notes them for the end:
    /// what is behind the bases.
    fn bases<'b>(
        &mut self,
        field: &Field,
        block: usize,
        fetched: PlaneMask,
        details: &'b [u8],
    ) -> Option<&'b [u8]> {
        let (order, wants_exponent) = (&self.order, self.wants_exponent());
        let Scratch { runs, bases, .. } = &mut *self.scratch;
        if self.different == Blocks::default() {
            self.columns = order.by_columns().filter(ByColumns::fit_blocks);
            if self.columns.is_some() {
                bases.clear();
                bases.resize(order.columns, 0);
            }
        }
        if let Some(by_columns) = &self.columns {
            let columns = by_columns.of(block);
            // Of its first column the block before may have a part, by a base of its own.
            let is_cut = by_columns.begins_cut(block) && has(&self.different, block - 1);
            let cut = is_cut.then(|| bases[columns.start]);
            let rest = bases::read(details, &mut bases[columns.clone()])?;
            match cut.filter(|base| *base != bases[columns.start]) {
                None => self.different[block / 64] |= 1 << (block % 64),
                Some(base) => {
                    let own = bases[columns.clone()].to_vec();
                    bases[columns.start] = base;
                    if wants_exponent {
                        self.restore(field, block, fetched, &own);
                    }
                }
            }
            return Some(rest);
        }
        order.block_runs(block, runs);
        let mut own = std::mem::take(bases);
        own.resize(runs.len(), 0);
        let rest = bases::read(details, &mut own);
        if wants_exponent && rest.is_some() {
            self.restore(field, block, fetched, &own);
        }
        self.scratch.bases = own;
        rest
    }

    /// Undoes the differences of a block now, by its own bases.
    fn restore(&mut self, field: &Field, block: usize, fetched: PlaneMask, own: &[u8]) {
        let Scratch { blocks, runs, .. } = &mut *self.scratch;
        self.order.block_runs(block, runs);
        let words = &mut blocks.as_chunks_mut::<BLOCK_BYTES>().0[block];
        delta::restore(*field, runs, own, words);
        if fetched != self.mask {
            plane::clear_outside(self.shape.format(), self.mask, words);
        }
    }

    /// Puts the words of the window where they were to go, planes outside the mask zero.
    #[inline]
    pub fn finish(mut self) {
        self.put_together();
    }

    /// As [`Self::finish`], of a window without the stored blocks `gone`, which were not added.
    /// `transformed` says how they were coded, and if so, block 0 is not among them. Returns the
    /// blocks of the window that have bytes in these, and so mean nothing.
    pub fn finish_without(mut self, gone: &BlockSet, transformed: bool) -> BlockSet {
        self.put_together();
        if transformed { self.reached(gone) } else { *gone }
    }

    /// Where the bytes of these stored blocks come to lie: they are marked, and the marks go the
    /// way that bytes go.
    fn reached(&self, gone: &BlockSet) -> BlockSet {
        let order = &self.order;
        let length = order.elements * order.width;
        let (mut marks, mut out) = (vec![0; self.out.len()], vec![0; self.out.len()]);
        for block in gone.iter() {
            marks.as_chunks_mut::<BLOCK_BYTES>().0[block].fill(1);
        }
        order.token_major(None, &marks[..length], &mut out[..length]);
        if let Some(repeats) = &self.repeats {
            repeats.expand(&self.whole, &mut out);
        }
        if let Some(paged) = self.shape.paged() {
            marks.copy_from_slice(&out);
            paged.scatter_rows(&marks, &mut out);
        }
        let mut lost = BlockSet::default();
        for (block, marks) in out.as_chunks::<BLOCK_BYTES>().0.iter().enumerate() {
            if marks.iter().any(|mark| *mark != 0) {
                lost.insert(block);
            }
        }
        lost
    }

    fn put_together(&mut self) {
        let (wants_exponent, order, added) = (self.wants_exponent(), &self.order, &self.added);
        // Blocks of zeros were not added.
        let clear = |blocks: &mut [u8]| {
            let all = blocks.as_chunks_mut::<BLOCK_BYTES>().0;
            for (_, words) in all.iter_mut().enumerate().filter(|(block, _)| !has(added, *block)) {
                words.fill(0);
            }
        };
        let out = &mut self.out[..];
        if self.transformed != Some(true) {
            return clear(out);
        }
        let Scratch { blocks, runs, bases } = &mut *self.scratch;
        let blocks = &mut blocks[..out.len()];
        clear(blocks);
        let length = order.elements * order.width;
        let to = &mut out[..length];
        let field = self.shape.field().filter(|_| self.different != Blocks::default() && wants_exponent);
        if let Some(&field) = field {
            // A block that has no differences is given some, from zero. One of zeros needs none if
            // its columns are its own: their bases are zero then.
            let columns = self.columns.as_ref().expect("the columns of blocks, as one was different");
            for (block, words) in blocks.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().enumerate() {
                let shares = columns.begins_cut(block) || columns.begins_cut(block + 1);
                if !has(&self.different, block) && (shares || has(&self.added, block)) {
                    order.block_runs(block, runs);
                    delta::restore(field, runs, &bases[columns.of(block)], words);
                }
            }
            let deltas = Columns { field, bases, keep: self.mask.0 };
            order.token_major(Some(&deltas), &blocks[..length], to);
        } else {
            order.token_major(None, &blocks[..length], to);
        }
        if let Some(repeats) = &self.repeats {
            repeats.expand(&self.whole, out);
        }
        if let Some(paged) = self.shape.paged() {
            blocks.copy_from_slice(out);
            paged.scatter_rows(blocks, out);
        }
    }
}

fn has(blocks: &Blocks, block: usize) -> bool {
    blocks[block / 64] >> (block % 64) & 1 == 1
}
