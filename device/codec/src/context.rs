//! What coding works in: buffers and the libraries' states, made once and passed.
//!
//! The rule: nothing of one block is left that changes what becomes of another. A block's stored
//! bytes depend on its words, format and codec alone, a KV window's on the window's bytes alone,
//! whatever was coded before and by whom.

use crate::{
    BlockWords, Codec, Undecodable,
    block::{BlockError, Bundle, MAX_BUNDLE, Stored},
    format::Format,
    kv::{self, Coding, Shape, window::Coded},
    plane::PlaneMask,
    workspace::{BlockDecoder, BlockEncoder},
};

/// Codes blocks and KV windows. One a thread serves; many give the same bundles.
#[derive(Default)]
pub struct Encoder {
    pub(crate) block: BlockEncoder,
    pub(crate) window: kv::window::Scratch,
}

impl Encoder {
    /// An encoder. It allocates its buffers, and a ZSTD context when one is first wanted.
    pub fn new() -> Self {
        Self::default()
    }

    /// Codes `words` as planes of `format`, as words if it is [`Format::Opaque`], into `bundle`.
    pub fn block(&mut self, format: Format, codec: Codec, words: &BlockWords, bundle: &mut Bundle) {
        bundle.encode(&mut self.block, format, codec, words);
    }

    /// Codes `words`, which are a block's words XOR those of another, as [`Self::block`] does.
    /// Zeros are coded too, so that there always is a bundle that says it is a difference.
    ///
    /// XOR commutes with the split into planes, with the fold of integers, and with leaving planes
    /// out: what a mask gives of the difference, XOR what it gives of the other block, is what it
    /// gives of the block.
    pub fn difference(&mut self, format: Format, codec: Codec, words: &BlockWords, bundle: &mut Bundle) {
        bundle.encode_difference(&mut self.block, format, codec, words);
    }

    /// Codes `words` word-major: opaque memory, and what the paper calls a generically compressing
    /// device.
    pub fn words(&mut self, codec: Codec, words: &BlockWords, bundle: &mut Bundle) {
        bundle.encode_words(&mut self.block, codec, words);
    }

    /// Codes the KV window of `shape` that begins `before` blocks behind the tensor's beginning and
    /// holds `bytes`, whole blocks: a bundle each. `way` is how, or the one that takes least if not
    /// given. [`Coding::Plain`] leaves no row out.
    ///
    /// # Panics
    /// If `bytes` are not whole blocks.
    pub fn window(
        &mut self,
        shape: &Shape,
        before: u64,
        codec: Codec,
        bytes: &[u8],
        way: Option<Coding>,
        bundles: &mut Vec<Bundle>,
    ) -> Coded {
        kv::window::encode(self, shape, before, codec, bytes, way, bundles)
    }

    /// Compresses `input` by the [bytewise](Codec::bytewise) codec into the front of `out`, if that
    /// makes it shorter: the bytes it takes.
    ///
    /// # Panics
    /// If `input` is longer than a block or `out` shorter than `input`.
    pub fn bytes(&mut self, codec: Codec, input: &[u8], out: &mut [u8]) -> Option<usize> {
        self.block.bytes.compress(codec, input, out)
    }
}

/// Decodes blocks; [`kv::WindowDecoder`] borrows it for windows.
#[derive(Default)]
pub struct Decoder {
    pub(crate) block: BlockDecoder,
    pub(crate) window: kv::decoder::Scratch,
}

impl Decoder {
    /// A decoder. It allocates its buffers, and a ZSTD context when one is first wanted.
    pub fn new() -> Self {
        Self::default()
    }

    /// The words that the planes in `mask` give, all other planes zero. `bundle` holds the bytes of
    /// [`Stored::runs`] at their places; nothing else in it counts. Words blocks give every bit.
    ///
    /// # Errors
    /// [`BlockError`] when bytes that were looked at are damaged.
    #[inline]
    pub fn block(
        &mut self,
        stored: &Stored,
        mask: PlaneMask,
        bundle: &[u8; MAX_BUNDLE],
        words: &mut BlockWords,
    ) -> Result<(), BlockError> {
        stored.decode(&mut self.block, mask, bundle, words, &mut None)
    }

    /// Decompresses `stored`, of [`Encoder::bytes`], to exactly fill `out`.
    ///
    /// # Errors
    /// [`Undecodable`] when the bytes are damaged or give another length.
    pub fn bytes(&mut self, codec: Codec, stored: &[u8], out: &mut [u8]) -> Result<(), Undecodable> {
        self.block.bytes.decompress(codec, stored, out)
    }
}
