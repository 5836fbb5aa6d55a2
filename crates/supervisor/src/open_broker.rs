//! Open broker: opens images for a server process whose sandbox forbids `open`. Only regular files,
//! block devices and character devices of NVMe namespaces are opened, and only
//! [granted](super::grants) ones.
//!
//! The broker also stores the UUIDs of disks. The server process gets UUIDs and no descriptor of
//! their file, so it can neither change them nor choose one.

use super::grants::{GRANTS, Location, check_foreign, refusal, same_file};
use crate::permissions;
use crate::protocol::{Packet, failure, open_broker as requests};
use rustix::io::Errno;
use shadowbell_config::disk_uuids::Store;
use shadowbell_disk_file::{Access, identify_namespace, open_image};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns the answer to a request: type, body and descriptors.
pub(super) fn answer(packet: &Packet) -> (u8, Vec<u8>, Vec<OwnedFd>) {
    match outcome(packet) {
        Ok((body, fds)) => (requests::OPENED, body, fds),
        Err(error) => failure(&error, requests::ERRNO, requests::REFUSED),
    }
}

fn outcome(packet: &Packet) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    // If this process has reached its descriptor limit, the kernel has dropped the descriptor.
    let image = || packet.fds.first().map(AsFd::as_fd).ok_or(Errno::MFILE);
    let access = || requests::parse_access(&packet.body).ok_or(Errno::INVAL);
    let fd = |fd| (Vec::new(), vec![fd]);
    match packet.code {
        requests::NAME => name(Path::new(OsStr::from_bytes(&packet.body))).map(fd),
        // The supervisor closes its copy of the descriptor at once: only the server process holds
        // the open image.
        requests::OPEN => {
            let access = access()?;
            Ok(fd(open_image(&path_of(image()?, access)?.0, access)?.into()))
        }
        requests::IDENTIFY => {
            let access = access()?;
            let facts = identify_namespace(&path_of(image()?, access)?.0, access != Access::Read)?;
            Ok((serde_json::to_vec(&facts)?, Vec::new()))
        }
        requests::UUID => {
            let permissions = GRANTS.lock().facts.permissions.clone();
            let directory = permissions.and_then(|permissions| permissions.state_directory);
            let store = Store::open(&permissions::path_of(&directory.ok_or(Errno::ACCESS)?.0))?;
            Ok((store.uuid_of(&packet.text())?.to_vec(), Vec::new()))
        }
        _ => Err(Errno::INVAL.into()),
    }
}

/// Returns a descriptor that names the image at a permitted path.
fn name(path: &Path) -> io::Result<OwnedFd> {
    let mut grants = GRANTS.lock();
    if let Some(known) = grants.known(path) {
        return known.name();
    }
    let location = grants.location(path);
    let (location, is_writable) = location.ok_or_else(|| refusal(path.parent().unwrap_or(path)))?;
    let is_below = matches!(location, Location::Below(..));
    let (own, read_only) = (grants.own_files(), grants.unresolved_read_only());
    // The lock is released first, because the file system may hang.
    drop(grants);
    let file = location.open()?;
    if is_below {
        check_foreign(file.as_fd(), &own)?;
    }
    let is_writable = is_writable && !(is_below && same_file(file.as_fd(), &read_only)?.is_some());
    GRANTS.lock().hold(&location, file, is_writable)?.name()
}

/// Returns the held image that is the same file as `file`, and the path in `/proc` by which to open
/// it.
fn path_of(file: BorrowedFd<'_>, access: Access) -> io::Result<(PathBuf, Arc<OwnedFd>)> {
    let grants = GRANTS.lock();
    let ((held, is_named), own) = (grants.held(file, access)?, grants.own_files());
    // The lock is released first, because the file system may hang.
    drop(grants);
    // A file below an allowed directory may have become an own file since it was named.
    if !is_named {
        check_foreign(held.as_fd(), &own)?;
    }
    Ok((format!("/proc/self/fd/{}", held.as_raw_fd()).into(), held))
}

#[cfg(test)]
mod tests {
    use super::super::grants::{Grants, MAX_GRANTS, Permitted, id_of};
    use super::*;
    use crate::broker::{self, Kind, Owner};
    use crate::permissions::{Permissions, bytes_of};
    use crate::protocol::{receive, send};
    use rustix::fs::{Mode, OFlags, open};
    use shadowbell_testing::process_group::ProcessGroup;
    use shadowbell_testing::programs::skipped;
    use std::collections::BTreeSet;
    use std::fs::{File, write};
    use std::io::{BufRead, BufReader, Read};
    use std::os::unix::fs::MetadataExt;
    use std::process::{Command, Stdio};

    struct Asks(OwnedFd);

    impl Asks {
        fn new() -> Self {
            Self(broker::start(Kind::Images, Owner::new()).unwrap())
        }

        fn ask(&self, code: u8, body: impl AsRef<Path>, fd: Option<BorrowedFd<'_>>) -> Packet {
            send(&self.0, code, body.as_ref(), fd).unwrap();
            receive(&self.0, false).unwrap().unwrap()
        }

        fn name(&self, path: &Path) -> Result<OwnedFd, String> {
            opened(self.ask(requests::NAME, path, None))
        }

        /// Returns the first byte of the image that a descriptor names.
        fn read(&self, named: BorrowedFd<'_>, access: &str) -> Result<u8, String> {
            let opened = opened(self.ask(requests::OPEN, access, Some(named)))?;
            let mut first = [0];
            File::from(opened).read_exact(&mut first).unwrap();
            Ok(first[0])
        }

        /// Opens the image at a path with two requests, as a server process does, and returns its
        /// first byte.
        fn first(&self, path: &Path) -> Result<u8, String> {
            let named = self.name(path)?;
            let copy = File::from(named.try_clone().unwrap()).read(&mut [0]);
            assert!(copy.is_err(), "it names only");
            self.read(named.as_fd(), "r")
        }
    }

    fn opened(packet: Packet) -> Result<OwnedFd, String> {
        match packet.code {
            requests::OPENED => Ok(packet.fd().unwrap()),
            requests::ERRNO => Err(format!("errno {}", packet.text())),
            _ => Err(packet.text()),
        }
    }

    fn o_path(path: &Path) -> OwnedFd {
        open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
    }

    /// Permits images and directories, in addition to those of other tests.
    fn permit(images: &[&Path], directories: &[&Path]) {
        let all = |paths: &[&Path]| paths.iter().map(|path| bytes_of(path)).collect();
        let (images, image_directories) = (all(images), all(directories));
        let permissions = Permissions { images, image_directories, ..Permissions::default() };
        GRANTS.lock().permit(Permitted { permissions, config: None });
    }

    fn directory(names: &[&str]) -> (tempfile::TempDir, impl Fn(&str) -> PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("below")).unwrap();
        names.iter().for_each(|name| write(root.join(name), name).unwrap());
        (directory, move |name| root.join(name))
    }

    #[test]
    fn a_server_process_gets_permitted_images_and_nothing_else() {
        let (_directory, path) = directory(&["image", "other", "below/x"]);
        std::os::unix::fs::symlink(path("other"), path("below/link")).unwrap();
        std::os::unix::fs::symlink(path("image"), path("by-id")).unwrap();
        permit(&[&path("by-id")], &[&path("below")]);
        let process = Asks::new();
        assert_eq!(process.first(&path("by-id")), Ok(b'i'));
        assert_eq!(process.first(&path("below/x")), Ok(b'b'));
        let refused = |name: &str| {
            let why = process.first(&path(name)).unwrap_err();
            assert!(why.contains("--allow"), "{name}: {why}");
        };
        // The refusal is the same for files that do not exist.
        let all = ["other", "none", "image", "below/link", "below/../other", "."];
        all.into_iter().for_each(refused);
        assert_eq!(process.first(&path("below")), Err(format!("errno {}", libc::EISDIR)));
        assert_eq!(process.first(&path("below/none")), Err(format!("errno {}", libc::ENOENT)));
        let other = o_path(&path("other"));
        for (code, body) in [(requests::OPEN, "w"), (requests::IDENTIFY, "r")] {
            let answer = process.ask(code, body, Some(other.as_fd()));
            assert_eq!(answer.code, requests::REFUSED, "{}", answer.text());
            assert_eq!(process.ask(code, "?", Some(other.as_fd())).code, requests::ERRNO);
            assert_eq!(process.ask(code, body, None).code, requests::ERRNO);
        }
        let image = process.name(&path("by-id")).unwrap();
        // A regular file has no Identify data.
        let answer = process.ask(requests::IDENTIFY, "w", Some(image.as_fd()));
        assert_eq!((answer.code, answer.text()), (requests::ERRNO, libc::ENOTTY.to_string()));
        // No request adds a path to the grants.
        for code in (0..=u8::MAX).filter(|code| !b"noicus".contains(code)) {
            let answer = process.ask(code, path("other"), Some(other.as_fd()));
            assert_eq!(answer.code, requests::ERRNO, "{code}");
        }
        refused("other");
        // The broker identifies an image by its inode, so the image can be opened after a rename,
        // also by another server process.
        std::fs::rename(path("image"), path("renamed")).unwrap();
        assert_eq!(Asks::new().read(o_path(&path("renamed")).as_fd(), "w"), Ok(b'i'));
    }

    /// The UUIDs are in the state directory of the first configuration, and a server process gets
    /// no descriptor of their file.
    #[test]
    fn a_server_process_gets_the_uuids_of_its_disks() {
        let (_directory, path) = directory(&[]);
        permit(&[], &[]);
        let process = Asks::new();
        // Other tests share the permissions.
        let set = |directory: Option<&Path>| {
            if let Some(permissions) = &mut GRANTS.lock().facts.permissions {
                permissions.state_directory = directory.map(bytes_of);
            }
        };
        assert_eq!(process.ask(requests::UUID, "/a.img", None).code, requests::ERRNO);
        set(Some(&path("state")));
        let uuid = |name: &str| {
            let answer = process.ask(requests::UUID, name, None);
            assert!(answer.code == requests::OPENED && answer.fds.is_empty(), "{}", answer.text());
            <[u8; 16]>::try_from(answer.body).unwrap()
        };
        let (one, other) = (uuid("/a.img"), uuid("/b.img\n/a.img"));
        assert!(one != other && one == uuid("/a.img"));
        let stored = || std::fs::read_to_string(path("state/disk-uuids")).unwrap();
        assert_eq!(stored().matches("/a.img\"").count(), 2, "{}", stored());
        let before = stored();
        let refused = process.ask(requests::UUID, "x".repeat(5000), None);
        assert_eq!((refused.code, stored()), (requests::REFUSED, before));
        // A configuration that is read again does not change the directory.
        let state_directory = Some(bytes_of(&path("below")));
        let permissions = Permissions { state_directory, ..Permissions::default() };
        GRANTS.lock().permit(Permitted { permissions, config: None });
        assert_eq!(uuid("/a.img"), one);
        set(None);
    }

    /// The files that the supervisor itself reads or executes are no images, although they are
    /// below an allowed directory: the server process would choose its own permissions.
    #[test]
    fn the_files_of_the_supervisor_are_no_images() {
        let (_directory, path) = directory(&["vm.toml", "program", "image"]);
        permit(&[], &[&path("")]);
        let own_files = ["vm.toml", "program"].map(&path);
        GRANTS.lock().own_files.extend(own_files);
        std::fs::hard_link(path("vm.toml"), path("link")).unwrap();
        std::os::unix::fs::symlink("../vm.toml", path("below/link")).unwrap();
        let process = Asks::new();
        for name in ["vm.toml", "program", "link", "below/link"] {
            let why = process.name(&path(name)).unwrap_err();
            assert!(why.contains("belongs to the supervisor"), "{name}: {why}");
        }
        let image = process.name(&path("image")).unwrap();
        assert_eq!(process.read(image.as_fd(), "w"), Ok(b'i'));
        // The old configuration file, which is replaced, is an ordinary file.
        std::fs::rename(path("image"), path("vm.toml")).unwrap();
        let why = process.read(image.as_fd(), "w").unwrap_err();
        assert!(why.contains("belongs to the supervisor"), "{why}");
        assert_eq!(process.first(&path("link")), Ok(b'v'));
        // The file that an inaccessible path leads to is unknown.
        std::os::unix::fs::symlink("loop", path("loop")).unwrap();
        let own = [path("none"), path("link/none"), path("loop")];
        assert!(check_foreign(image.as_fd(), &own[..2]).is_ok());
        assert!(check_foreign(image.as_fd(), &own).is_err());
    }

    /// An image that is configured read-only stays read-only, although it is below an allowed
    /// directory and the server process requests it by another path.
    #[test]
    fn an_allowed_directory_does_not_make_a_read_only_image_writable() {
        let (_directory, path) = directory(&["first", "later"]);
        permit(&[], &[&path("")]);
        let read_only_images = ["first", "later"].map(|name| bytes_of(&path(name))).to_vec();
        let permissions = Permissions { read_only_images, ..Permissions::default() };
        GRANTS.lock().permit(Permitted { permissions, config: None });
        let process = Asks::new();
        drop(process.name(&path("later")).unwrap());
        for name in ["first", "later"] {
            let named = process.name(&path(&format!("below/../{name}"))).unwrap();
            assert_eq!(process.read(named.as_fd(), "r"), Ok(name.as_bytes()[0]));
            let refused = Err(format!("errno {}", libc::EACCES));
            assert_eq!(process.read(named.as_fd(), "w"), refused, "{name}");
        }
    }

    #[test]
    fn a_name_that_comes_with_a_descriptor_is_not_used() {
        let (_directory, path) = directory(&["image", "secret"]);
        permit(&[&path("image")], &[]);
        let process = Asks::new();
        assert_eq!(process.first(&path("image")), Ok(b'i'));
        // A client's descriptor for the image's path may refer to another file, for example in a
        // mount namespace of the client's own.
        std::fs::rename(path("image"), path("kept")).unwrap();
        std::fs::rename(path("secret"), path("image")).unwrap();
        let why = process.read(o_path(&path("image")).as_fd(), "w").unwrap_err();
        assert!(why.contains("--allow"), "{why}");
        // The configured path is resolved again only when the configuration is read again.
        assert_eq!(process.first(&path("image")), Ok(b'i'));
        permit(&[&path("image")], &[]);
        assert_eq!(process.first(&path("image")), Ok(b's'));
    }

    /// Tests that a file is refused if a VMM has mounted it at the image's path, in a mount
    /// namespace of its own.
    #[test]
    fn a_file_that_is_mounted_over_an_image_is_not_the_image() {
        let (_directory, path) = directory(&["image", "secret", "other"]);
        permit(&[&path("image"), &path("other")], &[]);
        let process = Asks::new();
        assert_eq!(process.first(&path("image")), Ok(b'i'));
        assert_eq!(process.first(&path("other")), Ok(b'o'));
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", "mount --bind $0 $1 && echo mounted && read line"]);
        command.arg(path("secret")).arg(path("image"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut line = String::new();
        let mut vmm = match ProcessGroup::spawn(&mut command) {
            Ok(vmm) => vmm,
            Err(error) => return skipped(format_args!("no `unshare`: {error}")),
        };
        BufReader::new(vmm.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line != "mounted\n" {
            return skipped(format_args!("this user cannot mount"));
        }
        let seen = format!("/proc/{}/root{}", vmm.id(), path("image").display());
        let secret = o_path(Path::new(&seen));
        let name = std::fs::read_link(format!("/proc/self/fd/{}", secret.as_raw_fd())).unwrap();
        assert_eq!(name, path("image"), "the name is the image's");
        // The other image is the same file there, but on another mount, whose options may differ.
        let seen = format!("/proc/{}/root{}", vmm.id(), path("other").display());
        let other = o_path(Path::new(&seen));
        for (file, access) in [(&secret, "r"), (&secret, "w"), (&other, "r"), (&other, "w")] {
            let why = process.read(file.as_fd(), access).unwrap_err();
            assert!(why.contains("--allow"), "{why}");
        }
    }

    /// True if the file system of `directory` reuses inode numbers: one of many new files gets the
    /// inode number of a removed file.
    fn reuses_inodes(directory: &tempfile::TempDir) -> bool {
        let new = |name: &str| {
            let path = directory.path().join(name);
            write(&path, name).unwrap();
            path.metadata().unwrap().ino()
        };
        let removed = new("removed");
        std::fs::remove_file(directory.path().join("removed")).unwrap();
        (0..100).any(|number| new(&format!("new{number}")) == removed)
    }

    #[test]
    fn the_inode_of_a_removed_image_cannot_pass() {
        let root = std::env::temp_dir();
        let roots = [root.as_path(), Path::new("/var/tmp"), Path::new(env!("CARGO_MANIFEST_DIR"))];
        let directories = roots.iter().filter_map(|root| tempfile::tempdir_in(root).ok());
        let Some(directory) = directories.into_iter().find(reuses_inodes) else {
            return skipped(format_args!("no file system here reuses the numbers of inodes"));
        };
        let root = directory.path().canonicalize().unwrap();
        let path = |name: &str| root.join(name);
        write(path("image"), "image").unwrap();
        permit(&[&path("image")], &[]);
        let process = Asks::new();
        drop(process.name(&path("image")).unwrap());
        std::fs::remove_file(path("image")).unwrap();
        for number in 0..100 {
            let other = path(&format!("secret{number}"));
            write(&other, "secret").unwrap();
            let why = process.read(o_path(&other).as_fd(), "r").unwrap_err();
            assert!(why.contains("--allow"), "{why}");
        }
    }

    #[test]
    fn a_read_only_image_is_not_opened_for_writing() {
        let (_directory, path) = directory(&["read", "both"]);
        let read_only_images = ["read", "both"].map(|name| bytes_of(&path(name))).to_vec();
        let permissions = Permissions { read_only_images, ..Permissions::default() };
        GRANTS.lock().permit(Permitted { permissions, config: None });
        permit(&[&path("both")], &[]);
        let process = Asks::new();
        let read = process.name(&path("read")).unwrap();
        assert_eq!(process.read(read.as_fd(), "r"), Ok(b'r'));
        for access in ["w", "x"] {
            assert_eq!(process.read(read.as_fd(), access), Err(format!("errno {}", libc::EACCES)));
        }
        let both = process.name(&path("both")).unwrap();
        assert_eq!(process.read(both.as_fd(), "w"), Ok(b'b'));
        // The configuration is read again, and permits writing.
        permit(&[&path("read")], &[]);
        let read = process.name(&path("read")).unwrap();
        assert_eq!(process.read(read.as_fd(), "w"), Ok(b'r'));
    }

    #[test]
    fn a_grant_gives_the_access_of_its_descriptor() {
        let (_directory, path) = directory(&["image", "read"]);
        permit(&[], &[]);
        let process = Asks::new();
        let grant = |name: &str, file: BorrowedFd<'_>| GRANTS.lock().grant(&path(name), file);
        assert!(grant("image", o_path(&path("image")).as_fd()).is_err(), "no access was needed");
        assert!(process.name(&path("image")).is_err());
        let file = File::options().read(true).write(true).open(path("image")).unwrap();
        grant("image", file.as_fd()).unwrap();
        let image = process.name(&path("image")).unwrap();
        assert_eq!(process.read(image.as_fd(), "w"), Ok(b'i'));
        grant("read", File::open(path("read")).unwrap().as_fd()).unwrap();
        let read = process.name(&path("read")).unwrap();
        assert_eq!(process.read(read.as_fd(), "r"), Ok(b'r'));
        assert_eq!(process.read(read.as_fd(), "w"), Err(format!("errno {}", libc::EACCES)));
        assert!(grant("image", File::open("/dev/null").unwrap().as_fd()).is_err());
    }

    #[test]
    fn images_outside_of_checkpoints_make_room_for_others() {
        shadowbell_process::descriptor_limit::raise();
        let mut grants = Grants::default();
        let (_directory, path) = directory(&[]);
        let mut grant = |number: usize, stored: &[BorrowedFd<'_>]| {
            let (path, ids) = (path(&number.to_string()), stored.iter().map(|fd| id_of(*fd)));
            write(&path, "").unwrap();
            grants.release(&ids.collect::<Result<_, _>>().unwrap());
            grants.grant(&path, File::open(&path).unwrap().as_fd()).unwrap();
            o_path(&path)
        };
        let first = grant(0, &[]);
        let second = grant(1, &[first.as_fd()]);
        (2..=MAX_GRANTS).for_each(|number| drop(grant(number, &[first.as_fd()])));
        assert!(grants.held(first.as_fd(), Access::Read).is_ok(), "a checkpoint has its disk");
        assert!(grants.held(second.as_fd(), Access::Read).is_err());
    }

    #[test]
    fn an_image_is_held_as_long_as_a_checkpoint_has_its_disk() {
        let mut grants = Grants::default();
        let (_directory, path) = directory(&["image", "new"]);
        let open = |name: &str| File::open(path(name)).unwrap();
        grants.grant(&path("image"), open("image").as_fd()).unwrap();
        let image = o_path(&path("image"));
        // The image is in no checkpoint yet, so it is not released.
        grants.release(&BTreeSet::new());
        assert!(grants.held(image.as_fd(), Access::Read).is_ok());
        for _ in 0..2 {
            grants.release(&BTreeSet::from([id_of(image.as_fd()).unwrap()]));
            assert!(grants.held(image.as_fd(), Access::Read).is_ok());
        }
        grants.grant(&path("new"), open("new").as_fd()).unwrap();
        grants.release(&BTreeSet::new());
        assert!(grants.held(image.as_fd(), Access::Read).is_err());
        assert!(grants.held(o_path(&path("new")).as_fd(), Access::Read).is_ok());
    }

    /// Images of refused disks are released, those of disks in use are not, and a release permits
    /// nothing.
    #[test]
    fn an_image_is_released_after_its_last_use() {
        let mut grants = Grants::default();
        let (_directory, path) = directory(&["image", "other"]);
        grants.grant(&path("image"), File::open(path("image")).unwrap().as_fd()).unwrap();
        let (image, nothing) = (o_path(&path("image")), BTreeSet::new());
        let is_held = |grants: &Grants| grants.held(image.as_fd(), Access::Read).is_ok();
        for _ in 0..2 {
            drop(grants.known(&path("image")).unwrap().name().unwrap());
        }
        // One of two disks with this image is refused.
        grants.end_use(image.as_fd());
        grants.end_use(o_path(&path("other")).as_fd());
        grants.release(&nothing);
        assert!(is_held(&grants), "the other disk uses it");
        grants.end_use(image.as_fd());
        grants.release(&BTreeSet::from([id_of(image.as_fd()).unwrap()]));
        assert!(is_held(&grants), "a checkpoint contains it");
        // Another disk is opened when the earlier one is removed from the checkpoint.
        drop(grants.known(&path("image")).unwrap().name().unwrap());
        grants.release(&nothing);
        assert!(is_held(&grants), "the new disk uses it");
        grants.end_uses();
        grants.release(&nothing);
        assert!(!is_held(&grants) && grants.known(&path("image")).is_none());
        assert!(grants.location(&path("image")).is_none(), "a release permits nothing");
    }

    /// The server process cannot make the supervisor resolve a configured path again: neither by
    /// the end of its uses nor by many other images.
    #[test]
    fn a_configured_image_is_held() {
        shadowbell_process::descriptor_limit::raise();
        let mut grants = Grants::default();
        let (_directory, path) = directory(&["image"]);
        let images = vec![bytes_of(&path("image"))];
        let permissions = Permissions { images, ..Permissions::default() };
        grants.permit(Permitted { permissions, config: None });
        let (location, is_writable) = grants.location(&path("image")).unwrap();
        let image = location.open().unwrap();
        grants.hold(&location, o_path(&path("image")), is_writable).unwrap().name().unwrap();
        std::fs::rename(path("image"), path("kept")).unwrap();
        write(path("image"), "other").unwrap();
        let id = |grants: &mut Grants| {
            grants.known(&path("image")).map(|image| id_of(image.name().unwrap().as_fd()).unwrap())
        };
        for number in 0..=MAX_GRANTS {
            let path = path(&number.to_string());
            write(&path, "").unwrap();
            grants.grant(&path, File::open(&path).unwrap().as_fd()).unwrap();
        }
        assert_eq!(id(&mut grants), id_of(image.as_fd()).ok());
        grants.end_uses();
        grants.release(&BTreeSet::new());
        assert_eq!(id(&mut grants), id_of(image.as_fd()).ok());
        // The configuration is read again, and does not name the path any more.
        let permissions = Permissions::default();
        grants.permit(Permitted { permissions, config: None });
        grants.end_uses();
        grants.release(&BTreeSet::new());
        assert_eq!(id(&mut grants), None);
        assert!(grants.held(image.as_fd(), Access::Read).is_err());
    }

    /// Each configured path of an image leads to it, until the configuration is read again.
    #[test]
    fn each_name_of_an_image_is_held() {
        let mut grants = Grants::default();
        let (_directory, path) = directory(&["one"]);
        std::fs::hard_link(path("one"), path("two")).unwrap();
        let permit = |grants: &mut Grants, names: &[&str]| {
            let images = names.iter().map(|name| bytes_of(&path(name))).collect();
            let permissions = Permissions { images, ..Permissions::default() };
            grants.permit(Permitted { permissions, config: None });
        };
        permit(&mut grants, &["one", "two"]);
        let image = id_of(o_path(&path("one")).as_fd()).unwrap();
        for name in ["one", "two"] {
            let (location, is_writable) = grants.location(&path(name)).unwrap();
            let file = location.open().unwrap();
            grants.hold(&location, file, is_writable).unwrap();
        }
        for name in ["one", "two"] {
            std::fs::rename(path(name), path("kept")).unwrap();
            write(path(name), "other").unwrap();
            let file = grants.known(&path(name)).unwrap().name().unwrap();
            assert_eq!(id_of(file.as_fd()).unwrap(), image, "{name}");
        }
        // The configuration is read again, so its paths are resolved again.
        permit(&mut grants, &[]);
        assert!(["one", "two"].iter().all(|name| grants.known(&path(name)).is_none()));
    }

    #[test]
    fn an_image_that_is_granted_again_before_its_release_stays() {
        let mut grants = Grants::default();
        let (_directory, path) = directory(&["image"]);
        let grant = |grants: &mut Grants| {
            grants.grant(&path("image"), File::open(path("image")).unwrap().as_fd()).unwrap();
        };
        let image = o_path(&path("image"));
        grant(&mut grants);
        grants.release(&BTreeSet::from([id_of(image.as_fd()).unwrap()]));
        // The controller of the image is removed and added again.
        grant(&mut grants);
        grants.release(&BTreeSet::new());
        assert!(grants.held(image.as_fd(), Access::Read).is_ok());
    }
}
