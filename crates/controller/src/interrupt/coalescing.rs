//! Interrupt Coalescing, where the host asks for it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Interrupt Coalescing (feature 08h) and Interrupt Vector Configuration (09h), as workers read
/// them. Base 2.1, "Interrupt Coalescing".
#[derive(Debug, Default)]
pub(crate) struct Coalescing {
    /// Aggregation Threshold in bits 7:0 (0's based), Aggregation Time in 15:8 (units of 100 µs).
    setting: AtomicU32,
    /// A bit a vector: coalescing disabled.
    disabled: [AtomicU64; 2],
}

/// What coalescing asks of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Aggregation {
    /// Completions that raise the interrupt at once.
    pub(crate) threshold: u32,
    /// The longest that a completion waits for others.
    pub(crate) time: Duration,
}

impl Coalescing {
    pub(crate) fn set(&self, threshold: u8, time: u8) {
        self.setting.store(u32::from(threshold) | u32::from(time) << 8, Ordering::Relaxed);
    }

    pub(crate) fn disable(&self, vector: u16, disabled: bool) {
        let Some(word) = self.disabled.get(usize::from(vector / 64)) else { return };
        let bit = 1 << (vector % 64);
        if disabled {
            word.fetch_or(bit, Ordering::Relaxed);
        } else {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    pub(crate) fn reset(&self) {
        self.setting.store(0, Ordering::Relaxed);
        self.disabled.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// `None` if `vector`'s interrupts are not to be held back. A threshold or a time of 0 means
    /// that, and vector 0, the admin queue's, never is (the clause speaks of I/O queues only).
    pub(crate) fn of(&self, vector: u16) -> Option<Aggregation> {
        let setting = self.setting.load(Ordering::Relaxed);
        let (threshold, time) = (setting & 0xff, setting >> 8 & 0xff);
        if threshold == 0 || time == 0 || vector == 0 {
            return None;
        }
        let word = self.disabled.get(usize::from(vector / 64))?.load(Ordering::Relaxed);
        (word >> (vector % 64) & 1 == 0).then(|| Aggregation {
            threshold: threshold + 1,
            time: Duration::from_micros(u64::from(time) * 100),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coalescing_is_per_vector_and_off_at_zero() {
        let c = Coalescing::default();
        assert_eq!(c.of(1), None);
        c.set(7, 3);
        let a = c.of(1).unwrap();
        assert_eq!((a.threshold, a.time.as_micros()), (8, 300));
        assert_eq!(c.of(0), None);
        c.disable(1, true);
        assert_eq!(c.of(1), None);
        assert!(c.of(65).is_some());
        c.disable(1, false);
        assert!(c.of(1).is_some());
        c.disable(1000, true);
        c.set(7, 0);
        assert_eq!(c.of(1), None);
    }
}
