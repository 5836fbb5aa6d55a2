//! Decoder of a program: reads an input byte by byte.

use arbitrary::Unstructured;

/// Rest of an input. At the end of the input, all further values are zero.
pub(crate) struct Source<'a>(Unstructured<'a>);

impl<'a> Source<'a> {
    pub(crate) fn new(input: &'a [u8]) -> Self {
        Self(Unstructured::new(input))
    }

    /// True if the input is used up.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn u8(&mut self) -> u8 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn u16(&mut self) -> u16 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn u32(&mut self) -> u32 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn u64(&mut self) -> u64 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn bool(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// A number from 0 to `end - 1`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0.int_in_range(0..=end.saturating_sub(1)).unwrap_or(0)
    }

    /// True once in `n` times on average. At the end of the input, always false.
    pub(crate) fn rarely(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }

    /// One of `choices`.
    pub(crate) fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Up to `most` bytes of the input. The input contains their number before them.
    pub(crate) fn bytes(&mut self, most: usize) -> Vec<u8> {
        let len = self.below(most + 1);
        self.exactly(len)
    }

    /// Exactly `len` bytes.
    pub(crate) fn exactly(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let _ = self.0.fill_buffer(&mut bytes);
        bytes
    }

    /// Returns `len` bytes that differ from their neighbours. They depend on one byte of the input.
    pub(crate) fn pattern(&mut self, len: usize) -> Vec<u8> {
        let seed = self.u8();
        (0..len).map(|n| (n as u8).wrapping_mul(7) ^ (n >> 8) as u8 ^ seed).collect()
    }

    /// A number for a field: mostly one of the values `usual` or next to one, and sometimes any
    /// value.
    pub(crate) fn near(&mut self, usual: &[u64]) -> u64 {
        match self.below(9) {
            0..=4 => self.of(usual),
            5 => self.of(usual).wrapping_add(u64::from(self.u8())),
            6 => self.of(usual).wrapping_sub(u64::from(self.u8())),
            7 => self.of(&[u64::MAX, 0, 1 << 63, u64::MAX - 4095, u32::MAX.into()]),
            _ => self.u64(),
        }
    }
}
