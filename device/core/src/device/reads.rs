//! The walk of a load: which blocks a request needs, and what becomes of them.
//!
//! The rules:
//! * A request walks forward: the map says whose a block is, its owner's [coding](super::coding)
//!   fetches and decodes it, the view shows it. What a station finds that the map must decide comes
//!   back as a [`FetchError`].
//! * A read that finds its map stale begins again with the new one.
//! * What is decoded whole is decoded to where the reader wants it, without a copy.
//! * While a block outside KV windows is fetched and decoded, the next one that the request wants
//!   is prefetched: segments lie apart, so the processor would not guess that by itself.
//! * A request is counted when it is complete, with everything that was fetched for it.

use std::{ops::Range, sync::Arc, time::Instant};

use lamina_abi::DIRECTORY_BYTES;

use super::{
    Device, DeviceError, Window,
    blocks::clear_outside,
    coding::{FetchError, ReadFrom, Region, Wanted, is_current, owner},
    locate, poison,
    scratch::Request,
};
use crate::{
    stats::Tally,
    tensor::Tensor,
    window::{Alias, Map},
};
use lamina_codec::{BLOCK_BYTES, BlockWords, format::Format, plane::PlaneMask};
use lamina_store::entry::Entry;

impl Device {
    /// Fills `out` from `offset` of the base window on.
    ///
    /// # Errors
    /// [`DeviceError::PastWindow`], [`DeviceError::Damaged`], [`DeviceError::Store`].
    pub fn read_base(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let begun = Instant::now();
        self.inside(Window::Base, offset, out.len() as u64)?;
        let mut request = Request::new(&self.blocks.pool);
        let mut total = Tally::default();
        let mut done = 0;
        while done < out.len() {
            let map = self.map();
            let (at, rest) = (offset + done as u64, &mut out[done..]);
            let mut filled = 0;
            request.tally = Tally::default();
            let run = self.read_run(&map, at, rest, &mut filled, &mut request);
            if let Some(tensor) = map.tensor_at(at).filter(|_| filled > 0) {
                tensor.traffic.count(filled as u64, &request.tally);
            }
            total.add(&request.tally);
            done += filled;
            match run {
                Ok(()) | Err(FetchError::Stale) => {}
                Err(FetchError::Failed(why) | FetchError::Damaged { why, .. }) => return Err(why),
            }
        }
        self.accounts.count_read(&self.accounts.stats.base, out.len() as u64, &total);
        self.accounts.stats.base_fills.count(out.len() as u64);
        self.accounts.stats.base_read_times.count(begun);
        if let Some(partition) = self.accounts.counted_partition(offset) {
            partition.base_reads.count(out.len() as u64, &total);
        }
        Ok(())
    }

    /// Fills of `out` what one owner has from `at` of the base window on, and adds the bytes filled
    /// to `done`.
    fn read_run(
        &self,
        map: &Map,
        at: u64,
        out: &mut [u8],
        done: &mut usize,
        request: &mut Request<'_>,
    ) -> Result<(), FetchError> {
        let tensor = map.tensor_at(at);
        let region = Region::of(self, tensor);
        let end = usize::try_from(map.owner_end(at) - at).map_or(out.len(), |end| end.min(out.len()));
        let behind = (at + end as u64).div_ceil(BLOCK_BYTES as u64);
        let format = format_of(tensor);
        while *done < end {
            let (block, inside) = locate(at + *done as u64);
            let length = (BLOCK_BYTES - inside).min(end - *done);
            let part = &mut out[*done..*done + length];
            let inside = inside..inside + length;
            let wanted = Wanted {
                block,
                next: Some(block + 1).filter(|next| *next < behind),
                mask: PlaneMask::all(format),
                inside: inside.clone(),
                requested: std::slice::from_ref(&inside),
                keep: false,
                view: None,
                first: true,
            };
            if let Ok(words) = <&mut BlockWords>::try_from(&mut *part) {
                self.fetch(map, &region, tensor, &wanted, words, request)?;
            } else {
                let words = &mut [0; BLOCK_BYTES];
                self.fetch(map, &region, tensor, &wanted, words, request)?;
                part.copy_from_slice(&words[inside]);
            }
            *done += length;
        }
        Ok(())
    }

    /// Has the coding of `region`, which is `tensor`'s or nobody's, fetch one block. One that is
    /// damaged is poisoned, and shows its pattern. If this fails, nothing is in the tally of it.
    ///
    /// `region` and `tensor` are as `map` says.
    pub(super) fn fetch(
        &self,
        map: &Map,
        region: &Region<'_>,
        tensor: Option<&Arc<Tensor>>,
        wanted: &Wanted<'_>,
        words: &mut BlockWords,
        request: &mut Request<'_>,
    ) -> Result<(), FetchError> {
        let before = request.tally;
        // What needs its owner is coded anew when that goes, so the map is held meanwhile.
        let held = region.needs_owner().then(|| self.map.read());
        let is_stale =
            held.as_deref().zip(tensor).is_some_and(|(map, of)| !is_current(map, of, wanted.block));
        let read =
            if is_stale { Err(FetchError::Stale) } else { region.coding().read(wanted, words, request) };
        let read = match read {
            Ok(ReadFrom::Nothing) if held.is_none() => {
                self.settle_nothing(map, tensor, wanted, words, request, before)
            }
            read => read.map(drop),
        };
        drop(held);
        let read = match read {
            // Another owner's coding may know what to make of it.
            Err(FetchError::Damaged { .. }) if !self.is_owned_by(tensor, wanted.block) => {
                Err(FetchError::Stale)
            }
            Err(FetchError::Damaged { entry, why }) => {
                self.settle_damage(wanted.block, entry.as_deref(), &why).map(|()| {
                    words.fill(poison::PATTERN);
                    clear_outside(format_of(tensor), wanted.mask, words);
                })
            }
            read => read,
        };
        read.inspect_err(|_| request.tally = before)
    }

    /// Whether `block` is `tensor`'s, or nobody's, now.
    fn is_owned_by(&self, tensor: Option<&Arc<Tensor>>, block: u64) -> bool {
        owner(&self.map.read(), block).map(Arc::as_ptr) == tensor.map(Arc::as_ptr)
    }

    /// Makes sure that a block of which nothing was found was no KV window's meanwhile: if the map
    /// is another one than the request's, it is read again while that is held. `before` is the
    /// tally without what was fetched.
    fn settle_nothing(
        &self,
        map: &Map,
        tensor: Option<&Arc<Tensor>>,
        wanted: &Wanted<'_>,
        words: &mut BlockWords,
        request: &mut Request<'_>,
        before: Tally,
    ) -> Result<(), FetchError> {
        let now = self.map.read();
        // The request keeps its map, so no other one has its address.
        if std::ptr::eq(map, Arc::as_ptr(&now)) {
            return Ok(());
        }
        let owner = owner(&now, wanted.block);
        if owner.map(Arc::as_ptr) != tensor.map(Arc::as_ptr) {
            return Err(FetchError::Stale);
        }
        request.tally = before;
        Region::of(self, owner).coding().read(wanted, words, request).map(drop)
    }

    /// Poisons a block that was read by itself and found damaged by this entry, or has none that
    /// can be read. Stale, if it is of a KV window by now, or was written meanwhile.
    pub(super) fn settle_damage(
        &self,
        block: u64,
        entry: Option<&Entry>,
        why: &DeviceError,
    ) -> Result<(), FetchError> {
        let map = self.map.read();
        let owner = owner(&map, block);
        if Region::of(self, owner).is_windowed()
            || !self.blocks.lose_damaged(owner.map(|tensor| &**tensor), block, entry, why)
        {
            return Err(FetchError::Stale);
        }
        self.accounts.stats.damaged_reads.add(1);
        Ok(())
    }

    /// Fills `out` from `offset` of the views window on: directory, views, and zeros where neither
    /// is.
    ///
    /// # Errors
    /// As [`Device::read_base`].
    pub fn read_views(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let begun = Instant::now();
        let range = self.inside(Window::Views, offset, out.len() as u64)?;
        if range.is_empty() {
            return Ok(());
        }
        let mut request = Request::new(&self.blocks.pool);
        loop {
            match self.read_views_by(&self.map(), &range, out, &mut request) {
                Ok(()) => break,
                Err(FetchError::Stale) => {}
                Err(FetchError::Failed(why) | FetchError::Damaged { why, .. }) => return Err(why),
            }
        }
        self.accounts.stats.view_fills.count(out.len() as u64);
        self.accounts.stats.view_read_times.count(begun);
        Ok(())
    }

    fn read_views_by(
        &self,
        map: &Map,
        range: &Range<u64>,
        out: &mut [u8],
        request: &mut Request<'_>,
    ) -> Result<(), FetchError> {
        // What no view fills reads as zeros.
        let whole = |alias: &Arc<Alias>| alias.shows(range);
        if !map.aliases_in(range).next().is_some_and(whole) {
            out.fill(0);
        }
        for (number, partition) in self.accounts.partition_table.partitions.iter().enumerate() {
            let at = partition.views.start;
            if range.start < at + DIRECTORY_BYTES && at < range.end {
                self.accounts.stats.directory_reads.add(1);
                partition.directory_reads.add(1);
                paste(out, range, at, map.directory(number, &self.accounts.partition_table));
            }
        }
        for alias in map.aliases_in(range) {
            self.read_alias(map, alias, range, out, request)?;
        }
        Ok(())
    }

    /// The part of `range` of the views window that `alias` fills.
    pub(super) fn read_alias(
        &self,
        map: &Map,
        alias: &Alias,
        range: &Range<u64>,
        out: &mut [u8],
        request: &mut Request<'_>,
    ) -> Result<(), FetchError> {
        let (start, end) = (alias.info.offset, alias.info.offset + alias.info.length);
        let visible = range.start.max(start) - start..range.end.min(end) - start;
        let shown = range.start..range.end.min(end);
        let (view, tensor) = (&alias.view, &alias.tensor);
        let region = Region::of(self, Some(tensor));
        let format = view.format();
        let first_block = tensor.info.dpa / BLOCK_BYTES as u64;
        let behind = alias.base_under(visible.clone()).map_or(0, |base| base.end / BLOCK_BYTES as u64);
        request.tally = Tally::default();
        let mut apart = None;
        let mut rendered = Vec::new();
        for piece in alias.pieces(visible.clone()) {
            let width = format.bits() as usize;
            let requested = piece.elements.start * width / 8..piece.elements.end * width / 8;
            let block = first_block + piece.block;
            let wanted = Wanted {
                block,
                next: Some(block + 1).filter(|next| *next < behind),
                mask: view.mask(),
                inside: alias.words_of(piece.block, &visible),
                requested: std::slice::from_ref(&requested),
                keep: true,
                view: Some(view),
                first: true,
            };
            let elements = alias.info.elements.saturating_sub(piece.block * format.block_elements());
            let mut fetch = |words: &mut BlockWords| {
                self.fetch(map, &region, Some(tensor), &wanted, words, request)?;
                // Elements past the tensor's last are not the view's to show.
                clear_from(format, elements, words);
                Ok::<_, FetchError>(())
            };
            // What is wanted whole is made where it goes, and decoded there if its elements are the
            // tensor's.
            let at = start + piece.offset;
            let bytes = piece.elements.len() * view.bits() as usize / 8;
            let place = place(&shown, at, bytes);
            if let Some(place) = &place
                && view.is_in_place()
                && let Ok(words) = <&mut BlockWords>::try_from(&mut out[place.clone()])
            {
                fetch(words)?;
                view.render_in_place(words);
                continue;
            }
            let words = apart.get_or_insert([0; BLOCK_BYTES]);
            fetch(words)?;
            if let Some(place) = place {
                view.render_to(words, piece.elements.start, &mut out[place]);
                continue;
            }
            rendered.clear();
            view.render(words, piece.elements.start, piece.elements.end, &mut rendered);
            let left = alias.info.length.saturating_sub(piece.offset).min(rendered.len() as u64);
            let left = usize::try_from(left).expect("at most what was rendered");
            paste(out, range, at, &rendered[..left]);
        }
        let (bytes, tally) = (visible.end - visible.start, &request.tally);
        alias.traffic.count(bytes, tally);
        self.accounts.count_read(&self.accounts.stats.views, bytes, tally);
        if self.accounts.partition_table.divided {
            self.accounts.partition_table.partitions[alias.tensor.partition].view_reads.count(bytes, tally);
        }
        Ok(())
    }
}

/// The format of what `tensor` owns, or nobody.
pub(super) fn format_of(tensor: Option<&Arc<Tensor>>) -> Format {
    tensor.map_or(Format::Opaque, |tensor| tensor.info.format)
}

/// Where `bytes` bytes at `at` of a window lie in what was read of `range`, if all of them do.
fn place(range: &Range<u64>, at: u64, bytes: usize) -> Option<Range<usize>> {
    let start = usize::try_from(at.checked_sub(range.start)?).ok()?;
    (at.checked_add(bytes as u64)? <= range.end).then_some(start..start + bytes)
}

/// Zeroes elements `from..` of a block.
fn clear_from(format: Format, from: u64, words: &mut [u8; BLOCK_BYTES]) {
    if from >= format.block_elements() {
        return;
    }
    let bits = usize::try_from(from).expect("less than a block's elements") * format.bits() as usize;
    if !bits.is_multiple_of(8) {
        words[bits / 8] &= 0x0f; // half a byte of int4 stays
    }
    words[bits.div_ceil(8)..].fill(0);
}

/// Copies the part of `bytes`, which lie at `at` of a window, that falls into `range`, to its place
/// in `out`.
fn paste(out: &mut [u8], range: &Range<u64>, at: u64, bytes: &[u8]) {
    let start = range.start.max(at);
    let end = range.end.min(at + bytes.len() as u64);
    if start < end {
        let index = |position: u64| usize::try_from(position).expect("inside a slice");
        out[index(start - range.start)..index(end - range.start)]
            .copy_from_slice(&bytes[index(start - at)..index(end - at)]);
    }
}
