//! A library to preload into QEMU: swallows `madvise(MADV_HUGEPAGE)` and passes every other advice
//! on.
//!
//! QEMU asks for huge pages on all guest memory. On a file served by FUSE, one 4-byte load then
//! reads 2 to 4 MiB, which hides what the device would really have moved. The advice is only ever a
//! hint, so not giving it changes no result.
//!
//! The one symbol needed from outside is `syscall`, which every C library for Linux has: the filter
//! fits any QEMU.
#![no_std]

use core::ffi::{c_int, c_long, c_void};
use core::panic::PanicInfo;

const MADV_HUGEPAGE: c_int = 14;
#[cfg(target_arch = "x86_64")]
const SYS_MADVISE: c_long = 28;
#[cfg(not(target_arch = "x86_64"))]
const SYS_MADVISE: c_long = 233;

unsafe extern "C" {
    /// libc's `syscall`: sets `errno` as `madvise` has to.
    fn syscall(number: c_long, ...) -> c_long;
}

/// `madvise(2)`, but for the one advice.
///
/// # Safety
/// As `madvise`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
    if advice == MADV_HUGEPAGE {
        return 0;
    }
    // SAFETY: the same call, with the same arguments, that the caller made and answers for.
    unsafe { syscall(SYS_MADVISE, address, length, advice) as c_int }
}

#[panic_handler]
fn panic(_: &PanicInfo) -> ! {
    loop {}
}
