//! Memory control groups, of version 1 and 2: which ones a process is in, and what their limits
//! leave.
//!
//! A process is in a group, and in all groups above it as far as they can be seen. A container may
//! see only its own, as the root of what is mounted.

use std::{
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

/// Limits from here on are none: version 1 has no other word for that.
const NO_LIMIT: u64 = 1 << 60;

/// Where groups are mounted that may limit memory.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Hierarchy {
    version: Version,
    /// The group that is mounted, as the kernel names it.
    root: PathBuf,
    mount: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Hierarchy {
    /// The hierarchy that a line of `mountinfo` tells of, if it does.
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ').skip(3);
        let (root, mount) = (path(fields.next()?).into(), path(fields.next()?).into());
        let mut system = fields.skip_while(|field| *field != b"-").skip(1);
        let version = match system.next()? {
            b"cgroup2" => Version::Two,
            b"cgroup" if names_memory(system.nth(1)?) => Version::One,
            _ => return None,
        };
        Some(Self { version, root, mount })
    }

    /// The folders of the groups that a process is in, the innermost first. `own` is its
    /// `/proc/self/cgroup`.
    pub(super) fn groups(&self, own: &[u8]) -> Vec<PathBuf> {
        let own = own.split(|byte| *byte == b'\n').find_map(|line| {
            let mut fields = line.splitn(3, |byte| *byte == b':').skip(1);
            let (controllers, group) = (fields.next()?, fields.next()?);
            let is_this = match self.version {
                Version::One => names_memory(controllers),
                Version::Two => controllers.is_empty(),
            };
            is_this.then(|| path(group))
        });
        let Some(own) = own else { return Vec::new() };
        // One that is not below what is mounted is told by that at least.
        let inside = own.strip_prefix(&self.root).unwrap_or(Path::new(""));
        let inside = if inside.components().all(|part| matches!(part, Component::Normal(_))) {
            inside
        } else {
            Path::new("")
        };
        inside.ancestors().map(|group| self.mount.join(group).components().collect()).collect()
    }

    /// What the group in `folder` may have, if that is limited.
    pub(super) fn limit(&self, folder: &Path) -> Option<u64> {
        let limits: &[&str] = match self.version {
            Version::One => &["memory.limit_in_bytes"],
            // Above `high`, processes are slowed down until they stand still.
            Version::Two => &["memory.max", "memory.high"],
        };
        let limits = limits.iter().filter_map(|file| number(&folder.join(file)));
        limits.min().filter(|limit| *limit < NO_LIMIT)
    }

    /// What the limit of the group in `folder` leaves, if there is one: what is not in use, or can
    /// be dropped.
    pub(super) fn left(&self, folder: &Path) -> Option<u64> {
        let limit = self.limit(folder)?;
        let (used, droppable, dirty): (_, &[&str], _) = match self.version {
            Version::One => (
                "memory.usage_in_bytes",
                &["total_inactive_file", "total_active_file"],
                ["total_dirty", "total_writeback"],
            ),
            Version::Two => (
                "memory.current",
                &["inactive_file", "active_file", "slab_reclaimable"],
                ["file_dirty", "file_writeback"],
            ),
        };
        let used = number(&folder.join(used))?;
        let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let sum = |names: &[&str]| {
            let fields = stat.lines().filter_map(|line| line.split_once(' '));
            let wanted = fields.filter(|(name, _)| names.contains(name));
            wanted.filter_map(|(_, value)| value.trim().parse::<u64>().ok()).fold(0, u64::saturating_add)
        };
        let droppable = sum(droppable).saturating_sub(sum(&dirty));
        Some(limit.saturating_sub(used.saturating_sub(droppable)))
    }
}

fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// Whether `memory` is in a list of controllers or of options.
fn names_memory(list: &[u8]) -> bool {
    list.split(|byte| *byte == b',').any(|name| name == b"memory")
}

/// The number in a file; `max` is none.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
