//! Processors on which this process may run (CPU affinity).

use rustix::thread::{CpuSet, sched_getaffinity};
use std::sync::OnceLock;

static STORED: OnceLock<CpuSet> = OnceLock::new();

/// CPU affinity of the first thread of this process. After [`store_affinity`], the value that it
/// stored.
#[must_use]
pub fn processors() -> CpuSet {
    STORED.get().copied().unwrap_or_else(query)
}

/// Stores the current CPU affinity, so that [`processors`] needs no system call any more. For a
/// process that will forbid this system call by seccomp.
///
/// The allocator of glibc also queries the number of processors when several threads exist.
/// Therefore its limit of arenas is set to the value that it would compute.
pub fn store_affinity() {
    let processors = STORED.get_or_init(query);
    #[cfg(target_env = "gnu")]
    {
        let arenas = i32::try_from(processors.count()).unwrap_or(1).max(1).saturating_mul(8);
        // SAFETY: the call sets a parameter of the allocator.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, arenas) };
    }
}

fn query() -> CpuSet {
    sched_getaffinity(Some(rustix::process::getpid())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinning_another_thread_does_not_change_the_process_affinity() {
        let all = processors();
        assert!(all.count() > 0);
        std::thread::spawn(move || {
            let one = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
            let mut pinned = CpuSet::new();
            pinned.set(one);
            rustix::thread::sched_setaffinity(None, &pinned).unwrap();
            assert!(processors() == all);
            store_affinity();
            assert!(processors() == all);
        })
        .join()
        .unwrap();
    }
}
