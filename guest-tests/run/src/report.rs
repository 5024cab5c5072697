//! What a job tells: `report.json` for programs, tables for people.

use std::{fs, io, path::Path};

use comfy_table::{CellAlignment, Table, presets::UTF8_HORIZONTAL_ONLY};
use indicatif::{BinaryBytes, HumanCount};
use serde::{Deserialize, Serialize};

pub use crate::subject::{DeviceReport, GuestReport};
use crate::{
    daemon::Skipped,
    decode::report::DecodeReport,
    figures::{percent, ratio, shown},
    ram::report::RamReport,
};

/// Everything a job found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The guest.
    pub guest: GuestReport,
    /// The device after the run.
    pub device: DeviceReport,
    /// The devices that the base window was counted as, if they were several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interleave: Option<InterleaveReport>,
    /// Its tensors, by DPA.
    pub tensors: Vec<TensorReport>,
    /// Every view the guest read, in the order it did.
    pub views: Vec<ViewReport>,
    /// The tensor the guest wrote.
    pub written: Option<WrittenReport>,
    /// What the decoder on the device came to, if one was run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<DecodeReport>,
    /// What the base window came to as memory, if it was used so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<RamReport>,
    /// Views that a tensor's format cannot give.
    pub skipped: Vec<Skipped>,
    /// What all requests of the run moved besides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<TrafficReport>,
    /// Everything that was wrong; empty if the run is good.
    pub problems: Vec<String>,
}

/// What the device tells of all requests of a run, whoever made them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TrafficReport {
    /// Requests for the base window by size: pages filled, alone or with what was read ahead.
    pub base_fills: Vec<FillsReport>,
    /// Those for views.
    pub view_fills: Vec<FillsReport>,
    /// What stores had to read first.
    pub reads_for_writes: ReadsReport,
    /// The index.
    pub index: IndexReport,
}

/// Requests of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FillsReport {
    /// The longest of them, in bytes; null if there is no bound.
    pub up_to_bytes: Option<u64>,
    /// How many there were.
    pub fills: u64,
}

/// What reads moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadsReport {
    /// How many there were.
    pub reads: u64,
    /// Stored bytes fetched.
    pub stored_bytes_fetched: u64,
    /// Bytes a plain device would have fetched.
    pub plain_bytes_fetched: u64,
    /// Bytes a generically compressing device would have fetched.
    pub gcomp_bytes_fetched: Option<u64>,
    /// Bytes of index entries fetched.
    pub index_bytes_fetched: u64,
    /// Those that a generically compressing device would have fetched.
    pub gcomp_index_bytes_fetched: Option<u64>,
}

/// What the index moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexReport {
    /// Bytes of entries fetched.
    pub bytes_fetched: u64,
    /// Bytes of entries written.
    pub bytes_written: u64,
    /// Those that a generically compressing device would have fetched.
    pub gcomp_bytes_fetched: Option<u64>,
    /// Those that it would have written.
    pub gcomp_bytes_written: Option<u64>,
}

/// Several devices, as the device itself tells of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InterleaveReport {
    /// How many.
    pub ways: u32,
    /// Bytes of a granule.
    pub granule_bytes: u64,
    /// Bytes that the busiest one moved over the mean.
    pub imbalance: Option<f64>,
    /// GB/s that each is taken to move: Beluga's figure unless the device was told another.
    pub modelled_device_gbs: f64,
    /// GB/s of plain bytes that the region would give then.
    pub modelled_region_gbs: Option<f64>,
    /// Each of them.
    pub devices: Vec<MemberReport>,
}

/// One of several devices.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemberReport {
    /// Its number.
    pub device: u32,
    /// Read requests for which it was asked.
    pub reads: u64,
    /// Bytes that it would have fetched for them if it were plain.
    pub plain_bytes_fetched: u64,
    /// Stored bytes fetched.
    pub stored_bytes_fetched: u64,
    /// Write requests for which it was asked.
    pub writes: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Bytes stored for them.
    pub stored_bytes_written: u64,
    /// GB/s that it would move while the busiest moves all it can.
    pub modelled_gbs: Option<f64>,
}

/// A tensor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TensorReport {
    /// Its name.
    pub name: String,
    /// Its format.
    pub format: String,
    /// Its elements.
    pub elements: u64,
    /// Its length.
    pub logical_bytes: u64,
    /// Bytes of its blocks that hold data.
    pub written_bytes: u64,
    /// What it is charged in the store.
    pub stored_bytes: u64,
    /// `logical_bytes / stored_bytes`.
    pub ratio: Option<f64>,
    /// SHA-256 of its bytes as the guest loaded them through the base window.
    #[serde(default)]
    pub base_sha256: Option<String>,
}

/// A view as the guest read it, and what the device moved for it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ViewReport {
    /// The tensor.
    pub tensor: String,
    /// The view's spelling.
    pub view: String,
    /// Its elements.
    pub elements: u64,
    /// Its bytes.
    pub bytes: u64,
    /// SHA-256 of the bytes as the guest loaded them.
    pub sha256: String,
    /// Whether the reference says the same.
    pub matches: bool,
    /// Planes selected, summed over blocks.
    pub planes_fetched: u64,
    /// Stored bytes fetched.
    pub stored_bytes_fetched: u64,
    /// Bytes a plain device would have fetched.
    pub plain_bytes_fetched: u64,
    /// Bytes a generically compressing device would have fetched.
    pub gcomp_bytes_fetched: Option<u64>,
    /// Bytes of index entries fetched besides.
    #[serde(default)]
    pub index_bytes_fetched: u64,
    /// Those that a generically compressing device would have fetched.
    #[serde(default)]
    pub gcomp_index_bytes_fetched: Option<u64>,
    /// Bytes that the buffers of open KV windows gave, which no device fetches.
    #[serde(default)]
    pub staged_bytes: u64,
    /// `stored_bytes_fetched / plain_bytes_fetched`.
    #[serde(default)]
    pub of_plain: Option<f64>,
    /// The same with `index_bytes_fetched`.
    #[serde(default)]
    pub of_plain_with_index: Option<f64>,
    /// Time of the guest's loads.
    pub seconds: f64,
}

/// The tensor the guest wrote.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WrittenReport {
    /// The tensor.
    pub tensor: String,
    /// SHA-256 of the `full` view (of the tensor itself if there is no such view) after the flush.
    pub sha256_full: String,
    /// Whether that and every other view of it, after the flush, is what the reference says.
    pub matches: bool,
    /// Views read back.
    pub views: Vec<String>,
}

/// Writes a report as JSON.
///
/// # Errors
/// When the file cannot be written, for example for lack of space.
pub fn write_json(report: &impl Serialize, path: &Path) -> io::Result<()> {
    let mut bytes = serde_json::to_vec_pretty(report)?;
    bytes.push(b'\n');
    // Beside it first, so that a full disk leaves no half report under the name.
    let beside = path.with_extension("json.part");
    fs::write(&beside, bytes)?;
    fs::rename(beside, path)
}

impl Report {
    /// A report of a guest and a device, with nothing found yet.
    pub fn of(guest: GuestReport, device: DeviceReport) -> Self {
        Self {
            guest,
            device,
            interleave: None,
            tensors: Vec::new(),
            views: Vec::new(),
            written: None,
            decode: None,
            ram: None,
            skipped: Vec::new(),
            traffic: None,
            problems: Vec::new(),
        }
    }

    /// Whether everything was right, and is where it was asked for.
    pub fn good(&self) -> bool {
        self.problems.is_empty() && self.unsaved().is_none()
    }

    /// Why a file that was asked for is not there.
    fn unsaved(&self) -> Option<&str> {
        self.decode.as_ref()?.unsaved.as_deref()
    }

    /// Writes the report as JSON.
    ///
    /// # Errors
    /// When the file cannot be written, for example for lack of space.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        write_json(self, path)
    }

    /// The tables for a person.
    pub fn to_text(&self) -> String {
        let Self { guest, device, .. } = self;
        let mut lines = vec![
            if guest.qemu.is_empty() {
                format!("host    Linux {}, {}, no guest", guest.kernel, guest.attach)
            } else {
                format!(
                    "guest   Linux {} in QEMU {} ({}), {}, ready after {:.1} s",
                    guest.kernel, guest.qemu, guest.accel, guest.attach, guest.boot_seconds
                )
            },
            format!(
                "device  {} ({}): {} stored in {} and {} of index, ratio {}",
                device.mode,
                device.codec,
                BinaryBytes(device.logical_bytes),
                BinaryBytes(device.stored_bytes),
                BinaryBytes(device.index_bytes),
                ratio(device.ratio)
            ),
        ];
        if let Some(interleave) = &self.interleave {
            lines.extend(interleave.lines());
        }
        if !self.views.is_empty() {
            lines.push(self.view_table().to_string());
        }
        if let Some(traffic) = &self.traffic {
            lines.extend(traffic.lines());
        }
        if let Some(decode) = &self.decode {
            lines.push(decode.to_text());
        }
        if let Some(ram) = &self.ram {
            lines.push(ram.to_text());
        }
        if let Some(written) = &self.written {
            let verdict = if written.matches { "as written" } else { "NOT as written" };
            let count = written.views.len();
            lines.push(format!("written {}: {count} views read back {verdict}", written.tensor));
        }
        if !self.skipped.is_empty() {
            lines.push(format!(
                "skipped {} views that a format cannot give (listed in the report)",
                self.skipped.len()
            ));
        }
        let problems = self.problems.iter().map(String::as_str).chain(self.unsaved());
        for problem in problems {
            let problem = problem.lines().map(shown).collect::<Vec<_>>().join("\n");
            lines.push(format!("problem {problem}"));
        }
        let checked = [
            (!self.views.is_empty(), "every byte"),
            (self.decode.is_some(), "every logit that was compared"),
            (self.ram.is_some(), "every page"),
        ];
        let checked: Vec<_> = checked.iter().filter(|(was, _)| *was).map(|(_, what)| *what).collect();
        let what = if checked.is_empty() { "every byte".to_owned() } else { checked.join(" and ") };
        lines.push(format!("{}{what} was right", if self.problems.is_empty() { "" } else { "NOT " }));
        lines.join("\n")
    }

    /// One line a view spelling, all tensors together.
    fn view_table(&self) -> Table {
        let mut table = Table::new();
        let gcomp = format!("gcomp ({})", self.device.gcomp_codec.as_deref().unwrap_or("–"));
        table.load_style(UTF8_HORIZONTAL_ONLY);
        table.set_header([
            "view",
            "tensors",
            "right",
            "bytes read",
            "planes",
            "stored fetched",
            gcomp.as_str(),
            "plain",
            "of plain",
            "index",
            "with index",
        ]);
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        let mut spellings: Vec<&str> = Vec::new();
        for view in &self.views {
            if !spellings.contains(&view.view.as_str()) {
                spellings.push(&view.view);
            }
        }
        for spelling in spellings {
            let views: Vec<_> = self.views.iter().filter(|view| view.view == spelling).collect();
            let sum = |field: fn(&ViewReport) -> u64| views.iter().map(|view| field(view)).sum::<u64>();
            let (stored, plain) = (sum(|v| v.stored_bytes_fetched), sum(|v| v.plain_bytes_fetched));
            let index = sum(|v| v.index_bytes_fetched);
            let gcomp: Option<u64> = views.iter().map(|view| view.gcomp_bytes_fetched).sum();
            table.add_row([
                spelling.to_owned(),
                views.len().to_string(),
                views.iter().filter(|view| view.matches).count().to_string(),
                BinaryBytes(sum(|v| v.bytes)).to_string(),
                HumanCount(sum(|v| v.planes_fetched)).to_string(),
                BinaryBytes(stored).to_string(),
                gcomp.map_or_else(|| "–".to_owned(), |bytes| BinaryBytes(bytes).to_string()),
                BinaryBytes(plain).to_string(),
                percent(stored, plain),
                BinaryBytes(index).to_string(),
                percent(stored + index, plain),
            ]);
        }
        table
    }
}

impl TrafficReport {
    /// Three lines: how much was asked for at once, what was read for stores, what the index moved.
    fn lines(&self) -> [String; 3] {
        let some =
            |bytes: Option<u64>| bytes.map_or_else(|| "–".to_owned(), |bytes| BinaryBytes(bytes).to_string());
        let fills = |fills: &[FillsReport]| {
            let all = fills.iter().filter(|size| size.fills > 0).map(|size| {
                let bytes = size
                    .up_to_bytes
                    .map_or_else(|| "more".to_owned(), |bytes| format!("up to {}", BinaryBytes(bytes)));
                format!("{} of {bytes}", HumanCount(size.fills))
            });
            let all: Vec<_> = all.collect();
            if all.is_empty() { "none".to_owned() } else { all.join(", ") }
        };
        let (read, index) = (&self.reads_for_writes, &self.index);
        [
            format!(
                "access  one is a page filled (4 KiB) or the read-ahead, not a 64-byte load; fills of base: {}; of views: {}",
                fills(&self.base_fills),
                fills(&self.view_fills)
            ),
            format!(
                "writes  read first in {} reads: {} stored (gcomp {}, plain {}) and {} of index (gcomp {})",
                HumanCount(read.reads),
                BinaryBytes(read.stored_bytes_fetched),
                some(read.gcomp_bytes_fetched),
                BinaryBytes(read.plain_bytes_fetched),
                BinaryBytes(read.index_bytes_fetched),
                some(read.gcomp_index_bytes_fetched)
            ),
            format!(
                "index   {} fetched, {} written (gcomp {}, {})",
                BinaryBytes(index.bytes_fetched),
                BinaryBytes(index.bytes_written),
                some(index.gcomp_bytes_fetched),
                some(index.gcomp_bytes_written)
            ),
        ]
    }

    /// Of the device's counters.
    ///
    /// # Errors
    /// When they lack one.
    pub fn of(stats: &serde_json::Value) -> serde_json::Result<Self> {
        serde_json::from_value(serde_json::json!({
            "base_fills": stats["requests"]["base_fills"],
            "view_fills": stats["requests"]["view_fills"],
            "reads_for_writes": stats["reads_for_writes"],
            "index": stats["index"],
        }))
    }
}

impl InterleaveReport {
    /// A line of them all and one of each.
    fn lines(&self) -> impl Iterator<Item = String> {
        let all = format!(
            "devices {} by {}, imbalance {}; modelled at {} GB/s each: {} GB/s of plain bytes",
            self.ways,
            BinaryBytes(self.granule_bytes),
            ratio(self.imbalance),
            self.modelled_device_gbs,
            ratio(self.modelled_region_gbs)
        );
        let each = self.devices.iter().map(|member| {
            format!(
                "  {}: {} fetched ({} plain) in {} reads, {} stored for {} in {} writes, modelled {} GB/s",
                member.device,
                BinaryBytes(member.stored_bytes_fetched),
                BinaryBytes(member.plain_bytes_fetched),
                HumanCount(member.reads),
                BinaryBytes(member.stored_bytes_written),
                BinaryBytes(member.written_bytes),
                HumanCount(member.writes),
                ratio(member.modelled_gbs)
            )
        });
        std::iter::once(all).chain(each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_was_right_and_whose_file_is_missing_is_not_good_and_not_called_wrong() {
        let device = serde_json::json!({
            "mode": "trace", "codec": "tree", "gcomp_codec": null, "capacity_bytes": 0, "logical_bytes": 0,
            "stored_bytes": 0, "index_bytes": 0, "ratio": null,
        });
        let decode = serde_json::json!({
            "tokens": 3, "text": "five", "text_sha256": "", "identical_to_reference": true, "perplexity": {},
            "policy_perplexity": {}, "stored_bytes_fetched": 0, "plain_bytes_fetched": 0, "page_tokens": 1,
            "flush_every": 1, "evicted_each_step": false, "runs": [], "unsaved": "cannot write K and V to /x\u{7}",
        });
        let device = serde_json::from_value(device).unwrap();
        let decode: DecodeReport = serde_json::from_value(decode).unwrap();
        let saved = DecodeReport { unsaved: None, ..decode.clone() };
        let report = |decode| Report { decode: Some(decode), ..Report::of(GuestReport::default(), device) };
        let report = report(decode);
        let text = report.to_text();
        assert!(!report.good());
        assert!(
            text.ends_with(
                "problem cannot write K and V to /x\\u{7}\nevery logit that was compared was right"
            ),
            "{text}"
        );
        assert!(Report { decode: Some(saved), ..report }.good());
    }

    #[test]
    fn traffic_is_told_by_name_with_the_codec_of_gcomp_and_what_one_access_is() {
        let stats = serde_json::json!({
            "requests": {
                "base_fills": [{ "up_to_bytes": 4096, "fills": 3 }, { "up_to_bytes": null, "fills": 2 }],
                "view_fills": [{ "up_to_bytes": 4096, "fills": 0 }],
            },
            "reads_for_writes": {
                "reads": 7, "stored_bytes_fetched": 1024, "plain_bytes_fetched": 64, "gcomp_bytes_fetched": 2048,
                "index_bytes_fetched": 128, "gcomp_index_bytes_fetched": 192, "bytes": 1,
            },
            "index": {
                "hits": 1, "bytes_fetched": 256, "bytes_written": 320, "gcomp_bytes_fetched": null,
                "gcomp_bytes_written": 384,
            },
        });
        let device = DeviceReport {
            mode: "trace".into(),
            codec: "tree".into(),
            gcomp_codec: Some("lz4".into()),
            capacity_bytes: 0,
            logical_bytes: 0,
            stored_bytes: 0,
            index_bytes: 0,
            ratio: None,
        };
        let view = ViewReport {
            tensor: "t".into(),
            view: "full".into(),
            elements: 1,
            bytes: 4096,
            sha256: String::new(),
            matches: true,
            planes_fetched: 16,
            stored_bytes_fetched: 2048,
            plain_bytes_fetched: 4096,
            gcomp_bytes_fetched: Some(3072),
            index_bytes_fetched: 1024,
            gcomp_index_bytes_fetched: Some(64),
            staged_bytes: 0,
            of_plain: Some(0.5),
            of_plain_with_index: Some(0.75),
            seconds: 1.0,
        };
        let traffic = Some(TrafficReport::of(&stats).unwrap());
        let report = Report { traffic, views: vec![view], ..Report::of(GuestReport::default(), device) };
        let text = report.to_text();
        for said in [
            "not a 64-byte load; fills of base: 3 of up to 4.00 KiB, 2 of more; of views: none",
            "7 reads: 1.00 KiB stored (gcomp 2.00 KiB, plain 64 B) and 128 B of index (gcomp 192 B)",
            "256 B fetched, 320 B written (gcomp –, 384 B)",
            "gcomp (lz4)",
            "50.0 %",
            "75.0 %",
        ] {
            assert!(text.contains(said), "{said}: {text}");
        }
        let mut lacking = stats;
        lacking["index"]["bytes_written"].take();
        assert!(TrafficReport::of(&lacking).is_err());
    }
}
