//! Windows coded and published: what was staged, what is coded anew because its tensor comes or
//! goes, and what is left of damaged ones.

use std::ops::Range;

use super::{BlockSet, Content, KvStaging, KvWindow, Origin, Whole, poison};
use crate::{
    device::{
        DeviceError,
        accounts::Written,
        charge::{Charge, charge_of},
        scratch::{Scratch, Taken},
    },
    stats::Tally,
};
use lamina_codec::{
    block::{Bundle, Stored},
    kv::Coding,
    plane::PlaneMask,
};
use lamina_store::{Prepared, StoreError, cause::Why, entry};

/// A window that is coded: its bundles are the first of the scratch.
pub(super) struct CodedWindow<'p> {
    /// None if it is packed.
    coding: Option<Coding>,
    /// Rows that it leaves out.
    repeated_rows: usize,
    scratch: Taken<'p>,
}

impl KvStaging {
    /// Codes a window as `coding` says or as is best.
    pub(super) fn encode(
        &self,
        window: &KvWindow<'_>,
        bytes: &[u8],
        coding: Option<Coding>,
    ) -> CodedWindow<'_> {
        let KvWindow { tensor, shape, span } = window;
        // What leaves can be read without it from the moment that it is looked at.
        let coding = coding.or_else(|| tensor.is_leaving().then_some(Coding::Plain));
        let mut scratch = self.blocks.pool.take();
        let Scratch { encoder, bundles, .. } = &mut *scratch;
        let packer = shape.packer().filter(|_| coding.is_none());
        if packer.is_some_and(|packer| packer.encode_to(bytes, bundles)) {
            return CodedWindow { coding: None, repeated_rows: 0, scratch };
        }
        let coded = encoder.window(shape, span.before, tensor.info.codec, bytes, coding, bundles);
        CodedWindow { coding: Some(coded.coding), repeated_rows: coded.repeated_rows, scratch }
    }

    /// Codes a window as `coding` says or as is best, in address order if blocks of it are lost,
    /// and publishes all its blocks, or none if the store is full. The caller holds the window's
    /// lock.
    pub(super) fn publish(
        &self,
        window: &KvWindow<'_>,
        content: Content<'_>,
        coding: Option<Coding>,
    ) -> Result<(), DeviceError> {
        let coding = if content.lost.is_empty() { coding } else { Some(Coding::Plain) };
        self.publish_coded(window, content, &self.encode(window, content.bytes, coding))
    }

    /// The same of a window that was coded. Of one with blocks that are lost, it was in address
    /// order.
    pub(super) fn publish_coded(
        &self,
        window: &KvWindow<'_>,
        content: Content<'_>,
        CodedWindow { coding, repeated_rows, scratch }: &CodedWindow<'_>,
    ) -> Result<(), DeviceError> {
        let KvWindow { tensor, span, .. } = window;
        let (store, accounts) = (self.store(), &self.accounts);
        let Content { bytes, lost, why, origin } = content;
        let since_before =
            || Why::new(poison::Cause::Damaged, "it was lost before its window was coded anew");
        let why = why.cloned().unwrap_or_else(since_before);
        let mut new: Vec<_> = lost.iter().map(|at| span.first + at as u64).collect();
        new.retain(|block| !store.losses().lists(*block));
        self.blocks.ensure(span.numbers())?;
        let bundles = &scratch.bundles[..span.blocks];
        let (before, after) = self.charges(window, bundles, &lost);
        accounts.reserve(span.first, before, after)?;
        let no_more = after <= before;
        // At once if there is room for all. Else the store is compacted for each that finds none.
        let together =
            if lost.is_empty() { store.prepare_all(span.first, bundles, no_more).ok() } else { None };
        let prepared = match together {
            Some(prepared) => prepared,
            None => self
                .prepare_each(window, bundles, &lost, &why, no_more)
                .inspect_err(|_| accounts.give_back(span.first, before, after))?,
        };
        self.blocks.decoded.lock().forget(span.first);
        let changes = store.install_all(span.first, prepared);
        let mut tally = Tally::default();
        let codec = tensor.info.codec;
        let written =
            (0..).zip(bytes.as_chunks().0).map(|(at, words)| (span.first + at as u64, words, origin.by(at)));
        if lost.is_empty() {
            accounts.written_together(Some(tensor), codec, &[], &changes, written, &mut tally);
        } else {
            for ((old, new), (block, words, by)) in changes.iter().zip(written) {
                accounts.stats.replaced(old, new);
                let entry = Some(new);
                let (old, new) = (Charge::of(old), Charge::of(new));
                if lost.has(window.at(block)) {
                    accounts.charge(Some(tensor), block, old, Charge::default());
                } else {
                    let written = Written { block, words, codec, old, new, by, entry, read: None };
                    accounts.written(Some(tensor), &[], &written, &mut tally);
                }
            }
        }
        for block in new {
            poison::say_lost(block, &why);
        }
        let stats = &accounts.stats;
        match origin {
            Origin::Anew(_) => stats.count_for_maintenance(0, &tally),
            Origin::All | Origin::Some(_) => stats.count_for_write(0, 0, &tally),
        }
        stats.windows_coded(*coding).add(1);
        stats.repeated_rows.add(*repeated_rows as u64);
        Ok(())
    }

    /// Stores the bundles of a window, or nothing if the store is full.
    fn prepare_each(
        &self,
        window: &KvWindow<'_>,
        bundles: &[Bundle],
        lost: &BlockSet,
        why: &Why,
        no_more: bool,
    ) -> Result<Vec<Prepared>, DeviceError> {
        let store = self.store();
        let mut prepared = Vec::with_capacity(bundles.len());
        for (at, (block, bundle)) in (window.span.first..).zip(bundles).enumerate() {
            let prepare = || {
                if lost.has(at) {
                    return Ok(store.prepare_lost(block, why.clone())?);
                }
                Ok(store.prepare(block, bundle, no_more)?)
            };
            match self.blocks.compacting(prepare) {
                Ok(one) => prepared.push(one),
                Err(full) => {
                    store.give_back(prepared);
                    return Err(full);
                }
            }
        }
        Ok(prepared)
    }

    /// What a window's blocks are charged before and after `bundles` take their place. The caller
    /// holds the window's lock.
    fn charges(&self, window: &KvWindow<'_>, bundles: &[Bundle], lost: &BlockSet) -> (u64, u64) {
        let before = window.span.numbers().map(|block| self.blocks.charged(block).bytes).sum();
        let kept = bundles.iter().enumerate().filter(|(at, _)| !lost.has(*at));
        (before, kept.map(|(_, bundle)| charge_of(bundle)).sum())
    }

    /// Changes which of `blocks` that are of a window are lost, and publishes it if that is others
    /// then: the first block behind these.
    pub(super) fn change_lost(
        &self,
        window: &KvWindow<'_>,
        blocks: Range<u64>,
        why: &Why,
        change: impl Fn(&mut Whole, usize),
    ) -> Result<u64, DeviceError> {
        let KvWindow { shape, span, .. } = window;
        let end = blocks.end.min(span.numbers().end);
        let _lock = self.stripe(span).lock();
        let mut whole = self.whole(window)?;
        let before = whole.lost;
        for block in blocks.start..end {
            change(&mut whole, window.at(block));
        }
        if whole.lost != before {
            whole.show_lost(shape, PlaneMask::all(shape.format()));
            let content = Content {
                bytes: &whole.bytes,
                lost: whole.lost,
                why: Some(why),
                origin: Origin::Anew(&whole.touched),
            };
            self.publish(window, content, None)?;
            self.drop_open(span);
        }
        // What could not be decoded once, and was listed without being published, may be decoded
        // now.
        let is_there = |block: &u64| !whole.lost.has(window.at(*block));
        (blocks.start..end).filter(is_there).for_each(|block| self.store().losses().mended(block));
        Ok(end)
    }

    /// Codes a window of a tensor that is being made, if it holds data and nobody has written it.
    pub(super) fn recode(&self, window: &KvWindow<'_>) -> Result<(), DeviceError> {
        let _lock = self.stripe(&window.span).lock();
        if self.find(&window.span).is_some() || !self.holds(window, |_| true) {
            return Ok(());
        }
        let Whole { bytes, lost, touched } = self.load_for_maintenance(window)?;
        let content = Content { bytes: &bytes, lost, why: None, origin: Origin::Anew(&touched) };
        self.publish(window, content, None)
    }

    /// Codes a window block by block, so that its blocks can be read without its tensor. What is
    /// lost stays poisoned.
    pub(super) fn uncode(&self, window: &KvWindow<'_>) -> Result<(), DeviceError> {
        let _lock = self.stripe(&window.span).lock();
        let is_open = self.find(&window.span).is_some();
        if !is_open && !self.holds(window, Stored::is_of_window) {
            return Ok(());
        }
        let Whole { bytes, lost, touched } = self.whole(window)?;
        #[cfg(test)]
        crate::device::holds::may_fail(crate::device::holds::Step::Uncode)?;
        let content = Content { bytes: &bytes, lost, why: None, origin: Origin::Anew(&touched) };
        self.publish(window, content, Some(Coding::Plain))?;
        self.drop_open(&window.span);
        Ok(())
    }

    /// Recovers a window that has entries that do not check, if it is not open.
    pub(super) fn recover_if_closed(&self, window: &KvWindow<'_>) -> Result<(), DeviceError> {
        let _lock = self.stripe(&window.span).lock();
        if self.find(&window.span).is_none() {
            self.load_for_maintenance(window)?;
        }
        Ok(())
    }

    /// Whether any block of a window holds something, stored in such a way. What is poisoned holds
    /// nothing, and what is damaged has yet to be recovered.
    fn holds(&self, window: &KvWindow<'_>, in_such_a_way: impl Fn(&Stored) -> bool) -> bool {
        window.span.numbers().any(|block| match self.store().entry(block) {
            Ok(entry) => entry.place.is_some_and(|place| in_such_a_way(&place.stored)),
            Err(StoreError::Entry { why: entry::Damaged::Poison, .. }) => false,
            Err(_) => true,
        })
    }
}
