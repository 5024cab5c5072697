//! `lamina reproduce`: each table and figure of the papers beside what runs here.
//!
//! The rules:
//! * Nothing is written down but the papers' own numbers, which are called quoted. Ours are
//!   computed when the command runs, by the code that the other commands use.
//! * Each number says how it was had, each section on what, or why there is none.
//! * What needs a language model comes from reports: of `./x run --workload decode`, whose decoder
//!   belongs to the tests, and of llama.cpp.

mod book;
mod cached;
mod chart;
mod controller;
mod decoded;
mod designs;
mod elastic;
mod found;
mod llama;
mod page;
mod server;
mod stored;

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};

use self::book::{Book, Counts, Section};
use self::found::Found;
use crate::args::Reproduce;
use crate::made_file;
use crate::out;

/// The page in the folder, and the same for programs.
const PAGE: &str = "report.html";
const JSON: &str = "report.json";

/// Runs all, and writes the report.
pub(crate) fn reproduce(args: &Reproduce) -> Result<()> {
    let begun = Instant::now();
    // Before minutes of work.
    let read = || {
        let one = [&args.decode, &args.llama].into_iter().flatten();
        args.model.iter().chain(&args.cache).chain(one).map(PathBuf::as_path)
    };
    let made = [PAGE, JSON].map(|name| args.out.join(name));
    for path in &made {
        made_file::not_over("--out", path, read())?;
    }
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    for path in &made {
        made_file::check("--out", path, read())?;
    }
    let found = Found::new(args)?;
    let book = book(&found, begun)?;
    let json = serde_json::to_vec_pretty(&book)?;
    let [html_path, json_path] = &made;
    made_file::write(html_path, page::html(&book).as_bytes())?;
    made_file::write(json_path, &json)?;
    if args.json {
        out::text(&[&json[..], b"\n"].concat())?;
        return Ok(());
    }
    let mut text = Vec::new();
    for section in &book.sections {
        let Counts { quoted, beside, fitted } = section.counts();
        let fitted = if fitted > 0 { format!("{fitted:2} fitted") } else { String::new() };
        let (paper, number, title) = (section.paper.name(), section.number, section.title);
        writeln!(text, "{paper:8} {number:10} {beside:2} of {quoted:2} {fitted:9}  {title}")?;
    }
    writeln!(text, "\n{}: {}", book.counts().said(), html_path.display())?;
    Ok(out::text(&text)?)
}

fn book(found: &Found, begun: Instant) -> Result<Book> {
    let none = || "none".to_owned();
    let sections: Vec<Section> = vec![
        stored::table_i(found),
        decoded::table_ii(found),
        designs::table_iii(found),
        stored::table_iv(found),
        controller::table_v(found),
        server::fig_12(found),
        server::fig_13(found),
        server::fig_14(found),
        cached::fig_15(found),
        stored::fig_16(found),
        elastic::fig_17(found),
        elastic::fig_18(found),
        elastic::fig_19(found),
        elastic::fig_20(found),
        elastic::fig_21(found),
        controller::fig_22(found),
        controller::fig_23(found),
        server::ndp_fig_1(found),
        elastic::ndp_fig_3(found)?,
        decoded::ndp_fig_4(found),
        server::ndp_fig_10(found),
        controller::ndp_fig_11(found)?,
        controller::ndp_fig_12(found)?,
        cached::ndp_fig_13(found),
        elastic::ndp_fig_20(found),
        designs::ndp_table_iii(found)?,
        controller::ndp_table_v(found),
    ];
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let facts = vec![
        ("weights", found.weights.as_ref().map_or_else(none, |weights| weights.names.clone())),
        ("KV cache", found.caches.as_ref().map_or_else(none, |caches| caches.names.clone())),
        ("decoded by", found.decoded.as_ref().map_or_else(none, |decoded| decoded.model.clone())),
        ("judged by llama.cpp", found.llama.as_ref().map_or_else(none, |llama| llama.model.clone())),
        ("DRAM", found.profile.name.clone()),
        (
            "made by",
            format!("lamina {} in {} s, {cores} cores", env!("CARGO_PKG_VERSION"), begun.elapsed().as_secs()),
        ),
        (
            "TRACE",
            "Unlocking Effective CXL Bandwidth via Lossless Compression and Precision Scaling".to_owned(),
        ),
        (
            "CXL-NDP",
            "Amplifying Effective CXL Memory Bandwidth for LLM Inference via Transparent \
                Near-Data Processing"
                .to_owned(),
        ),
    ];
    Ok(Book { facts, sections })
}
