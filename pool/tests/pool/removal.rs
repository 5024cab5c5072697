//! Each flush, invalidation and fence is needed: left out, one at a time, a test finds it missing.
//!
//! Which there are is found by running everything once with all of them. The normal test tries one
//! in twelve, and every one with `LAMINA_LONG`.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use lamina_pool::mem::Site;

use crate::scenes::SCENES;

/// Seeds that are tried. Most sites are found by the first few.
const ROUNDS: u64 = 60;
/// One site in so many is tried in the normal test.
const SOME: usize = 12;

/// Whether anything finds `site` missing.
fn is_found(site: Site) -> bool {
    let runs = (0..ROUNDS)
        .flat_map(|round| SCENES.iter().enumerate().map(move |(index, scene)| (round, index, scene)));
    for (round, index, scene) in runs {
        let seed = round * 31 + index as u64;
        if !matches!(catch_unwind(AssertUnwindSafe(|| scene.1(seed, Some(site)))), Ok(Ok(_))) {
            return true;
        }
    }
    false
}

#[test]
fn each_flush_invalidation_and_fence_that_is_left_out_is_found() {
    let mut sites: BTreeSet<Site> = BTreeSet::new();
    for round in 0..4 {
        for (name, scene) in SCENES {
            match scene(round, None) {
                Ok(found) => sites.extend(found),
                Err(failures) => panic!("{name} fails with nothing left out: {failures:#?}"),
            }
        }
    }
    assert!(sites.len() > 80, "only {} sites were reached", sites.len());
    let every = if std::env::var_os("LAMINA_LONG").is_some() { 1 } else { SOME };
    let missed: Vec<_> = sites.iter().step_by(every).filter(|site| !is_found(**site)).collect();
    assert!(missed.is_empty(), "of {} sites nothing misses {missed:#?}", sites.len());
}
