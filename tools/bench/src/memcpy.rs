//! Memory bandwidth: a thread that copies blocks, like a controller with a memory disk.

use std::hint::black_box;
use std::time::{Duration, Instant};

use ::shadowbell_memory::{Mapping, SharedBytes};
use anyhow::{Context, Result, anyhow, bail};

use crate::machine::pin;

/// Memory of a disk, and memory of a host that reads and writes it.
///
/// The disk's memory has the same mapping type as that of a memory disk.
pub(crate) struct Memory {
    disk: SharedBytes,
}

/// Number of bytes that are copied between two reads of the clock.
const CHUNK: usize = 1 << 20;

impl Memory {
    /// Allocates a disk of `bytes` bytes, with all pages present.
    ///
    /// # Errors
    ///
    /// The system has not enough memory.
    pub(crate) fn new(bytes: usize) -> Result<Self> {
        let mapping = Mapping::anonymous(bytes as u64)?;
        mapping.prefer_huge_pages();
        let disk = mapping.bytes();
        disk.fill(0, bytes, 0xa5).context("the memory is smaller than requested")?;
        Ok(Self { disk })
    }

    /// Copies blocks from random offsets of the disk to the host's buffers, one after the other,
    /// or, if `write` is true, from the buffers to the disk. The copying thread runs on CPU `cpu`
    /// for `time`. Returns bytes per second.
    pub(crate) fn copy(
        &self,
        cpu: usize,
        block: usize,
        buffers: usize,
        write: bool,
        time: Duration,
    ) -> Result<f64> {
        let blocks = self.disk.len() / block.max(1);
        if block == 0 || buffers == 0 || blocks == 0 {
            bail!("nothing to copy: {buffers} buffers of {block} bytes");
        }
        let disk = &self.disk;
        let work = move || -> Result<f64> {
            pin(cpu)?;
            let mut host = vec![0x5au8; block * buffers];
            let (mut state, mut turn, mut copied) = (0x9e37_79b9_7f4a_7c15u64, 0, 0u64);
            let began = Instant::now();
            loop {
                for _ in 0..CHUNK.div_ceil(block) {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let at = ((u128::from(state) * blocks as u128) >> 64) as usize * block;
                    let from = turn * block;
                    turn = if turn + 1 < buffers { turn + 1 } else { 0 };
                    let buffer = &mut host[from..from + block];
                    let done = if write {
                        disk.write_from(at, buffer)
                    } else {
                        disk.read_into(at, buffer)
                    };
                    done.context("a block lies outside of the disk")?;
                    black_box(buffer);
                    copied += block as u64;
                }
                let elapsed = began.elapsed();
                if elapsed >= time {
                    return Ok(copied as f64 / elapsed.as_secs_f64());
                }
            }
        };
        std::thread::scope(|scope| scope.spawn(work).join())
            .map_err(|_| anyhow!("the copying thread panicked"))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_copied_in_the_right_direction() {
        let mine = rustix::thread::sched_getaffinity(None).unwrap();
        let cpu = (0..).find(|cpu| mine.is_set(*cpu)).unwrap();
        let memory = Memory::new(1 << 16).unwrap();
        let all = |byte: u8| {
            let mut bytes = vec![0; 1 << 16];
            memory.disk.read_into(0, &mut bytes).unwrap();
            bytes.iter().all(|b| *b == byte)
        };
        // Duration of a measurement, not a limit.
        let time = Duration::from_millis(5);
        assert!(memory.copy(cpu, 4096, 3, false, time).unwrap() > 0.0);
        assert!(all(0xa5));
        // Thousands of blocks are copied to 16 offsets at random, so each offset is written.
        assert!(memory.copy(cpu, 4096, 3, true, time).unwrap() > 0.0);
        assert!(all(0x5a));
        for (block, buffers) in [(0, 1), (4096, 0), (1 << 20, 1)] {
            assert!(memory.copy(cpu, block, buffers, false, time).is_err(), "{block} {buffers}");
        }
    }
}
