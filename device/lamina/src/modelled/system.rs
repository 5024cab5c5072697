//! `lamina model`: tables, JSON or drawings of the paper's system model.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use comfy_table::Table;
use lamina_model::system::{
    self, Accounting, Bound, CEILING, Design, Ratios, Report, Server, Shape, System, checks, gigabytes,
};
use serde_json::json;

use super::planner;
use crate::args::{Accounted, Model};
use crate::made_file;
use crate::out;
use crate::table::new_table;

/// Models and prints.
pub(crate) fn model(args: &Model) -> Result<()> {
    let mut text = Vec::new();
    if args.paper {
        print_checks(&mut text, args.json)?;
        return Ok(out::text(&text)?);
    }
    let as_text = args.plot.as_deref() == Some(Path::new("-"));
    ensure!(!(as_text && args.json), "--plot - and --json are both for standard output: plot to a file");
    // Drawings and the page go from left to right, and prices are those of the longest.
    let mut contexts = args.context.clone();
    contexts.sort_unstable();
    contexts.dedup();
    let read = || [Some(args.llm.as_str()), args.ratios.as_deref()].into_iter().flatten().map(Path::new);
    for (option, path) in [("--page", &args.page), ("--plot", &args.plot)] {
        if let Some(path) = path.as_deref().filter(|path| *path != Path::new("-")) {
            made_file::not_over(option, path, read())?;
            made_file::not_over(option, &printed(path), read())?;
        }
    }
    let shape = shape(&args.llm, args.weight_bits)?;
    let server = server(args)?;
    if let Some(path) = &args.page {
        let page = page(args, &shape, &server, &contexts)?;
        return made_file::write(path, page.as_bytes());
    }
    let accountings = match args.accounting {
        Accounted::AsPrinted => vec![Accounting::AsPrinted],
        Accounted::DeviceOnly => vec![Accounting::DeviceOnly],
        Accounted::Both => vec![Accounting::AsPrinted, Accounting::DeviceOnly],
    };
    let reports = accountings.into_iter().map(|accounting| {
        let system = System { shape: shape.clone(), server: server.clone(), accounting };
        let ratios = ratios(args, &shape, accounting)?;
        Ok(system.report(&ratios, &contexts, args.target)?)
    });
    let reports = reports.collect::<Result<Vec<_>>>()?;
    match args.plot.as_deref() {
        Some(path) if path == Path::new("-") => {
            reports.iter().try_for_each(|report| writeln!(text, "{}", system::terminal(report)))?;
        }
        Some(path) => draw(path, &reports)?,
        None => {}
    }
    if args.json {
        serde_json::to_writer_pretty(&mut text, &json!({"label": "modelled", "reports": reports}))?;
        writeln!(text)?;
    } else {
        reports.iter().try_for_each(|report| print(&mut text, report))?;
    }
    Ok(out::text(&text)?)
}

/// The page of what is asked for, which is checked as for a table.
fn page(args: &Model, shape: &Shape, server: &Server, contexts: &[u64]) -> Result<String> {
    let accounting = match args.accounting {
        Accounted::AsPrinted => Accounting::AsPrinted,
        Accounted::DeviceOnly | Accounted::Both => Accounting::DeviceOnly,
    };
    let ratios = ratios(args, shape, accounting)?;
    let system = System { shape: shape.clone(), server: server.clone(), accounting };
    system.report(&ratios, contexts, args.target)?;
    Ok(planner::page(&planner::Given {
        shape,
        server,
        contexts,
        accounting,
        ratios: args.ratios.is_some().then_some(ratios),
        target: args.target,
    }))
}

/// The LLM of that name, with weights of so many bits if they are given.
pub(crate) fn shape(name: &str, weight_bits: Option<f64>) -> Result<Shape> {
    if let Some(mut preset) = Shape::preset(name) {
        preset.weight_bits = weight_bits.unwrap_or(preset.weight_bits);
        preset.check()?;
        return Ok(preset);
    }
    if !Path::new(name).exists() {
        let known: Vec<_> = system::PRESETS.iter().map(|preset| preset.0).collect();
        bail!("{name:?} is no preset ({}) and no file", known.join(", "));
    }
    let text = fs::read_to_string(name).with_context(|| format!("cannot read {name}"))?;
    Ok(Shape::parse(name, &text, weight_bits)?)
}

fn server(args: &Model) -> Result<Server> {
    Ok(Server {
        hbm_bytes: gigabytes("hbm", args.hbm)?,
        alpha: args.alpha,
        link_rate: gigabytes("link", args.link)?,
        ddr_rate: gigabytes("ddr", args.ddr)?,
        batch: args.batch,
        read_fraction: args.f_rd,
        ceiling: args.ceiling,
        device_bytes: gigabytes("device", args.device)?,
        dram_price: args.dram_price,
    })
}

fn ratios(args: &Model, shape: &Shape, accounting: Accounting) -> Result<[Ratios; 3]> {
    let paper = Ratios::paper(shape.weight_bits);
    match args.ratios.as_deref() {
        Some("printed") => Ok(Ratios::printed()),
        Some("paper") => Ok(paper),
        Some(file) => {
            let text = fs::read_to_string(file).with_context(|| format!("cannot read the ratios {file}"))?;
            Ok(system::from_json(file, &text, &paper)?)
        }
        None if accounting == Accounting::AsPrinted => Ok(Ratios::printed()),
        None => Ok(paper),
    }
}

/// Where the drawing as printed goes, beside the other one.
fn printed(path: &Path) -> PathBuf {
    path.with_extension("printed.svg")
}

/// Two accountings are two files.
fn draw(path: &Path, reports: &[Report]) -> Result<()> {
    for report in reports {
        let file = match (reports.len(), report.accounting) {
            (1, _) | (_, Accounting::DeviceOnly) => path.to_owned(),
            (_, Accounting::AsPrinted) => printed(path),
        };
        made_file::write(&file, system::svg(report).as_bytes())?;
    }
    Ok(())
}

fn print(out: &mut impl Write, report: &Report) -> Result<()> {
    let how = match report.accounting {
        Accounting::AsPrinted => "as printed: KV in HBM counts as compressed, and so does the link",
        Accounting::DeviceOnly => "device side only: HBM and the link hold and carry words",
    };
    writeln!(out, "{}, modelled, {how}", report.shape.name)?;
    writeln!(out, "source: {}; shape: {}\n", report.source, report.shape.source)?;
    let mut head = vec!["context".to_owned()];
    head.extend(report.designs.iter().flat_map(|design| {
        let name = design.ratios.design;
        let rates = [format!("{name} tokens/s"), "all sequences".to_owned()];
        rates.into_iter().chain(["bound".to_owned(), "devices".to_owned()])
    }));
    let head: Vec<_> = head.iter().map(String::as_str).collect();
    let mut table = new_table(&head, 0);
    for (at, point) in report.designs[0].points.iter().enumerate() {
        let mut row = vec![point.context.to_string()];
        for design in &report.designs {
            let point = &design.points[at];
            let rate = |sequences: f64| {
                let rate = point.tokens_per_second;
                rate.map_or_else(|| "∞".to_owned(), |rate| format!("{:.2}", sequences * rate))
            };
            let rates = [rate(1.0), rate(report.server.batch)];
            row.extend(rates.into_iter().chain([bound(point.bound).to_owned(), point.devices.to_string()]));
        }
        table.add_row(row);
    }
    writeln!(out, "{table}\n\n{}\n", plan(report))?;
    Ok(())
}

fn bound(bound: Bound) -> &'static str {
    match bound {
        Bound::Unbound => "unbound",
        Bound::Ceiling => "ceiling",
        Bound::Ddr => "ddr",
        Bound::Link => "link",
    }
}

/// What a planner asks, a row a design.
fn plan(report: &Report) -> Table {
    let mut head =
        vec!["design", "source of ratios", "KV", "weights", "KV read spills at", "faster from", "price/GB"];
    let target = report.target.map(|target| format!("{target} tokens/s up to"));
    head.extend(target.as_deref());
    let mut table = new_table(&head, 2);
    let tokens = |tokens: Option<u64>| tokens.map_or_else(|| "–".to_owned(), |tokens| tokens.to_string());
    for design in &report.designs {
        let Design { ratios, .. } = design;
        let mut row = vec![
            ratios.design.to_owned(),
            ratios.source.clone(),
            format!("{:.3}", ratios.kv),
            format!("{:.3}", ratios.weights),
            tokens(design.spills_at),
            tokens(design.faster_than_plain_from),
            format!("{:.3}", design.price_per_gb),
        ];
        if report.target.is_some() {
            row.push(tokens(design.longest_at_target));
        }
        table.add_row(row);
    }
    table
}

fn print_checks(out: &mut impl Write, json: bool) -> Result<()> {
    let checks = checks();
    if json {
        serde_json::to_writer_pretty(&mut *out, &json!({"label": "modelled", "paper": checks}))?;
        writeln!(out)?;
        return Ok(());
    }
    writeln!(out, "TRACE, Figs. 12 to 14, GPT-OSS-120B, tokens/s; modelled; ceiling {CEILING}\n")?;
    let head =
        ["figure", "design", "α", "context", "paper", "as printed", "differs", "device only", "to be told"];
    let mut table = new_table(&head, 2);
    for check in &checks {
        table.add_row([
            check.figure.to_owned(),
            check.design.to_owned(),
            format!("{:.3}", check.alpha),
            check.context.to_string(),
            format!("{:.2}", check.paper),
            format!("{:.2}", check.ours),
            format!("{:+.2} %", 100.0 * check.difference()),
            format!("{:.2}", check.device_only),
            check.note.to_owned(),
        ]);
    }
    writeln!(out, "{table}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn args(words: &[&str]) -> Model {
        let cli = Cli::try_parse_from([&["lamina", "model"], words].concat()).unwrap();
        let Command::Model(args) = cli.command else { panic!("lamina model") };
        *args
    }

    /// A rate of one sequence passes for that of a server.
    #[test]
    fn help_says_whose_tokens_are_counted() {
        let help = Cli::try_parse_from(["lamina", "model", "--help"]).unwrap_err().to_string();
        assert!(help.contains("of one sequence of the batch"), "{help}");
        assert!(help.contains("weights are those of one token"), "{help}");
    }

    #[test]
    fn tables_say_what_is_modelled_and_who_says_so() {
        let args = args(&["gpt-oss-120b-mxfp4", "--context", "64k,128k", "--target", "20"]);
        let shape = shape(&args.llm, None).unwrap();
        let server = server(&args).unwrap();
        let system = System { shape: shape.clone(), server, accounting: Accounting::DeviceOnly };
        let ratios = ratios(&args, &shape, system.accounting).unwrap();
        let report = system.report(&ratios, &args.context, args.target).unwrap();
        let mut text = Vec::new();
        print(&mut text, &report).unwrap();
        let text = String::from_utf8(text).unwrap();
        for said in
            ["modelled, device side only", "TRACE", "131072", "30.61", "489.74", "20 tokens/s up to", "ddr"]
        {
            assert!(text.contains(said), "{said}: {text}");
        }
        let mut text = Vec::new();
        print_checks(&mut text, false).unwrap();
        assert!(String::from_utf8(text).unwrap().contains("68.99"));
    }

    /// Options that say what a table shows say what a page shows first.
    #[test]
    fn a_page_begins_with_what_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let [ratios, out] =
            ["ratios.json", "page.html"].map(|name| folder.path().join(name).display().to_string());
        fs::write(&ratios, r#"{"trace": {"kv": 1.625, "weights": 1.375}}"#).unwrap();
        let words = ["--page", &out, "--ratios", &ratios, "--target", "7.25", "--accounting", "as-printed"];
        model(&args(&words)).unwrap();
        let page = fs::read_to_string(&out).unwrap();
        for said in [r#""accounting":"as-printed""#, "1.625", "1.375", "7.25"] {
            assert!(page.contains(said), "{said}");
        }
        model(&args(&["--page", &out])).unwrap();
        let page = fs::read_to_string(&out).unwrap();
        assert!(page.contains(r#""accounting":"device-only""#) && page.contains(r#""given_ratios":null"#));
    }

    /// At 32k a step reads nothing from the device, which holds 23 GB of KV all the same.
    #[test]
    fn what_is_read_and_what_is_held_have_other_words() {
        let args = args(&["gpt-oss-120b-mxfp4", "--context", "32k"]);
        let shape = shape(&args.llm, None).unwrap();
        let system = System { shape, server: server(&args).unwrap(), accounting: Accounting::DeviceOnly };
        let report = system.report(&Ratios::paper(4.0), &args.context, None).unwrap();
        let mut text = Vec::new();
        print(&mut text, &report).unwrap();
        let text = String::from_utf8(text).unwrap();
        let row: Vec<_> =
            text.lines().find(|line| line.contains("32768")).unwrap().split_whitespace().collect();
        assert!(row.join(" ").contains("∞ ∞ unbound 1"), "{text}");
        assert!(!text.contains("fits") && text.contains("KV read spills at"), "{text}");
    }

    #[test]
    fn what_is_read_is_not_written_over() {
        let folder = tempfile::tempdir().unwrap();
        let [shape, ratios] = ["shape.toml", "ratios.json"].map(|name| folder.path().join(name));
        fs::write(&shape, "a shape").unwrap();
        fs::write(&ratios, "ratios").unwrap();
        for option in ["--plot", "--page"] {
            for out in [&shape, &ratios] {
                let [shape, ratios, out] = [&shape, &ratios, out].map(|path| path.to_str().unwrap());
                let why = model(&args(&[shape, "--ratios", ratios, option, out])).unwrap_err().to_string();
                assert!(why.starts_with(&format!("{option} {out} would write over {out}")), "{why}");
            }
        }
        assert_eq!(
            (fs::read(shape).unwrap(), fs::read(ratios).unwrap()),
            (b"a shape".to_vec(), b"ratios".to_vec())
        );
    }

    /// In their order, however they are given, and each once.
    #[test]
    fn contexts_are_drawn_from_the_shortest_to_the_longest() {
        let folder = tempfile::tempdir().unwrap();
        let drawn = |name: &str, contexts: &str| {
            let file = folder.path().join(name);
            let words =
                ["--context", contexts, "--accounting", "device-only", "--plot", file.to_str().unwrap()];
            model(&args(&words)).unwrap();
            fs::read(file).unwrap()
        };
        assert!(drawn("one", "256k,4k,64k,4k") == drawn("other", "4k,64k,256k"));
    }

    #[test]
    fn who_asks_for_what_is_not_there_is_told_what_is() {
        assert!(shape("no-such-model", None).unwrap_err().to_string().contains("mixtral-8x7b"));
        let args = args(&["--ratios", "/nonexistent.json"]);
        let shape = shape(&args.llm, None).unwrap();
        let why = ratios(&args, &shape, Accounting::AsPrinted).unwrap_err();
        assert!(format!("{why:#}").contains("/nonexistent.json"));
        let refused = |words: &[&str]| format!("{:#}", model(&self::args(words)).unwrap_err());
        assert!(refused(&["--page", "/nonexistent/page.html"]).contains("/nonexistent/page.html"));
        for (options, why) in [
            (&["--alpha", "7"][..], "alpha is 7"),
            (&["--ratios", "/nonexistent"], "cannot read the ratios /nonexistent"),
            (&["--target", "-5"], "target is -5"),
            (&["--context", "0"], "context is 0"),
        ] {
            let refused = refused(&[&["--page", "/nonexistent/page.html"], options].concat());
            assert!(refused.contains(why), "{refused}");
        }
        for (option, value, bound) in [
            ("--link", "0", "link is 0 GB/s: it must be from 0.001 to 1000000 GB/s"),
            ("--ddr", "-1", "ddr is -1 GB/s: it must be from 0.001 to 1000000 GB/s"),
            ("--device", "0", "device is 0 GB: it must be from 0.001 to 1000000000 GB"),
            ("--hbm", "-1", "hbm is -1 GB: it must be from 0 to 1000000 GB"),
            ("--hbm", "1e308", "hbm is 1e308 GB: it must be from 0 to 1000000 GB"),
            ("--hbm", "1e7", "hbm is 10000000 GB: it must be from 0 to 1000000 GB"),
            ("--batch", "-2", "batch is -2: it must be from 1 to 1000000"),
            ("--weight-bits", "-1", "weight_bits is -1: it must be from 1 to 64"),
        ] {
            assert_eq!(refused(&[option, value]), bound);
        }
        let why = refused(&["--plot", "-", "--json"]);
        assert!(why.contains("both for standard output"), "{why}");
        for options in
            [&["--page", "a.html", "--json"][..], &["--paper", "--plot", "-"], &["opt-30b", "--paper"]]
        {
            assert!(Cli::try_parse_from([&["lamina", "model"], options].concat()).is_err(), "{options:?}");
        }
        self::args(&["--paper", "--json"]);
        assert!(Cli::try_parse_from(["lamina", "model", "--context", "4x"]).is_err());
    }
}
