//! See `lamina_serve::fuzzing::api`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina_serve::fuzzing::api(data));
