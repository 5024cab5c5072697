//! The base that a tensor's blocks may be differences to (decision 26).
//!
//! The rules:
//! * A block says in its entry whether it is a difference. The words of one are what is stored XOR
//!   the words of the same block of the base, plane by plane: see
//!   [`Encoder::difference`](lamina_codec::Encoder::difference).
//! * While this lives no block of any base changes, so what is read of them is what the block was
//!   coded with.
//! * Bases are read before a block's stripe is held: theirs may be the same.

use parking_lot::{Mutex, RwLockReadGuard};

use super::{
    DeviceError,
    blocks::BlockService,
    coding::{Class, FetchError, ReadFrom, Wanted},
    poison,
    scratch::Request,
};
use crate::{
    difference::xor,
    stats::Tally,
    tensor::{Derived, Tensor},
};
use lamina_codec::{BLOCK_BYTES, BlockWords, plane::PlaneMask};

/// The bases of a tensor, of which nothing changes meanwhile.
pub(super) struct Against<'d> {
    blocks: &'d BlockService,
    tensor: &'d Tensor,
    _steady: Vec<RwLockReadGuard<'d, Derived>>,
    /// What was fetched of them.
    moved: Mutex<Tally>,
}

impl<'d> Against<'d> {
    /// The bases of `tensor`, if it has one.
    pub(super) fn of(blocks: &'d BlockService, tensor: &'d Tensor) -> Option<Self> {
        Self::locking(blocks, tensor, 0)
    }

    /// The same, where the caller has locked the nearest one for writing.
    pub(super) fn of_locked(blocks: &'d BlockService, tensor: &'d Tensor) -> Option<Self> {
        Self::locking(blocks, tensor, 1)
    }

    fn locking(blocks: &'d BlockService, tensor: &'d Tensor, locked: usize) -> Option<Self> {
        tensor.lineage.base()?;
        let steady = tensor.lineage.bases().skip(locked).map(|base| base.lineage.steady()).collect();
        Some(Self { blocks, tensor, _steady: steady, moved: Mutex::default() })
    }

    /// What the base holds where `block` of the tensor is.
    ///
    /// # Errors
    /// [`DeviceError::BaseLost`] if that is lost; what the store says else.
    pub(super) fn words(&self, block: u64) -> Result<Box<BlockWords>, DeviceError> {
        let mut words = Box::new([0; BLOCK_BYTES]);
        let mut request = Request::new(&self.blocks.pool);
        let wanted = Wanted {
            block,
            next: None,
            mask: PlaneMask::all(self.tensor.info.format),
            inside: 0..BLOCK_BYTES,
            requested: &[],
            keep: false,
            view: None,
            first: false,
        };
        let read = read_base(self.blocks, self.tensor, &wanted, &mut words, &mut request);
        self.moved.lock().add(&request.tally);
        read.map(|()| words)
    }

    /// What was fetched of the bases so far.
    pub(super) fn moved(&self) -> Tally {
        *self.moved.lock()
    }
}

/// What a tensor's base holds where one of its blocks is.
#[derive(Default)]
pub(super) enum Theirs {
    /// There is no base.
    #[default]
    Nothing,
    /// The base's block is lost, and why.
    Lost(String),
    /// These words.
    Words(Box<BlockWords>),
}

impl Theirs {
    /// What is there for `block` of this class.
    pub(super) fn of(class: Class<'_>, block: u64) -> Result<Self, DeviceError> {
        match class.base.map(|base| base.words(block)) {
            None => Ok(Self::Nothing),
            Some(Ok(words)) => Ok(Self::Words(words)),
            Some(Err(DeviceError::BaseLost { why, .. })) => Ok(Self::Lost(why)),
            Some(Err(why)) => Err(why),
        }
    }
}

/// Fetches a block of `tensor`, whose bases do not change meanwhile: with what it is the difference
/// to, if it is one.
pub(super) fn read(
    blocks: &BlockService,
    tensor: &Tensor,
    wanted: &Wanted<'_>,
    words: &mut BlockWords,
    request: &mut Request<'_>,
) -> Result<ReadFrom, FetchError> {
    let from = blocks.read(Class::of(&tensor.info), wanted, words, request)?;
    if from != ReadFrom::Difference {
        return Ok(from);
    }
    if tensor.lineage.base().is_none() {
        return Err(blocks.without_base(wanted.block));
    }
    let mut base = [0; BLOCK_BYTES];
    let before = request.tally;
    match read_base(blocks, tensor, wanted, &mut base, request) {
        Ok(()) => {
            xor(words, &base);
            let stats = &blocks.accounts.stats;
            stats.differences_read.add(1);
            stats.base_bytes_fetched.add(request.tally.stored - before.stored);
            Ok(ReadFrom::Content)
        }
        // The base stays as it is meanwhile, so whatever is a difference to it is lost too.
        Err(why @ DeviceError::BaseLost { .. }) => match blocks.difference_at(wanted.block) {
            Some(entry) => Err(FetchError::Damaged { entry: Some(Box::new(entry)), why }),
            None => Err(FetchError::Stale),
        },
        Err(why) => Err(FetchError::Failed(why)),
    }
}

/// Fetches of the base of `tensor` what is wanted of the tensor.
fn read_base(
    blocks: &BlockService,
    tensor: &Tensor,
    wanted: &Wanted<'_>,
    words: &mut BlockWords,
    request: &mut Request<'_>,
) -> Result<(), DeviceError> {
    let base = tensor.lineage.base().expect("who asks has one");
    let (own, theirs) = (tensor.blocks().start, base.blocks().start);
    let place = |block: u64| block - own + theirs;
    let of_base = Wanted {
        block: place(wanted.block),
        next: wanted.next.map(place),
        inside: wanted.inside.clone(),
        // A device without compression has no bases.
        requested: &[],
        first: false,
        ..*wanted
    };
    let read = loop {
        match read(blocks, base, &of_base, words, request) {
            // A block of the base that is a difference itself was written meanwhile.
            Err(FetchError::Stale) => {}
            read => break read,
        }
    };
    read.map(drop).map_err(|why| match why {
        FetchError::Damaged { why, .. } => lost(tensor, base, wanted.block, &why),
        FetchError::Failed(why) if poison::is_damage(&why) => lost(tensor, base, wanted.block, &why),
        FetchError::Failed(why) => why,
        FetchError::Stale => unreachable!("asked again"),
    })
}

fn lost(tensor: &Tensor, base: &Tensor, block: u64, why: &DeviceError) -> DeviceError {
    let (name, base) = (&tensor.info.name, &base.info.name);
    DeviceError::BaseLost { block, why: format!("{name} has the difference to {base} there, and {why}") }
}
