//! What runs inside the test guest, and what it says.
//!
//! `lamina-guest` does what a [`Plan`] asks with Lamina's memory, by loads and stores alone, and
//! tells the host of every step with an [`Event`], one JSON object a line. The host judges: the
//! program knows nothing of formats or of what a view should hold. It only notices what cannot be
//! right whatever the data is (a tensor that differs from its own `full` view, a store that is not
//! read back, a step that fails), and says so in [`Event::Problem`].
//!
//! A plan may use the base window as memory instead, or swap to it; then the kernel's own counters
//! are told.
//!
//! The host's harness uses the types of this library, so that both sides agree by construction.

mod decode;
mod event;
mod handoff;
mod known;
mod messages;
mod plan;
mod ram;
mod report;
mod rotate;
mod soak;
mod steps;

pub use decode::{DecodePlan, DecodeRun, Task};
pub use event::{Event, Measure, Phase, WindowReport};
pub use handoff::{Calls, HandoffPlan, Omit, Side};
pub use known::Known;
pub use messages::{MessagePlan, Role};
pub use plan::{AttachBench, DiskPlaces, Plan, WarmBench, WritePlan};
pub use ram::{Heat, ProcessPlan, RamPlan, SwapPlan, Tier};
pub use report::{REPORT_PORT, Report};
pub use rotate::{rotate, rotation, unit};
pub use soak::SoakPlan;
pub use steps::run;
