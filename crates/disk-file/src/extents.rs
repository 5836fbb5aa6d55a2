//! Extents of a file: `SEEK_DATA` and `SEEK_HOLE`.

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use shadowbell_disk::{Extent, ReportExtent};
use std::os::fd::AsFd;

/// Reports the extents of a file from byte `from` to byte `to` by `SEEK_DATA` and `SEEK_HOLE`, with
/// one or two calls per extent. `end` is the end of the file: bytes beyond it cannot be read and
/// are reported as data. If a seek fails, all remaining bytes are reported as data too.
pub(crate) fn report_file_extents(
    file: impl AsFd,
    (from, to): (u64, u64),
    end: u64,
    report: &mut ReportExtent<'_>,
) {
    let (mut at, file_end) = (from, to.min(end));
    while at < file_end {
        // The bytes between `at` and the next data are a hole.
        let data = match seek(&file, SeekFrom::Data(at)) {
            Ok(data) if data >= at => data.min(file_end),
            Err(Errno::NXIO) => file_end,
            _ => break,
        };
        if data > at {
            if !report(Extent::hole(data - at)) {
                return;
            }
            at = data;
            continue;
        }
        let hole = match seek(&file, SeekFrom::Hole(at)) {
            Ok(hole) if hole > at => hole.min(file_end),
            _ => break,
        };
        if !report(Extent::data(hole - at)) {
            return;
        }
        at = hole;
    }
    if at < to {
        report(Extent::data(to - at));
    }
}
