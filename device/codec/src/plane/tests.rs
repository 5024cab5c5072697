//! The transpose against its definition, one bit at a time.

use proptest::prelude::*;

/// Whether elements are two's complement, stored with their sign folded.
fn is_integer(format: Format) -> bool {
    matches!(format, Format::Int8 | Format::Int4)
}

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

fn flip_bit(format: Format, words: &mut [u8], element: usize, bit: usize) {
    let at = element * format.bits() as usize + bit;
    words[at / 8] ^= 1 << (at % 8);
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
                if is_integer(format) && plane != sign {
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
        for kernel in Kernel::available() {
            back.fill(0xa5);
            kernel.join_block(format, PlaneMask::all(format), &planes, &mut back);
            prop_assert!(back == words[..], "{:?} of a block of {}", kernel, format);
        }
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
        if is_integer(format) && mask.has(format.planes() - 1) {
            for element in (0..elements).filter(|element| plane_bit(format, &planes, format.planes() - 1, *element)) {
                (0..format.planes() - 1).for_each(|plane| flip_bit(format, &mut want, element, plane));
            }
        }
        for kernel in Kernel::available() {
            let mut got = [0xa5; BLOCK_BYTES];
            kernel.join(format, &select(format, mask, &planes), &mut got);
            prop_assert!(got == want, "{:?} of {}", kernel, format);
            let mut got = [0xa5; BLOCK_BYTES];
            kernel.join_block(format, mask, &planes, &mut got);
            prop_assert!(got == want, "{:?} of a block of {}", kernel, format);
        }
    }

    #[test]
    fn bytes_split_into_their_bits_and_back(
        bytes in (0..=MAX_BYTES / BYTES_STEP).prop_flat_map(|steps| prop::collection::vec(any::<u8>(), steps * BYTES_STEP)),
        mask in any::<u8>(), longer in 0_usize..3,
    ) {
        let length = bytes.len() / 8;
        let mut want = vec![vec![0_u8; length]; 8];
        for (j, byte) in bytes.iter().enumerate() {
            for (i, plane) in want.iter_mut().enumerate() {
                plane[j / 8] |= (byte >> i & 1) << (j % 8);
            }
        }
        let masked: Vec<u8> = bytes.iter().map(|byte| byte & mask).collect();
        for kernel in Kernel::available() {
            let mut planes = vec![vec![0xa5_u8; length + longer]; 8];
            let mut each = planes.iter_mut();
            kernel.split_bytes(&bytes, std::array::from_fn(|_| &mut each.next().unwrap()[..]));
            for (plane, want) in planes.iter().zip(&want) {
                prop_assert_eq!(&plane[..length], &want[..], "{:?}", kernel);
                prop_assert_eq!(&plane[length..], &[0xa5; 2][..longer], "{:?} writes past the plane", kernel);
            }
            let some: [&[u8]; 8] =
                std::array::from_fn(|bit| if mask >> bit & 1 == 1 { &planes[bit][..] } else { &ZEROS });
            let mut got = vec![0xa5; bytes.len()];
            kernel.join_bytes(&some, &mut got);
            prop_assert!(got == masked, "{:?}", kernel);
        }
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
            got_back.fill(0xa5);
            kernel.join_block(format, PlaneMask(mask), &planes, &mut got_back);
            prop_assert!(got_back == back, "{:?} joins blocks of {} differently", kernel, format);
        }
    }
}

#[test]
fn planes_may_lie_anywhere_and_be_longer() {
    let words: BlockWords = std::array::from_fn(|at| (at * 37 + at / 256).to_le_bytes()[0]);
    for format in Format::ALL.into_iter().filter(|format| format.planes() > 0) {
        let mut planes = [0; BLOCK_BYTES];
        split(format, &words, &mut planes);
        for kernel in Kernel::available() {
            // One byte apart from each other, so that every alignment occurs.
            let bytes = format.plane_bytes();
            let mut apart = vec![0xa5; 1 + format.planes() * (bytes + 1)];
            for plane in 0..format.planes() {
                apart[1 + plane * (bytes + 1)..][..bytes]
                    .copy_from_slice(&planes[plane_range(format, plane)]);
            }
            let mut found: Planes<'_> = [&[]; 32];
            (0..format.planes()).for_each(|plane| found[plane] = &apart[1 + plane * (bytes + 1)..]);
            let mut got = [0; BLOCK_BYTES];
            kernel.join(format, &found, &mut got);
            assert!(got == words, "{kernel:?} of {format}");
        }
    }
}

#[test]
fn what_is_too_short_is_refused() {
    let refused = |call: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err();
    for kernel in Kernel::available() {
        let short = [0; 63];
        assert!(refused(&|| kernel
            .join_bytes(&[&ZEROS, &ZEROS, &ZEROS, &ZEROS, &ZEROS, &ZEROS, &ZEROS, &short], &mut [0; 512])));
        assert!(refused(&|| kernel.join_bytes(&[&ZEROS; 8], &mut [0; 511])));
        assert!(refused(&|| kernel.join_bytes(&[&ZEROS; 8], &mut [0; MAX_BYTES + BYTES_STEP])));
        assert!(refused(&|| kernel.split_bytes(&[0; 512], std::array::from_fn(|_| &mut [][..]))));
        for format in Format::ALL {
            let mut planes: Planes<'_> = [&ZEROS; 32];
            planes[format.planes().saturating_sub(1)] = &ZEROS[..format.plane_bytes() - 1];
            assert!(
                refused(&|| kernel.join(format, &planes, &mut [0; BLOCK_BYTES])),
                "{kernel:?} of {format}"
            );
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
