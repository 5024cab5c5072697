//! What is modelled and not measured: `lamina model`, `compare`, `trace` and `elastic`.

mod elastic;
mod system;
mod traces;

pub(crate) use self::elastic::elastic;
pub(crate) use self::system::{model, shape};
pub(crate) use self::traces::{compare, trace};
