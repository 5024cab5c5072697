//! How values are written: sizes, directories, disks and what else has a form of its own.

use std::path::{Path, PathBuf};

use lamina_codec::format::Format;
use lamina_codec::kv::{KvLayout, Shape};
use lamina_codec::packkv::RelativeScale;
use lamina_codec::{Codec, UnknownCodec};
use lamina_device::analyze::packkv::Scales;
use lamina_device::device::MAX_OPEN_WINDOWS;
use lamina_model::dram::Profile;
use lamina_pool::Geometry;
use lamina_qemu::Accel;
use lamina_serve::Shows;
use nix::unistd::{Uid, geteuid};

use super::{Codecs, Dimensions};

/// The directory for sockets when none is named: in the user's own runtime directory, or one of
/// this user's in /tmp. Somebody else may have made that first; it is not used then.
pub(crate) fn run_dir() -> PathBuf {
    run_dir_of(geteuid(), std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from), &std::env::temp_dir())
}

fn run_dir_of(user: Uid, runtime: Option<PathBuf>, temporary: &Path) -> PathBuf {
    match runtime.filter(|dir| dir.is_absolute()) {
        Some(dir) => dir.join("lamina"),
        None if user.is_root() => PathBuf::from("/run/lamina"),
        None => temporary.join(format!("lamina-{user}")),
    }
}

/// A size: decimal or 0x-hexadecimal, or decimal with K, M, G or T for powers of 1024 (KiB and so
/// on are taken too).
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size: write for example 4096, 0x1000, 256M or 64G");
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).map_err(|_| wrong());
    }
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit {
        "" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is more than 64 bits can count"))
}

/// Lets a negative number be the value of an option, so that its bounds are said and not that `-1`
/// is no option.
pub(super) fn takes_negative(arg: clap::Arg) -> clap::Arg {
    if arg.is_positional() || !arg.get_action().takes_values() {
        arg
    } else {
        arg.allow_negative_numbers(true)
    }
}

/// Bytes of a pool.
pub(super) fn pool_bytes(text: &str) -> Result<u64, String> {
    let bytes = bytes(text)?;
    let least = Geometry::fitting(0).bytes().map_err(|why| why.to_string())?;
    if bytes < least { Err(format!("a pool takes {least} bytes at least")) } else { Ok(bytes) }
}

/// A whole number within bounds.
pub(super) fn whole<T: TryFrom<u64>, const LEAST: u64, const MOST: u64>(text: &str) -> Result<T, String> {
    let number = text.parse().ok().filter(|number| (LEAST..=MOST).contains(number));
    let number = number.and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| format!("it must be a whole number from {LEAST} to {MOST}"))
}

/// Bits of an element.
pub(super) fn element_bits(text: &str) -> Result<u32, String> {
    let bits = text.parse().ok().filter(|bits| matches!(bits, 4 | 8 | 16 | 32));
    bits.ok_or_else(|| "it must be 4, 8, 16 or 32".to_owned())
}

/// A module that is known.
pub(super) fn dram(name: &str) -> Result<Profile, String> {
    Profile::named(name).map_err(|why| why.to_string())
}

pub(super) fn codecs(text: &str) -> Result<Codecs, String> {
    if text == "all" {
        return Ok(Codecs(Codec::ALL.to_vec()));
    }
    let mut codecs = Vec::new();
    for name in text.split(',') {
        let codec = name.parse().map_err(|why: UnknownCodec| why.to_string())?;
        if !codecs.contains(&codec) {
            codecs.push(codec);
        }
    }
    Ok(Codecs(codecs))
}

pub(crate) fn kv_layout(text: &str) -> Result<KvLayout, String> {
    // Scales of lossy coding have points, and are not looked at.
    let numbers = text.split(",lossy=").next().unwrap_or_default();
    let mut numbers = numbers.split(|c: char| !c.is_ascii_digit());
    if let Some(large) = numbers.find(|digits| !digits.is_empty() && digits.parse::<u32>().is_err()) {
        return Err(format!(
            "{large} is too large: a window has 1 to 256 tokens, and all other numbers are at most {}",
            u32::MAX
        ));
    }
    let layout =
        text.parse::<KvLayout>().and_then(|layout| Shape::new(Format::Bf16, &layout).map(|_| layout));
    layout.map_err(|why| {
        format!(
            "{why}: write CHANNELS or CHANNELS,WINDOW, for example 1024,128; rows with padding as CHANNELS,WINDOW,stride=STRIDE; \
             a paged cache as PRESET:HEADS,HEAD_SIZE,BLOCK_SIZE[,WINDOW] with the preset nhd, hnd, nhd_kv or hnd_kv"
        )
    })
}

pub(super) fn packkv_scales(text: &str) -> Result<Scales, String> {
    let scale = |text: &str| {
        let number = text.parse().map_err(|_| format!("{text:?} is no number: write for example 0.1,0.2"))?;
        RelativeScale::new(number).map_err(|why| why.to_string())
    };
    let (k, v) = text.split_once(',').ok_or_else(|| format!("{text:?} is not K,V, for example 0.1,0.2"))?;
    Ok(Scales { k: scale(k)?, v: scale(v)? })
}

pub(super) fn shape(text: &str) -> Result<Dimensions, String> {
    let dimensions = text.split('x').map(|dimension| dimension.parse().ok()).collect::<Option<Vec<u64>>>();
    let whole = dimensions.filter(|all| all.iter().try_fold(1_u64, |of, n| of.checked_mul(*n)).is_some());
    whole.map(Dimensions).ok_or_else(|| {
        format!(
            "{text:?} is no shape: write its dimensions, for example 32000x4096, fewer than 2^64 elements"
        )
    })
}

pub(super) fn open_windows(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(windows @ 1..=MAX_OPEN_WINDOWS) => Ok(windows),
        _ => Err(format!("{text:?} is no number of windows from 1 to {MAX_OPEN_WINDOWS}")),
    }
}

pub(super) fn put(text: &str) -> Result<(PathBuf, String), String> {
    match text.split_once('=') {
        Some((host, guest)) if !host.is_empty() && guest.starts_with('/') => {
            Ok((host.into(), guest.to_owned()))
        }
        _ => Err(format!("{text:?} is no HOST=GUEST: write for example ./reader=/bin/reader")),
    }
}

/// What `--vhost-user` asks for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum DiskArg {
    /// Both windows, on sockets in this directory.
    Both(PathBuf),
    /// One disk.
    One(PathBuf, Shows),
}

pub(super) fn disks(text: &str) -> Result<DiskArg, String> {
    let Some((path, what)) = text.split_once('=') else {
        return if text.is_empty() {
            Err("a directory has a name".to_owned())
        } else {
            Ok(DiskArg::Both(text.into()))
        };
    };
    let shows = match (what, what.rsplit_once(',')) {
        ("base", _) => Shows::Base,
        ("views", _) => Shows::Views,
        (_, Some((tensor, view))) if !tensor.is_empty() => {
            Shows::View { tensor: tensor.to_owned(), view: view.to_owned() }
        }
        _ => return Err(format!("{what:?} is nothing a disk shows: write base, views or TENSOR,VIEW")),
    };
    if path.is_empty() { Err("a socket has a path".to_owned()) } else { Ok(DiskArg::One(path.into(), shows)) }
}

pub(super) fn accel(text: &str) -> Result<Accel, String> {
    [Accel::Kvm, Accel::Tcg]
        .into_iter()
        .find(|accel| accel.to_string() == text)
        .ok_or_else(|| format!("{text:?} is neither kvm nor tcg"))
}

pub(super) fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads @ 1..=64) => Ok(threads),
        _ => Err(format!("{text:?} is no number of threads from 1 to 64")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_no_fewer_bytes_than_it_needs() {
        let least = Geometry::fitting(0).bytes().unwrap();
        assert_eq!(pool_bytes(&least.to_string()), Ok(least));
        for few in ["0", "1", "4096", &(least - 1).to_string()] {
            assert!(pool_bytes(few).unwrap_err().contains(&least.to_string()), "{few}");
        }
    }

    #[test]
    fn the_default_directory_for_sockets_is_the_users_own() {
        let of = |user, runtime: Option<&str>| {
            run_dir_of(Uid::from_raw(user), runtime.map(PathBuf::from), Path::new("/tmp"))
        };
        assert_eq!(of(7, Some("/run/user/7")), Path::new("/run/user/7/lamina"));
        for none in [None, Some(""), Some("run")] {
            assert_eq!(of(7, none), Path::new("/tmp/lamina-7"));
            assert_eq!(of(0, none), Path::new("/run/lamina"));
        }
    }

    #[test]
    fn codecs_and_kv_layouts_are_read_as_documented() {
        assert_eq!(codecs("all").unwrap().0, Codec::ALL);
        assert_eq!(codecs("zstd,lz4,zstd").unwrap().0, [Codec::Zstd, Codec::Lz4]);
        assert!(codecs("zstd,gzip").unwrap_err().contains("gzip") && codecs("").is_err());
        assert_eq!(kv_layout("64"), Ok(KvLayout::rows(64, 128)));
        assert_eq!(kv_layout("64,256"), Ok(KvLayout::rows(64, 256)));
        for text in ["", "0", "64,0", "64,", "x", "64,1,2", "-1"] {
            assert!(kv_layout(text).unwrap_err().contains("CHANNELS,WINDOW"), "{text}");
        }
        // The bound that is said is the codec's.
        assert!(kv_layout("64,256").is_ok() && kv_layout("64,257").is_err());
        for text in ["64,99999999999", "99999999999", "64,128,stride=99999999999", "nhd:8,99999999999,16"] {
            let why = kv_layout(text).unwrap_err();
            assert!(why.starts_with("99999999999 is too large: a window has 1 to 256 tokens"), "{why}");
        }
        assert!(kv_layout("64,128,lossy=packkv:0.10000000000000001").is_ok());
    }

    #[test]
    fn disks_are_read_as_documented() {
        assert_eq!(disks("/run/disks"), Ok(DiskArg::Both("/run/disks".into())));
        assert_eq!(disks("b.sock=base"), Ok(DiskArg::One("b.sock".into(), Shows::Base)));
        assert_eq!(disks("v.sock=views"), Ok(DiskArg::One("v.sock".into(), Shows::Views)));
        let view = Shows::View { tensor: "a,b=c".to_owned(), view: "e8m3:packed".to_owned() };
        assert_eq!(disks("q.sock=a,b=c,e8m3:packed"), Ok(DiskArg::One("q.sock".into(), view)));
        for text in ["", "=base", "s=", "s=other", "s=,full"] {
            assert!(disks(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_read_as_documented() {
        for (text, value) in [
            ("0", 0),
            ("4096", 4096),
            ("0x1000", 4096),
            ("256M", 256 << 20),
            ("64G", 64 << 30),
            ("1KiB", 1024),
        ] {
            assert_eq!(bytes(text), Ok(value), "{text}");
        }
        for text in ["", "M", "-1", "1.5G", "256MB", "99999999999999999999", "99999999T", "0x"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
