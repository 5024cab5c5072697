//! Blocks as differences to those of another tensor (decision 26).

use lamina_codec::{BlockWords, Codec, Encoder, block::Bundle, format::Format};
use lamina_store as store;

/// Makes of `words` these XOR `other`.
pub(crate) fn xor(words: &mut BlockWords, other: &BlockWords) {
    for (word, other) in words.as_chunks_mut::<8>().0.iter_mut().zip(other.as_chunks::<8>().0) {
        *word = (u64::from_ne_bytes(*word) ^ u64::from_ne_bytes(*other)).to_ne_bytes();
    }
}

/// Puts the difference of `words` to `theirs` into `bundle`, which is these words by themselves, if
/// that takes fewer granules: who reads it then fetches those of the other block too.
pub(crate) fn encode_if_shorter(
    encoder: &mut Encoder,
    format: Format,
    codec: Codec,
    words: &BlockWords,
    theirs: &BlockWords,
    bundle: &mut Bundle,
) {
    let granules = |bundle: &Bundle| store::charged(bundle.bytes().len());
    if granules(bundle) == 0 {
        return;
    }
    let (mut beside, mut difference) = (*words, Bundle::new());
    xor(&mut beside, theirs);
    encoder.difference(format, codec, &beside, &mut difference);
    if granules(&difference) < granules(bundle) {
        *bundle = difference;
    }
}
