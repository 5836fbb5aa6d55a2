//! In-flight limits of one controller on one I/O thread.
//!
//! In-flight commands cost memory of the server process, and their completion costs I/O thread
//! time. So the server limits them, independently of the guest's queue sizes. At a limit, nothing
//! more is fetched from the controller's queues until a command ends: further commands wait in
//! guest memory, where they cost nothing. This is no error, and the guest sees only latency.
//!
//! # Touched memory spans
//!
//! Distinguishes a large working set of a host from sparse touches.
//!
//! A page table covers 2 MiB, and a second touch in the same 2 MiB creates no further page table.
//! An ordinary host with much memory returns to the same spans; a host that makes the kernel
//! allocate page tables touches new ones. So only the first touch of a span since the last reclaim
//! of page tables is counted.

use shadowbell_memory::page_tables;

/// In-flight limits of a controller on each I/O thread. The defaults exceed the needs of ordinary
/// guests: they keep any storage busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quota {
    /// Disk requests in flight. A command is one or more requests.
    pub requests: usize,
    /// Bytes of data of in-flight requests.
    pub bytes: u64,
    /// Pieces of host memory that the data of in-flight requests lie in.
    pub pieces: usize,
    /// In-flight commands of several steps, for each type: Copy; commands of many requests, such as
    /// Dataset Management; reads with Force Unit Access on a disk with a volatile cache; commands
    /// that require exclusive execution.
    pub long_commands: usize,
}

impl Default for Quota {
    fn default() -> Self {
        Self { requests: 2048, bytes: 1 << 30, pieces: 1 << 17, long_commands: 64 }
    }
}

/// Quota that is reached, with its name for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exceeded {
    Requests,
    Bytes,
    Pieces,
    MultiStepCommands,
}

impl std::fmt::Display for Exceeded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Requests => "requests",
            Self::Bytes => "bytes of data",
            Self::Pieces => "pieces of host memory",
            Self::MultiStepCommands => "Copy or Dataset Management commands",
        })
    }
}

/// Cost estimates of work, in nanoseconds of I/O thread time. They decide how much work of a
/// controller is done before other controllers get their turn. With several controllers, the real
/// cost is measured afterwards.
pub(super) mod cost {
    /// Command that a disk completes inline, without its data.
    const COMMAND: i64 = 64;
    /// Request that a disk executes asynchronously, including its completion.
    const REQUEST: i64 = 1500;
    /// Bytes copied per nanosecond, as a power of two.
    const BYTES_SHIFT: u32 = 4;

    /// SGL descriptor and its piece of memory.
    const PIECE: i64 = 24;

    /// Command that ends in an error. The work before the error is unknown, and the error is
    /// written to the Error Information log.
    pub(crate) const FAILURE: i64 = 5000;

    /// Cost to resolve `pieces` pieces of memory.
    pub(crate) fn of_pieces(pieces: usize) -> i64 {
        pieces as i64 * PIECE
    }

    /// Read or write of up to [`SHORT_BYTES`] that a disk completes inline. This is an upper bound,
    /// charged per command without a look at its size.
    pub(crate) const SHORT: i64 = 300;
    /// Maximum size of a short read or write, in bytes.
    pub(crate) const SHORT_BYTES: u64 = 8192;

    /// Cost of a command of `bytes` bytes that a disk completed inline.
    #[inline(always)]
    pub(crate) fn of_command(bytes: u64) -> i64 {
        (bytes >> BYTES_SHIFT) as i64 + COMMAND
    }

    /// Cost of a request of `bytes` bytes that is in flight; its submission may copy the data.
    pub(crate) fn of_request(bytes: u64) -> i64 {
        (bytes >> BYTES_SHIFT) as i64 + REQUEST
    }
}

/// Maximum number of spans that are remembered at a time: 128 GiB.
const MOST: u64 = 1 << 16;
/// Bytes per span, as a power of two.
const SHIFT: u32 = page_tables::SPAN.trailing_zeros();

/// Spans of a host's memory touched since the last reclaim of page tables.
#[derive(Debug, Default)]
pub(super) struct TouchedSpans {
    /// [`page_tables::epoch`] at the last call.
    epoch: u64,
    /// Number of times that all spans were forgotten.
    generation: u32,
    /// Span that was touched last and the generation of that touch, by span number modulo the
    /// length. Two spans of one slot evict each other and are counted again.
    seen: Vec<(u32, u32)>,
}

impl TouchedSpans {
    /// Sets the amount of host memory; 0 forgets all spans.
    pub(super) fn resize(&mut self, bytes: u64) {
        let len = match bytes {
            0 => 0,
            _ => (bytes >> SHIFT).clamp(1, MOST).next_power_of_two() as usize,
        };
        if len != self.seen.len() {
            self.seen = vec![(0, 0); len];
            self.generation = 0;
        }
    }

    /// Forgets all touched spans.
    pub(super) fn forget(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            self.seen.fill((0, 0));
        }
    }

    /// Number of spans in these pieces (address, length) that were not touched before; marks them
    /// as touched.
    pub(super) fn touch(&mut self, pieces: impl Iterator<Item = (usize, usize)>) -> usize {
        let epoch = page_tables::epoch();
        if epoch != self.epoch {
            self.epoch = epoch;
            self.forget();
        }
        let mask = self.seen.len().wrapping_sub(1);
        let mut fresh = 0;
        for (address, len) in pieces {
            for span in address >> SHIFT..=(address + len.saturating_sub(1)) >> SHIFT {
                // A span number of 0 or above 32 bits is no valid address of a process.
                let now = (u32::try_from(span).unwrap_or(0), self.generation);
                let Some(seen) = self.seen.get_mut(span & mask) else { return fresh };
                fresh += usize::from(std::mem::replace(seen, now) != now || now.0 == 0);
            }
        }
        fresh
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_memory::{Mapping, Segments};

    #[test]
    fn a_part_counts_once_until_page_tables_go() {
        let span = 1usize << SHIFT;
        let mapping = Mapping::shared("spans", 16 * span as u64).unwrap();
        // An offset at which a piece of 512 bytes is far from a span's borders, at any address.
        let middle = (span - mapping.address() % span + span / 2) % span;
        let at = |n: usize, len| Segments::from_bytes(&mapping.bytes().slice(n, len).unwrap());
        let mut spans = TouchedSpans::default();
        spans.resize(1 << 30);
        let mut touch = |data: &Segments| {
            spans.touch(data.pieces().iter().map(|piece| (piece.address(), piece.len())))
        };
        assert_eq!(touch(&at(middle, 512)), 1);
        assert_eq!(touch(&at(middle + 4096, 512)), 0);
        assert_eq!(touch(&at(middle, 3 * span)), 3);
        assert_eq!(touch(&at(middle, 3 * span)), 0);
        assert_eq!(touch(&at(middle + 9 * span, 512)), 1);
        // After an unmapping, another mapping may have the same address, so the epoch changes.
        drop(Mapping::shared("another", 8 << 20).unwrap());
        assert_eq!(touch(&at(middle, 3 * span)), 4);
    }
}
