//! Grants: everything that the server processes of this supervisor may open, create and remove.
//!
//! Grants come from the command line, from the configuration file (read at the start, at SIGHUP and
//! at an upgrade that a client of the supervisor requests), and from files that `shadowbell ctl`
//! has opened and passed to the supervisor. No message of a server process adds a grant.
//!
//! An image is identified by a descriptor that the supervisor opened by a granted path, and holds
//! as long as a server process uses it or a checkpoint contains the disk. A configured path is
//! resolved once, and its image is held until the configuration is read again. Other descriptors
//! are compared with the held ones by mount, device and inode; their names are never used. Since
//! the inode is held, its number is not reused.

use crate::path_protocol::Made;
use crate::permissions::{Permissions, bytes_of, path_of};
use parking_lot::Mutex;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags, fcntl_getfl, makedev,
    openat, openat2, statx,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use shadowbell_config::disk_uuids;
use shadowbell_disk_file::{Access, is_namespace};
use shadowbell_process::deferred_close;
use shadowbell_process::process_env::absolute;
use shadowbell_state::{Bytes, Descriptors, FdRef, StateError};
use std::collections::{BTreeSet, HashSet};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

/// Maximum number of images, and of sockets, in the grants.
pub(super) const MAX_GRANTS: usize = 4096;

/// Flags of a descriptor that identifies a file but gives no access to its content.
const NAME_ONLY: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// Grants of this process.
pub(super) static GRANTS: LazyLock<Mutex<Grants>> = LazyLock::new(Mutex::default);

/// Identity of a file: mount, device (major and minor), and inode.
pub(super) type Id = (u64, u32, u32, u64);

/// All grants, and the files that belong to them.
#[derive(Default)]
pub(super) struct Grants {
    pub(super) facts: Facts,
    images: Vec<Image>,
    /// Configuration file and program of this process, which are no images.
    pub(super) own_files: Vec<PathBuf>,
    /// Number of changes of the grants since the start of the supervisor.
    pub(super) changes: u64,
}

/// Grants without descriptors.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Facts {
    pub(super) permissions: Option<Permissions>,
    /// Text of the configuration file that the permissions are from.
    pub(super) config: Option<String>,
    /// Sockets that this supervisor has created.
    sockets: Vec<Made>,
    /// Directories of control sockets that this supervisor has created.
    directories: Vec<Bytes>,
}

impl Facts {
    /// Configured paths of images. The image at such a path is held, because the path could lead to
    /// another file when it is resolved again.
    fn configured(&self) -> HashSet<&[u8]> {
        let all = self.permissions.iter().flat_map(Permissions::all_images);
        all.map(|path| &path.0[..]).collect()
    }
}

/// Permissions, and the text of the configuration file that they are from, if there is one.
pub(super) struct Permitted {
    pub(super) permissions: Permissions,
    pub(super) config: Option<String>,
}

/// Image that a server process may open. `F`: its file, or a reference to it in a snapshot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Image<F = Arc<OwnedFd>> {
    /// Path by which the image was opened.
    path: Bytes,
    /// True if `path` still stands for this file. False after a configuration with this path was
    /// read: the next use of the path resolves it again.
    is_current: bool,
    /// Other configured paths that stand for this file.
    #[serde(default)]
    other_names: Vec<Bytes>,
    /// Descriptor that identifies the file but gives no access to its content.
    file: F,
    #[serde(skip)]
    id: Id,
    is_writable: bool,
    /// Number of requests of the server process for the image that it has not
    /// [ended](Grants::end_use).
    #[serde(default)]
    uses: u32,
    /// True if the image is released once no checkpoint contains it: after the server process's
    /// last request for it, a checkpoint has contained it, or its last use has ended.
    #[serde(rename = "was_stored")]
    is_releasable: bool,
}

impl<F> Image<F> {
    fn with_file<G>(self, file: G) -> Image<G> {
        let Self { path, is_current, other_names, id, is_writable, uses, is_releasable, .. } = self;
        Image { path, is_current, other_names, file, id, is_writable, uses, is_releasable }
    }

    /// Paths that stand for this file.
    fn names(&self) -> impl Iterator<Item = &Bytes> {
        self.is_current.then_some(&self.path).into_iter().chain(&self.other_names)
    }

    /// Adds a path that stands for this file.
    fn add_name(&mut self, path: Bytes) {
        if !self.is_current {
            (self.path, self.is_current) = (path, true);
        } else if !self.names().any(|name| *name == path) {
            self.other_names.push(path);
        }
    }

    /// Removes the paths that do not stand for this file any more.
    fn remove_names(&mut self, is_removed: impl Fn(&Bytes) -> bool) {
        self.other_names.retain(|name| !is_removed(name));
        if self.is_current && is_removed(&self.path) {
            match self.other_names.pop() {
                Some(name) => self.path = name,
                None => self.is_current = false,
            }
        }
    }
}

impl Image {
    /// True if the image is the resolution of one of these paths.
    fn is_at(&self, paths: &HashSet<&[u8]>) -> bool {
        self.names().any(|name| paths.contains(&name.0[..]))
    }

    /// Returns a descriptor that names the image for the server process, which then uses it.
    pub(super) fn name(&mut self) -> io::Result<OwnedFd> {
        let named = self.file.try_clone()?;
        self.uses = self.uses.saturating_add(1);
        self.is_releasable = false;
        Ok(named)
    }
}

/// Serialized [`Grants`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedGrants {
    facts: Facts,
    images: Vec<Image<FdRef>>,
}

impl Grants {
    /// Adds the permissions of a configuration. Paths in it are resolved again at their next use.
    pub(super) fn permit(&mut self, permitted: Permitted) {
        let Permitted { permissions, config } = permitted;
        let ours = match &mut self.facts.permissions {
            Some(ours) => {
                ours.extend(permissions);
                ours
            }
            none => none.insert(permissions),
        };
        for image in &mut self.images {
            image.remove_names(|name| ours.access(name).is_some());
        }
        self.facts.config = config;
        self.changes += 1;
    }

    /// Returns the held image at a path, if the path was resolved before.
    pub(super) fn known(&mut self, path: &Path) -> Option<&mut Image> {
        let path = bytes_of(&absolute(path));
        self.changes += 1;
        self.images.iter_mut().find(|image| image.names().any(|name| *name == path))
    }

    /// Returns the location of the image at a permitted path, and whether the image may be written.
    /// `None` if the path is not permitted.
    pub(super) fn location(&self, path: &Path) -> Option<(Location, bool)> {
        let path = absolute(path);
        let permissions = self.facts.permissions.as_ref()?;
        if let Some(is_writable) = permissions.access(&bytes_of(&path)) {
            return Some((Location::Configured(path), is_writable));
        }
        let mut directories = permissions.image_directories.iter().map(|one| path_of(&one.0));
        directories.find_map(|directory| {
            let below = path.strip_prefix(&directory).ok()?.to_owned();
            Some((Location::Below(directory, below), true))
        })
    }

    /// Paths of the supervisor's own files: configuration, program, and UUIDs of disks.
    pub(super) fn own_files(&self) -> Vec<PathBuf> {
        let permissions = self.facts.permissions.as_ref();
        let state = permissions.and_then(|permissions| permissions.state_directory.as_ref());
        let uuids = state.map(|directory| disk_uuids::file_in(&path_of(&directory.0)));
        self.own_files.iter().cloned().chain(uuids).collect()
    }

    /// Configured paths of read-only images that no held image is the resolution of.
    pub(super) fn unresolved_read_only(&self) -> Vec<PathBuf> {
        let held: HashSet<_> =
            self.images.iter().flat_map(Image::names).map(|name| &name.0).collect();
        let all = self.facts.permissions.iter().flat_map(|ours| &ours.read_only_images);
        all.filter(|path| !held.contains(&path.0)).map(|path| path_of(&path.0)).collect()
    }

    /// Holds an image that was opened at a location.
    ///
    /// # Errors
    /// Too many images are held.
    pub(super) fn hold(
        &mut self,
        location: &Location,
        file: OwnedFd,
        is_writable: bool,
    ) -> io::Result<&mut Image> {
        let id = id_of(file.as_fd())?;
        let (path, is_current) = match location {
            Location::Configured(path) => (bytes_of(path), true),
            Location::Below(directory, path) => (bytes_of(&directory.join(path)), false),
        };
        if is_current {
            // The path now stands for the new file.
            let others = self.images.iter_mut().filter(|image| image.id != id);
            others.for_each(|image| image.remove_names(|name| *name == path));
        }
        self.changes += 1;
        let known = self.images.iter().position(|image| image.id == id);
        if known.is_none() && self.images.len() >= MAX_GRANTS {
            // The oldest image that is in no checkpoint and not configured is released.
            let configured = self.facts.configured();
            let is_old = |image: &Image| !image.is_releasable && !image.is_at(&configured);
            let oldest = self.images.iter().position(is_old);
            let oldest = oldest.ok_or_else(|| {
                io::Error::other(format!("the disks of a server have at most {MAX_GRANTS} images"))
            })?;
            deferred_close::close(Arc::into_inner(self.images.remove(oldest).file));
        }
        let at = known.unwrap_or(self.images.len());
        if known.is_none() {
            let (path, file) = (path.clone(), Arc::new(file));
            let (uses, is_releasable) = (0, false);
            let other_names = Vec::new();
            let new =
                Image { path, is_current, other_names, file, id, is_writable, uses, is_releasable };
            self.images.push(new);
        }
        let image = &mut self.images[at];
        let permissions = self.facts.permissions.as_ref();
        let mut names = std::iter::once(&image.path).chain(&image.other_names);
        let is_read_only = permissions
            .is_some_and(|permissions| names.any(|name| permissions.access(name) == Some(false)));
        // An allowed directory does not make a file writable that is configured read-only.
        image.is_writable |= is_writable && (is_current || !is_read_only);
        // A new disk may use the image. If an earlier disk with this image then disappears from the
        // checkpoint, the image must not be released.
        image.is_releasable = false;
        if is_current {
            image.add_name(path);
        }
        Ok(image)
    }

    /// Grants a file that a client of the supervisor has opened. The grant has the access rights of
    /// the client's descriptor.
    ///
    /// # Errors
    /// The descriptor gives no read access, or the file is no image.
    pub(super) fn grant(&mut self, path: &Path, opened: BorrowedFd<'_>) -> io::Result<()> {
        let flags = fcntl_getfl(opened)?;
        if flags.contains(OFlags::PATH) || flags.contains(OFlags::WRONLY) {
            return Err(Errno::BADF.into());
        }
        let file = name_of(opened)?;
        check_kind(file.as_fd())?;
        let location = Location::Configured(absolute(path));
        self.hold(&location, file, flags.contains(OFlags::RDWR)).map(drop)
    }

    /// Grants a path of a socket that a client of the supervisor has named. Returns false if there
    /// are too many.
    pub(super) fn grant_socket(&mut self, path: &Path) -> bool {
        let path = bytes_of(&absolute(path));
        let Some(permissions) = &mut self.facts.permissions else { return false };
        let is_known = permissions.sockets.contains(&path);
        if !is_known && permissions.sockets.len() < MAX_GRANTS {
            permissions.sockets.push(path);
            self.changes += 1;
            return true;
        }
        is_known
    }

    /// Grants connections to an NBD server that a client of the supervisor has named. Returns false
    /// if there are too many.
    pub(super) fn grant_server(&mut self, server: &[u8]) -> bool {
        let Some(permissions) = &mut self.facts.permissions else { return false };
        let is_known = permissions.servers.iter().any(|known| known.0 == server);
        if !is_known && permissions.servers.len() < MAX_GRANTS {
            permissions.servers.push(Bytes(server.to_vec()));
            self.changes += 1;
            return true;
        }
        is_known
    }

    /// True if connections to this NBD server are permitted.
    pub(super) fn permits_server(&self, server: &[u8]) -> bool {
        let permissions = self.facts.permissions.as_ref();
        permissions.is_some_and(|ours| ours.servers.iter().any(|known| known.0 == server))
    }

    /// Returns the held image that is the same file as `file`, and whether it is the resolution of
    /// a path that the configuration or a client of the supervisor has named.
    ///
    /// # Errors
    /// The image is not held, or it may not be written.
    pub(super) fn held(
        &self,
        file: BorrowedFd<'_>,
        access: Access,
    ) -> io::Result<(Arc<OwnedFd>, bool)> {
        let id = id_of(file)?;
        let image = self.images.iter().find(|image| image.id == id);
        let image = image.ok_or_else(|| refusal(Path::new("DIRECTORY")))?;
        match access {
            Access::Read => {}
            _ if image.is_writable => {}
            _ => return Err(Errno::ACCESS.into()),
        }
        Ok((Arc::clone(&image.file), image.is_current))
    }

    /// Ends one use of an image by the server process.
    pub(super) fn end_use(&mut self, file: BorrowedFd<'_>) {
        let Ok(id) = id_of(file) else { return };
        if let Some(image) = self.images.iter_mut().find(|image| image.id == id) {
            image.uses = image.uses.saturating_sub(1);
            image.is_releasable |= image.uses == 0;
            self.changes += 1;
        }
    }

    /// Ends all uses of images, because the server process has died.
    pub(super) fn end_uses(&mut self) {
        for image in &mut self.images {
            image.is_releasable |= std::mem::take(&mut image.uses) != 0;
        }
        self.changes += 1;
    }

    /// Releases each image that is unused, in no checkpoint and not configured. `stored`:
    /// identities of the images in all checkpoints.
    pub(super) fn release(&mut self, stored: &BTreeSet<Id>) {
        let configured = self.facts.configured();
        let (stay, gone): (Vec<_>, _) =
            std::mem::take(&mut self.images).into_iter().partition(|image| {
                let is_used = !image.is_releasable || stored.contains(&image.id);
                is_used || image.is_at(&configured)
            });
        self.images = stay;
        for image in &mut self.images {
            image.is_releasable |= stored.contains(&image.id);
        }
        self.changes += u64::from(!gone.is_empty());
        // Another thread closes the descriptors, because the close of the last descriptor of a
        // deleted file frees the file's blocks, and that may take long.
        deferred_close::close(gone.into_iter().filter_map(|image| Arc::into_inner(image.file)));
    }

    /// True if this supervisor has created the socket file.
    pub(super) fn has_created(&self, socket: &Made) -> bool {
        self.facts.sockets.contains(socket)
    }

    /// True if this supervisor has created the directory of a control socket.
    pub(super) fn has_created_directory(&self, path: &Path) -> bool {
        self.facts.directories.contains(&bytes_of(path))
    }

    /// True if a server process may create a socket file at this path: one that replaces another,
    /// or one of a limited number.
    pub(super) fn has_room_for(&self, path: &Bytes) -> bool {
        let sockets = &self.facts.sockets;
        sockets.len() < MAX_GRANTS || sockets.iter().any(|made| made.path == *path)
    }

    /// Records a socket file that this supervisor has created.
    pub(super) fn created(&mut self, socket: Made, directory: Option<Bytes>) {
        let Facts { sockets, directories, .. } = &mut self.facts;
        sockets.retain(|other| other.path != socket.path);
        sockets.push(socket);
        directories.extend(directory.filter(|own| !directories.contains(own)));
        self.changes += 1;
    }

    /// Forgets a socket file that was removed.
    pub(super) fn removed(&mut self, socket: &Made) {
        self.facts.sockets.retain(|other| other != socket);
        self.changes += 1;
    }

    /// Images, whose descriptors belong to a snapshot.
    pub(super) fn images(&self) -> Vec<Image> {
        self.images.clone()
    }

    /// Serializes the grants with these images. `add` adds a descriptor to the snapshot.
    pub(super) fn save<'a>(
        &self,
        images: &'a [Image],
        mut add: impl FnMut(BorrowedFd<'a>) -> FdRef,
    ) -> SavedGrants {
        let images = images.iter().map(|image| image.clone().with_file(add(image.file.as_fd())));
        SavedGrants { facts: self.facts.clone(), images: images.collect() }
    }

    /// Restores the grants of an earlier supervisor.
    ///
    /// # Errors
    /// A descriptor is missing.
    pub(super) fn restore(
        &mut self,
        saved: SavedGrants,
        fds: &mut Descriptors,
    ) -> Result<(), StateError> {
        let images = saved.images.into_iter().map(|saved| {
            let file = fds.take(saved.file)?;
            let id = id_of(file.as_fd()).map_err(|_| StateError::NotAState("no image"))?;
            Ok(Image { id, ..saved.with_file(Arc::new(file)) })
        });
        self.images = images.collect::<Result<_, StateError>>()?;
        self.facts = saved.facts;
        Ok(())
    }
}

/// Location of a permitted image.
pub(super) enum Location {
    /// Path that the command line or the configuration names, or that a client has granted.
    Configured(PathBuf),
    /// Directory that is permitted, and a path below it.
    Below(PathBuf, PathBuf),
}

impl Location {
    /// Opens the image without access to its content. May block on a hung file system.
    ///
    /// # Errors
    /// The system's error; or a path leads out of its directory.
    pub(super) fn open(&self) -> io::Result<OwnedFd> {
        let file = match self {
            Self::Configured(path) => openat(CWD, path, NAME_ONLY, Mode::empty())?,
            Self::Below(directory, path) => {
                let from = openat(CWD, directory, NAME_ONLY | OFlags::DIRECTORY, Mode::empty())?;
                let how = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
                match openat2(from, path, NAME_ONLY, Mode::empty(), how) {
                    Err(Errno::XDEV | Errno::LOOP) => {
                        return Err(refusal(Path::new("DIRECTORY")));
                    }
                    outcome => outcome?,
                }
            }
        };
        check_kind(file.as_fd())?;
        Ok(file)
    }
}

/// Refuses the files that the supervisor itself reads or executes, under any name: they may be
/// below an allowed directory. May block on a hung file system.
///
/// # Errors
/// `file` is one of the files `own`, or one of these is inaccessible.
pub(super) fn check_foreign(file: BorrowedFd<'_>, own: &[PathBuf]) -> io::Result<()> {
    let Some(own) = same_file(file, own)? else { return Ok(()) };
    Err(io::Error::other(format!(
        "{} belongs to the supervisor, and cannot be an image: use another file",
        own.display()
    )))
}

/// Returns the path that leads to `file`, if there is one. May block on a hung file system.
///
/// # Errors
/// A path is inaccessible, so its file is unknown.
pub(super) fn same_file<'a>(
    file: BorrowedFd<'_>,
    paths: &'a [PathBuf],
) -> io::Result<Option<&'a Path>> {
    let about = attributes(file)?;
    let id = (makedev(about.stx_dev_major, about.stx_dev_minor), about.stx_ino);
    for path in paths {
        match path.metadata() {
            Ok(other) if (other.dev(), other.ino()) == id => return Ok(Some(path)),
            Ok(_) => {}
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Error for an image that is not permitted, with the directory that would have to be allowed.
pub(super) fn refusal(directory: &Path) -> io::Error {
    io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!(
            "the sandbox permits only images that were named at the start or added by `shadowbell \
             ctl` (backing files by its option `--backing`, data files by `--data-file`); restart \
             `serve` with `--allow {}` to permit more",
            directory.display()
        ),
    )
}

/// Returns a descriptor that identifies the file of another one but gives no access to its content.
fn name_of(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(openat(CWD, path, NAME_ONLY, Mode::empty())?)
}

fn check_kind(file: BorrowedFd<'_>) -> io::Result<()> {
    let about = attributes(file)?;
    match FileType::from_raw_mode(about.stx_mode.into()) {
        FileType::RegularFile | FileType::BlockDevice => Ok(()),
        FileType::CharacterDevice
            if is_namespace(makedev(about.stx_rdev_major, about.stx_rdev_minor)) =>
        {
            Ok(())
        }
        FileType::Directory => Err(Errno::ISDIR.into()),
        _ => Err(Errno::NODEV.into()),
    }
}

pub(super) fn id_of(file: BorrowedFd<'_>) -> io::Result<Id> {
    let about = attributes(file)?;
    Ok((about.stx_mnt_id, about.stx_dev_major, about.stx_dev_minor, about.stx_ino))
}

/// Type, inode and mount of a file. These never change, so the kernel's copy is used: a remote or
/// user-space file system may not answer.
fn attributes(file: BorrowedFd<'_>) -> io::Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    Ok(statx(file, "", flags, StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID)?)
}
