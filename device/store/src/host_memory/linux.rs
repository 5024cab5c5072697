//! How much memory Linux has left for this process.
//!
//! * Of the host: what it calls available (`MemAvailable`: free, and caches that can be dropped),
//!   without dirty pages, which cannot be dropped before they were written. Those of the mount are
//!   such, and to write them takes room in the store.
//! * Of each memory [control group](super::groups) that this process is in: the same, by its limit.
//! * The least of these counts. Swap does not: who loads from a device waits for each page that was
//!   swapped out.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use super::groups::Hierarchy;

/// What is left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// Bytes.
    pub bytes: u64,
    /// The control group whose limit that is, if it is one's.
    pub group: Option<String>,
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.group {
            None => write!(f, "of the host's memory {} bytes are left", self.bytes),
            Some(group) => write!(f, "of the host's memory {} bytes are left to group {group}", self.bytes),
        }
    }
}

/// A host that runs Linux.
#[derive(Debug)]
pub struct Linux {
    root: PathBuf,
    /// Where memory groups are mounted.
    hierarchies: Vec<Hierarchy>,
}

impl Linux {
    /// The host whose `proc` is in the folder `root`.
    pub fn at(root: &Path) -> Self {
        // Not as a text: paths of other mounts need be no UTF-8.
        let mounts = fs::read(root.join("proc/self/mountinfo")).unwrap_or_default();
        let lines = mounts.split(|byte| *byte == b'\n');
        Self { root: root.to_owned(), hierarchies: lines.filter_map(Hierarchy::parse).collect() }
    }

    /// What is left now, if that can be known.
    pub fn left(&self) -> Option<Left> {
        let host = self.meminfo()?.left();
        let groups = self.groups().into_iter().filter_map(|(hierarchy, group, folder)| {
            Some(Left { bytes: hierarchy.left(&folder)?, group: Some(group) })
        });
        groups.chain([Left { bytes: host, group: None }]).min_by_key(|left| left.bytes)
    }

    /// All memory that this process may have, if that can be known.
    pub fn total(&self) -> Option<u64> {
        let groups = self.groups().into_iter().filter_map(|(hierarchy, _, folder)| hierarchy.limit(&folder));
        groups.chain([self.meminfo()?.total]).min()
    }

    fn meminfo(&self) -> Option<Meminfo> {
        Meminfo::parse(&fs::read_to_string(self.root.join("proc/meminfo")).ok()?)
    }

    /// The groups that this process is in, each with its folder. It is asked anew each time,
    /// because a process can be moved.
    fn groups(&self) -> Vec<(&Hierarchy, String, PathBuf)> {
        let own = fs::read(self.root.join("proc/self/cgroup")).unwrap_or_default();
        let of = |hierarchy| move |group: PathBuf| (hierarchy, group);
        let all = self
            .hierarchies
            .iter()
            .flat_map(|hierarchy| hierarchy.groups(&own).into_iter().map(of(hierarchy)));
        let folder = |group: &Path| self.root.join(group.strip_prefix("/").unwrap_or(group));
        all.map(|(hierarchy, group)| (hierarchy, group.display().to_string(), folder(&group))).collect()
    }
}

/// What `/proc/meminfo` says, in bytes.
#[derive(Debug, PartialEq, Eq)]
struct Meminfo {
    total: u64,
    available: u64,
    /// Pages that are to be written, or are being.
    dirty: u64,
}

impl Meminfo {
    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        let dirty = field("Dirty").unwrap_or(0).saturating_add(field("Writeback").unwrap_or(0));
        Some(Self { total: field("MemTotal")?, available: field("MemAvailable")?, dirty })
    }

    fn left(&self) -> u64 {
        self.available.saturating_sub(self.dirty)
    }
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

    use super::*;

    const MEMINFO: &str = "MemTotal:       24684084 kB\nMemFree:         1969968 kB\nMemAvailable:   21566708 kB\n\
        Buffers:          186912 kB\nDirty:            327760 kB\nWriteback:            16 kB\nWritebackTmp:          8 kB\n";

    /// A host in a folder: its `proc`, and files of its groups.
    fn host(mounts: &str, own: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, Linux) {
        let folder = tempfile::tempdir().unwrap();
        let proc = [("proc/meminfo", MEMINFO), ("proc/self/mountinfo", mounts), ("proc/self/cgroup", own)];
        for (name, text) in proc.iter().chain(files) {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let linux = Linux::at(folder.path());
        (folder, linux)
    }

    #[test]
    fn what_can_be_dropped_is_left_and_what_is_dirty_is_not() {
        let (_folder, linux) = host("", "", &[]);
        let bytes = (21_566_708 - 327_760 - 16) * 1024;
        assert_eq!(linux.left(), Some(Left { bytes, group: None }));
        assert_eq!(linux.total(), Some(24_684_084 * 1024));
        for text in [
            "",
            "MemTotal: 1 kB\n",
            "MemTotal: 1 kB\nMemAvailable: x kB\n",
            "MemTotal: 1\nMemAvailable: 1 kB\n",
        ] {
            assert_eq!(Meminfo::parse(text), None, "{text}");
        }
        let more = "MemTotal: 8 kB\nMemAvailable: 4 kB\nDirty: 9 kB\n";
        assert_eq!(Meminfo::parse(more).unwrap().left(), 0);
        let nowhere = Linux::at(Path::new("/nonexistent"));
        assert_eq!((nowhere.left(), nowhere.total()), (None, None));
    }

    #[test]
    fn the_group_with_least_left_counts_in_version_1() {
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
            32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
            35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,memory\n\
            41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        let own = "4:memory:/outer/inner\n3:cpu:/other\n0::/\n";
        let unlimited = "9223372036854771712\n";
        let stat = "cache 1\ninactive_file 77\ntotal_cache 900\ntotal_shmem 300\ntotal_dirty 30\ntotal_writeback 20\n\
            total_inactive_file 400\ntotal_active_file 200\n";
        let files = [
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", unlimited),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "9000\n"),
            ("sys/fs/cgroup/memory/outer/memory.limit_in_bytes", "10000\n"),
            ("sys/fs/cgroup/memory/outer/memory.usage_in_bytes", "9900\n"),
            ("sys/fs/cgroup/memory/outer/memory.stat", stat),
            ("sys/fs/cgroup/memory/outer/inner/memory.limit_in_bytes", unlimited),
            ("sys/fs/cgroup/memory/outer/inner/memory.usage_in_bytes", "9000\n"),
        ];
        let (folder, linux) = host(mounts, own, &files);
        let outer = Some("/sys/fs/cgroup/memory/outer".to_owned());
        assert_eq!(linux.left(), Some(Left { bytes: 100 + 600 - 50, group: outer }));
        assert_eq!(linux.total(), Some(10_000));
        // The process is moved to where nothing limits it.
        fs::write(folder.path().join("proc/self/cgroup"), "4:memory:/\n").unwrap();
        assert_eq!(linux.left().unwrap().group, None);
    }

    #[test]
    fn paths_that_are_no_utf_8_hide_no_limit() {
        let folder = tempfile::tempdir().unwrap();
        let mounts: &[u8] = b"30 1 0:27 / /mnt/bad\xffdir rw - tmpfs none rw\n\
            41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let limit = OsStr::from_bytes(b"sys/fs/cgroup/app\xff/memory.max");
        let files: [(&OsStr, &[u8]); 4] = [
            (OsStr::new("proc/meminfo"), MEMINFO.as_bytes()),
            (OsStr::new("proc/self/mountinfo"), mounts),
            (OsStr::new("proc/self/cgroup"), b"5:cpu:/\xfe\n0::/app\xff\n"),
            (limit, b"30000\n"),
        ];
        for (name, bytes) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        assert_eq!(Linux::at(folder.path()).total(), Some(30_000));
    }

    #[test]
    fn the_group_with_least_left_counts_in_version_2_and_high_is_a_limit_too() {
        // A container: its group is the root of what it sees mounted, and cannot be left upwards.
        let mounts = "41 31 0:38 /box /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let stat = "anon 5\nfile 900\nshmem 300\nfile_dirty 100\nfile_writeback 50\ninactive_file 400\nactive_file 200\n\
            slab_reclaimable 1000\nslab 3000\n";
        let files = [
            ("sys/fs/cgroup/memory.max", "30000\n"),
            ("sys/fs/cgroup/memory.high", "20000\n"),
            ("sys/fs/cgroup/memory.current", "19000\n"),
            ("sys/fs/cgroup/memory.stat", stat),
            ("sys/fs/cgroup/app/memory.max", "max\n"),
            ("sys/fs/cgroup/app/memory.high", "max\n"),
            ("sys/fs/cgroup/app/memory.current", "19000\n"),
        ];
        let expected = Some(Left { bytes: 1000 + 1600 - 150, group: Some("/sys/fs/cgroup".to_owned()) });
        for own in ["0::/box/app\n", "0::/box\n", "0::/elsewhere\n", "0::/../outside\n"] {
            let (_folder, linux) = host(mounts, own, &files);
            assert_eq!((linux.left(), linux.total()), (expected.clone(), Some(20_000)), "{own}");
        }
        // More than the limit is in use: it was lowered.
        let full = [
            files[0],
            files[1],
            ("sys/fs/cgroup/memory.current", "25000\n"),
            ("sys/fs/cgroup/memory.stat", "anon 25000\n"),
        ];
        let (_folder, linux) = host(mounts, "0::/box\n", &full);
        assert_eq!(linux.left().unwrap().bytes, 0);
        // What cannot be read limits nothing.
        let broken = [("sys/fs/cgroup/memory.max", "much\n"), ("sys/fs/cgroup/memory.current", "1\n")];
        let (_folder, linux) = host(mounts, "0::/box\n", &broken);
        assert_eq!(linux.left().unwrap().group, None);
    }
}
