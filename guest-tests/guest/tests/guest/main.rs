//! The guest's programs run on the host, on windows in ordinary files.

mod common;
mod decode;
mod pages;
mod program;
