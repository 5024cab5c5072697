//! Where a device's API answers.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use super::values::run_dir;

/// Where a device's API answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ApiAt {
    /// Nothing was said: that of the device in the usual place, or of the only one that is mounted.
    /// Which one that is, is found once for a command.
    Usual(Arc<OnceLock<PathBuf>>),
    /// A Unix socket.
    Socket(PathBuf),
    /// `lamina serve --tcp`.
    Address(SocketAddr),
}

impl ApiAt {
    /// What stands for nothing in the table of options; nobody can type it.
    pub(crate) const UNSAID: &str = "\0";

    /// The socket of a device whose sockets are in `run_dir`.
    pub(crate) fn in_dir(run_dir: &Path) -> Self {
        Self::Socket(socket_in(run_dir))
    }
}

/// The API's socket of a device whose sockets are in `run_dir`.
pub(crate) fn socket_in(run_dir: &Path) -> PathBuf {
    run_dir.join("api.sock")
}

impl Default for ApiAt {
    fn default() -> Self {
        Self::in_dir(&run_dir())
    }
}

impl From<PathBuf> for ApiAt {
    fn from(socket: PathBuf) -> Self {
        Self::Socket(socket)
    }
}

impl FromStr for ApiAt {
    type Err = &'static str;

    /// `ADDRESS:PORT`, also as a browser has it, or else a socket's path.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            // A variable that a script forgot to set means no device.
            "" => return Err("it is empty; leave --api out for the usual device"),
            Self::UNSAID => return Ok(Self::Usual(Arc::default())),
            _ => {}
        }
        let address = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
        let local = address.strip_prefix("localhost:").and_then(|port| port.parse().ok());
        let local = local.map(|port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        if let Some(address) = address.parse().ok().or(local) {
            return Ok(Self::Address(address));
        }
        // What can only have been meant for an address would be missed as a socket.
        let is_host =
            |text: &str| text == "localhost" || text.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        let has_port = is_host(host) && port.bytes().all(|digit| digit.is_ascii_digit());
        if text.contains("://") || is_host(address) || has_port {
            return Err(
                "an address is ADDRESS:PORT, of an IP address or localhost and a port up to 65535, as 127.0.0.1:8080; a socket of such a name is ./NAME",
            );
        }
        Ok(Self::Socket(text.into()))
    }
}

impl fmt::Display for ApiAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usual(found) => match found.get() {
                Some(path) => write!(f, "{}", path.display()),
                None => Self::default().fmt(f),
            },
            Self::Socket(path) => write!(f, "{}", path.display()),
            Self::Address(address) => write!(f, "{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_told_from_a_path() {
        let at = |text: &str| text.parse::<ApiAt>().unwrap();
        let address = ApiAt::Address(([127, 0, 0, 1], 8080).into());
        for text in ["127.0.0.1:8080", "localhost:8080", "http://127.0.0.1:8080/", "http://localhost:8080"] {
            assert_eq!(at(text), address, "{text}");
        }
        assert_eq!(at("[::1]:9").to_string(), "[::1]:9");
        assert!("".parse::<ApiAt>().is_err());
        assert_eq!(at(ApiAt::UNSAID), ApiAt::Usual(Arc::default()));
        for text in ["api.sock", "./127.0.0.1:8080", "/run/lamina/api.sock", "localhost:x", "a:1", "1"] {
            assert_eq!(at(text), ApiAt::Socket(text.into()), "{text}");
        }
        let bad = [
            "127.0.0.1:99999",
            "localhost:65536",
            "127.0.0.1",
            "[::1]",
            "::1",
            "localhost",
            "localhost:",
            "http://a:1",
            "https://localhost:1",
        ];
        for text in bad {
            assert!(text.parse::<ApiAt>().unwrap_err().contains("ADDRESS:PORT"), "{text}");
        }
    }
}
