//! Processor time and context switches of a thread.

use std::time::Duration;

/// Resource usage of the calling thread since its start.
///
/// If an access to a peer's memory takes long, there are three possible causes: the thread
/// computes, the thread waits for the peer (a page fault waits while the peer punches a hole at
/// this place), or the scheduler runs another thread. The thread and the peer are not responsible
/// for the third cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ThreadUsage {
    /// Processor time, in user space and in the kernel.
    pub processor: Duration,
    /// Part of `processor` that was spent in user space. The kernel may only estimate it.
    pub user: Duration,
    /// Voluntary context switches: the thread waited for something other than a processor.
    pub waits: u64,
    /// Voluntary and involuntary context switches.
    pub switches: u64,
    /// Page faults for which the thread waited for storage.
    pub major_faults: u64,
}

impl ThreadUsage {
    /// Reads the usage by one system call.
    #[must_use]
    pub fn now() -> Self {
        let Some(usage) = usage(libc::RUSAGE_THREAD) else { return Self::default() };
        let time = |time: libc::timeval| {
            let micros = u64::try_from(time.tv_usec).unwrap_or(0);
            Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0))
                + Duration::from_micros(micros)
        };
        let waits = u64::try_from(usage.ru_nvcsw).unwrap_or(0);
        Self {
            processor: time(usage.ru_utime) + time(usage.ru_stime),
            user: time(usage.ru_utime),
            waits,
            switches: waits + u64::try_from(usage.ru_nivcsw).unwrap_or(0),
            major_faults: u64::try_from(usage.ru_majflt).unwrap_or(0),
        }
    }
}

/// Minor page faults of all threads of this process.
pub(crate) fn process_faults() -> u64 {
    usage(libc::RUSAGE_SELF).map_or(0, |usage| u64::try_from(usage.ru_minflt).unwrap_or(0))
}

fn usage(who: libc::c_int) -> Option<libc::rusage> {
    // SAFETY: all zeroes is a valid `rusage`, which has numbers only.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one `rusage` to the pointer, which refers to a local variable.
    let outcome = unsafe { libc::getrusage(who, &raw mut usage) };
    (outcome == 0).then_some(usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_and_switches_are_counted() {
        let before = ThreadUsage::now();
        let mut sum = 0u64;
        // The thread computes until it has used a measurable amount of processor time.
        while ThreadUsage::now().processor - before.processor < Duration::from_millis(5) {
            sum = std::hint::black_box(sum + 1);
        }
        let worked = ThreadUsage::now();
        // The sleep is at least one wait. A longer sleep does not matter.
        std::thread::sleep(Duration::from_millis(1));
        let slept = ThreadUsage::now();
        assert!(slept.waits > worked.waits);
        assert!(slept.switches - worked.switches >= slept.waits - worked.waits);
        assert!(worked.user <= worked.processor);
    }
}
