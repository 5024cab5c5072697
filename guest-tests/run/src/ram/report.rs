//! What a memory job tells, and what is wrong with it.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets::UTF8_HORIZONTAL_ONLY};
use indicatif::{BinaryBytes, HumanCount};
use lamina_guest::{Event, Heat, RamPlan, Tier};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::figures::{percent, ratio};

/// Bytes of a guest's page.
const PAGE: u64 = 4096;

/// Everything a memory job found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RamReport {
    /// The NUMA node that the base window is.
    pub node: Option<u32>,
    /// The kernel's memory tiers, the fastest first.
    pub tiers: Vec<Tier>,
    /// What DAMON told of a process that is hot in one part and cold in the other; none if the
    /// guest's kernel has no DAMON.
    pub damon: Option<Heat>,
    /// Pages that the kernel demoted to the node.
    pub demoted_pages: u64,
    /// Pages that it promoted from there.
    pub promoted_pages: u64,
    /// What was swapped to the device's disk.
    pub swapped: Option<SwapReport>,
    /// Of each process that was bound to the node: bytes of its pages that hold data, over the
    /// bytes that the device stores for them.
    pub ratios: BTreeMap<String, f64>,
    /// Each of these processes.
    pub processes: Vec<ProcessReport>,
}

/// A process whose memory was bound to the node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessReport {
    /// Its name.
    pub name: String,
    /// Bytes of its memory on the node.
    pub node_bytes: u64,
    /// Bytes of it on other nodes, files not counted.
    pub other_bytes: u64,
    /// Bytes of pages on the device that hold data since it started; pages of zeros are none.
    pub data_bytes: u64,
    /// Bytes that the device stores for them, whole granules.
    pub stored_bytes: u64,
    /// `data_bytes / stored_bytes`.
    pub ratio: Option<f64>,
    /// Time until it was ready.
    pub seconds: f64,
}

/// What was swapped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwapReport {
    /// Pages that the kernel wrote.
    pub out: u64,
    /// Pages that it read.
    pub r#in: u64,
    /// Whether every word came back as it was stored, and the device was asked for exactly these
    /// pages.
    pub ok: bool,
    /// Bytes that the device was asked to write.
    pub written_bytes: u64,
    /// Bytes that it was asked to read.
    pub read_bytes: u64,
    /// Time it took in the guest.
    pub seconds: f64,
}

/// What the guests told.
#[derive(Default)]
pub struct Reported {
    events: Vec<Event>,
    problems: Vec<String>,
}

impl Reported {
    /// Keeps an event.
    pub fn take(&mut self, event: Event) {
        match event {
            Event::Problem { step, message } => self.problems.push(format!("guest, {step}: {message}")),
            event => self.events.push(event),
        }
    }

    /// A guest's program has ended with this status.
    pub fn ended(&mut self, status: Option<i32>) {
        if status != Some(0) {
            self.problems.push(format!("the guest's program ended with status {status:?}"));
        }
    }

    /// The report, and everything that was wrong.
    ///
    /// # Errors
    /// When what the guests passed on are not the device's counters.
    pub fn judged(self, plan: &RamPlan) -> Result<(RamReport, Vec<String>)> {
        let Self { events, mut problems } = self;
        let mut report = RamReport {
            node: None,
            tiers: Vec::new(),
            damon: None,
            demoted_pages: 0,
            promoted_pages: 0,
            swapped: None,
            ratios: BTreeMap::new(),
            processes: Vec::new(),
        };
        // What was told; a step that was not is one that failed, and has said why unless its guest
        // died.
        let (mut demoted, mut watched) = (false, false);
        for event in events {
            match event {
                Event::SystemRam { node, tiers, .. } => {
                    if !below(&tiers, node) {
                        problems.push(format!("node {node} is not in a tier below node 0's: {tiers:?}"));
                    }
                    (report.node, report.tiers) = (Some(node), tiers);
                }
                Event::Process { name, node_bytes, other_bytes, before, after, seconds } => {
                    let more = |counter: &str| difference(&before, &after, counter);
                    let (data_bytes, stored_bytes) =
                        (more("/device/logical_bytes")?, more("/device/stored_bytes")?);
                    let ratio = quotient(data_bytes, stored_bytes);
                    if other_bytes > 0 || node_bytes == 0 {
                        problems.push(format!(
                            "{name} was bound to the node and has {node_bytes} bytes there, {other_bytes} elsewhere"
                        ));
                    }
                    if data_bytes == 0 {
                        problems.push(format!("nothing of {name}'s memory came to the device"));
                    }
                    report.ratios.extend(ratio.map(|ratio| (name.clone(), ratio)));
                    let process = ProcessReport {
                        name,
                        node_bytes,
                        other_bytes,
                        data_bytes,
                        stored_bytes,
                        ratio,
                        seconds,
                    };
                    report.processes.push(process);
                }
                Event::Demoted { demoted_pages, promoted_pages, wrong_words, .. } => {
                    demoted = true;
                    if wrong_words > 0 {
                        problems.push(format!("{wrong_words} words were wrong after demotion and promotion"));
                    }
                    if demoted_pages == 0 || promoted_pages == 0 {
                        problems
                            .push(format!("{demoted_pages} pages were demoted, {promoted_pages} promoted"));
                    }
                    (report.demoted_pages, report.promoted_pages) = (demoted_pages, promoted_pages);
                }
                Event::Watched { heat } => {
                    watched = true;
                    if heat.is_some_and(|heat| !heat.told_apart()) {
                        problems.push(format!("DAMON did not tell hot from cold: {heat:?}"));
                    }
                    report.damon = heat;
                }
                Event::Swapped { out_pages, in_pages, wrong_words, before, after, seconds } => {
                    let written_bytes = difference(&before, &after, "/writes/base_written_bytes")?;
                    let read_bytes = difference(&before, &after, "/requests/base/bytes")?;
                    let exact = (written_bytes, read_bytes) == (PAGE * out_pages, PAGE * in_pages);
                    let ok = exact && wrong_words == 0 && out_pages > 0 && in_pages > 0;
                    if !ok {
                        problems.push(format!(
                            "{out_pages} pages were swapped out and {in_pages} in, the device wrote {written_bytes} bytes and read \
                             {read_bytes}, {wrong_words} words were wrong"
                        ));
                    }
                    let (out, r#in) = (out_pages, in_pages);
                    report.swapped = Some(SwapReport { out, r#in, ok, written_bytes, read_bytes, seconds });
                }
                _ => {}
            }
        }
        let measured = |name: &String| report.processes.iter().any(|process| process.name == *name);
        let missing = plan.processes.iter().map(|process| &process.name).filter(|name| !measured(name));
        problems.extend(missing.map(|name| format!("{name} was not measured")));
        let steps = [
            (report.node.is_some(), "the base window did not become memory"),
            (demoted, "nothing was demoted"),
            (watched, "DAMON was not tried"),
            (report.swapped.is_some(), "nothing was swapped"),
        ];
        problems.extend(steps.iter().filter(|(done, _)| !done).map(|(_, why)| (*why).to_owned()));
        Ok((report, problems))
    }
}

/// Whether `node` is in a slower tier than node 0, the guest's own RAM.
fn below(tiers: &[Tier], node: u32) -> bool {
    let holds = |tier: &Tier, node: u32| {
        let number = |text: &str| text.parse::<u32>().ok();
        tier.nodes.split(',').any(|part| match part.split_once('-') {
            Some((first, last)) => {
                number(first).zip(number(last)).is_some_and(|(a, b)| (a..=b).contains(&node))
            }
            None => number(part) == Some(node),
        })
    };
    let tier_of = |node| tiers.iter().find(|tier| holds(tier, node)).map(|tier| tier.tier);
    tier_of(0).zip(tier_of(node)).is_some_and(|(own, this)| own < this)
}

/// By how much a counter of the device's has grown.
fn difference(before: &Value, after: &Value, counter: &str) -> Result<u64> {
    let of = |stats: &Value| stats.pointer(counter).and_then(Value::as_u64);
    let (before, after) =
        of(before).zip(of(after)).with_context(|| format!("the device's counters have no {counter}"))?;
    Ok(after.saturating_sub(before))
}

#[expect(clippy::cast_precision_loss, reason = "a ratio to be looked at; exact to 2^53 bytes")]
fn quotient(whole: u64, part: u64) -> Option<f64> {
    (part > 0).then(|| whole as f64 / part as f64)
}

impl RamReport {
    /// The tables for a person.
    pub fn to_text(&self) -> String {
        let tiers: Vec<_> =
            self.tiers.iter().map(|tier| format!("{} (nodes {})", tier.tier, tier.nodes)).collect();
        let node = self.node.map_or_else(|| "no node".to_owned(), |node| format!("node {node}"));
        let mut lines = vec![
            format!("memory  the base window is {node}; memory tiers {}", tiers.join(", ")),
            format!(
                "        {} pages demoted to it, {} promoted from it",
                HumanCount(self.demoted_pages),
                HumanCount(self.promoted_pages)
            ),
            match &self.damon {
                Some(heat) => format!(
                    "        DAMON found {} of the hot part and {} of the cold one, in {} regions after {:.1} s",
                    percent(heat.hot_found, heat.hot_bytes),
                    percent(heat.cold_found, heat.cold_bytes),
                    heat.regions,
                    heat.seconds
                ),
                None => "        the guest's kernel has no DAMON".to_owned(),
            },
            self.table().to_string(),
        ];
        if let Some(swapped) = &self.swapped {
            let verdict = if swapped.ok { "every word came back" } else { "NOT as it was stored" };
            lines.push(format!(
                "swapped {} pages out to the base window's disk and {} in, in {:.1} s: {verdict}",
                HumanCount(swapped.out),
                HumanCount(swapped.r#in),
                swapped.seconds
            ));
        }
        lines.join("\n")
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(UTF8_HORIZONTAL_ONLY);
        table.set_header(["process", "on the node", "holds data", "stored", "ratio", "s"]);
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        for process in &self.processes {
            table.add_row([
                process.name.clone(),
                BinaryBytes(process.node_bytes).to_string(),
                BinaryBytes(process.data_bytes).to_string(),
                BinaryBytes(process.stored_bytes).to_string(),
                ratio(process.ratio),
                format!("{:.1}", process.seconds),
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn stats(logical: u64, stored: u64, written: u64, read: u64) -> Value {
        json!({
            "device": { "logical_bytes": logical, "stored_bytes": stored },
            "writes": { "base_written_bytes": written },
            "requests": { "base": { "bytes": read } },
        })
    }

    fn plan() -> RamPlan {
        RamPlan { processes: super::super::plan().processes[..1].to_vec(), ..super::super::plan() }
    }

    /// What guests tell when everything is right.
    fn events() -> Vec<Event> {
        let tiers = vec![Tier { tier: 4, nodes: "0".to_owned() }, Tier { tier: 22, nodes: "1".to_owned() }];
        let heat =
            Heat { hot_bytes: 10, hot_found: 9, cold_bytes: 30, cold_found: 30, regions: 12, seconds: 1.0 };
        vec![
            Event::SystemRam { node: 1, bytes: 1 << 28, tiers, seconds: 1.0 },
            Event::Process {
                name: "python".to_owned(),
                node_bytes: 9000,
                other_bytes: 0,
                before: stats(100, 50, 0, 0),
                after: stats(8292, 2098, 0, 0),
                seconds: 1.0,
            },
            Event::Demoted { demoted_pages: 3, promoted_pages: 2, wrong_words: 0, seconds: 1.0 },
            Event::Watched { heat: Some(heat) },
            Event::Swapped {
                out_pages: 5,
                in_pages: 6,
                wrong_words: 0,
                before: stats(0, 0, 4096, 0),
                after: stats(0, 0, 6 * 4096, 6 * 4096),
                seconds: 1.0,
            },
        ]
    }

    fn judged(events: Vec<Event>) -> (RamReport, Vec<String>) {
        let mut reported = Reported::default();
        for event in events {
            reported.take(event);
        }
        reported.judged(&plan()).unwrap()
    }

    #[test]
    fn what_the_guests_told_is_in_the_report() {
        let (report, problems) = judged(events());
        assert_eq!(problems, Vec::<String>::new());
        assert_eq!((report.node, report.demoted_pages, report.promoted_pages), (Some(1), 3, 2));
        assert_eq!(report.ratios, BTreeMap::from([("python".to_owned(), 4.0)]));
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["swapped"]["in"], 6);
        assert_eq!((&json["swapped"]["out"], &json["swapped"]["ok"]), (&json!(5), &json!(true)));
        let text = report.to_text();
        for part in ["node 1", "22 (nodes 1)", "90.0 %", "4.000", "5 pages out", "every word came back"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn whatever_is_wrong_or_missing_is_a_problem() {
        for index in 0..events().len() {
            let mut fewer = events();
            fewer.remove(index);
            assert_eq!(judged(fewer).1.len(), 1, "{index}");
        }
        let changes = [
            (0, "/tiers/1/tier", json!(4)),
            (1, "/node_bytes", json!(0)),
            (1, "/other_bytes", json!(4096)),
            (1, "/after", stats(100, 50, 0, 0)),
            (2, "/wrong_words", json!(1)),
            (2, "/promoted_pages", json!(0)),
            (3, "/heat/hot_found", json!(4)),
            (4, "/wrong_words", json!(1)),
            (4, "/out_pages", json!(6)),
            (4, "/in_pages", json!(5)),
        ];
        for (index, field, value) in changes {
            let mut wrong = events();
            let mut event = serde_json::to_value(&wrong[index]).unwrap();
            *event.pointer_mut(field).unwrap() = value;
            wrong[index] = serde_json::from_value(event).unwrap();
            assert_eq!(judged(wrong).1.len(), 1, "{field}");
        }
    }

    #[test]
    fn a_kernel_without_damon_is_told_and_is_no_problem() {
        let mut events = events();
        events[3] = Event::Watched { heat: None };
        let (report, problems) = judged(events);
        assert_eq!(problems, Vec::<String>::new());
        assert!(report.to_text().contains("no DAMON"));
    }

    #[test]
    fn tiers_are_compared_by_the_nodes_in_them() {
        let tier = |tier, nodes: &str| Tier { tier, nodes: nodes.to_owned() };
        assert!(below(&[tier(4, "0"), tier(22, "1")], 1));
        assert!(below(&[tier(4, "0,2"), tier(22, "3-5,9")], 4));
        assert!(!below(&[tier(4, "0-1")], 1));
        assert!(!below(&[tier(4, "0")], 1));
    }
}
