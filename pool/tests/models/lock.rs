//! `lock.rs`: requests and grants, the change of two words under the lock, and giving up what a
//! dead node held. The manager is another than the nodes.

use crate::{Model, explore};

const NODES: usize = 3;

/// Where a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    Idle,
    Asked,
    /// It holds the lock, and has made so many of the steps of `Held::change`.
    Held(u8),
    Dead,
}

/// Where the manager is in `grant_one`: what it has read of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Manager {
    Rests,
    /// The holder's request was seen taken back; the next is looked at.
    Looks(u8),
    /// It has revoked a node, and gives its lock up: what it saw of the request.
    GivesUp(u8),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    nodes: [At; NODES],
    /// A count for each, and whether it wants: one word.
    requests: [(u8, bool); NODES],
    /// Node and count, of the last that was granted.
    grant: Option<(u8, u8)>,
    /// What both words are to be, if a change is told.
    intent: Option<u8>,
    words: [u8; 2],
    manager: Manager,
    buried: [bool; NODES],
}

/// With deaths, and with what is left out to see that it is missed.
#[derive(Clone, Copy)]
struct Lock {
    counts: u8,
    without_intent: bool,
    without_revoking: bool,
}

impl Lock {
    fn node(self, state: &State, node: usize, then: &mut Vec<State>) {
        let mut next = state.clone();
        let (count, _) = state.requests[node];
        match state.nodes[node] {
            At::Idle if count < self.counts => {
                next.requests[node] = (count + 1, true);
                next.nodes[node] = At::Asked;
            }
            At::Asked if state.grant == Some((node as u8, count)) => next.nodes[node] = At::Held(0),
            At::Held(step) => {
                let value = 1 + node as u8;
                match step {
                    0 => next.intent = (!self.without_intent).then_some(value),
                    1 => next.words[0] = value,
                    2 => next.words[1] = value,
                    3 => next.intent = None,
                    _ => next.requests[node] = (count, false),
                }
                next.nodes[node] = if step < 4 { At::Held(step + 1) } else { At::Idle };
            }
            _ => return,
        }
        then.push(next);
    }

    fn manager(self, state: &State, then: &mut Vec<State>) {
        let mut next = state.clone();
        match state.manager {
            Manager::Rests => {
                // Whom it does not hear of it revokes: that is final, whether it was dead or not.
                for node in (0..NODES).filter(|node| !state.buried[*node]) {
                    let is_suspect = state.nodes[node] == At::Dead || self.without_revoking;
                    if is_suspect {
                        let mut next = state.clone();
                        next.buried[node] = true;
                        next.manager = Manager::GivesUp(node as u8);
                        then.push(next);
                    }
                }
                let is_held = state.grant.is_some_and(|(holder, count)| {
                    state.requests[holder as usize] == (count, true) && !state.buried[holder as usize]
                });
                if is_held {
                    return;
                }
                next.manager = Manager::Looks(0);
            }
            Manager::Looks(step) if (step as usize) < NODES => {
                let after = state.grant.map_or(0, |(holder, _)| holder as usize + 1);
                let node = (after + step as usize) % NODES;
                let (count, wants) = state.requests[node];
                let is_new = state.grant != Some((node as u8, count));
                if wants && is_new && !state.buried[node] {
                    next.grant = Some((node as u8, count));
                    next.manager = Manager::Rests;
                } else {
                    next.manager = Manager::Looks(step + 1);
                }
            }
            Manager::Looks(_) => next.manager = Manager::Rests,
            Manager::GivesUp(node) => {
                if let Some((holder, count)) = state.grant.filter(|(holder, _)| *holder == node) {
                    if state.requests[holder as usize] == (count, true)
                        && let Some(value) = next.intent.take()
                    {
                        next.words = [value; 2];
                    }
                    next.grant = None;
                }
                next.manager = Manager::Rests;
            }
        }
        then.push(next);
    }
}

impl Model for Lock {
    type State = State;

    fn first(&self) -> State {
        State {
            nodes: [At::Idle; NODES],
            requests: [(0, false); NODES],
            grant: None,
            intent: None,
            words: [0; 2],
            manager: Manager::Rests,
            buried: [false; NODES],
        }
    }

    fn next(&self, state: &State, then: &mut Vec<State>) {
        for node in 0..NODES {
            self.node(state, node, then);
            let dead = state.nodes.iter().filter(|at| **at == At::Dead).count();
            if state.nodes[node] != At::Dead && dead < NODES - 1 {
                let mut next = state.clone();
                next.nodes[node] = At::Dead;
                then.push(next);
            }
        }
        self.manager(state, then);
    }

    fn wrong(&self, state: &State) -> Option<&'static str> {
        let holders = state.nodes.iter().filter(|at| matches!(at, At::Held(_))).count();
        if holders > 1 {
            return Some("two hold the lock");
        }
        let begins = state.nodes.contains(&At::Held(0));
        (begins && state.words[0] != state.words[1]).then_some("who takes the lock finds half a change")
    }

    fn is_end(&self, state: &State) -> bool {
        // All that live have had it as often as they wanted.
        (0..NODES).all(|node| {
            state.nodes[node] == At::Dead
                || state.nodes[node] == At::Idle && state.requests[node].0 == self.counts
        })
    }
}

const LOCK: Lock = Lock { counts: 1, without_intent: false, without_revoking: false };

#[test]
fn one_at_a_time_holds_the_lock_and_all_get_it_whoever_dies() {
    assert!(explore(&LOCK) > 1000);
    assert!(explore(&Lock { counts: 2, ..LOCK }) > 10_000);
}

#[test]
#[should_panic(expected = "who takes the lock finds half a change")]
fn the_model_misses_the_intent() {
    explore(&Lock { without_intent: true, ..LOCK });
}

#[test]
#[should_panic(expected = "two hold the lock")]
fn the_model_misses_the_revocation() {
    explore(&Lock { without_revoking: true, ..LOCK });
}
