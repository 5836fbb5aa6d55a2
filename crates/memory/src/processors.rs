//! On which processors this process may run.

use rustix::thread::{CpuSet, sched_getaffinity};
use std::sync::OnceLock;

static SETTLED: OnceLock<CpuSet> = OnceLock::new();

/// The processors of this process: those of its first thread. As they were [settled](settle).
#[must_use]
pub fn processors() -> CpuSet {
    SETTLED.get().copied().unwrap_or_else(ask)
}

/// From now on the [`processors`] are those of now, and the system is not asked any more: for a
/// process that is about to give up that system call. The allocator of the GNU C library asks for
/// their number when there are several threads; it is told what it would make of it.
pub fn settle() {
    let processors = SETTLED.get_or_init(ask);
    #[cfg(target_env = "gnu")]
    {
        let arenas = i32::try_from(processors.count()).unwrap_or(1).max(1).saturating_mul(8);
        // SAFETY: it sets a number of the allocator's.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, arenas) };
    }
}

fn ask() -> CpuSet {
    sched_getaffinity(Some(rustix::process::getpid())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_of_another_thread_do_not_count() {
        let all = processors();
        assert!(all.count() > 0);
        std::thread::spawn(move || {
            let one = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
            let mut pinned = CpuSet::new();
            pinned.set(one);
            rustix::thread::sched_setaffinity(None, &pinned).unwrap();
            assert!(processors() == all);
            settle();
            assert!(processors() == all);
        })
        .join()
        .unwrap();
    }
}
