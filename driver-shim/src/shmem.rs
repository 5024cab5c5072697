//! The windows as shared memory of a virtio device, through its driver's file
//! (`driver-shim/kernel`).
//!
//! Rules:
//!
//! * The file is `/dev/laminaN`. Where the driver is not loaded yet, and there is a device for it,
//!   it is loaded.
//! * A window is mapped by a file of its own, and stays as long as the memory is mapped: the driver
//!   takes it away with the last of both.
//! * A machine has few mappings, which are shared by all who ask for the same range; what they may
//!   do with it is each one's own.
//! * Requests go through the same file, one at a time for all programs, and are answered by the
//!   driver itself in time or not at all: a deadline is the driver's.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use lamina_abi::shmem::{BASE, TEXT_BYTES, VIEWS, VIRTIO_ID};
use memmap2::MmapMut;
use rustix::ioctl::{Getter, Ioctl, Opcode, Setter, Updater, ioctl, opcode};

use crate::{
    Access, Error, WindowError,
    mailbox::MailboxError,
    sysfs::{Tree, wait},
    topology::Role,
};

const MODULE: &str = "lamina";
const DRIVER: &str = "bus/virtio/drivers/lamina";
const DEVICES: &str = "bus/virtio/devices";
const CLASS: &str = "class/misc";

/// What `lamina_uapi.h` has as `struct lamina_info`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Info {
    /// Of the driver's interface.
    pub version: u32,
    /// Nothing yet.
    pub reserved: u32,
    /// Bytes of the base window.
    pub base_bytes: u64,
    /// Bytes of the views window.
    pub views_bytes: u64,
    /// Bytes of the region that mappings lie in.
    pub region_bytes: u64,
}

/// `struct lamina_map`: a range of a window; the driver tells where to map it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Map {
    /// [`BASE`] or [`VIEWS`].
    pub window: u32,
    /// 0.
    pub reserved: u32,
    /// Where the range begins in the window.
    pub offset: u64,
    /// Bytes of it.
    pub length: u64,
    /// The answer: the offset for `mmap`.
    pub at: u64,
}

/// `struct lamina_range`: bytes of the base window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Range {
    /// Where it begins.
    pub offset: u64,
    /// Its bytes; 0 for all from there on.
    pub length: u64,
}

/// `struct lamina_ask`, whose addresses only [`Shared::ask`] fills in.
#[derive(Default)]
#[repr(C)]
struct Ask {
    request: u64,
    answer: u64,
    request_bytes: u32,
    answer_bytes: u32,
    total: u64,
}

const GROUP: u8 = 0xce;
const INFO: Opcode = opcode::read::<Info>(GROUP, 0);
const MAP: Opcode = opcode::read_write::<Map>(GROUP, 1);
const UNMAP: Opcode = opcode::write::<u64>(GROUP, 2);
const FLUSH: Opcode = opcode::write::<Range>(GROUP, 3);
const ASK: Opcode = opcode::read_write::<Ask>(GROUP, 4);

/// The driver's file, opened.
#[derive(Debug)]
pub struct Shared {
    path: PathBuf,
    file: File,
}

impl Shared {
    /// Opens the driver's file.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(node: &Path) -> io::Result<Self> {
        Self::open_for(node, Access::ReadWrite)
    }

    /// Opens the driver's file. Without [`Access::ReadWrite`] it takes no flushes and no lines.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open_for(node: &Path, access: Access) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(access == Access::ReadWrite).open(node)?;
        Ok(Self { path: node.into(), file })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file, to be mapped.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// What the device has.
    ///
    /// # Errors
    /// The kernel's.
    pub fn info(&self) -> io::Result<Info> {
        // SAFETY: the driver fills in all of an `Info`, in which any bytes are numbers.
        self.call(unsafe { Getter::<INFO, Info>::new() })
    }

    /// Maps a range of a window; the answer is in `at`.
    ///
    /// # Errors
    /// The kernel's: `EINVAL`, `ERANGE`, `ENOSPC` when there are too many mappings.
    pub fn map(&self, map: &mut Map) -> io::Result<()> {
        // SAFETY: the driver reads a `Map` and fills one in, in which any bytes are numbers.
        self.call(unsafe { Updater::<MAP, Map>::new(map) })
    }

    /// Takes a mapping away that nobody has mapped.
    ///
    /// # Errors
    /// The kernel's: `ENOENT`, `EBUSY`.
    pub fn unmap(&self, at: u64) -> io::Result<()> {
        // SAFETY: the driver reads a number, and takes nothing away that is mapped into a program.
        self.call(unsafe { Setter::<UNMAP, u64>::new(at) })
    }

    /// Makes stores to a range of the base window visible in views.
    ///
    /// # Errors
    /// The kernel's: `EBADF` of a file that is not open for writing, `ERANGE`, `EIO`.
    pub fn flush(&self, range: Range) -> io::Result<()> {
        // SAFETY: the driver reads a `Range`.
        self.call(unsafe { Setter::<FLUSH, Range>::new(range) })
    }

    /// Asks the guest port a line, and returns as much of the answer as has room, and its length.
    ///
    /// # Errors
    /// The kernel's: `EBADF` as of [`Self::flush`], `EMSGSIZE`, `EINVAL` for what is no line,
    /// `EIO`.
    pub fn ask(&self, line: &str, answer: &mut [u8]) -> io::Result<usize> {
        let bytes = |length: usize| u32::try_from(length).map_err(|_| io::ErrorKind::InvalidInput);
        let mut ask = Ask {
            request: line.as_ptr() as u64,
            answer: answer.as_mut_ptr() as u64,
            request_bytes: bytes(line.len())?,
            answer_bytes: bytes(answer.len())?,
            total: 0,
        };
        // SAFETY: the driver reads `line` and writes `answer`, within the lengths given, both of
        // which outlive the call, and fills in an `Ask`.
        self.call(unsafe { Updater::<ASK, Ask>::new(&mut ask) })?;
        Ok(usize::try_from(ask.total).unwrap_or(usize::MAX))
    }

    /// Sends a request's text and returns the answer's, of at most `bound` bytes.
    pub(crate) fn exchange(&self, request: &str, bound: usize) -> Result<Vec<u8>, MailboxError> {
        if request.len() > TEXT_BYTES {
            let bytes = request.len();
            return Err(MailboxError::Broken(format!("a request of {bytes} bytes; {TEXT_BYTES} fit")));
        }
        whole(bound, |answer| self.ask(request, answer))
    }

    fn call<I: Ioctl>(&self, call: I) -> io::Result<I::Output> {
        // SAFETY: the callers say why theirs is sound; the file is the driver's, or one that does
        // not know these numbers.
        Ok(unsafe { ioctl(&self.file, call) }?)
    }
}

/// The answer that `ask` gives, of at most `bound` bytes. It is asked once: not every request is
/// the same to make twice. So all of the answer has a place, of which what is not written to takes
/// no memory and no time: an allocator would clear what it has given before.
fn whole(bound: usize, ask: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> Result<Vec<u8>, MailboxError> {
    let broken = |why: io::Error| MailboxError::Broken(why.to_string());
    let mut answer = MmapMut::map_anon(bound).map_err(broken)?;
    let begun = Instant::now();
    let total = ask(&mut answer).map_err(|why| match why.kind() {
        io::ErrorKind::TimedOut => MailboxError::DriverLate(begun.elapsed()),
        _ => broken(why),
    })?;
    answer.get(..total).map(<[u8]>::to_vec).ok_or(MailboxError::TooLong(bound))
}

/// Asks for the whole window of `role`.
///
/// # Errors
/// [`WindowError::Open`], [`WindowError::Refused`].
pub(crate) fn place(node: &Path, role: Role) -> Result<(Shared, Map), WindowError> {
    let unopened = |cause| WindowError::Open { path: node.into(), cause };
    let shared = Shared::open(node).map_err(unopened)?;
    let info = shared.info().map_err(unopened)?;
    let (window, bytes) = match role {
        Role::Base => (BASE, info.base_bytes),
        Role::Views => (VIEWS, info.views_bytes),
    };
    let mut map = Map { window, length: bytes, ..Map::default() };
    shared.map(&mut map).map_err(|cause| WindowError::Refused { path: node.into(), role, bytes, cause })?;
    Ok((shared, map))
}

/// Whether this is a driver's file, by its name and kind.
pub(crate) fn is_node(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    is_name(name) && path.metadata().is_ok_and(|found| found.file_type().is_char_device())
}

fn is_name(name: &str) -> bool {
    name.strip_prefix("lamina").is_some_and(|number| number.parse::<u32>().is_ok())
}

/// The driver's file, if the driver is there.
pub fn node(tree: &Tree) -> Option<PathBuf> {
    let name = tree.list(CLASS).into_iter().find(|name| is_name(name))?;
    Some(tree.dev(name)).filter(|node| node.exists())
}

/// The driver's file, once the driver is loaded; none if there is no device for it.
///
/// # Errors
/// [`Error::NoDriver`].
pub(crate) fn bring_up(tree: &Tree, limit: Duration) -> Result<Option<PathBuf>, Error> {
    let ours = |name: &String| tree.number(format!("{DEVICES}/{name}/device")).ok() == Some(VIRTIO_ID.into());
    if let Some(node) = node(tree) {
        return Ok(Some(node));
    }
    let Some(device) = tree.list(DEVICES).into_iter().find(ours) else { return Ok(None) };
    tree.module(MODULE, DRIVER);
    match wait(limit, || node(tree)) {
        Some(node) => Ok(Some(node)),
        None => Err(Error::NoDriver { device, seconds: limit.as_secs_f64() }),
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::FileExt, thread};

    use rustix::param;

    use super::*;

    #[test]
    fn requests_of_the_driver_have_the_numbers_that_c_gives_them() {
        // Direction, size, group and number, as <linux/ioctl.h> puts them together.
        assert_eq!(
            [INFO, MAP, UNMAP, FLUSH, ASK],
            [0x8020_ce00, 0xc020_ce01, 0x4008_ce02, 0x4010_ce03, 0xc020_ce04]
        );
    }

    #[test]
    fn a_request_is_made_once_however_long_its_answer_is() {
        const BOUND: usize = 4 * TEXT_BYTES;
        for total in [0, 1, TEXT_BYTES, TEXT_BYTES + 1, BOUND, BOUND + 1] {
            let mut made = 0;
            let answer = whole(BOUND, |answer| {
                made += 1;
                let given = total.min(answer.len());
                answer[..given].fill(7);
                Ok(total)
            });
            assert_eq!(made, 1, "{total} bytes");
            match answer {
                Ok(answer) => assert!(total <= BOUND && answer == vec![7; total]),
                Err(why) => assert!(total > BOUND && matches!(why, MailboxError::TooLong(BOUND))),
            }
        }
    }

    /// Pages of some bytes that are in memory.
    fn resident(bytes: &[u8]) -> usize {
        let page = param::page_size();
        let mut found = vec![0; 8 * bytes.len() / page];
        let map = File::open("/proc/self/pagemap").unwrap();
        map.read_exact_at(&mut found, (8 * bytes.as_ptr().addr() / page) as u64).unwrap();
        // The highest bit of each word says so.
        found.chunks(8).filter(|word| word[7] & 0x80 != 0).count()
    }

    #[test]
    fn the_room_for_a_long_answer_costs_a_short_one_nothing() {
        const BOUND: usize = 16 << 20;
        for _ in 0..3 {
            let answer = whole(BOUND, |answer| {
                answer[0] = 7;
                // The system may give 2 MiB at once.
                assert!((1..=512).contains(&resident(answer)));
                Ok(1)
            });
            assert_eq!(answer.unwrap(), [7]);
        }
    }

    #[test]
    fn a_driver_that_gives_up_is_late_by_its_own_deadline() {
        const PAUSE: Duration = Duration::from_millis(20);
        let late = whole(0, |_| {
            thread::sleep(PAUSE);
            Err(io::ErrorKind::TimedOut.into())
        });
        assert!(matches!(late, Err(MailboxError::DriverLate(after)) if after >= PAUSE), "{late:?}");
    }

    #[test]
    fn a_request_that_is_too_long_is_told_what_fits() {
        let null = Shared::open(Path::new("/dev/null")).unwrap();
        let long = null.exchange(&"x".repeat(TEXT_BYTES + 1), 0);
        let says = "a request of 65537 bytes; 65536 fit";
        assert!(matches!(&long, Err(MailboxError::Broken(why)) if why == says), "{long:?}");
        let fits = null.exchange(&"x".repeat(TEXT_BYTES), 0);
        assert!(matches!(&fits, Err(MailboxError::Broken(why)) if !why.contains("fit")), "{fits:?}");
    }

    #[test]
    fn another_file_is_not_taken_for_the_drivers() {
        for (name, is) in [
            ("lamina0", true),
            ("lamina12", true),
            ("lamina", false),
            ("laminar", false),
            ("vport1p1", false),
        ] {
            assert_eq!(is_name(name), is, "{name}");
        }
        assert!(!is_node(Path::new("/dev/null")));
        let null = Shared::open(Path::new("/dev/null")).unwrap();
        assert_eq!(null.info().unwrap_err().raw_os_error(), Some(25), "ENOTTY");
    }
}
