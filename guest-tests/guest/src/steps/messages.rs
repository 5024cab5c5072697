//! One side of an exchange of messages, see [`crate::messages`].

use std::{
    sync::atomic::{Ordering, fence},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use lamina_shim::{Ctl, Lamina, Role as Windows, Span};

use crate::{
    Event, MessagePlan, Report, Role,
    messages::{PAGE, message, round_of},
    report::console,
};

/// How long the other side may take for its part of a round.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(1);

/// The places of an exchange.
struct Exchange<'a> {
    plan: &'a MessagePlan,
    whole: Span<'a>,
    ctl: Ctl,
}

pub(super) fn run(lamina: &Lamina, plan: &MessagePlan, report: &mut Report) -> anyhow::Result<()> {
    let whole = lamina.window(Windows::Base)?.span(plan.offset, plan.span())?;
    let mut exchange = Exchange { plan, whole, ctl: lamina.ctl()? };
    match plan.role {
        Role::Producer => exchange.produce(),
        Role::Consumer => exchange.consume(report),
    }
    .with_context(|| format!("exchange {}", plan.name))
}

impl Exchange<'_> {
    fn produce(&mut self) -> anyhow::Result<()> {
        for round in 1..=self.plan.rounds {
            self.wait(PAGE, round)?;
            self.whole.store(2 * PAGE, &message(round, self.plan.bytes()))?;
            if self.plan.flush {
                self.flush(2 * PAGE, self.plan.bytes())?;
            }
            self.tell(0, round)?;
        }
        self.wait(PAGE, self.plan.rounds + 1)
    }

    fn consume(&mut self, report: &mut Report) -> anyhow::Result<()> {
        let mut seen = self.load()?;
        if round_of(&seen, 0) != Some(0) {
            bail!("the region is not as it was before the first message");
        }
        self.tell(PAGE, 1)?;
        for round in 1..=self.plan.rounds {
            self.wait(0, round)?;
            if self.plan.invalidate {
                self.invalidate(2 * PAGE, self.plan.bytes())?;
            }
            seen = self.load()?;
            let seen = round_of(&seen, round);
            console(&format!("{}: round {round}, seen {seen:?}", self.plan.name));
            report.send(&Event::Message { exchange: self.plan.name.clone(), round, seen });
            self.tell(PAGE, round + 1)?;
        }
        Ok(())
    }

    fn load(&self) -> anyhow::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.plan.bytes())?];
        self.whole.load(2 * PAGE, &mut bytes)?;
        Ok(bytes)
    }

    /// Stores a number, and flushes it.
    fn tell(&mut self, at: u64, number: u64) -> anyhow::Result<()> {
        self.whole.store(at, &number.to_le_bytes())?;
        self.flush(at, 8)
    }

    /// Waits until the other side has told `number`.
    fn wait(&mut self, at: u64, number: u64) -> anyhow::Result<()> {
        let since = Instant::now();
        loop {
            self.invalidate(at, 8)?;
            let mut bytes = [0; 8];
            self.whole.load(at, &mut bytes)?;
            match u64::from_le_bytes(bytes) {
                reported if reported == number => return Ok(()),
                reported if reported > number => {
                    bail!("the other side is at {reported}, this one at {number}")
                }
                _ if since.elapsed() > TIMEOUT => {
                    bail!("the other side did not come to {number} within {} s", TIMEOUT.as_secs())
                }
                _ => thread::sleep(PAUSE),
            }
        }
    }

    fn flush(&mut self, at: u64, length: u64) -> anyhow::Result<()> {
        // Stores before it are made before the device is asked.
        fence(Ordering::SeqCst);
        self.ctl.flush(Some((self.plan.offset + at, length)))?;
        Ok(())
    }

    fn invalidate(&mut self, at: u64, length: u64) -> anyhow::Result<()> {
        self.ctl.invalidate(Some((self.plan.offset + at, length)))?;
        fence(Ordering::SeqCst);
        Ok(())
    }
}
