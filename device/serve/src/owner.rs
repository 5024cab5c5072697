//! Whose a connection over loopback TCP is.
//!
//! A Unix socket has a mode; a TCP port on loopback is open to every user of the host. The kernel
//! tells in `/proc/net/tcp` and `tcp6` whose the socket at the other end of a connection is:
//!
//! * Only the device's own user and root are served. A connection whose owner cannot be told is
//!   nobody's.
//! * A socket that was closed belongs to nobody, and the kernel then calls it root's: what has no
//!   inode has no owner.
//! * It is asked once a connection, and only over TCP.

use std::net::SocketAddr;

use nix::unistd::{Uid, geteuid};
use procfs::ProcResult;
use procfs::net::{TcpNetEntry, TcpState, tcp, tcp6};

/// Who has the socket at `theirs` that is connected to `ours`, if anybody.
pub(super) fn owner(ours: SocketAddr, theirs: SocketAddr) -> Option<Uid> {
    [tcp, tcp6].into_iter().find_map(|table| in_table(table(), ours, theirs))
}

/// Whether this user may ask.
pub(super) fn may_ask(owner: Option<Uid>) -> bool {
    owner.is_some_and(|owner| owner.is_root() || owner == geteuid())
}

/// Who listens at a loopback address, if anybody.
pub(super) fn listener(address: SocketAddr) -> Option<Uid> {
    let is_it = |found: &TcpNetEntry| {
        let local = found.local_address;
        let same_host = local.ip().to_canonical() == address.ip() || local.ip().is_unspecified();
        found.state == TcpState::Listen && same_host && local.port() == address.port()
    };
    let tables = [tcp, tcp6].into_iter().filter_map(|table| table().ok()).flatten();
    let found: Vec<_> = tables.filter(is_it).collect();
    // Of one that listens at this very address and one that listens at all, the kernel takes the
    // former.
    let own = found.iter().find(|found| !found.local_address.ip().is_unspecified());
    own.or(found.first()).map(|found| Uid::from_raw(found.uid))
}

fn in_table(table: ProcResult<Vec<TcpNetEntry>>, ours: SocketAddr, theirs: SocketAddr) -> Option<Uid> {
    let table =
        table.inspect_err(|why| tracing::warn!("the owner of a connection is not known: {why}")).ok()?;
    let same = |one: SocketAddr, other: SocketAddr| {
        one.port() == other.port() && one.ip().to_canonical() == other.ip().to_canonical()
    };
    let is_it = |found: &TcpNetEntry| {
        found.inode != 0 && same(found.local_address, theirs) && same(found.remote_address, ours)
    };
    table.into_iter().find(is_it).map(|found| Uid::from_raw(found.uid))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};

    use procfs::FromReadSI as _;
    use procfs::net::TcpNetEntries;

    use super::*;

    #[test]
    fn the_owner_of_a_connection_is_who_made_it() {
        for address in [SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), (Ipv6Addr::LOCALHOST, 0).into()] {
            // A host may be without IPv6.
            let Ok(listener) = TcpListener::bind(address) else {
                lamina_skipped::part(format!("{address}: no such addresses here"));
                continue;
            };
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            assert_eq!(super::listener(listener.local_addr().unwrap()), Some(geteuid()));
            let (taken, theirs) = listener.accept().unwrap();
            let ours = taken.local_addr().unwrap();
            assert_eq!(owner(ours, theirs), Some(geteuid()));
            assert_eq!(owner(theirs, ours), Some(geteuid()));
            drop(stream);
            assert_eq!(owner(ours, theirs), None, "a socket that was closed is nobody's");
        }
        let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        assert_eq!((owner(nowhere, nowhere), super::listener(nowhere)), (None, None));
    }

    #[test]
    fn a_socket_that_was_closed_is_not_roots() {
        let [ours, theirs] = [1, 2].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let found = |local: &str, uid: u32, inode: u64| {
            let remote = "0100007F:0001";
            let line =
                format!("0: {local} {remote} 05 00000000:00000000 00:00000000 00000000 {uid} 0 {inode} 1\n");
            let table =
                TcpNetEntries::from_read(format!("head\n{line}").as_bytes(), procfs::current_system_info());
            in_table(table.map(|table| table.0), ours, theirs).map(Uid::as_raw)
        };
        assert_eq!(found("0100007F:0002", 0, 0), None);
        assert_eq!(found("0100007F:0002", 0, 7), Some(0));
        assert_eq!(found("0000000000000000FFFF00000100007F:0002", 7, 7), Some(7));
        assert_eq!(found("0100007F:0003", 7, 7), None);
    }

    #[test]
    fn the_devices_user_and_root_may_ask_and_nobody_else() {
        let own = geteuid();
        let other = Uid::from_raw(own.as_raw() + 4711);
        let requested = [Some(own), Some(Uid::from_raw(0)), Some(other), None].map(may_ask);
        assert_eq!(requested, [true, true, false, false]);
    }
}
