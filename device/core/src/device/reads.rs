//! Reading the two windows: which blocks a request needs, and what becomes of them.
//!
//! The rules:
//! * What is decoded whole is decoded to where the reader wants it, without a copy.
//! * While a block outside KV windows is fetched and decoded, the processor is asked for what is stored of the next one that the request wants: segments lie apart, so it would
//!   not guess that by itself.
//! * A request is counted when it is complete, with everything that was fetched for it.

use std::{ops::Range, sync::Arc};

use lamina_abi::DIRECTORY_BYTES;

use super::{Device, DeviceError, Window, blocks::Room, locate};
use crate::{stats::Tally, window::Alias};
use lamina_codec::{BLOCK_BYTES, BlockWords, Form, format::Format, plane::PlaneMask};

impl Device {
    /// Fills `out` from `offset` of the base window on.
    ///
    /// # Errors
    /// [`DeviceError::PastWindow`], [`DeviceError::Damaged`], [`DeviceError::Store`].
    pub fn read_base(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.inside(Window::Base, offset, out.len() as u64)?;
        let mut total = Tally::default();
        let mut done = 0;
        while done < out.len() {
            done += self.read_run(offset + done as u64, &mut out[done..], &mut total)?;
        }
        self.count_read(&self.stats.base, out.len() as u64, &total);
        self.stats.base_fills.count(out.len() as u64);
        if let Some(part) = self.counted_part(offset) {
            part.base_reads.count(out.len() as u64, &total);
        }
        Ok(())
    }

    /// Fills of `out` what one owner has from `at` of the base window on: the bytes filled, fewer if the map changes meanwhile.
    fn read_run(&self, at: u64, out: &mut [u8], total: &mut Tally) -> Result<usize, DeviceError> {
        let map = self.map();
        let tensor = map.tensor_at(at);
        let end = usize::try_from(map.owner_end(at) - at).map_or(out.len(), |end| end.min(out.len()));
        let behind = (at + end as u64).div_ceil(BLOCK_BYTES as u64);
        let format = tensor.map_or(Format::Opaque, |tensor| tensor.info.format);
        let windowed = tensor.filter(|tensor| tensor.windows.is_some());
        let all = PlaneMask::all(format);
        let mut tally = Tally::default();
        let mut done = 0;
        while done < end {
            let (block, inside) = locate(at + done as u64);
            let before = tally;
            let length = (BLOCK_BYTES - inside).min(end - done);
            let part = &mut out[done..done + length];
            self.add_plain(block, inside, length, &mut tally);
            let fetch = |words: &mut BlockWords, tally: &mut Tally| match windowed {
                None => {
                    let next = Some(block + 1).filter(|next| *next < behind);
                    let mut room = Room { words, form: Form::Words };
                    self.fetch_before(block, next, format, all, &mut room, tally)
                }
                Some(tensor) => {
                    self.fetch_from_window(tensor, block, inside..inside + length, all, words, tally)
                }
            };
            let found = if let Ok(words) = <&mut BlockWords>::try_from(&mut *part) {
                fetch(words, &mut tally)?
            } else {
                let mut words = [0; BLOCK_BYTES];
                let found = fetch(&mut words, &mut tally)?;
                part.copy_from_slice(&words[inside..inside + length]);
                found
            };
            if !found {
                tally = before;
                break;
            }
            tally.settle_staged(&before);
            done += length;
        }
        if let Some(tensor) = tensor.filter(|_| done > 0) {
            tensor.traffic.count(done as u64, &tally);
        }
        total.add(&tally);
        Ok(done)
    }

    /// Fills `out` from `offset` of the views window on: directory, views, and zeros where neither is.
    ///
    /// # Errors
    /// As [`Device::read_base`].
    pub fn read_views(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let range = self.inside(Window::Views, offset, out.len() as u64)?;
        if range.is_empty() {
            return Ok(());
        }
        'again: loop {
            let map = self.map();
            // What no view fills reads as zeros.
            let whole = |alias: &Arc<Alias>| alias.shows(&range);
            if !map.aliases_in(&range).next().is_some_and(whole) {
                out.fill(0);
            }
            for (number, part) in self.division.parts.iter().enumerate() {
                let at = part.views.start;
                if range.start < at + DIRECTORY_BYTES && at < range.end {
                    self.stats.directory_reads.add(1);
                    part.directory_reads.add(1);
                    paste(out, &range, at, map.directory(number, &self.division));
                }
            }
            for alias in map.aliases_in(&range) {
                if !self.read_alias(alias, &range, out)? {
                    continue 'again;
                }
            }
            self.stats.view_fills.count(out.len() as u64);
            return Ok(());
        }
    }

    /// The part of `range` of the views window that `alias` fills. `false` if it is no more.
    fn read_alias(&self, alias: &Alias, range: &Range<u64>, out: &mut [u8]) -> Result<bool, DeviceError> {
        let (start, end) = (alias.info.offset, alias.info.offset + alias.info.length);
        let wanted = range.start.max(start) - start..range.end.min(end) - start;
        let shown = range.start..range.end.min(end);
        let (view, tensor) = (&alias.view, &alias.tensor);
        let (format, mask) = (view.format(), view.mask());
        let first_block = tensor.info.dpa / BLOCK_BYTES as u64;
        let behind = alias.base_under(wanted.clone()).map_or(0, |base| base.end / BLOCK_BYTES as u64);
        let mut tally = Tally::default();
        let mut apart = None;
        let mut rendered = Vec::new();
        for piece in alias.pieces(wanted.clone()) {
            let inside = alias.words_of(piece.block, &wanted);
            let width = format.bits() as usize;
            let from = piece.elements.start * width / 8;
            let to = piece.elements.end * width / 8;
            let block = first_block + piece.block;
            let so_far = tally;
            self.add_plain(block, from, to - from, &mut tally);
            let before = piece.block * format.block_elements();
            let elements = alias.info.elements.saturating_sub(before);
            let mut fetch = |words: &mut BlockWords, form: Form| {
                let mut room = Room { words, form: Form::Words };
                let found = if tensor.windows.is_some() {
                    let found =
                        self.fetch_from_window(tensor, block, inside.clone(), mask, room.words, &mut tally)?;
                    tally.settle_staged(&so_far);
                    found
                } else if inside == (0..BLOCK_BYTES) {
                    let next = Some(block + 1).filter(|next| *next < behind);
                    room.form = form;
                    self.fetch_before(block, next, format, mask, &mut room, &mut tally)?
                } else {
                    self.fetch_part(block, format, inside.clone(), mask, room.words, &mut tally)?
                };
                // Elements past the tensor's last are not the view's to show.
                clear_from(format, elements, room.words);
                Ok::<_, DeviceError>(found.then_some(room.form))
            };
            // What is wanted whole is made where it goes, and decoded there if that has the tensor's form.
            let at = start + piece.offset;
            let bytes = piece.elements.len() * view.bits() as usize / 8;
            let place = place(&shown, at, bytes);
            if let Some(place) = &place
                && view.is_in_place()
                && let Ok(words) = <&mut BlockWords>::try_from(&mut out[place.clone()])
            {
                if fetch(words, Form::Words)?.is_none() {
                    return Ok(false);
                }
                view.render_in_place(words);
                continue;
            }
            let words = apart.get_or_insert([0; BLOCK_BYTES]);
            // A block of which all goes there may come in the form that the view likes best.
            let whole = elements.min(piece.elements.len() as u64) >= format.block_elements();
            let form = if whole && place.is_some() { view.form() } else { Form::Words };
            let Some(form) = fetch(words, form)? else { return Ok(false) };
            if let Some(place) = place {
                let out = &mut out[place];
                match form {
                    Form::Words => view.render_to(words, piece.elements.start, out),
                    Form::Fields => view.render_fields(words, out),
                }
                continue;
            }
            rendered.clear();
            view.render(words, piece.elements.start, piece.elements.end, &mut rendered);
            let visible = alias.info.length.saturating_sub(piece.offset).min(rendered.len() as u64);
            let visible = usize::try_from(visible).expect("at most what was rendered");
            paste(out, range, at, &rendered[..visible]);
        }
        let bytes = wanted.end - wanted.start;
        alias.traffic.count(bytes, &tally);
        self.count_read(&self.stats.views, bytes, &tally);
        if self.division.divided {
            self.division.parts[alias.tensor.part].view_reads.count(bytes, &tally);
        }
        Ok(true)
    }
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

/// Copies the part of `bytes`, which lie at `at` of a window, that falls into `range`, to its place in `out`.
fn paste(out: &mut [u8], range: &Range<u64>, at: u64, bytes: &[u8]) {
    let start = range.start.max(at);
    let end = range.end.min(at + bytes.len() as u64);
    if start < end {
        let index = |position: u64| usize::try_from(position).expect("inside a slice");
        out[index(start - range.start)..index(end - range.start)]
            .copy_from_slice(&bytes[index(start - at)..index(end - at)]);
    }
}
