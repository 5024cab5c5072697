//! See `lamina::fuzzing::header`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina::fuzzing::header(data));
