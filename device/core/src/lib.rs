//! The device: what holds tensors and serves views of them, whatever attaches to it.
//!
//! A load walks one straight line, and the modules are its stations:
//!
//! [`window`] (base or views, and which view) → [`device`] (whose block it is) → [`lamina_store`]
//! (plane index, segments) → [`lamina_codec`] (planes back to words, the view's arithmetic) →
//! [`layout`] (weight, kv) → bytes.
//!
//! A store walks it backwards. [`stats`] counts at the stations and nowhere else. [`analyze`] says
//! beforehand what the device would make of a checkpoint.

pub mod analyze;
pub mod counters;
pub mod device;
mod difference;
pub mod files;
pub mod layout;
pub mod load;
pub mod model;
mod partition_table;
pub mod stats;
pub mod tensor;
pub mod window;
