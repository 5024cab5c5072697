//! A plug-in for QEMU: says which lines of the device's windows a guest touches.
//!
//! QEMU calls it for each load and store of an emulated guest. What is in none of the ranges that
//! are watched is left at once. The rest goes through a modelled cache, whose misses and
//! write-backs become records in a ring of its own for each processor. Nobody waits: a record that
//! finds no room is counted as lost.
//!
//! * Where a page of the guest is (physically) is asked once and remembered until the processor
//!   changes its tables: until it runs an instruction that writes a control register, drops a page
//!   of the TLB, leaves system management mode or enters a nested guest. The processor's own manual
//!   has programs run one of these before they may rely on another mapping.
//! * Of several records only the first has a time: see `ring.rs`.
//! * Everything of a processor is touched by that processor's thread alone, but for the words of
//!   the ring that its reader has.
//!
//! The API is version 7 of QEMU's plug-in interface (QEMU 11.1), which is declared here by hand.
//! Needed besides are `syscall`, which every C library for Linux has, and those of `string.h` that
//! the compiler calls by itself.
#![no_std]

mod cache;
mod decode;
mod layout;
mod pages;
mod processor;
mod refusal;
mod ring;

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use core::panic::PanicInfo;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use decode::changes_mappings;
use layout::{ADDRESS, GROUP, MAGIC, MAX_RANGES, PAGE, VERSION, header, part_bytes};
use processor::Processor;

/// Opaque to plug-ins.
#[repr(C)]
struct Block {
    _of_qemu: [u8; 0],
}
#[repr(C)]
struct Instruction {
    _of_qemu: [u8; 0],
}
#[repr(C)]
struct Place {
    _of_qemu: [u8; 0],
}

/// What QEMU says of itself: `qemu_info_t`.
#[repr(C)]
struct Info {
    target: *const c_char,
    oldest_api: c_int,
    api: c_int,
    is_system: bool,
    processors: c_int,
    most_processors: c_int,
}

type OnBlock = unsafe extern "C" fn(*mut Block, *mut c_void);
type OnInstruction = unsafe extern "C" fn(c_uint, *mut c_void);
type OnAccess = unsafe extern "C" fn(c_uint, u32, u64, *mut c_void);

/// `QEMU_PLUGIN_CB_NO_REGS`: a callback that looks at no registers.
const NO_REGISTERS: c_int = 0;
/// `QEMU_PLUGIN_MEM_RW`: loads and stores.
const LOADS_AND_STORES: c_int = 3;

unsafe extern "C" {
    fn qemu_plugin_register_vcpu_tb_trans_cb(id: u64, call: OnBlock, data: *mut c_void);
    fn qemu_plugin_tb_n_insns(block: *const Block) -> usize;
    fn qemu_plugin_tb_get_insn(block: *const Block, index: usize) -> *mut Instruction;
    fn qemu_plugin_insn_data(instruction: *const Instruction, into: *mut c_void, length: usize) -> usize;
    fn qemu_plugin_register_vcpu_insn_exec_cb(
        instruction: *mut Instruction,
        call: OnInstruction,
        flags: c_int,
        data: *mut c_void,
    );
    fn qemu_plugin_register_vcpu_mem_cb(
        instruction: *mut Instruction,
        call: OnAccess,
        flags: c_int,
        which: c_int,
        data: *mut c_void,
    );
    fn qemu_plugin_mem_size_shift(access: u32) -> c_uint;
    fn qemu_plugin_mem_is_store(access: u32) -> bool;
    fn qemu_plugin_get_hwaddr(access: u32, address: u64) -> *mut Place;
    fn qemu_plugin_hwaddr_phys_addr(place: *const Place) -> u64;
    /// libc's `syscall`.
    fn syscall(number: c_long, ...) -> c_long;
}

#[cfg(target_arch = "x86_64")]
mod system {
    use core::ffi::c_long;
    pub(crate) const OPENAT: c_long = 257;
    pub(crate) const MMAP: c_long = 9;
    pub(crate) const WRITE: c_long = 1;
    pub(crate) const CLOCK_GETTIME: c_long = 228;
}
#[cfg(not(target_arch = "x86_64"))]
mod system {
    use core::ffi::c_long;
    pub(crate) const OPENAT: c_long = 56;
    pub(crate) const MMAP: c_long = 222;
    pub(crate) const WRITE: c_long = 64;
    pub(crate) const CLOCK_GETTIME: c_long = 113;
}

/// The version of the interface that is declared above.
#[unsafe(no_mangle)]
pub static qemu_plugin_version: c_int = 7;

/// Processors that a machine may have.
const MAX_PROCESSORS: usize = 256;

/// The header of the file that the reader made, mapped for as long as QEMU runs.
static SHARED: AtomicPtr<u64> = AtomicPtr::new(ptr::null_mut());

/// What one processor's thread uses alone: QEMU runs a processor in one thread, and calls for it
/// from there.
struct Own(UnsafeCell<Processor>);

// SAFETY: see above; `qemu_plugin_install` fills them before any processor runs.
unsafe impl Sync for Own {}

static PROCESSORS: [Own; MAX_PROCESSORS] = [const { Own(UnsafeCell::new(Processor::new())) }; MAX_PROCESSORS];

/// What is kept of this processor.
///
/// # Safety
/// The caller runs in the processor's thread, or before any does, and has no other such reference.
#[inline]
unsafe fn processor(number: c_uint) -> &'static mut Processor {
    // SAFETY: as the caller's. A guest that may have more processors than the file has parts, of
    // which there are no more than places, is refused: so no two have one place.
    unsafe { &mut *PROCESSORS[number as usize % MAX_PROCESSORS].0.get() }
}

/// What an access of this kind is: the logarithm of its bytes, and whether it is a store.
fn kind(access: u32) -> (u32, bool) {
    // SAFETY: these look at the bits of `access` alone.
    unsafe { (qemu_plugin_mem_size_shift(access), qemu_plugin_mem_is_store(access)) }
}

/// Time, in what the processor counts.
#[inline]
fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor for 64 bits has the instruction, and Linux permits it.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    nanoseconds()
}

fn nanoseconds() -> u64 {
    let mut time = [0_u64; 2];
    // SAFETY: the kernel writes two words there, a `timespec` of `CLOCK_MONOTONIC`.
    unsafe { syscall(system::CLOCK_GETTIME, 1 as c_long, time.as_mut_ptr()) };
    time[0].wrapping_mul(1_000_000_000).wrapping_add(time[1])
}

/// Ticks a second, over ten milliseconds.
fn rate() -> u64 {
    let (tick, begun) = (ticks(), nanoseconds());
    loop {
        let elapsed = nanoseconds().wrapping_sub(begun);
        if elapsed >= 10_000_000 {
            let ticks = ticks().wrapping_sub(tick);
            return (u128::from(ticks) * 1_000_000_000 / u128::from(elapsed)) as u64;
        }
    }
}

unsafe extern "C" fn translated(block: *mut Block, _: *mut c_void) {
    // SAFETY: QEMU's own block, during its callback; instructions below their count are its, and at
    // most as many bytes are copied as there is room.
    unsafe {
        for index in 0..qemu_plugin_tb_n_insns(block) {
            let instruction = qemu_plugin_tb_get_insn(block, index);
            let mut code = [0_u8; 16];
            let length = qemu_plugin_insn_data(instruction, code.as_mut_ptr().cast(), code.len());
            if code.get(..length).is_some_and(changes_mappings) {
                qemu_plugin_register_vcpu_insn_exec_cb(instruction, forget, NO_REGISTERS, ptr::null_mut());
            }
            qemu_plugin_register_vcpu_mem_cb(
                instruction,
                accessed,
                NO_REGISTERS,
                LOADS_AND_STORES,
                ptr::null_mut(),
            );
        }
    }
}

/// The same of a recorder that records nothing.
unsafe extern "C" fn translated_idly(block: *mut Block, _: *mut c_void) {
    // SAFETY: as above.
    unsafe {
        for index in 0..qemu_plugin_tb_n_insns(block) {
            let instruction = qemu_plugin_tb_get_insn(block, index);
            let data = ptr::null_mut();
            qemu_plugin_register_vcpu_mem_cb(instruction, ignored, NO_REGISTERS, LOADS_AND_STORES, data);
        }
    }
}

unsafe extern "C" fn ignored(_: c_uint, _: u32, _: u64, _: *mut c_void) {}

unsafe extern "C" fn forget(number: c_uint, _: *mut c_void) {
    // SAFETY: QEMU calls in the processor's thread.
    unsafe { processor(number) }.forget();
}

/// Each load and store of the guest. What the usual one needs is here, and a call besides none.
unsafe extern "C" fn accessed(number: c_uint, access: u32, address: u64, _: *mut c_void) {
    // SAFETY: QEMU calls in the processor's thread.
    let processor = unsafe { processor(number) };
    if processor.is_again(access, address) {
        return;
    }
    match processor.pages.find(address, changes()) {
        Some(0) => {}
        Some(place) => touch(processor, access, address, place),
        // SAFETY: it is within the callback of this access.
        None => unsafe { look_up(number, access, address) },
    }
}

/// How often other ranges were watched.
#[inline]
fn changes() -> u64 {
    // SAFETY: a word of the header, which is mapped before anything is registered with QEMU.
    unsafe { AtomicU64::from_ptr(SHARED.load(Ordering::Relaxed).add(header::CHANGES)) }
        .load(Ordering::Acquire)
}

/// An access of a page that is not remembered.
#[cold]
#[inline(never)]
unsafe fn look_up(number: c_uint, access: u32, address: u64) {
    let changes = changes();
    // SAFETY: as the caller's. Before anything is watched nothing is worth remembering.
    let (processor, Some(place)) = (unsafe { (processor(number), watched(access, address)) }) else { return };
    if !processor.has_part() {
        return;
    }
    processor.pages.remember(address, place, changes);
    if place != 0 {
        touch(processor, access, address, place);
    }
}

/// Bytes of a window are touched.
#[inline(never)]
fn touch(processor: &mut Processor, access: u32, guest: u64, place: u64) {
    // SAFETY: pages are remembered, and looked up, of processors with a part.
    unsafe { processor.touch(access, guest, place, kind, ticks) };
}

/// Where the page of this access is, if that is in a range that is watched, else 0; none if nothing
/// is watched yet.
unsafe fn watched(access: u32, address: u64) -> Option<u64> {
    let shared = SHARED.load(Ordering::Relaxed);
    // SAFETY: words of the header; the place is QEMU's, and looked at before this callback ends.
    unsafe {
        let word = |at: usize| AtomicU64::from_ptr(shared.add(at));
        let count = (word(header::RANGES).load(Ordering::Acquire) as usize).min(MAX_RANGES);
        if count == 0 {
            return None;
        }
        let place = qemu_plugin_get_hwaddr(access, address);
        if place.is_null() {
            return None;
        }
        let physical = qemu_plugin_hwaddr_phys_addr(place) & ADDRESS & !(PAGE as u64 - 1);
        for range in 0..count {
            let at = header::FIRST_RANGE + 2 * range;
            let (from, to) = (word(at).load(Ordering::Relaxed), word(at + 1).load(Ordering::Relaxed));
            if (from..to).contains(&physical) {
                return Some(physical);
            }
        }
        Some(0)
    }
}

/// Maps the file at `path` and looks whether it is one.
unsafe fn map(path: *const c_char) -> Result<*mut u64, &'static CStr> {
    const AT_FDCWD: c_long = -100;
    const READ_AND_WRITE: c_long = 2;
    const CLOSE_ON_EXEC: c_long = 0o2000000;
    const PROT_READ_AND_WRITE: c_long = 3;
    const MAP_SHARED: c_long = 1;
    // SAFETY: a path that ends in 0, and new mappings that nobody else uses; what is read is within
    // what was mapped.
    unsafe {
        let file = syscall(system::OPENAT, AT_FDCWD, path, READ_AND_WRITE | CLOSE_ON_EXEC);
        if file < 0 {
            return Err(c"lamina: the lines' file cannot be opened\n");
        }
        let map = |bytes: usize| {
            syscall(system::MMAP, 0 as c_long, bytes, PROT_READ_AND_WRITE, MAP_SHARED, file, 0 as c_long)
        };
        let first = map(PAGE);
        if first == -1 {
            return Err(c"lamina: the lines' file cannot be mapped\n");
        }
        let word = |at: usize| *(first as *const u64).add(at);
        if word(header::MAGIC) != MAGIC || word(header::VERSION) != VERSION {
            return Err(c"lamina: that is no file for lines, or one of another version\n");
        }
        let (processors, words, sets) = (word(header::PROCESSORS), word(header::WORDS), word(header::SETS));
        let fits =
            |count: u64, least: u64, most: u64| count.is_power_of_two() && (least..=most).contains(&count);
        if processors > MAX_PROCESSORS as u64
            || !fits(words, GROUP as u64, 1 << 25)
            || !(sets == 0 || fits(sets, 1, 1 << 20))
        {
            return Err(c"lamina: the lines' file has counts that cannot be\n");
        }
        let part = part_bytes(words as usize, sets as usize);
        let whole = map(PAGE + part * processors as usize);
        if whole == -1 {
            return Err(c"lamina: the lines' file cannot be mapped\n");
        }
        for number in 0..processors as usize {
            let processor = processor(number as c_uint);
            processor.forget();
            let part = (whole as *mut u64).add((PAGE + number * part) / 8);
            processor.take_part(part, words, sets);
        }
        Ok(whole as *mut u64)
    }
}

/// QEMU's call when it has loaded the library. Its one argument is `ring=FILE`, or `idle=on` to
/// record nothing: what a guest takes longer then is QEMU's own part.
///
/// # Safety
/// As QEMU calls it: `argv` has `argc` strings.
#[unsafe(no_mangle)]
unsafe extern "C" fn qemu_plugin_install(
    id: u64,
    info: *const Info,
    argc: c_int,
    argv: *const *const c_char,
) -> c_int {
    // SAFETY: QEMU's own strings and structure, during its call.
    unsafe {
        let fail = |why: &[u8]| {
            // QEMU shows what its plug-ins say to those alone who ask for that.
            syscall(system::WRITE, 2 as c_long, why.as_ptr(), why.len());
            1
        };
        if !(*info).is_system || CStr::from_ptr((*info).target) != c"x86_64" {
            return fail(b"lamina: lines are recorded of a whole x86-64 machine only\n");
        }
        let argument = if argc == 1 { CStr::from_ptr(*argv).to_bytes() } else { b"" };
        if argument == b"idle=on" {
            qemu_plugin_register_vcpu_tb_trans_cb(id, translated_idly, ptr::null_mut());
            return 0;
        }
        if !argument.starts_with(b"ring=") {
            return fail(b"lamina: the one argument is ring=FILE or idle=on\n");
        }
        let shared = match map((*argv).add(b"ring=".len())) {
            Ok(shared) => shared,
            Err(why) => return fail(why.to_bytes()),
        };
        let word = |at: usize| AtomicU64::from_ptr(shared.add(at));
        let parts = word(header::PROCESSORS).load(Ordering::Relaxed);
        if let Some(why) = refusal::of_processors((*info).most_processors as u64, parts) {
            return fail(why.bytes());
        }
        word(header::TICKS_A_SECOND).store(rate(), Ordering::Relaxed);
        word(header::FIRST_TICK).store(ticks(), Ordering::Relaxed);
        SHARED.store(shared, Ordering::Relaxed);
        word(header::LOADED).store(1, Ordering::Release);
        qemu_plugin_register_vcpu_tb_trans_cb(id, translated, ptr::null_mut());
        0
    }
}

#[panic_handler]
fn panic(_: &PanicInfo) -> ! {
    loop {}
}
