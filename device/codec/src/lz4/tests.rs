use proptest::prelude::*;

use super::*;

/// A stream, well-formed or nearly: sequences of literals and a match, and something wrong here and there.
fn stream() -> impl Strategy<Value = Vec<u8>> {
    let length = prop_oneof![8 => 0_usize..15, 3 => 15_usize..40, 1 => 40_usize..600];
    let offset = prop_oneof![
        4 => 1_u16..20,
        3 => 20_u16..300,
        1 => any::<u16>(),
    ];
    let sequence = (length.clone(), offset, length, any::<u8>());
    let damage = prop::option::of((any::<prop::sample::Index>(), any::<u8>()));
    (prop::collection::vec(sequence, 0..24), 0_usize..24, damage, 0_usize..4).prop_map(
        |(sequences, last, damage, cut)| {
            let mut stream = Vec::new();
            let more = |stream: &mut Vec<u8>, length: usize| {
                if let Some(left) = length.checked_sub(15) {
                    stream.extend(std::iter::repeat_n(u8::MAX, left / 255));
                    stream.extend(u8::try_from(left % 255));
                }
            };
            let token = |literals: usize, matched: usize| {
                u8::try_from(literals.min(15) << 4 | matched.min(15)).expect("two nibbles")
            };
            for (literals, offset, matched, byte) in sequences {
                stream.push(token(literals, matched));
                more(&mut stream, literals);
                stream.extend((0..literals).map(|at| byte ^ at.to_le_bytes()[0]));
                stream.extend(offset.to_le_bytes());
                more(&mut stream, matched);
            }
            stream.push(token(last, 0));
            more(&mut stream, last);
            stream.extend((0..last).map(|at| at.to_le_bytes()[0]));
            if let Some((at, byte)) = damage {
                let at = at.index(stream.len());
                stream[at] = byte;
            }
            stream.truncate(stream.len() - cut.min(stream.len()));
            stream
        },
    )
}

/// Holds each kernel to the library, for planes of `plane` bytes and what the stream says is behind.
fn hold(stream: &[u8], plane: usize, behind: u8) -> Result<(), TestCaseError> {
    let mut want = vec![0; plane];
    let told = decompress(stream, &mut want);
    let mut stored = stream.to_vec();
    stored.extend([behind; SLACK]);
    for kernel in Kernel::available() {
        for slack in [SLACK, SLACK - 1, 0] {
            let mut out = vec![0xa5; plane + slack];
            let stored = &stored[..stream.len() + slack];
            let found = kernel.decompress_plane(stored, stream.len(), &mut out, plane);
            prop_assert_eq!(&found, &told, "{:?} {}", kernel, slack);
            if found == Ok(plane) {
                prop_assert_eq!(&out[..plane], &want[..], "{:?} {}", kernel, slack);
            }
        }
    }
    Ok(())
}

/// As many bytes as the stream gives, if the library takes it.
fn given(stream: &[u8]) -> Option<usize> {
    decompress(stream, &mut vec![0; 1 << 16]).ok()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_kernel_reads_what_the_library_reads(stream in stream(), behind: u8, beside in 0_usize..3) {
        hold(&stream, 256, behind)?;
        if let Some(given) = given(&stream) {
            hold(&stream, (given + beside).saturating_sub(1), behind)?;
        }
    }

    #[test]
    fn no_kernel_minds_noise(stream in prop::collection::vec(any::<u8>(), 0..300), behind: u8) {
        hold(&stream, 256, behind)?;
    }
}

#[test]
fn every_offset_is_repeated() {
    for offset in 1..=80_u8 {
        for length in 4..200_usize {
            let literals = usize::from(offset);
            let mut stream = vec![if literals < 15 { offset << 4 | 15 } else { 0xff }];
            stream.extend(offset.checked_sub(15));
            stream.extend(1..=offset);
            stream.extend([offset, 0]);
            match length.checked_sub(19) {
                Some(more) => stream.push(u8::try_from(more).expect("short")),
                None => stream[0] = stream[0] & 0xf0 | u8::try_from(length - 4).expect("short"),
            }
            stream.extend([0x50, 1, 2, 3, 4, 5]);
            assert_eq!(given(&stream), Some(literals + length + 5));
            hold(&stream, literals + length + 5, 0xff).expect("the same bytes");
            #[cfg(target_arch = "x86_64")]
            if Kernel::Avx2.is_available() {
                let (length, plane) = (stream.len(), literals + length + 5);
                stream.extend([0; SLACK]);
                // SAFETY: the processor has AVX2, as was asked above.
                let whole = unsafe { avx2::decompress(&stream, length, &mut vec![0; plane + SLACK], plane) };
                assert!(whole, "{offset} {plane}: left to the library");
            }
        }
    }
}
