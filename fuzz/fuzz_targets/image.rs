//! See `lamina::fuzzing::image`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina::fuzzing::image(data));
