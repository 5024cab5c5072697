//! Models of the pool's protocols, each searched through in all its states: any node may do its
//! next step at any time, and may die between any two.
//!
//! A step is one published store or one consumed load, as the code makes them. What caches do
//! between is not here: that is the simulated memory's part (`tests/pool/removal.rs`).
//!
//! The search is our own because of one of its questions, whether an end can still be reached from
//! every state: stateright and loom ask what is always, sometimes or at last so, on a path.

#![allow(clippy::cast_possible_truncation, reason = "nodes of models are few")]

mod election;
mod lock;
mod messages;
mod slots;

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;

/// A protocol.
trait Model {
    /// Everything there is at a moment.
    type State: Clone + Debug + Eq + Hash;

    fn first(&self) -> Self::State;

    /// What may come next.
    fn next(&self, state: &Self::State, then: &mut Vec<Self::State>);

    /// What does not hold in a state.
    fn wrong(&self, state: &Self::State) -> Option<&'static str>;

    /// Whether it is an end that must always be within reach.
    fn is_end(&self, state: &Self::State) -> bool;
}

/// Looks at all states, and returns how many there are. None is wrong, and an end can be reached
/// from each.
fn explore<M: Model>(model: &M) -> usize {
    let mut numbers = HashMap::from([(model.first(), 0)]);
    let mut states = vec![model.first()];
    let mut before: Vec<Vec<usize>> = vec![Vec::new()];
    let mut then = Vec::new();
    let mut number = 0;
    while number < states.len() {
        let state = states[number].clone();
        assert_eq!(model.wrong(&state), None, "{state:#?}");
        then.clear();
        model.next(&state, &mut then);
        for next in then.drain(..) {
            let many = states.len();
            let which = *numbers.entry(next.clone()).or_insert(many);
            if which == many {
                states.push(next);
                before.push(Vec::new());
            }
            before[which].push(number);
        }
        number += 1;
    }
    // Backwards from the ends.
    let mut reaches: Vec<bool> = states.iter().map(|state| model.is_end(state)).collect();
    let mut left: Vec<usize> = (0..states.len()).filter(|number| reaches[*number]).collect();
    while let Some(number) = left.pop() {
        for earlier in &before[number] {
            if !std::mem::replace(&mut reaches[*earlier], true) {
                left.push(*earlier);
            }
        }
    }
    if let Some(stuck) = reaches.iter().position(|reaches| !reaches) {
        panic!("no end can be reached from {:#?}", states[stuck]);
    }
    states.len()
}
