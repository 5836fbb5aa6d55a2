//! In-flight limits of one controller on one I/O thread.
//!
//! In-flight commands occupy memory of the server process, and their completion takes I/O thread
//! time. So the server limits them, independently of the guest's queue sizes. At a limit, the I/O
//! thread fetches no commands of the controller until one ends. Waiting commands remain in guest
//! memory, at no cost for the server. A reached limit is not an error; the guest only sees higher
//! latency.
//!
//! # Touched memory spans
//!
//! The kernel allocates page tables for the host memory that the server touches. The server
//! therefore distinguishes a host with a large working set from one that touches memory sparsely,
//! to make the kernel allocate many page tables.
//!
//! A page table covers a span of 2 MiB. A second touch of the same span creates no further page
//! table. An ordinary host with much memory returns to the same spans. A host that makes the kernel
//! allocate page tables touches new ones. So only the first touch of a span since the last reclaim
//! of page tables is counted.

use shadowbell_memory::page_tables;

/// In-flight limits of a controller on each I/O thread. With the defaults, an ordinary guest can
/// keep any storage busy without reaching a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quota {
    /// Disk requests in flight. A command is one or more requests.
    pub requests: usize,
    /// Bytes of data of in-flight requests.
    pub bytes: u64,
    /// Pieces of host memory that contain the data of in-flight requests.
    pub pieces: usize,
    /// In-flight commands of several steps. The limit applies to each of these types: Copy;
    /// commands of many requests, such as Dataset Management; reads with Force Unit Access on a
    /// disk with a volatile cache; commands that require exclusive execution.
    pub long_commands: usize,
}

impl Default for Quota {
    fn default() -> Self {
        Self { requests: 2048, bytes: 1 << 30, pieces: 1 << 17, long_commands: 64 }
    }
}

/// Reached quota, with its name for messages.
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

/// Cost estimates of work, in nanoseconds of I/O thread time. They limit how much a controller's
/// commands may cost before the other controllers get their turn. If a thread has several
/// controllers, the real cost is measured afterwards.
pub(super) mod cost {
    /// Cost of a command that a disk completes inline, without the copy of its data.
    const COMMAND: i64 = 64;
    /// Cost of a request that a disk executes asynchronously, including its completion.
    const REQUEST: i64 = 1500;
    /// Bytes copied per nanosecond, as a power of two.
    const BYTES_SHIFT: u32 = 4;

    /// Cost to resolve an SGL descriptor and the piece of memory that it describes.
    const PIECE_COST: i64 = 24;

    /// Cost of a failed command. The work before the failure is not known, and the error is written
    /// to the Error Information log.
    pub(crate) const FAILURE: i64 = 5000;

    /// Cost to resolve `pieces` pieces of memory.
    pub(crate) fn of_pieces(pieces: usize) -> i64 {
        pieces as i64 * PIECE_COST
    }

    /// Cost of a read or write of up to [`SHORT_BYTES`] that a disk completes inline. All these
    /// commands are charged the same upper bound, whatever their size.
    pub(crate) const SHORT_COST: i64 = 300;
    /// Maximum size of a short read or write, in bytes.
    pub(crate) const SHORT_BYTES: u64 = 8192;

    /// Cost of a command of `bytes` bytes that a disk completed inline.
    #[inline(always)]
    pub(crate) fn of_command(bytes: u64) -> i64 {
        (bytes >> BYTES_SHIFT) as i64 + COMMAND
    }

    /// Cost of a request of `bytes` bytes that is in flight. Its submission may have copied the
    /// data.
    pub(crate) fn of_request(bytes: u64) -> i64 {
        (bytes >> BYTES_SHIFT) as i64 + REQUEST
    }
}

/// Maximum number of remembered spans. They cover 128 GiB of memory.
const MAX_SPANS: u64 = 1 << 16;
/// Bytes per span, as a power of two.
const SHIFT: u32 = page_tables::SPAN.trailing_zeros();

/// Spans of a host's memory that were touched since the last reclaim of page tables.
#[derive(Debug, Default)]
pub(super) struct TouchedSpans {
    /// [`page_tables::epoch`] at the last call of [`touch`](Self::touch).
    epoch: u64,
    /// Number of times that all spans were cleared.
    generation: u32,
    /// For each slot, the span touched last and the generation of that touch. The slot of a span is
    /// its number modulo the length. Two spans of one slot evict each other and are counted again.
    seen: Vec<(u32, u32)>,
}

impl TouchedSpans {
    /// Sets the amount of host memory. With 0, no spans are remembered.
    pub(super) fn resize(&mut self, bytes: u64) {
        let len = match bytes {
            0 => 0,
            _ => (bytes >> SHIFT).clamp(1, MAX_SPANS).next_power_of_two() as usize,
        };
        if len != self.seen.len() {
            self.seen = vec![(0, 0); len];
            self.generation = 0;
        }
    }

    /// Clears all touched spans.
    pub(super) fn clear(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            self.seen.fill((0, 0));
        }
    }

    /// Marks the spans of these pieces (address, length) as touched. Returns the number of spans
    /// that were not marked before.
    pub(super) fn touch(&mut self, pieces: impl Iterator<Item = (usize, usize)>) -> usize {
        let epoch = page_tables::epoch();
        if epoch != self.epoch {
            self.epoch = epoch;
            self.clear();
        }
        let mask = self.seen.len().wrapping_sub(1);
        let mut fresh = 0;
        for (address, len) in pieces {
            for span in address >> SHIFT..=(address + len.saturating_sub(1)) >> SHIFT {
                // Span number 0, or one above 32 bits, belongs to no valid address of a process.
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
        // Offset at which a piece of 512 bytes is far from the borders of its span.
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
        // After an unmapping, another mapping may get the same address. So the epoch changes.
        drop(Mapping::shared("another", 8 << 20).unwrap());
        assert_eq!(touch(&at(middle, 3 * span)), 4);
    }
}
