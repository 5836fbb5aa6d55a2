//! A queue's memory.

use crate::{DmaTable, Fault, SharedBytes};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The entries of a physically contiguous queue: contiguous in the peer's addresses, and nearly
/// always in ours too, though the peer may have mapped neighbouring pages separately.
///
/// Indices are the owner's own, kept inside the ring by its arithmetic; one outside is a bug of
/// ours and not a peer's doing, and panics.
#[derive(Clone, Debug)]
pub struct Ring {
    pieces: Vec<Piece>,
    entries: u32,
    entry_size: usize,
}

#[derive(Clone, Debug)]
struct Piece {
    first: u32,
    count: u32,
    bytes: SharedBytes,
}

impl Ring {
    /// Resolves a queue of `entries` entries of `entry_size` bytes at `iova`. The device writes it
    /// (a completion queue) if `write`.
    ///
    /// # Errors
    /// [`Fault`] with the first address that is not mapped as needed, or at which an entry would
    /// cross from one map to another, or lie at an address of this process that is not aligned to 8.
    /// (Entries are aligned to their size and maps to pages: neither happens to an aligned queue.)
    pub fn resolve(
        table: &DmaTable,
        iova: u64,
        entries: u32,
        entry_size: usize,
        write: bool,
    ) -> Result<Self, Fault> {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut first = 0;
        while first < entries {
            let at = (u64::from(first))
                .checked_mul(entry_size as u64)
                .and_then(|o| iova.checked_add(o))
                .ok_or(Fault { iova, write })?;
            let fault = Fault { iova: at, write };
            let wanted = u64::from(entries - first) * entry_size as u64;
            let bytes = table.bytes_up_to(at, wanted).ok_or(fault)?;
            let count = u32::try_from(bytes.len() / entry_size).map_err(|_| fault)?;
            let aligned = bytes.address().is_multiple_of(8);
            if count == 0 || !aligned || (write && !bytes.is_writable()) {
                return Err(fault);
            }
            pieces.push(Piece { first, count, bytes });
            first += count;
        }
        Ok(Self { pieces, entries, entry_size })
    }

    /// A ring in the process's own memory: the driver's side.
    ///
    /// `None` if `bytes` is too short.
    #[must_use]
    pub fn over(bytes: &SharedBytes, entries: u32, entry_size: usize) -> Option<Self> {
        let bytes = bytes.slice(0, (entries as usize).checked_mul(entry_size)?)?;
        Some(Self { pieces: vec![Piece { first: 0, count: entries, bytes }], entries, entry_size })
    }

    /// How many entries the ring has.
    #[inline]
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries
    }

    #[inline]
    fn slot(&self, index: u32) -> (&SharedBytes, usize) {
        let mut piece = &self.pieces[0];
        if index >= piece.count {
            piece = self
                .pieces
                .iter()
                .find(|p| index >= p.first && index - p.first < p.count)
                .expect("the index is inside the ring");
        }
        (&piece.bytes, (index - piece.first) as usize * self.entry_size)
    }

    /// A copy of entry `index`.
    ///
    /// # Panics
    /// If `index` is outside of the ring or `T` larger than an entry: bugs of the caller.
    #[inline]
    #[must_use]
    pub fn read<T: FromBytes>(&self, index: u32) -> T {
        let (bytes, offset) = self.slot(index);
        debug_assert!(size_of::<T>() <= self.entry_size);
        bytes.read(offset).expect("the entry is inside its piece")
    }

    /// Writes entry `index`.
    ///
    /// # Panics
    /// As [`read`](Self::read), or if the memory is read-only.
    #[inline]
    pub fn write<T: IntoBytes + Immutable>(&self, index: u32, value: &T) {
        let (bytes, offset) = self.slot(index);
        debug_assert!(size_of::<T>() <= self.entry_size);
        bytes.write(offset, value).expect("the entry is inside its piece and writable");
    }

    /// Writes a 16-byte entry in two words, the second with release ordering: whoever sees the
    /// second (which holds a completion's phase) sees the first.
    ///
    /// # Panics
    /// As [`write`](Self::write), or if the queue is not aligned to 8 bytes.
    #[inline]
    pub fn publish(&self, index: u32, words: [u64; 2]) {
        let (bytes, offset) = self.slot(index);
        bytes.write(offset, &words[0]).expect("the entry is inside its piece and writable");
        bytes.store_u64_release(offset + 8, words[1]).expect("the entry is aligned");
    }

    /// The second word of a 16-byte entry, with acquire ordering: the other side of
    /// [`publish`](Self::publish).
    ///
    /// # Panics
    /// As [`publish`](Self::publish).
    #[inline]
    #[must_use]
    pub fn second_word(&self, index: u32) -> u64 {
        let (bytes, offset) = self.slot(index);
        bytes.load_u64_acquire(offset + 8).expect("the entry is inside its piece and aligned")
    }

    /// Asks the processor to bring entry `index` near.
    #[inline]
    pub fn prefetch(&self, index: u32) {
        let (bytes, offset) = self.slot(index);
        bytes.prefetch(offset);
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
        let ring = Ring::resolve(space.table(), 0x10000, 192, 64, true).unwrap();
        for i in 0..192u32 {
            ring.write(i, &(u64::from(i) << 32));
            assert_eq!(ring.read::<u64>(i), u64::from(i) << 32);
        }
        assert_eq!(parts[2].read::<u64>(0), Some(128 << 32));
        let fault = Ring::resolve(space.table(), 0x10000, 193, 64, true).unwrap_err();
        assert_eq!(fault.iova, 0x13000);
        assert!(Ring::resolve(space.table(), u64::MAX - 63, 2, 64, false).is_err());
        assert!(Ring::resolve(space.table(), 0x10fe0, 1, 64, false).is_err(), "crosses maps");
    }

    #[test]
    fn a_map_that_puts_entries_at_odd_addresses_is_a_fault() {
        // A peer chooses both its IOVA and what lies there: a queue that is aligned in its
        // addresses need not be in ours, and the words of an entry are stored as atomics.
        let mut space = DmaSpace::default();
        let memory = Mapping::anonymous(8192).unwrap().bytes();
        space.map(0x1001, 8191, &memory).unwrap();
        assert!(Ring::resolve(space.table(), 0x2000, 16, 16, true).is_err());
        space.map(0x10_0008, 4096, &memory).unwrap();
        Ring::resolve(space.table(), 0x10_0010, 16, 16, true).unwrap().publish(0, [1, 2]);
    }

    #[test]
    fn publish_is_seen_by_second_word() {
        let ring = Ring::over(&Mapping::anonymous(4096).unwrap().bytes(), 4, 16).unwrap();
        ring.publish(3, [1, 2]);
        assert_eq!(ring.second_word(3), 2);
        assert_eq!(ring.read::<[u64; 2]>(3), [1, 2]);
        assert!(Ring::over(&Mapping::anonymous(4096).unwrap().bytes(), 257, 16).is_none());
    }

    #[test]
    #[should_panic(expected = "inside the ring")]
    fn an_index_outside_is_our_bug() {
        let ring = Ring::over(&Mapping::anonymous(4096).unwrap().bytes(), 4, 16).unwrap();
        let _ = ring.second_word(4);
    }
}
