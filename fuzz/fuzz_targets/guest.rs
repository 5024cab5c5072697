//! See `lamina::fuzzing::guest`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina::fuzzing::guest(data));
