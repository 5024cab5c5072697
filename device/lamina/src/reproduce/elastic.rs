//! Figs. 17 to 21, and Fig. 20 of CXL-NDP: elastic precision in the DRAM model.

use lamina_model::elastic::{Beside, Chunk, Cost, Mix, Thresholds, Work, fetch, fetch_mix};
use lamina_model::{ModelError, float};

use super::book::{How, Paper, Row, Section};
use super::chart::{Across, Chart, Kind, Look, Series};
use super::found::Found;

/// Weights of OPT-30B, and of its heads: 48 layers of 56, of 3.7e6 weights each (TRACE, IV-D). The
/// others are those of neurons.
const OPT: f64 = 30e9;
const HEADS: f64 = 48.0 * 56.0 * 3.7e6;
/// Both kinds, as `what` of a number has them: name, title and weights.
const KINDS: [(&str, &str, f64); 2] = [("heads", "Heads", HEADS), ("neurons", "Neurons", OPT - HEADS)];

fn of_figure<'f>(found: &'f Found, figure: &'f str) -> impl Iterator<Item = &'f Beside> + Clone {
    found.elastic.iter().filter(move |beside| beside.figure == figure)
}

fn source(found: &Found) -> String {
    format!(
        "Modelled: uncompressed weights read by the DRAM model ({}), by planes from rows of their \
            own and by words over all channels and bank groups, every command checked. A part of \
            what they differ in is that placement. Currents: {}. The papers' models are not at \
            hand, and need not be: bytes and rows are a matter of sizes.",
        found.profile.name, found.profile.currents.source
    )
}

fn percent(what: String, beside: &Beside) -> Row {
    let how = if beside.fitted { How::Fitted } else { How::Modelled };
    let row = Row::new(what, "%", 1, Some(100.0 * beside.paper)).ours(how, Some(100.0 * beside.ours));
    if beside.derived { row.derived().again() } else { row }
}

/// The reasons for what differs, each once.
fn with_reasons<'f>(mut section: Section, all: impl Iterator<Item = &'f Beside>) -> Section {
    for beside in all {
        let mut reason = format!("{}.", beside.reason);
        if let Some(first) = reason.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        if !section.notes.contains(&reason) {
            section.notes.push(reason);
        }
    }
    section
}

/// What is saved, the paper's beside ours.
fn saved(title: &str, names: Vec<String>, all: &[&Beside]) -> Chart {
    let values =
        |of: fn(&Beside) -> f64| all.iter().map(|beside| Some(100.0 * of(beside))).collect::<Vec<_>>();
    Chart {
        title: title.to_owned(),
        kind: Kind::Bars,
        right: "",
        across: Across::Names(names),
        up: "% saved",
        log: false,
        series: vec![
            Series::named("paper", 0, Look::Dashed, values(|beside| beside.paper)),
            Series::named("ours", 2, Look::Solid, values(|beside| beside.ours)),
        ],
    }
}

/// The first words of what a number is of: `Mixtral 8x7B bf16`.
fn short(beside: &Beside) -> String {
    beside.what.split(',').next().unwrap_or_default().to_owned()
}

/// A name that has room under a bar: `Llama 8B bf16`.
fn under(beside: &Beside) -> String {
    short(beside).replace("Llama 3.1", "Llama").replace("LLaMA-MoE 3.5B", "L-MoE").replace(
        " \
        8x7B",
        "",
    )
}

/// Fig. 17.
pub(super) fn fig_17(found: &Found) -> Section {
    let source = "Not obtainable: the routers that choose precisions (MoDE), trained on models \
        that are not at hand. The paper draws its mixes and prints no number of them. Shown is \
        the mix that Fig. 18's saving needs in the DRAM model: half precision for a part of the \
        experts.";
    let mut section = Section::new(Paper::Trace, "Fig. 17", "Which precisions the weights have", source);
    let all: Vec<_> = of_figure(found, "Fig. 18").collect();
    for beside in &all {
        let row = Row::new(
            format!("{}: bits of a weight that Fig. 18's saving needs", short(beside)),
            "bits",
            2,
            None,
        );
        section.rows.push(row.ours(How::Fitted, Some(beside.bits)));
    }
    let part =
        |number: usize| all.iter().map(move |beside| beside.mix.0.get(number).map(|(_, part)| 100.0 * part));
    section.chart(Chart {
        title: "Mixes fitted to Fig. 18, not measured".to_owned(),
        kind: Kind::Stacked,
        right: "",
        across: Across::Names(all.iter().map(|beside| under(beside)).collect()),
        up: "% of weights",
        log: false,
        series: vec![
            Series::named("all bits", 2, Look::Solid, part(0)),
            Series::named("half of them", 3, Look::Solid, part(1)),
        ],
    })
}

/// Figs. 18 and 19.
fn experts(found: &Found, figure: &'static str, title: &'static str, of: &str) -> Section {
    let all: Vec<_> = of_figure(found, figure).collect();
    let section = Section::new(Paper::Trace, figure, title, source(found))
        .rows(all.iter().map(|beside| percent(format!("{}, at {} bits", beside.what, beside.bits), beside)))
        .chart(saved(of, all.iter().map(|beside| under(beside)).collect(), &all));
    with_reasons(section, all.into_iter())
}

/// Fig. 18.
pub(super) fn fig_18(found: &Found) -> Section {
    experts(found, "Fig. 18", "DRAM energy by experts", "Energy that planes save")
}

/// Fig. 19.
pub(super) fn fig_19(found: &Found) -> Section {
    let mut section = experts(found, "Fig. 19", "Load latency by experts", "Load time that planes save");
    for beside in of_figure(found, "Fig. 19") {
        let ways = ["words", "planes"].into_iter().zip(beside.paper_ms.into_iter().flatten());
        section.rows.extend(
            ways.map(|(way, ms)| Row::new(format!("{}, by {way}", short(beside)), "ms", 2, Some(ms))),
        );
    }
    section
        .note(
            "The paper's milliseconds are not obtainable: it does not say how many modules read how \
                many weights. It prints no parts for fp8 and int4; those here are of its milliseconds.",
        )
        .note("705.90 to 495.06 ms is 29.87 %, which the paper prints as 30.0.")
}

/// Names of both ways of each work: `B 1.6` by words, `T 1.6` by planes.
fn both(all: &[&Beside]) -> Vec<String> {
    all.iter().flat_map(|beside| ["B", "T"].map(|way| format!("{way}-{:.1}", beside.bits))).collect()
}

fn costs(all: &[&Beside], of: impl Fn(&Cost) -> f64) -> Vec<Option<f64>> {
    let both = all.iter().flat_map(|beside| [&beside.fetched.words, &beside.fetched.planes]);
    both.map(|cost| Some(of(cost))).collect()
}

/// Fig. 20.
pub(super) fn fig_20(found: &Found) -> Section {
    let mut section = Section::new(Paper::Trace, "Fig. 20", "Energy of one load of OPT-30B", source(found));
    let all: Vec<_> = of_figure(found, "Fig. 21").collect();
    let joules = |pj: f64, weights: f64| pj * weights / 1e12;
    // What all 16 bits take by words.
    let full = Mix::parse("16:1").and_then(|mix| fetch_mix(&found.profile, 16, &mix, 1 << 16, 1 << 18));
    let full = full.ok().map(|fetched| fetched.words.pj());
    let modelled =
        |what: String, unit, places, ours| Row::new(what, unit, places, None).ours(How::Modelled, ours);
    let mut rows =
        vec![modelled("B-16.0: all 16 bits by words".to_owned(), "J", 2, full.map(|pj| joules(pj, OPT)))];
    // Of the whole model by words and by planes, a target each.
    let mut whole: Vec<(f64, [f64; 2])> = Vec::new();
    for (what, title, weights) in KINDS {
        let all: Vec<_> = all.iter().copied().filter(|beside| beside.what.contains(what)).collect();
        for (number, beside) in all.iter().enumerate() {
            let costs = beside.ours_pj.map(|pj| joules(pj, weights));
            for (way, cost) in ["words", "planes"].into_iter().zip(costs) {
                let what = format!("{what} at {:.1} bits, by {way}", beside.bits);
                rows.push(modelled(what, "J", 2, Some(cost)));
            }
            match whole.get_mut(number) {
                Some((_, sums)) => sums.iter_mut().zip(costs).for_each(|(sum, cost)| *sum += cost),
                None => whole.push((beside.bits, costs)),
            }
        }
        let full = full.map(|pj| joules(pj, weights));
        let values = [full].into_iter().chain(costs(&all, |cost| joules(cost.pj(), weights)));
        section.charts.push(Chart {
            title: format!("{title}: joules of one load; B by words, T by planes"),
            kind: Kind::Bars,
            right: "bits of a weight",
            across: Across::Names(["B-16.0".to_owned()].into_iter().chain(both(&all)).collect()),
            up: "J",
            log: false,
            series: vec![Series::named("activations and reads", 2, Look::Solid, values)],
        });
    }
    let saved = |[words, planes]: [f64; 2]| 100.0 * (1.0 - planes / words);
    let best = whole.iter().map(|(_, costs)| saved(*costs)).reduce(f64::max);
    section
        .rows([Row::new("most that planes save of heads and neurons together", "%", 1, Some(40.3))
            .ours(How::Modelled, best)])
        .rows(whole.iter().map(|(bits, costs)| {
            modelled(format!("heads and neurons at {bits:.1} bits: saved"), "%", 1, Some(saved(*costs)))
        }))
        .rows(rows)
        .note(
            "OPT-30B has 48 layers of 56 heads; at the paper's 3.7e6 weights each they are a third of 30e9, \
                and neurons have the others. Its Fig. 21 saves 40.4 and 40.9 % of heads and at most 33.9 % of \
                neurons, so its 40.3 % of the whole load needs nearly all energy to be that of heads. It does \
                not say how.",
        )
        .note(
            "What heads save agrees with Fig. 21 by construction: the part of the weights that is \
                fetched is taken from the paper's savings. What neurons save does not, as Fig. 21 says.",
        )
}

/// Fig. 21.
pub(super) fn fig_21(found: &Found) -> Section {
    let mut section =
        Section::new(Paper::Trace, "Fig. 21", "Energy of a weight, by head and by neuron", source(found));
    let all: Vec<_> = of_figure(found, "Fig. 21").collect();
    for (what, title, _) in KINDS {
        let all: Vec<_> = all.iter().copied().filter(|beside| beside.what.contains(what)).collect();
        for beside in &all {
            let of = format!("{what} at {:.1} bits", beside.bits);
            section.rows.push(percent(format!("{of}: saved"), beside));
            for (number, way) in ["words", "planes"].into_iter().enumerate() {
                let paper = beside.paper_pj.map(|pj| pj[number]);
                let row = Row::new(format!("{of}, by {way}"), "pJ", 1, paper);
                section.rows.push(row.ours(How::Modelled, Some(beside.ours_pj[number])));
            }
        }
        section.charts.push(Chart {
            title: format!("{title}: picojoules of a weight here; B by words, T by planes"),
            kind: Kind::Stacked,
            right: "bits of a weight",
            across: Across::Names(both(&all)),
            up: "pJ",
            log: false,
            series: vec![
                Series::named("reads", 2, Look::Solid, costs(&all, |cost| cost.read_pj)),
                Series::named("activations", 3, Look::Solid, costs(&all, |cost| cost.activate_pj)),
            ],
        });
    }
    with_reasons(section, all.into_iter())
        .note("Picojoules differ because currents do: the paper names neither its die nor its currents.")
        .note(
            "The paper's picojoules of heads at 1.6 and 4.8 bits give 30.4 and 40.5 %, where it prints 30.5 \
                and 40.4.",
        )
}

/// CXL-NDP's Fig. 3, TRACE's Fig. 4, and what its thresholds come to without a router.
///
/// # Errors
/// The module is of no use.
pub(super) fn ndp_fig_3(found: &Found) -> Result<Section, ModelError> {
    const EXPERTS: u64 = 250;
    let thresholds = Thresholds::default();
    let scores = (0..EXPERTS).map(|expert| (float(expert) + 0.5) / float(EXPERTS));
    let chunks: Vec<_> =
        scores.map(|score| Chunk { weights: 1 << 16, bits: thresholds.bits(score) }).collect();
    let fetched = fetch(&found.profile, &Work::of(16, &chunks)?)?;
    let text = format!(
        "Accuracy is not obtainable: LLaMA-MoE-3.5B and MoDE's routers are not at hand. The paper \
            prints thresholds as an example, of Router 1, which caps the precision of a block; it \
            prints none of Router 2, which chooses an expert's. Shown is what the former save of \
            {EXPERTS} experts of a size whose scores are spread evenly from 0 to 1, which no \
            router's need be. {}",
        source(found)
    );
    let title = "Experts at a precision, or pruned";
    let row = |what: &str, unit, ours: f64| Row::new(what, unit, 1, None).ours(How::Modelled, Some(ours));
    Ok(Section::new(Paper::Ndp, "Fig. 3", title, text)
        .rows([
            Row::new("LLaMA-MoE-3.5B, PIQA: points above pruning", "", 1, Some(1.9)),
            row("thresholds on scores spread evenly: bits of a weight", "bits", fetched.bits),
            row("the same: energy that planes save", "%", 100.0 * fetched.energy_saved),
            row("the same: load time that planes save", "%", 100.0 * fetched.time_saved),
        ])
        .note("`lamina elastic --scores FILE` models the same for scores of one's own."))
}

/// CXL-NDP's Fig. 20.
pub(super) fn ndp_fig_20(found: &Found) -> Section {
    let all: Vec<_> = of_figure(found, "CXL-NDP Fig. 20").collect();
    let name = |beside: &&Beside| {
        format!(
            "{} {:.1}",
            beside.what.replace(
                "OPT 30B \
        ",
                ""
            ),
            beside.bits
        )
    };
    let section =
        Section::new(Paper::Ndp, "Fig. 20", "Load latency of OPT-30B, by head and by neuron", source(found))
            .rows(all.iter().map(|beside| {
                percent(
                    format!(
                        "{} at {:.1} bits: time \
                saved",
                        beside.what, beside.bits
                    ),
                    beside,
                )
            }))
            .chart(saved("Load time that planes save", all.iter().map(name).collect(), &all));
    with_reasons(section, all.into_iter())
        .note("CXL-NDP's Figs. 15 to 19 are TRACE's 17 to 21, with the same numbers.")
}
