//! See `lamina_pool::fuzzing::pool`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina_pool::fuzzing::pool(data));
