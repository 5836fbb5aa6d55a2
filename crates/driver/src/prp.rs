//! PRPs (data pointers) for buffers that are contiguous in the device's address space.
//!
//! Base 2.1, 4.1.1 "Physical Region Page Entry and List". Because a buffer is contiguous, its PRPs
//! are computed from its address. Only the PRP list of a transfer of more than two pages needs
//! memory, which is preallocated for the command's slot.

use shadowbell_memory::SharedBytes;

/// Maximum size in bytes of the PRP list of a transfer of `max_bytes` that begins anywhere in its
/// first page, chain entries included.
pub(crate) const fn list_bytes(max_bytes: u64, page: u64) -> u64 {
    // A transfer that begins within a page touches one more page than `max_bytes / page`. The list
    // has no entry for the first page, which PRP1 describes.
    let entries = max_bytes.div_ceil(page);
    if entries <= 1 {
        return 0;
    }
    let per_page = page / 8;
    if entries <= per_page {
        // The list fits into one page. List sizes are powers of two: several lists share a page,
        // and no list crosses a page boundary.
        let bytes = (entries * 8).next_power_of_two();
        return if bytes < 64 { 64 } else { bytes };
    }
    // The last entry of each list page except the last one points to the next list page.
    let pages = (entries - 1).div_ceil(per_page - 1);
    pages * page
}

/// PRP lists of all slots of a queue, in one array.
#[derive(Debug)]
pub(crate) struct PrpLists {
    bytes: SharedBytes,
    iova: u64,
    per_slot: u64,
    page: u64,
    /// Current content of each list. If a slot gets the same buffer again, its list is not written
    /// again, so the list stays in the cache of the processor that reads it.
    written_lists: Box<[WrittenList]>,
}

/// Content of a list: entry `i` is `first + i * page` for `i < entries`. A list of more than `page
/// / 8` entries has a chain entry after every `page / 8 - 1` entries.
#[derive(Clone, Copy, Debug, Default)]
struct WrittenList {
    first: u64,
    entries: u64,
}

/// PRP1 and PRP2.
pub(crate) type Prps = (u64, u64);

impl PrpLists {
    /// Creates the lists of `slots` slots, each of [`list_bytes`], in `bytes` at `iova`
    /// (page-aligned).
    ///
    /// Returns `None` if `bytes` is too short.
    pub(crate) fn new(
        bytes: SharedBytes,
        iova: u64,
        slots: usize,
        max_bytes: u64,
        page: u64,
    ) -> Option<Self> {
        let per_slot = list_bytes(max_bytes, page);
        let needed = per_slot.checked_mul(slots as u64)?;
        (bytes.len() as u64 >= needed).then(|| Self {
            bytes,
            iova,
            per_slot,
            page,
            written_lists: vec![WrittenList::default(); slots].into(),
        })
    }

    /// The PRPs of `len` bytes at `iova` (a multiple of 4). If the transfer needs a PRP list, the
    /// list is written to the memory of `slot`. `None` if the list does not fit.
    #[inline]
    pub(crate) fn prps(&mut self, slot: usize, iova: u64, len: u64) -> Option<Prps> {
        let page = self.page;
        let in_first = page - (iova & (page - 1));
        if len <= in_first {
            return Some((iova, 0));
        }
        let second = iova + in_first;
        if len - in_first <= page {
            return Some((iova, second));
        }
        let list = self.list(slot, second, (len - in_first).div_ceil(page))?;
        Some((iova, list))
    }

    /// Address of a list of `entries` pages from `first` on. The list is written, unless the slot
    /// has it already.
    fn list(&mut self, slot: usize, first: u64, entries: u64) -> Option<u64> {
        let start = self.per_slot.checked_mul(slot as u64)?;
        let at = self.iova + start;
        let held = self.written_lists.get_mut(slot)?;
        let per_page = self.page / 8;
        let reusable = if entries <= per_page {
            // The list of a longer transfer can be used for a shorter one, unless it has a chain
            // entry.
            held.entries >= entries && held.entries <= per_page
        } else {
            held.entries == entries
        };
        if held.first == first && reusable {
            return Some(at);
        }
        // The recorded content is cleared first: if a write fails, the memory holds neither the old
        // nor the new list.
        *held = WrittenList::default();
        let mut word = 0;
        for entry in 0..entries {
            let left = entries - entry;
            if word % per_page == per_page - 1 && left > 1 {
                let next = at + (word + 1) * 8;
                self.write(start, word, next)?;
                word += 1;
            }
            self.write(start, word, first + entry * self.page)?;
            word += 1;
        }
        if let Some(held) = self.written_lists.get_mut(slot) {
            *held = WrittenList { first, entries };
        }
        Some(at)
    }

    fn write(&self, start: u64, word: u64, value: u64) -> Option<()> {
        if (word + 1) * 8 > self.per_slot {
            return None;
        }
        self.bytes.write(usize::try_from(start + word * 8).ok()?, &value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use shadowbell_memory::{DmaSpace, Mapping, Segments, View};

    const DATA: u64 = 0x1_0000_0000;
    const LISTS: u64 = 0x8000_0000;

    /// Resolves PRPs with the controller's implementation.
    fn resolve(view: &View, prps: Prps, len: u64, page: u64) -> Vec<(usize, usize)> {
        let mut segments = Segments::new();
        view.resolve_prps(prps.0, prps.1, len as usize, page as usize, true, &mut segments)
            .expect("PRPs that a controller accepts");
        // Merge adjacent pieces into one.
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for piece in segments.pieces() {
            match runs.last_mut() {
                Some((at, n)) if *at + *n == piece.address() => *n += piece.len(),
                _ => runs.push((piece.address(), piece.len())),
            }
        }
        runs
    }

    fn lists_and_view(max: u64, page: u64, slots: usize) -> (PrpLists, View, usize) {
        let lists = Mapping::anonymous(list_bytes(max, page).max(1) * slots as u64).unwrap();
        let data = Mapping::anonymous(max + 2 * page).unwrap();
        let mut space = DmaSpace::default();
        space.map(LISTS, lists.len() as u64, &lists.bytes()).unwrap();
        space.map(DATA, data.len() as u64, &data.bytes()).unwrap();
        let view = View::new(std::sync::Arc::clone(space.table()));
        let lists = PrpLists::new(lists.bytes(), LISTS, slots, max, page).unwrap();
        (lists, view, data.address())
    }

    proptest! {
        #[test]
        fn lists_resolve_to_the_bytes_of_the_buffer(
            page in prop::sample::select(vec![4096u64, 16384]),
            max_pages in 1u64..2200,
            transfers in prop::collection::vec((0usize..3, 0u64..4096, 1u64..=10_000_000), 1..12),
        ) {
            let max = max_pages * page;
            let (mut lists, view, base) = lists_and_view(max, page, 3);
            for (slot, offset, len) in transfers {
                let (offset, len) = (offset & !3, 1 + len % max);
                let prps = lists.prps(slot, DATA + offset, len).expect("it fits");
                prop_assert_eq!(
                    resolve(&view, prps, len, page),
                    vec![(base + offset as usize, len as usize)]
                );
            }
        }
    }

    #[test]
    fn a_transfer_that_does_not_fit_is_refused() {
        let (mut lists, view, base) = lists_and_view(8 * 4096, 4096, 2);
        assert_eq!(list_bytes(8 * 4096, 4096), 64);
        assert!(lists.prps(0, DATA, 8 * 4096).is_some());
        assert!(lists.prps(0, DATA, 10 * 4096).is_none(), "nine entries in room for eight");
        assert!(lists.prps(2, DATA, 8 * 4096).is_none(), "no such slot");
        let prps = lists.prps(0, DATA, 8 * 4096).unwrap();
        assert_eq!(resolve(&view, prps, 8 * 4096, 4096), [(base, 8 * 4096)]);
    }

    #[test]
    fn an_unchanged_list_is_not_written_again() {
        let (mut lists, _, _) = lists_and_view(64 * 4096, 4096, 1);
        let whole = lists.prps(0, DATA, 64 * 4096).unwrap();
        lists.bytes.write(0, &0xdead_u64).unwrap();
        assert_eq!(lists.prps(0, DATA, 64 * 4096), Some(whole));
        assert_eq!(lists.prps(0, DATA, 16 * 4096), Some(whole), "a shorter one is in it");
        assert_eq!(lists.bytes.read::<u64>(0), Some(0xdead));
        lists.prps(0, DATA + 4096, 64 * 4096).unwrap();
        assert_eq!(lists.bytes.read::<u64>(0), Some(DATA + 2 * 4096));
    }

    #[test]
    fn small_transfers_need_no_list() {
        assert_eq!(list_bytes(4096, 4096), 0);
        let (mut lists, _, _) = lists_and_view(2 * 4096, 4096, 1);
        assert_eq!(lists.prps(0, DATA, 4096), Some((DATA, 0)));
        assert_eq!(lists.prps(0, DATA + 512, 512), Some((DATA + 512, 0)));
        assert_eq!(lists.prps(0, DATA + 512, 4096), Some((DATA + 512, DATA + 4096)));
        assert_eq!(lists.prps(0, DATA, 8192), Some((DATA, DATA + 4096)));
    }
}
