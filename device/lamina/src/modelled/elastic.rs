//! `lamina elastic`: planes against words, for precisions by chunk.

use std::io::Write;

use anyhow::{Context, Result};
use lamina_model::dram::Profile;
use lamina_model::elastic::{self, Beside, Fetched, Mix, Work};
use serde_json::json;

use crate::args::Elastic;
use crate::client::new_table;
use crate::out;

/// Models and prints.
pub(crate) fn elastic(args: &Elastic) -> Result<()> {
    let profile = Profile::named(&args.dram)?;
    let mut text = Vec::new();
    if args.paper {
        let all = elastic::beside(&profile)?;
        if args.json {
            serde_json::to_writer_pretty(&mut text, &json!({"label": "modelled", "paper": all}))?;
            writeln!(text)?;
        } else {
            print_beside(&mut text, &profile, &all)?;
        }
        return Ok(out::text(&text)?);
    }
    let work = if let Some(map) = &args.map {
        let map_text =
            std::fs::read_to_string(map).with_context(|| format!("cannot read {}", map.display()))?;
        let chunks = elastic::parse_map(&map_text).with_context(|| map.display().to_string())?;
        Work { base: args.base, chunks }
    } else {
        Work::sample(args.base, &Mix::parse(&args.mix)?, args.chunk, args.sample)?
    };
    let fetched = elastic::fetch(&profile, &work)?;
    if args.json {
        let whole = json!({"label": "modelled", "dram": profile.name, "base": args.base, "fetched": fetched});
        serde_json::to_writer_pretty(&mut text, &whole)?;
        writeln!(text)?;
    } else {
        print(&mut text, &profile, &fetched, args.weights)?;
    }
    Ok(out::text(&text)?)
}

fn print(out: &mut impl Write, profile: &Profile, fetched: &Fetched, weights: Option<f64>) -> Result<()> {
    writeln!(
        out,
        "Modelled; {}, {:.2} bits of a weight wanted; nothing is compressed\n",
        profile.name, fetched.bits
    )?;
    let head =
        ["fetched by", "bits moved", "read pJ", "activate pJ", "pJ a weight", "ps a weight", "load ms"];
    let mut table = new_table(&head, 1);
    for (name, cost) in [("words", &fetched.words), ("planes", &fetched.planes)] {
        table.add_row([
            name.to_owned(),
            format!("{:.2}", cost.bits),
            format!("{:.1}", cost.read_pj),
            format!("{:.2}", cost.activate_pj),
            format!("{:.1}", cost.pj()),
            format!("{:.1}", cost.time_ps),
            weights.map_or_else(|| "–".to_owned(), |weights| format!("{:.2}", cost.time_ps * weights / 1e9)),
        ]);
    }
    writeln!(out, "{table}\n")?;
    writeln!(
        out,
        "planes save {:.1} % of energy and {:.1} % of time",
        100.0 * fetched.energy_saved,
        100.0 * fetched.time_saved
    )?;
    Ok(())
}

fn print_beside(out: &mut impl Write, profile: &Profile, all: &[Beside]) -> Result<()> {
    writeln!(
        out,
        "TRACE, Figs. 18 to 21, and CXL-NDP, Fig. 20, beside ours; modelled; {}: {}\n",
        profile.name, profile.currents.source
    )?;
    let head = ["figure", "what", "paper saves", "ours", "bits", "paper pJ", "our pJ"];
    let mut table = new_table(&head, 2);
    let pair = |[words, planes]: [f64; 2]| format!("{words:.1} → {planes:.1}");
    for beside in all {
        table.add_row([
            beside.figure.to_owned(),
            beside.what.to_owned(),
            format!("{:.1} %", 100.0 * beside.paper),
            format!("{:.1} %", 100.0 * beside.ours),
            format!("{:.1}", beside.bits),
            beside.paper_pj.map_or_else(|| "–".to_owned(), pair),
            pair(beside.ours_pj),
        ]);
    }
    writeln!(out, "{table}\n")?;
    let mut said = Vec::new();
    for beside in all {
        if !said.contains(&beside.reason) {
            said.push(beside.reason);
            writeln!(out, "From {}, {}: {}.", beside.figure, beside.what, beside.reason)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn run(words: &[&str]) -> Result<()> {
        let cli = Cli::try_parse_from([&["lamina", "elastic"], words].concat())?;
        let Command::Elastic(args) = cli.command else { panic!("lamina elastic") };
        elastic(&args)
    }

    #[test]
    fn mixes_and_maps_are_modelled_and_wrong_ones_named() {
        run(&["--mix", "16:0.5,8:0.5", "--chunk", "7200", "--sample", "20000", "--weights", "30e9"]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let map = folder.path().join("heads.txt");
        std::fs::write(&map, "4096 8\n4096 4\n").unwrap();
        let map = map.display().to_string();
        run(&["--map", &map, "--json"]).unwrap();
        let refused = |words: &[&str]| format!("{:#}", run(words).unwrap_err());
        assert!(refused(&["--mix", "16"]).contains("mix is 16"));
        assert!(refused(&["--map", &map, "--base", "5"]).contains("base is 5"));
        assert!(refused(&["--map", "/nonexistent"]).contains("/nonexistent"));
        assert!(refused(&["--dram", "ddr9"]).contains("dram is ddr9"));
    }
}
