//! `lamina compare` and `lamina trace`.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use indicatif::{BinaryBytes, HumanCount};
use lamina_model::ModelError;
use lamina_model::controller::{CacheConfig, Policy};
use lamina_model::dram::Profile;
use lamina_model::dram::profile::PROFILES;
use lamina_model::link::Link;
use lamina_model::replay::{self, Assumed, Options, Pace, Subject};
use lamina_model::trace::text::{Form, LineAccess};
use lamina_model::trace::{
    BlockKind, Header, Item, MAX_TIME_NS, Reader, Request, Seen, View, WordBytes, Writer,
};
use serde_json::json;

use super::compared::print;
use super::watched::Watched;
use crate::args::{Compare, Convert, Other, Paced, Replacement, Replayed, Trace, Traced};
use crate::made_file;
use crate::out;
use crate::table::new_table;

/// Bytes that a line of somebody's trace may have.
const MAX_LINE: u64 = 4096;

/// Replays one trace through several designs and prints.
pub(crate) fn compare(args: &Compare) -> Result<()> {
    let subjects = args.design.iter().map(|name| Subject::named(name)).collect::<Result<Vec<_>, _>>()?;
    let options = options(&args.replayed)?;
    let comparison = read(&args.traced, |reader| Ok(replay::compare(reader, &subjects, &options)?))?;
    let mut text = Vec::new();
    print(&mut text, &comparison, args.json)?;
    Ok(out::text(&text)?)
}

/// Does what is asked of traces.
pub(crate) fn trace(command: &Trace) -> Result<()> {
    let mut text = Vec::new();
    match command {
        Trace::Record(_) => bail!("a recording waits for a device"),
        Trace::Show { traced, requests, json } => {
            read(traced, |reader| show(&mut text, reader, *requests, *json))?;
        }
        Trace::Replay { traced, design, replayed, json } => {
            let (subject, options) = (Subject::named(design)?, options(replayed)?);
            let started = Instant::now();
            let comparison = read(traced, |reader| Ok(replay::compare(reader, &[subject], &options)?))?;
            let seconds = started.elapsed().as_secs_f64();
            print(&mut text, &comparison, *json)?;
            if !json {
                let requests = comparison.designs.iter().map(|design| design.requests).sum::<u64>();
                let count = HumanCount(requests);
                writeln!(text, "replayed {count} requests in {seconds:.2} s of this computer's time")?;
            }
        }
        Trace::Convert(args) => {
            let input = Watched::open(&args.from_file)?;
            let lines = converted(args, BufReader::new(input))?;
            if args.json {
                serde_json::to_writer_pretty(&mut text, &json!({ "trace": args.to_file, "lines": lines }))?;
                writeln!(text)?;
            } else {
                writeln!(text, "{}: {} lines", args.to_file.display(), HumanCount(lines))?;
            }
        }
    }
    Ok(out::text(&text)?)
}

/// Does something with a trace, from its beginning to its end.
fn read<T>(traced: &Traced, work: impl FnOnce(&mut Reader<BufReader<Watched>>) -> Result<T>) -> Result<T> {
    let file = Watched::open(&traced.file)?;
    read_from(BufReader::with_capacity(1 << 20, file), traced.cut, &traced.file, work)
        .with_context(|| format!("{}", traced.file.display()))
}

/// As [`read`], of a file that is open.
fn read_from<T>(
    file: BufReader<Watched>,
    cut: bool,
    path: &Path,
    work: impl FnOnce(&mut Reader<BufReader<Watched>>) -> Result<T>,
) -> Result<T> {
    let has_end = file.get_ref().is_file();
    let mut reader = Reader::new(file)?;
    if cut {
        reader = reader.up_to_a_cut();
    }
    let done = work(&mut reader);
    if reader.is_cut() && !cut {
        return done.context("--cut takes what is whole");
    }
    let done = done?;
    if has_end {
        reader.check_end()?;
    }
    if reader.is_cut() {
        let (requests, blocks) = reader.given();
        let (requests, blocks) = (HumanCount(requests), HumanCount(blocks));
        tracing::warn!(
            "{} is cut short: it has {requests} requests and {blocks} layouts of blocks",
            path.display()
        );
    }
    Ok(done)
}

/// The module that is asked for, if there is one.
fn dram(args: &Replayed) -> Result<Option<Profile>> {
    match args.dram.as_str() {
        "none" => Ok(None),
        name if PROFILES.contains(&name) => Ok(Some(Profile::named(name)?)),
        file if Path::new(file).exists() => {
            let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
            Ok(Some(Profile::parse(file, &text)?))
        }
        other => bail!("{other:?} is no module ({}) and no file", PROFILES.join(", ")),
    }
}

fn options(args: &Replayed) -> Result<Options> {
    let policy = match args.index_policy {
        Replacement::Lru => Policy::Lru,
        Replacement::Fifo => Policy::Fifo,
        Replacement::Random => Policy::Random,
    };
    let [lz4, zstd, trace] = args.assume_ratios[..] else {
        bail!("--assume-ratios takes three: words by lz4, words by zstd, planes");
    };
    let mut assumed = Assumed { bits: args.assume_bits, lz4, zstd, trace, ..Assumed::default() };
    if assumed != Assumed::default() {
        assumed.source = "given";
    }
    let link = Link::named(&args.link)?;
    let link = match args.link_latency {
        Some(latency) => link.with_latency(latency),
        None => link,
    };
    Ok(Options {
        dram: dram(args)?,
        registers: args.mshr,
        cache: CacheConfig { entries: args.index_entries, ways: args.index_ways, policy },
        buffer: args.buffer,
        link,
        pace: match args.pace {
            Paced::Full => Pace::Full,
            Paced::Recorded => Pace::Recorded,
        },
        assumed,
    })
}

fn show(out: &mut impl Write, reader: &mut Reader<BufReader<Watched>>, shown: u64, json: bool) -> Result<()> {
    let Header { seen, device_bytes } = reader.header();
    let (mut views, mut requests, mut first) = (Vec::new(), Vec::new(), Vec::new());
    let (mut kinds, mut guests) = ([0_u64; 3], BTreeSet::new());
    let (mut reads, mut writes, mut bytes, mut last_ns) = (0_u64, 0_u64, 0_u64, 0);
    let (mut lost, mut unasked, mut words) = (0_u64, 0_u64, 0_u64);
    while let Some(item) = reader.next_item()? {
        match item {
            Item::View(view) => {
                views.push(view);
                requests.push(0_u64);
            }
            Item::Block(_, block) => {
                kinds[match block.kind {
                    BlockKind::Coded => 0,
                    BlockKind::Zeros => 1,
                    BlockKind::Bypassed => 2,
                }] += 1;
                words += u64::from(block.words != WordBytes::default());
            }
            Item::Words(..) => words += 1,
            Item::Lost(requests) => lost = lost.saturating_add(requests),
            Item::Request(request) => {
                unasked += u64::from(request.served.is_some_and(|served| !served.asked));
                *(if request.write { &mut writes } else { &mut reads }) += 1;
                bytes += request.length;
                last_ns = request.time_ns;
                guests.insert(request.guest);
                requests[request.view as usize] += 1;
                if reads + writes <= shown {
                    first.push(request);
                }
            }
        }
    }
    let [coded, zeros, bypassed] = kinds;
    if json {
        let views: Vec<_> = views
            .iter()
            .zip(&requests)
            .map(|(view, requests)| json!({"view": view, "requests": requests}))
            .collect();
        let whole = json!({
            "seen": seen, "device_bytes": device_bytes, "reads": reads, "writes": writes, "bytes": bytes, "ns": last_ns,
            "lost": lost, "unasked": unasked,
            "guests": guests, "views": views, "blocks": {"coded": coded, "zeros": zeros, "bypassed": bypassed, "as_words": words},
            "requests": first,
        });
        serde_json::to_writer_pretty(&mut *out, &whole)?;
        writeln!(out)?;
        return Ok(());
    }
    let seen = if seen == Seen::Lines { "lines of a processor" } else { "requests to a device" };
    writeln!(out, "{seen}; device of {}", BinaryBytes(device_bytes))?;
    writeln!(
        out,
        "{} reads, {} writes, {}, {:.6} s, {} guests",
        HumanCount(reads),
        HumanCount(writes),
        BinaryBytes(bytes),
        std::time::Duration::from_nanos(last_ns).as_secs_f64(),
        guests.len()
    )?;
    if unasked > 0 {
        let unasked = HumanCount(unasked);
        writeln!(out, "{unasked} of these were moved because of others, and nobody asked for them")?;
    }
    if lost > 0 {
        writeln!(out, "{} requests were lost while this was recorded", HumanCount(lost))?;
    }
    writeln!(
        out,
        "blocks said: {coded} coded, {zeros} of zeros, {bypassed} bypassed; sizes as words: {words}\n"
    )?;
    let mut table = new_table(&["view", "bits", "on the link", "planes", "requests"], 1);
    for (view, requests) in views.iter().zip(&requests) {
        table.add_row([
            view.name.clone(),
            view.bits.to_string(),
            view.link_bits.to_string(),
            view.planes.count_ones().to_string(),
            HumanCount(*requests).to_string(),
        ]);
    }
    writeln!(out, "{table}")?;
    for request in &first {
        let kind = if request.write { "write" } else { "read" };
        let Request { time_ns, address, length, view, guest, .. } = request;
        let view = &views[*view as usize].name;
        writeln!(out, "{time_ns:>12} ns  {kind:5} {address:#014x} {length:>8}  {view}  guest {guest}")?;
    }
    Ok(())
}

/// Converts to a new file, which has its name when it is whole, and gives how many lines were.
/// Text has no end that a reader could miss.
fn converted(args: &Convert, input: BufReader<Watched>) -> Result<u64> {
    let path = &args.to_file;
    let cannot = || format!("cannot make {}", path.display());
    // Before all is converted. The name is not taken from others later, either.
    if path.symlink_metadata().is_ok() {
        return Err(io::Error::from(io::ErrorKind::AlreadyExists)).with_context(cannot);
    }
    let part = made_file::Part::beside(path).with_context(cannot)?;
    let lines = convert(args, input, BufWriter::new(part.file())).map_err(|why| {
        let is_of_out = why.is::<Unwritten>();
        if is_of_out { why } else { why.context(args.from_file.display().to_string()) }
    })?;
    part.name(path).with_context(cannot)?;
    Ok(lines)
}

/// What is converted to cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {why}", path.display())]
struct Unwritten {
    path: PathBuf,
    why: io::Error,
}

/// The next line of a text, if there is one.
fn next_line<'t>(input: &mut impl BufRead, number: u64, text: &'t mut Vec<u8>) -> Result<Option<&'t str>> {
    text.clear();
    input.take(MAX_LINE + 1).read_until(b'\n', text)?;
    if text.len() as u64 > MAX_LINE {
        bail!("line {number} has more than {MAX_LINE} bytes");
    }
    let text = std::str::from_utf8(text).with_context(|| format!("line {number} is no text"))?;
    Ok((!text.is_empty()).then_some(text))
}

/// Converts, and gives how many lines were.
fn convert(args: &Convert, mut input: BufReader<Watched>, mut output: BufWriter<&File>) -> Result<u64> {
    let form = |other| match other {
        Other::Dramsim3 => Form::Dramsim3,
        Other::Ramulator2 => Form::Ramulator2,
    };
    let cannot_write = |why| Unwritten { path: args.to_file.clone(), why };
    let mut lines = 0;
    match (args.from, args.to) {
        (Some(from), _) => {
            let Some(module) = dram(&args.replayed)? else {
                bail!("--dram none has no cycles: it must name the module whose cycles the times of IN are");
            };
            let header = Header { seen: Seen::Lines, device_bytes: args.device };
            // No header is what no reader takes.
            header.check()?;
            let mut writer = Writer::new(output, header).map_err(cannot_write)?;
            writer.view(&View::full(args.bits)).map_err(cannot_write)?;
            let mut before = 0;
            let mut text = Vec::new();
            for line in 1.. {
                let Some(text) = next_line(&mut input, line, &mut text)? else { break };
                let Some(access) = form(from).read(line - 1, text)? else { continue };
                let LineAccess { address: asked, write, cycle } = access;
                let address = asked / 64 * 64;
                if address.checked_add(64).is_none_or(|end| end > args.device) {
                    bail!("address of line {line} is {asked:#x}: past the device's {:#x} bytes", args.device);
                }
                if cycle < before {
                    bail!("cycle of line {line} is {cycle}: it must be from {before} on, as the one before");
                }
                let time_ns = module.whole_ns(cycle);
                if time_ns > MAX_TIME_NS {
                    bail!("cycle of line {line} is {cycle}: it must be at most {MAX_TIME_NS} ns from 0");
                }
                let (length, view, guest, served) = (64, 0, 0, None);
                let request = Request { time_ns, address, length, view, guest, write, served };
                writer.request(&request).map_err(cannot_write)?;
                before = cycle;
                lines += 1;
            }
            writer.finish().map_err(cannot_write)?;
        }
        (None, Some(to)) => {
            let options = options(&args.replayed)?;
            if to == Other::Dramsim3 && options.pace == Pace::Recorded && options.dram.is_none() {
                bail!(
                    "--dram none has no cycles for --pace recorded: it must name the module whose cycles OUT says"
                );
            }
            let subject = Subject::named(&args.design)?;
            let mut text = String::new();
            let form = form(to);
            let mut unwritten = None;
            let read = read_from(input, args.cut, &args.from_file, |reader| {
                Ok(replay::lines(reader, subject, &options, |access| {
                    text.clear();
                    form.write(&mut text, access);
                    lines += 1;
                    output.write_all(text.as_bytes()).map_err(|why| {
                        let ends = ModelError::Form { what: "the replay".to_owned(), why: why.to_string() };
                        unwritten = Some(cannot_write(why));
                        ends
                    })
                })?)
            });
            unwritten.map_or(Ok(()), Err)?;
            read?;
            output.flush().map_err(cannot_write)?;
        }
        (None, None) => bail!("--from or --to says whose form is which"),
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn run(words: &[&str]) -> Result<()> {
        match Cli::try_parse_from([&["lamina"], words].concat())
            .map_err(|why| anyhow::anyhow!("{why}"))?
            .command
        {
            Command::Compare(args) => compare(&args),
            Command::Trace(command) => trace(&command),
            _ => bail!("neither"),
        }
    }

    /// What others wrote is imported, replayed, and exported for them again.
    #[test]
    fn a_trace_of_others_goes_through_all_commands() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let [theirs, ours, back] = ["theirs.txt", "ours.trace", "back.txt"].map(path);
        let lines: Vec<_> =
            (0..300).map(|line| format!("LD {:#x}\nST {}\n", line * 64, line * 4096)).collect();
        std::fs::write(&theirs, lines.concat()).unwrap();
        run(&["trace", "convert", &theirs, &ours, "--from", "ramulator2", "--device", "1G"]).unwrap();
        run(&["trace", "show", &ours, "--requests", "3"]).unwrap();
        run(&["trace", "show", &ours, "--json"]).unwrap();
        run(&["trace", "replay", &ours, "--dram", "none"]).unwrap();
        run(&["compare", &ours]).unwrap();
        run(&[
            "compare",
            &ours,
            "--design",
            "trace-planes",
            "--link",
            "gen6x8",
            "--pace",
            "recorded",
            "--json",
        ])
        .unwrap();
        run(&["trace", "convert", &ours, &back, "--to", "ramulator2"]).unwrap();
        let back = std::fs::read_to_string(&back).unwrap();
        // `plain` moves what was asked for, line by line.
        assert_eq!(back.lines().count(), 600);
        assert!(back.starts_with("LD 0x0\nST 0x0\nLD 0x40\nST 0x1000\n"));
    }

    /// Cycles of theirs are those of the module, 2.4 in a nanosecond of the first and 3.2 of the
    /// last, and come back as they were.
    #[test]
    fn times_of_others_come_back_as_they_were() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let theirs = path("theirs.txt");
        let text = "0x40 READ 0\n0x80 WRITE 1200\n0xC0 READ 1200\n0x40 READ 2400\n0x80 READ 987654320\n";
        std::fs::write(&theirs, text).unwrap();
        for module in ["ddr5-4800", "ddr5-6400"] {
            let [ours, back] = ["trace", "txt"].map(|kind| path(&format!("{module}.{kind}")));
            let options = ["--dram", module];
            let words = ["trace", "convert", &theirs, &ours, "--from", "dramsim3", "--device", "1G"];
            run(&[&words[..], &options].concat()).unwrap();
            let words = ["trace", "convert", &ours, &back, "--to", "dramsim3", "--pace", "recorded"];
            run(&[&words[..], &options].concat()).unwrap();
            assert_eq!(std::fs::read_to_string(&back).unwrap(), text, "{module}");
        }
    }

    #[test]
    fn times_that_cannot_be_kept_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let [theirs, ours, out] = ["theirs.txt", "ours.trace", "out.txt"].map(path);
        let refused = |words: &[&str]| format!("{:#}", run(words).unwrap_err());
        let import = ["trace", "convert", &theirs, &ours, "--from", "dramsim3"];
        std::fs::write(&theirs, "0x0 READ 1000\n# then\n0x0 READ 5\n").unwrap();
        let why = refused(&import);
        assert!(why.ends_with("cycle of line 3 is 5: it must be from 1000 on, as the one before"), "{why}");
        std::fs::write(&theirs, "0x0 READ 0\n0x0 READ 1000\n").unwrap();
        let why = refused(&[&import[..], &["--dram", "none"]].concat());
        assert!(why.contains("--dram none has no cycles: it must name the module"), "{why}");
        run(&import).unwrap();
        let export = ["trace", "convert", &ours, &out, "--dram", "none", "--to"];
        let why = refused(&[&export[..], &["dramsim3", "--pace", "recorded"]].concat());
        assert!(why.contains("--dram none has no cycles for --pace recorded"), "{why}");
        assert!(!Path::new(&out).exists());
        // Ramulator 2 has no times, and at full pace they are numbers of requests.
        run(&[&export[..], &["ramulator2", "--pace", "recorded"]].concat()).unwrap();
        std::fs::remove_file(&out).unwrap();
        run(&[&export[..], &["dramsim3"]].concat()).unwrap();
    }

    /// What a conversion does not heed is refused by its name.
    #[test]
    fn options_of_the_other_direction_are_refused() {
        let refused = |words: &[&str]| format!("{:#}", run(words).unwrap_err());
        let convert = ["trace", "convert", "/nonexistent", "/nonexistent/out"];
        for option in [
            ["--design", "trace"],
            ["--mshr", "8"],
            ["--link", "gen6x8"],
            ["--link-latency", "7"],
            ["--index-entries", "8"],
            ["--index-ways", "8"],
            ["--index-policy", "fifo"],
            ["--buffer", "1"],
            ["--pace", "recorded"],
            ["--assume-bits", "8"],
            ["--assume-ratios", "1,1,1"],
        ] {
            let why = refused(&[&convert[..], &["--from", "ramulator2"], &option].concat());
            assert!(why.contains("cannot be used") && why.contains(option[0]), "{why}");
            // An export heeds it.
            let why = refused(&[&convert[..], &["--to", "ramulator2"], &option].concat());
            assert!(why.contains("/nonexistent") && !why.contains("cannot be used"), "{why}");
        }
        for option in [["--device", "4K"], ["--bits", "4"]] {
            let why = refused(&[&convert[..], &["--to", "ramulator2"], &option].concat());
            assert!(why.contains("cannot be used") && why.contains(option[0]), "{why}");
            let why = refused(&[&convert[..], &["--from", "ramulator2"], &option].concat());
            assert!(why.contains("/nonexistent") && !why.contains("cannot be used"), "{why}");
        }
        // Whose form it is and the module are of both.
        for way in ["--from", "--to"] {
            let why = refused(&[&convert[..], &[way, "dramsim3", "--dram", "ddr5-5600"]].concat());
            assert!(why.contains("/nonexistent") && !why.contains("cannot be used"), "{why}");
        }
    }

    #[test]
    fn a_trace_that_was_cut_short_is_read_if_that_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let [theirs, ours, text] = ["theirs.txt", "ours.trace", "text.txt"].map(path);
        std::fs::write(&theirs, "LD 0x0\n".repeat(1000)).unwrap();
        run(&["trace", "convert", &theirs, &ours, "--from", "ramulator2"]).unwrap();
        let whole = std::fs::read(&ours).unwrap();
        std::fs::write(&ours, &whole[..whole.len() - 1]).unwrap();
        let to = ["trace", "convert", &ours, &text, "--to", "ramulator2"];
        for command in [&["compare", &ours][..], &["trace", "show", &ours], &["trace", "replay", &ours], &to]
        {
            let why = format!("{:#}", run(command).unwrap_err());
            assert!(why.contains("1000 requests and 0 blocks before it are whole"), "{why}");
            assert!(why.contains("--cut") && why.matches(&ours).count() == 1, "{why}");
            run(&[command, &["--cut"]].concat()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&text).unwrap().lines().count(), 1000);
        // Two in one file are not half read.
        std::fs::write(&ours, [&whole[..], &whole[..]].concat()).unwrap();
        std::fs::remove_file(&text).unwrap();
        for command in [&["compare", &ours][..], &["trace", "show", &ours, "--cut"], &to] {
            let why = format!("{:#}", run(command).unwrap_err());
            assert!(why.contains("bytes behind its end"), "{why}");
        }
        assert!(!Path::new(&text).exists());
    }

    #[test]
    fn lines_have_a_bound_and_are_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let [theirs, ours] = ["theirs.txt", "ours.trace"].map(path);
        let refused = || {
            let words = ["trace", "convert", &theirs, &ours, "--from", "ramulator2"];
            format!("{:#}", run(&words).unwrap_err())
        };
        // Longer than anybody has memory for.
        let sparse = File::create(&theirs).unwrap();
        sparse.set_len(1 << 40).unwrap();
        assert!(refused().ends_with("line 1 has more than 4096 bytes"), "{}", refused());
        std::fs::write(&theirs, b"LD 0x0\nLD \xff\n").unwrap();
        assert!(refused().contains("line 2 is no text"), "{}", refused());
        std::fs::write(&theirs, "LD 0x0\nLD \u{1b}[31mX").unwrap();
        assert!(!refused().contains('\u{1b}'), "{}", refused());
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
    }

    #[test]
    fn what_is_wrong_is_named_and_half_a_trace_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let [theirs, ours] = ["theirs.txt", "ours.trace"].map(path);
        std::fs::write(&theirs, "LD 0x0\nLD 0x40000000\n").unwrap();
        let refused = |words: &[&str]| format!("{:#}", run(words).unwrap_err());
        let why = refused(&["trace", "convert", &theirs, &ours, "--from", "ramulator2", "--device", "1G"]);
        assert!(why.contains("address of line 2 is 0x40000000"), "{why}");
        // Nor is there a file of a trace that nothing reads.
        for (device, bytes) in [("64", "64"), ("2048T", "2251799813685248")] {
            let why =
                refused(&["trace", "convert", &theirs, &ours, "--from", "ramulator2", "--device", device]);
            assert!(why.contains(&format!("device bytes is {bytes}: it must be from 4096 to")), "{why}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        for command in [&["compare", &theirs][..], &["trace", "show", &theirs], &["trace", "replay", &theirs]]
        {
            let why = refused(command);
            assert!(why.contains("the header is not whole") && why.matches(&theirs).count() == 1, "{why}");
        }
        for (option, value, bound) in [
            ("--mshr", "-1", "from 1 to 4096"),
            ("--mshr", "0", "from 1 to 4096"),
            ("--index-entries", "-1", "from 1 to 67108864"),
            ("--index-ways", "-1", "from 1 to 256"),
            ("--buffer", "-1", "from 0 to 4096"),
            ("--assume-bits", "-1", "4, 8, 16 or 32"),
        ] {
            let why = refused(&["compare", &theirs, option, value]);
            assert!(why.contains(option) && why.contains(bound), "{why}");
        }
        assert!(refused(&["compare", &theirs, "--design", "best"]).contains("design is best"));
        assert!(refused(&["compare", &theirs, "--dram", "ddr9"]).contains("ddr5-4800"));
        std::fs::write(&theirs, "LD 0x0\n").unwrap();
        run(&["trace", "convert", &theirs, &ours, "--from", "ramulator2"]).unwrap();
        // What is there is not written over, and stays.
        let before = std::fs::read(&ours).unwrap();
        let why = refused(&["trace", "convert", &theirs, &ours, "--from", "ramulator2"]);
        assert!(why.contains("cannot make") && std::fs::read(&ours).unwrap() == before, "{why}");
        // Anybody may read it whom the umask lets.
        let mode = |path: &str| std::fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&ours), mode(&theirs));
        assert!(refused(&["compare", &ours, "--link", "gen9"]).contains("link is gen9"));
        assert!(refused(&["compare", &ours, "--index-ways", "3"]).contains("index-ways is 3"));
        assert!(refused(&["compare", &ours, "--link-latency", "-7"]).contains("link-latency is -7"));
        // What is exported lies in a module, and what is too large for one does with none.
        let (large, out) = (path("large.trace"), path("large.txt"));
        run(&["trace", "convert", &theirs, &large, "--from", "ramulator2", "--device", "128G"]).unwrap();
        let words = ["trace", "convert", &large, &out, "--to", "ramulator2"];
        assert!(refused(&words).contains("take a larger one"));
        run(&[&words[..], &["--dram", "none"]].concat()).unwrap();
        assert!(refused(&["compare", &ours, "--assume-ratios", "1,2"]).contains("takes three"));
        assert!(refused(&["compare", &ours, "--assume-ratios", "1,1,7"]).contains("assumed trace ratio"));
        let ratios = refused(&["compare", &ours, "--assume-ratios", "-1,1,1"]);
        assert!(ratios.contains("assumed lz4 ratio is -1: it must be from 1 to 1.9"), "{ratios}");
    }
}
