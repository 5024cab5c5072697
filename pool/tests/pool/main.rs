//! The pool on simulated memory and on files.

#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

mod basics;
mod classes;
mod hostile;
mod index;
mod processes;
mod rare;
mod removal;
mod scenes;
mod schedules;
mod world;
