//! What is modelled and not measured: `lamina model`, `compare`, `trace` and `elastic`, and
//! `--model-dram` of a device that is served,
//! and `--record-lines` of a guest.

mod compared;
mod elastic;
mod lines;
mod live;
mod planner;
mod record;
mod recorder;
mod system;
mod traces;
mod watched;

pub(crate) use self::elastic::elastic;
pub(crate) use self::lines::{LineRecorder, Wanted as LinesWanted};
pub(crate) use self::live::Live;
pub(crate) use self::planner::served as planner;
pub(crate) use self::record::record;
pub(crate) use self::recorder::Recordings;
pub(crate) use self::system::{model, shape};
pub(crate) use self::traces::{compare, trace};
