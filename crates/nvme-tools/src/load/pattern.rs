//! Sequence of offsets and directions of I/Os.

use crate::rng::Rng;

/// I/O: its position in the job's share, in multiples of the I/O size, and its direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Io {
    pub(super) index: u64,
    pub(super) write: bool,
}

/// Endless sequence of I/Os.
#[derive(Clone, Debug)]
pub(super) struct Pattern {
    rng: Rng,
    /// Number of I/Os that fit into the job's part of the namespace.
    ios: u64,
    random: bool,
    next: u64,
    /// An I/O is a read if a 32-bit random number is below this.
    reads_below: u64,
}

impl Pattern {
    pub(super) fn new(ios: u64, random: bool, percent_read: u8, seed: u64) -> Self {
        let reads_below = (u64::from(percent_read) << 32) / 100;
        Self { rng: Rng::new(seed), ios, random, next: 0, reads_below }
    }

    #[inline]
    pub(super) fn next(&mut self) -> Io {
        let index = if self.random {
            self.rng.below(self.ios)
        } else {
            let index = self.next;
            self.next = if index + 1 < self.ios { index + 1 } else { 0 };
            index
        };
        let write = match self.reads_below {
            0 => true,
            0x1_0000_0000 => false,
            bound => self.rng.next() >> 32 >= bound,
        };
        Io { index, write }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_offsets_are_uniform() {
        let mut pattern = Pattern::new(10, true, 100, 1);
        let mut hits = [0u32; 10];
        for _ in 0..100_000 {
            let io = pattern.next();
            assert!(!io.write);
            hits[io.index as usize] += 1;
        }
        assert!(hits.iter().all(|&n| (9_500..10_500).contains(&n)), "{hits:?}");
    }

    #[test]
    fn a_sequential_pattern_wraps_around() {
        let mut pattern = Pattern::new(3, false, 0, 1);
        let order: Vec<_> = (0..7).map(|_| pattern.next().index).collect();
        assert_eq!(order, [0, 1, 2, 0, 1, 2, 0]);
        assert!(pattern.next().write);
    }

    #[test]
    fn a_mix_has_the_requested_share_of_reads() {
        for percent in [1, 30, 70, 99] {
            let mut pattern = Pattern::new(1000, true, percent, 7);
            let reads = (0..100_000).filter(|_| !pattern.next().write).count();
            let wanted = usize::from(percent) * 1000;
            assert!(reads.abs_diff(wanted) < 700, "{percent} %: {reads}");
        }
    }

    #[test]
    fn the_seed_determines_the_pattern() {
        let run = |seed| {
            let mut pattern = Pattern::new(1 << 40, true, 50, seed);
            (0..100).map(|_| pattern.next()).collect::<Vec<_>>()
        };
        assert_eq!(run(3), run(3));
        assert_ne!(run(3), run(4));
    }
}
