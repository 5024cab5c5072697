//! See `lamina::fuzzing::fuse`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina::fuzzing::fuse(data));
