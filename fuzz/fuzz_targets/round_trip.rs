//! See `lamina::fuzzing::round_trip`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina::fuzzing::round_trip(data));
