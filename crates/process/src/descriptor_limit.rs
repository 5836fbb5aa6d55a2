//! Limit of open files, and size of the kernel's descriptor table.

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use tracing::debug;

/// Initial size of this process's descriptor table in the kernel, which takes half a megabyte. If
/// the table is full, the kernel doubles it, and threads that open a file meanwhile wait for an RCU
/// grace period of 10 to 30 ms. Such a wait of the thread that handles registers would delay all
/// guests.
const TABLE_ENTRIES: u64 = 1 << 16;

/// Raises the soft limit of open files to the hard limit, and enlarges the descriptor table. A
/// guest with many queues needs a descriptor per interrupt. The soft limit is low by default for
/// programs that use `select`, which this program does not.
pub fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    if current != maximum
        && let Err(errno) = setrlimit(Resource::Nofile, raised)
    {
        debug!("the limit of open files stays at {current:?}: {errno}");
    }
    let most = getrlimit(Resource::Nofile).current.unwrap_or(TABLE_ENTRIES).min(TABLE_ENTRIES);
    let last = i32::try_from(most.saturating_sub(1)).unwrap_or(0);
    // Opening one descriptor with a large number enlarges the table. The kernel never shrinks it.
    let there = File::open("/dev/null").and_then(|file| Ok(fcntl_dupfd_cloexec(file, last)?));
    if let Err(error) = there {
        debug!("no room for {most} open files: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_descriptor_table_is_enlarged_in_advance() {
        raise();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        let most = getrlimit(Resource::Nofile).current.unwrap_or(TABLE_ENTRIES).min(TABLE_ENTRIES);
        assert!(size.trim().parse::<u64>().unwrap() >= most, "{size}");
    }
}
