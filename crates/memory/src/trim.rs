//! Release of the resident pages of the program and its libraries, to reduce the memory of a
//! process.

use rustix::mm::{Advice, madvise};
use std::ffi::c_void;
use std::io;
use std::ops::Range;

/// Mapped part of a file that is not writable: code or constants of the program or a library.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    addresses: Range<usize>,
    file: String,
    is_code: bool,
    /// True if some pages differ from the file, because they were written before the part was made
    /// read-only.
    has_copies: bool,
}

/// Drops all resident pages of the program and its libraries that were never written.
///
/// A page fault gets a dropped page from the page cache again. Useful for a process that has
/// finished its start-up, sleeps most of the time, and should have a small resident set.
///
/// # Errors
/// The error of the system call. Pages that were dropped before the error remain dropped.
pub fn trim_program_pages() -> io::Result<()> {
    for part in unwritten(&std::fs::read_to_string("/proc/self/smaps")?) {
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(part.start);
        // SAFETY: the range belongs to a file of a loaded object. The object contains code and is
        // never unloaded, so no other mapping can have replaced the range. The range is not
        // writable and has no page that differs from the file, so a later access finds the same
        // content.
        unsafe { madvise(start, part.len(), Advice::LinuxDontNeed)? };
    }
    Ok(())
}

/// Address ranges of `smaps` that belong to loaded objects and were never written.
fn unwritten(smaps: &str) -> Vec<Range<usize>> {
    let mut parts: Vec<Part> = Vec::new();
    let mut is_part = false;
    for line in smaps.lines() {
        if let Some(begun) = mapping(line) {
            is_part = begun.is_some();
            parts.extend(begun);
        } else if is_part
            && let Some(rest) = line.strip_prefix("Anonymous:")
            && let Some(part) = parts.last_mut()
        {
            part.has_copies = rest.trim() != "0 kB";
        }
    }
    let has_code = |file: &str| parts.iter().any(|part| part.is_code && part.file == file);
    let whole = parts.iter().filter(|part| !part.has_copies && has_code(&part.file));
    whole.map(|part| part.addresses.clone()).collect()
}

/// Parses a line that starts a mapping. Returns `None` for any other line, and `Some(None)` if the
/// mapping is not a read-only mapping of a file. The returned part counts as having copies until
/// its `Anonymous:` line is parsed.
fn mapping(line: &str) -> Option<Option<Part>> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let addresses = address(start)?..address(end)?;
    let access = words.next()?;
    // The path may contain spaces, so it is not one word.
    let file = line.find('/').and_then(|at| line.get(at..));
    let part = file.filter(|_| matches!(access, "r-xp" | "r--p")).map(|file| Part {
        addresses,
        file: file.to_owned(),
        is_code: access == "r-xp",
        has_copies: true,
    });
    Some(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_pages_are_not_trimmed() {
        let smaps = "\
1000-3000 r--p 00000000 fe:00 9 /bin/x
Rss:                   4 kB
Anonymous:             0 kB
3000-4000 r-xp 00002000 fe:00 9 /bin/x
Anonymous:             0 kB
4000-5000 r--p 00003000 fe:00 9 /bin/x
Anonymous:             4 kB
5000-6000 rw-p 00004000 fe:00 9 /bin/x
Anonymous:             0 kB
6000-7000 rw-p 00000000 00:00 0 [heap]
Anonymous:             0 kB
7000-8000 r--p 00000000 fe:00 8 /usr/lib/locale/C.utf8/LC_CTYPE
Anonymous:             0 kB
8000-9000 r-xp 00000000 fe:00 7 /lib/y.so
Anonymous:             4 kB
9000-a000 r-xp 00000000 00:00 0 [vdso]
Anonymous:             0 kB
a000-b000 r-xp 00000000 fe:00 9 /bin/x
";
        assert_eq!(unwritten(smaps), [0x1000..0x3000, 0x3000..0x4000]);
    }

    #[test]
    fn a_trimmed_program_works_with_less_resident_memory() {
        let held = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssFile:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
        };
        // The program has pages that were never written, which can be dropped.
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let bytes: usize = unwritten(&smaps).iter().map(|part| part.len()).sum();
        assert!(bytes > 1 << 20, "{bytes} bytes are this program's");
        let words: Vec<String> = (0..1000).map(|n| format!("{n}")).collect();
        let (before, mut least) = (held(), u64::MAX);
        for _ in 0..20 {
            trim_program_pages().unwrap();
            least = least.min(held());
        }
        assert!(least < before, "{before} KiB before, {least} after");
        assert_eq!(words.iter().map(|word| word.parse::<u64>().unwrap()).sum::<u64>(), 499_500);
    }
}
