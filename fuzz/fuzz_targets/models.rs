//! See `lamina_serve::fuzzing::models`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina_serve::fuzzing::models(data));
