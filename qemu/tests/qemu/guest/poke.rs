//! `poke DEVICE READ WRITE TEXT`: prints the 16 bytes at offset READ of a dax device, then stores
//! TEXT at offset WRITE.

use std::ffi::{c_int, c_long, c_void};
use std::os::fd::AsRawFd;

const LENGTH: usize = 2 << 20;

unsafe extern "C" {
    fn mmap(address: *mut c_void, length: usize, protection: c_int, flags: c_int, fd: c_int, offset: c_long) -> *mut c_void;
}

fn main() {
    let [device, read, write, text]: [String; 4] = std::env::args().skip(1).collect::<Vec<_>>().try_into().unwrap();
    let file = std::fs::File::options().read(true).write(true).open(device).unwrap();
    // SAFETY: a new shared mapping (PROT_READ | PROT_WRITE, MAP_SHARED) that stays until the end of
    // the program.
    let address = unsafe { mmap(std::ptr::null_mut(), LENGTH, 3, 1, file.as_raw_fd(), 0) };
    assert_ne!(address.addr(), usize::MAX, "{}", std::io::Error::last_os_error());
    // SAFETY: the mapping has this length and nothing else in this guest touches it.
    let memory = unsafe { std::slice::from_raw_parts_mut(address.cast::<u8>(), LENGTH) };
    let read: usize = read.parse().unwrap();
    println!("read {:?}", String::from_utf8_lossy(&memory[read..read + 16]));
    let write: usize = write.parse().unwrap();
    memory[write..write + text.len()].copy_from_slice(text.as_bytes());
}
