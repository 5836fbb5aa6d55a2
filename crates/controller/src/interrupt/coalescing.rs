//! Interrupt Coalescing as set by the host.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Settings of Interrupt Coalescing (feature 08h) and Interrupt Vector Configuration (09h), read by
/// I/O threads. Base 2.1, "Interrupt Coalescing".
#[derive(Debug, Default)]
pub(crate) struct Coalescing {
    /// Aggregation Threshold in bits 7:0 (0's based), Aggregation Time in 15:8 (units of 100 µs),
    /// and bit 16 if the host has set them.
    setting: AtomicU32,
    /// Bit per vector: coalescing disabled.
    disabled: [AtomicU64; 2],
}

/// Coalescing setting of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// The host has set nothing: the controller moderates interrupts by itself.
    None,
    /// Interrupts are raised at once.
    AtOnce,
    /// Interrupts are aggregated within these limits.
    Aggregate(Aggregation),
}

/// Aggregation limits of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Aggregation {
    /// Number of completions at which the interrupt is raised.
    pub(crate) threshold: u32,
    /// Maximum time for which a completion waits for others.
    pub(crate) time: Duration,
}

impl Coalescing {
    pub(crate) fn set(&self, threshold: u8, time: u8) {
        let setting = u32::from(threshold) | u32::from(time) << 8 | CHOSEN;
        self.setting.store(setting, Ordering::Relaxed);
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

    /// Setting of `vector`. A threshold or a time of 0 disables coalescing, as does feature 09h
    /// for a single vector. Vector 0, of the admin queue, is never aggregated, because the clause
    /// applies to I/O queues only.
    pub(crate) fn of(&self, vector: u16) -> Wish {
        let setting = self.setting.load(Ordering::Relaxed);
        let disabled = &self.disabled.get(usize::from(vector / 64));
        let disabled = disabled.map_or(0, |word| word.load(Ordering::Relaxed));
        if disabled >> (vector % 64) & 1 != 0 {
            return Wish::AtOnce;
        }
        if setting & CHOSEN == 0 {
            return Wish::None;
        }
        let (threshold, time) = (setting & 0xff, setting >> 8 & 0xff);
        if threshold == 0 || time == 0 || vector == 0 {
            return Wish::AtOnce;
        }
        Wish::Aggregate(Aggregation {
            threshold: threshold + 1,
            time: Duration::from_micros(u64::from(time) * 100),
        })
    }
}

/// Flag: the host has set Interrupt Coalescing.
const CHOSEN: u32 = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coalescing_is_per_vector_and_off_at_zero() {
        let c = Coalescing::default();
        assert_eq!(c.of(1), Wish::None);
        c.set(7, 3);
        let aggregation = Aggregation { threshold: 8, time: Duration::from_micros(300) };
        assert_eq!(c.of(1), Wish::Aggregate(aggregation));
        assert_eq!(c.of(0), Wish::AtOnce);
        c.disable(1, true);
        assert_eq!(c.of(1), Wish::AtOnce);
        assert_eq!(c.of(65), Wish::Aggregate(aggregation));
        c.disable(1, false);
        assert_eq!(c.of(1), Wish::Aggregate(aggregation));
        c.disable(1000, true);
        c.set(7, 0);
        assert_eq!(c.of(1), Wish::AtOnce);
        c.reset();
        assert_eq!(c.of(1), Wish::None);
    }
}
