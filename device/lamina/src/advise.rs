//! `lamina advise`: a precision for each tensor of a model under a budget of bits, found by running
//! the model on a text.

mod candidates;
mod choose;
mod map;
mod measure;
mod routing;
mod subject;

use std::{fs, ops::RangeInclusive, path::PathBuf};

use anyhow::{Context, Result, bail, ensure};
use indicatif::BinaryBytes;
use lamina_codec::{format::Format, view::View};
use serde::Serialize;

use crate::{
    args::Advise,
    log, made_file,
    meter::Meter,
    out::{self, print_line},
    table::new_table,
};

use self::{
    candidates::{Candidate, How, best, candidates},
    choose::{Ladder, Step, spent},
    measure::{Answers, perplexity},
    routing::{Usage, write_routes},
    subject::{Part, Subject},
};

/// Bits of bf16.
const FULL_BITS: u32 = 16;
/// Budgets that can be asked for.
const BUDGETS: RangeInclusive<f64> = 1.0..=16.0;
/// What the map is called in the table.
const MAP: &str = "the map";
/// Parts that are listed: those whose precision matters most.
const LISTED: usize = 10;

/// What is printed.
#[derive(Serialize)]
struct Advice {
    budget_bits: f64,
    /// Of the map.
    bits: f64,
    /// How the map was found, and what else was tried.
    found: How,
    candidates: Vec<Tried>,
    map: String,
    text_tokens: usize,
    check_tokens: usize,
    precisions: Vec<Precision>,
    /// Uniform precision that keeps the budget, the finest of them.
    uniform: Option<String>,
    parts: Vec<Advised>,
    /// Experts, layer by layer, with the bits that they got.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    experts: Vec<Usage>,
}

/// A map, and how far it moves the model's answers to the text that it was chosen by.
#[derive(Serialize)]
struct Tried {
    found: How,
    divergence: f64,
}

/// All of the model at one precision, or at the map's.
#[derive(Serialize)]
struct Precision {
    name: String,
    bits: f64,
    /// Stored bytes that reading all of the model's tensors once fetches.
    fetched_bytes: u64,
    perplexity: f64,
}

/// A part, and what was found of it.
#[derive(Serialize)]
struct Advised {
    tensor: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<[usize; 2]>,
    weights: u64,
    /// Of an expert: tokens of the text that was chosen by that used it.
    #[serde(skip_serializing_if = "Option::is_none")]
    routed: Option<usize>,
    precision: String,
    /// The divergence at each of the views, in their order, in nats a token.
    divergence: Vec<f64>,
}

/// Finds the map, writes it, and prints what it comes to. Blocks until it is done.
pub(crate) fn advise(args: &Advise) -> Result<()> {
    ensure!(
        BUDGETS.contains(&args.budget),
        "a budget of {} bits a weight: it is {} to {}",
        args.budget,
        BUDGETS.start(),
        BUDGETS.end()
    );
    let views = args.views.iter().map(|view| masking(view)).collect::<Result<Vec<_>>>()?;
    ensure!(!views.is_empty(), "--views names no view");
    // Minutes of work are not for a map that cannot be written, or that would be the model.
    let read = || [Some(&args.model), Some(&args.text), args.tokenizer.as_ref()].into_iter().flatten();
    made_file::check("--out", &args.out, read().map(PathBuf::as_path))?;
    if let Some(routes) = &args.routes {
        made_file::not_over("--routes", routes, read().map(PathBuf::as_path))?;
    }
    let subject = Subject::open(&args.model, args.tokenizer.as_deref())?;
    if subject.converted > 0 {
        log::say(&format!(
            "{} tensors of {} are not bf16 there: what is judged is that model in bf16, and the map is for such a file",
            subject.converted,
            args.model.display()
        ));
    }
    let text =
        fs::read_to_string(&args.text).with_context(|| format!("cannot read {}", args.text.display()))?;
    let tokens = subject.tokenizer.encode(&text);
    let (chosen_by, checked_by) = split(&tokens, args, subject.config.seq_len)?;

    let parts = subject.parts(args.by_head);
    let full = Answers::of(&subject, subject.at([]), chosen_by);
    ensure!(
        full.are_finite(),
        "{}: what it says of the text overflows in full precision; there is nothing to compare with",
        args.model.display()
    );
    if let Some(path) = &args.routes {
        ensure!(subject.config.experts.is_some(), "--routes: {} has no experts", args.model.display());
        write_routes(path, &full.routes)?;
    }
    let ladders = ladders(&subject, &full, &parts, &views, chosen_by);
    let moved = |steps: &[Step]| {
        let at = parts.iter().zip(steps).filter_map(|(part, step)| Some((part, views.get(step.precision)?)));
        full.divergence(&Answers::of(&subject, subject.at(at), chosen_by))
    };
    let candidates = candidates(&ladders, args.budget, moved)?;
    let Candidate { found, steps: chosen, .. } = best(&candidates);
    let view_of = |step: &Step| views.get(step.precision);
    let advised = || parts.iter().zip(chosen).filter_map(|(part, step)| Some((part, view_of(step)?)));
    let name_of = |step: &Step| args.views.get(step.precision).map_or("full", String::as_str);

    let rules = parts.iter().zip(chosen).filter(|(_, step)| view_of(step).is_some());
    let rules = rules.map(|(part, step)| map::Rule {
        name: subject.name(part),
        rows: (!part.whole).then_some(&part.rows),
        view: name_of(step),
    });
    map::write(&args.out, rules)?;

    let weights: u64 = ladders.iter().map(|ladder| ladder.weights).sum();
    let judged = [Judged { name: "full", bits: f64::from(FULL_BITS), at: Vec::new() }].into_iter().chain(
        args.views.iter().zip(&views).map(|(name, view)| Judged {
            name,
            bits: f64::from(view.mask().count()),
            at: parts.iter().map(|part| (part, view)).collect(),
        }),
    );
    let mixed =
        Judged { name: MAP, bits: float(spent(&ladders, chosen)) / float(weights), at: advised().collect() };
    let judged: Vec<_> = judged.chain([mixed]).collect();
    let meter = Meter::of("judged", "precisions");
    let mut precisions = Vec::new();
    for (done, Judged { name, bits, at }) in judged.iter().enumerate() {
        meter.tell(name, done as u64, judged.len() as u64);
        let perplexity = perplexity(&subject, subject.at(at.iter().copied()), checked_by);
        precisions.push(Precision {
            name: (*name).to_owned(),
            bits: *bits,
            fetched_bytes: subject.fetched(at.iter().copied()),
            perplexity: perplexity.context("a text of one token has no perplexity")?,
        });
    }
    meter.finish();

    let uniform = candidates.iter().find(|candidate| candidate.found == How::Uniform);
    let uniform = uniform.and_then(|uniform| uniform.steps.first()).map(|step| name_of(step).to_owned());
    let bits = parts.iter().zip(chosen).map(|(part, step)| (part.weight, subject.weights(part), step.bits));
    let experts = Usage::of(&full, bits);
    let parts = parts.iter().zip(&ladders).zip(chosen).map(|((part, ladder), step)| Advised {
        tensor: subject.name(part).to_owned(),
        rows: (!part.whole).then_some([part.rows.start, part.rows.end]),
        weights: ladder.weights,
        routed: part.weight.expert().map(|expert| full.routed(expert)),
        precision: name_of(step).to_owned(),
        divergence: ladder.steps[..views.len()].iter().map(|step| step.divergence).collect(),
    });
    let advice = Advice {
        budget_bits: args.budget,
        bits: float(spent(&ladders, chosen)) / float(weights),
        found: *found,
        candidates: candidates
            .iter()
            .map(|of| Tried { found: of.found, divergence: of.divergence })
            .collect(),
        map: args.out.display().to_string(),
        text_tokens: chosen_by.len(),
        check_tokens: checked_by.len(),
        precisions,
        uniform,
        parts: parts.collect(),
        experts,
    };
    if args.json {
        return Ok(out::text(format!("{}\n", serde_json::to_string_pretty(&advice)?).as_bytes())?);
    }
    print(&advice, args)
}

/// A model at precisions, to be judged.
struct Judged<'a> {
    name: &'a str,
    bits: f64,
    at: Vec<(&'a Part, &'a View)>,
}

/// The view, if a part of a tensor can have it.
fn masking(spelling: &str) -> Result<View> {
    let view = View::parse(Format::Bf16, spelling)?;
    if !view.is_in_place() || spelling == "full" {
        bail!("--views {spelling}: give views that mask, such as e8m3 or e8m3+g2; full is among them always");
    }
    Ok(view)
}

/// The tokens to choose by, and those to check by: a text of its own behind the others.
fn split<'t>(tokens: &'t [usize], args: &Advise, most: usize) -> Result<(&'t [usize], &'t [usize])> {
    let (choose, check) = (args.text_tokens, args.check_tokens);
    for (option, count) in [("--text-tokens", choose), ("--check-tokens", check)] {
        ensure!((2..=most).contains(&count), "{option} {count}: the model takes 2 to {most} tokens");
    }
    ensure!(
        tokens.len() >= choose + check,
        "{} has {} tokens: --text-tokens and --check-tokens ask for {choose} + {check}",
        args.text.display(),
        tokens.len()
    );
    let (first, rest) = tokens.split_at(choose);
    Ok((first, &rest[..check]))
}

/// What each part alone does at each of the views.
fn ladders(subject: &Subject, full: &Answers, parts: &[Part], views: &[View], text: &[usize]) -> Vec<Ladder> {
    let meter = Meter::of("measured", "tensors at their precisions");
    let total = parts.len() * views.len();
    let ladder = |(index, part): (usize, &Part)| {
        let step = |(precision, view): (usize, &View)| {
            meter.tell(subject.name(part), (index * views.len() + precision) as u64, total as u64);
            let answers = Answers::of(subject, subject.at([(part, view)]), text);
            Step { precision, bits: view.mask().count(), divergence: full.divergence(&answers) }
        };
        let mut steps: Vec<_> = views.iter().enumerate().map(step).collect();
        steps.push(Step { precision: views.len(), bits: FULL_BITS, divergence: 0.0 });
        Ladder { weights: subject.weights(part) as u64, steps }
    };
    let ladders = parts.iter().enumerate().map(ladder).collect();
    meter.finish();
    ladders
}

fn print(advice: &Advice, args: &Advise) -> Result<()> {
    let mut table = new_table(&["precision", "bits a weight", "fetched", "perplexity", ""], 1);
    for precision in &advice.precisions {
        let note =
            if advice.uniform.as_ref() == Some(&precision.name) { "uniform, within the budget" } else { "" };
        table.add_row([
            precision.name.clone(),
            format!("{:.2}", precision.bits),
            BinaryBytes(precision.fetched_bytes).to_string(),
            format!("{:.4}", precision.perplexity),
            note.to_owned(),
        ]);
    }
    print_line!("{table}")?;
    print_line!(
        "perplexity of {} tokens behind the {} that precisions were chosen by",
        advice.check_tokens,
        advice.text_tokens
    )?;
    for Tried { found, divergence } in &advice.candidates {
        let note = if *found == advice.found { ", which is the map" } else { "" };
        print_line!("{divergence:.3e} nats a token on the text that was chosen by: {found}{note}")?;
    }
    let perplexity = |name: &str| {
        let found = advice.precisions.iter().find(|precision| precision.name == name);
        found.map_or(f64::INFINITY, |precision| precision.perplexity)
    };
    if let Some(uniform) = advice.uniform.as_deref().filter(|uniform| perplexity(uniform) <= perplexity(MAP))
    {
        print_line!(
            "uniform {uniform} is as good here, and needs no map; more --text-tokens may find a better one"
        )?;
    }
    let mut parts: Vec<_> = advice.parts.iter().collect();
    let worst = |part: &Advised| part.divergence.iter().copied().fold(0.0, f64::max) / float(part.weights);
    parts.sort_by(|one, other| worst(other).total_cmp(&worst(one)));
    let head: Vec<_> =
        ["tensor", "rows", "precision"].into_iter().chain(args.views.iter().map(String::as_str)).collect();
    let mut table = new_table(&head, 3);
    for part in parts.iter().take(LISTED) {
        let rows = part.rows.map_or_else(String::new, |[from, to]| format!("{from}..{to}"));
        let divergence = part.divergence.iter().map(|each| format!("{each:.2e}"));
        table.add_row([part.tensor.clone(), rows, part.precision.clone()].into_iter().chain(divergence));
    }
    print_line!(
        "\nMost sensitive for their size, of {}; nats a token that answers diverge by with that one alone:",
        advice.parts.len()
    )?;
    print_line!("{table}")?;
    if !advice.experts.is_empty() {
        let mut table = new_table(&["layer", "expert", "tokens", "bits a weight"], 0);
        for Usage { layer, expert, routed, bits } in &advice.experts {
            table.add_row([layer.to_string(), expert.to_string(), routed.to_string(), format!("{bits:.2}")]);
        }
        print_line!("\nExperts, and how many of the {} tokens used them:", advice.text_tokens)?;
        print_line!("{table}")?;
    }
    print_line!("the map is in {}: lamina mount MODEL --map NAME={} DIR", advice.map, advice.map)?;
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "bits and weights of a model: far below 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}
