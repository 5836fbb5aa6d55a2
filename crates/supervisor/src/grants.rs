//! Grants: everything that the server processes of this supervisor may open, create and remove.
//!
//! Grants come from the command line, from the configuration file (read at the start, at SIGHUP and
//! at an upgrade that a client of the supervisor requests), and from files that `shadowbell ctl`
//! has opened and passed to the supervisor. No message of a server process adds a grant.
//!
//! An image is identified by a descriptor that the supervisor opened by a granted path, and holds
//! as long as a checkpoint contains the disk. A configured path is resolved once. Other
//! descriptors are compared with the held ones by mount, device and inode; their names are never
//! used. Since the inode is held, its number is not reused.

use crate::path_protocol::Made;
use crate::permissions::{Permissions, bytes_of, path_of};
use parking_lot::Mutex;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags, fcntl_getfl, makedev,
    openat, openat2, statx,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use shadowbell_disk_file::{Access, is_namespace};
use shadowbell_process::deferred_close;
use shadowbell_process::process_env::absolute;
use shadowbell_state::{Bytes, Descriptors, FdRef, StateError};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
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
    /// Number of changes of the grants since the start of the supervisor.
    changes: u64,
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

/// Permissions, and the text of the configuration file that they are from, if there is one.
pub(super) struct Permitted {
    pub(super) permissions: Permissions,
    pub(super) config: Option<String>,
}

/// Image that a server process may open.
#[derive(Clone)]
struct Image {
    /// Path by which the image was opened.
    path: PathBuf,
    /// True if `path` still stands for this file. False after a configuration with this path was
    /// read: the next use of the path resolves it again.
    is_current: bool,
    /// Descriptor that identifies the file but gives no access to its content.
    file: Arc<OwnedFd>,
    id: Id,
    is_writable: bool,
    /// True if a checkpoint has contained the image since a server process last opened it by its
    /// path. Only then is the image released when no checkpoint contains it any more.
    was_stored: bool,
}

/// Serialized [`Grants`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedGrants {
    facts: Facts,
    images: Vec<SavedImage>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedImage {
    path: Bytes,
    is_current: bool,
    file: FdRef,
    is_writable: bool,
    was_stored: bool,
}

/// Images that the supervisor holds open. Their descriptors belong to its saved state, and the
/// saved state refers to the images by position.
pub(super) struct HeldImages(Vec<Image>);

impl HeldImages {
    /// Descriptors of the images, in the order of [`Grants::save`].
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|image| image.file.as_fd())
    }
}

impl Grants {
    /// Adds the permissions of a configuration. Paths in it are resolved again at their next use.
    pub(super) fn permit(&mut self, permitted: Permitted) {
        let Permitted { permissions, config } = permitted;
        for image in &mut self.images {
            image.is_current &= permissions.access(&bytes_of(&image.path)).is_none();
        }
        match &mut self.facts.permissions {
            Some(ours) => ours.extend(permissions),
            None => self.facts.permissions = Some(permissions),
        }
        self.facts.config = config;
        self.changes += 1;
    }

    /// Number of changes of the grants since the start.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns the held image at a path, if the path was resolved before.
    pub(super) fn known(&self, path: &Path) -> Option<Arc<OwnedFd>> {
        let path = absolute(path);
        let image = self.images.iter().find(|image| image.is_current && image.path == path)?;
        Some(Arc::clone(&image.file))
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
            let location = match below.as_os_str().is_empty() {
                // `--allow` may name a file. If it names a directory, `check_kind` refuses the
                // directory itself as an image.
                true => Location::Configured(directory),
                false => Location::Below(directory, below),
            };
            Some((location, true))
        })
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
    ) -> io::Result<Arc<OwnedFd>> {
        let id = id_of(file.as_fd())?;
        let (path, is_current) = match location {
            Location::Configured(path) => (path.clone(), true),
            Location::Below(directory, path) => (directory.join(path), false),
        };
        if is_current {
            let others = self.images.iter_mut().filter(|image| image.path == path);
            others.for_each(|image| image.is_current = false);
        }
        self.changes += 1;
        if let Some(known) = self.images.iter_mut().find(|image| image.id == id) {
            known.is_writable |= is_writable;
            // A server process opens the image again. If an earlier disk with this image then
            // disappears from the checkpoint, the image must not be released.
            known.was_stored = false;
            if is_current {
                (known.path, known.is_current) = (path, true);
            }
            return Ok(Arc::clone(&known.file));
        }
        if self.images.len() >= MAX_GRANTS {
            // The oldest image that is in no checkpoint is released: its disk was refused or
            // removed.
            let oldest = self.images.iter().position(|image| !image.was_stored);
            let oldest = oldest.ok_or_else(|| {
                io::Error::other(format!("the disks of a server have at most {MAX_GRANTS} images"))
            })?;
            deferred_close::close(Arc::into_inner(self.images.remove(oldest).file));
        }
        let file = Arc::new(file);
        let held = Arc::clone(&file);
        self.images.push(Image { path, is_current, file, id, is_writable, was_stored: false });
        Ok(held)
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

    /// Returns the held image that is the same file as `file`.
    ///
    /// # Errors
    /// The image is not held, or it may not be written.
    pub(super) fn held(&self, file: BorrowedFd<'_>, access: Access) -> io::Result<Arc<OwnedFd>> {
        let id = id_of(file)?;
        let image = self.images.iter().find(|image| image.id == id);
        let image = image.ok_or_else(|| refusal(Path::new("DIRECTORY")))?;
        match access {
            Access::Read => {}
            _ if image.is_writable => {}
            _ => return Err(Errno::ACCESS.into()),
        }
        Ok(Arc::clone(&image.file))
    }

    /// Releases each image that was in a checkpoint and is no longer in any. `stored`: identities
    /// of the images in all checkpoints.
    pub(super) fn release(&mut self, stored: &BTreeSet<Id>) {
        let (stay, gone): (Vec<_>, _) = std::mem::take(&mut self.images)
            .into_iter()
            .partition(|image| !image.was_stored || stored.contains(&image.id));
        self.images = stay;
        for image in &mut self.images {
            image.was_stored |= stored.contains(&image.id);
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

    /// Records a socket file that this supervisor has created.
    pub(super) fn created(&mut self, socket: Made, directory: Option<Bytes>) {
        let Facts { sockets, directories, .. } = &mut self.facts;
        sockets.retain(|other| other.path != socket.path);
        if sockets.len() >= MAX_GRANTS {
            sockets.remove(0);
        }
        sockets.push(socket);
        directories.extend(directory.filter(|own| !directories.contains(own)));
        self.changes += 1;
    }

    /// Forgets a socket file that was removed.
    pub(super) fn removed(&mut self, socket: &Made) {
        self.facts.sockets.retain(|other| other != socket);
        self.changes += 1;
    }

    /// Images for a snapshot.
    pub(super) fn images(&self) -> HeldImages {
        HeldImages(self.images.clone())
    }

    /// Serializes the grants. `add` adds a descriptor of `images` to the snapshot.
    pub(super) fn save<'a>(
        &self,
        images: &'a HeldImages,
        mut add: impl FnMut(BorrowedFd<'a>) -> FdRef,
    ) -> SavedGrants {
        let images = images.0.iter().zip(images.fds()).map(|(image, fd)| SavedImage {
            path: bytes_of(&image.path),
            is_current: image.is_current,
            file: add(fd),
            is_writable: image.is_writable,
            was_stored: image.was_stored,
        });
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
            Ok(Image {
                path: path_of(&saved.path.0),
                is_current: saved.is_current,
                id: id_of(file.as_fd()).map_err(|_| StateError::NotAState("no image"))?,
                file: Arc::new(file),
                is_writable: saved.is_writable,
                was_stored: saved.was_stored,
            })
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

/// Error for an image that is not permitted, with the directory that would have to be allowed.
pub(super) fn refusal(directory: &Path) -> io::Error {
    io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!(
            "the sandbox permits only images that were named at the start or added by `shadowbell \
             ctl`; restart `serve` with `--allow {}` to permit more",
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
