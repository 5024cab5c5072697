//! A prompt's KV cache that one host computes and another goes on with, through a pool in a region
//! that is not coherent.
//!
//! These need what `./x` sets up: the guest's programs and image, a QEMU, FUSE.

use std::time::Duration;

use lamina_guest::Omit;
use lamina_run::{
    bundled, bundled_file,
    handoff::{Handoff, HandoffReport},
    job::On,
};

const PROMPT: &str = "Once upon a time, there was a little girl named Lily. She loved to play in the park.";
const BLOCK_TOKENS: usize = 8;

fn hand_off(on: On, omit: Option<Omit>) -> HandoffReport {
    let folder = tempfile::tempdir().unwrap();
    let handoff = Handoff {
        model: bundled().unwrap().swap_remove(0),
        tokenizer: bundled_file("tok512.bin").unwrap(),
        prompt: PROMPT.to_owned(),
        tokens: 60,
        block_tokens: BLOCK_TOKENS,
        omit,
        on,
        limit: Duration::from_secs(600),
        consoles: folder.path().to_owned(),
    };
    let report = handoff.run(|_| {}).unwrap();
    assert!(report.good(), "{}", report.to_text());
    assert!(report.same_text && report.tokens > report.prompt_tokens, "{}", report.to_text());
    report
}

#[test]
fn two_processes_write_what_one_would() {
    let report = hand_off(On::Host, None);
    let blocks = (report.prompt_tokens - 1) / BLOCK_TOKENS;
    assert!(blocks > 1 && report.sides.iter().all(|side| side.blocks == blocks), "{}", report.to_text());
    assert_eq!(report.caught, None);
    for side in &report.sides {
        assert!(side.calls.flushes > 0 && side.calls.invalidations > 0, "{:?}", side.calls);
        assert!(side.host_counters["lines_merged"].as_u64() > Some(0), "{}", side.host_counters);
    }
}

#[test]
fn a_call_that_is_left_out_is_caught_and_the_text_is_right_still() {
    // It is caught each time; more of them take minutes.
    let times = if std::env::var_os("LAMINA_LONG").is_some() { 10 } else { 1 };
    for omit in Omit::ALL {
        for _ in 0..times {
            let report = hand_off(On::Host, Some(omit));
            assert!(
                report.caught.as_ref().is_some_and(|caught| caught.starts_with("block 0: ")),
                "{report:?}"
            );
        }
    }
}

#[test]
fn two_booted_guests_write_what_one_would() {
    let report = hand_off(On::Guest, None);
    assert!(report.to_text().contains("two guests in QEMU"), "{}", report.to_text());
}
