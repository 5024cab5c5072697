//! `lamina pool replay`: a trace's requests through caches that nodes share, and through caches of
//! their own. Hits are measured, by real pools; times are modelled from them (seeds/004, 5.3, 6).

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Result, ensure};
use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};
use lamina_model::serving::{Compute, Memory, Times, serve};
use lamina_model::{ceil, float};
use serde::Serialize;

use super::caches::{Found, Routing, replay as run};
use super::trace::{self, BLOCK_TOKENS, Trace};
use super::{plot, told};
use crate::args::PoolReplay;
use crate::made_file;
use crate::modelled::shape;
use crate::out::print_line;
use crate::table::new_table;

/// What was measured of caches.
#[derive(Debug, Serialize)]
pub(super) struct Measured {
    /// Whose the caches are, and who gets a request.
    pub(super) caches: &'static str,
    /// Blocks that the memory holds.
    capacity_blocks: u64,
    /// Blocks of all prompts.
    blocks: u64,
    /// Blocks that were there.
    hit_blocks: u64,
    /// The part of all tokens that needed no computing.
    pub(super) hit_rate: f64,
    /// Bytes of the blocks that were there, as words.
    hit_bytes: u64,
    /// Bytes that the device fetched for them.
    fetched_bytes: u64,
    /// Blocks stored.
    stored_blocks: u64,
    /// Blocks evicted.
    evicted_blocks: u64,
    /// Tokens that the busiest node computed, by the mean of all nodes.
    busiest: f64,
}

/// What was modelled of caches in a memory.
#[derive(Debug, Serialize)]
pub(super) struct Modelled {
    /// Which caches.
    pub(super) caches: &'static str,
    /// Which memory.
    pub(super) memory: String,
    /// With requests at their times.
    #[serde(flatten)]
    pub(super) times: Times,
    /// Requests a second when all are there at the beginning.
    pub(super) saturated_requests_per_second: f64,
}

/// A report.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) trace: String,
    requests: usize,
    seconds: f64,
    tells_prefixes: bool,
    nodes: usize,
    model: String,
    block_tokens: u64,
    block_bytes: u64,
    memory_bytes: u64,
    ratio: f64,
    prefill_tflops: f64,
    /// Measured.
    pub(super) measured: Vec<Measured>,
    /// Modelled.
    pub(super) modelled: Vec<Modelled>,
}

/// Caches as they are compared: name, routing, and whether blocks are stored compressed.
const CACHES: [(&str, Routing, bool); 4] = [
    ("own, oblivious", Routing::OwnOblivious, false),
    ("own, prefix-affine", Routing::OwnAffine, false),
    ("pool, oblivious", Routing::Shared, false),
    ("pool, compressed", Routing::Shared, true),
];

pub(super) fn replay(args: &PoolReplay) -> Result<()> {
    ensure!(args.speed > 0.0 && args.speed.is_finite(), "--speed {}: it must be above 0", args.speed);
    ensure!((1.0..=64.0).contains(&args.ratio), "--ratio {}: from 1 to 64 can be", args.ratio);
    ensure!((1..=1024).contains(&args.devices), "--devices {}: from 1 to 1024 can be", args.devices);
    if let Some(file) = &args.plot {
        made_file::check("--plot", file, [args.trace.as_path(), Path::new(&args.model)])?;
    }
    let mut trace = trace::read(&args.trace, args.requests.unwrap_or(usize::MAX))?;
    for request in &mut trace.requests {
        request.arrival /= args.speed;
    }
    let report = report(args, &trace)?;
    if let Some(file) = &args.plot {
        made_file::write(file, plot::svg(&report).as_bytes())?;
    }
    if args.json { told(&report) } else { print(&report) }
}

fn report(args: &PoolReplay, trace: &Trace) -> Result<Report> {
    let shape = shape(&args.model, None)?;
    let block_bytes = ceil(shape.kv_bytes() * float(BLOCK_TOKENS));
    let compute = Compute { flops: args.tflops * 1e12, token_flop: 2.0 * shape.active() };
    let mut report = Report {
        trace: args.trace.display().to_string(),
        requests: trace.requests.len(),
        seconds: trace.requests.last().map_or(0.0, |request| request.arrival),
        tells_prefixes: trace.has_blocks,
        nodes: args.nodes,
        model: shape.name.clone(),
        block_tokens: BLOCK_TOKENS,
        block_bytes,
        memory_bytes: args.memory,
        ratio: args.ratio,
        prefill_tflops: args.tflops,
        measured: Vec::new(),
        modelled: Vec::new(),
    };
    let bar = ProgressBar::new((CACHES.len() * trace.requests.len()) as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {human_pos}/{human_len} requests, {msg}") {
        bar.set_style(style);
    }
    for (name, routing, compressed) in CACHES {
        bar.set_message(name);
        let stored_bytes = if compressed { ceil(float(block_bytes) / args.ratio) } else { block_bytes };
        let capacity = args.memory / stored_bytes;
        let space = (capacity, stored_bytes);
        let found = run(routing, args.nodes, space, &compute, &trace.requests, || bar.inc(1))?;
        report.measured.push(measured(name, args.nodes, capacity, (block_bytes, stored_bytes), &found));
        for (memory_name, memory) in memories(args, routing, float(block_bytes) / float(stored_bytes)) {
            let times = serve(args.nodes, &compute, &memory, &found.timed)?;
            let mut at_once = found.timed.clone();
            for request in &mut at_once {
                request.arrival = 0.0;
            }
            let saturated = serve(args.nodes, &compute, &memory, &at_once)?.requests_per_second;
            report.modelled.push(Modelled {
                caches: name,
                memory: memory_name,
                times,
                saturated_requests_per_second: saturated,
            });
        }
    }
    bar.finish_and_clear();
    Ok(report)
}

fn measured(
    caches: &'static str,
    nodes: usize,
    capacity_blocks: u64,
    (block_bytes, stored_bytes): (u64, u64),
    found: &Found,
) -> Measured {
    let mut computed = vec![0_u64; nodes];
    for request in &found.timed {
        computed[request.node] += request.computed;
    }
    let all: u64 = computed.iter().sum();
    let most = computed.iter().max().copied().unwrap_or_default();
    Measured {
        caches,
        capacity_blocks,
        blocks: found.blocks,
        hit_blocks: found.hits,
        hit_rate: float(found.hit_tokens) / float(found.tokens.max(1)),
        hit_bytes: found.hits.saturating_mul(block_bytes),
        fetched_bytes: found.hits.saturating_mul(stored_bytes),
        stored_blocks: found.stores,
        evicted_blocks: found.evictions,
        busiest: float(most) * float(nodes as u64) / float(all.max(1)),
    }
}

/// The memories in which caches are modelled, with so many bytes of words in a stored one.
fn memories(args: &PoolReplay, routing: Routing, ratio: f64) -> Vec<(String, Memory)> {
    if routing != Routing::Shared {
        return vec![("each node's own".to_owned(), Memory::Local { node_gbs: args.local_gbs })];
    }
    let pool = |devices, interleaved, background_gbs| Memory::Pool {
        node_gbs: args.pool_gbs,
        devices,
        device_gbs: args.device_gbs,
        ratio,
        bytes: args.memory,
        interleaved,
        background_gbs,
    };
    let many = args.devices;
    let beside = format!(", {} GB/s of one taken", args.background);
    let mut all = vec![
        ("1 device".to_owned(), pool(1, false, 0.0)),
        (format!("1 device{beside}"), pool(1, false, args.background)),
    ];
    if many > 1 {
        all.extend([
            (format!("{many} devices"), pool(many, false, 0.0)),
            (format!("{many} devices{beside}"), pool(many, false, args.background)),
            (format!("{many} interleaved"), pool(many, true, 0.0)),
            (format!("{many} interleaved{beside}"), pool(many, true, args.background)),
        ]);
    }
    all
}

fn print(report: &Report) -> Result<()> {
    let mut text = format!(
        "{}: {} requests in {:.0} s, {} nodes, {}\nblocks of {} tokens, {} each as words; {} for them\n",
        report.trace,
        report.requests,
        report.seconds,
        report.nodes,
        report.model,
        report.block_tokens,
        BinaryBytes(report.block_bytes),
        BinaryBytes(report.memory_bytes),
    );
    if !report.tells_prefixes {
        text.push_str("the trace does not tell which prompts begin alike: nothing can be hit\n");
    }
    writeln!(text, "\nmeasured, by the pool's own lookups, stores and evictions")?;
    let head =
        ["caches", "hold blocks", "of blocks", "hit", "hit of tokens", "fetched", "evicted", "busiest node"];
    let mut table = new_table(&head, 1);
    for row in &report.measured {
        table.add_row([
            row.caches.to_owned(),
            row.capacity_blocks.to_string(),
            row.blocks.to_string(),
            row.hit_blocks.to_string(),
            format!("{:.1} %", 100.0 * row.hit_rate),
            BinaryBytes(row.fetched_bytes).to_string(),
            row.evicted_blocks.to_string(),
            format!("{:.2} of mean", row.busiest),
        ]);
    }
    writeln!(text, "{table}")?;
    writeln!(
        text,
        "\nmodelled: prefill at {} TFLOP/s, one request after another; compressed is stored at {} to 1",
        report.prefill_tflops, report.ratio
    )?;
    let head =
        ["caches", "memory", "TTFT mean s", "p50 s", "p99 s", "fetch mean s", "requests/s, all at once"];
    let mut table = new_table(&head, 2);
    for row in &report.modelled {
        table.add_row([
            row.caches.to_owned(),
            row.memory.clone(),
            format!("{:.2}", row.times.ttft_mean),
            format!("{:.2}", row.times.ttft_p50),
            format!("{:.2}", row.times.ttft_p99),
            format!("{:.3}", row.times.fetch_mean),
            format!("{:.2}", row.saturated_requests_per_second),
        ]);
    }
    write!(text, "{table}")?;
    print_line!("{text}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command, PoolCommand};
    use serde_json::json;

    fn parsed(words: &[&str]) -> PoolReplay {
        let cli = Cli::try_parse_from([&["lamina", "pool", "replay"], words].concat()).unwrap();
        let Command::Pool(PoolCommand::Replay(args)) = cli.command else { panic!("lamina pool replay") };
        *args
    }

    /// Conversations: each goes on where it was, and all begin with the same 20 blocks.
    fn conversations(folder: &std::path::Path) -> String {
        let mut text = String::new();
        for turn in 0..4_u64 {
            for who in 0..40_u64 {
                let own = 1000 * (who + 1);
                let blocks: Vec<u64> = (0..20).chain(own..own + 5 * (turn + 1)).collect();
                let at = (turn * 40 + who) * 2000;
                let tokens = blocks.len() as u64 * BLOCK_TOKENS;
                writeln!(text, "{}", json!({"timestamp": at, "input_length": tokens, "hash_ids": blocks}))
                    .unwrap();
            }
        }
        let path = folder.join("trace.jsonl");
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    #[test]
    fn a_pool_hits_what_caches_of_ones_own_miss() {
        let folder = tempfile::tempdir().unwrap();
        let trace = conversations(folder.path());
        let args = parsed(&[&trace, "--nodes", "4", "--model", "llama-3.1-8b", "--memory", "1T"]);
        let found = report(&args, &trace::read(&args.trace, usize::MAX).unwrap()).unwrap();
        let [oblivious, affine, pool, compressed] = &found.measured[..] else { panic!("four caches") };
        // All but what is said for the first time: 20 blocks, and 5 of each turn of each.
        let new = 20 + 4 * 40 * 5;
        assert_eq!(pool.stored_blocks, new);
        assert_eq!(pool.hit_blocks, pool.blocks - new);
        assert_eq!(compressed.hit_blocks, pool.hit_blocks);
        assert!(compressed.fetched_bytes < pool.fetched_bytes && compressed.hit_bytes == pool.hit_bytes);
        assert!(oblivious.hit_blocks < affine.hit_blocks, "{oblivious:?} {affine:?}");
        assert!(affine.hit_blocks <= pool.hit_blocks && affine.busiest > pool.busiest);
        // One device that others use is slower than eight that share what is asked.
        let fetch = |memory: &str| {
            let row =
                found.modelled.iter().find(|row| row.caches == "pool, oblivious" && row.memory == memory);
            row.unwrap().times.fetch_mean
        };
        assert!(fetch("1 device, 15 GB/s of one taken") > fetch("1 device"));
        assert!(fetch("1 device") > fetch("8 interleaved"));
        let svg = plot::svg(&found);
        assert_eq!(svg.matches("<title>").count(), found.modelled.len());
        assert!(svg.ends_with("</svg>\n"));
    }

    #[test]
    fn what_cannot_be_replayed_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let trace = conversations(folder.path());
        let refused = |words: &[&str]| {
            let args = parsed(&[&[&*trace], words].concat());
            format!("{:#}", replay(&args).unwrap_err())
        };
        assert!(refused(&["--memory", "1M"]).contains("more --memory"));
        assert!(refused(&["--ratio", "0.5"]).contains("--ratio 0.5"));
        assert!(refused(&["--speed", "0"]).contains("--speed 0"));
        for devices in ["0", "1025"] {
            assert!(
                refused(&["--devices", devices]).contains(&format!("--devices {devices}: from 1 to 1024"))
            );
        }
        assert!(refused(&["--nodes", "99"]).contains("from 1 to 64"));
        assert!(refused(&["--model", "nothing"]).contains("nothing"));
        assert!(refused(&["--background", "30"]).contains("background_gbs"));
        let missing = folder.path().join("missing").display().to_string();
        assert!(format!("{:#}", replay(&parsed(&[&missing])).unwrap_err()).contains("missing"));
    }
}
