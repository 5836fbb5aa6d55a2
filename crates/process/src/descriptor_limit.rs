//! Limit of open files, and size of the kernel's descriptor table.

use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use tracing::debug;

/// Initial number of entries of this process's descriptor table in the kernel (half a megabyte). If
/// the table is full, the kernel doubles it, and threads that open a file meanwhile wait for an RCU
/// grace period of 10 to 30 ms. If the thread that handles registers waited, all guests would be
/// delayed.
const TABLE_ENTRIES: u64 = 1 << 16;

/// Limit of open files after [`raise`]; `None` if there is none.
static LIMIT: OnceLock<Option<u64>> = OnceLock::new();

/// Directory `/proc/self/fd` after [`raise`]: the size of this directory is the number of open
/// files. A sandboxed process cannot open it.
static OPEN_FILES: OnceLock<Option<File>> = OnceLock::new();

/// Raises the soft limit of open files to the hard limit, and enlarges the descriptor table. A
/// guest with many queues needs a descriptor per interrupt. The soft limit is low by default for
/// programs that use `select`. This program does not use it.
pub fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    if current != maximum
        && let Err(errno) = setrlimit(Resource::Nofile, raised)
    {
        debug!("the limit of open files stays at {current:?}: {errno}");
    }
    let limit = *LIMIT.get_or_init(|| getrlimit(Resource::Nofile).current);
    OPEN_FILES.get_or_init(open_files);
    let most = limit.unwrap_or(TABLE_ENTRIES).min(TABLE_ENTRIES);
    let last = i32::try_from(most.saturating_sub(1)).unwrap_or(0);
    // Opening one descriptor with a large number enlarges the table. The kernel never shrinks it.
    let there = File::open("/dev/null").and_then(|file| Ok(fcntl_dupfd_cloexec(file, last)?));
    if let Err(error) = there {
        debug!("no room for {most} open files: {error}");
    }
}

/// Checks that this process may open `needed` more files.
///
/// # Errors
/// The limit of open files is too low; the message has a sufficient one.
pub fn check_room(needed: u64) -> anyhow::Result<()> {
    let Some((limit, in_use)) = usage() else { return Ok(()) };
    match shortage(limit, in_use, needed) {
        None => Ok(()),
        Some(shortage) => Err(anyhow::anyhow!(shortage)),
    }
}

/// Number of files that this process may open; `None` without a limit.
pub fn room() -> Option<u64> {
    usage().map(|(limit, in_use)| limit.saturating_sub(in_use))
}

/// Limit of open files, and number of open files. `None` if there is no limit.
fn usage() -> Option<(u64, u64)> {
    // A sandboxed process must not query the limit, so the stored value is used.
    let limit = (*LIMIT.get_or_init(|| getrlimit(Resource::Nofile).current))?;
    Some((limit, in_use().unwrap_or(limit)))
}

fn open_files() -> Option<File> {
    File::open("/proc/self/fd").ok()
}

/// Number of open files; `None` if there is no room for another one.
fn in_use() -> Option<u64> {
    if let Some(directory) = OPEN_FILES.get_or_init(open_files)
        && let Ok(status) = statx(directory, "", AtFlags::EMPTY_PATH, StatxFlags::SIZE)
        && status.stx_size != 0
    {
        return Some(status.stx_size);
    }
    // Kernels before 6.2 do not report the number of open files as this size. There, a new
    // descriptor is opened: it has the lowest free number. This is the number of open files, unless
    // a descriptor with a lower number than another open one was closed.
    let lowest = fcntl_dupfd_cloexec(rustix::stdio::stderr(), 0).ok()?;
    Some(lowest.as_raw_fd().unsigned_abs().into())
}

/// Message if `limit` is too low for `needed` more files.
fn shortage(limit: u64, in_use: u64, needed: u64) -> Option<String> {
    let sufficient = in_use.saturating_add(needed);
    (sufficient > limit).then(|| {
        format!(
            "{in_use} of at most {limit} open files are in use, and clients need {needed} more: \
             raise the hard limit of open files (`ulimit -Hn`, or LimitNOFILE= of the service's \
             unit) to at least {sufficient}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_has_the_sufficient_limit() {
        assert_eq!(shortage(512, 480, 32), None);
        let message = shortage(512, 481, 32).unwrap();
        assert!(message.contains("481 of at most 512 open files"), "{message}");
        assert!(message.ends_with("to at least 513"), "{message}");
        check_room(1).unwrap();
        let error = check_room(u64::MAX).unwrap_err();
        assert!(error.to_string().contains("LimitNOFILE="), "{error}");
    }

    /// Closed files do not count, and open files with higher numbers do.
    #[test]
    fn open_files_are_counted_with_holes_between_them() {
        let mut files: Vec<_> = (0..600).map(|_| File::open("/dev/null").unwrap()).collect();
        // The lowest free number is then among the closed files.
        files.drain(..200);
        let (_, in_use) = usage().unwrap();
        let listed = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        // Other tests of this process open and close files meanwhile.
        assert!(in_use >= 400 && in_use.abs_diff(listed) < 100, "{in_use}, {listed}");
    }

    #[test]
    fn the_descriptor_table_is_enlarged_in_advance() {
        raise();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        let most = getrlimit(Resource::Nofile).current.unwrap_or(TABLE_ENTRIES).min(TABLE_ENTRIES);
        assert!(size.trim().parse::<u64>().unwrap() >= most, "{size}");
    }
}
