//! UUIDs of disks whose configuration gives none: generated at random once, and stored in a file
//! of the state directory.
//!
//! The file has a line for each disk, with its UUID and its name. Servers that share the file only
//! append lines. Of several lines for a disk, the first one counts, so no lock is needed.
//!
//! A server process in a sandbox does not have the file open, because it could change lines. It
//! requests UUIDs from its supervisor.

use crate::uuid_text::{parse_uuid, uuid_text};
use parking_lot::Mutex;
use std::fs::{DirBuilder, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// File in the state directory.
const FILE: &str = "disk-uuids";
/// Maximum size of the file in bytes. A full file gets no further lines.
const MAX_BYTES: u64 = 16 << 20;
/// Maximum length of a disk's name in bytes.
const MAX_NAME: usize = 4096;

/// Lock of the reads of the file, so that only one copy is in the memory of a supervisor, whatever
/// the number of requests.
static READS: Mutex<()> = Mutex::new(());

/// Function that returns the UUID of the disk with this name.
pub type Request = fn(&str) -> io::Result<[u8; 16]>;

/// Source of the UUIDs of this process. Unset if the UUIDs are derived from the disks' names.
static SOURCE: OnceLock<Source> = OnceLock::new();

enum Source {
    /// Open file.
    Store(Store),
    /// Path of the file, and the function that requests a UUID from the supervisor.
    Supervisor(PathBuf, Request),
}

/// Default state directory: that of the systemd unit, `/var/lib/shadowbell` for root if it exists,
/// and `$XDG_STATE_HOME/shadowbell` for other users.
#[must_use]
pub fn default_directory() -> Option<PathBuf> {
    let is_root = rustix::process::geteuid().is_root();
    default_for(is_root, |name| std::env::var_os(name).map(PathBuf::from))
}

fn default_for(is_root: bool, variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    if let Some(of_unit) = variable("STATE_DIRECTORY") {
        return Some(of_unit).filter(|path| path.is_absolute());
    }
    if is_root {
        return Some(PathBuf::from("/var/lib/shadowbell")).filter(|path| path.is_dir());
    }
    let given = variable("XDG_STATE_HOME").filter(|path| path.is_absolute());
    let state = given.or_else(|| Some(variable("HOME")?.join(".local/state")))?;
    Some(state.join("shadowbell"))
}

/// UUID of the disk with this name. `None` if the process uses no [store](Store), or if the file
/// cannot be written. The latter is logged.
#[must_use]
pub fn uuid_of(name: &str) -> Option<[u8; 16]> {
    let (path, uuid) = match SOURCE.get()? {
        Source::Store(store) => (&store.path, store.uuid_of(name)),
        Source::Supervisor(path, request) => (path, check_name(name).and_then(|()| request(name))),
    };
    uuid.map_err(|error| warn_of(path, &error)).ok()
}

/// Path of the file in a state directory.
#[must_use]
pub fn file_in(directory: &Path) -> PathBuf {
    directory.join(FILE)
}

fn check_name(name: &str) -> io::Result<()> {
    match name.len() {
        0..=MAX_NAME => Ok(()),
        _ => Err(io::ErrorKind::InvalidFilename.into()),
    }
}

/// Logs that UUIDs are derived from the names of disks.
pub fn warn_of(path: &Path, error: &io::Error) {
    tracing::warn!(
        "UUIDs of disks are derived from their paths, because {} cannot be written: {error}; give \
         another `state-dir`, or the disks their `uuid`",
        path.display()
    );
}

/// Open file with the UUIDs of disks.
pub struct Store {
    file: File,
    path: PathBuf,
}

impl Store {
    /// Opens the file in `directory`. Creates both if they do not exist.
    ///
    /// # Errors
    /// The directory or the file cannot be created.
    pub fn open(directory: &Path) -> io::Result<Self> {
        if !directory.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        let path = file_in(directory);
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600);
        let flags = rustix::fs::OFlags::NOFOLLOW.bits();
        let file = options.custom_flags(flags.cast_signed()).open(&path)?;
        Ok(Self { file, path })
    }

    /// Makes this process use the file: [`uuid_of`] returns its UUIDs.
    pub fn use_here(self) {
        let _ = SOURCE.set(Source::Store(self));
    }

    /// Closes the file and makes this process request UUIDs from its supervisor.
    pub fn use_by_supervisor(self, request: Request) {
        let _ = SOURCE.set(Source::Supervisor(self.path, request));
    }

    /// UUID of the disk with this name. A new one is generated and stored if the file has none.
    ///
    /// # Errors
    /// The file cannot be read or written, or is full; or the name is too long.
    pub fn uuid_of(&self, name: &str) -> io::Result<[u8; 16]> {
        check_name(name)?;
        // Quoted, so that a name has no line breaks.
        let name = format!("{name:?}");
        if let Some(uuid) = self.find(&name)? {
            return Ok(uuid);
        }
        // The line break comes first, because the last line may be incomplete: a write may have
        // failed for lack of space.
        let line = format!("\n{} {name}\n", uuid_text(&random_uuid()));
        if self.file.metadata()?.len() + line.len() as u64 > MAX_BYTES {
            return Err(io::Error::other("the file is full"));
        }
        (&self.file).write_all(line.as_bytes())?;
        self.file.sync_data()?;
        // Another server may have written a line for the disk before.
        self.find(&name)?.ok_or_else(|| io::Error::other("a line that was written is missing"))
    }

    fn find(&self, name: &str) -> io::Result<Option<[u8; 16]>> {
        let _lock = READS.lock();
        let length = self.file.metadata()?.len().min(MAX_BYTES);
        let mut text = vec![0; usize::try_from(length).unwrap_or(0)];
        self.file.read_exact_at(&mut text, 0)?;
        let text = String::from_utf8_lossy(&text);
        let mut lines = text.lines().filter_map(|line| line.split_once(' '));
        Ok(lines.find(|(_, other)| *other == name).and_then(|(uuid, _)| parse_uuid(uuid)))
    }
}

/// Random UUID of version 4 (RFC 9562, 5.4). A guess does no harm, so the random hash keys of the
/// standard library suffice.
fn random_uuid() -> [u8; 16] {
    let random = || u128::from(RandomState::new().hash_one(0_u8));
    let mut uuid = (random() << 64 | random()).to_be_bytes();
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_keeps_its_random_uuid() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("a/state");
        let store = Store::open(&state).unwrap();
        let first = store.uuid_of("/srv/a.img").unwrap();
        let other = store.uuid_of("/srv/a.img\n").unwrap();
        assert_ne!(first, other);
        assert_eq!((first[6] >> 4, first[8] >> 6), (4, 2), "version 4");
        // Another server with the same state directory uses the same UUIDs. A server with another
        // state directory creates its own.
        let again = Store::open(&state).unwrap();
        assert_eq!(again.uuid_of("/srv/a.img").unwrap(), first);
        assert_eq!(store.uuid_of("/srv/a.img\n").unwrap(), other);
        let elsewhere = Store::open(directory.path()).unwrap();
        assert_ne!(elsewhere.uuid_of("/srv/a.img").unwrap(), first);
        // An incomplete line costs no other disk its UUID.
        (&store.file).write_all(b"0123 \"/srv/b").unwrap();
        let third = store.uuid_of("/srv/c.img").unwrap();
        assert_eq!(Store::open(&state).unwrap().uuid_of("/srv/c.img").unwrap(), third);
        // Of two lines for a disk, the first one counts.
        let line = format!("{} \"/srv/a.img\"\n", uuid_text(&other));
        (&store.file).write_all(line.as_bytes()).unwrap();
        assert_eq!(store.uuid_of("/srv/a.img").unwrap(), first);
        // A full file keeps the UUIDs that it has.
        store.file.set_len(MAX_BYTES + 1).unwrap();
        assert_eq!(store.uuid_of("/srv/a.img").unwrap(), first);
        assert!(store.uuid_of("/srv/d.img").is_err());
        assert!(elsewhere.uuid_of(&"x".repeat(MAX_NAME + 1)).is_err());
    }

    #[test]
    fn each_user_has_a_state_directory() {
        let of = |is_root, variables: &[(&str, &str)]| {
            default_for(is_root, |name| {
                let found = variables.iter().find(|(other, _)| *other == name);
                found.map(|(_, value)| PathBuf::from(value))
            })
        };
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(of(false, &[("HOME", "/home/u")]), path("/home/u/.local/state/shadowbell"));
        let both = [("HOME", "/home/u"), ("XDG_STATE_HOME", "/state")];
        assert_eq!(of(false, &both), path("/state/shadowbell"));
        assert_eq!(of(true, &[("STATE_DIRECTORY", "/var/lib/x")]), path("/var/lib/x"));
        assert_eq!(of(true, &[("STATE_DIRECTORY", "")]), None);
        assert_eq!(of(false, &[]), None);
    }
}
