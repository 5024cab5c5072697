//! What can be told of a pool without attaching to it: who is attached, and what they counted.
//!
//! All of it lies in one range behind the superblock, of a few KiB, and nothing in there is
//! followed: what is read says numbers and names, no places. So a pool may be looked at by who does
//! not trust it.

use serde::Serialize;

use crate::class::{Share, directory};
use crate::counts::{NodeCounts, Occupancy, Shares};
use crate::error::PoolError;
use crate::layout::{Layout, RECORD, SHARES, SLOTS, SUPERBLOCK, word};
use crate::member::attached;
use crate::pool::Pool;

/// A pool, as one sees it from outside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Overview {
    /// Bytes of all chunks.
    pub bytes: u64,
    /// Slots of the table.
    pub slots: u64,
    /// Nodes that may be attached.
    pub most_nodes: u32,
    /// Those that are.
    pub attached: Vec<Attached>,
    /// What the table held when the manager last counted; none before it did.
    pub occupancy: Option<Occupancy>,
    /// What was done, by node.
    pub nodes: Vec<NodeCounts>,
    /// What the manager counted last, by class; the pool's own first.
    pub classes: Vec<Share>,
}

/// A node that is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Attached {
    /// Its number.
    pub node: u32,
    /// Whether it manages.
    pub manages: bool,
}

impl Overview {
    /// Looks at a memory of `length` bytes, which `read` reads from an offset on. `None`: there is
    /// no pool in it that this program knows. At most two ranges are read, both inside: the
    /// superblock's 128 bytes, and at most 20 KiB from the beginning on.
    ///
    /// # Errors
    /// What `read` gives.
    pub fn read<E>(
        length: u64,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<Option<Self>, E> {
        if length < SUPERBLOCK {
            return Ok(None);
        }
        let mut superblock = [0; SUPERBLOCK as usize];
        read(0, &mut superblock)?;
        let Ok(layout) = Layout::of_superblock(&superblock, length) else { return Ok(None) };
        let mut told = vec![0; layout.told() as usize];
        read(0, &mut told)?;
        Ok(Some(Self::of(&layout, &told)))
    }

    fn of(layout: &Layout, told: &[u8]) -> Self {
        let at = |at: u64| word(told, at as usize / 8);
        let record = |at: u64| {
            let mut record = [0; RECORD as usize];
            record.copy_from_slice(&told[at as usize..(at + RECORD) as usize]);
            record
        };
        let mut shares = [0; SHARES as usize];
        shares.copy_from_slice(&told[layout.shares() as usize..(layout.shares() + SHARES) as usize]);
        let manager = at(layout.manager());
        let nodes = 0..layout.geometry.nodes;
        let attached = nodes.clone().filter_map(|node| {
            let found = attached(node, at(layout.node(node)), at(layout.fenced(node)) as u32, manager);
            found.map(|(_, manages)| Attached { node, manages })
        });
        Self {
            bytes: layout.end - layout.data,
            slots: u64::from(layout.geometry.groups) * SLOTS,
            most_nodes: layout.geometry.nodes,
            attached: attached.collect(),
            occupancy: Occupancy::of_record(&record(layout.census())),
            nodes: nodes
                .filter_map(|node| NodeCounts::of_record(node, &record(layout.counts(node))))
                .collect(),
            classes: Shares::of_record(&shares).unwrap_or_default().of(&directory(told, layout.class(0))),
        }
    }
}

impl Pool {
    /// The same of this pool.
    ///
    /// # Errors
    /// [`PoolError::Mem`].
    pub fn overview(&self) -> Result<Overview, PoolError> {
        let layout = &self.member.layout;
        let mut told = vec![0; layout.told() as usize];
        self.member.lines.consume(0, layout.told())?;
        self.member.lines.load(0, &mut told)?;
        Ok(Overview::of(layout, &told))
    }
}
