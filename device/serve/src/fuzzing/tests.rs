//! A bounded run of the fuzz targets: the seeds, changed seeds, and bytes from nowhere, the same at
//! every run.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::*;

/// The seeds of a target.
fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
    let mut paths: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|why| panic!("{}: {why}", folder.display()))
        .map(|file| file.unwrap().path())
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} has no seeds", folder.display());
    paths.into_iter().map(|path| fs::read(path).unwrap()).collect()
}

/// Runs every seed, then `cases` made from them.
fn run(target: &str, cases: u32, body: fn(&[u8])) {
    let seeds = seeds(target);
    for seed in &seeds {
        body(seed);
    }
    let change = (any::<prop::sample::Index>(), any::<u8>());
    let changed = (
        prop::sample::select(seeds),
        prop::collection::vec(change, 0..6),
        prop::option::of(any::<prop::sample::Index>()),
    )
        .prop_map(|(mut bytes, changes, cut)| {
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()) + 1);
            }
            bytes
        });
    let noise = prop::collection::vec(any::<u8>(), 0..600);
    let input = prop_oneof![4 => changed, 1 => noise];
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    runner
        .run(&input, |bytes| {
            body(&bytes);
            Ok(())
        })
        .unwrap_or_else(|why| panic!("{target}: {why}"));
}

#[test]
fn any_block_comes_back() {
    run("round_trip", 3000, round_trip);
}

#[test]
fn any_entry_and_bundle_decode_or_are_refused() {
    run("stored", 6000, stored);
}

#[test]
fn any_bytes_are_a_packed_window_or_are_refused() {
    run("packed", 1500, packed);
}

#[test]
fn any_file_is_a_checkpoint_or_is_refused() {
    run("header", 4000, header);
}

#[test]
fn any_gguf_file_is_loaded_or_is_refused() {
    run("gguf", 4000, gguf);
}

#[test]
fn any_model_reads_as_it_was_loaded_and_at_precisions_or_is_refused() {
    run("models", 600, models);
}

#[test]
fn any_precision_and_map_are_shown_as_they_say_or_refused() {
    run("precisions", 600, precisions);
}

#[test]
fn any_bytes_to_the_api_get_an_answer_or_none() {
    run("api", 600, api);
}

#[test]
fn any_line_on_the_guest_port_gets_one_answer() {
    run("guest", 600, guest);
}

#[test]
fn any_request_of_a_kernel_gets_one_answer() {
    run("fuse", 800, fuse);
}

#[test]
fn any_image_is_opened_or_refused_and_what_is_opened_works() {
    run("image", 500, image);
}

#[test]
fn any_stream_is_a_snapshot_or_is_refused() {
    run("snapshot", 600, snapshot);
}

#[test]
fn any_memory_of_a_guest_leaves_a_disk_working() {
    run("disk", 600, disk);
}

#[test]
fn any_stores_into_a_mailbox_get_one_answer_a_ring() {
    run("mailbox", 400, mailbox);
}
