//! Writer of "newc" cpio archives, from which Linux unpacks its initramfs
//! (`Documentation/driver-api/early-userspace/buffer-format.rst` of the kernel).
//!
//! Archives may be concatenated: the kernel unpacks them one after another.

use std::collections::BTreeSet;

/// File type bits of `st_mode`.
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHAR_DEVICE: u32 = 0o020_000;

/// An incomplete archive. Missing parent directories are added. Names are relative to the root of
/// the guest, and a leading slash is optional.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<String>,
    inode: u32,
}

impl Archive {
    /// An empty archive.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory and its parent directories, unless they exist.
    pub fn directory(&mut self, name: &str) {
        let name = clean(name);
        if name.is_empty() || self.names.contains(name) {
            return;
        }
        self.parents(name);
        self.entry(name, DIRECTORY | 0o755, (0, 0), &[]);
    }

    /// Adds a regular file. A second file with the same name is ignored.
    pub fn file(&mut self, name: &str, permissions: u32, content: &[u8]) {
        self.leaf(name, REGULAR | (permissions & 0o7777), (0, 0), content);
    }

    /// Adds a symbolic link to `target`.
    pub fn symlink(&mut self, name: &str, target: &str) {
        self.leaf(name, SYMLINK | 0o777, (0, 0), target.as_bytes());
    }

    /// Adds a character device. The guest's first process needs `/dev/console` before it has
    /// mounted `/dev`.
    pub fn char_device(&mut self, name: &str, permissions: u32, major: u32, minor: u32) {
        self.leaf(name, CHAR_DEVICE | (permissions & 0o7777), (major, minor), &[]);
    }

    /// True if the archive has a file, link or directory with that name.
    pub fn contains(&self, name: &str) -> bool {
        self.names.contains(clean(name))
    }

    /// Ends the archive with its trailer. Returns its bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        // If archives are concatenated, the kernel requires each to begin at a multiple of four
        // bytes. Boot loaders prefer whole sectors.
        self.pad_to(512);
        self.bytes
    }

    fn leaf(&mut self, name: &str, mode: u32, rdev: (u32, u32), content: &[u8]) {
        let name = clean(name);
        if name.is_empty() || self.names.contains(name) {
            return;
        }
        self.parents(name);
        self.entry(name, mode, rdev, content);
    }

    fn parents(&mut self, name: &str) {
        if let Some((parent, _)) = name.rsplit_once('/') {
            self.directory(parent);
        }
    }

    fn entry(&mut self, name: &str, mode: u32, rdev: (u32, u32), content: &[u8]) {
        self.names.insert(name.to_owned());
        self.inode += 1;
        let links = if mode & 0o170_000 == DIRECTORY { 2 } else { 1 };
        // The format's maximum is 4 GiB; files of the guest are much smaller.
        let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let content = content.get(..size as usize).unwrap_or(content);
        let fields = [
            self.inode,
            mode,
            0, // uid
            0, // gid
            links,
            0, // mtime, constant so that the same input gives the same archive
            size,
            0, // major number of the file system's device
            0, // minor number of the file system's device
            rdev.0,
            rdev.1,
            u32::try_from(name.len() + 1).unwrap_or(u32::MAX),
            0, // checksum, of the "070702" kind only
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad_to(4);
        self.bytes.extend_from_slice(content);
        self.pad_to(4);
    }

    fn pad_to(&mut self, multiple: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(multiple), 0);
    }
}

fn clean(name: &str) -> &str {
    name.trim_matches('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses an archive: name, mode, contents.
    fn parse(bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        let mut at = 0;
        loop {
            let header = &bytes[at..at + 110];
            assert_eq!(&header[..6], b"070701");
            let field = |n: usize| {
                let text = std::str::from_utf8(&header[6 + 8 * n..14 + 8 * n]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let name_size = field(11) as usize;
            let name = std::str::from_utf8(&bytes[at + 110..at + 110 + name_size - 1]).unwrap();
            assert_eq!(bytes[at + 110 + name_size - 1], 0);
            let start = (at + 110 + name_size).next_multiple_of(4);
            let end = start + field(6) as usize;
            if name == "TRAILER!!!" {
                return entries;
            }
            entries.push((name.to_owned(), field(1), bytes[start..end].to_vec()));
            at = end.next_multiple_of(4);
        }
    }

    #[test]
    fn archive_entries_are_read_as_written() {
        let mut archive = Archive::new();
        archive.file("/usr/bin/tool", 0o755, b"\x7fELF.");
        archive.symlink("bin", "usr/bin");
        archive.char_device("dev/console", 0o600, 5, 1);
        archive.file("usr/bin/tool", 0o644, b"the second of a name is left out");
        assert!(archive.contains("usr") && archive.contains("/usr/bin/tool"));
        let entries = parse(&archive.finish());
        let got: Vec<_> = entries.iter().map(|(n, m, c)| (n.as_str(), *m, c.as_slice())).collect();
        assert_eq!(
            got,
            [
                ("usr", 0o040_755, &b""[..]),
                ("usr/bin", 0o040_755, b""),
                ("usr/bin/tool", 0o100_755, b"\x7fELF."),
                ("bin", 0o120_777, b"usr/bin"),
                ("dev", 0o040_755, b""),
                ("dev/console", 0o020_600, b""),
            ]
        );
    }

    #[test]
    fn every_length_of_name_and_content_keeps_the_alignment() {
        let mut archive = Archive::new();
        for length in 0..9 {
            archive.file(&"n".repeat(length + 1), 0o644, &vec![b'x'; length]);
        }
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 512, 0);
        let entries = parse(&bytes);
        assert_eq!(entries.len(), 9);
        assert!(entries.iter().enumerate().all(|(n, e)| e.2.len() == n && e.0.len() == n + 1));
    }

    #[test]
    fn equal_input_produces_equal_archives() {
        let build = || {
            let mut archive = Archive::new();
            archive.file("a/b/c", 0o600, b"hello");
            archive.finish()
        };
        assert_eq!(build(), build());
    }
}
