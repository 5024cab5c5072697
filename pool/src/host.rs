//! What a pool needs of the machine around it: a clock, bounds of waits, and who is certainly dead.

use std::ops::Range;

use crate::class::Class;
use crate::error::PoolError;

/// The machine around a node.
pub trait Host: Send + Sync {
    /// A clock in milliseconds. Only differences matter, and only to this node.
    fn now(&self) -> u64;

    /// Waits a moment, longer the more `turns` there were.
    fn relax(&self, turns: u32);

    /// Milliseconds after which a node that does not count on is taken for dead.
    fn timeout(&self) -> u64;

    /// Milliseconds after which a wait fails.
    fn max_wait(&self) -> u64;

    /// Whether this node may manage: who cannot find out that others are dead leaves it to who can.
    fn may_manage(&self) -> bool {
        true
    }

    /// Whether a node is certainly dead, so that nothing of it can come any more.
    fn is_gone(&self, node: u32, incarnation: u32) -> bool;

    /// What people call `node`, which is this host's own. Empty: there is no name but its number.
    fn name(&self, node: u32) -> String {
        let _ = node;
        String::new()
    }

    /// Tells the device what the bytes of a range of the memory are, which nobody uses: of `None`
    /// what the pool's own are. Of an empty range it only says whether that can be.
    ///
    /// # Errors
    /// [`PoolError::Declare`]. Without a device that can be told, of every class but the own.
    fn declare(&self, range: Range<u64>, class: Option<&Class>) -> Result<(), PoolError> {
        let _ = range;
        let no = |class| PoolError::Declare(format!("{class} is for a device, and here is none to be told"));
        class.map_or(Ok(()), |class| Err(no(class)))
    }

    /// Takes a node's access away, for good. When this returns `true`, none of its stores can reach
    /// the memory any more. `false`: that is not in this host's power, or it was itself revoked.
    fn revoke(&self, node: u32, incarnation: u32) -> bool;
}
