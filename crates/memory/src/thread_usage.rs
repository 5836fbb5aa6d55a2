//! What a thread has used.

use std::time::Duration;

/// What the calling thread has used since it began.
///
/// Time that passes while a thread works on a peer's memory can have three reasons: it computes, it
/// waits for the peer (a page fault waits for whoever punches a hole there), or the system gave the
/// processor to somebody else. Only the third is nobody's doing here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ThreadUsage {
    /// Processor time, in user space and in the kernel.
    pub processor: Duration,
    /// How much of it was in user space, as far as the system tells them apart.
    pub user: Duration,
    /// How often it has waited for something, and not merely for a processor.
    pub waits: u64,
    /// How often it has waited, or lost its processor to somebody else.
    pub switches: u64,
}

impl ThreadUsage {
    /// As of now. A system call.
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
        }
    }
}

/// The page faults of all threads of this process that needed no disk.
pub(crate) fn process_faults() -> u64 {
    usage(libc::RUSAGE_SELF).map_or(0, |usage| u64::try_from(usage.ru_minflt).unwrap_or(0))
}

fn usage(who: libc::c_int) -> Option<libc::rusage> {
    // SAFETY: all zeroes is a valid `rusage`, which has numbers only.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one `rusage` to where the pointer says, which is ours.
    let outcome = unsafe { libc::getrusage(who, &raw mut usage) };
    (outcome == 0).then_some(usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_and_waits_are_seen() {
        let before = ThreadUsage::now();
        let mut sum = 0u64;
        // Enough work to be seen.
        while ThreadUsage::now().processor - before.processor < Duration::from_millis(5) {
            sum = std::hint::black_box(sum + 1);
        }
        let worked = ThreadUsage::now();
        // One wait; longer is as good.
        std::thread::sleep(Duration::from_millis(1));
        let slept = ThreadUsage::now();
        assert!(slept.waits > worked.waits);
        assert!(slept.switches - worked.switches >= slept.waits - worked.waits);
        assert!(worked.user <= worked.processor);
    }
}
