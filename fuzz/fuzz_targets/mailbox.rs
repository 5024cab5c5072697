//! See `lamina::fuzzing::mailbox`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lamina::fuzzing::mailbox(data));
