//! See `lamina::fuzzing::disk`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina::fuzzing::disk(data));
