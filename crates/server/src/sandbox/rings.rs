//! io_uring instances, created before the seccomp filter closes.
//!
//! seccomp does not see the requests of an instance, and Landlock does not restrict all of them. So
//! the filter forbids the creation of instances, and the existing ones accept only the kinds of
//! requests that the server makes.

use rustix::process::{Resource, getrlimit};
use shadowbell_disk_file::prepare_rings;
use shadowbell_memory::prepare_signals;
use shadowbell_vfio_user::server::prepare_exchange;
use tracing::warn;

/// Number of instances for files, in addition to those of the shared I/O threads: for I/O threads
/// of one controller, clients of exports, and other threads with disk queues. If more threads open
/// disk queues, these queues use helper threads instead of io_uring.
const MORE_THREADS: usize = 64;
/// Number of instances for signals to eventfds of VMMs, for each shared I/O thread. An instance
/// signals one eventfd by one system call; a signal to an eventfd without an instance takes three.
const EVENTFDS: usize = 64;
/// Number of instances for replies to clients. The process has one reactor.
const REACTORS: usize = 1;
/// Divisor of the descriptor limit: the instances for [`MORE_THREADS`] may use a sixteenth of the
/// limit, and so may the instances for [`EVENTFDS`].
const PART: u64 = 16;

/// Numbers of created instances.
pub(super) struct Rings {
    /// Number of instances for signals. If it is 0, Linux AIO is used.
    pub(super) signals: usize,
}

/// Creates the instances for a server with `workers` shared I/O threads.
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
