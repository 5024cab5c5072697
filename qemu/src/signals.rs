//! What both programs that start guests ask of signals.

use std::fs;

/// Whether this process ignores a signal, by its number, as the kernel lists that.
pub fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ignored_is_told_from_what_is_not() {
        // Rust's start has SIGPIPE ignored, and nobody has SIGCHLD ignored who waits for children.
        assert!(is_ignored(libc::SIGPIPE) && !is_ignored(libc::SIGCHLD));
    }
}
