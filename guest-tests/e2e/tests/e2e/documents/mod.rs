//! The documents: that their commands run, that they keep to their length, and that what they name
//! is there. The comments: that they keep to their width.

mod commands;
mod comments;
mod text;

use std::path::Path;

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()))
}
