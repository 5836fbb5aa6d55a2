//! Deterministic random number generator for workloads.

/// xorshift64* generator: a few instructions per number, and random enough to spread I/Os.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// Generator whose sequence depends on `seed`, which may be any number.
    pub(crate) fn new(seed: u64) -> Self {
        // splitmix64, so that similar seeds give unrelated states. A state of zero would stay zero.
        let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self((z ^ z >> 31).max(1))
    }

    /// Next number.
    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Number below `bound`, computed without a division.
    #[inline]
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_of_zero_gives_random_numbers() {
        assert!(Rng::new(0).next() != 0);
    }
}
