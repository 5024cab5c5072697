//! A serving system whose nodes share KV caches in one memory, or keep their own: time to first
//! token, and throughput. What of a request was hit is measured elsewhere and given here; what is
//! computed here is *modelled*.
//!
//! A node prefills one request at a time, in the order in which requests come. It fetches what was
//! hit, then computes the rest: `tokens · FLOP / (FLOP/s)`, attention not counted. A device answers
//! in the order in which it is asked, and a node's own path bounds what it gets in all. Stores of
//! new blocks and the generation of tokens cost nothing here: the former go on behind the prefill
//! (seeds/004, 6.2), and the latter is the same for all.

use serde::Serialize;

use crate::ModelError;
use crate::number::{float, within};

/// The unit that is interleaved over devices: bytes (seeds/004, 5.3).
pub const INTERLEAVE: u64 = 2 << 20;

/// What a node computes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Compute {
    /// Floating-point operations a second, as a prefill reaches them.
    pub flops: f64,
    /// Operations a token: twice the active parameters.
    pub token_flop: f64,
}

/// The memory that holds KV caches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// Each node's own: GB/s between it and the node.
    Local {
        /// GB/s.
        node_gbs: f64,
    },
    /// Devices that all nodes share.
    Pool {
        /// GB/s between a node and all devices.
        node_gbs: f64,
        /// How many devices.
        devices: u32,
        /// GB/s of a device.
        device_gbs: f64,
        /// Bytes of words in a stored byte. The path to a node carries words.
        ratio: f64,
        /// Bytes of all devices, which addresses are spread over.
        bytes: u64,
        /// Whether addresses go round the devices, [`INTERLEAVE`] bytes each. Else each device has
        /// a range of them.
        interleaved: bool,
        /// GB/s of the first device that others take.
        background_gbs: f64,
    },
}

/// A request as a node gets it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Seconds after the beginning.
    pub arrival: f64,
    /// The node that does it.
    pub node: usize,
    /// Tokens that are computed.
    pub computed: u64,
    /// Where what was hit lies, and how long it is as it is stored: bytes.
    pub hits: Vec<(u64, u64)>,
}

/// What became of all requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// Seconds from arrival to the first token: mean.
    pub ttft_mean: f64,
    /// The median.
    pub ttft_p50: f64,
    /// What one in a hundred exceeds.
    pub ttft_p99: f64,
    /// Seconds that a request's fetch took, mean.
    pub fetch_mean: f64,
    /// Requests a second, from the first arrival to the last first token.
    pub requests_per_second: f64,
}

/// Seconds that tokens take to be computed.
pub fn prefill(compute: &Compute, tokens: u64) -> f64 {
    float(tokens) * compute.token_flop / compute.flops
}

/// Models requests in the order of their arrival, on so many nodes.
///
/// # Errors
/// The parameter that is absurd.
pub fn serve(
    nodes: usize,
    compute: &Compute,
    memory: &Memory,
    requests: &[Request],
) -> Result<Times, ModelError> {
    check(nodes, compute, memory, requests)?;
    let mut queues = vec![std::collections::VecDeque::new(); nodes];
    for request in requests {
        queues[request.node].push_back(request);
    }
    let mut free = vec![0.0_f64; nodes];
    let mut devices = Devices::new(memory);
    let (mut waits, mut fetched, mut end) = (Vec::with_capacity(requests.len()), 0.0, 0.0_f64);
    // The node that begins next: a device is asked in the order of time.
    let next = |queues: &[std::collections::VecDeque<&Request>], free: &[f64]| {
        let starts = queues.iter().zip(free).enumerate();
        let starts =
            starts.filter_map(|(node, (queue, free))| Some((node, queue.front()?.arrival.max(*free))));
        starts.min_by(|one, other| one.1.total_cmp(&other.1))
    };
    while let Some((node, start)) = next(&queues, &free) {
        let Some(request) = queues[node].pop_front() else { break };
        let there = devices.fetch(start, &request.hits);
        let done = there + prefill(compute, request.computed);
        free[node] = done;
        fetched += there - start;
        end = end.max(done);
        waits.push(done - request.arrival);
    }
    Ok(summary(waits, fetched, end - requests.first().map_or(0.0, |request| request.arrival)))
}

fn check(nodes: usize, compute: &Compute, memory: &Memory, requests: &[Request]) -> Result<(), ModelError> {
    let rates = 1e-3..=1e6;
    within("flops", compute.flops, 1e6..=1e21)?;
    within("token_flop", compute.token_flop, 1.0..=1e18)?;
    match *memory {
        Memory::Local { node_gbs } => within("node_gbs", node_gbs, rates)?,
        Memory::Pool { node_gbs, devices, device_gbs, ratio, bytes, background_gbs, .. } => {
            within("ratio", ratio, 1.0..=1e3)?;
            within("node_gbs", node_gbs, rates.clone())?;
            within("device_gbs", device_gbs, rates)?;
            within("devices", f64::from(devices), 1.0..=1024.0)?;
            within("bytes", float(bytes), 1.0..=1e18)?;
            // A device that has nothing left would never answer.
            within("background_gbs", background_gbs, 0.0..=device_gbs * 0.99)?
        }
    };
    match requests.iter().map(|request| request.node).max() {
        Some(node) if node >= nodes => {
            Err(ModelError::field("node", &node, &format!("less than the nodes, {nodes}")))
        }
        _ => Ok(()),
    }
}

/// Devices, each with the time from which on it is free.
struct Devices<'m> {
    memory: &'m Memory,
    free: Vec<f64>,
}

impl<'m> Devices<'m> {
    fn new(memory: &'m Memory) -> Self {
        let count = if let Memory::Pool { devices, .. } = memory { *devices as usize } else { 0 };
        Self { memory, free: vec![0.0; count] }
    }

    /// When all ranges are with a node that asks for them at `start`.
    fn fetch(&mut self, start: f64, ranges: &[(u64, u64)]) -> f64 {
        let bytes: u64 = ranges.iter().map(|range| range.1).sum();
        match *self.memory {
            Memory::Local { node_gbs } => start + float(bytes) / (node_gbs * 1e9),
            Memory::Pool { node_gbs, device_gbs, ratio, background_gbs, .. } => {
                let mut there = start + float(bytes) * ratio / (node_gbs * 1e9);
                for (device, bytes) in self.split(ranges).into_iter().enumerate().filter(|part| part.1 > 0) {
                    let taken = if device == 0 { background_gbs } else { 0.0 };
                    let free = start.max(self.free[device]) + float(bytes) / ((device_gbs - taken) * 1e9);
                    self.free[device] = free;
                    there = there.max(free);
                }
                there
            }
        }
    }

    /// Bytes of ranges in each device.
    fn split(&self, ranges: &[(u64, u64)]) -> Vec<u64> {
        let Memory::Pool { devices, bytes, interleaved, .. } = *self.memory else { return Vec::new() };
        let unit = if interleaved { INTERLEAVE } else { bytes.div_ceil(u64::from(devices)).max(1) };
        let mut parts = vec![0; devices as usize];
        for &(at, length) in ranges {
            let (mut at, mut left) = (at % bytes.max(1), length);
            while left > 0 {
                let step = left.min(unit - at % unit);
                let device = usize::try_from(at / unit % u64::from(devices)).unwrap_or_default();
                parts[device] += step;
                (at, left) = (at + step, left - step);
            }
        }
        parts
    }
}

fn summary(mut waits: Vec<f64>, fetched: f64, seconds: f64) -> Times {
    if waits.is_empty() {
        return Times::default();
    }
    waits.sort_by(f64::total_cmp);
    let count = waits.len();
    let at = |hundredths: usize| waits[(count * hundredths).div_ceil(100).clamp(1, count) - 1];
    let of = float(count as u64);
    Times {
        ttft_mean: waits.iter().sum::<f64>() / of,
        ttft_p50: at(50),
        ttft_p99: at(99),
        fetch_mean: fetched / of,
        requests_per_second: if seconds > 0.0 { of / seconds } else { 0.0 },
    }
}

#[cfg(test)]
mod tests;
