//! The base window by lanes: what each CXL memory device of an interleave set shows of it.
//!
//! The rules:
//! * A lane's byte is a byte of the base window, at the place that [`Interleave`] gives; nothing is stored by lanes. So tensors and their blocks are whole, whoever
//!   wrote them, and views know nothing of lanes.
//! * A read of a lane gathers: it takes its part of every block under it. What it decoded of a block and does not give is kept for the other lanes' reads
//!   ([`super::decoded`]), as they come next.
//! * A write to a lane scatters: all that it changes of a block, or stages of a KV window, is changed at once.

use std::ops::Range;

use lamina_abi::Interleave;

use super::{Device, DeviceError, Map, Window, lines, locate, windowed};
use crate::stats::{Tally, Traffic};
use lamina_codec::{BLOCK_BYTES, format::Format, plane::PlaneMask};
use lamina_store::mode::Mode;

/// What a request for a lane needs of one block: places in the block, in order.
struct Share {
    block: u64,
    parts: Vec<Range<usize>>,
}

impl Device {
    /// The interleave set that the base window is shown by, if it is.
    pub fn set(&self) -> Option<Interleave> {
        self.config
            .interleaving
            .map(|interleaving| interleaving.interleave)
            .filter(|interleave| interleave.is_set())
    }

    /// Fills `out` from `offset` of `lane` on.
    ///
    /// # Errors
    /// As [`Device::read_base`]; [`DeviceError::PastWindow`] also for a lane that there is not.
    pub fn read_lane(&self, lane: u32, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let shares = self.shares(lane, offset, out.len())?;
        let mut total = Tally::default();
        let mut rest = &mut out[..];
        for share in &shares {
            let (mut words, mut map) = ([0; BLOCK_BYTES], self.map());
            let tally = loop {
                match self.fetch_share(&map, share, &mut words)? {
                    Some(tally) => break tally,
                    None => map = self.map(),
                }
            };
            let mut given = 0;
            for part in &share.parts {
                let (into, after) = rest.split_at_mut(part.len());
                into.copy_from_slice(&words[part.clone()]);
                (rest, given) = (after, given + part.len() as u64);
            }
            if let Some(tensor) = map.tensor_at(share.block * BLOCK_BYTES as u64) {
                tensor.traffic.count(given, &tally);
            }
            total.add(&tally);
        }
        self.count_read(&self.stats.base, out.len() as u64, &total);
        self.stats.base_fills.count(out.len() as u64);
        Ok(())
    }

    /// The words of a block, as far as the share needs them. `None` if the map is out of date.
    fn fetch_share(
        &self,
        map: &Map,
        share: &Share,
        words: &mut [u8; BLOCK_BYTES],
    ) -> Result<Option<Tally>, DeviceError> {
        let tensor = map.tensor_at(share.block * BLOCK_BYTES as u64);
        let format = tensor.map_or(Format::Opaque, |tensor| tensor.info.format);
        let mask = PlaneMask::all(format);
        let mut total = Tally::default();
        // Other modes keep nothing decoded, and fetch a block once for a request.
        let (fetches, whole) = match self.config.mode {
            Mode::Trace => (share.parts.as_slice(), false),
            Mode::GComp | Mode::Plain => (&share.parts[..1], true),
        };
        for (n, part) in fetches.iter().enumerate() {
            let inside = if whole { 0..BLOCK_BYTES } else { part.clone() };
            let mut tally = Tally::default();
            for part in if whole { &share.parts } else { std::slice::from_ref(part) } {
                self.add_plain(share.block, part.start, part.len(), &mut tally);
            }
            let mut all = [0; BLOCK_BYTES];
            let found = match tensor.filter(|tensor| tensor.windows.is_some()) {
                None => self.fetch_part(share.block, format, inside.clone(), mask, &mut all, &mut tally)?,
                Some(tensor) => {
                    self.fetch_from_window(tensor, share.block, inside.clone(), mask, &mut all, &mut tally)?
                }
            };
            if !found {
                return Ok(None);
            }
            words[inside.clone()].copy_from_slice(&all[inside]);
            tally.settle_staged(&Tally::default());
            if n > 0 {
                // A generic device, too, fetches the block once, and a buffer holds all of it.
                (tally.gcomp, tally.gcomp_index_hits, tally.gcomp_index_misses) = (0, 0, 0);
                tally.staged_blocks = 0;
            }
            total.add(&tally);
        }
        Ok(Some(total))
    }

    /// Stores `data` from `offset` of `lane` on.
    ///
    /// # Errors
    /// As [`Device::write_base`]; [`DeviceError::PastWindow`] also for a lane that there is not.
    pub fn write_lane(&self, lane: u32, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.write_back_lane(lane, offset, data, &mut 0)
    }

    /// As [`Device::write_back`], to `lane`.
    ///
    /// # Errors
    /// As [`Device::write_lane`].
    pub fn write_back_lane(
        &self,
        lane: u32,
        offset: u64,
        data: &[u8],
        done: &mut usize,
    ) -> Result<(), DeviceError> {
        let left = data.get(*done..).unwrap_or_default();
        let shares = self.shares(lane, offset.saturating_add(*done as u64), left.len())?;
        let written = self.scatter(&shares, left, done);
        self.events.note(&written, self.look());
        written?;
        self.stats.base_writes.add(1);
        self.stats.base_written_bytes.add(data.len() as u64);
        if let Some(members) = &self.members {
            members.count_lane_write(lane, data.len() as u64);
        }
        Ok(())
    }

    /// Stores `data`, share by share, and moves `done` by what is stored.
    fn scatter(&self, shares: &[Share], mut data: &[u8], done: &mut usize) -> Result<(), DeviceError> {
        for share in shares {
            let mut pieces = Vec::with_capacity(share.parts.len());
            for part in &share.parts {
                let (piece, after) = data.split_at(part.len());
                pieces.push((part.start, piece));
                data = after;
            }
            let map = self.map.read();
            let begin = share.block * BLOCK_BYTES as u64;
            let Some((tensor, shape)) = windowed(&map, begin) else {
                self.write_block(&map, share.block, &pieces)?;
                *done += pieces.iter().map(|(_, piece)| piece.len()).sum::<usize>();
                continue;
            };
            for (inside, piece) in pieces {
                // A block lies in one window.
                *done += self.stage(&map, tensor, shape, begin + inside as u64, piece)?;
            }
        }
        Ok(())
    }

    /// What a request for `length` bytes from `offset` of `lane` on needs, block by block.
    fn shares(&self, lane: u32, offset: u64, length: usize) -> Result<Vec<Share>, DeviceError> {
        let set = self.set().filter(|set| lane < set.ways());
        let size = set.map_or(0, |set| set.before(lane, self.config.base_bytes));
        let end = offset.checked_add(length as u64).filter(|end| *end <= size);
        let (Some(set), Some(end)) = (set, end) else {
            return Err(DeviceError::PastWindow {
                window: Window::Base,
                offset,
                length: length as u64,
                size,
            });
        };
        let mut shares: Vec<Share> = Vec::new();
        for piece in set.pieces(lane, offset..end) {
            let mut at = piece.start;
            while at < piece.end {
                let (block, inside) = locate(at);
                let length = usize::try_from(piece.end - at).unwrap_or(usize::MAX).min(BLOCK_BYTES - inside);
                let part = inside..inside + length;
                match shares.last_mut() {
                    Some(last) if last.block == block => last.parts.push(part),
                    _ => shares.push(Share { block, parts: vec![part] }),
                }
                at += length as u64;
            }
        }
        Ok(shares)
    }

    /// Adds the lines that `length` bytes from `inside` of `block` on touch, as what a plain device would fetch.
    pub(super) fn add_plain(&self, block: u64, inside: usize, length: usize, tally: &mut Tally) {
        tally.plain += lines(inside, length);
        if let Some(members) = &self.members {
            members.add_plain(block, inside, length, tally);
        }
    }

    /// Adds what was fetched of the bytes that are stored for `block`.
    pub(super) fn add_stored(&self, block: u64, bytes: u64, tally: &mut Tally) {
        tally.stored += bytes;
        if let Some(members) = &self.members {
            members.add_stored(block, bytes, tally);
        }
    }

    /// Counts a read of a window that gave `bytes`: there, at the index, and at each of the devices that the region is interleaved over, if it is.
    pub(super) fn count_read(&self, window: &Traffic, bytes: u64, tally: &Tally) {
        window.count(bytes, tally);
        self.stats.count_index(tally);
        if let Some(members) = &self.members {
            members.count_read(tally);
        }
    }
}

#[cfg(test)]
mod tests;
