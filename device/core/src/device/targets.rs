//! The base window by targets: what each CXL memory device of an interleave set shows of it.
//!
//! The rules:
//! * A target's byte is a byte of the base window, at the place that [`Interleave`] gives; nothing
//!   is stored by targets. So tensors and their blocks are whole, whoever wrote them, and views
//!   know nothing of targets.
//! * A read of a target gathers: it takes its part of every block under it. What it decoded of a
//!   block and does not give is kept for the other targets' reads ([`super::decoded`]), as they
//!   come next.
//! * A write to a target scatters: all that it changes of a block, or stages of a KV window, is
//!   changed at once.

use std::{ops::Range, time::Instant};

use lamina_abi::Interleave;

use super::{
    Device, DeviceError, Map, Window,
    coding::{FetchError, Region, Wanted, owner},
    locate,
    reads::format_of,
    scratch::Request,
};
use crate::stats::Tally;
use lamina_codec::{BLOCK_BYTES, BlockWords, plane::PlaneMask};
use lamina_store::mode::Mode;

/// What a request for a target needs of one block: places in the block, in order.
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

    /// Fills `out` from `offset` of `target` on.
    ///
    /// # Errors
    /// As [`Device::read_base`]; [`DeviceError::PastWindow`] also for a target that there is not.
    pub fn read_target(&self, target: u32, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let begun = Instant::now();
        let shares = self.shares(target, offset, out.len())?;
        let mut request = Request::new(&self.blocks.pool);
        let mut total = Tally::default();
        let mut rest = &mut out[..];
        for share in &shares {
            let mut words = [0; BLOCK_BYTES];
            let map = loop {
                let map = self.map();
                request.tally = Tally::default();
                match self.fetch_share(&map, share, &mut words, &mut request) {
                    Ok(()) => break map,
                    Err(FetchError::Stale) => {}
                    Err(FetchError::Failed(why) | FetchError::Damaged { why, .. }) => return Err(why),
                }
            };
            let mut given = 0;
            for part in &share.parts {
                let (into, after) = rest.split_at_mut(part.len());
                into.copy_from_slice(&words[part.clone()]);
                (rest, given) = (after, given + part.len() as u64);
            }
            if let Some(tensor) = owner(&map, share.block) {
                tensor.traffic.count(given, &request.tally);
            }
            total.add(&request.tally);
        }
        self.accounts.count_read(&self.accounts.stats.base, out.len() as u64, &total);
        self.accounts.stats.base_fills.count(out.len() as u64);
        self.accounts.stats.base_read_times.count(begun);
        Ok(())
    }

    /// The words of a block, as far as the share needs them.
    fn fetch_share(
        &self,
        map: &Map,
        share: &Share,
        words: &mut BlockWords,
        request: &mut Request<'_>,
    ) -> Result<(), FetchError> {
        let tensor = owner(map, share.block);
        let region = Region::of(self, tensor);
        let mask = PlaneMask::all(format_of(tensor));
        let mut fetch = |inside: &Range<usize>, requested: &[Range<usize>], first: bool| {
            let mut all = [0; BLOCK_BYTES];
            let wanted = Wanted {
                block: share.block,
                next: None,
                mask,
                inside: inside.clone(),
                requested,
                keep: true,
                view: None,
                first,
            };
            self.fetch(map, &region, tensor, &wanted, &mut all, request)?;
            words[inside.clone()].copy_from_slice(&all[inside.clone()]);
            Ok(())
        };
        // Other modes keep nothing decoded, and fetch a block once for a request.
        match self.config.mode {
            Mode::GComp | Mode::Plain => fetch(&(0..BLOCK_BYTES), &share.parts, true),
            // A generic device, too, fetches the block once, and a buffer holds all of it.
            Mode::Trace => share
                .parts
                .iter()
                .enumerate()
                .try_for_each(|(n, part)| fetch(part, std::slice::from_ref(part), n == 0)),
        }
    }

    /// Stores `data` from `offset` of `target` on.
    ///
    /// # Errors
    /// As [`Device::write_base`]; [`DeviceError::PastWindow`] also for a target that there is not.
    pub fn write_target(&self, target: u32, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.write_back_target(target, offset, data, &mut 0)
    }

    /// As [`Device::write_back`], to `target`.
    ///
    /// # Errors
    /// As [`Device::write_target`].
    pub fn write_back_target(
        &self,
        target: u32,
        offset: u64,
        data: &[u8],
        done: &mut usize,
    ) -> Result<(), DeviceError> {
        let begun = Instant::now();
        let left = data.get(*done..).unwrap_or_default();
        let shares = self.shares(target, offset.saturating_add(*done as u64), left.len())?;
        let written = self.scatter(&shares, left, done);
        self.events.note(&written, self.look());
        written?;
        self.accounts.stats.base_writes.add(1);
        self.accounts.stats.base_written_bytes.add(data.len() as u64);
        self.accounts.stats.base_write_times.count(begun);
        self.accounts.observers.wrote_target(target, data.len() as u64);
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
            Region::of(self, owner(&map, share.block)).coding().write_pieces(share.block, &pieces, done)?;
        }
        Ok(())
    }

    /// What a request for `length` bytes from `offset` of `target` on needs, block by block.
    fn shares(&self, target: u32, offset: u64, length: usize) -> Result<Vec<Share>, DeviceError> {
        let set = self.set().filter(|set| target < set.ways());
        let size = set.map_or(0, |set| set.before(target, self.config.base_bytes));
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
        for piece in set.pieces(target, offset..end) {
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
}

#[cfg(test)]
mod tests;
