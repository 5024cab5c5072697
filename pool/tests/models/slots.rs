//! `table.rs` and `prefix.rs`: a slot that two producers reserve, one stores and makes ready, a
//! reader pins, and its owner evicts and empties. Changes of the tag are made under the group's
//! lock, which is one step here. The dead are recovered.

use crate::{Model, explore};

/// Lives of the slot after which nobody stores again.
const LIVES: u8 = 3;

/// The slot's tag: its state, and which life of the slot it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Tag {
    Empty,
    Reserved(u8),
    Ready(u8),
    Evicting(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Producer {
    Looks,
    /// It has a place, and the reservation of this life.
    Stores(u8),
    Stored(u8),
    Done,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Reader {
    Looks,
    /// It read a tag that is ready, and has pinned nothing yet.
    Found(u8),
    Pinned(u8),
    /// The tag was the same after the pin: it reads.
    Reads(u8),
    Dead,
}

/// The owner's steps of evicting and reclaiming.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Owner {
    Rests,
    /// It saw the tag evicting, and then looked for pins: there was none.
    Unpinned(u8),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    tag: Tag,
    life: u8,
    /// The life whose bytes the place holds, whole.
    bytes: Option<u8>,
    pin: bool,
    producers: [Producer; 2],
    reader: Reader,
    owner: Owner,
    evictions: u8,
}

#[derive(Clone, Copy)]
struct Slots {
    without_second_look: bool,
    /// Ready before the bytes are there.
    early: bool,
}

impl Slots {
    fn producer(self, state: &State, number: usize, then: &mut Vec<State>) {
        let mut next = state.clone();
        next.producers[number] = match state.producers[number] {
            Producer::Looks => match state.tag {
                Tag::Empty => {
                    next.life += 1;
                    next.tag = Tag::Reserved(next.life);
                    Producer::Stores(next.life)
                }
                // Another stores it, or has.
                Tag::Reserved(_) | Tag::Ready(_) => Producer::Done,
                Tag::Evicting(_) => return,
            },
            Producer::Stores(life) if self.early && state.tag == Tag::Reserved(life) => {
                next.tag = Tag::Ready(life);
                Producer::Stored(life)
            }
            Producer::Stores(life) => {
                next.bytes = Some(life);
                Producer::Stored(life)
            }
            Producer::Stored(life) => {
                if self.early {
                    next.bytes = Some(life);
                } else if state.tag == Tag::Reserved(life) {
                    next.tag = Tag::Ready(life);
                }
                Producer::Done
            }
            Producer::Done | Producer::Dead => return,
        };
        then.push(next);
    }

    fn reader(self, state: &State, then: &mut Vec<State>) {
        let mut next = state.clone();
        next.reader = match (state.reader, state.tag) {
            (Reader::Looks, Tag::Ready(life)) => Reader::Found(life),
            (Reader::Looks | Reader::Dead, _) => return,
            (Reader::Found(life), _) => {
                next.pin = true;
                Reader::Pinned(life)
            }
            (Reader::Pinned(life), tag) if tag == Tag::Ready(life) || self.without_second_look => {
                Reader::Reads(life)
            }
            (Reader::Pinned(_) | Reader::Reads(_), _) => {
                next.pin = false;
                Reader::Looks
            }
        };
        then.push(next);
    }

    fn owner(state: &State, then: &mut Vec<State>) {
        let mut next = state.clone();
        match (state.owner, state.tag) {
            (Owner::Rests, Tag::Ready(life)) if state.evictions < 2 => {
                next.evictions += 1;
                next.tag = Tag::Evicting(life);
            }
            (Owner::Rests, Tag::Evicting(life)) if !state.pin => next.owner = Owner::Unpinned(life),
            (Owner::Unpinned(_), _) => {
                // Its place goes to whoever stores next.
                next.tag = Tag::Empty;
                next.bytes = None;
                next.owner = Owner::Rests;
            }
            _ => return,
        }
        then.push(next);
    }
}

impl Model for Slots {
    type State = State;

    fn first(&self) -> State {
        State {
            tag: Tag::Empty,
            life: 0,
            bytes: None,
            pin: false,
            producers: [Producer::Looks; 2],
            reader: Reader::Looks,
            owner: Owner::Rests,
            evictions: 0,
        }
    }

    fn next(&self, state: &State, then: &mut Vec<State>) {
        for number in 0..2 {
            self.producer(state, number, then);
            // It wants to store again, once the slot was evicted.
            if state.producers[number] == Producer::Done && state.evictions > 0 && state.life < LIVES {
                let mut next = state.clone();
                next.producers[number] = Producer::Looks;
                then.push(next);
            }
            if !matches!(state.producers[number], Producer::Done | Producer::Dead) {
                let mut next = state.clone();
                next.producers[number] = Producer::Dead;
                then.push(next);
            }
            // Recovered: its reservation goes, and a new life begins.
            if state.producers[number] == Producer::Dead {
                let mut next = state.clone();
                if let Tag::Reserved(life) = state.tag {
                    let stores = |producer: &Producer| matches!(producer, Producer::Stores(of) | Producer::Stored(of) if *of == life);
                    if !state.producers.iter().any(stores) {
                        next.tag = Tag::Empty;
                    }
                }
                next.producers[number] = if state.life < LIVES { Producer::Looks } else { Producer::Done };
                then.push(next);
            }
        }
        self.reader(state, then);
        let mut next = state.clone();
        if state.reader == Reader::Dead {
            next.pin = false;
            next.reader = Reader::Looks;
        } else {
            next.reader = Reader::Dead;
        }
        then.push(next);
        Self::owner(state, then);
    }

    fn wrong(&self, state: &State) -> Option<&'static str> {
        if let Reader::Reads(life) = state.reader
            && state.bytes != Some(life)
        {
            return Some("a reader reads what is not the block's");
        }
        if let Tag::Ready(life) = state.tag
            && state.bytes != Some(life)
        {
            return Some("a block is ready and not there");
        }
        let stores = |producer: &&Producer| matches!(producer, Producer::Stores(_) | Producer::Stored(_));
        let live = state.producers.iter().filter(stores).count();
        (live > 1).then_some("two store one block")
    }

    fn is_end(&self, state: &State) -> bool {
        // All is quiet, and nothing hangs between two states.
        matches!(state.tag, Tag::Empty | Tag::Ready(_)) && !state.pin
    }
}

const SLOTS: Slots = Slots { without_second_look: false, early: false };

#[test]
fn what_is_ready_is_there_is_stored_once_and_stays_while_it_is_read() {
    assert!(explore(&SLOTS) > 500);
}

#[test]
#[should_panic(expected = "a reader reads what is not the block's")]
fn the_model_misses_the_second_look_at_the_tag() {
    explore(&Slots { without_second_look: true, ..SLOTS });
}

#[test]
#[should_panic(expected = "a block is ready and not there")]
fn the_model_misses_that_bytes_come_before_the_tag() {
    explore(&Slots { early: true, ..SLOTS });
}
