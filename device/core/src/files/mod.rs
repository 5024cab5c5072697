//! Files of models that the device holds: what was loaded, to the bit, and the same at other
//! precisions.
//!
//! * A model is one or more files. A file is a list of extents: bytes that are kept with the
//!   [manifest] (headers, padding), and whole tensors. Nothing is stored twice.
//! * The manifest lies on the device itself, in a tensor called `NAME/.lamina/manifest` that no
//!   list names. It is written before the tensors are, and marked when they are all there; a model
//!   whose manifest has no mark is nobody's, and removed when the device is opened.
//! * A [checkpoint](checkpoints) whose tensors lie on the device under their own names keeps its
//!   manifest with the device's tables instead, so that the base window is what was asked for.
//! * A file that is no checkpoint is passed through, as one tensor of bytes under `NAME/.lamina/`.
//! * A model may be loaded against another: tensors that both have are stored as
//!   [differences](derive).
//! * Tensors of quantised blocks lie in [strands](woven), scales and quants apart, and elements of
//!   six bits in a byte each, which are [packed] where they are read.
//! * A file at another [precision] is computed when it is read. At bf16, block-scaled tensors are
//!   put together ([`expand`]).

mod checkpoints;
mod config;
mod derive;
mod error;
mod expand;
mod folder;
mod kept;
mod layout;
mod load;
mod manifest;
mod map;
mod packed;
mod plan;
mod planes;
mod precision;
mod shown;
mod woven;

pub use self::checkpoints::keep_checkpoint;
pub use self::derive::{Apart, checkpoint_bases};
pub use self::error::FilesError;
pub use self::expand::Matrices;
pub use self::folder::LeftOut;
pub use self::kept::check_kept;
pub use self::layout::{FileLayout, Read};
pub use self::load::{Loading, held, load, may_go, remove};
pub use self::manifest::{FileEntry, Manifest, Model};
pub use self::map::{MapRule, PrecisionMap};
pub use self::plan::{MAX_FILES, ModelPlan, name_of};
pub use self::planes::Planes;
pub use self::precision::Precision;
