//! `lamina elastic`: planes against words, for precisions by chunk.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use lamina_device::files::{ModelPlan, PrecisionMap, name_of};
use lamina_model::dram::Profile;
use lamina_model::elastic::{self, Beside, Chunk, Cost, Fetched, Mix, Thresholds, Work};
use serde_json::{Value, json};

use crate::args::Elastic;
use crate::out;
use crate::table::new_table;

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
    args.weights.map_or(Ok(()), elastic::check_weights)?;
    let fetched = match chunks(args)? {
        Some((path, chunks)) => {
            let work = Work::of(args.base, &chunks).with_context(|| path.display().to_string())?;
            elastic::fetch(&profile, &work)?
        }
        None => elastic::fetch_mix(&profile, args.base, &Mix::parse(&args.mix)?, args.chunk, args.sample)?,
    };
    if args.json {
        serde_json::to_writer_pretty(&mut text, &whole(args, &profile, &fetched))?;
        writeln!(text)?;
    } else {
        print(&mut text, &profile, &fetched, args.weights)?;
    }
    Ok(out::text(&text)?)
}

/// All that a table shows, as JSON.
fn whole(args: &Elastic, profile: &Profile, fetched: &Fetched) -> Value {
    let [words, planes] = [&fetched.words, &fetched.planes].map(|cost| load_ms(cost, args.weights));
    let load_ms = json!({"words": words, "planes": planes});
    json!({
        "label": "modelled", "dram": profile.name, "base": args.base, "fetched": fetched, "weights": args.weights,
        "load_ms": load_ms,
    })
}

/// Milliseconds that a load of so many weights takes.
fn load_ms(cost: &Cost, weights: Option<f64>) -> Option<f64> {
    weights.map(|weights| cost.time_ps * weights / 1e9)
}

/// The file that says chunks, and these; none if there is none.
fn chunks(args: &Elastic) -> Result<Option<(&Path, Vec<Chunk>)>> {
    let Some(path) = args.map.as_ref().or(args.scores.as_ref()) else { return Ok(None) };
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let chunks = match &args.model {
        Some(model) => of_model(model, path, &text, args.base)?,
        None if args.scores.is_some() => {
            let thresholds = Thresholds::parse(&args.thresholds)?;
            elastic::parse_scores(&text, args.base, &thresholds)
                .with_context(|| path.display().to_string())?
        }
        None => elastic::parse_map(&text, args.base).with_context(|| path.display().to_string())?,
    };
    Ok(Some((path, chunks)))
}

/// The chunks of a model's tensors of `base` bits by a map of precisions.
fn of_model(model: &Path, path: &Path, text: &str, base: u32) -> Result<Vec<Chunk>> {
    let map: PrecisionMap =
        text.parse().with_context(|| format!("{} is no map of precisions", path.display()))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let planes = ModelPlan::open(model, &name_of(model))?.planes(&name, &map)?;
    let wanted = planes.iter().filter(|planes| planes.format.bits() == base);
    let chunks: Vec<_> =
        wanted.map(|planes| Chunk { weights: planes.elements, bits: planes.fetched }).collect();
    if chunks.is_empty() {
        bail!("{} has no weights of {base} bits: --base says which are modelled", model.display());
    }
    Ok(chunks)
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
            load_ms(cost, weights).map_or_else(|| "–".to_owned(), |ms| format!("{ms:.2}")),
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
    let head = ["figure", "what", "paper saves", "ours", "how", "bits", "paper pJ", "our pJ"];
    let mut table = new_table(&head, 2);
    let pair = |[words, planes]: [f64; 2]| format!("{words:.1} → {planes:.1}");
    for beside in all {
        table.add_row([
            beside.figure.to_owned(),
            beside.what.to_owned(),
            format!("{:.1}{} %", 100.0 * beside.paper, if beside.derived { "*" } else { "" }),
            format!("{:.1} %", 100.0 * beside.ours),
            if beside.fitted { "fitted" } else { "modelled" }.to_owned(),
            format!("{:.1}", beside.bits),
            beside.paper_pj.map_or_else(|| "–".to_owned(), pair),
            pair(beside.ours_pj),
        ]);
    }
    writeln!(out, "{table}\n\n* not printed, and worked out from the paper's milliseconds\n")?;
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

    /// By hand: a picosecond a weight of 30e9 is 30 ms.
    #[test]
    fn json_has_the_load_time_of_the_table() {
        let cost = Cost { bits: 8.0, read_pj: 1.0, activate_pj: 1.0, time_ps: 1.0 };
        let words = Cost { time_ps: 2.0, ..cost };
        let fetched = Fetched { bits: 8.0, words, planes: cost, energy_saved: 0.0, time_saved: 0.5 };
        let profile = Profile::named("ddr5-4800").unwrap();
        let whole = |words: &[&str]| {
            let cli = Cli::try_parse_from([&["lamina", "elastic", "--json"], words].concat()).unwrap();
            let Command::Elastic(args) = cli.command else { panic!("lamina elastic") };
            super::whole(&args, &profile, &fetched)
        };
        let given = whole(&["--weights", "30e9"]);
        assert_eq!(given["load_ms"], json!({"words": 60.0, "planes": 30.0}));
        assert_eq!(given["weights"], 30e9);
        assert_eq!(whole(&[])["load_ms"], json!({"words": null, "planes": null}));
    }

    /// A number that ours was fitted to is no prediction, and one that is not printed is marked.
    #[test]
    fn the_papers_numbers_say_which_were_fitted() {
        let profile = Profile::named("ddr5-4800").unwrap();
        let mut text = Vec::new();
        print_beside(&mut text, &profile, &elastic::beside(&profile).unwrap()).unwrap();
        let text = String::from_utf8(text).unwrap();
        for (what, said) in [
            ("Mixtral 8x7B bf16, energy", "29.9 % 29.9 % fitted"),
            ("Mixtral 8x7B bf16, 705.90", "30.0 % 29.5 % modelled"),
            ("Llama 3.1 70B fp8, 348.65", "15.9* % 15.9 % fitted"),
        ] {
            let line = text.lines().find(|line| line.contains(what)).unwrap();
            let words: Vec<_> = line.split_whitespace().collect();
            assert!(words.join(" ").contains(said), "{line}");
        }
    }

    #[test]
    fn mixes_and_maps_are_modelled_and_wrong_ones_named() {
        run(&["--mix", "16:0.5,8:0.5", "--chunk", "7200", "--sample", "20000", "--weights", "30e9"]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let map = folder.path().join("heads.txt");
        std::fs::write(&map, "4096 8\n4096 4\n").unwrap();
        let map = map.display().to_string();
        run(&["--map", &map, "--json"]).unwrap();
        // Heads as large as a model's are.
        let heads = folder.path().join("large.txt");
        std::fs::write(&heads, "3700000 8\n3700000 4\n".repeat(600)).unwrap();
        run(&["--map", &heads.display().to_string()]).unwrap();
        let scores = folder.path().join("experts.txt");
        std::fs::write(&scores, "65536 0.9\n65536 0.5\n65536 0.1\n").unwrap();
        let scores = scores.display().to_string();
        run(&["--scores", &scores]).unwrap();
        run(&["--scores", &scores, "--thresholds", "0.3:8", "--base", "8"]).unwrap();
        let refused = |words: &[&str]| format!("{:#}", run(words).unwrap_err());
        assert!(refused(&["--scores", &scores, "--thresholds", "0.3"]).contains("thresholds is 0.3"));
        assert_eq!(
            refused(&["--scores", &scores, "--base", "8"]),
            format!("{scores}: bits of line 1 is 16: it must be from 0 to 8")
        );
        let empty = folder.path().join("empty.txt").display().to_string();
        std::fs::write(&empty, "# none\n").unwrap();
        assert_eq!(refused(&["--map", &empty]), format!("{empty}: a line of weights and bits is missing"));
        for (option, value, bound) in [
            ("--base", "0", "4, 8, 16 or 32"),
            ("--base", "-1", "4, 8, 16 or 32"),
            ("--chunk", "-1", "from 1 to 16777216"),
            ("--sample", "0", "from 1 to 16777216"),
            ("--weights", "0", "from 1 to 1125899906842624"),
            ("--weights", "-1", "from 1 to 1125899906842624"),
            ("--weights", "1e99", "from 1 to 1125899906842624"),
        ] {
            let why = refused(&[option, value]);
            assert!(why.contains(option.trim_start_matches('-')) && why.contains(bound), "{why}");
        }
        assert!(refused(&["--scores", &map]).contains("score of line 1 is 8"));
        assert!(refused(&["--mix", "16"]).contains("mix is 16"));
        assert!(refused(&["--mix", "-1:1"]).contains("mix is -1:1"));
        assert!(refused(&["--map", &map, "--base", "5"]).contains("4, 8, 16 or 32"));
        // Chunks that are written down have their own sizes.
        for (file, path) in [("--map", &map), ("--scores", &scores)] {
            for option in ["--chunk", "--sample"] {
                let why = refused(&[file, path, option, "7"]);
                assert!(why.contains("cannot be used") && why.contains(option), "{why}");
            }
        }
        assert!(refused(&["--map", "/nonexistent"]).contains("/nonexistent"));
        assert!(refused(&["--dram", "ddr9"]).contains("dram is ddr9"));
    }
    /// By hand: of the bundled model's embedding half the rows at 12 planes, all else full.
    #[test]
    fn a_map_of_files_is_modelled_on_the_weights_it_is_for() {
        let model =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../guest-tests/models/stories260K-bf16.safetensors");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.toml");
        let text = "[[tensor]]\nname = \"tok_embeddings.weight\"\nrows = \"0..256\"\nview = \"e8m3\"\n";
        std::fs::write(&path, text).unwrap();
        let chunks = of_model(Path::new(model), &path, text, 16).unwrap();
        assert_eq!(
            chunks.iter().filter(|chunk| chunk.bits == 12).map(|chunk| chunk.weights).sum::<u64>(),
            256 * 64
        );
        let all: u64 = chunks.iter().map(|chunk| chunk.weights).sum();
        assert!((250_000..300_000).contains(&all), "{all}");
        let map = path.display().to_string();
        run(&["--map", &map, "--model", model]).unwrap();
        let refused = |words: &[&str]| format!("{:#}", run(words).unwrap_err());
        assert!(refused(&["--map", &map, "--model", model, "--base", "8"]).contains("no weights of 8 bits"));
        assert!(refused(&["--map", &map, "--model", "/nonexistent"]).contains("/nonexistent"));
        std::fs::write(&path, text.replace("tok", "no")).unwrap();
        assert!(refused(&["--map", &map, "--model", model]).contains("matches none"));
        std::fs::write(&path, "1 2").unwrap();
        assert!(refused(&["--map", &map, "--model", model]).contains("no map of precisions"));
    }
}
