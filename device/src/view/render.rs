//! A view's bytes from words in which only its planes are set.

use super::{Kind, View, pack::pack, round::round};
use crate::{BlockWords, plane::PlaneMask};

impl View {
    /// Appends the view's bytes of elements `from..to` of a block to `out`.
    ///
    /// `words` have every plane outside [`View::mask`] zero; what they hold afterwards is of no use. `from` and `to` are
    /// multiples of eight, so that the bytes of one range end where those of the next begin, whatever the view's bits.
    pub fn render(&self, words: &mut BlockWords, from: usize, to: usize, out: &mut Vec<u8>) {
        debug_assert!(from.is_multiple_of(8) && to.is_multiple_of(8) && from <= to);
        let width = self.format().bits() as usize;
        let words = &mut words[from * width / 8..to * width / 8];
        if let Kind::Top { mantissa, guard: 1.., .. } = self.kind() {
            round(self.format(), mantissa, words);
        }
        match self.kind() {
            Kind::Full | Kind::Top { packed: false, .. } => out.extend_from_slice(words),
            Kind::Top { packed: true, exponent, mantissa, .. } => {
                pack(self.format(), super::top(self.format(), exponent, mantissa), words, out);
            }
            Kind::Converted { .. } => {
                self.converter.as_ref().expect("converted views have one").convert(words, out);
            }
            Kind::Integer { bits } => pack(self.format(), PlaneMask(0xff << (8 - bits) & 0xff), words, out),
        }
    }
}
