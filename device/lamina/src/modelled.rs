//! What is modelled and not measured: `lamina model`.

mod system;

pub(crate) use self::system::model;
