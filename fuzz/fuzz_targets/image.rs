//! See `lamina_serve::fuzzing::image`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina_serve::fuzzing::image(data));
