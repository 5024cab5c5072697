//! A view's bytes from words in which only its planes are set.

use super::{Kind, View, pack::pack, round};
use crate::BlockWords;

impl View {
    /// Whether its elements are as long as the tensor's and lie where those do, so that
    /// [`View::render_in_place`] gives a block.
    pub fn is_in_place(&self) -> bool {
        matches!(self.kind(), Kind::Full | Kind::Top { packed: false, .. })
    }

    /// Makes `words`, in which every plane outside [`View::mask`] is zero, the view's bytes of a
    /// block, if it [is in place](View::is_in_place).
    pub fn render_in_place(&self, words: &mut BlockWords) {
        debug_assert!(self.is_in_place());
        self.round(words);
    }

    /// Puts the view's bytes of as many of a block's elements as `out` has room for, `from` on,
    /// into `out`.
    ///
    /// `words` have every plane outside [`View::mask`] zero; what they hold afterwards is of no
    /// use. `from` and the elements' count are multiples of eight, so that the bytes of one range
    /// end where those of the next begin, whatever the view's bits.
    pub fn render_to(&self, words: &mut BlockWords, from: usize, out: &mut [u8]) {
        let to = from + out.len() * 8 / self.bits() as usize;
        let words = self.elements(words, from, to);
        self.round(words);
        match (self.kind(), &self.converter) {
            (_, Some(converter)) => converter.convert(words, out),
            (Kind::Top { exponent, mantissa, packed: true, .. }, None) => {
                pack(self.format(), super::top(self.format(), exponent, mantissa), words, out);
            }
            (Kind::Integer { bits }, None) => {
                pack(self.format(), super::uppermost(self.format(), bits), words, out);
            }
            (_, None) => out.copy_from_slice(words),
        }
    }

    /// Appends the view's bytes of elements `from..to` of a block to `out`; as [`View::render_to`].
    pub fn render(&self, words: &mut BlockWords, from: usize, to: usize, out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + (to - from) * self.bits() as usize / 8, 0);
        self.render_to(words, from, &mut out[start..]);
    }

    fn elements<'w>(&self, words: &'w mut BlockWords, from: usize, to: usize) -> &'w mut [u8] {
        debug_assert!(from.is_multiple_of(8) && to.is_multiple_of(8) && from <= to);
        let width = self.format().bits() as usize;
        &mut words[from * width / 8..to * width / 8]
    }

    fn round(&self, words: &mut [u8]) {
        let Kind::Top { exponent, exponent_guard, mantissa, guard, .. } = self.kind() else { return };
        if guard > 0 {
            round::mantissa(self.format(), mantissa, words);
        }
        if exponent_guard > 0 {
            round::exponent(self.format(), exponent, words);
        }
    }
}
