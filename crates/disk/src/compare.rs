//! Comparison of a command's data with the data of a disk.

use crate::request::DiskError;
use shadowbell_memory::{Segments, SharedBytes};

/// Number of bytes that are copied and compared at once. Both sides are copied first, because the
/// guest and other threads may change them during the comparison.
const CHUNK: usize = 4096;

/// Compares `len` bytes of `data` from `offset` with `disk` from `at`.
///
/// # Errors
/// [`DiskError::CompareFailed`] if they differ, [`DiskError::BadBuffer`] if either is too short.
pub fn compare(
    data: &Segments,
    offset: usize,
    disk: &SharedBytes,
    at: usize,
    len: usize,
) -> Result<(), DiskError> {
    let (mut ours, mut theirs) = ([0; CHUNK], [0; CHUNK]);
    let mut done = 0;
    while done < len {
        let n = (len - done).min(CHUNK);
        data.read_into(offset + done, &mut theirs[..n]).ok_or(DiskError::BadBuffer)?;
        disk.read_into(at + done, &mut ours[..n]).ok_or(DiskError::BadBuffer)?;
        if ours[..n] != theirs[..n] {
            return Err(DiskError::CompareFailed);
        }
        done += n;
    }
    Ok(())
}
