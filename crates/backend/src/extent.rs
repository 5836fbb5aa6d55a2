//! Which bytes of a disk are allocated.

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::os::fd::AsFd;

/// Bytes of a disk, one after the other, of which the same is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// How many; at least one.
    pub len: u64,
    /// There may be data. If not, there are none: they read as zeroes.
    pub allocated: bool,
}

impl Extent {
    /// So many bytes that may hold data.
    #[must_use]
    pub fn data(len: u64) -> Self {
        Self { len, allocated: true }
    }

    /// So many bytes that read as zeroes.
    #[must_use]
    pub fn hole(len: u64) -> Self {
        Self { len, allocated: false }
    }
}

/// Whoever is told of extents, one after the other; whether it wants to know more.
pub type Tell<'a> = dyn FnMut(Extent) -> bool + 'a;

/// Tells of a file from byte `from` to byte `to`, as its file system has it: a call or two for each
/// extent. What lies past `end`, where the file ends, can not be read, and is no hole; nor is what
/// the file system does not know.
pub(crate) fn tell_of_file(file: impl AsFd, (from, to): (u64, u64), end: u64, tell: &mut Tell<'_>) {
    let (mut at, there) = (from, to.min(end));
    while at < there {
        // From here on to the next data: there are none before.
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
