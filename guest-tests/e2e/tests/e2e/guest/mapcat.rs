//! `mapcat DEVICE LENGTH`: writes the first LENGTH bytes of a mapping of a device to standard
//! output.

use std::ffi::{c_int, c_long, c_void};
use std::io::Write;
use std::os::fd::AsRawFd;

unsafe extern "C" {
    fn mmap(address: *mut c_void, length: usize, protection: c_int, flags: c_int, fd: c_int, offset: c_long) -> *mut c_void;
}

fn main() {
    let [device, length]: [String; 2] = std::env::args().skip(1).collect::<Vec<_>>().try_into().unwrap();
    let length: usize = length.parse().unwrap();
    let file = std::fs::File::open(device).unwrap();
    // SAFETY: a new shared mapping (PROT_READ, MAP_SHARED) that stays until the end of the program.
    let address = unsafe { mmap(std::ptr::null_mut(), length, 1, 1, file.as_raw_fd(), 0) };
    assert_ne!(address.addr(), usize::MAX, "{}", std::io::Error::last_os_error());
    // SAFETY: the mapping has this length, and nobody writes to the device meanwhile.
    let memory = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) };
    std::io::stdout().write_all(memory).unwrap();
}
