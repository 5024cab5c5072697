//! The transpose against its definition, one bit at a time.

use proptest::prelude::*;

use super::*;

/// Bit `bit` of element `element`, by the definition of the format's container.
fn bit(format: Format, words: &[u8], element: usize, bit: usize) -> bool {
    let at = element * format.bits() as usize + bit;
    words[at / 8] >> (at % 8) & 1 == 1
}

fn set_bit(format: Format, words: &mut [u8], element: usize, bit: usize) {
    let at = element * format.bits() as usize + bit;
    words[at / 8] |= 1 << (at % 8);
}

fn plane_bit(format: Format, planes: &PlaneBlock, plane: usize, element: usize) -> bool {
    planes[plane_range(format, plane)][element / 8] >> (element % 8) & 1 == 1
}

fn with_planes() -> impl Strategy<Value = Format> {
    prop::sample::select(Format::ALL.into_iter().filter(|f| f.planes() > 0).collect::<Vec<_>>())
}

fn block() -> impl Strategy<Value = Box<BlockWords>> {
    prop::collection::vec(any::<u8>(), BLOCK_BYTES).prop_map(|bytes| bytes.try_into().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_plane_holds_one_bit_of_every_element(format in with_planes(), words in block()) {
        let mut planes = [0; BLOCK_BYTES];
        split(format, &words, &mut planes);
        let elements = usize::try_from(format.block_elements()).unwrap();
        let sign = format.planes() - 1;
        for element in 0..elements {
            for plane in 0..format.planes() {
                let mut want = bit(format, &words[..], element, plane);
                if format.is_integer() && plane != sign {
                    want ^= bit(format, &words[..], element, sign);
                }
                prop_assert_eq!(plane_bit(format, &planes, plane, element), want);
            }
        }
    }

    #[test]
    fn all_planes_give_the_words_back(format in with_planes(), words in block()) {
        let mut planes = [0; BLOCK_BYTES];
        split(format, &words, &mut planes);
        let mut back = [0xa5; BLOCK_BYTES];
        join(format, &select(format, PlaneMask::all(format), &planes), &mut back);
        prop_assert_eq!(&back[..], &words[..]);
    }

    #[test]
    fn planes_outside_the_mask_count_as_zero(format in with_planes(), words in block(), mask in any::<u32>()) {
        let mask = PlaneMask(mask & PlaneMask::all(format).0);
        let mut planes = [0; BLOCK_BYTES];
        split(format, &words, &mut planes);
        let elements = usize::try_from(format.block_elements()).unwrap();
        let mut want = [0; BLOCK_BYTES];
        for element in 0..elements {
            for plane in (0..format.planes()).filter(|plane| mask.has(*plane)) {
                if plane_bit(format, &planes, plane, element) {
                    set_bit(format, &mut want, element, plane);
                }
            }
        }
        fold::unfold(format, &mut want);
        let mut got = [0xa5; BLOCK_BYTES];
        join(format, &select(format, mask, &planes), &mut got);
        prop_assert_eq!(&got[..], &want[..]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_kernel_gives_the_portable_ones_bits(format in with_planes(), words in block(), mask in any::<u32>()) {
        let (mut planes, mut back) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
        portable::split(format, &words, &mut planes);
        let selected = select(format, PlaneMask(mask), &planes);
        portable::join(format, &selected, &mut back);
        for kernel in Kernel::available() {
            let (mut got_planes, mut got_back) = ([0xa5; BLOCK_BYTES], [0xa5; BLOCK_BYTES]);
            kernel.split(format, &words, &mut got_planes);
            prop_assert!(got_planes == planes, "{:?} splits {} differently", kernel, format);
            kernel.join(format, &selected, &mut got_back);
            prop_assert!(got_back == back, "{:?} joins {} differently", kernel, format);
        }
    }
}

#[test]
fn a_plane_prefix_of_an_integer_is_the_arithmetic_shift() {
    let mut words = [0; BLOCK_BYTES];
    words.iter_mut().zip((0..=255).cycle()).for_each(|(word, value)| *word = value);
    let mut planes = [0; BLOCK_BYTES];
    split(Format::Int8, &words, &mut planes);
    for kept in 1..=8 {
        let mut got = [0; BLOCK_BYTES];
        join(Format::Int8, &select(Format::Int8, PlaneMask(0xff << (8 - kept) & 0xff), &planes), &mut got);
        for (got, word) in got.iter().zip(&words) {
            assert_eq!(got.cast_signed() >> (8 - kept), word.cast_signed() >> (8 - kept));
        }
    }
}
