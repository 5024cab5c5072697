//! `member.rs`: who manages. Burns' and Lamport's algorithm of one bit a node, and the manager's
//! word, with deaths at any step. A dead node is revoked before anything is made of its silence.

use crate::{Model, explore};

const NODES: usize = 3;

/// Where a node is in `succeed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    Member,
    /// It read a word that is vacant.
    Vacant(Option<u8>),
    /// It stands, and looks at the node of this number.
    Stands(Option<u8>, u8),
    /// It is alone, and has read the word again.
    Alone(Option<u8>),
    /// It has posted its word.
    Posted,
    Leads,
    Retreats,
    Dead,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    nodes: [At; NODES],
    candidates: [bool; NODES],
    manager: Option<u8>,
}

#[derive(Clone, Copy)]
struct Election {
    without_second_look: bool,
    without_order: bool,
}

impl State {
    /// Whether a manager's word is nobody's who lives. Who is silent may be dead: `revoke` says.
    fn is_vacant(&self, manager: Option<u8>) -> bool {
        manager.is_none_or(|node| self.nodes[node as usize] == At::Dead)
    }
}

impl Model for Election {
    type State = State;

    fn first(&self) -> State {
        State { nodes: [At::Member; NODES], candidates: [false; NODES], manager: None }
    }

    fn next(&self, state: &State, then: &mut Vec<State>) {
        for node in 0..NODES {
            let mut next = state.clone();
            next.nodes[node] = match state.nodes[node] {
                At::Dead => continue,
                At::Leads => At::Leads,
                At::Member if state.is_vacant(state.manager) => At::Vacant(state.manager),
                At::Member => At::Member,
                At::Vacant(word) => {
                    next.candidates[node] = true;
                    At::Stands(word, 0)
                }
                At::Stands(word, other) if other as usize == node => At::Stands(word, other + 1),
                At::Stands(word, other) if (other as usize) < NODES => {
                    let which = other as usize;
                    let is_dead = state.nodes[which] == At::Dead;
                    if is_dead && state.candidates[which] {
                        // It is revoked: nothing of it can come any more.
                        At::Stands(word, other + 1)
                    } else if !state.candidates[which] {
                        At::Stands(word, other + 1)
                    } else if which < node && !self.without_order {
                        At::Retreats
                    } else if self.without_order {
                        At::Stands(word, other + 1)
                    } else {
                        // It waits, or has waited long enough and stands again later.
                        let mut withdrawn = state.clone();
                        withdrawn.nodes[node] = At::Retreats;
                        then.push(withdrawn);
                        At::Stands(word, other)
                    }
                }
                At::Stands(word, _) => At::Alone(if self.without_second_look { word } else { state.manager }),
                At::Alone(now) if state.is_vacant(now) => {
                    next.manager = Some(node as u8);
                    At::Posted
                }
                At::Alone(_) => At::Retreats,
                At::Posted => {
                    next.candidates[node] = false;
                    At::Leads
                }
                At::Retreats => {
                    next.candidates[node] = false;
                    At::Member
                }
            };
            then.push(next);
            let dead = state.nodes.iter().filter(|at| **at == At::Dead).count();
            if dead < NODES - 1 {
                let mut next = state.clone();
                next.nodes[node] = At::Dead;
                then.push(next);
            }
        }
    }

    fn wrong(&self, state: &State) -> Option<&'static str> {
        let leads = |at: &&At| matches!(at, At::Leads | At::Posted);
        (state.nodes.iter().filter(leads).count() > 1).then_some("two manage")
    }

    fn is_end(&self, state: &State) -> bool {
        state.nodes.contains(&At::Leads)
    }
}

const ELECTION: Election = Election { without_second_look: false, without_order: false };

#[test]
fn one_manages_at_a_time_and_one_always_can() {
    assert!(explore(&ELECTION) > 500);
}

#[test]
#[should_panic(expected = "two manage")]
fn the_model_misses_the_second_look_at_the_managers_word() {
    explore(&Election { without_second_look: true, ..ELECTION });
}

#[test]
#[should_panic(expected = "two manage")]
fn the_model_misses_that_the_later_waits_for_the_earlier() {
    explore(&Election { without_order: true, ..ELECTION });
}
