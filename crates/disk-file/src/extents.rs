//! Extents of a file: `SEEK_DATA` and `SEEK_HOLE`.

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use shadowbell_disk::{Extent, Tell};
use std::os::fd::AsFd;

/// Reports the extents of a file from byte `from` to byte `to` by `SEEK_DATA` and `SEEK_HOLE`, with
/// one or two calls per extent. `end` is the end of the file: bytes beyond it cannot be read and
/// are reported as data. Bytes for which the file system fails are reported as data too.
pub(crate) fn tell_of_file(file: impl AsFd, (from, to): (u64, u64), end: u64, tell: &mut Tell<'_>) {
    let (mut at, there) = (from, to.min(end));
    while at < there {
        // The bytes between `at` and the next data are a hole.
        let data = match seek(&file, SeekFrom::Data(at)) {
            Ok(data) if data >= at => data.min(there),
            Err(Errno::NXIO) => there,
            _ => break,
        };
        if data > at {
            if !tell(Extent::hole(data - at)) {
                return;
            }
            at = data;
            continue;
        }
        let hole = match seek(&file, SeekFrom::Hole(at)) {
            Ok(hole) if hole > at => hole.min(there),
            _ => break,
        };
        if !tell(Extent::data(hole - at)) {
            return;
        }
        at = hole;
    }
    if at < to {
        tell(Extent::data(to - at));
    }
}
