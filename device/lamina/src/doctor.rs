//! `lamina doctor`: what this host has of what the device needs, what is missing, and the command
//! that mends it.
//!
//! Each check is a function of what was found out, so that tests can give it any host.

mod checks;

use anyhow::Result;
use serde::Serialize;
use serde_json::json;

use crate::args::Doctor;
use crate::out::{print_json, print_line};
use crate::status::Status;
use crate::table::new_table;

/// Whether something is as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// The device works; something does not, or is slow.
    Limited,
    /// The device cannot be mounted.
    Missing,
}

impl Verdict {
    fn text(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Limited => "limited",
            Self::Missing => "missing",
        }
    }
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Finding {
    what: &'static str,
    verdict: Verdict,
    found: String,
    /// What follows from it, for who uses the device.
    means: String,
    /// A command, if one mends it.
    mend: Option<String>,
}

impl Finding {
    fn ok(what: &'static str, found: impl Into<String>, means: impl Into<String>) -> Self {
        Self { what, verdict: Verdict::Ok, found: found.into(), means: means.into(), mend: None }
    }

    fn limited(what: &'static str, found: impl Into<String>, means: impl Into<String>) -> Self {
        Self { verdict: Verdict::Limited, ..Self::ok(what, found, means) }
    }

    fn missing(what: &'static str, found: impl Into<String>, means: impl Into<String>) -> Self {
        Self { verdict: Verdict::Missing, ..Self::ok(what, found, means) }
    }

    fn mended_by(self, command: impl Into<String>) -> Self {
        Self { mend: Some(command.into()), ..self }
    }
}

/// Looks at this host and prints what is found.
///
/// # Errors
/// When it cannot be printed.
pub(crate) fn doctor(args: &Doctor) -> Result<Status> {
    let findings = checks::all();
    let worst = findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Ok);
    if args.json {
        print_json(&json!({ "verdict": worst, "findings": findings }))?;
    } else {
        print(&findings)?;
    }
    Ok(match worst {
        Verdict::Ok => Status::Done,
        Verdict::Limited => Status::Limited,
        Verdict::Missing => Status::Missing,
    })
}

fn print(findings: &[Finding]) -> Result<()> {
    let mut table = new_table(&["what", "is", "found", "means"], 4);
    for finding in findings {
        table.add_row([finding.what, finding.verdict.text(), &finding.found, &finding.means]);
    }
    print_line!("{table}")?;
    let mends = findings.iter().filter_map(|finding| Some((finding.what, finding.mend.as_ref()?)));
    for (number, (what, command)) in mends.enumerate() {
        if number == 0 {
            print_line!("\nWhat mends it:")?;
        }
        print_line!("  {what}: {command}")?;
    }
    Ok(())
}
