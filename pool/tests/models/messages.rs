//! `message.rs`: a client asks, a server begins, does and answers, and dies at any step. The next
//! life of the server says that what was begun may be lost.

use crate::{Model, explore};

/// Requests that the client makes, one after the other.
const REQUESTS: u8 = 3;

/// What the server's line says of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Said {
    Begun,
    Lost,
    Answered,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Server {
    /// It looks at the request, and at its own line.
    Looks,
    Begins(u8),
    /// That it begins is told.
    Does(u8),
    Answers(u8),
    Dead,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    request: u8,
    response: Option<(u8, Said)>,
    server: Server,
    /// How often each request was done.
    done: [u8; REQUESTS as usize + 1],
    /// What the client was told last.
    told: Option<(u8, Said)>,
    deaths: u8,
    client_is_dead: bool,
}

#[derive(Clone, Copy)]
struct Messages {
    without_begun: bool,
}

impl Model for Messages {
    type State = State;

    fn first(&self) -> State {
        State {
            request: 0,
            response: None,
            server: Server::Looks,
            done: [0; REQUESTS as usize + 1],
            told: Some((0, Said::Answered)),
            deaths: 0,
            client_is_dead: false,
        }
    }

    fn next(&self, state: &State, then: &mut Vec<State>) {
        // The client.
        if !state.client_is_dead {
            let mut next = state.clone();
            let is_told = state.told.is_some_and(|(of, _)| of == state.request);
            if is_told && state.request < REQUESTS {
                next.request += 1;
                then.push(next);
            } else if !is_told
                && let Some((of, said)) = state.response
                && of == state.request
                && said != Said::Begun
            {
                next.told = state.response;
                then.push(next);
            }
            let mut next = state.clone();
            next.client_is_dead = true;
            then.push(next);
        }
        // The server.
        let mut next = state.clone();
        next.server = match state.server {
            Server::Dead => Server::Looks,
            Server::Looks if state.request == 0 => Server::Looks,
            Server::Looks => match state.response.filter(|(of, _)| *of == state.request) {
                Some((of, Said::Begun)) => {
                    next.response = Some((of, Said::Lost));
                    Server::Looks
                }
                Some(_) => Server::Looks,
                None => Server::Begins(state.request),
            },
            Server::Begins(of) => {
                if !self.without_begun {
                    next.response = Some((of, Said::Begun));
                }
                Server::Does(of)
            }
            Server::Does(of) => {
                next.done[of as usize] += 1;
                Server::Answers(of)
            }
            Server::Answers(of) => {
                next.response = Some((of, Said::Answered));
                Server::Looks
            }
        };
        then.push(next);
        if state.server != Server::Dead && state.deaths < 3 {
            let mut next = state.clone();
            next.server = Server::Dead;
            next.deaths += 1;
            then.push(next);
        }
    }

    fn wrong(&self, state: &State) -> Option<&'static str> {
        if state.done.iter().any(|times| *times > 1) {
            return Some("a request is done twice");
        }
        let is_answered =
            matches!(state.told, Some((of, Said::Answered)) if of > 0 && state.done[of as usize] != 1);
        is_answered.then_some("an answer to what was not done")
    }

    fn is_end(&self, state: &State) -> bool {
        state.client_is_dead || state.told.is_some_and(|(of, _)| of == REQUESTS)
    }
}

#[test]
fn a_request_is_done_at_most_once_and_its_client_always_told() {
    assert!(explore(&Messages { without_begun: false }) > 300);
}

#[test]
#[should_panic(expected = "a request is done twice")]
fn the_model_misses_that_a_beginning_is_told() {
    explore(&Messages { without_begun: true });
}
