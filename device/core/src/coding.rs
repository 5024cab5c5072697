//! An encoder and a decoder for whoever codes a block, one of each a thread. They hold nothing of one block that
//! matters to the next.

use std::{
    cell::Cell,
    ops::{Deref, DerefMut},
    thread::LocalKey,
};

use lamina_codec::{Decoder, Encoder};

type Home<C> = LocalKey<Cell<Option<Box<C>>>>;

thread_local! {
    static ENCODER: Cell<Option<Box<Encoder>>> = const { Cell::new(None) };
    static DECODER: Cell<Option<Box<Decoder>>> = const { Cell::new(None) };
}

/// A context taken from its thread, which has it back at the end.
pub(crate) struct Taken<C: Default + 'static> {
    /// There until it is dropped.
    context: Option<Box<C>>,
    home: &'static Home<C>,
}

/// The thread's encoder, or a new one while that is at work.
pub(crate) fn encoder() -> Taken<Encoder> {
    Taken { context: Some(ENCODER.take().unwrap_or_default()), home: &ENCODER }
}

/// The thread's decoder, or a new one while that is at work.
pub(crate) fn decoder() -> Taken<Decoder> {
    Taken { context: Some(DECODER.take().unwrap_or_default()), home: &DECODER }
}

impl<C: Default> Deref for Taken<C> {
    type Target = C;

    fn deref(&self) -> &C {
        self.context.as_ref().expect("it is there until it is dropped")
    }
}

impl<C: Default> DerefMut for Taken<C> {
    fn deref_mut(&mut self) -> &mut C {
        self.context.as_mut().expect("it is there until it is dropped")
    }
}

impl<C: Default> Drop for Taken<C> {
    fn drop(&mut self) {
        self.home.set(self.context.take());
    }
}
