//! The paper's cycles, and caches by hand.

use super::*;
use crate::ModelError;

#[test]
fn cycles_are_the_papers() {
    use Design::{Gcomp, Plain, Trace};
    use Stored::{Bypass, Coded, Nothing};
    for quoted in TABLE_V {
        assert_eq!(quoted.design.cycles(Coded(1.5), true), quoted.cycles);
    }
    assert_eq!(Trace.cycles(Coded(3.0), true), 85);
    assert_eq!(Trace.cycles(Bypass, true), 76);
    // An index miss is one more DRAM window; `plain` has no index.
    assert_eq!(Trace.cycles(Coded(1.5), false), 89 + 58);
    assert_eq!(Gcomp.cycles(Coded(1.5), false), 84 + 58);
    assert_eq!(Plain.cycles(Coded(1.5), false), 71);
    assert_eq!(Trace.cycles(Nothing, true), 7);
    assert_eq!(Plain.cycles(Nothing, true), 71);
}

#[test]
fn more_compression_is_never_slower_and_absurd_ratios_do_no_harm() {
    let cycles = |ratio| Design::Trace.cycles(Stored::Coded(ratio), true);
    let ratios = [f64::NAN, 0.0, 1.0, 1.2, 1.5, 2.0, 3.0, 8.0, f64::INFINITY];
    assert!(ratios.windows(2).skip(1).all(|pair| cycles(pair[0]) >= cycles(pair[1])));
    assert_eq!((cycles(1.0), cycles(f64::INFINITY)), (93, 81));
}

fn hits(config: CacheConfig, blocks: &[u64]) -> Vec<bool> {
    let mut cache = IndexCache::new(config).unwrap();
    blocks.iter().map(|block| cache.touch(*block)).collect()
}

#[test]
fn caches_hold_what_their_policy_says() {
    let config = |ways, policy| CacheConfig { entries: 4, ways, policy };
    // Blocks 0 and 4 share the only place of a direct-mapped cache.
    assert_eq!(hits(config(1, Policy::Lru), &[0, 4, 0, 1, 1]), [false, false, false, false, true]);
    assert_eq!(hits(config(2, Policy::Lru), &[0, 2, 0, 2]), [false, false, true, true]);
    // 0 was used last: 2 goes. First in, 0 goes.
    assert_eq!(hits(config(2, Policy::Lru), &[0, 2, 0, 4, 0]), [false, false, true, false, true]);
    assert_eq!(hits(config(2, Policy::Fifo), &[0, 2, 0, 4, 0]), [false, false, true, false, false]);
    let random: Vec<u64> = (0..1000).map(|number| number * 7 % 12).collect();
    let seen = hits(config(4, Policy::Random), &random);
    assert_eq!(seen, hits(config(4, Policy::Random), &random));
    assert!(seen.iter().filter(|hit| **hit).count() < 700);
}

#[test]
fn absurd_caches_are_refused_by_field() {
    let refused = |entries, ways| {
        let config = CacheConfig { entries, ways, policy: Policy::Lru };
        IndexCache::new(config).err().map(|why: ModelError| why.to_string()).unwrap()
    };
    assert!(refused(3, 1).contains("index-entries is 3"));
    assert!(refused(0, 1).contains("index-entries is 0"));
    assert!(refused(8, 16).contains("index-ways is 16"));
    assert!(refused(8, 0).contains("index-ways is 0"));
}
