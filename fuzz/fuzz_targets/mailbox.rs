//! See `lamina_serve::fuzzing::mailbox`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina_serve::fuzzing::mailbox(data));
