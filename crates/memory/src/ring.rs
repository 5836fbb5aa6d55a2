//! Memory of a queue: a ring of fixed-size entries.

use crate::dma::DmaTable;
use crate::error::Fault;
use crate::shared::SharedBytes;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Ring of entries of `SIZE` bytes each (a power of two) in physically contiguous queue memory.
///
/// The memory is contiguous in the peer's addresses, and nearly always in this process too,
/// although the peer may have mapped neighbouring pages separately.
///
/// The owner of the ring computes all indices, and keeps them inside the ring. An index outside is
/// a bug of this program, not an error of the peer, and causes a panic.
#[derive(Clone, Debug)]
pub struct Ring<const SIZE: usize> {
    /// First piece of the memory, nearly always the only one.
    whole: Piece,
    others: Vec<Piece>,
    entries: u32,
}

#[derive(Clone, Debug)]
struct Piece {
    first: u32,
    count: u32,
    bytes: SharedBytes,
}

impl<const SIZE: usize> Ring<SIZE> {
    /// Resolves a queue of `entries` entries at `iova`. `write` is true if the device writes the
    /// queue (a completion queue).
    ///
    /// # Errors
    /// [`Fault`] with the IOVA of the first entry whose memory is not mapped for the access,
    /// crosses from one map to another, or is not aligned to 8 bytes in this process. The last two
    /// cases do not occur for an aligned queue in page-aligned maps.
    pub fn resolve(table: &DmaTable, iova: u64, entries: u32, write: bool) -> Result<Self, Fault> {
        const { assert!(SIZE.is_power_of_two()) };
        let mut pieces: Vec<Piece> = Vec::new();
        let mut first = 0;
        while first < entries {
            let at = (u64::from(first))
                .checked_mul(SIZE as u64)
                .and_then(|o| iova.checked_add(o))
                .ok_or(Fault { iova, write })?;
            let fault = Fault { iova: at, write };
            let wanted = u64::from(entries - first) * SIZE as u64;
            let bytes = table.bytes_up_to(at, wanted).ok_or(fault)?;
            let count = u32::try_from(bytes.len() / SIZE).map_err(|_| fault)?;
            let aligned = bytes.address().is_multiple_of(8);
            if count == 0 || !aligned || (write && !bytes.is_writable()) {
                return Err(fault);
            }
            pieces.push(Piece { first, count, bytes });
            first += count;
        }
        let mut pieces = pieces.into_iter();
        let whole = pieces.next().ok_or(Fault { iova, write })?;
        Ok(Self { whole, others: pieces.collect(), entries })
    }

    /// Creates a ring in the process's own memory, for the driver.
    ///
    /// `None` if `bytes` is too short, or not aligned to 8 bytes.
    #[must_use]
    pub fn over(bytes: &SharedBytes, entries: u32) -> Option<Self> {
        let bytes = bytes.slice(0, (entries as usize).checked_mul(SIZE)?)?;
        let whole = Piece { first: 0, count: entries, bytes };
        whole.bytes.address().is_multiple_of(8).then_some(Self {
            whole,
            others: Vec::new(),
            entries,
        })
    }

    /// Number of entries.
    #[inline]
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Bytes and offset of the `count` entries from `index`, if they are in one piece.
    ///
    /// The offset is aligned to 8: `resolve` and `over` have checked the start, and `SIZE` is a
    /// multiple of 8.
    #[inline]
    pub(crate) fn run(&self, index: u32, count: usize) -> Option<(&SharedBytes, usize)> {
        let (first, past) = (index as usize, self.whole.count as usize);
        // Fast path: nearly every queue lies in one map.
        if first < past && count <= past - first {
            return Some((&self.whole.bytes, first * SIZE));
        }
        self.run_elsewhere(index, count)
    }

    #[cold]
    fn run_elsewhere(&self, index: u32, count: usize) -> Option<(&SharedBytes, usize)> {
        let inside =
            |p: &&Piece| index >= p.first && (index - p.first) as usize + count <= p.count as usize;
        let piece = self.others.iter().find(inside)?;
        Some((&piece.bytes, (index - piece.first) as usize * SIZE))
    }

    /// Copies entry `index`.
    ///
    /// # Panics
    /// If `index` is outside the ring: a bug of the caller.
    #[inline]
    #[must_use]
    pub fn read<T: FromBytes>(&self, index: u32) -> T {
        const { assert!(size_of::<T>() <= SIZE) };
        let (bytes, offset) = self.run(index, 1).expect("the index is inside the ring");
        // SAFETY: a run is inside its bytes, and a `T` fits into an entry.
        unsafe { bytes.read_at(offset) }
    }

    /// Copies the `T` at byte `offset` of entry `index`. Returns `None` beyond the end of the ring
    /// or of the entry.
    #[inline]
    #[must_use]
    pub fn peek<T: FromBytes>(&self, index: u32, offset: usize) -> Option<T> {
        if offset > SIZE || size_of::<T>() > SIZE - offset {
            return None;
        }
        let (bytes, entry) = self.run(index, 1)?;
        // SAFETY: a run lies inside its bytes, and the value lies inside the entry.
        Some(unsafe { bytes.read_at(entry + offset) })
    }

    /// Writes entry `index`.
    ///
    /// # Panics
    /// As [`read`](Self::read), or if the memory is read-only.
    #[inline]
    pub fn write<T: IntoBytes + Immutable>(&self, index: u32, value: &T) {
        const { assert!(size_of::<T>() <= SIZE) };
        let (bytes, offset) = self.run(index, 1).expect("the index is inside the ring");
        assert!(bytes.is_writable(), "the ring can be written");
        // SAFETY: a run lies inside its bytes, which are writable, and a `T` fits an entry.
        unsafe { bytes.write_at(offset, value) };
    }

    /// Writes the eight words of entry `index` of a submission queue. The fastest kind of write if
    /// the words are in registers.
    ///
    /// # Panics
    ///
    /// As [`write`](Self::write).
    #[inline(always)]
    pub fn write_words(&self, index: u32, words: [u64; 8]) {
        const { assert!(SIZE == 64) };
        let (bytes, offset) = self.run(index, 1).expect("the index is inside the ring");
        assert!(bytes.is_writable(), "the ring can be written");
        // SAFETY: a run lies inside its bytes, which are writable.
        unsafe { bytes.write_words_at(offset, words) };
    }

    /// Writes a 16-byte entry in two words, the second one with release ordering. A reader that
    /// sees the second word (which holds a completion's phase tag) also sees the first.
    ///
    /// # Panics
    /// As [`write`](Self::write).
    #[inline]
    pub fn publish(&self, index: u32, words: [u64; 2]) {
        self.publish_run(index, &[words], 0);
    }

    /// [Publishes](Self::publish) `entries` from `index`, in order, each with the bits `with`
    /// added to its second word.
    ///
    /// # Panics
    /// As [`publish`](Self::publish), or if the entries reach beyond the end of the ring.
    #[inline]
    pub fn publish_run(&self, index: u32, entries: &[[u64; 2]], with: u64) {
        const { assert!(SIZE == 16) };
        if let Some((bytes, offset)) = self.run(index, entries.len()) {
            let run = bytes.store_pairs_release(offset, entries, with);
            return run.expect("the ring can be written");
        }
        // The entries lie in more than one piece.
        for (index, words) in (index..).zip(entries) {
            let (bytes, offset) = self.run(index, 1).expect("the index is inside the ring");
            let done = bytes.store_pairs_release(offset, &[*words], with);
            done.expect("the ring can be written");
        }
    }

    /// Loads the second word of a 16-byte entry with acquire ordering. Counterpart of
    /// [`publish`](Self::publish).
    ///
    /// # Panics
    ///
    /// As [`read`](Self::read).
    #[inline]
    #[must_use]
    pub fn second_word(&self, index: u32) -> u64 {
        const { assert!(SIZE == 16) };
        let (bytes, offset) = self.run(index, 1).expect("the index is inside the ring");
        // SAFETY: a run lies inside its bytes and starts at an address aligned to 8.
        unsafe { bytes.load_u64_at(offset + 8) }
    }

    /// Prefetches the cache line of entry `index` for writing, if the entry exists.
    #[inline]
    pub fn prefetch_for_write(&self, index: u32) {
        self.whole.bytes.prefetch_for_write(index as usize * SIZE);
    }

    /// Prefetches the cache line of entry `index`, if the entry exists.
    #[inline]
    pub fn prefetch(&self, index: u32) {
        self.whole.bytes.prefetch(index as usize * SIZE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DmaSpace, Mapping};

    #[test]
    fn a_ring_over_several_maps_is_one_ring() {
        let mut space = DmaSpace::default();
        let parts: Vec<_> = (0..3).map(|_| Mapping::anonymous(4096).unwrap().bytes()).collect();
        for (i, part) in parts.iter().enumerate() {
            space.map(0x10000 + i as u64 * 4096, 4096, part).unwrap();
        }
        let ring = Ring::<64>::resolve(space.table(), 0x10000, 192, true).unwrap();
        for i in 0..192u32 {
            ring.write(i, &(u64::from(i) << 32));
            assert_eq!(ring.read::<u64>(i), u64::from(i) << 32);
        }
        assert_eq!(parts[2].read::<u64>(0), Some(128 << 32));
        let fault = Ring::<64>::resolve(space.table(), 0x10000, 193, true).unwrap_err();
        assert_eq!(fault.iova, 0x13000);
        assert!(Ring::<64>::resolve(space.table(), u64::MAX - 63, 2, false).is_err());
        assert!(Ring::<64>::resolve(space.table(), 0x10fe0, 1, false).is_err(), "crosses maps");
    }

    #[test]
    fn a_map_that_puts_entries_at_odd_addresses_is_a_fault() {
        // A peer chooses the IOVA and the offset of the mapped memory. So a queue that is aligned
        // in IOVAs may be misaligned in this process. A misaligned queue is refused, because its
        // words are stored as atomics.
        let mut space = DmaSpace::default();
        let memory = Mapping::anonymous(8192).unwrap().bytes();
        space.map(0x1001, 8191, &memory).unwrap();
        assert!(Ring::<16>::resolve(space.table(), 0x2000, 16, true).is_err());
        space.map(0x10_0008, 4096, &memory).unwrap();
        Ring::<16>::resolve(space.table(), 0x10_0010, 16, true).unwrap().publish(0, [1, 2]);
    }

    #[test]
    fn a_published_entry_is_read_back() {
        let ring = Ring::<16>::over(&Mapping::anonymous(4096).unwrap().bytes(), 4).unwrap();
        ring.publish(3, [1, 2]);
        assert_eq!(ring.second_word(3), 2);
        assert_eq!(ring.read::<[u64; 2]>(3), [1, 2]);
        assert!(Ring::<16>::over(&Mapping::anonymous(4096).unwrap().bytes(), 257).is_none());
    }

    #[test]
    fn a_peek_stays_inside_the_entry_and_the_ring() {
        let ring = Ring::<16>::over(&Mapping::anonymous(4096).unwrap().bytes(), 4).unwrap();
        ring.publish(3, [1, 2]);
        assert_eq!(ring.peek::<u64>(3, 8), Some(2));
        assert_eq!(ring.peek::<u8>(4, 0), None);
        assert_eq!(ring.peek::<u64>(3, 9), None);
        assert_eq!(ring.peek::<u8>(0, usize::MAX), None);
    }

    #[test]
    #[should_panic(expected = "inside the ring")]
    fn an_index_outside_of_the_ring_panics() {
        let ring = Ring::<16>::over(&Mapping::anonymous(4096).unwrap().bytes(), 4).unwrap();
        let _ = ring.second_word(4);
    }
}
