//! Finding out what a file is, and what its file system can do.

use super::flusher::Flusher;
use super::options::{Aio, Direct, FileOptions};
use super::shared::{Alignment, FileShared};
use crate::error::OpenError;
use crate::info::DiskInfo;
use crate::sys::{self, EngineKind};
use rustix::fs::{AtFlags, FallocateFlags, OFlags, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags};
use shadowbell_memory::{Mapping, SharedBytes};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

/// How long another process may still have the file: a server that was just killed and is started
/// again holds it until the kernel has taken its ring apart.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);

/// How much is zeroed by one write where nothing better works.
const ZEROES: u64 = 1 << 20;

pub(super) fn open(path: &Path, options: &FileOptions) -> Result<FileShared, OpenError> {
    let name = || path.display().to_string();
    let system = |what| move |source| OpenError::System { path: name(), what, source };

    let metadata = look_at(path)?;
    let is_block = metadata.file_type().is_block_device();
    // The system opens a write-protected device for writing, and refuses the writes.
    let protected = is_block && attribute(&metadata, "ro").is_some_and(|ro| ro != "0");
    let (mut file, read_only) = open_file(path, is_block, options.read_only || protected)?;
    let locked = retry_while(io::ErrorKind::WouldBlock, || sys::lock_image(&file, !read_only));
    locked.map_err(|source| match source.kind() {
        io::ErrorKind::WouldBlock => OpenError::Busy {
            path: name(),
            what: "another program (a server, or QEMU) has it open",
            writable: !read_only,
        },
        _ => system("locking it")(source),
    })?;

    let metadata = file.metadata().map_err(system("reading its size"))?;
    let size = if is_block {
        file.seek(SeekFrom::End(0)).map_err(system("reading its size"))?
    } else {
        metadata.len()
    };
    let own_blocks = if is_block { rustix::fs::ioctl_blksszget(&file).unwrap_or(512) } else { 512 };
    let block_size =
        options.block_size.unwrap_or(if own_blocks.is_multiple_of(4096) { 4096 } else { 512 });
    if size == 0 {
        return Err(OpenError::Empty { path: name() });
    }
    if !size.is_multiple_of(u64::from(block_size)) {
        return Err(OpenError::NotBlockMultiple { path: name(), size, block_size });
    }

    let (engine, no_uring) = engine(options.aio, sys::available)
        .map_err(|source| OpenError::Ring { path: name(), source })?;
    let direct = match options.direct {
        Direct::Off => None,
        Direct::Auto => bypass_cache(&file, size, block_size).ok(),
        Direct::On => Some(
            bypass_cache(&file, size, block_size)
                .map_err(|why| OpenError::NotDirect { path: name(), why })?,
        ),
    };

    let discard = !read_only && if is_block { discards(&metadata) } else { punches(&file, size) };
    // What the file system allocates at once; a power of two on all of them, as far as known.
    let cluster = metadata.blksize().clamp(u64::from(block_size), 1 << 20) as u32;
    let zeroes = zeroes()?;
    let file = Arc::new(file);
    Ok(FileShared {
        flusher: Flusher::new(Arc::clone(&file), direct.is_none()),
        file: Arc::clone(&file),
        info: DiskInfo {
            block_size,
            blocks: size / u64::from(block_size),
            read_only,
            volatile_cache: !read_only,
            discard,
            granularity: cluster / block_size,
        },
        direct,
        engine,
        no_uring,
        waits: waits(&file),
        regular: !is_block,
        end: AtomicU64::new(size),
        full: AtomicU64::new(0),
        no_zero_range: AtomicBool::new(false),
        no_punch: AtomicBool::new(false),
        lock_is_shared: AtomicBool::new(false),
        zeroes,
        #[cfg(feature = "scripted")]
        script: None,
    })
}

/// Zeroes to write where nothing better works.
pub(super) fn zeroes() -> Result<SharedBytes, OpenError> {
    let mapping =
        Mapping::anonymous(ZEROES).map_err(|source| OpenError::Memory { bytes: ZEROES, source })?;
    Ok(mapping.bytes())
}

/// How the system is called; and why by threads, if that was not asked for.
pub(super) fn engine(
    aio: Aio,
    uring: impl FnOnce() -> io::Result<()>,
) -> io::Result<(EngineKind, Option<String>)> {
    if aio == Aio::Threads {
        return Ok((EngineKind::Threads, None));
    }
    match uring() {
        Ok(()) => Ok((EngineKind::Uring, None)),
        Err(why) if aio == Aio::Auto => Ok((EngineKind::Threads, Some(why.to_string()))),
        Err(why) => Err(why),
    }
}

/// What is known of the block device or regular file at `path`; an error if it is neither. Asked
/// before it is opened, since opening a pipe or a terminal may block or do things.
fn look_at(path: &Path) -> Result<Metadata, OpenError> {
    let name = || path.display().to_string();
    let metadata = std::fs::metadata(path).map_err(|source| refused(name(), source))?;
    let kind = metadata.file_type();
    let what = if kind.is_file() || kind.is_block_device() {
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

fn refused(path: String, source: io::Error) -> OpenError {
    match source.kind() {
        io::ErrorKind::NotFound => OpenError::Missing { path },
        io::ErrorKind::NotADirectory => OpenError::NoFile { path, what: "below a file" },
        io::ErrorKind::PermissionDenied => OpenError::Unreadable { path, source },
        io::ErrorKind::IsADirectory => OpenError::NoFile { path, what: "a directory" },
        _ => OpenError::System { path, what: "opening it", source },
    }
}

/// Opens the file for writing too if that is wanted and possible; whether it is read-only.
fn open_file(path: &Path, is_block: bool, read_only: bool) -> Result<(File, bool), OpenError> {
    let name = || path.display().to_string();
    let mut how = OpenOptions::new();
    how.read(true);
    if !read_only {
        let mut how = how.clone();
        how.write(true);
        if is_block {
            // Not while a file system on it is mounted, or it is part of a RAID.
            how.custom_flags(libc::O_EXCL);
        }
        match retry_while(io::ErrorKind::ResourceBusy, || how.open(path)) {
            Ok(file) => return Ok((file, false)),
            Err(e) => match e.raw_os_error() {
                Some(libc::EACCES | libc::EPERM | libc::EROFS) => {}
                Some(libc::EBUSY) => {
                    return Err(OpenError::Busy {
                        path: name(),
                        what: "the system uses it (it is mounted, or part of a RAID or a volume \
                               group)",
                        writable: true,
                    });
                }
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
    how.open(path).map(|file| (file, true)).map_err(|e| refused(name(), e))
}

/// What `attempt` comes to, repeated for a while if it fails with `passing`.
fn retry_while<T>(
    passing: io::ErrorKind,
    mut attempt: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let since = Instant::now();
    loop {
        match attempt() {
            Err(e) if e.kind() == passing && since.elapsed() < LOCK_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(10));
            }
            outcome => return outcome,
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

/// Whether the file system can not be asked to fail a read rather than wait for it. It says so
/// before it looks at anything.
fn waits(file: &File) -> bool {
    let mut room = [0; 512];
    let into = &mut [io::IoSliceMut::new(&mut room)];
    rustix::io::preadv2(file, into, 0, ReadWriteFlags::NOWAIT) == Err(Errno::OPNOTSUPP)
}

/// Whether the file system can punch holes: tried beyond the end, where there is nothing.
fn punches(file: &File, size: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::io::retry_on_intr(|| {
        rustix::fs::fallocate(file, flags, size.next_multiple_of(4096), 4096)
    })
    .is_ok()
}

/// Whether the block device zeroes ranges by itself, which is what a hole in it is.
fn discards(metadata: &Metadata) -> bool {
    // A partition has its queue's limits one directory up.
    ["queue", "../queue"].iter().any(|queue| {
        attribute(metadata, &format!("{queue}/write_zeroes_max_bytes")).is_some_and(|n| n != "0")
    })
}

/// What the system says of a block device.
fn attribute(device: &Metadata, name: &str) -> Option<String> {
    let device = device.rdev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let value = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{name}")).ok()?;
    Some(value.trim().to_owned())
}
