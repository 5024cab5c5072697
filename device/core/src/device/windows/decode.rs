//! Windows decoded from what is stored of them, and what can be had of damaged ones.

use std::sync::Arc;

use super::{
    Content, FetchError, KvStaging, KvWindow, Origin, Request, Span, Tally, Wanted, Whole, packed::Pieces,
    poison,
};
use crate::device::{
    DeviceError,
    blocks::{no_base, planes_of},
    decoded::DecodedFrom,
    lines,
    observers::Fetch,
};
use lamina_codec::{
    BLOCK_BYTES, BlockWords,
    block::{BlockError, MAX_BUNDLE},
    kv::{BlockSet, Shape, WindowDecoder},
    plane::{self, PlaneMask},
    view::View,
};
use lamina_store::{StoreError, cause::Why, entry};

impl KvStaging {
    /// The planes in `wanted.mask` of one block, all others zero. The caller holds the map.
    pub(super) fn read(
        &self,
        window: &KvWindow<'_>,
        wanted: &Wanted<'_>,
        words: &mut BlockWords,
        request: &mut Request<'_>,
    ) -> Result<(), FetchError> {
        let Wanted { block, mask, requested, view, first, .. } = *wanted;
        let KvWindow { tensor, shape, span } = window;
        let (accounts, tally) = (&self.accounts, &mut request.tally);
        let stats = &accounts.stats;
        let number = window.at(block);
        let at = number * BLOCK_BYTES;
        let inside = at + wanted.inside.start..at + wanted.inside.end;
        let lock = self.stripe(span).lock();
        if let Some(open) = self.find(span) {
            tally.staged_blocks += u64::from(first);
            tally.staged += requested.iter().map(lines).sum::<u64>();
            let staged = open.staged.lock();
            words.copy_from_slice(&staged.bytes[at..at + BLOCK_BYTES]);
            stats.damaged_reads.add(staged.lost.has(number).into());
            drop(staged);
            drop(lock);
            if mask != PlaneMask::all(shape.format()) {
                plane::clear_outside(shape.format(), mask, words);
            }
            return Ok(());
        }
        let kept = {
            let mut decoded = self.blocks.decoded.lock();
            // A generic device keeps as well what it decoded of a block and did not give.
            let has_block = decoded.gave(span.first, mask, &(at..at + BLOCK_BYTES));
            let kept = decoded.take(span.first, mask, &inside, &DecodedFrom::window(tensor));
            let by_itself = first && (kept.is_none() || !has_block);
            let fetch = Fetch {
                block,
                requested,
                stored: None,
                by_itself,
                format: shape.format(),
                codec: tensor.info.codec,
                view,
                planes: mask,
                entry: None,
            };
            accounts.observers.fetched(&fetch, tally);
            kept
        };
        let decoded = if let Some(kept) = kept {
            stats.windows_reused.add(1);
            stats.damaged_reads.add(self.store().losses().lists(block).into());
            kept
        } else {
            let decoded = match self.decode(window, view, mask, tally) {
                Err(why) if poison::is_damage(&why) => {
                    let whole = self.recover(window, &why)?;
                    stats.damaged_reads.add(whole.lost.has(number).into());
                    words.copy_from_slice(&whole.bytes[at..at + BLOCK_BYTES]);
                    plane::clear_outside(shape.format(), mask, words);
                    return Ok(());
                }
                decoded => decoded?,
            };
            stats.windows_decoded.add(1);
            stats.damaged_reads.add(decoded.lost.has(number).into());
            let decoded = Arc::new(decoded.bytes);
            self.blocks.decoded.lock().keep(
                span.first,
                mask,
                inside,
                decoded.clone(),
                DecodedFrom::window(tensor),
            );
            decoded
        };
        drop(lock);
        words.copy_from_slice(&decoded[at..at + BLOCK_BYTES]);
        Ok(())
    }

    /// Decodes a window from the store. Damage is an error, but of poisoned blocks of a window in
    /// address order, which are lost. The caller holds its lock.
    fn decode(
        &self,
        window: &KvWindow<'_>,
        view: Option<&View>,
        mask: PlaneMask,
        tally: &mut Tally,
    ) -> Result<Whole, DeviceError> {
        let (store, KvWindow { tensor, shape, span }) = (self.store(), window);
        let mut out = Vec::with_capacity(span.bytes());
        let (mut lost, mut poisoned) = (BlockSet::default(), None);
        let mut scratch = self.blocks.pool.take();
        let decoder = &mut scratch.decoder;
        let mut decoder = WindowDecoder::new(decoder, shape, span.before, span.blocks, mask, &mut out);
        let (mut bundle, mut pieces) = ([0; MAX_BUNDLE], Pieces::default());
        for at in 0..span.blocks {
            let block = span.first + at as u64;
            tally.blocks += 1;
            let fetched = store.fetch(block, |stored| decoder.wanted(stored), &mut bundle);
            let known = fetched.as_ref().ok();
            let stored = known.map_or(0, |fetched| fetched.bytes);
            tally.stored += stored;
            let fetch = Fetch {
                block,
                requested: &[],
                stored: Some(stored),
                by_itself: false,
                format: shape.format(),
                codec: tensor.info.codec,
                view,
                planes: known.map_or(mask, |fetched| fetched.mask),
                entry: known.map(|fetched| &fetched.entry),
            };
            self.accounts.observers.fetched(&fetch, tally);
            let fetched = match fetched {
                Err(why @ StoreError::Entry { why: entry::Damaged::Poison, .. }) => {
                    lost.insert(at);
                    poisoned = Some(why);
                    continue;
                }
                fetched => fetched?,
            };
            let Some(place) = &fetched.entry.place else { continue };
            tally.planes += planes_of(&place.stored, fetched.mask);
            let damaged = |why| DeviceError::Damaged { block, why };
            if pieces.add(&place.stored, &bundle).map_err(damaged)? {
                continue;
            }
            if place.difference {
                return Err(no_base(block));
            }
            decoder.add(at, &place.stored, fetched.mask, &bundle).map_err(damaged)?;
        }
        if let Some(why) = poisoned.take_if(|_| !pieces.is_empty()) {
            return Err(why.into());
        }
        if !pieces.is_empty() {
            let damaged = |why| DeviceError::Damaged { block: span.first, why };
            pieces.decode(shape, span.blocks, mask, &mut out).map_err(damaged)?;
            return Ok(Whole { bytes: out, lost, touched: Vec::new() });
        }
        if let Some(why) = poisoned.filter(|_| decoder.transformed() == Some(true)) {
            return Err(why.into());
        }
        decoder.finish();
        let mut whole = Whole { bytes: out, lost, touched: Vec::new() };
        whole.show_lost(shape, mask);
        Ok(whole)
    }

    /// All that a window holds, from the store, recovered if it is damaged. The caller holds its
    /// lock.
    pub(super) fn load(&self, window: &KvWindow<'_>, tally: &mut Tally) -> Result<Whole, DeviceError> {
        match self.decode(window, None, PlaneMask::all(window.shape.format()), tally) {
            Err(why) if poison::is_damage(&why) => self.recover(window, &why),
            whole => whole,
        }
    }

    /// All that a window holds, from the store, to be coded anew. The caller holds its lock.
    pub(super) fn load_for_maintenance(&self, window: &KvWindow<'_>) -> Result<Whole, DeviceError> {
        let mut tally = Tally::default();
        let whole = self.load(window, &mut tally)?;
        self.accounts.stats.count_for_maintenance(1, &tally);
        Ok(whole)
    }

    /// All that a window holds, open or not. The caller holds its lock.
    pub(super) fn whole(&self, window: &KvWindow<'_>) -> Result<Whole, DeviceError> {
        let Some(open) = self.find(&window.span) else {
            return self.load_for_maintenance(window);
        };
        let staged = open.staged.lock();
        let (bytes, touched) = (staged.bytes.clone(), staged.touched.clone());
        Ok(Whole { bytes, lost: staged.lost, touched })
    }

    /// What can be decoded of a window that is damaged as `found` says; it is published so, and
    /// lists what is lost. The caller holds its lock.
    fn recover(&self, window: &KvWindow<'_>, found: &DeviceError) -> Result<Whole, DeviceError> {
        let KvWindow { shape, span, .. } = window;
        let mut whole = self.decode_what_can_be(shape, span)?;
        whole.show_lost(shape, PlaneMask::all(shape.format()));
        let why = Why::new(poison::Cause::Damaged, &found.to_string());
        let content = Content {
            bytes: &whole.bytes,
            lost: whole.lost,
            why: Some(&why),
            origin: Origin::Anew(&whole.touched),
        };
        if let Err(full) = self.publish(window, content, None) {
            // It stays as it is, and whoever decodes it finds the same.
            let first = span.first;
            tracing::warn!("what is left of the window at block {first} stays where it is: {full}");
            for block in whole.lost.iter().map(|at| first + at as u64) {
                if self.store().losses().note(block, why.clone()) {
                    poison::say_lost(block, &why);
                }
            }
        }
        Ok(whole)
    }

    /// The bytes of a damaged window that do not depend on damaged stored blocks, and which blocks
    /// are lost with these. The caller holds its lock.
    fn decode_what_can_be(&self, shape: &Shape, span: &Span) -> Result<Whole, DeviceError> {
        let store = self.store();
        if self.has_pieces(span) {
            // Nothing is had of some of them.
            let (bytes, lost) = (vec![0; span.bytes()], BlockSet::first(span.blocks));
            return Ok(Whole { bytes, lost, touched: Vec::new() });
        }
        let all = PlaneMask::all(shape.format());
        let (mut gone, mut bytes, mut bundle) = (BlockSet::default(), Vec::new(), [0; MAX_BUNDLE]);
        // How the blocks were coded that are gone, as far as their entries say so, and whether
        // there are some that do not say it.
        let (mut was_transformed, mut contradict, mut unknown) = (None, false, false);
        let mut scratch = self.blocks.pool.take();
        // Each round but the last finds further blocks that are gone.
        let (coded, lost) = loop {
            let decoder = &mut scratch.decoder;
            let mut decoder = WindowDecoder::new(decoder, shape, span.before, span.blocks, all, &mut bytes);
            let before = gone;
            let mut misfits = false;
            for at in (0..span.blocks).filter(|at| !before.has(*at)) {
                let block = span.first + at as u64;
                let fetched = match store.fetch(block, |stored| decoder.wanted(stored), &mut bundle) {
                    Err(StoreError::Entry { why, .. }) => {
                        gone.insert(at);
                        unknown |= why != entry::Damaged::Poison;
                        continue;
                    }
                    fetched => fetched?,
                };
                let Some(place) = &fetched.entry.place else { continue };
                if place.difference {
                    gone.insert(at);
                    continue;
                }
                match decoder.add(at, &place.stored, fetched.mask, &bundle) {
                    Ok(()) => {}
                    Err(BlockError::Window { .. }) => misfits = true,
                    Err(_) => {
                        gone.insert(at);
                        let transformed = place.stored.head_bytes() > 0;
                        contradict |= was_transformed.is_some_and(|before| before != transformed);
                        was_transformed = Some(transformed);
                    }
                }
            }
            if gone != before {
                continue;
            }
            contradict |= misfits;
            let coded = decoder.transformed().or(was_transformed);
            let transformed = coded == Some(true);
            // The first block names the rows that repeat.
            let in_doubt = transformed && gone.has(0);
            let lost = decoder.finish_without(&gone, transformed && !in_doubt);
            contradict |= in_doubt || was_transformed.is_some_and(|was| was != transformed);
            break (coded, lost);
        };
        // If nothing says how the window was coded, any of its blocks may have had bytes in one
        // that is gone. Poison that stands alone is of a window in address order.
        let all_lost = contradict || (unknown && coded.is_none());
        let lost = if all_lost { BlockSet::first(span.blocks) } else { lost };
        Ok(Whole { bytes, lost, touched: Vec::new() })
    }
}
