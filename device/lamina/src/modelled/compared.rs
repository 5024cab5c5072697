//! What a comparison of designs says to people.

use std::io::Write;

use anyhow::Result;
use comfy_table::Table;
use indicatif::{BinaryBytes, HumanCount};
use lamina_model::controller::{Design, TABLE_V};
use lamina_model::replay::{Comparison, Outcome, Placement, WordCodec};
use lamina_model::trace::Seen;
use lamina_model::{Row, rows};

use crate::table::new_table;

/// Prints, as JSON if that is wanted.
pub(super) fn print(out: &mut impl Write, comparison: &Comparison, json: bool) -> Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, comparison)?;
        writeln!(out)?;
        return Ok(());
    }
    let options = &comparison.options;
    writeln!(
        out,
        "Modelled; a device of {}; requests {}",
        BinaryBytes(comparison.trace.device_bytes),
        match comparison.trace.seen {
            Seen::Requests => "as they reached it",
            Seen::Lines => "of lines, as a processor made them",
        }
    )?;
    sizes(out, comparison)?;
    if comparison.lost > 0 {
        writeln!(out, "{} requests were lost while this was recorded", HumanCount(comparison.lost))?;
    }
    writeln!(out, "\n{}\n", moved(&comparison.designs))?;
    writeln!(
        out,
        "Controller: cycles from load to use of a block at 2 GHz, DRAM idle (TRACE, Figs. 22 and 23)\n"
    )?;
    writeln!(out, "{}\n", latency(&comparison.designs))?;
    let cycles = |design: &Outcome| Some(design.service_cycles.buckets.clone());
    histogram(out, "blocks by cycles", &comparison.designs, cycles)?;
    if let Some(profile) = &options.dram {
        writeln!(
            out,
            "DRAM: {}, {} bursts under way; currents: {}\n",
            profile.name, options.registers, profile.currents.source
        )?;
        writeln!(out, "{}\n", dram(&comparison.designs))?;
        placements(out, &comparison.designs)?;
        let ns = |design: &Outcome| design.dram.as_ref().map(|dram| dram.latency_ns.buckets.clone());
        histogram(out, "requests by ns", &comparison.designs, ns)?;
    }
    writeln!(
        out,
        "Link: {}, {:.1} GB/s a direction, {} ns to a load; {}\n",
        options.link.name,
        options.link.rate / 1e9,
        options.link.latency_ns,
        options.link.source
    )?;
    writeln!(out, "{}\n", link(&comparison.designs))?;
    let quoted: Vec<_> = TABLE_V
        .iter()
        .map(|quoted| format!("{} {} mm², {} W", quoted.design.name(), quoted.area_mm2, quoted.power_w))
        .collect();
    writeln!(out, "Quoted, not modelled ({}): {}", TABLE_V[0].source, quoted.join("; "))?;
    Ok(())
}

/// Of which blocks the trace says how large a design stores them, and what is taken of the others.
fn sizes(out: &mut impl Write, comparison: &Comparison) -> Result<()> {
    let assumed = &comparison.options.assumed;
    for design in comparison.designs.iter().filter(|design| design.subject.design != Design::Plain) {
        let (measured, guessed) = (HumanCount(design.measured), HumanCount(design.assumed));
        write!(out, "{}: sizes of {measured} blocks measured, {guessed} assumed", design.subject.name)?;
        if design.whole > 0 {
            write!(out, ", {} taken as they are: their planes code no smaller", HumanCount(design.whole))?;
        }
        let ratio = match (design.subject.design, design.subject.codec) {
            (Design::Gcomp, Some(WordCodec::Zstd)) => assumed.zstd,
            (Design::Gcomp, _) => assumed.lz4,
            _ => assumed.trace,
        };
        match design.assumed {
            0 => writeln!(out)?,
            _ => writeln!(out, "; assumed: a ratio of {ratio} ({})", assumed.source)?,
        }
    }
    Ok(())
}

/// What of a difference to `plain` is placement.
fn placements(out: &mut impl Write, designs: &[Outcome]) -> Result<()> {
    let has = |is: fn(Placement) -> bool| designs.iter().any(|design| is(design.subject.placement));
    if !has(|placement| placement == Placement::Words) || !has(|placement| placement != Placement::Words) {
        return Ok(());
    }
    let separates = if has(|placement| placement == Placement::Rows) {
        "What plain-rows and plain differ in is placement alone."
    } else {
        "--design plain-rows has words placed as bundles are."
    };
    writeln!(
        out,
        "Placement counts in these figures. plain spreads a block over all channels and bank groups, and \
            trace-planes\nover a row a plane: many activations, fast. All others have it in one row or two: few, \
            slow.\n{separates}\n"
    )?;
    Ok(())
}

fn moved(designs: &[Outcome]) -> Table {
    let head = [
        "design",
        "requests",
        "asked",
        "read",
        "written",
        "index",
        "index hits",
        "fills",
        "buffered",
        "zeros",
    ];
    let mut table = new_table(&head, 1);
    for design in designs {
        let looked = design.index_hits + design.index_misses;
        table.add_row([
            design.subject.name.to_owned(),
            HumanCount(design.requests).to_string(),
            BinaryBytes(design.asked_bytes).to_string(),
            BinaryBytes(design.read_bytes).to_string(),
            BinaryBytes(design.written_bytes).to_string(),
            BinaryBytes(design.index_bytes).to_string(),
            part(design.index_hits, looked),
            HumanCount(design.fills).to_string(),
            HumanCount(design.buffered).to_string(),
            HumanCount(design.zeros).to_string(),
        ]);
    }
    table
}

fn latency(designs: &[Outcome]) -> Table {
    let head = ["design", "blocks", "mean", "p50", "p99", "max", "mean ns with the link", "p99 ns"];
    let mut table = new_table(&head, 1);
    for design in designs {
        let cycles = &design.service_cycles;
        table.add_row([
            design.subject.name.to_owned(),
            HumanCount(cycles.count).to_string(),
            figure(cycles.mean, 1),
            cycles.p50.to_string(),
            cycles.p99.to_string(),
            cycles.max.to_string(),
            figure(design.load_ns, 1),
            figure(design.load_p99_ns, 1),
        ]);
    }
    table
}

fn dram(designs: &[Outcome]) -> Table {
    let head = [
        "design",
        "activations",
        "row hits",
        "GB/s",
        "asked GB/s",
        "activate µJ",
        "read µJ",
        "write µJ",
        "refresh µJ",
        "background µJ",
        "pJ/byte asked",
        "mean ns",
        "p99 ns",
    ];
    let mut table = new_table(&head, 1);
    for design in designs {
        let Some(dram) = &design.dram else { continue };
        let micro = |pico: f64| format!("{:.2}", pico / 1e6);
        table.add_row([
            design.subject.name.to_owned(),
            HumanCount(dram.commands.activates).to_string(),
            figure(dram.row_hit_rate.map(|rate| 100.0 * rate), 1) + " %",
            format!("{:.2}", dram.gbs),
            format!("{:.2}", dram.asked_gbs),
            micro(dram.energy.activate_pj),
            micro(dram.energy.read_pj),
            micro(dram.energy.write_pj),
            micro(dram.energy.refresh_pj),
            micro(dram.energy.background_pj),
            figure(dram.access_pj_per_byte, 1),
            figure(dram.latency_ns.mean, 1),
            dram.latency_ns.p99.to_string(),
        ]);
    }
    table
}

fn link(designs: &[Outcome]) -> Table {
    let head =
        ["design", "view", "bits", "lines read", "lines written", "flits down", "flits up", "down", "up"];
    let mut table = new_table(&head, 2);
    for design in designs {
        for link in &design.link {
            let traffic = &link.traffic;
            let used = |part: Option<f64>| figure(part.map(|part| 100.0 * part), 1) + " %";
            table.add_row([
                design.subject.name.to_owned(),
                link.view.clone(),
                link.bits.to_string(),
                HumanCount(traffic.requests.reads).to_string(),
                HumanCount(traffic.requests.writes + traffic.requests.partial_writes).to_string(),
                HumanCount(traffic.down.flits).to_string(),
                HumanCount(traffic.up.flits).to_string(),
                used(traffic.down.utilisation),
                used(traffic.up.utilisation),
            ]);
        }
    }
    table
}

/// Rows of a histogram, and characters of its longest bar.
const ROWS: u32 = 12;
const BAR: u128 = 10;

/// Counts by times, a column a design; none if there is nothing to count.
fn histogram(
    out: &mut impl Write,
    what: &str,
    designs: &[Outcome],
    buckets: impl Fn(&Outcome) -> Option<Vec<(u64, u64)>>,
) -> Result<()> {
    let counted: Vec<_> =
        designs.iter().filter_map(|design| Some((design.subject.name, buckets(design)?))).collect();
    let all: Vec<_> = counted.iter().map(|(_, buckets)| buckets.as_slice()).collect();
    let rows = rows(&all, ROWS);
    if rows.is_empty() {
        return Ok(());
    }
    let head: Vec<_> = std::iter::once(what).chain(counted.iter().map(|(name, _)| *name)).collect();
    let mut table = new_table(&head, 0);
    let most = |at: usize| rows.iter().map(|row| row.counts[at]).max().unwrap_or(0);
    for Row { first, last, counts } in &rows {
        let times = if first == last { first.to_string() } else { format!("{first} to {last}") };
        let cells = counts.iter().enumerate().map(|(at, &count)| {
            let length = u128::from(count) * BAR / u128::from(most(at).max(1));
            // Whatever was seen has a bar.
            let length = usize::try_from(length).unwrap_or(0).max(usize::from(count > 0));
            let bar = "█".repeat(length);
            let count = if count > 0 { HumanCount(count).to_string() } else { String::new() };
            format!("{count} {bar:<10}")
        });
        table.add_row(std::iter::once(times).chain(cells));
    }
    writeln!(out, "{table}\n")?;
    Ok(())
}

fn figure(figure: Option<f64>, places: usize) -> String {
    figure.map_or_else(|| "–".to_owned(), |figure| format!("{figure:.places$}"))
}

#[expect(clippy::cast_precision_loss, reason = "a percentage to be looked at")]
fn part(part: u64, of: u64) -> String {
    if of == 0 { "–".to_owned() } else { format!("{:.1} %", 100.0 * part as f64 / of as f64) }
}

#[cfg(test)]
mod tests {
    use lamina_model::replay::{Options, Pace, SUBJECTS, compare};
    use lamina_model::trace::{Header, Reader, Request, View, Writer};

    use super::*;

    /// What a table says of a design's DRAM is what JSON says.
    #[test]
    fn energy_is_told_as_json_has_it() {
        let header = Header { seen: Seen::Requests, device_bytes: 1 << 30 };
        let mut writer = Writer::new(Vec::new(), header).unwrap();
        writer.view(&View::full(16)).unwrap();
        for number in 0..300 {
            let (time_ns, address, write) = (number * 1000, number * 4096, number % 3 == 0);
            let request = Request { time_ns, address, length: 4096, view: 0, guest: 0, write, served: None };
            writer.request(&request).unwrap();
        }
        let trace = writer.finish().unwrap();
        let options = Options { pace: Pace::Recorded, ..Options::usual().unwrap() };
        let mut reader = Reader::new(&trace[..]).unwrap();
        let compared = compare(&mut reader, &SUBJECTS, &options).unwrap();
        let table = dram(&compared.designs);
        let head: Vec<_> = table.header().unwrap().cell_iter().map(comfy_table::Cell::content).collect();
        for (design, row) in compared.designs.iter().zip(table.row_iter()) {
            let cells: Vec<_> = row.cell_iter().map(comfy_table::Cell::content).collect();
            let json = serde_json::to_value(design).unwrap();
            for of in ["activate", "read", "write", "refresh", "background"] {
                let name = format!("{of} µJ");
                let at = head.iter().position(|title| *title == name).unwrap_or_else(|| panic!("{name}"));
                let pj = json["dram"]["energy"][format!("{of}_pj")].as_f64().unwrap();
                assert!(pj > 0.0);
                assert_eq!(cells[at], format!("{:.2}", pj / 1e6), "{}: {name}", design.subject.name);
            }
        }
    }
}
