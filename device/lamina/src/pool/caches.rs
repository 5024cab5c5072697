//! The nodes of a serving system as a trace's replay has them: real pools, one for all nodes or one
//! each, and a router before them.
//!
//! A block's bytes stand for it: 64 of them, whatever it takes in the system that is modelled. So
//! lookups, stores and evictions are those of the pool, and its capacity is in blocks. All who
//! share a pool use it by one attachment, one after another: what is found does not depend on time.

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use lamina_model::serving::{Compute, Request as Timed, prefill};
use lamina_pool::{Chain, Geometry, Key, Pool, local};
use rustix::fs::{MemfdFlags, memfd_create};

use super::trace::{BLOCK_TOKENS, Request};

/// Bytes that stand for a block.
const STANDS_FOR: usize = 64;
/// Bytes of a chunk, which is a node's as a whole.
const CHUNK: u64 = 4096;
/// Slots for each block that there is space for: groups of slots fill up unevenly.
const SLOTS_EACH: u64 = 4;
/// Slots of a group.
const SLOTS: u64 = 8;
/// Nodes that may be.
pub(super) const MAX_NODES: usize = 64;

/// Whose the caches are, and who gets a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Routing {
    /// A cache each, and the node with the least to do.
    OwnOblivious,
    /// A cache each, and the node that was sent most of the prompt before, if that is more than
    /// half of it; else the node with the least to do. What all prompts begin with says nothing of
    /// where they belong.
    OwnAffine,
    /// One for all, and the node with the least to do.
    Shared,
}

/// What the replay of a trace found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Each request as its node got it.
    pub(super) timed: Vec<Timed>,
    /// Blocks of all prompts.
    pub(super) blocks: u64,
    /// Blocks that were there.
    pub(super) hits: u64,
    /// Tokens of all prompts.
    pub(super) tokens: u64,
    /// Tokens of blocks that were there.
    pub(super) hit_tokens: u64,
    /// Blocks stored.
    pub(super) stores: u64,
    /// Blocks evicted for space.
    pub(super) evictions: u64,
}

/// So many pools, of `blocks` in all.
fn pools(count: usize, blocks: u64) -> Result<Vec<Pool>> {
    let geometry = geometry(blocks / count as u64)?;
    let pool = |_| {
        let file = memfd_create("lamina-replay", MemfdFlags::CLOEXEC).context("no memory for a pool")?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        local::create(&path, &geometry)?;
        // It keeps the memory from here on.
        Ok(Pool::open(&path)?)
    };
    (0..count).map(pool).collect()
}

/// A pool that holds so many blocks.
fn geometry(blocks: u64) -> Result<Geometry> {
    let chunks = blocks / (CHUNK / STANDS_FOR as u64);
    ensure!(chunks > 0, "a cache of {blocks} blocks is too small: give more --memory, or have fewer --nodes");
    let wrong = || format!("a cache of {blocks} blocks is more than a pool has");
    let groups = u32::try_from((blocks * SLOTS_EACH).div_ceil(SLOTS)).with_context(wrong)?;
    let chunks = u32::try_from(chunks).with_context(wrong)?;
    Ok(Geometry { nodes: 1, stripes: groups.min(64), groups, chunks, chunk_bytes: CHUNK })
}

/// The bytes that stand for a block.
fn stands_for(key: &Key) -> [u8; STANDS_FOR] {
    let mut bytes = [0; STANDS_FOR];
    for part in bytes.chunks_mut(key.0.len()) {
        part.copy_from_slice(&key.0);
    }
    bytes
}

/// Who gets a request.
struct Router {
    /// For each block, the nodes that were sent it: a bit each. A node may have evicted it.
    sent: HashMap<u64, u64>,
    /// When each node will have computed what it was sent.
    busy_until: Vec<f64>,
}

impl Router {
    fn choose(&self, routing: Routing, request: &Request) -> usize {
        let waits = |node: &usize| (self.busy_until[*node] - request.arrival).max(0.0);
        let least = |nodes: &mut dyn Iterator<Item = usize>| {
            nodes.min_by(|one, other| waits(one).total_cmp(&waits(other)))
        };
        let mut candidates = u64::MAX;
        if routing == Routing::OwnAffine {
            let mut same = 0;
            for block in &request.blocks {
                match candidates & self.sent.get(block).copied().unwrap_or_default() {
                    0 => break,
                    have_it => candidates = have_it,
                }
                same += 1;
            }
            if 2 * same <= request.blocks.len() {
                candidates = u64::MAX;
            }
        }
        least(&mut (0..self.busy_until.len()).filter(|node| candidates >> node & 1 == 1)).unwrap_or_default()
    }

    fn sent(&mut self, node: usize, request: &Request, seconds: f64) {
        for block in &request.blocks {
            *self.sent.entry(*block).or_default() |= 1 << node;
        }
        self.busy_until[node] = self.busy_until[node].max(request.arrival) + seconds;
    }
}

/// Sends a trace's requests through caches of `blocks` in all, of `block_bytes` each. `goes_on` is
/// called after each.
pub(super) fn replay(
    routing: Routing,
    nodes: usize,
    (blocks, block_bytes): (u64, u64),
    compute: &Compute,
    requests: &[Request],
    mut goes_on: impl FnMut(),
) -> Result<Found> {
    ensure!((1..=MAX_NODES).contains(&nodes), "{nodes} nodes: from 1 to {MAX_NODES} can be");
    let pools = pools(if routing == Routing::Shared { 1 } else { nodes }, blocks)?;
    let mut router = Router { sent: HashMap::new(), busy_until: vec![0.0; nodes] };
    // Where each block lies, as if addresses were given out round and round.
    let (mut places, mut next) = (HashMap::new(), 0_u64);
    let mut found = Found::default();
    for request in requests {
        // Numbers of blocks are of their whole prefix already.
        let key = |block: &u64| {
            let [low, high] = [block & u64::from(u32::MAX), block >> 32];
            let tokens = [low, high].map(|half| u32::try_from(half).expect("32 bits"));
            Chain::new("a trace's block").next(&tokens)
        };
        let keys: Vec<Key> = request.blocks.iter().map(key).collect();
        let node = router.choose(routing, request);
        let pool = &pools[node % pools.len()];
        let hits = pool.prefix(&keys)?;
        let mut read = [0; STANDS_FOR];
        for key in &keys[..hits] {
            let there = pool.read_into(key, &mut [&mut read])?;
            ensure!(there && read == stands_for(key), "a block that was found is not what was stored");
        }
        for (key, block) in keys.iter().zip(&request.blocks).skip(hits) {
            if pool.store(*key, &[&stands_for(key)])? {
                found.stores += 1;
                places.insert(*block, next);
                next += block_bytes;
            }
        }
        let hit_tokens = (hits as u64 * BLOCK_TOKENS).min(request.tokens);
        // The last token is computed in any case: the next one comes from it.
        let computed = (request.tokens - hit_tokens).max(1);
        let place = |block: &u64| (places.get(block).copied().unwrap_or_default(), block_bytes);
        found.timed.push(Timed {
            arrival: request.arrival,
            node,
            computed,
            hits: request.blocks[..hits].iter().map(place).collect(),
        });
        found.blocks += keys.len() as u64;
        found.hits += hits as u64;
        found.tokens += request.tokens;
        found.hit_tokens += hit_tokens;
        router.sent(node, request, prefill(compute, computed));
        goes_on();
    }
    for pool in &pools {
        found.evictions += pool.stats()?.evictions;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPUTE: Compute = Compute { flops: 1e12, token_flop: 1e9 };

    fn requests(prompts: &[&[u64]]) -> Vec<Request> {
        let request = |(number, blocks): (usize, &&[u64])| Request {
            arrival: f64::from(u32::try_from(number).unwrap()),
            tokens: blocks.len() as u64 * BLOCK_TOKENS,
            blocks: blocks.to_vec(),
        };
        prompts.iter().enumerate().map(request).collect()
    }

    fn run(routing: Routing, nodes: usize, blocks: u64, prompts: &[&[u64]]) -> Found {
        replay(routing, nodes, (blocks, 1 << 20), &COMPUTE, &requests(prompts), || {}).unwrap()
    }

    /// Long prompts that begin alike, so that another node is free when the second comes.
    #[test]
    fn a_prefix_is_found_where_it_was_stored_and_by_all_who_share() {
        let alike: Vec<u64> = (0..40).collect();
        let other: Vec<u64> = (0..38).chain(100..110).collect();
        let prompts = [&alike[..], &other[..], &alike[..]];
        let hits = |routing| run(routing, 3, 3000, &prompts).hits;
        assert_eq!(hits(Routing::Shared), 38 + 40);
        assert_eq!(hits(Routing::OwnAffine), 38 + 40);
        assert_eq!(hits(Routing::OwnOblivious), 0, "three nodes, each with its own");
        let shared = run(Routing::Shared, 3, 3000, &prompts);
        assert_eq!(shared.timed[0].computed, 40 * BLOCK_TOKENS);
        assert_eq!(shared.timed[1].computed, 10 * BLOCK_TOKENS);
        assert_eq!(shared.timed[2].computed, 1, "all was there but the last token's answer");
        assert_eq!(shared.timed[1].hits[1], (1 << 20, 1 << 20));
        assert_eq!((shared.stores, shared.blocks, shared.evictions), (50, 128, 0));
        let nodes: Vec<usize> = shared.timed.iter().map(|timed| timed.node).collect();
        assert_eq!(nodes, [0, 1, 2]);
    }

    #[test]
    fn what_does_not_fit_is_evicted() {
        let first: Vec<u64> = (0..100).collect();
        let second: Vec<u64> = (1000..1400).collect();
        let found = run(Routing::Shared, 1, 256, &[&first, &second, &first]);
        assert!(found.evictions > 0 && found.hits < 100, "{found:?}");
    }

    #[test]
    fn caches_that_cannot_be_are_refused() {
        let refused = |nodes, blocks| {
            let replayed =
                replay(Routing::OwnAffine, nodes, (blocks, 1), &COMPUTE, &requests(&[&[1]]), || {});
            replayed.unwrap_err().to_string()
        };
        assert!(refused(8, 100).contains("too small"));
        assert!(refused(0, 100).contains("from 1 to 64"));
        assert!(refused(65, 1 << 20).contains("from 1 to 64"));
        assert!(refused(1, u64::MAX / 8).contains("more than a pool has"));
    }
}
