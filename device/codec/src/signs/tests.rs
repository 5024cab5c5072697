use proptest::prelude::*;

use super::*;

/// Planes from noise to long runs, segment by segment.
fn plane(format: Format) -> impl Strategy<Value = Vec<u8>> {
    let segment = prop_oneof![
        any::<[u8; 16]>(),
        Just([0; 16]),
        Just([0xff; 16]),
        (any::<u8>(), 0_usize..16).prop_map(|(byte, at)| {
            let mut segment = [0; 16];
            segment[at] = byte;
            segment
        }),
        (any::<u8>(), 0_usize..16).prop_map(|(byte, at)| {
            let mut segment = [0xff; 16];
            segment[at] = byte;
            segment
        }),
        (0_usize..16).prop_map(|at| std::array::from_fn(|byte| if byte < at { 0 } else { 0xff })),
        // Many ones in few groups.
        (any::<[u8; 16]>(), 0_usize..16).prop_map(|(mut segment, at)| {
            segment[at..].fill(0);
            segment
        }),
    ];
    prop::collection::vec(segment, format.plane_bytes() / 16).prop_map(|segments| segments.concat())
}

fn formats() -> impl Strategy<Value = Format> {
    let formats: Vec<_> = Format::ALL.into_iter().filter(|format| format.planes() > 0).collect();
    prop::sample::select(formats)
}

fn planes() -> impl Strategy<Value = (Format, Vec<u8>)> {
    formats().prop_flat_map(|format| (Just(format), plane(format)))
}

/// Bytes that are seldom a stream, and bytes that are one but for their end.
fn arbitrary() -> impl Strategy<Value = (Format, Vec<u8>)> {
    let mode = (0..=MAX_MODE, 0..=MAX_MODE).prop_map(|(low, high)| low | high << 4);
    let unlikely = (formats(), prop::collection::vec(any::<u8>(), 0..1400));
    let modes = (formats(), prop::collection::vec(mode, 32), prop::collection::vec(any::<u8>(), 1368));
    let likely = modes.prop_map(|(format, modes, others)| {
        let modes = &modes[..mode_bytes(format.plane_bytes() / 8)];
        let bytes = [modes, &others].concat();
        // Where it ends is told by the reason for which a longer one is none.
        let end =
            match Kernel::Portable.decode(format, &bytes, bytes.len(), &mut vec![0; format.plane_bytes()]) {
                Err(Malformed::Length { end, .. }) => end,
                _ => bytes.len(),
            };
        (format, bytes[..end.min(bytes.len())].to_vec())
    });
    prop_oneof![unlikely, likely]
}

proptest! {
    #[test]
    fn signs_come_back_by_every_kernel((format, plane) in planes(), limit in 0_usize..1100) {
        let capacity = plane.len() + SLACK;
        let mut out = vec![0xa5; capacity];
        let length = Kernel::Portable.encode(format, &plane, limit, &mut out);
        for kernel in Kernel::available() {
            let mut same = vec![0x5a; capacity];
            prop_assert_eq!(kernel.encode(format, &plane, limit, &mut same), length, "{:?}", kernel);
            let Some(length) = length else { continue };
            prop_assert!(length < limit && length < plane.len());
            prop_assert_eq!(&same[..length], &out[..length], "{:?}", kernel);
            // What is behind a stream does not count.
            for fetched in [length, same.len()] {
                let mut back = vec![0xa5; plane.len()];
                kernel.decode(format, &same[..fetched], length, &mut back).unwrap();
                prop_assert_eq!(&back, &plane, "{:?}", kernel);
            }
        }
    }

    #[test]
    fn any_bytes_decode_to_a_plane_or_a_reason(
        (format, bytes) in arbitrary(), behind in prop_oneof![Just(0_usize), 1_usize..20],
    ) {
        let length = bytes.len().saturating_sub(behind);
        let mut plane = vec![0; format.plane_bytes()];
        let mut same = plane.clone();
        let slow = Kernel::Portable.decode(format, &bytes, length, &mut plane);
        for kernel in Kernel::available() {
            prop_assert_eq!(&kernel.decode(format, &bytes, length, &mut same), &slow, "{:?}", kernel);
            if slow.is_ok() {
                prop_assert_eq!(&plane, &same, "{:?}", kernel);
            }
        }
    }
}

#[test]
fn channels_that_lean_take_few_bytes() {
    let lean: Vec<u8> = (0..256).map(|byte| if byte / 16 % 2 == 0 { 0 } else { 0xff }).collect();
    let mut out = [0; 256 + SLACK];
    // Eight bytes of modes, and a bit for every 16 signs.
    assert_eq!(Kernel::best().encode(Format::Bf16, &lean, 256, &mut out), Some(8 + 16));
    assert_eq!(Kernel::best().encode(Format::Bf16, &noise(), 256, &mut out), None);
}

#[test]
fn a_plane_that_promises_little_is_left_as_it_is() {
    // Twenty ones in five groups of eight, and sixteen flags: 72 bits less, where the modes of a
    // plane take 64.
    let mut segment = [0; 16];
    segment[..5].fill(0x55);
    let one = [&segment, &noise()[16..]].concat();
    let two = [&segment, &segment, &noise()[32..]].concat();
    let mut out = [0; 256 + SLACK];
    for kernel in Kernel::available() {
        assert_eq!(kernel.encode(Format::Bf16, &one, 256, &mut out), None, "{kernel:?}");
        let length = kernel.encode(Format::Bf16, &two, 256, &mut out);
        assert_eq!(length, Some(256 + 8 - 2 * 72 / 8), "{kernel:?}");
    }
}

#[test]
fn every_kernel_tries_planes_from_the_same_bound_on() {
    for format in Format::ALL.into_iter().filter(|format| format.planes() > 0) {
        // 36 ones in each segment, two fewer than many: nine groups of eight and sixteen flags, so
        // that each would save 40 bits where its mode takes four.
        let mut segment = [0; 16];
        segment[..9].fill(0x55);
        let segments = format.plane_bytes() / 16;
        let mut plane = segment.repeat(segments);
        let mut out = vec![0; plane.len() + SLACK];
        for fewer in [false, true] {
            // One fewer in one of them.
            if fewer {
                plane[8] = 0x15;
            }
            let want = fewer.then_some(segments / 2 + segments * 88 / 8);
            for kernel in Kernel::available() {
                assert_eq!(kernel.encode(format, &plane, plane.len(), &mut out), want, "{format} {kernel:?}");
            }
        }
    }
}

/// A plane of bf16.
fn noise() -> Vec<u8> {
    (0..256_u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13).to_le_bytes()[0]).collect()
}
