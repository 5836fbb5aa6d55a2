//! Erasure of namespace files: wiping, vacating and overwriting.

use super::HostPool;
use super::index::VACANT;
use rustix::fs::{FallocateFlags, fallocate};
use shadowbell_disk::OpenError;
use shadowbell_disk_file::ImageFile;
use shadowbell_spec::admin::Sanitize;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::time::{Duration, Instant};

/// Largest block size of a file system, in bytes. It is the size of the hole that is punched at the
/// beginning of a wiped file.
const BLOCK: u64 = 1 << 16;
/// Number of bytes that one write of an overwrite covers.
const CHUNK: usize = 1 << 20;
/// Maximum number of bytes that an overwrite writes before it flushes the page cache. Without this
/// limit, the kernel would throttle the writes of other guests to the same file system.
const MAX_DIRTY: u64 = 8 << 20;

/// Rate limit of an overwrite.
struct Pace {
    /// Bytes per second.
    rate: u64,
    began: Instant,
    written: u64,
}

impl Pace {
    fn new(rate: u64) -> Self {
        Self { rate, began: Instant::now(), written: 0 }
    }

    /// Time to wait before the next write, `elapsed` after the start.
    fn wait(&self, elapsed: Duration) -> Duration {
        let nanoseconds = u128::from(self.written) * 1_000_000_000 / u128::from(self.rate.max(1));
        let due = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        due.saturating_sub(elapsed)
    }

    /// Counts `bytes` as written. Returns true if the page cache has to be flushed.
    fn count(&mut self, bytes: u64) -> bool {
        let before = self.written;
        self.written += bytes;
        before / MAX_DIRTY != self.written / MAX_DIRTY
    }
}

/// Opens the file of a namespace whose disk is closed.
fn open(pool: &HostPool, nsid: u32) -> io::Result<ImageFile> {
    ImageFile::open(&pool.file(nsid), false).map_err(|error| match error {
        OpenError::System { source, .. } => source,
        error => io::Error::other(error),
    })
}

/// Discards the content of a namespace's file and sets its length. The file system regains the
/// blocks.
///
/// # Errors
/// Errors of the file system.
pub fn wipe(pool: &HostPool, nsid: u32, bytes: u64) -> io::Result<()> {
    let image = open(pool, nsid)?;
    // The file never becomes empty: an empty file could not be opened after a crash at this point.
    image.file().set_len(1)?;
    let mut file = image.file();
    let mut first = [0];
    file.seek(io::SeekFrom::Start(0))?;
    file.read_exact(&mut first)?;
    if first != [0] {
        // A byte that is not 0 is in an allocated block, so the write succeeds even on a full file
        // system.
        file.seek(io::SeekFrom::Start(0))?;
        file.write_all(&[0])?;
    }
    image.file().set_len(bytes)?;
    // If the file system cannot punch holes, the call fails and the first block stays allocated.
    // This does no harm.
    let _ =
        fallocate(image.file(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, BLOCK);
    rustix::fs::fdatasync(image.file())?;
    Ok(())
}

/// Wipes the file of a deleted namespace, and gives it the length of an unused file.
///
/// # Errors
/// Errors of the file system.
pub fn vacate(pool: &HostPool, nsid: u32) -> io::Result<()> {
    wipe(pool, nsid, VACANT)
}

/// True if the file has the length that marks an unused namespace ID.
pub fn is_vacant(pool: &HostPool, nsid: u32) -> bool {
    std::fs::metadata(pool.file(nsid)).is_ok_and(|about| about.len() == VACANT)
}

/// Overwrites the allocated parts of a namespace's file with the pattern of pass number `pass` of
/// `command`, at the rate of the pool. Calls `continues` repeatedly with the current offset; the
/// overwrite stops if it returns false.
///
/// # Errors
/// Errors of the file system; [`io::ErrorKind::Interrupted`] if `continues` returned false.
pub fn overwrite(
    pool: &HostPool,
    nsid: u32,
    (command, pass): (Sanitize, u8),
    continues: &mut dyn FnMut(u64) -> bool,
) -> io::Result<()> {
    let image = open(pool, nsid)?;
    let mut file = image.file();
    let is_inverted = command.oipbp && pass % 2 == 1;
    let pattern = if is_inverted { !command.ovrpat } else { command.ovrpat };
    let chunk: Vec<u8> = pattern.to_le_bytes().into_iter().cycle().take(CHUNK).collect();
    let end = file.metadata()?.len();
    let mut pace = Pace::new(pool.overwrite_rate());
    let mut at = 0;
    while let Some((from, to)) = data(file, at, end)? {
        at = from;
        file.seek(io::SeekFrom::Start(at))?;
        while at < to {
            let len = (to - at).min(CHUNK as u64) as usize;
            file.write_all(chunk.get(..len).unwrap_or_default())?;
            at += len as u64;
            if pace.count(len as u64) {
                rustix::fs::fdatasync(image.file())?;
            }
            std::thread::sleep(pace.wait(pace.began.elapsed()));
            if !continues(at) {
                return Err(io::ErrorKind::Interrupted.into());
            }
        }
    }
    rustix::fs::fdatasync(file)?;
    Ok(())
}

/// Finds the next allocated range from `at` on.
fn data(file: &File, at: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
    use rustix::fs::SeekFrom;
    use rustix::io::Errno;
    if at >= end {
        return Ok(None);
    }
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(from) => {
            let to = rustix::fs::seek(file, SeekFrom::Hole(from)).unwrap_or(end).min(end);
            Ok((from < end).then_some((from, to.max(from + 1))))
        }
        Err(Errno::NXIO) => Ok(None),
        // Without SEEK_DATA support, the whole file may be data.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Some((at, end))),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overwrite_waits_until_its_rate_permits_more() {
        let mut pace = Pace::new(100 << 20);
        assert_eq!(pace.wait(Duration::ZERO), Duration::ZERO);
        pace.written = 50 << 20;
        // `wait` only computes a time: 50 MiB at 100 MiB/s take 500 ms.
        assert_eq!(pace.wait(Duration::ZERO), Duration::from_millis(500));
        // 400 ms have passed, so 100 ms remain.
        assert_eq!(pace.wait(Duration::from_millis(400)), Duration::from_millis(100));
        // If the storage is slower than the rate, there is no wait.
        assert_eq!(pace.wait(Duration::from_secs(9)), Duration::ZERO);
        pace.written = u64::MAX;
        assert!(pace.wait(Duration::ZERO) > Duration::from_secs(86_400));
    }

    #[test]
    fn an_overwrite_leaves_few_bytes_in_the_page_cache() {
        let mut pace = Pace::new(100 << 20);
        let synced: Vec<_> = (1..=17_u64).filter(|_| pace.count(CHUNK as u64)).collect();
        assert_eq!(synced, [8, 16], "MiB after which the file is synced");
    }
}
