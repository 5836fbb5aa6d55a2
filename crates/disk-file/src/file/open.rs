//! Opening of file-backed disks: probes of the file and its file system.

use super::device::attribute;
use super::flusher::{Flusher, Syncs};
use super::image::{ImageFile, Kinds};
use super::namespace::NamespaceFacts;
use super::options::{Aio, FileOptions, Format};
use super::shared::{Alignment, FileShared, OpenHandle, ranges};
use super::write_atomicity::WriteAtomicity;
use crate::sys::{self, EngineKind};
use rustix::fs::FallocateFlags;
use rustix::io::{Errno, ReadWriteFlags};
use shadowbell_disk::{DiskInfo, ImageFormat, OpenError};
use shadowbell_memory::{Mapping, SharedBytes};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Number of zero bytes that one write stores, on a file system that cannot zero ranges itself.
const ZEROES: u64 = 1 << 20;

pub(super) fn open(path: &Path, options: &FileOptions) -> Result<FileShared, OpenError> {
    let name = || path.display().to_string();
    let image = ImageFile::open_as(path, options.read_only, Kinds::Disks)?;
    let format = match options.format {
        // The format is detected although it is known to be raw, because that sends a command to
        // the device. So opening fails if this process may not send commands, instead of the first
        // request.
        Some(Format::Raw) if image.namespace.is_some() => image.format().map(|_| None)?,
        Some(Format::Raw) => None,
        Some(Format::Qcow2) => Some(ImageFormat::Qcow2),
        None => image.format()?,
    };
    // An image with a format is refused here: the guest must see the disk that the image contains,
    // and not the bytes of the file.
    if let Some(format) = format {
        return Err(OpenError::Format { path: name(), format });
    }
    if let Err(OpenError::NotBlockMultiple { path, size, block_size }) =
        image.block_size(options.block_size)
        && let Some(format) = image.format()?
    {
        // Raw access was requested to an image with a format. The usual error advises to extend the
        // file, which would damage the image.
        return Err(OpenError::OddFormat { path, size, block_size, format });
    }
    take(image, path, options)
}

/// Creates a disk whose content is the raw bytes of the image.
pub(super) fn take(
    image: ImageFile,
    path: &Path,
    options: &FileOptions,
) -> Result<FileShared, OpenError> {
    let name = || path.display().to_string();
    let (is_block, read_only, size) = (image.is_block, image.read_only, image.size);
    let block_size = image.block_size(options.block_size)?;

    let namespace = image.namespace.clone();
    let uring = if namespace.is_some() { sys::supports_commands } else { sys::available };
    let (engine, no_uring) =
        engine(options.aio, uring).map_err(|source| OpenError::Ring { path: name(), source })?;
    let direct = image.set_direct(options.direct, block_size)?;
    let metadata = image.metadata.clone();
    let (file, used) = image.into_locked();

    let about = namespace.as_ref();
    let discard = !read_only
        && match about {
            Some(facts) => facts.discards(),
            None if is_block => discards(&metadata),
            None => punches(&file, size),
        };
    // Allocation unit of the file system, or preferred deallocation size of the namespace. It is a
    // power of two on all known file systems.
    let cluster = about.map_or(metadata.blksize(), |facts| facts.granularity);
    let cluster = cluster.clamp(u64::from(block_size), 1 << 20) as u32;
    let zeroes = zeroes()?;
    let flusher = Flusher::after(Arc::clone(&file), syncs(about, direct), 0);
    Ok(FileShared {
        handle: OpenHandle::new(&file, used, &flusher, false),
        flusher,
        file: Arc::clone(&file),
        info: DiskInfo {
            block_size,
            blocks: size / u64::from(block_size),
            read_only,
            volatile_cache: !read_only && about.is_none_or(|facts| facts.has_cache),
            discard,
            granularity: cluster / block_size,
            metadata: None,
            zoned: None,
        },
        atom: match about {
            Some(facts) => WriteAtomicity::of_namespace(facts, block_size),
            None => {
                WriteAtomicity::of_file(&file, &metadata, is_block, direct.is_some(), block_size)
            }
        },
        ranges: ranges(direct, block_size),
        direct,
        engine,
        no_uring,
        waits: about.is_none() && waits(&file),
        regular: !is_block && about.is_none(),
        end: AtomicU64::new(size),
        full: AtomicU64::new(0),
        no_zero_range: AtomicBool::new(about.is_some_and(|facts| !facts.writes_zeroes)),
        no_punch: AtomicBool::new(about.is_some_and(|facts| !facts.zeroes_deallocate)),
        namespace,
        zeroes,
        #[cfg(feature = "scripted")]
        script: None,
    })
}

/// Selects the method of syncing.
pub(super) fn syncs(namespace: Option<&NamespaceFacts>, direct: Option<Alignment>) -> Syncs {
    match namespace {
        Some(facts) => Syncs::Commands { nsid: facts.nsid },
        None => Syncs::Calls { drops_failed_data: direct.is_none() },
    }
}

/// Creates a buffer of zeroes, for file systems that cannot zero ranges: the disk writes this
/// buffer instead.
pub(super) fn zeroes() -> Result<SharedBytes, OpenError> {
    let mapping =
        Mapping::anonymous(ZEROES).map_err(|source| OpenError::Memory { bytes: ZEROES, source })?;
    Ok(mapping.bytes())
}

/// Selects the I/O engine. If io_uring is unavailable and `aio` permits threads instead, also
/// returns the reason.
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

/// True if the file system does not support `RWF_NOWAIT`. The test read cannot block: a file system
/// without support refuses the flag before it does anything else.
pub(super) fn waits(file: &File) -> bool {
    let mut room = [0; 512];
    let into = &mut [io::IoSliceMut::new(&mut room)];
    rustix::io::preadv2(file, into, 0, ReadWriteFlags::NOWAIT) == Err(Errno::OPNOTSUPP)
}

/// True if the file system can punch holes. The test punches a hole beyond the end of the file, so
/// it cannot lose data.
fn punches(file: &File, size: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::io::retry_on_intr(|| {
        rustix::fs::fallocate(file, flags, size.next_multiple_of(4096), 4096)
    })
    .is_ok()
}

/// True if the block device has a command for zeroing a range. The kernel uses this command to
/// punch a hole in the device.
fn discards(metadata: &Metadata) -> bool {
    // A partition has no queue attributes of its own; those of the whole disk are one directory up.
    ["queue", "../queue"].iter().any(|queue| {
        attribute(metadata, &format!("{queue}/write_zeroes_max_bytes")).is_some_and(|n| n != "0")
    })
}
