//! See `lamina::fuzzing::stored`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina::fuzzing::stored(data));
