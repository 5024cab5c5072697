//! See `lamina::fuzzing::api`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina::fuzzing::api(data));
