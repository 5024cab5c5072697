//! `lamina pool`: pools of objects that several processes or hosts share, in a file of the mount or
//! any other.

mod caches;
mod holds;
mod plot;
mod put;
mod replay;
mod trace;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, anyhow, bail, ensure};
use hyper::Method;
use lamina_pool::{Geometry, IndexServer, NodeCounts, Pool, PoolError, Stats, local};
use serde::Serialize;
use serde_json::json;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::args::{Client, PoolAt, PoolCommand};
use crate::client::{ask, escaped};
use crate::made_file;
use crate::out::{self, print_line};
use crate::signals::Ending;
use crate::table::new_table;

/// Does something as a node of its own, and leaves.
fn with<T>(file: &Path, work: impl FnOnce(&Pool) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let pool = Pool::open(file).with_context(|| file.display().to_string())?;
    let done = work(&pool);
    pool.leave()?;
    done
}

fn told(value: &impl Serialize) -> anyhow::Result<()> {
    print_line!("{}", serde_json::to_string(value)?)?;
    Ok(())
}

/// A name as one line that a terminal takes for text: what is not is escaped, and backslashes.
fn printable(name: &str) -> String {
    let escaped = |letter: char| match letter {
        '"' | '\'' => letter.to_string(),
        _ => letter.escape_debug().to_string(),
    };
    name.chars().map(escaped).collect()
}

fn serve(at: &PoolAt) -> anyhow::Result<()> {
    let pool = Arc::new(Pool::open(&at.file).with_context(|| at.file.display().to_string())?);
    let server = IndexServer::new(Arc::clone(&pool))?;
    let stop = AtomicBool::new(false);
    let (say, mut ended) = oneshot::channel::<()>();
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let served = server.run(|| stop.load(Ordering::Relaxed));
            // Whoever waits for a signal need not wait any more.
            drop(say);
            served
        });
        let begun = if at.json {
            told(&json!({ "pool": at.file, "node": pool.node() }))
        } else {
            print_line!("node {} serves the index of {}", pool.node(), at.file.display())
                .map_err(anyhow::Error::from)
        };
        let interrupted = begun.and_then(|()| {
            Handle::current().block_on(async {
                let mut ending = Ending::watch()?;
                tokio::select! {
                    _ = &mut ended => {}
                    _ = ending.next() => {}
                }
                Ok(())
            })
        });
        stop.store(true, Ordering::Relaxed);
        let served = serving.join().map_err(|_| anyhow!("what serves the index panicked"))?;
        interrupted.and(Ok(served?))
    })?;
    drop(server);
    if let Some(pool) = Arc::into_inner(pool) {
        pool.leave()?;
    }
    Ok(())
}

fn print_stats(stats: &Stats) -> anyhow::Result<()> {
    let Stats { bytes, taken_bytes, objects, blocks, ready_bytes, .. } = stats;
    print_line!("{bytes} bytes, of which {taken_bytes} are taken")?;
    print_line!("{objects} objects and {blocks} blocks of {ready_bytes} bytes")?;
    print_line!("{} of {} slots are reserved, {} evicting", stats.reserved, stats.slots, stats.evicting)?;
    print_line!("{} nodes are attached besides this one", stats.nodes.saturating_sub(1))?;
    for share in stats.by_class.iter().filter(|_| stats.by_class.len() > 1) {
        let class = if share.class.is_empty() { "the pool's own class" } else { &share.class };
        print_line!("{class}: {} bytes ready, {} taken", share.ready_bytes, share.taken_bytes)?;
    }
    let titles = ["node", "host", "hits", "misses", "stores", "evictions", "lock waits", "recoveries"];
    let mut table = new_table(&titles, 2);
    for node in &stats.by_node {
        let NodeCounts { hits, misses, stores, evictions, lock_waits, recoveries, .. } = node;
        let counts = [hits, misses, stores, evictions, lock_waits, recoveries].map(ToString::to_string);
        table.add_row([node.node.to_string(), printable(&node.name)].into_iter().chain(counts));
    }
    print_line!("{table}")?;
    Ok(())
}

async fn fence(host: &str, undo: bool, client: &Client) -> anyhow::Result<()> {
    let action = if undo { "admit" } else { "revoke" };
    let done = ask(&client.api, Method::POST, &format!("/hosts/{}/{action}", escaped(host)), None).await?;
    if client.json {
        return told(&done);
    }
    let what = if undo { "has access again" } else { "has no access any more" };
    print_line!("the host {host} {what}")?;
    Ok(())
}

pub(crate) fn pool(command: PoolCommand) -> anyhow::Result<()> {
    match command {
        PoolCommand::Fence { host, undo, client } => {
            Handle::current().block_on(fence(&host, undo, &client))?;
        }
        PoolCommand::Create { file, size, nodes, force, holds, json } => {
            local::check_holds_no_other(&file)?;
            if !force && local::holds_something(&file).with_context(|| file.display().to_string())? {
                bail!("{}: it may hold what somebody wants; --force has it lost", file.display());
            }
            let length = local::length_of(&file, size)?;
            let geometry = Geometry::fitting_for(length, nodes);
            let least = geometry.bytes()?;
            ensure!(least <= length, "a pool for {nodes} nodes takes {least} bytes at least, not {length}");
            local::create_declared(&file, &geometry, |data| {
                holds.declare(&file, data).map_err(|why| PoolError::Declare(out::reason(&why)))
            })?;
            if json {
                return told(&json!({ "pool": file, "bytes": geometry.bytes()?, "nodes": nodes }));
            }
        }
        PoolCommand::Ls(at) => {
            let objects = with(&at.file, |pool| Ok(pool.list()?))?;
            if at.json {
                return told(&objects);
            }
            for object in objects {
                let class =
                    if object.class.is_empty() { String::new() } else { format!("  ({})", object.class) };
                print_line!("{:>14}  {}{class}", object.bytes, printable(&object.name))?;
            }
        }
        PoolCommand::Stat(at) => {
            let stats = with(&at.file, |pool| Ok(pool.stats()?))?;
            if at.json {
                return told(&stats);
            }
            print_stats(&stats)?;
        }
        PoolCommand::Put { file, name, from, holds, json } => {
            let bytes = put::put(&file, &name, from, holds.class()?.as_ref())?;
            if json {
                return told(&json!({ "name": name, "bytes": bytes }));
            }
        }
        PoolCommand::Get { file, name, to, json } => {
            if let Some(to) = &to {
                made_file::not_over("TO", to, [file.as_path()])?;
            }
            let found = with(&file, |pool| Ok(pool.get(&name)?))?;
            let Some(content) = found else { bail!("there is no object {name:?}") };
            match to {
                Some(to) => made_file::write(&to, &content)?,
                None => out::text(&content)?,
            }
            if json {
                return told(&json!({ "name": name, "bytes": content.len() }));
            }
        }
        PoolCommand::Rm { file, names, json } => {
            // The others go, too: which of the names is missing is no matter of their order.
            let (mut removed, mut missing) = (Vec::new(), Vec::new());
            with(&file, |pool| {
                for name in &names {
                    let gone = if pool.delete(name)? { &mut removed } else { &mut missing };
                    gone.push(name);
                }
                Ok(())
            })?;
            if json {
                told(&json!({ "removed": removed, "missing": missing }))?;
            }
            if !missing.is_empty() {
                let missing: Vec<_> = missing.iter().map(|name| format!("{name:?}")).collect();
                bail!("there is no object {}", missing.join(", "));
            }
        }
        PoolCommand::Serve(at) => serve(&at)?,
        PoolCommand::Replay(args) => replay::replay(&args)?,
        PoolCommand::Check { repair, at } => {
            let report = with(&at.file, |pool| Ok(pool.check(repair)?))?;
            if at.json {
                told(&report)?;
            } else {
                print_line!("{} objects and blocks of {} bytes hold", report.ready, report.bytes)?;
                for problem in &report.problems {
                    let mended = if problem.mended { ": mended" } else { "" };
                    print_line!("{} at {}{mended}", problem.what, problem.at)?;
                }
            }
            let left = report.problems.iter().filter(|problem| !problem.mended).count();
            if left > 0 && repair {
                bail!(
                    "{left} problems could not be mended while other processes use the pool, if any do: end \
                     these, and repair it again"
                );
            } else if left > 0 {
                bail!("{left} problems: lamina pool check --repair");
            }
        }
    }
    Ok(())
}
