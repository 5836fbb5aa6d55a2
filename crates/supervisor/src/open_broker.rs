//! Open broker: opens images for a server process whose sandbox forbids `open` (see
//! `serve/sandbox`).
//!
//! Each server process that requests it has a thread in the supervisor, which ends when the
//! server process closes its socket. So a hung file system delays the answer to the server
//! process, and not the supervisor. A server process registers its paths before it enters its
//! sandbox; afterwards it only sends open requests. Only regular files, block devices and
//! character devices of NVMe namespaces are opened, and only if
//!
//! * the command line or the configuration file names them, or they are below a directory of
//!   `--allow`;
//! * a client of the supervisor has [granted](grant) them, as `shadowbell ctl` does;
//! * or they were opened for an earlier server process: their path may have changed since then.

use super::log::log_line;
use crate::protocol::{self, Packet, open_broker as requests};
use parking_lot::{Mutex, RwLock};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use shadowbell_config::config_file::disks_of;
use shadowbell_config::disk_spec;
use shadowbell_disk_file::{Access, identify_namespace, is_namespace, open_image};
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

/// Maximum number of granted paths. The oldest is dropped; a repeated grant renews a path.
const MOST: usize = 4096;

/// Permissions that all server processes share.
static SHARED: Mutex<Shared> = Mutex::new(Shared { granted: Vec::new(), opened: Vec::new() });

/// Change counter of [`SHARED`].
static CHANGES: AtomicU64 = AtomicU64::new(0);

struct Shared {
    granted: Vec<PathBuf>,
    /// Device and inode numbers of opened images.
    opened: Vec<(u64, u64)>,
}

/// Permits the image at `path`, which contains no symbolic links, from now on.
pub(super) fn grant(path: PathBuf) {
    let granted = &mut SHARED.lock().granted;
    granted.retain(|other| *other != path);
    if granted.len() >= MOST {
        granted.remove(0);
    }
    granted.push(path);
    CHANGES.fetch_add(1, Ordering::Release);
}

/// Read-locked from the receipt of a request to its answer. While it is write-locked ([`pause`])
/// no request is half done, and further ones stay in their sockets.
static WORK: RwLock<()> = RwLock::new(());

/// All open brokers.
static ALL: Mutex<Vec<Arc<OpenBroker>>> = Mutex::new(Vec::new());

struct OpenBroker {
    socket: OwnedFd,
    named: Mutex<Named>,
}

/// Serialized shared permissions.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedShared {
    granted: Vec<Bytes>,
    opened: Vec<(u64, u64)>,
}

/// Serialized permissions of one server process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SavedNamed {
    files: Vec<Bytes>,
    directories: Vec<Bytes>,
    config: Option<Bytes>,
    is_complete: bool,
}

/// Blocks all brokers until the result is dropped. `None` if a request is being answered.
pub(super) fn pause() -> Option<impl Sized> {
    WORK.try_write()
}

/// Returns the shared permissions for serialization.
pub(super) fn shared() -> SavedShared {
    let shared = SHARED.lock();
    let granted = shared.granted.iter().map(|path| bytes_of(path)).collect();
    SavedShared { granted, opened: shared.opened.clone() }
}

/// Returns how often the shared permissions have changed.
pub(super) fn changes() -> u64 {
    CHANGES.load(Ordering::Acquire)
}

/// Returns the sockets of all brokers, and the permissions of each.
///
/// # Errors
/// The descriptor limit is reached.
pub(super) fn openers() -> io::Result<Vec<(OwnedFd, SavedNamed)>> {
    let save = |broker: &Arc<OpenBroker>| {
        let named = broker.named.lock();
        let all = |paths: &[PathBuf]| paths.iter().map(|path| bytes_of(path)).collect();
        let saved = SavedNamed {
            files: all(&named.files),
            directories: all(&named.directories),
            config: named.config.as_deref().map(bytes_of),
            is_complete: named.is_complete,
        };
        Ok((broker.socket.try_clone()?, saved))
    };
    ALL.lock().iter().map(save).collect()
}

/// Restores shared permissions of an earlier supervisor.
pub(super) fn restore_shared(saved: SavedShared) {
    let mut shared = SHARED.lock();
    shared.granted = saved.granted.into_iter().map(path_of).collect();
    shared.opened = saved.opened;
}

/// Starts a broker on a socket of an earlier supervisor.
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

/// Starts a broker that answers a server process until the socket is closed.
pub(super) fn start(socket: OwnedFd) {
    start_with(socket, Named::default());
}

fn start_with(socket: OwnedFd, named: Named) {
    let broker = Arc::new(OpenBroker { socket, named: Mutex::new(named) });
    ALL.lock().push(Arc::clone(&broker));
    let its = Arc::clone(&broker);
    let started = spawn("sb-open-broker", move || {
        while its.answers() {}
        its.ends();
    });
    if let Err(error) = started {
        broker.ends();
        log_line(&format!(
            "error: the server process cannot open images: no thread for the open broker: {error}"
        ));
    }
}

/// Starts a thread that answers a server process.
pub(super) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // Signals are for the supervisor's main thread, which may block them during exec.
    let signals = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD];
    let _ = block_signals(&signals);
    let thread = std::thread::Builder::new().name(name.into()).stack_size(256 << 10);
    let started = thread.spawn(work);
    let _ = unblock_signals(&signals);
    started.map(drop)
}

/// Marks a request as in flight, from its receipt to its answer: see [`pause`].
pub(super) fn working() -> impl Sized {
    WORK.read()
}

impl OpenBroker {
    /// Answers the next request. Returns false after the end of the socket.
    fn answers(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        let _work = WORK.read();
        match protocol::receive(&self.socket, true) {
            Ok(Some(packet)) => answer(&self.socket, &mut self.named.lock(), packet).is_ok(),
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
            Ok(None) => false,
        }
    }

    fn ends(&self) {
        ALL.lock().retain(|other| !std::ptr::eq(&raw const **other, self));
    }
}

/// Permissions that one server process registered.
#[derive(Default)]
struct Named {
    files: Vec<PathBuf>,
    directories: Vec<PathBuf>,
    config: Option<PathBuf>,
    is_complete: bool,
}

fn answer(socket: &OwnedFd, named: &mut Named, packet: Packet) -> io::Result<()> {
    let outcome = match packet.letter {
        requests::FILE | requests::DIRECTORY | requests::CONFIG if named.is_complete => {
            Err(io::Error::other("no more paths can be registered"))
        }
        requests::FILE => {
            named.files.push(packet.path());
            return Ok(());
        }
        requests::DIRECTORY => {
            named.directories.push(packet.path());
            return Ok(());
        }
        requests::CONFIG => {
            named.config = Some(packet.path());
            return Ok(());
        }
        requests::COMPLETE => {
            named.is_complete = true;
            return protocol::send(socket, requests::OPENED, "", None);
        }
        requests::NAME => name(named, &packet.path()),
        requests::IDENTIFY => {
            let access = requests::parse_access(&packet.body);
            let outcome = match (access, packet.fd()) {
                (Some(access), Some(image)) => identify(named, image.as_fd(), access),
                _ => Err(Errno::INVAL.into()),
            };
            match outcome {
                Ok(facts) => return protocol::send(socket, requests::OPENED, facts, None),
                Err(error) => Err(error),
            }
        }
        requests::OPEN => {
            let access = requests::parse_access(&packet.body);
            match (access, packet.fd()) {
                (Some(access), Some(image)) => reopen(named, image.as_fd(), access),
                _ => Err(Errno::INVAL.into()),
            }
        }
        _ => Err(Errno::INVAL.into()),
    };
    match outcome {
        // The supervisor drops its copy at once; only the server process holds the open image.
        Ok(file) => protocol::send(socket, requests::OPENED, "", Some(file.as_fd())),
        Err(error) => match error.raw_os_error() {
            Some(errno) => protocol::send(socket, requests::ERRNO, errno.to_string(), None),
            None => protocol::send(socket, requests::REFUSED, error.to_string(), None),
        },
    }
}

impl Named {
    /// Adds the images that the configuration file names now. The file belongs to the operator,
    /// so its content may extend the permissions.
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

/// Opens `path` with `O_PATH` and remembers it as opened.
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

/// Opens the image that an `O_PATH` descriptor names.
fn reopen(named: &Named, image: BorrowedFd<'_>, access: Access) -> io::Result<OwnedFd> {
    check(named, image)?;
    let path = format!("/proc/self/fd/{}", image.as_raw_fd());
    Ok(open_image(Path::new(&path), access)?.into())
}

/// Returns the Identify data of the namespace whose character device `image` names, as JSON. A
/// sandboxed process cannot send admin commands to a device.
fn identify(named: &Named, image: BorrowedFd<'_>, access: Access) -> io::Result<String> {
    check(named, image)?;
    let path = format!("/proc/self/fd/{}", image.as_raw_fd());
    let facts = identify_namespace(Path::new(&path), access != Access::Read)?;
    Ok(serde_json::to_string(&facts)?)
}

/// Checks that an image may be opened, and returns its device and inode number.
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
            "the sandbox permits only images that were named at the start or added by `shadowbell \
             ctl`; restart `serve` with `--allow {}` to permit more",
            path.parent().unwrap_or(&path).display()
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{pair, receive, send};
    use std::fs::{File, write};
    use std::io::Read;

    struct Asks(OwnedFd);

    impl Asks {
        fn ask(&self, letter: u8, body: impl AsRef<Path>, fd: Option<BorrowedFd<'_>>) -> Packet {
            send(&self.0, letter, body.as_ref(), fd).unwrap();
            receive(&self.0, false).unwrap().unwrap()
        }

        /// Returns the first byte of the image, opened as server processes do.
        fn first(&self, path: &Path) -> Result<u8, String> {
            let told = |packet: Packet| match packet.letter {
                requests::OPENED => Ok(packet.fd().unwrap()),
                requests::ERRNO => Err(format!("errno {}", packet.text())),
                _ => Err(packet.text()),
            };
            let named = told(self.ask(requests::NAME, path, None))?;
            assert!(
                File::from(named.try_clone().unwrap()).read(&mut [0]).is_err(),
                "it names only"
            );
            let opened = told(self.ask(requests::OPEN, "r", Some(named.as_fd())))?;
            let mut first = [0];
            File::from(opened).read_exact(&mut first).unwrap();
            Ok(first[0])
        }
    }

    #[test]
    fn a_worker_can_open_only_named_and_granted_paths() {
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
        for (letter, name) in [
            (requests::FILE, "image"),
            (requests::DIRECTORY, "below"),
            (requests::CONFIG, "config"),
        ] {
            send(&worker.0, letter, path(name), None).unwrap();
        }
        assert_eq!(worker.ask(requests::COMPLETE, "", None).letter, requests::OPENED);
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
        // A descriptor that was not opened by the broker.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let other = open(path("other"), flags, Mode::empty()).unwrap();
        let answer = worker.ask(requests::OPEN, "w", Some(other.as_fd()));
        assert_eq!(answer.letter, requests::REFUSED);
        // A regular file has no Identify data (ENOTTY), and other files are refused.
        let image = open(path("image"), flags, Mode::empty()).unwrap();
        for (named, expected) in [(&image, libc::ENOTTY.to_string()), (&other, String::new())] {
            let answer = worker.ask(requests::IDENTIFY, "w", Some(named.as_fd()));
            match expected.as_str() {
                "" => assert_eq!(answer.letter, requests::REFUSED),
                errno => assert_eq!((answer.letter, &*answer.text()), (requests::ERRNO, errno)),
            }
        }
        let null = open("/dev/null", flags, Mode::empty()).unwrap();
        assert_eq!(worker.ask(requests::OPEN, "w", Some(null.as_fd())).letter, requests::ERRNO);
        // Registration is closed; only a grant adds paths.
        assert_eq!(worker.ask(requests::FILE, path("other"), None).letter, requests::REFUSED);
        refused("other");
        grant(path("granted"));
        assert_eq!(worker.first(&path("granted")), Ok(b'g'));
        // Images that were added to the configuration file are permitted once it is reloaded.
        config(&format!("{:?}", path("later")));
        refused("later");
        assert_eq!(worker.first(&path("config")), Ok(b'['));
        assert_eq!(worker.first(&path("later")), Ok(b'l'));
        // After a rename, and for another server process.
        std::fs::rename(path("image"), path("renamed")).unwrap();
        let (ours, theirs) = pair().unwrap();
        start(theirs);
        assert_eq!(Asks(ours).first(&path("renamed")), Ok(b'i'));
    }
}
