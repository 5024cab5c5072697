//! A pool that guests and processes of the host share in the base window, and work on together.

use serde::{Deserialize, Serialize};

/// What a guest does on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SoakPlan {
    /// Its number, which somebody on the host has claimed for it.
    pub node: u32,
    /// Where what it does begins.
    pub seed: u64,
    /// For how long.
    pub seconds: u64,
}
