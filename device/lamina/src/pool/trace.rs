//! Traces of requests to a serving system: what Mooncake published (JSON lines, with the blocks of
//! each prompt), and what Azure did (CSV, with lengths only).

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use time::PrimitiveDateTime;
use time::macros::format_description;

/// Tokens of a block in Mooncake's traces, and here.
pub(super) const BLOCK_TOKENS: u64 = 512;
/// Tokens that a prompt may have.
const MAX_TOKENS: u64 = 100_000_000;

/// Blocks that the prompts of a trace of lengths may have in all.
const MAX_BLOCKS: u64 = 32 << 20;

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Request {
    /// Seconds after the first.
    pub(super) arrival: f64,
    /// Tokens of its prompt.
    pub(super) tokens: u64,
    /// Its prompt's blocks: the same number is the same block after the same ones.
    pub(super) blocks: Vec<u64>,
}

/// A trace.
#[derive(Debug)]
pub(super) struct Trace {
    /// In the order of their arrival.
    pub(super) requests: Vec<Request>,
    /// Whether it says which prompts begin alike.
    pub(super) has_blocks: bool,
}

/// A line of Mooncake's.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    hash_ids: Vec<u64>,
}

/// Reads a trace, `most` requests of it.
pub(super) fn read(path: &Path, most: usize) -> Result<Trace> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut trace = parse(&text, most).with_context(|| path.display().to_string())?;
    ensure!(!trace.requests.is_empty(), "{}: there is no request in it", path.display());
    trace.requests.sort_by(|one, other| one.arrival.total_cmp(&other.arrival));
    let first = trace.requests[0].arrival;
    for request in &mut trace.requests {
        request.arrival -= first;
    }
    Ok(trace)
}

fn parse(text: &str, most: usize) -> Result<Trace> {
    // Azure's begins with a byte order mark at times.
    let text = text.trim_start_matches('\u{feff}');
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let lines = lines.map(|(number, line)| (number + 1, line.trim()));
    let has_blocks = text.trim_start().starts_with('{');
    let requests: Result<Vec<Request>> = if has_blocks {
        lines
            .take(most)
            .map(|(number, line)| of_mooncake(line).with_context(|| format!("line {number}")))
            .collect()
    } else {
        let mut next = 0;
        let mut lines = lines;
        let header = lines.next().map(|(_, line)| line.to_ascii_lowercase()).unwrap_or_default();
        if header != "timestamp,contexttokens,generatedtokens" {
            bail!(
                "it is no trace that is known: Mooncake's has objects of JSON with timestamp, input_length and hash_ids, Azure's begins with TIMESTAMP,ContextTokens,GeneratedTokens"
            );
        }
        lines
            .take(most)
            .map(|(number, line)| of_azure(line, &mut next).with_context(|| format!("line {number}")))
            .collect()
    };
    Ok(Trace { requests: requests.and_then(bounded)?, has_blocks })
}

fn bounded(requests: Vec<Request>) -> Result<Vec<Request>> {
    for (number, request) in requests.iter().enumerate() {
        ensure!(
            request.tokens <= MAX_TOKENS,
            "request {number} has {} tokens; {MAX_TOKENS} are the most",
            request.tokens
        );
        ensure!(
            request.arrival.is_finite() && request.arrival.abs() < 1e15,
            "request {number} comes after {} seconds",
            request.arrival
        );
    }
    Ok(requests)
}

fn of_mooncake(line: &str) -> Result<Request> {
    let Line { timestamp, input_length, hash_ids } = serde_json::from_str(line)?;
    let blocks = input_length.div_ceil(BLOCK_TOKENS);
    ensure!(
        hash_ids.len() as u64 == blocks,
        "{input_length} tokens are {blocks} blocks of {BLOCK_TOKENS}, and hash_ids has {}",
        hash_ids.len()
    );
    Ok(Request { arrival: timestamp / 1000.0, tokens: input_length, blocks: hash_ids })
}

/// A request of whose blocks nothing is known: each is one that no other request has.
fn of_azure(line: &str, next: &mut u64) -> Result<Request> {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second].[subsecond]");
    let mut fields = line.split(',');
    let (Some(time), Some(tokens), Some(_), None) =
        (fields.next(), fields.next(), fields.next(), fields.next())
    else {
        bail!("it has not three fields");
    };
    let time = PrimitiveDateTime::parse(time, format).with_context(|| format!("{time:?} is no time"))?;
    let tokens: u64 = tokens.parse().with_context(|| format!("{tokens:?} is no number of tokens"))?;
    let first = *next;
    *next += tokens.min(MAX_TOKENS).div_ceil(BLOCK_TOKENS);
    ensure!(
        *next <= MAX_BLOCKS,
        "the prompts up to here have {next} blocks; {MAX_BLOCKS} are the most: give --requests"
    );
    let arrival = (time - PrimitiveDateTime::new(time::Date::MIN, time::Time::MIDNIGHT)).as_seconds_f64();
    Ok(Request { arrival, tokens, blocks: (first..*next).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Trace> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        read(file.path(), usize::MAX)
    }

    #[test]
    fn both_kinds_are_read_in_the_order_of_arrival() {
        let mooncake = "{\"timestamp\": 3000, \"input_length\": 513, \"output_length\": 1, \"hash_ids\": [0, 7]}\n\n\
                        {\"timestamp\": 1500, \"input_length\": 512, \"output_length\": 5, \"hash_ids\": [0]}\n";
        let trace = read_text(mooncake).unwrap();
        assert!(trace.has_blocks);
        let request = |arrival, tokens, blocks: &[u64]| Request { arrival, tokens, blocks: blocks.to_vec() };
        assert_eq!(trace.requests, [request(0.0, 512, &[0]), request(1.5, 513, &[0, 7])]);
        let azure = "\u{feff}TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
                     2023-11-16 23:59:59.9000000,600,10\r\n2023-11-17 00:00:00.4000000,1,2\r\n";
        let trace = read_text(azure).unwrap();
        assert!(!trace.has_blocks);
        assert_eq!(
            trace.requests.iter().map(|request| request.blocks.clone()).collect::<Vec<_>>(),
            [vec![0, 1], vec![2]]
        );
        assert!((trace.requests[1].arrival - 0.5).abs() < 1e-6);
    }

    #[test]
    fn what_is_no_trace_is_refused_by_its_line() {
        let refused = |text: &str| format!("{:#}", read_text(text).unwrap_err());
        let line = "{\"timestamp\": 0, \"input_length\": 513, \"hash_ids\": [0]}";
        assert!(refused(line).contains("line 1: 513 tokens are 2 blocks"), "{}", refused(line));
        assert!(refused("{\"timestamp\": 0}").contains("line 1: missing field"));
        assert!(refused("a,b\n").contains("no trace that is known"));
        assert!(refused("").contains("no trace that is known"));
        let azure = |line: &str| refused(&format!("TIMESTAMP,ContextTokens,GeneratedTokens\n{line}\n"));
        assert!(azure("yesterday,1,1").contains("\"yesterday\" is no time"));
        assert!(azure("2023-11-16 18:17:03.9,-1,1").contains("\"-1\" is no number"));
        assert!(azure("2023-11-16 18:17:03.9,1").contains("three fields"));
        let long = "2023-11-16 18:17:03.9,100000000,1\n".repeat(200);
        assert!(
            azure(&long).contains("line 173") && azure(&long).contains("give --requests"),
            "{}",
            azure(&long)
        );
        assert!(azure("2023-11-16 18:17:03.9,900000000000,1").contains("are the most"));
        assert!(azure("").contains("no request"));
        let most = parse("{\"timestamp\":0,\"input_length\":1,\"hash_ids\":[0]}\nno JSON", 1);
        assert_eq!(most.unwrap().requests.len(), 1);
    }
}
