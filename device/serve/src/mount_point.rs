//! The directory to mount on: made when missing, cleared of what a killed run left behind, refused
//! when in use.
//!
//! * A mount of ours names its server's process id in its source (`lamina-<pid>`), so that a dead
//!   one can be told from a busy one. A dead server leaves a mount that answers ENOTCONN; one that
//!   died asleep may not answer at all.
//! * Such a leftover is aborted (which wakes whoever still waits for it) and unmounted lazily.
//!   Anything else that is mounted here, and a directory with something in it, is refused and left
//!   alone. So is one that is not [this user's alone](super::private_dir).
//! * Who makes a directory ready locks it, and keeps the lock for as long as the mount is there: of
//!   two who are to mount on one directory, one is refused, however long their loads take. The lock
//!   is on the directory below the mount, and goes with the process.
//! * A mount is taken away by its connection's number, never by its path alone: by then something
//!   else may lie there.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::NixPath;
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use rustix::fs::{Mode, OFlags, makedev};

use super::private_dir::{Fault, PrivateDir};
use super::{ServeError, own_mount};

/// How long a live server may take to answer a `statfs`.
const TIMEOUT: Duration = Duration::from_secs(3);
/// After which time a directory is tried again that somebody else has: who is ending lets it go in
/// a moment.
const AGAIN: Duration = Duration::from_millis(50);
/// What a mount's source begins with.
const SOURCE: &str = "lamina-";

/// The source that names this process.
pub(super) fn source() -> String {
    format!("{SOURCE}{}", std::process::id())
}

/// A directory that is ready to be mounted on. What was made for it is removed again at the end.
#[derive(Debug)]
pub struct MountPoint {
    pub(super) path: PathBuf,
    /// The directories that were made, the innermost first.
    made: Vec<PathBuf>,
    /// The directory, locked.
    directory: File,
}

impl MountPoint {
    /// Makes the directory ready.
    ///
    /// # Errors
    ///
    /// When it is in use, not empty, no directory, or cannot be made; each names what to do.
    pub fn prepare(path: &Path) -> Result<Self, ServeError> {
        let failed = |source| ServeError::MountPoint { path: path.to_owned(), source };
        let path = std::path::absolute(path).map_err(failed)?;
        let begun = Instant::now();
        let point = loop {
            while let Some(mounted) = Mounted::at(&path)? {
                mounted.clear(&path)?;
            }
            let why = match Self::lock(&path) {
                Ok(Some(point)) => break point,
                Ok(None) => ServeError::MountPointTaken { path: path.clone() },
                // Who had it has removed what it lay in meanwhile, or nobody can make it there.
                Err(why) if is_missing(&why) => why,
                Err(why) => return Err(why),
            };
            if begun.elapsed() > TIMEOUT {
                return Err(why);
            }
            thread::sleep(AGAIN);
        };
        let first = fs::read_dir(&point.path).map_err(failed)?.next();
        if let Some(entry) = first {
            let entry = entry.map_err(failed)?;
            return Err(ServeError::MountPointNotEmpty {
                path: point.path.clone(),
                entry: entry.file_name().into(),
            });
        }
        Ok(point)
    }

    /// The directory, made if it is missing, unless somebody else has it, or had until now.
    fn lock(path: &Path) -> Result<Option<Self>, ServeError> {
        let failed = |source| ServeError::MountPoint { path: path.to_owned(), source };
        let made = match make(path) {
            Ok(made) => made,
            Err(why) => return Err(failed(why)),
        };
        // Who may remove it takes the mount away with it.
        let private = PrivateDir::open(path).map_err(|why| match why {
            ServeError::NotPrivate { path, fault: Fault::Io(source) } => {
                ServeError::MountPoint { path, source }
            }
            why => why,
        });
        let mut directory = File::options();
        directory.read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW);
        let opened = private.and_then(|_| directory.open(path).map_err(failed));
        let directory = match opened {
            // Who had it has removed it.
            Err(why) if is_missing(&why) => return Ok(None),
            Err(why) => {
                remove(&made);
                return Err(why);
            }
            Ok(directory) => directory,
        };
        match directory.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(why)) => {
                tracing::warn!(
                    path = %path.display(),
                    "the mount point cannot be locked, so another run is not kept from it: {why}"
                );
            }
        }
        // It is not this one's to remove before that is known.
        let mut point = Self { path: path.to_owned(), made: Vec::new(), directory };
        if !point.is_free()? {
            return Ok(None);
        }
        point.made = made;
        Ok(Some(point))
    }

    /// Whether nothing is mounted here, and the path still leads to what is locked.
    fn is_free(&self) -> Result<bool, ServeError> {
        if Mounted::at(&self.path)?.is_some() {
            return Ok(false);
        }
        let place = |found: fs::Metadata| (found.dev(), found.ino());
        let failed = |source| ServeError::MountPoint { path: self.path.clone(), source };
        let locked = place(self.directory.metadata().map_err(failed)?);
        Ok(fs::symlink_metadata(&self.path).is_ok_and(|found| place(found) == locked))
    }

    /// Makes sure that it is as free as when it was made ready: not everybody heeds the lock.
    pub(super) fn check(&self) -> Result<(), ServeError> {
        if let Some(mounted) = Mounted::at(&self.path)? {
            return Err(mounted.busy(&self.path, "it was mounted meanwhile".to_owned()));
        }
        if self.is_free()? {
            return Ok(());
        }
        let why = "it was removed or renamed, or mounted on, since it was made ready".to_owned();
        Err(ServeError::Mount { path: self.path.clone(), why })
    }
}

impl Drop for MountPoint {
    fn drop(&mut self) {
        remove(&self.made);
    }
}

/// Whether there is no directory, or none in which it could be made.
fn is_missing(why: &ServeError) -> bool {
    matches!(why, ServeError::MountPoint { source, .. } if source.kind() == io::ErrorKind::NotFound)
}

/// Makes the directory and what is missing above it, for this user alone: what was made, the
/// innermost first.
fn make(path: &Path) -> io::Result<Vec<PathBuf>> {
    let missing: Vec<_> = path.ancestors().take_while(|above| !above.exists()).collect();
    let mut made = Vec::new();
    for directory in missing.into_iter().rev() {
        match fs::DirBuilder::new().mode(0o700).create(directory) {
            Ok(()) => made.insert(0, directory.to_owned()),
            Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {}
            Err(why) => {
                remove(&made);
                return Err(why);
            }
        }
    }
    Ok(made)
}

/// Removes directories that were made. One that somebody else has use for by now stays, and so do
/// those above it.
fn remove(made: &[PathBuf]) {
    for directory in made {
        if let Err(why) = fs::remove_dir(directory) {
            return tracing::debug!(path = %directory.display(), "a directory stays: {why}");
        }
    }
}

/// Where the kernel lists what is mounted.
const TABLE: &str = "/proc/self/mountinfo";

/// What is mounted at a path, from [`TABLE`].
#[derive(Debug)]
struct Mounted {
    kind: String,
    source: String,
    minor: String,
}

impl Mounted {
    /// The uppermost mount whose mount point is exactly `path`.
    fn at(path: &Path) -> Result<Option<Self>, ServeError> {
        let (resolved, all) = Self::table(path)?;
        Ok(all.into_iter().find(|(point, _)| *point == resolved).map(|(_, mounted)| mounted))
    }

    /// The mounts of the same server at `path` and inside of it.
    fn within(&self, path: &Path) -> Result<Vec<Self>, ServeError> {
        let (resolved, all) = Self::table(path)?;
        let is_its = |(point, mounted): &(PathBuf, Self)| {
            point.starts_with(&resolved) && mounted.source == self.source
        };
        Ok(all.into_iter().filter(is_its).map(|(_, mounted)| mounted).collect())
    }

    /// What `path` is in the table of mounts, and all of that, the uppermost first.
    fn table(path: &Path) -> Result<(PathBuf, Vec<(PathBuf, Self)>), ServeError> {
        let text = fs::read(TABLE).map_err(|source| ServeError::MountPoint { path: TABLE.into(), source })?;
        // Resolving the directory itself would ask a dead server; resolving its parent does not.
        let parent = path.parent().and_then(|parent| parent.canonicalize().ok());
        let resolved =
            parent.zip(path.file_name()).map_or_else(|| path.to_owned(), |(parent, name)| parent.join(name));
        let mut all = Self::all(&text);
        all.reverse();
        Ok((resolved, all))
    }

    /// The mounts that [`TABLE`] lists, in its order. The kernel writes bytes of paths that are no
    /// UTF-8 as they are, anybody's among them.
    fn all(table: &[u8]) -> Vec<(PathBuf, Self)> {
        table.split(|byte| *byte == b'\n').filter_map(Self::parse).collect()
    }

    /// A line:
    /// `id parent major:minor root mount-point options [fields…] - type source super-options`.
    fn parse(line: &[u8]) -> Option<(PathBuf, Self)> {
        let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let (device, point) = (text(fields.next()?), fields.nth(1)?);
        let mut behind = fields.skip_while(|field| *field != b"-").skip(1);
        let (kind, source) = (text(behind.next()?), text(behind.next()?));
        let minor = device.split_once(':')?.1.to_owned();
        Some((unescape(point), Self { kind, source, minor }))
    }

    /// That it is in the way.
    fn busy(&self, path: &Path, state: String) -> ServeError {
        ServeError::MountPointBusy {
            path: path.to_owned(),
            kind: self.kind.clone(),
            source_name: self.source.clone(),
            state,
        }
    }

    /// Takes the mount away if it is a dead one of ours.
    fn clear(&self, path: &Path) -> Result<(), ServeError> {
        let busy = |state: String| self.busy(path, state);
        let server = self.source.strip_prefix(SOURCE).and_then(|pid| pid.parse::<u32>().ok());
        let Some(server) = server.filter(|_| self.kind.starts_with("fuse")) else {
            return Err(busy("it is not Lamina's".to_owned()));
        };
        match probe(path) {
            Some(Ok(())) => return Err(busy(format!("process {server} serves it"))),
            Some(Err(why)) if is_of_the_dead(why) => {}
            Some(Err(why)) => return Err(busy(format!("asking it failed: {why}"))),
            None if lives(server) => return Err(busy(format!("process {server} lives but does not answer"))),
            None => {}
        }
        tracing::info!(path = %path.display(), server, "clearing the mount that a killed run left");
        for mounted in self.within(path)? {
            abort(&mounted.minor);
        }
        let failed = |source| ServeError::MountPoint { path: path.to_owned(), source };
        if unmount(path, &self.minor).map_err(failed)? {
            return Ok(());
        }
        Err(busy("something else was mounted meanwhile".to_owned()))
    }
}

/// Asks the server of a mount something that is never cached; `None` if it does not answer in time.
fn probe(path: &Path) -> Option<Result<(), Errno>> {
    let (answered, answer) = mpsc::channel();
    let path = path.to_owned();
    // The thread ends when the answer comes, at the latest when the connection is aborted.
    thread::spawn(move || answered.send(nix::sys::statvfs::statvfs(&path).map(drop)));
    answer.recv_timeout(TIMEOUT).ok()
}

/// Whether that is what the kernel says of a mount without a server.
fn is_of_the_dead(why: Errno) -> bool {
    matches!(why, Errno::ENOTCONN | Errno::ECONNABORTED)
}

/// Whether a process still runs, other than as a zombie waiting for its last thread.
fn lives(pid: u32) -> bool {
    let Ok(stat) = fs::read(format!("/proc/{pid}/stat")) else { return false };
    // The state follows the name, which is in parentheses and may contain anything.
    let state = String::from_utf8_lossy(&stat);
    let state = state.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

/// Aborts a FUSE connection: everybody who waits for its server gets an error.
pub(super) fn abort(minor: &str) {
    let control = format!("/sys/fs/fuse/connections/{minor}/abort");
    match fs::write(&control, "1") {
        Ok(()) => tracing::debug!("{control} written"),
        // Not mounted in every container; a forced unmount aborts as well.
        Err(why) => tracing::debug!("{control}: {why}"),
    }
}

/// A mount of ours, told from any other that may come to lie at its path.
#[derive(Clone, Debug)]
pub struct OurMount {
    path: PathBuf,
    source: String,
    /// The connection's number.
    minor: String,
}

impl OurMount {
    /// The uppermost mount at `path`, without asking it anything, if it is ours.
    #[must_use]
    pub fn at(path: &Path) -> Option<Self> {
        let Mounted { source, minor, .. } = Mounted::at(path).ok().flatten()?;
        source.starts_with(SOURCE).then(|| Self { path: path.to_owned(), source, minor })
    }

    /// The process that mounted it.
    #[must_use]
    pub fn server(&self) -> Option<u32> {
        self.source.strip_prefix(SOURCE)?.parse().ok()
    }

    /// Whether nobody serves it any more: its device was killed, and what would start it again. The
    /// kernel knows that, unless a thread of the device cannot end before its own mount answers. Of
    /// one `is_here`, whose processes are this host's to see, that counts as dead, too.
    #[must_use]
    pub fn is_dead(&self, is_here: bool) -> bool {
        match probe(&self.path) {
            Some(answer) => answer.is_err_and(is_of_the_dead),
            None => is_here && self.server().is_some_and(|server| !lives(server)),
        }
    }

    /// Aborts its connection, so that everybody who waits for its server gets an error, and
    /// unmounts it: whether it is not there any more. It stays if something else was mounted over
    /// it.
    pub fn take_away(&self) -> bool {
        // A number is given again once a mount is gone.
        let is_here =
            |(_, mounted): &(PathBuf, Mounted)| mounted.minor == self.minor && mounted.source == self.source;
        match Mounted::table(&self.path) {
            Ok((_, all)) if !all.iter().any(is_here) => return true,
            Ok(_) => abort(&self.minor),
            Err(why) => tracing::debug!("{why}"),
        }
        match unmount(&self.path, &self.minor) {
            Ok(gone) => {
                if !gone {
                    let path = self.path.display();
                    tracing::warn!(%path, "not unmounted: something else is mounted over it");
                }
                gone
            }
            Err(why) => {
                tracing::warn!(path = %self.path.display(), "not unmounted: {why}");
                false
            }
        }
    }
}

/// Aborts a connection by its number, if that is known.
pub fn abort_connection(minor: Option<&str>) {
    minor.into_iter().for_each(abort);
}

/// The minor number of the file system mounted at `path`, without asking it anything.
pub(super) fn minor_at(path: &Path) -> Option<String> {
    Mounted::at(path).ok().flatten().map(|mounted| mounted.minor)
}

/// The device numbers of all mounts of the server that has the mount of this number, without asking
/// them anything.
pub(super) fn numbers_beside(number: u64) -> io::Result<Vec<u64>> {
    let table = fs::read(TABLE)?;
    // FUSE has no device of its own: the major number is 0.
    let numbered = |mounted: Mounted| Some((makedev(0, mounted.minor.parse().ok()?), mounted.source));
    let all = Mounted::all(&table).into_iter().map(|(_, mounted)| mounted);
    let ours: Vec<_> =
        all.filter(|mounted| mounted.source.starts_with(SOURCE)).filter_map(numbered).collect();
    let source = ours.iter().find(|(other, _)| *other == number).map(|(_, source)| source);
    Ok(ours.iter().filter(|(_, other)| Some(other) == source).map(|(number, _)| *number).collect())
}

/// The minor number of the file system that a path is on, as it appears in /sys, without asking it
/// anything.
pub(super) fn minor_of(path: &Path) -> io::Result<String> {
    Ok(nix::sys::stat::minor(own_mount::device_at(path)?).to_string())
}

/// Unmounts the mount of this connection from `path` at once, whoever still uses it: whether it is
/// not there any more. If something else lies over it, that is left alone.
fn unmount(path: &Path, minor: &str) -> io::Result<bool> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // Opened so, a mount is asked nothing; and this one is meant, whatever comes over it.
    let mount = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(mount) => File::from(mount),
        Err(rustix::io::Errno::NOENT) => return Ok(true),
        Err(why) => return Err(why.into()),
    };
    if nix::sys::stat::minor(own_mount::device_of(&mount)?).to_string() != minor {
        let (resolved, all) = Mounted::table(path).map_err(io::Error::other)?;
        return Ok(!all.iter().any(|(point, mounted)| *point == resolved && mounted.minor == minor));
    }
    detach(format!("/proc/self/fd/{}", mount.as_raw_fd()).as_str(), path)?;
    Ok(true)
}

/// Unmounts what was just mounted at a path, whose connection is not known.
pub(super) fn unmount_at(path: &Path) -> io::Result<()> {
    detach(path, path)
}

/// Unmounts what is mounted at `place`, which `path` leads to.
fn detach<P: ?Sized + NixPath>(place: &P, path: &Path) -> io::Result<()> {
    match umount2(place, MntFlags::MNT_FORCE | MntFlags::MNT_DETACH) {
        Ok(()) | Err(Errno::EINVAL) => Ok(()),
        Err(Errno::EPERM) => {
            let mut helper = std::process::Command::new("fusermount3");
            let status = helper.args(["-u", "-q", "-z", "--"]).arg(path).status()?;
            if status.success() { Ok(()) } else { Err(io::Error::other(format!("fusermount3 -u: {status}"))) }
        }
        Err(why) => Err(why.into()),
    }
}

/// Undoes the octal escapes of mountinfo (`\040` is a space).
fn unescape(text: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        let escape = tail
            .first_chunk::<3>()
            .filter(|digits| first == b'\\' && digits.iter().all(|d| (b'0'..b'8').contains(d)));
        if let Some(digits) = escape {
            bytes.push(
                digits.iter().fold(0_u8, |value, digit| value.wrapping_mul(8).wrapping_add(digit - b'0')),
            );
            rest = &tail[3..];
        } else {
            bytes.push(first);
            rest = tail;
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn mountinfo_lines_are_understood() {
        let line = r"99 28 0:53 / /tmp/a\040b rw,nosuid shared:7 - fuse.lamina lamina-42 rw,user_id=0";
        let (path, mounted) = Mounted::parse(line.as_bytes()).unwrap();
        assert_eq!(path, Path::new("/tmp/a b"));
        assert_eq!(
            (mounted.kind.as_str(), mounted.source.as_str(), mounted.minor.as_str()),
            ("fuse.lamina", "lamina-42", "53")
        );
        for cut in
            [&b""[..], b"99 28 0:53 / /tmp rw", b"99 28 0:53 / /tmp rw - fuse", b"99 28 053 / / rw - a b"]
        {
            assert!(Mounted::parse(cut).is_none());
        }
    }

    #[test]
    fn mounts_whose_paths_are_no_utf_8_hide_none() {
        let table = b"30 1 0:27 /\xfe /mnt/bad\xffdir rw - tmpfs \xfd rw\n\
            31 1 0:28 / /mnt/m rw shared:1 master:2 - fuse lamina-7 rw\n";
        let all = Mounted::all(table);
        let found: Vec<_> =
            all.iter().map(|(point, mounted)| (point.as_os_str().as_bytes(), &*mounted.kind)).collect();
        assert_eq!(found, [(&b"/mnt/bad\xffdir"[..], "tmpfs"), (&b"/mnt/m"[..], "fuse")]);
        assert_eq!((&*all[1].1.source, &*all[1].1.minor), ("lamina-7", "28"));
    }

    #[test]
    fn a_directory_with_something_in_it_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("precious"), "x").unwrap();
        let refused = MountPoint::prepare(directory.path()).unwrap_err().to_string();
        assert!(refused.contains("precious"), "{refused}");
    }

    #[test]
    fn a_directory_made_here_goes_again_and_one_found_here_stays() {
        let directory = tempfile::tempdir().unwrap();
        let made = directory.path().join("new");
        drop(MountPoint::prepare(&made).unwrap());
        assert!(!made.exists());
        drop(MountPoint::prepare(directory.path()).unwrap());
        assert!(directory.path().exists());
    }

    #[test]
    fn what_is_missing_above_a_mount_point_is_this_users_alone_and_goes_with_it() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/b/mount");
        let point = MountPoint::prepare(&path).unwrap();
        for made in path.ancestors().take(3) {
            assert_eq!(fs::metadata(made).unwrap().permissions().mode() & 0o777, 0o700, "{made:?}");
        }
        fs::write(directory.path().join("a/note"), "x").unwrap();
        drop(point);
        assert!(directory.path().join("a").exists() && !directory.path().join("a/b").exists());
    }

    #[test]
    fn a_file_is_no_mount_point() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(MountPoint::prepare(file.path()), Err(ServeError::MountPoint { .. })));
    }

    #[test]
    fn one_of_two_who_are_to_mount_on_a_directory_is_refused_until_the_other_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new");
        let point = MountPoint::prepare(&path).unwrap();
        let refused = MountPoint::prepare(&path).unwrap_err();
        assert!(matches!(refused, ServeError::MountPointTaken { .. }), "{refused}");
        let other = thread::scope(|scope| {
            let waits = scope.spawn(|| MountPoint::prepare(&path).unwrap());
            thread::sleep(AGAIN * 4);
            drop(point);
            waits.join().unwrap()
        });
        // What the first one made went with it.
        other.check().unwrap();
        fs::rename(&path, directory.path().join("renamed")).unwrap();
        assert!(matches!(other.check(), Err(ServeError::Mount { .. })));
    }

    #[test]
    fn what_somebody_else_mounted_is_left_alone() {
        let refused = MountPoint::prepare(Path::new("/proc")).unwrap_err().to_string();
        assert!(refused.contains("/proc") && refused.contains("not Lamina's"), "{refused}");
    }
}
