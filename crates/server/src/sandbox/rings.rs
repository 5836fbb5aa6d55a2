//! io_uring instances, created before the seccomp filter closes.
//!
//! seccomp does not see the requests of an instance, some of which pass Landlock too. So the filter
//! forbids to create instances, and the existing ones accept only the requests that their users
//! make.

use rustix::process::{Resource, getrlimit};
use shadowbell_disk_file::prepare_rings;
use shadowbell_memory::prepare_signals;
use shadowbell_vfio_user::server::prepare_exchange;
use tracing::warn;

/// Instances for files, besides those of the shared I/O threads: for I/O threads of one controller,
/// clients of exports, and other threads with disk queues. The queues of further threads use
/// threads for their calls.
const MORE_THREADS: usize = 64;
/// Instances for signals to eventfds of VMMs, for each shared I/O thread. Each signals one eventfd
/// by one system call; a signal to a further eventfd takes three.
const EVENTFDS: usize = 64;
/// Instances for replies to clients. The process has one reactor.
const REACTORS: usize = 1;
/// Part of the descriptors that instances for many threads or eventfds may use, of each kind.
const PART: u64 = 16;

/// Numbers of instances.
pub(super) struct Rings {
    /// For signals. If there are none, Linux AIO is used.
    pub(super) signals: usize,
}

/// Creates the instances, for `workers` shared I/O threads.
pub(super) fn prepare(workers: usize) -> Rings {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let most = |count: usize| count.min((descriptors / PART) as usize);
    prepare_exchange(REACTORS);
    let signals = prepare_signals(most(EVENTFDS * workers));
    if prepare_rings(workers, most(MORE_THREADS)) == 0 {
        warn!(
            "the sandbox permits no io_uring, so disks use threads: the kernel has no restrictions \
             of io_uring (before Linux 5.10), or forbids it (kernel.io_uring_disabled)"
        );
    }
    Rings { signals }
}
