//! The native part of the Python package `lamina`: the codec on buffers, the memory of an opened
//! device, and pools.
//!
//! What a Python program sees is in `lamina/`; here are only the parts that need Rust. Buffers that
//! come from Python may be written by other threads at any time, so no reference is ever made into
//! one: bytes are copied a block at a time.

mod buffer;
mod codec;
mod connector;
mod device;
mod pool;

/// See the package's documentation.
#[pyo3::pymodule]
mod _lamina {
    #[pymodule_export]
    use super::codec::{Compressed, compress, formats, join_planes, split_planes, view_of};
    #[pymodule_export]
    use super::connector::Connector;
    #[pymodule_export]
    use super::device::{Device, Span, analyze};
    #[pymodule_export]
    use super::pool::{Pool, chain_keys};
}
