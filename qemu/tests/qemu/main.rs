//! Guests booted on ordinary files, and what the image recipes refuse.

mod boot;
mod images;
