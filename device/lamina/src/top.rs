//! `lamina top`: what the API's page shows, in a terminal, from the same stream.
//!
//! It waits for a device that goes away, says so, and goes on when it is back.

mod draw;
mod seen;
mod stream;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Cell;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;

use self::seen::Seen;
use self::stream::Stream;
use crate::args::{ApiAt, Top};
use crate::out::{print_json, print_line};
use crate::signals::Ending;

/// How long a device that does not answer is left alone.
const PAUSE: Duration = Duration::from_secs(1);
/// A frame that nobody looks at in a terminal: its columns and lines.
const FRAME: (u16, u16) = (120, 50);

/// What a person does.
#[derive(Debug, Default)]
struct Wanted {
    /// How the table is sorted.
    sort: Sort,
    /// What tensors' names have in them.
    filter: String,
    /// Whether the filter is being written.
    writing: bool,
    /// The first row that is shown.
    from: usize,
}

/// By what tensors are sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sort {
    #[default]
    Now,
    Read,
    Stored,
    Ratio,
    Name,
}

impl Sort {
    fn next(self) -> Self {
        match self {
            Self::Now => Self::Read,
            Self::Read => Self::Stored,
            Self::Stored => Self::Ratio,
            Self::Ratio => Self::Name,
            Self::Name => Self::Now,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Now => "read now",
            Self::Read => "read",
            Self::Stored => "stored",
            Self::Ratio => "ratio",
            Self::Name => "name",
        }
    }
}

impl Wanted {
    /// Takes a key: whether to go on.
    fn take(&mut self, key: KeyCode) -> bool {
        match key {
            KeyCode::Enter | KeyCode::Esc if self.writing => {
                if key == KeyCode::Esc {
                    self.filter.clear();
                }
                self.writing = false;
            }
            KeyCode::Backspace if self.writing => drop(self.filter.pop()),
            KeyCode::Char(letter) if self.writing => {
                self.filter.push(letter);
                self.from = 0;
            }
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('/') => self.writing = true,
            KeyCode::Char('s') => (self.sort, self.from) = (self.sort.next(), 0),
            KeyCode::Up | KeyCode::Char('k') => self.from = self.from.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.from = self.from.saturating_add(1),
            KeyCode::PageUp => self.from = self.from.saturating_sub(10),
            KeyCode::PageDown => self.from = self.from.saturating_add(10),
            KeyCode::Home => self.from = 0,
            KeyCode::End => self.from = usize::MAX,
            _ => {}
        }
        true
    }
}

/// Shows a device until a person has seen enough, or one frame of it.
///
/// # Errors
/// When there is no terminal, or with `--once` no device.
pub(crate) async fn top(args: Top) -> Result<()> {
    if args.json {
        let mut stream = Stream::open(&args.api).await?;
        let (whole, tick) = (stream.next().await?, stream.next().await?);
        return print_json(&seen::joined(whole, tick));
    }
    if args.once {
        return once(&args.api).await;
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!("standard input and output are no terminal: `lamina top --once` prints one frame");
    }
    let terminal = ratatui::init();
    let done = show(&args.api, terminal).await;
    ratatui::restore();
    done
}

/// Prints what is there, once something could have moved.
async fn once(api: &ApiAt) -> Result<()> {
    let mut stream = Stream::open(api).await?;
    let mut seen = Seen::default();
    for _ in 0..2 {
        seen.take(stream.next().await?);
    }
    let mut terminal = Terminal::new(TestBackend::new(FRAME.0, FRAME.1))?;
    terminal.draw(|frame| draw::draw(frame, &seen, &mut Wanted::default(), api))?;
    let buffer = terminal.backend().buffer();
    let lines = buffer.content.chunks(usize::from(FRAME.0));
    let lines = lines.map(|line| line.iter().map(Cell::symbol).collect::<String>());
    let lines: Vec<_> = lines.map(|line| line.trim_end().to_owned()).collect();
    let last = lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
    for line in &lines[..last] {
        print_line!("{line}")?;
    }
    Ok(())
}

async fn show(api: &ApiAt, mut terminal: ratatui::DefaultTerminal) -> Result<()> {
    let (keys, mut pressed) = mpsc::channel(16);
    // It waits for a key for as long as the process lives.
    std::thread::spawn(move || {
        while let Ok(happened) = event::read() {
            if keys.blocking_send(happened).is_err() {
                return;
            }
        }
    });
    let (mut seen, mut wanted) = (Seen::default(), Wanted::default());
    let mut stream: Option<Stream> = None;
    let mut again = Instant::now();
    // The terminal is to be as it was, also for who is told to end.
    let mut ending = Ending::watch()?;
    loop {
        terminal.draw(|frame| draw::draw(frame, &seen, &mut wanted, api))?;
        tokio::select! {
            happened = pressed.recv() => match happened {
                None => bail!("the terminal is gone"),
                Some(Event::Key(key)) if key.kind == KeyEventKind::Press => {
                    let interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
                    if interrupt || !wanted.take(key.code) {
                        return Ok(());
                    }
                }
                Some(_) => {}
            },
            _ = ending.next() => return Ok(()),
            update = next(&mut stream, api, again) => match update {
                Ok(update) => seen.take(update),
                Err(why) => {
                    (stream, again) = (None, Instant::now() + PAUSE);
                    seen.gone(&why);
                }
            },
        }
    }
}

/// The next update, of a stream that is opened if there is none. May be given up at any time: then
/// nothing is lost.
async fn next(stream: &mut Option<Stream>, api: &ApiAt, not_before: Instant) -> Result<seen::Update> {
    if stream.is_none() {
        tokio::time::sleep_until(not_before.into()).await;
        *stream = Some(Stream::open(api).await?);
    }
    match stream {
        Some(stream) => stream.next().await,
        None => bail!("there is no stream"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_filter_sort_and_end() {
        let mut wanted = Wanted::default();
        for key in ['/', 'q', 'k', '7'] {
            assert!(wanted.take(KeyCode::Char(key)));
        }
        assert!(wanted.take(KeyCode::Backspace) && wanted.take(KeyCode::Enter));
        assert_eq!((wanted.filter.as_str(), wanted.writing), ("qk", false));
        let mut sorted = vec![wanted.sort.name()];
        for _ in 0..5 {
            wanted.take(KeyCode::Char('s'));
            sorted.push(wanted.sort.name());
        }
        assert_eq!(sorted, ["read now", "read", "stored", "ratio", "name", "read now"]);
        wanted.take(KeyCode::Up);
        assert_eq!(wanted.from, 0);
        wanted.take(KeyCode::End);
        wanted.take(KeyCode::Down);
        assert_eq!(wanted.from, usize::MAX);
        wanted.take(KeyCode::Char('/'));
        assert!(wanted.take(KeyCode::Esc) && wanted.filter.is_empty());
        assert!(!wanted.take(KeyCode::Char('q')) && !wanted.take(KeyCode::Esc));
    }
}
