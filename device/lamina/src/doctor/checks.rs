//! The checks.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use indicatif::BinaryBytes;
use lamina_qemu::find::{FindError, Install, PROGRAM, ProbeError};
use lamina_qemu::recipe::{self, RecipeError};
use lamina_qemu::version::OLDEST;
use lamina_qemu::{Accel, Qemu, Version};
use lamina_serve::private_dir::Fault;
use lamina_serve::{PrivateDir, ServeError, fuse_present};
use lamina_store::host_memory::HostMemory;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, access, geteuid};

use super::Finding;
use crate::args::run_dir;

/// The first Linux that gives a dead worker's requests to the next one.
const REQUESTS_GIVEN_AGAIN: (u32, u32) = (6, 9);
/// Debian's suite that has a QEMU for CXL.
const BACKPORTS: &str = "trixie-backports";
/// The first QEMU that takes the device's disks.
const DISKS: Version = Version { major: 7, minor: 2, patch: 0 };
/// Descriptors that a device with all its sockets, guests and API connections has open.
const DESCRIPTORS: u64 = 1024;
/// Descriptors without which not even a mount and an API get along.
const FEWEST_DESCRIPTORS: u64 = 128;
/// A guest's ordinary memory, and some for the device.
const MEMORY: u64 = 2 << 30;
/// What a mount without a guest gets along with.
const MIN_MEMORY: u64 = 256 << 20;
/// The capability that spares the holder when Linux looks for memory.
const CAP_SYS_RESOURCE: u64 = 1 << 24;

/// Everything, on this host.
pub(super) fn all() -> Vec<Finding> {
    let root = geteuid().is_root();
    let limit = |of| getrlimit(of).map_or((0, 0), |(soft, hard)| (soft, hard));
    vec![
        fuse(fuse_present(), root),
        kernel(&fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default()),
        rights(usable(&run_dir()), &run_dir(), capabilities(), root),
        qemu(
            Qemu::find(OLDEST, false),
            Qemu::find(DISKS, false).is_ok(),
            unpacked(),
            has_backports(Path::new("/etc/apt")),
        ),
        kvm(Accel::detect(), File::options().read(true).write(true).open("/dev/kvm").map(drop)),
        image(in_path("mmdebstrap"), cached("guest-").is_some()),
        kept(recipe::cache()),
        processor(&features()),
        memory(HostMemory::of_this_host(None).left()),
        descriptors(limit(Resource::RLIMIT_NOFILE)),
        locked(limit(Resource::RLIMIT_MEMLOCK)),
        shared(statvfs("/dev/shm").ok().map(|found| found.blocks() * found.fragment_size())),
    ]
}

fn fuse(found: Result<(), ServeError>, root: bool) -> Finding {
    let what = "FUSE";
    let needed = "nothing can be mounted; disks (--vhost-user) can be served without";
    match found {
        Ok(()) if root => Finding::ok(what, "/dev/fuse", "devices can be mounted"),
        Ok(()) => Finding::ok(
            what,
            "/dev/fuse and fusermount3",
            "devices can be mounted, for this user (user_allow_other is not needed)",
        ),
        Err(ServeError::NoFusermount) => {
            Finding::missing(what, "no fusermount3 in PATH", needed).mended_by("sudo apt-get install fuse3")
        }
        Err(ServeError::NoFuseDevice) => Finding::missing(what, "no /dev/fuse", needed)
            .mended_by("sudo modprobe fuse    # in a container: run it with --device /dev/fuse"),
        Err(why) => Finding::missing(what, why.to_string(), needed).mended_by("sudo chmod 666 /dev/fuse"),
    }
}

fn kernel(release: &str) -> Finding {
    let what = "kernel";
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse().ok());
    let version: Option<(u32, u32)> = numbers.next().zip(numbers.next());
    let release = format!("Linux {}", release.trim());
    match version {
        Some(version) if version >= REQUESTS_GIVEN_AGAIN => Finding::ok(
            what,
            release,
            "nobody notices a death of the worker; CXL is the guest's kernel's, this one needs none",
        ),
        _ => Finding::limited(
            what,
            release,
            "a request that a dying worker has is lost: the first Linux that gives it to the next is 6.9",
        ),
    }
}

/// Whether sockets can be made in a directory, which is made for that if it is missing; else why
/// not, and what mends it. Makes nothing.
fn usable(dir: &Path) -> Result<(), (String, String)> {
    let elsewhere = || "export XDG_RUNTIME_DIR=$HOME/.run && mkdir -pm700 $HOME/.run".to_owned();
    if fs::symlink_metadata(dir).is_ok() {
        return PrivateDir::open(dir).map(drop).map_err(|why| {
            let mode = matches!(why, ServeError::NotPrivate { fault: Fault::Mode { .. }, .. });
            let mend = if mode { format!("chmod go-w {}", dir.display()) } else { elsewhere() };
            (why.to_string(), mend)
        });
    }
    let above = dir.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    let why = if above.is_dir() {
        access(above, AccessFlags::W_OK).err().map(|why| why.to_string())
    } else {
        Some("it is no directory".to_owned())
    };
    why.map_or(Ok(()), |why| Err((format!("nothing can be made in {}: {why}", above.display()), elsewhere())))
}

fn rights(run_dir: Result<(), (String, String)>, path: &Path, capabilities: u64, root: bool) -> Finding {
    let what = "rights";
    let who = if root { "root".to_owned() } else { format!("user {}", geteuid()) };
    let made = format!("sockets are made in {}", path.display());
    match run_dir {
        Err((why, mend)) => {
            Finding::missing(what, why, "no socket can be made there; --run-dir names another directory")
                .mended_by(mend)
        }
        Ok(()) if capabilities & CAP_SYS_RESOURCE == 0 => Finding::ok(
            what,
            who,
            format!("{made}; where memory runs out, Linux may choose the holder (CAP_SYS_RESOURCE)"),
        ),
        Ok(()) => Finding::ok(what, who, made),
    }
}

/// Whether apt's sources name the suite that has a QEMU for CXL. Elsewhere apt knows no such
/// release.
fn has_backports(apt: &Path) -> bool {
    let listed = fs::read_dir(apt.join("sources.list.d")).into_iter().flatten().flatten();
    let mut sources = listed.map(|entry| entry.path()).chain([apt.join("sources.list")]);
    let is_named = |line: &str| !line.trim_start().starts_with('#') && line.contains(BACKPORTS);
    sources.any(|source| fs::read_to_string(source).is_ok_and(|text| text.lines().any(is_named)))
}

fn qemu(cxl: Result<Qemu, FindError>, disks: bool, unpacked: Option<Qemu>, has_backports: bool) -> Finding {
    let what = "QEMU";
    let whole = "guests see the device in every way";
    let older = match (cxl, unpacked) {
        (Ok(qemu), _) | (Err(_), Some(qemu)) => {
            let (Install::Host(path) | Install::Root(path)) = &qemu.install;
            return Finding::ok(what, format!("{} at {}", qemu.version, path.display()), whole);
        }
        (Err(why @ (FindError::Named(_) | FindError::Given(_))), None) => {
            let why = crate::out::reason(&why.into());
            return Finding::limited(what, why, "no guest can be booted").mended_by("unset LAMINA_QEMU");
        }
        (Err(FindError::None { host, .. }), None) => *host,
    };
    let means = if disks {
        format!(
            "guests see the device as disks (--attach vhost-user); for CXL {OLDEST} is needed, which `lamina boot` unpacks"
        )
    } else {
        format!("the first `lamina boot` unpacks QEMU {OLDEST} or newer from Debian's packages")
    };
    let found = match older {
        ProbeError::NotInPath => format!("no {PROGRAM} in PATH"),
        other => other.to_string(),
    };
    let mend = if has_backports {
        format!("sudo apt-get install qemu-system-x86/{BACKPORTS}")
    } else {
        format!("export LAMINA_QEMU=PROGRAM  # a QEMU of {OLDEST} or newer")
    };
    Finding::limited(what, found, means).mended_by(mend)
}

fn kvm(accel: Accel, opened: io::Result<()>) -> Finding {
    let what = "KVM";
    let emulated = "guests are emulated: they boot in tens of seconds and run tens of times slower";
    match (accel, opened) {
        (Accel::Kvm, _) => Finding::ok(what, "/dev/kvm", "guests run on the processor"),
        (Accel::Tcg, Err(why)) if why.kind() == io::ErrorKind::PermissionDenied => {
            Finding::limited(what, "no right to /dev/kvm", emulated)
                .mended_by("sudo usermod -aG kvm $USER    # then log in anew")
        }
        (Accel::Tcg, Err(why)) if why.kind() == io::ErrorKind::NotFound => {
            Finding::limited(what, "no /dev/kvm", emulated)
                .mended_by("sudo modprobe kvm_intel || sudo modprobe kvm_amd")
        }
        (Accel::Tcg, Err(why)) => Finding::limited(what, format!("/dev/kvm: {why}"), emulated),
        (Accel::Tcg, Ok(())) => Finding::limited(
            what,
            "the processor announces neither vmx nor svm",
            format!("{emulated}; in a virtual machine, its host must allow nested ones"),
        ),
    }
}

fn image(mmdebstrap: bool, cached: bool) -> Finding {
    let what = "guest";
    if cached {
        let means = "`lamina boot` needs no network unless its recipe has changed since";
        Finding::ok(what, "an image of some recipe in the cache", means)
    } else if mmdebstrap {
        Finding::ok(what, "mmdebstrap", "the first `lamina boot` fetches Debian's kernel")
    } else {
        Finding::limited(what, "no mmdebstrap", "no guest's image can be made")
            .mended_by("sudo apt-get install mmdebstrap xz-utils zstd")
    }
}

/// What a processor is asked for, and whether it has it.
type Features = [(&'static str, bool); 12];

#[cfg(target_arch = "x86_64")]
fn features() -> Features {
    macro_rules! asked {
        ($($name:tt),+) => { [$(($name, std::arch::is_x86_feature_detected!($name))),+] };
    }
    asked!(
        "popcnt",
        "avx2",
        "bmi1",
        "bmi2",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512vbmi",
        "avx512vbmi2",
        "avx512bitalg",
        "avx512vpopcntdq",
        "gfni"
    )
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Features {
    [("an x86-64 processor", false); 12]
}

/// How many of the [features] the kernels of AVX2 need; those of AVX-512 need all.
const OF_AVX2: usize = 4;

fn processor(features: &Features) -> Finding {
    let what = "processor";
    let lacking = |of: &[(&str, bool)]| {
        let names: Vec<_> = of.iter().filter(|(_, has)| !has).map(|(name, _)| *name).collect();
        names.join(", ")
    };
    let (all, avx2) = (lacking(features), lacking(&features[..OF_AVX2]));
    if all.is_empty() {
        Finding::ok(what, "AVX-512 with VBMI2 and GFNI", "the fastest kernels are used")
    } else if avx2.is_empty() {
        Finding::ok(what, format!("AVX2 and BMI2, without {all}"), "the kernels of AVX2 are used")
    } else {
        Finding::limited(what, format!("without {avx2}"), "portable code is used, several times slower")
    }
}

fn memory(left: Option<u64>) -> Finding {
    let what = "memory";
    let Some(left) = left else {
        return Finding::limited(what, "unknown", "a store in memory does not know when to stop");
    };
    let found = format!("{} left for a store", BinaryBytes(left));
    if left < MIN_MEMORY {
        Finding::limited(what, found, "stores into a device will find no space")
            .mended_by("lamina serve --image FILE    # on a disk")
    } else if left < MEMORY {
        Finding::limited(what, found, "enough for a mount, little for a guest")
            .mended_by("lamina serve --image FILE    # on a disk")
    } else {
        Finding::ok(what, found, "a device in memory and a guest have room")
    }
}

fn descriptors((soft, hard): (u64, u64)) -> Finding {
    let what = "descriptors";
    let found = format!("{soft}, at most {hard}");
    if soft >= DESCRIPTORS {
        return Finding::ok(what, found, "enough for every guest and connection");
    }
    let mend = format!("ulimit -n {}", DESCRIPTORS.min(hard));
    let finding = if soft < FEWEST_DESCRIPTORS {
        Finding::missing(what, found, "too few for a mount and its API")
    } else {
        Finding::limited(what, found, format!("with many guests and connections {DESCRIPTORS} are needed"))
    };
    if hard > soft { finding.mended_by(mend) } else { finding }
}

fn locked((soft, _): (u64, u64)) -> Finding {
    let found =
        if soft == nix::libc::RLIM_INFINITY { "any".to_owned() } else { BinaryBytes(soft).to_string() };
    Finding::ok("locked memory", found, "the device locks none; a QEMU with VFIO or mem-lock would")
}

fn shared(bytes: Option<u64>) -> Finding {
    let what = "shared memory";
    match bytes {
        Some(bytes) => Finding::ok(
            what,
            format!("{} at /dev/shm", BinaryBytes(bytes)),
            "an --image there may grow so far; nothing else of the device is there",
        ),
        None => Finding::ok(what, "no /dev/shm", "nothing of the device is there"),
    }
}

/// What images/lib.sh refuses is told before it does.
fn kept(cache: Result<PathBuf, RecipeError>) -> Finding {
    let what = "cache";
    match cache {
        Err(why) => Finding::limited(what, "none", why.to_string()),
        Ok(path) if path.to_string_lossy().contains(|c: char| c.is_whitespace() || ":;".contains(c)) => {
            let why = "no guest can be booted: it has a space, a colon or a semicolon; set LAMINA_CACHE";
            Finding::limited(what, path.display().to_string(), why)
        }
        Ok(path) => Finding::ok(what, path.display().to_string(), "QEMU and guests' images are kept there"),
    }
}

/// The QEMU that `images/tools` unpacked before.
fn unpacked() -> Option<Qemu> {
    Qemu::probe(&cached("tools-")?, OLDEST).ok()
}

/// A folder in the cache that a recipe made, whole. Which recipe made it, its own program tells.
fn cached(prefix: &str) -> Option<PathBuf> {
    cached_in(&recipe::cache().ok()?, prefix)
}

fn cached_in(cache: &Path, prefix: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(cache).into_iter().flatten().flatten();
    let ours = entries.filter(|entry| {
        // What is being built is called otherwise, and has this file last.
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with(prefix) && !name.contains(".build.") && entry.path().join("complete").is_file()
    });
    ours.max_by_key(|entry| entry.metadata().and_then(|found| found.modified()).ok())
        .map(|entry| entry.path())
}

fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// The effective capabilities of this process.
fn capabilities() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    /// What was found is not as it should be, and what is said of it has `part`.
    fn says(finding: &Finding, verdict: Verdict, part: &str) {
        let mend = finding.mend.as_deref().unwrap_or_default();
        let all = format!("{} {} {mend}", finding.found, finding.means);
        assert!(finding.verdict == verdict && all.contains(part), "{part}: {finding:?}");
    }

    #[test]
    fn a_cache_from_which_no_guest_boots_is_told() {
        says(&kept(Err(RecipeError::NoCache)), Verdict::Limited, "LAMINA_CACHE");
        for path in ["/a cache", "/a:b", "/a;b"] {
            says(&kept(Ok(path.into())), Verdict::Limited, "no guest can be booted");
        }
        says(&kept(Ok("/cache".into())), Verdict::Ok, "/cache");
    }

    #[test]
    fn only_what_a_recipe_made_whole_is_in_the_cache() {
        let cache = tempfile::tempdir().unwrap();
        let make = |name: &&str| fs::create_dir_all(cache.path().join(name)).unwrap();
        let complete = |name: &&str| fs::write(cache.path().join(name).join("complete"), "").unwrap();
        ["guest-1", "guest-2.build.x/out", "other-3"].iter().for_each(make);
        fs::write(cache.path().join("guest-1.lock"), "").unwrap();
        ["guest-2.build.x", "other-3"].iter().for_each(complete);
        assert_eq!(cached_in(cache.path(), "guest-"), None);
        complete(&"guest-1");
        assert_eq!(cached_in(cache.path(), "guest-"), Some(cache.path().join("guest-1")));
    }

    #[test]
    fn what_lacks_for_a_mount_is_missing_and_has_its_command() {
        says(&fuse(Err(ServeError::NoFuseDevice), true), Verdict::Missing, "modprobe fuse");
        says(&fuse(Err(ServeError::NoFusermount), false), Verdict::Missing, "apt-get install fuse3");
        let source = io::ErrorKind::PermissionDenied.into();
        says(&fuse(Err(ServeError::FuseDevice { source }), true), Verdict::Missing, "chmod");
        says(&fuse(Ok(()), true), Verdict::Ok, "can be mounted");
        says(&descriptors((64, 4096)), Verdict::Missing, "ulimit -n 1024");
        says(&descriptors((256, 512)), Verdict::Limited, "ulimit -n 512");
        assert_eq!(descriptors((256, 256)).mend, None);
        says(&descriptors((1024, 1024)), Verdict::Ok, "enough");
        let open = tempfile::tempdir().unwrap();
        let path = open.path();
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let chmod = format!("chmod go-w {}", path.display());
        says(&rights(usable(path), path, 0, false), Verdict::Missing, &chmod);
        let file = path.join("file");
        fs::write(&file, "").unwrap();
        says(&rights(usable(&file), &file, 0, false), Verdict::Missing, "--run-dir");
        says(&rights(usable(&file.join("in it")), &file, 0, false), Verdict::Missing, "XDG_RUNTIME_DIR");
        let new = path.join("new/one");
        says(&rights(usable(&new), &new, 0, false), Verdict::Ok, "Linux may choose the holder");
        assert!(!new.exists() && !path.join("new").exists());
    }

    #[test]
    fn an_old_or_an_unknown_kernel_is_limited() {
        for release in ["6.8.0-41-generic\n", "5.15.0", "7", "", "x.y"] {
            says(&kernel(release), Verdict::Limited, "6.9");
        }
        for release in ["6.9.0-rc1\n", "6.12.1", "7.0.0", "10.1"] {
            says(&kernel(release), Verdict::Ok, release.trim());
        }
    }

    #[test]
    fn a_guest_that_is_slow_or_cannot_be_is_limited() {
        let denied = || Err(io::ErrorKind::PermissionDenied.into());
        says(&kvm(Accel::Tcg, denied()), Verdict::Limited, "usermod -aG kvm");
        says(&kvm(Accel::Tcg, Err(io::ErrorKind::NotFound.into())), Verdict::Limited, "modprobe kvm");
        says(&kvm(Accel::Tcg, Ok(())), Verdict::Limited, "nested");
        says(&kvm(Accel::Kvm, Ok(())), Verdict::Ok, "/dev/kvm");
        says(&image(false, false), Verdict::Limited, "apt-get install mmdebstrap");
        says(&image(true, false), Verdict::Ok, "fetches");
        says(&image(false, true), Verdict::Ok, "no network");
        let none = || {
            let tools = lamina_qemu::find::ToolsError::NotTried;
            Err(FindError::None { oldest: OLDEST, host: Box::new(ProbeError::NotInPath), tools })
        };
        let of = |version| {
            let install = Install::Host("/usr/bin/qemu".into());
            Qemu { install, version }
        };
        says(&qemu(none(), false, None, true), Verdict::Limited, "no qemu-system-x86_64 in PATH");
        says(&qemu(none(), true, None, true), Verdict::Limited, "--attach vhost-user");
        says(&qemu(none(), false, Some(of(OLDEST)), true), Verdict::Ok, "11.1.0 at /usr/bin/qemu");
        says(&qemu(Ok(of(OLDEST)), true, None, true), Verdict::Ok, "in every way");
        says(&qemu(none(), true, None, true), Verdict::Limited, "apt-get install qemu-system-x86/trixie");
        let elsewhere = qemu(none(), true, None, false);
        says(&elsewhere, Verdict::Limited, "export LAMINA_QEMU=PROGRAM  # a QEMU of 11.1.0 or newer");
        assert!(!elsewhere.mend.unwrap().contains("apt"));
        let named = Err(FindError::Named(ProbeError::NotInPath));
        says(&qemu(named, false, None, true), Verdict::Limited, "unset LAMINA_QEMU");
    }

    #[test]
    fn a_suite_is_named_only_where_apt_knows_it() {
        let apt = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            fs::create_dir_all(apt.path().join("sources.list.d")).unwrap();
            fs::write(apt.path().join(name), text).unwrap();
        };
        assert!(!has_backports(apt.path()));
        write(
            "sources.list",
            "deb http://deb.debian.org/debian bookworm main\n# deb x trixie-backports main\n",
        );
        assert!(!has_backports(apt.path()));
        write("sources.list.d/debian.sources", "Suites: trixie trixie-backports\n");
        assert!(has_backports(apt.path()));
    }

    #[test]
    fn the_processor_and_the_memory_are_told() {
        let mut all = features().map(|(name, _)| (name, true));
        says(&processor(&all), Verdict::Ok, "the fastest");
        all[11].1 = false;
        says(&processor(&all), Verdict::Ok, "without gfni");
        all[1].1 = false;
        says(&processor(&all), Verdict::Limited, "without avx2");
        says(&memory(Some(1 << 40)), Verdict::Ok, "1.00 TiB left");
        says(&memory(Some(1 << 30)), Verdict::Limited, "--image");
        says(&memory(Some(1 << 20)), Verdict::Limited, "no space");
        says(&memory(None), Verdict::Limited, "unknown");
        says(&locked((8 << 20, 0)), Verdict::Ok, "8.00 MiB");
        says(&shared(Some(64 << 20)), Verdict::Ok, "64.00 MiB at /dev/shm");
        says(&shared(None), Verdict::Ok, "no /dev/shm");
    }
}
