//! Real CXL memory that is not coherent between hosts, behind a mapping of a devdax.
//!
//! A flush is a `clwb` of each line (`clflushopt` or `clflush` where there is none), an
//! invalidation a `clflushopt` or `clflush`. A fence is an `mfence`: an `sfence` orders flushes
//! before younger stores only, and a consumer's loads must not pass its invalidations.

use super::{CxlMem, Map, MemError, inside, lines};

/// The instructions that move lines, so that their order can be tested.
pub trait Instructions: Send + Sync {
    /// Writes a line back and may keep it.
    ///
    /// # Safety
    /// The line is mapped.
    unsafe fn write_back(&self, line: *mut u8);
    /// Writes a line back and drops it.
    ///
    /// # Safety
    /// The line is mapped.
    unsafe fn drop_line(&self, line: *mut u8);
    /// Orders all that came before before all that follows.
    fn full_fence(&self);
    /// Stores words past the caches.
    ///
    /// # Safety
    /// `from.len()` bytes are mapped for stores at `into`, which is a multiple of eight.
    unsafe fn stream(&self, into: *mut u8, from: &[u8]);
}

/// This processor's.
#[derive(Clone, Copy, Debug)]
pub struct Processor {
    clwb: bool,
    clflushopt: bool,
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count, _mm_clflush, _mm_mfence, _mm_stream_si64};

    use super::{Instructions, MemError, Processor};

    impl Processor {
        /// What this processor has.
        ///
        /// # Errors
        /// [`MemError::Instructions`].
        pub fn detect() -> Result<Self, MemError> {
            if __cpuid(1).edx >> 19 & 1 == 0 {
                return Err(MemError::Instructions("clflush"));
            }
            let extended = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).ebx } else { 0 };
            Ok(Self { clwb: extended >> 24 & 1 == 1, clflushopt: extended >> 23 & 1 == 1 })
        }
    }

    impl Instructions for Processor {
        unsafe fn write_back(&self, line: *mut u8) {
            if self.clwb {
                // SAFETY: the processor has it, and the line is mapped.
                unsafe { asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)) }
            } else {
                // SAFETY: as promised of `line`.
                unsafe { self.drop_line(line) }
            }
        }

        unsafe fn drop_line(&self, line: *mut u8) {
            if self.clflushopt {
                // SAFETY: the processor has it, and the line is mapped.
                unsafe { asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)) }
            } else {
                // SAFETY: every x86-64 that `detect` passed has it, and the line is mapped.
                unsafe { _mm_clflush(line) }
            }
        }

        fn full_fence(&self) {
            // SAFETY: every x86-64 has it.
            unsafe { _mm_mfence() }
        }

        unsafe fn stream(&self, into: *mut u8, from: &[u8]) {
            for (index, word) in from.as_chunks::<8>().0.iter().enumerate() {
                #[allow(clippy::cast_ptr_alignment, reason = "it is a multiple of eight, as promised")]
                // SAFETY: the range is mapped, `from.len()` long and aligned to words, as promised.
                unsafe {
                    _mm_stream_si64(into.cast::<i64>().add(index), i64::from_le_bytes(*word));
                }
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Processor {
    /// What this processor has.
    ///
    /// # Errors
    /// [`MemError::Instructions`], always: only x86-64 is known.
    pub fn detect() -> Result<Self, MemError> {
        Err(MemError::Instructions("clflush"))
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Instructions for Processor {
    unsafe fn write_back(&self, _: *mut u8) {}
    unsafe fn drop_line(&self, _: *mut u8) {}
    fn full_fence(&self) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
    unsafe fn stream(&self, into: *mut u8, from: &[u8]) {
        // SAFETY: the caller's range is mapped and `from.len()` long.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) }
    }
}

/// Memory that this processor caches and nobody keeps coherent.
#[derive(Debug)]
pub struct Hardware<I = Processor> {
    map: Map,
    instructions: I,
}

impl Hardware {
    /// Memory behind a mapping, moved by this processor's instructions.
    ///
    /// # Errors
    /// [`MemError::Instructions`].
    pub fn new(map: Map) -> Result<Self, MemError> {
        Ok(Self::with(map, Processor::detect()?))
    }
}

impl<I: Instructions> Hardware<I> {
    /// Memory behind a mapping, moved by `instructions`.
    pub fn with(map: Map, instructions: I) -> Self {
        Self { map, instructions }
    }
}

impl<I: Instructions> CxlMem for Hardware<I> {
    fn bytes(&self) -> u64 {
        self.map.bytes()
    }

    fn coherent(&self) -> bool {
        false
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MemError> {
        self.map.load(at, into)
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        self.map.store(at, from)
    }

    fn ntstore(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        let into = self.map.at(at, from.len())?;
        let (head, rest) = from.split_at((at.next_multiple_of(8) - at).min(from.len() as u64) as usize);
        let (words, tail) = rest.split_at(rest.len() / 8 * 8);
        let behind = head.len() + words.len();
        if !words.is_empty() {
            // SAFETY: the range was checked, and the words begin at a multiple of eight as the
            // mapping does.
            unsafe { self.instructions.stream(into.add(head.len()), words) };
        }
        // What is no whole word goes through the cache, so its line is flushed.
        for (at, part) in [(at, head), (at + behind as u64, tail)] {
            if !part.is_empty() {
                self.map.store(at, part)?;
                self.flush(at, part.len() as u64)?;
            }
        }
        Ok(())
    }

    fn flush(&self, at: u64, length: u64) -> Result<(), MemError> {
        inside(at, length, self.bytes())?;
        for line in lines(at, length) {
            // SAFETY: the line lies in the mapping.
            unsafe { self.instructions.write_back(self.map.at(line, 1)?) };
        }
        Ok(())
    }

    fn invalidate(&self, at: u64, length: u64) -> Result<(), MemError> {
        inside(at, length, self.bytes())?;
        for line in lines(at, length) {
            // SAFETY: the line lies in the mapping.
            unsafe { self.instructions.drop_line(self.map.at(line, 1)?) };
        }
        Ok(())
    }

    fn fence(&self) -> Result<(), MemError> {
        self.instructions.full_fence();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::mem::Lines;

    /// Records what would have been done.
    #[derive(Default)]
    struct Recorder(Mutex<Vec<String>>);

    impl Recorder {
        fn say(&self, what: &str, at: *mut u8) {
            self.0.lock().unwrap().push(format!("{what} {}", at.addr() % 4096));
        }
    }

    impl Instructions for Arc<Recorder> {
        unsafe fn write_back(&self, line: *mut u8) {
            self.say("write back", line);
        }
        unsafe fn drop_line(&self, line: *mut u8) {
            self.say("drop", line);
        }
        fn full_fence(&self) {
            self.0.lock().unwrap().push("fence".into());
        }
        unsafe fn stream(&self, into: *mut u8, from: &[u8]) {
            self.say(&format!("stream {} to", from.len()), into);
        }
    }

    fn map() -> Map {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        Map::new(&file, std::path::Path::new("a file"), None).unwrap()
    }

    #[test]
    fn each_line_is_moved_once_and_the_fence_comes_last() {
        let recorder = Arc::new(Recorder::default());
        let lines = Lines::new(Arc::new(Hardware::with(map(), recorder.clone())));
        let said = || std::mem::take(&mut *recorder.0.lock().unwrap());
        lines.publish(60, 70).unwrap();
        assert_eq!(said(), ["write back 0", "write back 64", "write back 128", "fence"]);
        lines.consume(128, 64).unwrap();
        assert_eq!(said(), ["drop 128", "fence"]);
        lines.ntstore(256, &[1; 70]).unwrap();
        lines.fence().unwrap();
        assert_eq!(said(), ["stream 64 to 256", "write back 320", "fence"]);
        lines.publish(64, 0).unwrap();
        assert_eq!(said(), ["fence"]);
        assert!(matches!(lines.publish(4090, 7), Err(MemError::End { .. })));
        assert!(said().is_empty(), "nothing of a range that passes the end is moved");
        lines.ntstore(61, &[1; 16]).unwrap();
        assert_eq!(said(), ["stream 8 to 64", "write back 0", "write back 64"]);
        lines.ntstore(65, &[1; 3]).unwrap();
        assert_eq!(said(), ["write back 64"]);
    }

    #[test]
    fn the_processors_own_keep_the_bytes() {
        let Ok(memory) = Hardware::new(map()) else { return };
        let lines = Lines::new(Arc::new(memory));
        lines.set(1024, 7).unwrap();
        lines.publish(1024, 8).unwrap();
        for (at, length) in [(8, 200), (61, 3), (61, 11), (65, 129), (130, 6), (7, 0)] {
            let bytes: Vec<u8> = (0..length).map(|index| (at + index) as u8 | 1).collect();
            lines.ntstore(0, &[0; 512]).unwrap();
            lines.ntstore(at, &bytes).unwrap();
            lines.fence().unwrap();
            let mut read = vec![0; 512];
            lines.consume(0, 512).unwrap();
            lines.load(0, &mut read).unwrap();
            let mut want = vec![0; 512];
            want[at as usize..(at + length) as usize].copy_from_slice(&bytes);
            assert_eq!(read, want, "{length} bytes at {at}");
        }
        assert_eq!(lines.fresh(1024).unwrap(), 7);
    }
}
