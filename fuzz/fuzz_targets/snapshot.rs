//! See `lamina::fuzzing::snapshot`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina::fuzzing::snapshot(data));
