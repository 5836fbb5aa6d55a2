//! An image that is open and locked, whatever is in it.

use super::device::{attribute, is_remote};
use super::namespace::{NamespaceFacts, is_namespace};
use super::opener::{self, Access, At};
use super::options::Direct;
use super::shared::Alignment;
use crate::error::OpenError;
use crate::format::ImageFormat;
use crate::sys;
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use rustix::io::Errno;
use shadowbell_state::{WrongOrder, is_wrong};
use std::fs::{File, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long another process may still have the file: a server that was just killed and is started
/// again holds it until the kernel has taken its ring apart.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);

/// A regular file or a block device that is open as an image, and locked against other writers, and
/// if it is writable against other readers: what disks over files of other formats begin with.
///
/// The lock goes with it, though the file may stay open for a while.
#[derive(Debug)]
pub struct ImageFile {
    file: Arc<File>,
    path: PathBuf,
    /// The lock is still ours to give up.
    is_locked: bool,
    pub(super) metadata: Metadata,
    pub(super) is_block: bool,
    /// It is the character device of this.
    pub(super) namespace: Option<NamespaceFacts>,
    pub(super) read_only: bool,
    pub(super) size: u64,
}

impl ImageFile {
    /// Opens and locks what is at `path`, for writing too unless `read_only` is set or the system
    /// does not allow it.
    ///
    /// # Errors
    /// [`OpenError`], in a sentence that says what is wrong with the file and what to do.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, OpenError> {
        Self::open_as(path, read_only, Kinds::Images)
    }

    pub(super) fn open_as(path: &Path, read_only: bool, kinds: Kinds) -> Result<Self, OpenError> {
        let named = opener::name(path).transpose().map_err(|source| {
            match look_at(path, At::Path(path), kinds) {
                Err(error @ OpenError::NoFile { .. }) => error,
                _ => refused(path.display().to_string(), source),
            }
        })?;
        let at = named.as_ref().map_or(At::Path(path), |named| At::Named(named.as_fd()));
        Self::open_at(path, at, (read_only, kinds), LockWait::Short)
    }

    /// Opens the image of a process that has died, by the descriptor that
    /// [names](Self::name_for_next) it. Returns when nothing of what that process had given to the
    /// system by its open file can reach the image any more; `wait` is called for as long as it
    /// can.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`OpenError::Busy`], if `wait` waits no longer.
    pub fn recover(
        path: &Path,
        named: BorrowedFd<'_>,
        read_only: bool,
        wait: Wait<'_>,
    ) -> Result<Self, OpenError> {
        let how = (read_only, Kinds::Images);
        Self::open_at(path, At::Named(named), how, LockWait::AsLongAs(wait))
    }

    /// A descriptor that only names the image: what the next process opens it by, should this one
    /// die, whatever it is called by then.
    ///
    /// # Errors
    /// The system's.
    pub fn name_for_next(&self) -> io::Result<OwnedFd> {
        opener::name_of(&self.file)
    }

    /// Opens what is called `path` to a person, and is at `at`.
    pub(super) fn open_at(
        path: &Path,
        at: At<'_>,
        (read_only, kinds): (bool, Kinds),
        lock_wait: LockWait<'_>,
    ) -> Result<Self, OpenError> {
        let name = || path.display().to_string();
        let system = |what| move |source| OpenError::System { path: name(), what, source };
        let metadata = look_at(path, at, kinds)?;
        let is_character = metadata.file_type().is_char_device();
        let is_block = metadata.file_type().is_block_device();
        // The system opens a write-protected device for writing, and refuses the writes.
        let protected = is_block && attribute(&metadata, "ro").is_some_and(|ro| ro != "0");
        let (mut file, read_only) =
            open_file(path, at, is_block, read_only || protected, lock_wait)?;
        let namespace =
            is_character.then(|| about(path, &file, !read_only, lock_wait)).transpose()?;
        let read_only = read_only || namespace.as_ref().is_some_and(|facts| facts.is_protected);
        let lock = || sys::lock_image(&file, !read_only);
        let locked = match lock_wait {
            LockWait::AsLongAs(_) if is_wrong(WrongOrder::NoFence) => Ok(()),
            _ => retry_while(io::ErrorKind::WouldBlock, lock_wait, lock),
        };
        locked.map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => OpenError::Busy {
                path: name(),
                what: "another program (a server, or QEMU) has it open",
                writable: !read_only,
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
        let (file, path) = (Arc::new(file), path.to_owned());
        Ok(Self { file, path, is_locked: true, metadata, is_block, namespace, read_only, size })
    }

    /// The file. Its page cache is bypassed after [`set_direct`](Self::set_direct).
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn shared(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    /// Whether it takes no writes.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether it is a block device.
    #[must_use]
    pub fn is_block_device(&self) -> bool {
        self.is_block
    }

    /// Whether its file system asks another machine, or another process, for what is known of the
    /// file, and so may keep who asks waiting.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        !self.is_block && is_remote(&self.file)
    }

    /// What it is an image of, by its first bytes; nothing for a raw image. To be asked before
    /// [`set_direct`](Self::set_direct).
    ///
    /// # Errors
    /// [`OpenError::System`], if it can not be read.
    pub fn format(&self) -> Result<Option<ImageFormat>, OpenError> {
        if let Some(facts) = &self.namespace {
            return self.format_of(facts);
        }
        let mut start = [0; ImageFormat::LOOKS_AT];
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

    /// The same of a namespace, of which whole blocks are read. It shows, too, that this process
    /// may read it.
    fn format_of(&self, facts: &NamespaceFacts) -> Result<Option<ImageFormat>, OpenError> {
        let path = || self.path.display().to_string();
        let mut start = vec![0; ImageFormat::LOOKS_AT.next_multiple_of(facts.block_size as usize)];
        start.truncate(usize::try_from(self.size).unwrap_or(usize::MAX));
        sys::read_start(&self.file, &facts.commands(), &mut start).map_err(
            |source| match source.raw_os_error() {
                Some(libc::EACCES) => OpenError::NotGiven { path: path(), why: NO_COMMANDS.into() },
                _ => OpenError::System { path: path(), what: "reading its start", source },
            },
        )?;
        Ok(ImageFormat::of(start.get(..ImageFormat::LOOKS_AT).unwrap_or(&start)))
    }

    /// Bypasses the page cache, as `direct` says; what that asks for, or nothing if it is not
    /// bypassed. `block_size` is the unit of the requests that there will be.
    ///
    /// # Errors
    /// [`OpenError::NotDirect`], if it was demanded and is not to be had.
    pub fn set_direct(
        &self,
        direct: Direct,
        block_size: u32,
    ) -> Result<Option<Alignment>, OpenError> {
        if let Some(facts) = &self.namespace {
            if direct == Direct::Off {
                let path = self.path.display().to_string();
                let why = "a character device has no page cache; leave out `direct=off`".to_owned();
                return Err(OpenError::NotGiven { path, why });
            }
            // The system copies what the device can not take as it is.
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

    /// Bytes in a logical block of a raw disk.
    pub(super) fn block_size(&self, asked: Option<u32>) -> Result<u32, OpenError> {
        if let (Some(facts), Some(asked)) = (&self.namespace, asked)
            && asked < facts.block_size
        {
            let path = self.path.display().to_string();
            let why = format!(
                "its blocks have {} bytes, and a disk's can not be shorter; leave out `block-size`",
                facts.block_size
            );
            return Err(OpenError::NotGiven { path, why });
        }
        let own = if let Some(facts) = &self.namespace {
            facts.block_size
        } else if self.is_block {
            rustix::fs::ioctl_blksszget(&*self.file).unwrap_or(512)
        } else {
            512
        };
        let block_size = asked.unwrap_or(if own.is_multiple_of(4096) { 4096 } else { 512 });
        if !self.size.is_multiple_of(u64::from(block_size)) {
            let path = self.path.display().to_string();
            return Err(OpenError::NotBlockMultiple { path, size: self.size, block_size });
        }
        Ok(block_size)
    }

    /// The file, whose lock the caller gives up.
    pub(super) fn into_locked(mut self) -> Arc<File> {
        self.is_locked = false;
        Arc::clone(&self.file)
    }
}

impl Drop for ImageFile {
    fn drop(&mut self) {
        if self.is_locked {
            sys::unlock_image(&self.file);
        }
    }
}

/// What may hold an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kinds {
    /// Files and block devices.
    Images,
    /// These, and namespaces by their character devices: for raw disks.
    Disks,
}

/// Why a command is refused that the device would carry out.
const NO_COMMANDS: &str = "the system lets this user give the device no commands; before Linux 6.2 \
                           that takes CAP_SYS_ADMIN, and later that the device may be read and \
                           written; the namespace's block device needs neither";

/// What is known of what is at `path`; an error if it can not hold an image. Asked before it is
/// opened, since opening a pipe or a terminal may block or do things.
fn look_at(path: &Path, at: At<'_>, kinds: Kinds) -> Result<Metadata, OpenError> {
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

/// What the namespace says whose character device `file` is.
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
            // The device's own answer, or what it is.
            None => OpenError::NotGiven { path: name(), why: error.to_string() },
            Some(libc::EBUSY) => in_use(path),
            Some(libc::EACCES) => OpenError::NotGiven { path: name(), why: NO_COMMANDS.into() },
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
        // It was not the system that said so.
        io::ErrorKind::PermissionDenied if source.raw_os_error().is_none() => {
            OpenError::NotGiven { path, why: source.to_string() }
        }
        io::ErrorKind::PermissionDenied => OpenError::Unreadable { path, source },
        io::ErrorKind::IsADirectory => OpenError::NoFile { path, what: "a directory" },
        _ => OpenError::System { path, what: "opening it", source },
    }
}

/// Opens the file for writing too if that is wanted and possible; whether it is read-only.
fn open_file(
    path: &Path,
    at: At<'_>,
    is_block: bool,
    read_only: bool,
    lock_wait: LockWait<'_>,
) -> Result<(File, bool), OpenError> {
    let name = || path.display().to_string();
    if !read_only {
        let is_fenced =
            !matches!(lock_wait, LockWait::AsLongAs(_) if is_wrong(WrongOrder::NoFence));
        // Of a device: not while a file system on it is mounted, or it is part of a RAID.
        let access = if is_block && is_fenced { Access::WriteAlone } else { Access::Write };
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

/// What to do while another process has the file.
#[derive(Clone, Copy)]
pub(super) enum LockWait<'a> {
    /// Wait for [`LOCK_TIMEOUT`].
    Short,
    /// Wait for as long as the caller does.
    AsLongAs(Wait<'a>),
}

/// Waits a moment, again and again while a process that is dead has something under way at a disk.
/// False: it is not to be waited for any longer.
pub type Wait<'a> = &'a dyn Fn() -> bool;

/// What `attempt` comes to, repeated for a while if it fails with `passing`.
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
            (Err(e), LockWait::AsLongAs(wait)) if e.kind() == passing && wait() => {}
            _ => return outcome,
        }
    }
}

/// Turns the page cache off for `file`, if requests of one logical block are possible then. Says
/// why, if not, and leaves the file as it was.
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

/// What the system says (Linux 6.1) of direct I/O on the file; `offset` is 0 if there is none.
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

/// What reading the file directly shows, where the system does not say.
fn tried_alignment(file: &File, size: u64) -> Result<Alignment, String> {
    let mut room = vec![0; 3 * 4096];
    let base = room.as_ptr().align_offset(4096).min(4096);
    let mut reason = None;
    for unit in [512, 4096] {
        // At an address and an offset that are multiples of this unit and of no larger one.
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
