//! Image file of any format, open and locked.

use super::device::{attribute, is_remote};
use super::namespace::{NamespaceFacts, is_namespace};
use super::opener::{self, Access, At, ImageUse};
use super::options::Direct;
use super::shared::Alignment;
use crate::sys;
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use rustix::io::Errno;
use shadowbell_disk::{ImageFormat, OpenError, Wait, WaitReason};
use shadowbell_state::{WrongOrder, is_wrong};
use std::fs::{File, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum wait for a lock that another process holds. If a server was killed and restarted, the
/// lock of the killed process is held until the kernel has closed its io_uring.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);

/// True if a file has no name any more. The attributes are those that the kernel has cached, so
/// that hung storage does not block the call.
pub(super) fn is_deleted(file: BorrowedFd<'_>) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(file, "", flags, StatxFlags::NLINK).is_ok_and(|about| about.stx_nlink == 0)
}

/// Regular file or block device that is opened as an image and locked: a writable image against all
/// other users, a read-only one against writers. Disks of other formats use it as their storage.
///
/// Dropping it releases the lock at once, even if the file stays open for a while.
#[derive(Debug)]
pub struct ImageFile {
    file: Arc<File>,
    path: PathBuf,
    /// True if this image still holds the lock, and must release it when it is dropped.
    is_locked: bool,
    /// Use of the image, if another process has opened it by its path.
    used: Option<ImageUse>,
    pub(super) metadata: Metadata,
    pub(super) is_block: bool,
    /// Identify data, if the file is an NVMe generic character device.
    pub(super) namespace: Option<NamespaceFacts>,
    pub(super) read_only: bool,
    pub(super) size: u64,
}

impl ImageFile {
    /// Opens and locks the file at `path`. The file is writable, unless `read_only` is set or the
    /// permissions do not allow writing.
    ///
    /// # Errors
    /// [`OpenError`]: the message says what is wrong with the file and what to do.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, OpenError> {
        Self::open_as(path, read_only, Kinds::Images)
    }

    pub(super) fn open_as(path: &Path, read_only: bool, kinds: Kinds) -> Result<Self, OpenError> {
        let named = name(path, kinds)?;
        let at = named.as_ref().map_or(At::Path(path), |named| At::Named(named.as_fd()));
        let opened = Self::open_at(path, at, (read_only, kinds), LockWait::Short);
        let Some(named) = named else { return opened };
        match opened {
            Ok(mut image) => {
                image.used = Some(ImageUse(image.shared()));
                Ok(image)
            }
            Err(error) => {
                opener::end_use(named);
                Err(error)
            }
        }
    }

    /// Opens the image of a dead process, by the descriptor `named` from
    /// [`name_for_next`](Self::name_for_next). Returns only when no request of the dead process can
    /// reach the image any more. Until then, calls `wait` repeatedly.
    ///
    /// # Errors
    /// Like [`open`](Self::open); [`OpenError::Busy`] if `wait` ends the waiting.
    pub fn recover(
        path: &Path,
        named: BorrowedFd<'_>,
        read_only: bool,
        wait: Wait<'_>,
    ) -> Result<Self, OpenError> {
        let mode = (read_only, Kinds::Images);
        Self::open_at(path, At::Named(named), mode, LockWait::While(wait))
    }

    /// Returns an `O_PATH` descriptor of the image. This descriptor gives no access to the image's
    /// content. After a crash of this process, the next process opens the image by this descriptor,
    /// even if the file was renamed.
    ///
    /// # Errors
    /// The system's error.
    pub fn name_for_next(&self) -> io::Result<OwnedFd> {
        opener::name_of(&self.file)
    }

    /// Opens the image at `at`. Error messages call it `path`.
    pub(super) fn open_at(
        path: &Path,
        at: At<'_>,
        (read_only, kinds): (bool, Kinds),
        lock_wait: LockWait<'_>,
    ) -> Result<Self, OpenError> {
        let name = || path.display().to_string();
        let system = |what| move |source| OpenError::System { path: name(), what, source };
        let metadata = inspect(path, at, kinds)?;
        let is_character = metadata.file_type().is_char_device();
        let is_block = metadata.file_type().is_block_device();
        // The kernel lets a process open a write-protected block device for writing, and then fails
        // the writes. So the protection is checked first.
        let protected = is_block && attribute(&metadata, "ro").is_some_and(|ro| ro != "0");
        let (mut file, read_only) =
            open_file(path, at, is_block, read_only || protected, lock_wait)?;
        let namespace =
            is_character.then(|| about(path, &file, !read_only, lock_wait)).transpose()?;
        let read_only = read_only || namespace.as_ref().is_some_and(|facts| facts.is_protected);
        let lock = || sys::lock_image(&file, !read_only);
        let locked = match lock_wait {
            LockWait::While(_) if is_wrong(WrongOrder::NoFence) => Ok(()),
            _ => retry_while(io::ErrorKind::WouldBlock, lock_wait, lock),
        };
        locked.map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => OpenError::Busy {
                path: name(),
                what: "another program (a server, or QEMU) has it open",
                // A writer excludes readers, too. If a reader's lock succeeds now, only readers
                // have the image open.
                writable: !read_only && sys::lock_image(&file, false).is_ok(),
            },
            _ => system("locking it")(source),
        })?;
        let metadata = file.metadata().map_err(system("reading its size"))?;
        let size = if let Some(facts) = &namespace {
            facts.bytes()
        } else if is_block {
            file.seek(SeekFrom::End(0)).map_err(system("reading its size"))?
        } else {
            metadata.len()
        };
        if size == 0 {
            return Err(OpenError::Empty { path: name() });
        }
        Ok(Self {
            file: Arc::new(file),
            path: path.to_owned(),
            is_locked: true,
            used: None,
            metadata,
            is_block,
            namespace,
            read_only,
            size,
        })
    }

    /// The open file. After [`set_direct`](Self::set_direct), it may bypass the page cache.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// True if the file was deleted, so that it exists only as long as it is open.
    #[must_use]
    pub fn is_deleted(&self) -> bool {
        self.metadata.is_file() && is_deleted(self.file.as_fd())
    }

    pub(super) fn shared(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    /// True if the image is locked exclusively. The kernel holds that lock until the last request
    /// has ended, so a later process can use it as the fence.
    #[must_use]
    pub fn is_locked_exclusively(&self) -> bool {
        sys::is_locked_exclusively(&self.file, !self.is_read_only())
    }

    /// Releases the lock while the image stays open and may still get requests. See
    /// [`Disk::release_lock`](shadowbell_disk::Disk::release_lock).
    pub fn release_lock(&self) {
        sys::unlock_image(&self.file);
    }

    /// True if the image refuses writes.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// True if the image is a block device.
    #[must_use]
    pub fn is_block_device(&self) -> bool {
        self.is_block
    }

    /// True if the file system depends on another machine or process. While that machine or process
    /// is unreachable, system calls on the file block the thread.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        !self.is_block && is_remote(&self.file)
    }

    /// Detects the format by the first bytes of the image; `None` for a raw image. Must be called
    /// before [`set_direct`](Self::set_direct), because its read is not aligned.
    ///
    /// # Errors
    /// [`OpenError::System`] if the image cannot be read.
    pub fn format(&self) -> Result<Option<ImageFormat>, OpenError> {
        if let Some(facts) = &self.namespace {
            return self.format_of(facts);
        }
        let mut start = [0; ImageFormat::DETECTION_BYTES];
        let mut len = 0;
        while let Some(rest @ [_, ..]) = start.get_mut(len..) {
            match self.file.read_at(rest, len as u64) {
                Ok(0) => break,
                Ok(read) => len += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    let path = self.path.display().to_string();
                    return Err(OpenError::System { path, what: "reading its start", source });
                }
            }
        }
        Ok(ImageFormat::of(start.get(..len).unwrap_or_default()))
    }

    /// Detects the format of the data on a namespace. Reads whole blocks by an NVMe command, so the
    /// result is an error if this process may not send commands to the device.
    fn format_of(&self, facts: &NamespaceFacts) -> Result<Option<ImageFormat>, OpenError> {
        let path = || self.path.display().to_string();
        let mut start =
            vec![0; ImageFormat::DETECTION_BYTES.next_multiple_of(facts.block_size as usize)];
        start.truncate(usize::try_from(self.size).unwrap_or(usize::MAX));
        sys::read_start(&self.file, &facts.commands(), &mut start).map_err(
            |source| match source.raw_os_error() {
                Some(libc::EACCES) => {
                    OpenError::OpenRefused { path: path(), why: NO_COMMANDS.into() }
                }
                _ => OpenError::System { path: path(), what: "reading its start", source },
            },
        )?;
        Ok(ImageFormat::of(start.get(..ImageFormat::DETECTION_BYTES).unwrap_or(&start)))
    }

    /// Enables direct I/O for requests in units of `block_size` bytes, if `direct` requests it, or
    /// permits it and the storage supports it. Returns the alignment that direct I/O needs, or
    /// `None` if the page cache is used.
    ///
    /// # Errors
    /// [`OpenError::NotDirect`] if direct I/O was requested but is not possible.
    pub fn set_direct(
        &self,
        direct: Direct,
        block_size: u32,
    ) -> Result<Option<Alignment>, OpenError> {
        if let Some(facts) = &self.namespace {
            if direct == Direct::Off {
                let path = self.path.display().to_string();
                let why = "a character device has no page cache; leave out `direct=off`".to_owned();
                return Err(OpenError::OpenRefused { path, why });
            }
            // Data with the alignment of an NVMe data pointer are sufficient. If the device needs a
            // stricter one, the kernel copies the data.
            return Ok(Some(Alignment { memory: 4, offset: facts.block_size as usize }));
        }
        Ok(match direct {
            Direct::Off => None,
            Direct::Auto => bypass_cache(&self.file, self.size, block_size).ok(),
            Direct::On => Some(bypass_cache(&self.file, self.size, block_size).map_err(|why| {
                OpenError::NotDirect { path: self.path.display().to_string(), why }
            })?),
        })
    }

    /// Logical block size in bytes of a raw disk on this image.
    pub(super) fn block_size(&self, requested: Option<u32>) -> Result<u32, OpenError> {
        if let (Some(facts), Some(requested)) = (&self.namespace, requested)
            && requested < facts.block_size
        {
            let path = self.path.display().to_string();
            let why = format!(
                "its blocks have {} bytes, and `block-size` cannot be smaller; leave out \
                 `block-size`",
                facts.block_size
            );
            return Err(OpenError::OpenRefused { path, why });
        }
        let detected = if let Some(facts) = &self.namespace {
            facts.block_size
        } else if self.is_block {
            rustix::fs::ioctl_blksszget(&*self.file).unwrap_or(512)
        } else {
            512
        };
        let block_size =
            requested.unwrap_or(if detected.is_multiple_of(4096) { 4096 } else { 512 });
        if !self.size.is_multiple_of(u64::from(block_size)) {
            let path = self.path.display().to_string();
            return Err(OpenError::NotBlockMultiple { path, size: self.size, block_size });
        }
        Ok(block_size)
    }

    /// Returns the file without releasing its lock. From then on, the caller has to release the
    /// lock.
    pub(super) fn into_locked(mut self) -> (Arc<File>, Option<ImageUse>) {
        self.is_locked = false;
        (Arc::clone(&self.file), self.used.take())
    }
}

impl Drop for ImageFile {
    fn drop(&mut self) {
        if self.is_locked {
            sys::unlock_image(&self.file);
        }
    }
}

/// File types that an image may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kinds {
    /// Regular files and block devices.
    Images,
    /// Regular files, block devices and NVMe generic character devices: for raw disks.
    Disks,
}

/// Explanation for the user if the kernel does not let this process send a command to the device.
const NO_COMMANDS: &str = "this user may not send commands to the device: before Linux 6.2 that \
                           needs CAP_SYS_ADMIN, later read and write permission for the device; \
                           the namespace's block device needs neither";

/// File or device that [`check_image`] has found readable. If an [`Opener`](opener::Opener) opens
/// images, it holds the file until this value is dropped.
#[derive(Debug)]
pub struct CheckedImage {
    _used: Option<ImageUse>,
}

/// Checks that the file or device at `path` can be read, without locking it.
///
/// # Errors
/// [`OpenError`], as for [`ImageFile::open`].
pub fn check_image(path: &Path) -> Result<CheckedImage, OpenError> {
    let named = name(path, Kinds::Disks)?;
    let at = named.as_ref().map_or(At::Path(path), |named| At::Named(named.as_fd()));
    let open =
        |_| at.open(Access::Read).map_err(|source| refused(path.display().to_string(), source));
    match (inspect(path, at, Kinds::Disks).and_then(open), named) {
        (Ok(file), Some(_)) => Ok(CheckedImage { _used: Some(ImageUse(Arc::new(file))) }),
        (Ok(_), None) => Ok(CheckedImage { _used: None }),
        (Err(error), named) => {
            if let Some(named) = named {
                opener::end_use(named);
            }
            Err(error)
        }
    }
}

/// Requests the file at `path` from the [`Opener`](opener::Opener), if there is one.
fn name(path: &Path, kinds: Kinds) -> Result<Option<OwnedFd>, OpenError> {
    opener::name(path).transpose().map_err(|source| match inspect(path, At::Path(path), kinds) {
        Err(error @ OpenError::NoFile { .. }) => error,
        _ => refused(path.display().to_string(), source),
    })
}

/// Reads the metadata of `path`. Fails if a file of this type cannot hold an image. Must be called
/// before the file is opened, because opening a pipe or a terminal may block or have side effects.
fn inspect(path: &Path, at: At<'_>, kinds: Kinds) -> Result<Metadata, OpenError> {
    let name = || path.display().to_string();
    let metadata = at.metadata().map_err(|source| refused(name(), source))?;
    let kind = metadata.file_type();
    let is_namespace =
        || kinds == Kinds::Disks && kind.is_char_device() && is_namespace(metadata.rdev());
    let what = if kind.is_file() || kind.is_block_device() || is_namespace() {
        return Ok(metadata);
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_fifo() {
        "a pipe"
    } else {
        "a character device"
    };
    Err(OpenError::NoFile { path: name(), what })
}

/// Reads the Identify data of the namespace of the character device `file`.
fn about(
    path: &Path,
    file: &File,
    written: bool,
    lock_wait: LockWait<'_>,
) -> Result<NamespaceFacts, OpenError> {
    let name = || path.display().to_string();
    let ask = || opener::identify(opener::name_of(file)?.as_fd(), written);
    retry_while(io::ErrorKind::ResourceBusy, lock_wait, ask).map_err(|error| {
        match error.raw_os_error() {
            // An error without an error number has one of two causes: the device has failed the
            // command, or the namespace cannot be a disk.
            None => OpenError::OpenRefused { path: name(), why: error.to_string() },
            Some(libc::EBUSY) => in_use(path),
            Some(libc::EACCES) => OpenError::OpenRefused { path: name(), why: NO_COMMANDS.into() },
            _ => OpenError::System { path: name(), what: "asking the device", source: error },
        }
    })
}

fn in_use(path: &Path) -> OpenError {
    OpenError::Busy {
        path: path.display().to_string(),
        what: "the system uses it (it is mounted, or part of a RAID or a volume group)",
        writable: true,
    }
}

fn refused(path: String, source: io::Error) -> OpenError {
    match source.kind() {
        io::ErrorKind::NotFound => OpenError::Missing { path },
        io::ErrorKind::NotADirectory => OpenError::NoFile { path, what: "below a file" },
        // An error without an error number is a refusal by the process that opens images for this
        // process (see `Opener`).
        io::ErrorKind::PermissionDenied if source.raw_os_error().is_none() => {
            OpenError::OpenRefused { path, why: source.to_string() }
        }
        io::ErrorKind::PermissionDenied => OpenError::Unreadable { path, source },
        io::ErrorKind::IsADirectory => OpenError::NoFile { path, what: "a directory" },
        _ => OpenError::System { path, what: "opening it", source },
    }
}

/// Opens the file, for writing if that is requested and possible. Returns the file, and true if it
/// is read-only.
fn open_file(
    path: &Path,
    at: At<'_>,
    is_block: bool,
    read_only: bool,
    lock_wait: LockWait<'_>,
) -> Result<(File, bool), OpenError> {
    let name = || path.display().to_string();
    if !read_only {
        let is_fenced = !matches!(lock_wait, LockWait::While(_) if is_wrong(WrongOrder::NoFence));
        // With `O_EXCL`, opening a block device fails while the device is mounted or part of a
        // RAID.
        let access = if is_block && is_fenced { Access::WriteExclusive } else { Access::Write };
        match retry_while(io::ErrorKind::ResourceBusy, lock_wait, || at.open(access)) {
            Ok(file) => return Ok((file, false)),
            Err(e) => match e.raw_os_error() {
                Some(libc::EACCES | libc::EPERM | libc::EROFS) => {}
                Some(libc::EBUSY) => return Err(in_use(path)),
                Some(libc::ETXTBSY) => {
                    return Err(OpenError::Busy {
                        path: name(),
                        what: "the system uses it (it runs as a program, or is swap space)",
                        writable: true,
                    });
                }
                _ => return Err(refused(name(), e)),
            },
        }
    }
    at.open(Access::Read).map(|file| (file, true)).map_err(|e| refused(name(), e))
}

/// Time to wait while another process holds the file.
#[derive(Clone, Copy)]
pub(super) enum LockWait<'a> {
    /// Wait up to [`LOCK_TIMEOUT`].
    Short,
    /// Wait as long as the callback returns true.
    While(Wait<'a>),
}
/// Calls `attempt` again and again, while it fails with an error of kind `passing` and `lock_wait`
/// permits further waiting.
fn retry_while<T>(
    passing: io::ErrorKind,
    lock_wait: LockWait<'_>,
    mut attempt: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let since = Instant::now();
    loop {
        let outcome = attempt();
        match (&outcome, lock_wait) {
            (Err(e), LockWait::Short) if e.kind() == passing && since.elapsed() < LOCK_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(10));
            }
            (Err(e), LockWait::While(wait)) if e.kind() == passing && wait(WaitReason::Locked) => {}
            _ => return outcome,
        }
    }
}

/// Enables direct I/O for `file`, if direct requests of one logical block are possible. Otherwise
/// leaves the file unchanged and returns the reason.
fn bypass_cache(file: &File, size: u64, block_size: u32) -> Result<Alignment, String> {
    let reason = |e: Errno| format!("the file system refuses it ({})", io::Error::from(e));
    let flags = rustix::fs::fcntl_getfl(file).map_err(reason)?;
    rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT).map_err(reason)?;
    let outcome = match stated_alignment(file) {
        Some(align) if align.offset == 0 => Err("the file system does not offer it".to_owned()),
        Some(align) => Ok(align),
        None => tried_alignment(file, size),
    };
    let outcome = outcome.and_then(|align| {
        if (block_size as usize).is_multiple_of(align.offset) {
            Ok(align)
        } else {
            Err(format!(
                "the storage works in units of {} bytes and the disk in blocks of {block_size} \
                 bytes, so use `block-size=4096`",
                align.offset
            ))
        }
    });
    if outcome.is_err() {
        rustix::fs::fcntl_setfl(file, flags).map_err(reason)?;
    }
    outcome
}

/// Alignment of direct I/O that the kernel reports (`STATX_DIOALIGN`, Linux 6.1). `offset` is 0 if
/// direct I/O is not supported.
fn stated_alignment(file: &File) -> Option<Alignment> {
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return None;
    }
    let sane = |n: u32| if n == 0 || n.is_power_of_two() { Some(n as usize) } else { None };
    Some(Alignment {
        memory: sane(stat.stx_dio_mem_align)?.max(1),
        offset: sane(stat.stx_dio_offset_align)?,
    })
}

/// Finds the alignment of direct I/O by test reads, for kernels that do not report it.
fn tried_alignment(file: &File, size: u64) -> Result<Alignment, String> {
    let mut room = vec![0; 3 * 4096];
    let base = room.as_ptr().align_offset(4096).min(4096);
    let mut reason = None;
    for unit in [512, 4096] {
        // The address and the offset of the test read are aligned to `unit` and to no larger power
        // of two. So a stricter requirement makes the read fail.
        let offset = if size >= 2 * unit as u64 { unit as u64 } else { 0 };
        let Some(piece) = room.get_mut(base + unit..base + 2 * unit) else {
            continue;
        };
        match rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut *piece, offset)) {
            Ok(_) => return Ok(Alignment { memory: unit, offset: unit }),
            Err(e) => reason = Some(io::Error::from(e)),
        }
    }
    Err(reason.map_or_else(String::new, |e| format!("a first direct read failed ({e})")))
}
