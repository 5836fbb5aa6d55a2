//! How many files this process may have open.

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use tracing::debug;

/// For so many files there is room in the system's table of this process from the beginning: half a
/// megabyte. It doubles when it is full, and all threads that open a file then wait until every
/// processor has noticed (RCU), which is 10 to 30 ms: for all guests, if it is the thread of their
/// registers.
const ROOM: u64 = 1 << 16;

/// Raises the limit of open files as far as the system allows, and makes room for many. A guest
/// with many queues has a descriptor for each interrupt, and there may be many guests. Nothing here
/// uses `select`, which is what the low limit is for.
pub(crate) fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    if current != maximum
        && let Err(errno) = setrlimit(Resource::Nofile, raised)
    {
        debug!("the limit of open files stays at {current:?}: {errno}");
    }
    let most = getrlimit(Resource::Nofile).current.unwrap_or(ROOM).min(ROOM);
    let last = i32::try_from(most.saturating_sub(1)).unwrap_or(0);
    // The table stays as long as it was once.
    let there = File::open("/dev/null").and_then(|file| Ok(fcntl_dupfd_cloexec(file, last)?));
    if let Err(error) = there {
        debug!("no room for {most} open files: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_all_files_before_they_are_opened() {
        raise();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        let most = getrlimit(Resource::Nofile).current.unwrap_or(ROOM).min(ROOM);
        assert!(size.trim().parse::<u64>().unwrap() >= most, "{size}");
    }
}
