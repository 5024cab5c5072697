//! Works on a pool that processes of the host have too, see [`crate::SoakPlan`].

use std::fs::OpenOptions;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use lamina_pool::guests::Guest;
use lamina_pool::mem::{Map, Mapped};
use lamina_pool::{Pool, soak};
use lamina_shim::{Lamina, Role};

use crate::{Event, Report, SoakPlan};

/// Between two reports: a guest that is killed has told what it did.
const EVERY: Duration = Duration::from_millis(500);

pub(super) fn run(lamina: &Lamina, plan: &SoakPlan, report: &mut Report) -> anyhow::Result<()> {
    let window = lamina.window(Role::Base)?;
    let path = window.path();
    let file = OpenOptions::new().read(true).write(true).open(path);
    let map = Map::new(&file.with_context(|| path.display().to_string())?, path, Some(window.bytes()))?;
    let guest = Arc::new(Guest::new(&format!("guest {}", plan.node)));
    let pool = Pool::attach(Arc::new(Mapped::new(map)), guest, plan.node)?;
    let (begun, mut told) = (Instant::now(), None::<Instant>);
    let (mut round, mut done, mut turns) = (plan.seed, soak::Done::default(), 0);
    loop {
        let is_over = begun.elapsed() >= Duration::from_secs(plan.seconds);
        // The first says that it is there.
        if is_over || told.is_none_or(|told| told.elapsed() >= EVERY) {
            let soak::Done { stored, read, removed } = done;
            report.send(&Event::Soaked { node: plan.node, turns, stored, read, removed });
            told = Some(Instant::now());
        }
        if is_over {
            return Ok(pool.leave()?);
        }
        soak::turn(&pool, &mut round, &mut done)?;
        turns += 1;
    }
}
