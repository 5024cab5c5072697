//! `lamina-ioctls`: what `/dev/lamina0` does for those who ask it wrongly, and what it maps for the
//! others.
//!
//! Says what is wrong on standard output, with status 1; `VIEW` of `TENSOR` is mapped by itself and
//! compared.

use std::fmt::Debug;
use std::io;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use lamina_abi::shmem::{BASE, TEXT_BYTES, VIEWS};
use lamina_shim::shmem::{Map, Range, Shared, node};
use lamina_shim::sysfs::Tree;
use lamina_shim::{Access, Lamina, OpenOptions, Window, WindowError};

/// Numbers of errors on Linux.
const ENOENT: i32 = 2;
const ENXIO: i32 = 6;
const EBADF: i32 = 9;
const EACCES: i32 = 13;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
const ERANGE: i32 = 34;
const EMSGSIZE: i32 = 90;
const PAGE: u64 = 4096;

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let done = words.next().zip(words.next()).context("TENSOR and VIEW are missing");
    match done.and_then(|(tensor, view)| check(&tensor, &view)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("FAILED: {why:#}");
            ExitCode::FAILURE
        }
    }
}

/// Holds that something fails with this error.
fn fails<T: Debug>(what: &str, done: &io::Result<T>, number: i32) -> Result<()> {
    let found = done.as_ref().err().and_then(io::Error::raw_os_error);
    ensure!(found == Some(number), "{what}: {done:?}, not error {number}");
    Ok(())
}

/// Holds that a mapping into this program fails with this error.
fn unmappable(shared: &Shared, at: u64, length: u64, access: Access, number: i32) -> Result<()> {
    let done = match Window::of_mapping(shared, at, length, access) {
        Err(WindowError::Map { cause, .. }) => Err(cause),
        Err(other) => Err(io::Error::other(other.to_string())),
        Ok(_) => Ok(()),
    };
    fails(&format!("{length} bytes at {at:#x} mapped for {access:?}"), &done, number)
}

fn mapped(shared: &Shared, window: u32, offset: u64, length: u64) -> io::Result<u64> {
    let mut map = Map { window, offset, length, ..Map::default() };
    shared.map(&mut map)?;
    Ok(map.at)
}

fn check(tensor: &str, view: &str) -> Result<()> {
    let node = node(&Tree::system()).context("there is no /dev/lamina0")?;
    let shared = Shared::open(&node)?;
    let info = shared.info()?;
    ensure!(info.version == 1 && info.reserved == 0, "{info:?}");
    ensure!(info.region_bytes >= info.base_bytes + info.views_bytes, "{info:?}");

    // What is no range, or not of a window.
    let huge = u64::MAX - PAGE + 1;
    for (window, offset, length, number) in [
        (2, 0, PAGE, EINVAL),
        (u32::MAX, 0, PAGE, EINVAL),
        (BASE, 0, 0, EINVAL),
        (BASE, 1, PAGE, EINVAL),
        (BASE, 0, PAGE + 1, EINVAL),
        (BASE, info.base_bytes, PAGE, ERANGE),
        (VIEWS, info.views_bytes - PAGE, 2 * PAGE, ERANGE),
        (BASE, huge, PAGE, ERANGE),
        (BASE, PAGE, huge, ERANGE),
        (BASE, 0, info.region_bytes, ERANGE),
    ] {
        let what = format!("{length} bytes at {offset:#x} of {window:#x}");
        fails(&what, &mapped(&shared, window, offset, length), number)?;
    }
    let mut reserved = Map { length: PAGE, reserved: 1, ..Map::default() };
    fails("a number that is reserved", &shared.map(&mut reserved), EINVAL)?;

    // One page, by the file that has it, and as it may be.
    let at = mapped(&shared, BASE, 0, 2 * PAGE)?;
    ensure!(at % (2 << 20) == 0 && at < info.region_bytes, "mapped at {at:#x}");
    unmappable(&shared, at, 3 * PAGE, Access::Read, ENXIO)?;
    unmappable(&shared, at + 2 * PAGE, PAGE, Access::Read, ENXIO)?;
    unmappable(&Shared::open(&node)?, at, PAGE, Access::Read, ENXIO)?;
    let page = Window::of_mapping(&shared, at + PAGE, PAGE, Access::Read)?;
    fails("what is in use", &shared.unmap(at), EBUSY)?;
    fails("the middle of a mapping", &shared.unmap(at + PAGE), ENOENT)?;
    drop(page);
    shared.unmap(at)?;
    fails("what is gone", &shared.unmap(at), ENOENT)?;
    unmappable(&shared, at, PAGE, Access::Read, ENXIO)?;

    // A view alone is what it is in the whole window, though its file was closed; and it cannot be
    // stored to.
    let lamina = Lamina::open(&OpenOptions::from_env())?;
    let place = lamina.locate(tensor, view)?;
    let whole = lamina.span(tensor, view)?;
    let another = Shared::open(&node)?;
    let length = place.bytes.next_multiple_of(PAGE);
    let at = mapped(&another, VIEWS, place.offset, length)?;
    unmappable(&another, at, length, Access::ReadWrite, EACCES)?;
    let alone = Window::of_mapping(&another, at, length, Access::Read)?;
    drop(another);
    let (mut one, mut other) = (vec![0; whole.len()], vec![0; whole.len()]);
    whole.load(0, &mut one)?;
    alone.span(0, place.bytes)?.load(0, &mut other)?;
    ensure!(one == other && one.iter().any(|byte| *byte != 0), "{view} of {tensor} alone is something else");
    drop(alone);
    drop(lamina);

    // Who asks for the same range shares it; different ones there are few of, and they go with
    // their file.
    let same = mapped(&shared, BASE, 4 * PAGE, PAGE)?;
    for _ in 0..2 {
        let several = Shared::open(&node)?;
        let mut count = 0;
        let full = loop {
            match mapped(&several, count % 2, u64::from(count) * PAGE, PAGE) {
                Ok(_) => count += 1,
                full => break full,
            }
        };
        fails("one more mapping", &full, ENOSPC)?;
        let opened = Lamina::open(&OpenOptions::from_env()).map(drop).map_err(|why| why.to_string());
        ensure!(opened.as_ref().is_err_and(|why| why.contains("few mappings")), "windows opened: {opened:?}");
        ensure!((3..8).contains(&count), "{count} mappings");
        for _ in 0..16 {
            ensure!(mapped(&several, BASE, 4 * PAGE, PAGE)? == same, "the same range is mapped twice");
        }
    }
    shared.unmap(same)?;

    // Flushes and lines.
    shared.flush(Range::default())?;
    shared.flush(Range { offset: info.base_bytes - PAGE, length: PAGE })?;
    for (offset, length) in [(info.base_bytes + 1, 0), (0, info.base_bytes + 1), (u64::MAX, 1), (1, u64::MAX)]
    {
        let flushed = shared.flush(Range { offset, length });
        fails(&format!("a flush of {length} bytes at {offset:#x}"), &flushed, ERANGE)?;
    }
    let mut answer = [0; 64];
    let reading = Shared::open_for(&node, Access::Read)?;
    ensure!(reading.info()? == info, "another device for who reads");
    fails("a flush by who may only read", &reading.flush(Range::default()), EBADF)?;
    fails("a line by who may only read", &reading.ask(r#"{"op":"stats"}"#, &mut answer), EBADF)?;
    fails("no line", &shared.ask("", &mut answer), EMSGSIZE)?;
    fails("too long a line", &shared.ask(&"x".repeat(TEXT_BYTES + 1), &mut answer), EMSGSIZE)?;
    fails("two lines", &shared.ask("{}\n{}", &mut answer), EINVAL)?;
    let total = shared.ask(r#"{"op":"stats"}"#, &mut answer)?;
    ensure!(total > answer.len() && answer[0] == b'{', "an answer of {total} bytes");
    ensure!(shared.ask("nonsense", &mut answer)? > 0, "no answer to nonsense");
    Ok(())
}
