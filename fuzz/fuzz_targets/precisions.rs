//! See `lamina_serve::fuzzing::precisions`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina_serve::fuzzing::precisions(data));
