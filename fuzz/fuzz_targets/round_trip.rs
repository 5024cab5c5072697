//! See `lamina_serve::fuzzing::round_trip`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina_serve::fuzzing::round_trip(data));
