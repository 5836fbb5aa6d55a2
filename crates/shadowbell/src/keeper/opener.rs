//! Opens images for a worker that may open nothing by itself: see `serve/sandbox`.
//!
//! Each worker that asks for it has a thread here, which ends with the worker's end of the socket:
//! a file system that does not answer holds up the worker's question, and not the keeper. A worker
//! says what was named to it before it is in its sandbox; from then on it is asked questions only.
//! What is opened is a regular file, a block device or the character device of an NVMe namespace
//! that
//!
//! * the command line or the configuration file names, or that is below a directory of `--allow`;
//! * somebody who may ask the keeper has [granted](grant), as `shadowbell ctl` does;
//! * or was opened for a worker before: then it may be called otherwise by now.

use super::say::say;
use crate::disk_spec;
use crate::grant::disks_of;
use crate::keeper_link::{self, Packet, opening};
use parking_lot::{Mutex, RwLock};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use shadowbell_backend::{Access, identify_namespace, is_namespace, open_image};
use shadowbell_memory::process::{block_signals, unblock_signals};
use shadowbell_state::Bytes;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most paths that can be granted: one that is granted anew is the newest.
const MOST: usize = 4096;

/// What all workers may have, whoever it was named to.
static SHARED: Mutex<Shared> = Mutex::new(Shared { granted: Vec::new(), opened: Vec::new() });

/// How often that has changed.
static CHANGES: AtomicU64 = AtomicU64::new(0);

struct Shared {
    granted: Vec<PathBuf>,
    /// Device and inode number.
    opened: Vec<(u64, u64)>,
}

/// What is at this path, without symbolic links in it, may be opened from now on.
pub(super) fn grant(path: PathBuf) {
    let granted = &mut SHARED.lock().granted;
    granted.retain(|other| *other != path);
    if granted.len() >= MOST {
        granted.remove(0);
    }
    granted.push(path);
    CHANGES.fetch_add(1, Ordering::Release);
}

/// Who answers. Taken as a whole while nobody may: a question that was read is answered then, and
/// another one stays in its socket.
static WORK: RwLock<()> = RwLock::new(());

/// All that answer.
static ALL: Mutex<Vec<Arc<Opener>>> = Mutex::new(Vec::new());

struct Opener {
    socket: OwnedFd,
    named: Mutex<Named>,
}

/// What the openers know, apart from what was named to each.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedShared {
    granted: Vec<Bytes>,
    opened: Vec<(u64, u64)>,
}

/// What was named to one worker, written down.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SavedNamed {
    files: Vec<Bytes>,
    directories: Vec<Bytes>,
    config: Option<Bytes>,
    is_complete: bool,
}

/// Nobody answers from now on until this is dropped; unless somebody is at it.
pub(super) fn pause() -> Option<impl Sized> {
    WORK.try_write()
}

/// What all workers may have, to be written down.
pub(super) fn shared() -> SavedShared {
    let shared = SHARED.lock();
    let granted = shared.granted.iter().map(|path| bytes_of(path)).collect();
    SavedShared { granted, opened: shared.opened.clone() }
}

/// How often that has changed.
pub(super) fn changes() -> u64 {
    CHANGES.load(Ordering::Acquire)
}

/// The sockets of all openers, and what was named at each.
///
/// # Errors
/// The system has no more descriptors.
pub(super) fn openers() -> io::Result<Vec<(OwnedFd, SavedNamed)>> {
    let save = |opener: &Arc<Opener>| {
        let named = opener.named.lock();
        let all = |paths: &[PathBuf]| paths.iter().map(|path| bytes_of(path)).collect();
        let saved = SavedNamed {
            files: all(&named.files),
            directories: all(&named.directories),
            config: named.config.as_deref().map(bytes_of),
            is_complete: named.is_complete,
        };
        Ok((opener.socket.try_clone()?, saved))
    };
    ALL.lock().iter().map(save).collect()
}

/// What an earlier process has written down.
pub(super) fn restore_shared(saved: SavedShared) {
    let mut shared = SHARED.lock();
    shared.granted = saved.granted.into_iter().map(path_of).collect();
    shared.opened = saved.opened;
}

/// Answers where an earlier process has answered.
pub(super) fn restore(socket: OwnedFd, saved: SavedNamed) {
    let all = |paths: Vec<Bytes>| paths.into_iter().map(path_of).collect();
    let named = Named {
        files: all(saved.files),
        directories: all(saved.directories),
        config: saved.config.map(path_of),
        is_complete: saved.is_complete,
    };
    start_with(socket, named);
}

pub(super) fn bytes_of(path: &Path) -> Bytes {
    Bytes(path.as_os_str().as_bytes().to_vec())
}

pub(super) fn path_of(bytes: Bytes) -> PathBuf {
    OsString::from_vec(bytes.0).into()
}

/// Answers the questions of a worker at this socket until that is closed.
pub(super) fn start(socket: OwnedFd) {
    start_with(socket, Named::default());
}

fn start_with(socket: OwnedFd, named: Named) {
    let opener = Arc::new(Opener { socket, named: Mutex::new(named) });
    ALL.lock().push(Arc::clone(&opener));
    let its = Arc::clone(&opener);
    let started = spawn("sb-opener", move || {
        while its.answers() {}
        its.ends();
    });
    if let Err(error) = started {
        opener.ends();
        say(&format!("error: no images can be opened for the process that serves: {error}"));
    }
}

/// Starts a thread that answers a worker.
pub(super) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // It is the keeper that is to have them, also if it has them wait.
    let signals = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD];
    let _ = block_signals(&signals);
    let thread = std::thread::Builder::new().name(name.into()).stack_size(256 << 10);
    let started = thread.spawn(work);
    let _ = unblock_signals(&signals);
    started.map(drop)
}

/// Whoever has read a question keeps this until it is answered.
pub(super) fn working() -> impl Sized {
    WORK.read()
}

impl Opener {
    /// Answers the next question. Whether there may be another one.
    fn answers(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        let _work = WORK.read();
        match keeper_link::receive(&self.socket, true) {
            Ok(Some(packet)) => answer(&self.socket, &mut self.named.lock(), packet).is_ok(),
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
            Ok(None) => false,
        }
    }

    fn ends(&self) {
        ALL.lock().retain(|other| !std::ptr::eq(&raw const **other, self));
    }
}

/// What was named to one worker.
#[derive(Default)]
struct Named {
    files: Vec<PathBuf>,
    directories: Vec<PathBuf>,
    config: Option<PathBuf>,
    is_complete: bool,
}

fn answer(socket: &OwnedFd, named: &mut Named, packet: Packet) -> io::Result<()> {
    let outcome = match packet.letter {
        opening::FILE | opening::DIRECTORY | opening::CONFIG if named.is_complete => {
            Err(io::Error::other("nothing more can be named"))
        }
        opening::FILE => {
            named.files.push(packet.path());
            return Ok(());
        }
        opening::DIRECTORY => {
            named.directories.push(packet.path());
            return Ok(());
        }
        opening::CONFIG => {
            named.config = Some(packet.path());
            return Ok(());
        }
        opening::COMPLETE => {
            named.is_complete = true;
            return keeper_link::send(socket, opening::OPENED, "", None);
        }
        opening::NAME => name(named, &packet.path()),
        opening::IDENTIFY => {
            let access = opening::parse_access(&packet.body);
            let outcome = match (access, packet.fd()) {
                (Some(access), Some(image)) => identify(named, image.as_fd(), access),
                _ => Err(Errno::INVAL.into()),
            };
            match outcome {
                Ok(facts) => return keeper_link::send(socket, opening::OPENED, facts, None),
                Err(error) => Err(error),
            }
        }
        opening::OPEN => {
            let access = opening::parse_access(&packet.body);
            match (access, packet.fd()) {
                (Some(access), Some(image)) => reopen(named, image.as_fd(), access),
                _ => Err(Errno::INVAL.into()),
            }
        }
        _ => Err(Errno::INVAL.into()),
    };
    match outcome {
        // It is closed here as soon as it was sent: nobody else may have what it opens.
        Ok(file) => keeper_link::send(socket, opening::OPENED, "", Some(file.as_fd())),
        Err(error) => match error.raw_os_error() {
            Some(errno) => keeper_link::send(socket, opening::ERRNO, errno.to_string(), None),
            None => keeper_link::send(socket, opening::REFUSED, error.to_string(), None),
        },
    }
}

impl Named {
    /// What the configuration file names by now may be had as well: it is the operator's.
    fn read_config(&mut self) {
        let Some(Ok(text)) = self.config.as_ref().map(std::fs::read_to_string) else { return };
        for path in disks_of(&text).iter().filter_map(|disk| disk_spec::file(disk)) {
            if let Ok(path) = path.canonicalize()
                && !self.files.contains(&path)
            {
                self.files.push(path);
            }
        }
    }
}

/// A descriptor that names what is at `path`.
fn name(named: &mut Named, path: &Path) -> io::Result<OwnedFd> {
    let image = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    if named.config.as_ref().is_some_and(|config| path.canonicalize().is_ok_and(|p| p == *config)) {
        named.read_config();
        return Ok(image);
    }
    let id = check(named, image.as_fd())?;
    let opened = &mut SHARED.lock().opened;
    if !opened.contains(&id) {
        opened.push(id);
        CHANGES.fetch_add(1, Ordering::Release);
    }
    Ok(image)
}

/// The image that `image` names, opened anew.
fn reopen(named: &Named, image: BorrowedFd<'_>, access: Access) -> io::Result<OwnedFd> {
    check(named, image)?;
    let path = format!("/proc/self/fd/{}", image.as_raw_fd());
    Ok(open_image(Path::new(&path), access)?.into())
}

/// What the namespace says whose character device `image` names, as JSON: a process in a sandbox
/// gives a device no admin commands.
fn identify(named: &Named, image: BorrowedFd<'_>, access: Access) -> io::Result<String> {
    check(named, image)?;
    let path = format!("/proc/self/fd/{}", image.as_raw_fd());
    let facts = identify_namespace(Path::new(&path), access != Access::Read)?;
    Ok(serde_json::to_string(&facts)?)
}

/// Whether it may be opened. Its device and inode number.
fn check(named: &Named, image: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let about = fstat(image)?;
    let id = (about.st_dev, about.st_ino);
    let kind = FileType::from_raw_mode(about.st_mode);
    match kind {
        FileType::RegularFile | FileType::BlockDevice => {}
        FileType::CharacterDevice if is_namespace(about.st_rdev) => {}
        FileType::Directory => return Err(Errno::ISDIR.into()),
        _ => return Err(Errno::NODEV.into()),
    }
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", image.as_raw_fd()), Vec::new())?;
    let path = PathBuf::from(OsString::from_vec(link.into_bytes()));
    let shared = SHARED.lock();
    let is_named = named.files.contains(&path)
        || named.config.as_ref() == Some(&path)
        || named.directories.iter().any(|directory| path.starts_with(directory))
        || shared.granted.contains(&path)
        || shared.opened.contains(&id);
    if is_named {
        return Ok(id);
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!(
            "the sandbox lets the server have what it was started with, and what `shadowbell ctl` \
             adds; `serve --allow {}` lets it have more",
            path.parent().unwrap_or(&path).display()
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use keeper_link::{pair, receive, send};
    use std::fs::{File, write};
    use std::io::Read;

    struct Asks(OwnedFd);

    impl Asks {
        fn ask(&self, letter: u8, body: impl AsRef<Path>, fd: Option<BorrowedFd<'_>>) -> Packet {
            send(&self.0, letter, body.as_ref(), fd).unwrap();
            receive(&self.0, false).unwrap().unwrap()
        }

        /// The first letter of what can be read there, by the way that images take.
        fn first(&self, path: &Path) -> Result<u8, String> {
            let told = |packet: Packet| match packet.letter {
                opening::OPENED => Ok(packet.fd().unwrap()),
                opening::ERRNO => Err(format!("errno {}", packet.text())),
                _ => Err(packet.text()),
            };
            let named = told(self.ask(opening::NAME, path, None))?;
            assert!(
                File::from(named.try_clone().unwrap()).read(&mut [0]).is_err(),
                "it names only"
            );
            let opened = told(self.ask(opening::OPEN, "r", Some(named.as_fd())))?;
            let mut first = [0];
            File::from(opened).read_exact(&mut first).unwrap();
            Ok(first[0])
        }
    }

    #[test]
    fn a_worker_gets_what_was_named_to_it_or_granted_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        let path = |name: &str| root.join(name);
        std::fs::create_dir(path("below")).unwrap();
        for name in ["image", "later", "granted", "other", "below/x"] {
            write(path(name), name).unwrap();
        }
        std::os::unix::fs::symlink(path("other"), path("below/link")).unwrap();
        let config = |disks: &str| {
            let text = format!("[[controller]]\nsocket = \"s\"\ndisks = [{disks}]\n");
            write(path("config"), text).unwrap();
        };
        config("");
        let (ours, theirs) = pair().unwrap();
        start(theirs);
        let worker = Asks(ours);
        for (letter, name) in
            [(opening::FILE, "image"), (opening::DIRECTORY, "below"), (opening::CONFIG, "config")]
        {
            send(&worker.0, letter, path(name), None).unwrap();
        }
        assert_eq!(worker.ask(opening::COMPLETE, "", None).letter, opening::OPENED);
        assert_eq!(worker.first(&path("image")), Ok(b'i'));
        assert_eq!(worker.first(&path("below/x")), Ok(b'b'));
        let refused = |name: &str| {
            let why = worker.first(&path(name)).unwrap_err();
            assert!(why.contains("--allow"), "{name}: {why}");
        };
        ["other", "below/link", "below/../other", "granted", "later"].into_iter().for_each(refused);
        assert_eq!(worker.first(&path("below")), Err(format!("errno {}", libc::EISDIR)));
        assert_eq!(worker.first(Path::new("/dev/null")), Err(format!("errno {}", libc::ENODEV)));
        assert_eq!(worker.first(&path("none")), Err(format!("errno {}", libc::ENOENT)));
        // A descriptor that it has got in another way.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let other = open(path("other"), flags, Mode::empty()).unwrap();
        let answer = worker.ask(opening::OPEN, "w", Some(other.as_fd()));
        assert_eq!(answer.letter, opening::REFUSED);
        // No image has anything to say of itself, and nothing else is asked.
        let image = open(path("image"), flags, Mode::empty()).unwrap();
        for (named, expected) in [(&image, libc::ENOTTY.to_string()), (&other, String::new())] {
            let answer = worker.ask(opening::IDENTIFY, "w", Some(named.as_fd()));
            match expected.as_str() {
                "" => assert_eq!(answer.letter, opening::REFUSED),
                errno => assert_eq!((answer.letter, &*answer.text()), (opening::ERRNO, errno)),
            }
        }
        let null = open("/dev/null", flags, Mode::empty()).unwrap();
        assert_eq!(worker.ask(opening::OPEN, "w", Some(null.as_fd())).letter, opening::ERRNO);
        // Nothing is named any more, but by who may.
        assert_eq!(worker.ask(opening::FILE, path("other"), None).letter, opening::REFUSED);
        refused("other");
        grant(path("granted"));
        assert_eq!(worker.first(&path("granted")), Ok(b'g'));
        // What the configuration comes to name counts when it is read again.
        config(&format!("{:?}", path("later")));
        refused("later");
        assert_eq!(worker.first(&path("config")), Ok(b'['));
        assert_eq!(worker.first(&path("later")), Ok(b'l'));
        // By another name, and for another worker.
        std::fs::rename(path("image"), path("renamed")).unwrap();
        let (ours, theirs) = pair().unwrap();
        start(theirs);
        assert_eq!(Asks(ours).first(&path("renamed")), Ok(b'i'));
    }
}
