//! Traces of others, a line an access.
//!
//! * `DRAMSim3`: `0x1F40 READ 120`, the address of a line, `READ` or `WRITE`, and the cycle.
//! * `Ramulator 2`, its front end `LoadStoreTrace`: `LD 0x1F40` or `ST 0x1F40`, one a cycle.

use std::fmt::Write as _;

use super::MAX_TIME_NS;
use crate::ModelError;

/// Whose form a text has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Of DRAMSim3.
    Dramsim3,
    /// Of Ramulator 2.
    Ramulator2,
}

/// One access of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineAccess {
    /// Where, in bytes.
    pub address: u64,
    /// Whether it is written.
    pub write: bool,
    /// When, in cycles; where a form has no times, its number.
    pub cycle: u64,
}

impl Form {
    /// Writes an access behind others.
    pub fn write(self, out: &mut String, access: &LineAccess) {
        let LineAccess { address, write, cycle } = *access;
        let _ = match self {
            Self::Dramsim3 => {
                writeln!(out, "{address:#X} {} {cycle}", if write { "WRITE" } else { "READ" })
            }
            Self::Ramulator2 => writeln!(out, "{} {address:#x}", if write { "ST" } else { "LD" }),
        };
    }

    /// Reads line `number` of a text; none if it is empty or a comment.
    ///
    /// # Errors
    /// The line, and which field of it is wrong.
    pub fn read(self, number: u64, line: &str) -> Result<Option<LineAccess>, ModelError> {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            return Ok(None);
        }
        let mut fields = line.split_whitespace();
        let mut next = |name: &str| fields.next().ok_or_else(|| ModelError::missing(&at(number, name)));
        let access = match self {
            Self::Dramsim3 => {
                let address = hexadecimal(number, next("address")?)?;
                let write = kind(number, next("access")?, ["READ", "WRITE"])?;
                let cycle = next("cycle")?;
                let parsed = cycle.parse().ok().filter(|cycle| *cycle <= MAX_TIME_NS);
                let cycle = parsed.ok_or_else(|| {
                    let must = format!("a whole number, at most {MAX_TIME_NS}");
                    ModelError::field(&at(number, "cycle"), cycle, &must)
                })?;
                LineAccess { address, write, cycle }
            }
            Self::Ramulator2 => {
                let write = kind(number, next("access")?, ["LD", "ST"])?;
                let address = next("address")?;
                let hex = address.starts_with("0x") || address.starts_with("0X");
                let address = if hex { hexadecimal(number, address)? } else { decimal(number, address)? };
                LineAccess { address, write, cycle: number }
            }
        };
        match fields.next() {
            None => Ok(Some(access)),
            Some(more) => Err(ModelError::field(&at(number, "end"), more, "nothing more")),
        }
    }
}

fn at(number: u64, field: &str) -> String {
    format!("{field} of line {}", number + 1)
}

fn kind(number: u64, text: &str, [read, write]: [&str; 2]) -> Result<bool, ModelError> {
    match text {
        text if text == read => Ok(false),
        text if text == write => Ok(true),
        other => Err(ModelError::field(&at(number, "access"), other, &format!("{read} or {write}"))),
    }
}

fn hexadecimal(number: u64, text: &str) -> Result<u64, ModelError> {
    let digits = text.trim_start_matches("0x").trim_start_matches("0X");
    u64::from_str_radix(digits, 16)
        .map_err(|_| ModelError::field(&at(number, "address"), text, "hexadecimal, of 64 bits"))
}

fn decimal(number: u64, text: &str) -> Result<u64, ModelError> {
    text.parse().map_err(|_| ModelError::field(&at(number, "address"), text, "a whole number of 64 bits"))
}
