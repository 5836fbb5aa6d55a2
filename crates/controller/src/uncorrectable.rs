//! Logical blocks that a host has marked by Write Uncorrectable (NVM 1.1, "Write Uncorrectable
//! command").
//!
//! The number of marked blocks is limited, because each of them may be a separate range that uses
//! memory, and the host determines the number.

use shadowbell_spec::lba_status::{LbaRange, LbaStatusElement, LbaStatusLog, atype};
use shadowbell_spec::status::Status;
use std::collections::BTreeMap;
use zerocopy::IntoBytes;

/// Maximum number of marked blocks of a controller.
pub(crate) const MAX_BLOCKS: u64 = 4096;
/// Maximum size of a Write Uncorrectable command in bytes: WUSL of Identify Controller.
pub(crate) const COMMAND_BYTES: u64 = 512 << 10;

/// Range of blocks of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRange {
    pub(crate) nsid: u32,
    pub(crate) from: u64,
    /// Block after the range.
    pub(crate) to: u64,
}

/// Block ranges of one namespace: the key is the first block, the value is the block after the last
/// one.
type Ranges = BTreeMap<u64, u64>;

/// Marked blocks of a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Uncorrectable {
    by_nsid: BTreeMap<u32, Ranges>,
    /// Number of changes that added marks, modulo 2^16: the LBA Status Generation Counter (LSGC) of
    /// the log page.
    changes: u16,
}

impl Uncorrectable {
    /// Restores marks from a snapshot. Marks that exceed the limit are dropped.
    pub(crate) fn restore(ranges: &[(u32, u64, u64)], changes: u16) -> Self {
        let mut marks = Self::default();
        for (nsid, from, to) in ranges.iter().filter(|(_, from, to)| from < to) {
            let _ = marks.mark(*nsid, *from, *to);
        }
        Self { changes, ..marks }
    }

    /// Marks for a snapshot. Each range consists of its NSID, its first block and the block after
    /// its last one. The second value is `changes`.
    pub(crate) fn save(&self) -> (Vec<(u32, u64, u64)>, u16) {
        let of = |(nsid, ranges): (&u32, &Ranges)| {
            let nsid = *nsid;
            ranges.iter().map(move |(from, to)| (nsid, *from, *to)).collect::<Vec<_>>()
        };
        (self.by_nsid.iter().flat_map(of).collect(), self.changes)
    }

    /// True if a namespace has marked blocks.
    pub(crate) fn has_any_of(&self, nsid: u32) -> bool {
        self.by_nsid.contains_key(&nsid)
    }

    /// True if a block of `[from, to)` is marked.
    pub(crate) fn touches(&self, nsid: u32, from: u64, to: u64) -> bool {
        self.of(nsid, from, to).next().is_some()
    }

    /// Marked parts of `[from, to)` in ascending order.
    pub(crate) fn of(&self, nsid: u32, from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> {
        let ranges = self.by_nsid.get(&nsid);
        let before = ranges.and_then(|ranges| ranges.range(..from).next_back());
        let after = ranges.into_iter().flat_map(move |ranges| ranges.range(from.min(to)..to));
        before
            .into_iter()
            .chain(after)
            .map(move |(begin, end)| ((*begin).max(from), (*end).min(to)))
            .filter(|(begin, end)| begin < end)
    }

    /// Number of marked blocks.
    pub(crate) fn blocks(&self) -> u64 {
        let ranges = self.by_nsid.values().flatten();
        ranges.map(|(from, to)| to - from).sum()
    }

    /// LBA Status Information log page of the marked blocks.
    pub(crate) fn page(&self) -> Vec<u8> {
        let of = |(nsid, ranges): (&u32, &Ranges)| {
            let (neid, nlrd, ratype) = (*nsid, ranges.len() as u32, atype::UNRECOVERABLE);
            let head = LbaStatusElement { neid, nlrd, ratype, ..LbaStatusElement::default() };
            let range = |(from, to): (&u64, &u64)| {
                let (rslba, rnlb0) = (*from, (to - from - 1) as u32);
                LbaRange { rslba, rnlb0, ..LbaRange::default() }.as_bytes().to_vec()
            };
            let ranges: Vec<u8> = ranges.iter().flat_map(range).collect();
            [head.as_bytes(), &ranges].concat()
        };
        let elements: Vec<u8> = self.by_nsid.iter().flat_map(of).collect();
        let head = LbaStatusLog {
            lslplen: (size_of::<LbaStatusLog>() + elements.len()) as u32,
            nlslne: self.by_nsid.len() as u32,
            estulb: self.blocks() as u32,
            lsgc: self.changes,
            ..LbaStatusLog::default()
        };
        [head.as_bytes(), &elements].concat()
    }

    /// Marks the blocks of `[from, to)`. The range must not be empty.
    ///
    /// # Errors
    /// Command Size Limit Exceeded if more than [`MAX_BLOCKS`] blocks would be marked. The marks
    /// are then unchanged.
    pub(crate) fn mark(&mut self, nsid: u32, from: u64, to: u64) -> Result<(), Status> {
        let known: u64 = self.of(nsid, from, to).map(|(begin, end)| end - begin).sum();
        if self.blocks() + (to - from - known) > MAX_BLOCKS {
            return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
        }
        let ranges = self.by_nsid.entry(nsid).or_default();
        // The new range is merged with ranges that overlap or adjoin it.
        let (mut first, mut last) = (from, to);
        let before = ranges.range(..from).next_back().filter(|(_, end)| **end >= from);
        if let Some((begin, end)) = before.map(|(begin, end)| (*begin, *end)) {
            (first, last) = (begin, last.max(end));
        }
        for (_, end) in ranges.extract_if(first..=last, |_, _| true) {
            last = last.max(end);
        }
        ranges.insert(first, last);
        self.changes = self.changes.wrapping_add(1);
        Ok(())
    }

    /// Clears the marks of `[from, to)`, because these blocks were written.
    pub(crate) fn clear(&mut self, nsid: u32, from: u64, to: u64) {
        if !self.touches(nsid, from, to) {
            return;
        }
        let Some(ranges) = self.by_nsid.get_mut(&nsid) else { return };
        let before = ranges.range(..from).next_back().filter(|(_, end)| **end > from);
        if let Some((begin, end)) = before.map(|(begin, end)| (*begin, *end)) {
            ranges.insert(begin, from);
            if end > to {
                ranges.insert(to, end);
            }
        }
        let inside: Vec<_> = ranges.extract_if(from..to, |_, _| true).collect();
        if let Some((_, end)) = inside.last().filter(|(_, end)| *end > to) {
            ranges.insert(to, *end);
        }
        if ranges.is_empty() {
            self.by_nsid.remove(&nsid);
        }
    }

    /// Clears the marks from block `blocks` on, after namespace `nsid` was replaced, removed or
    /// resized. For a removed namespace, `blocks` is 0.
    pub(crate) fn clear_marks(&mut self, nsid: u32, blocks: u64) {
        self.clear(nsid, blocks, u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_number_of_uncorrectable_blocks_is_limited() {
        let mut marks = Uncorrectable::default();
        marks.mark(1, 10, 10 + MAX_BLOCKS - 1).unwrap();
        assert_eq!(marks.mark(2, 0, 2).unwrap_err().code(), Status::COMMAND_SIZE_LIMIT_EXCEEDED);
        assert!(!marks.has_any_of(2));
        // Blocks that are already marked are not counted again.
        marks.mark(1, 10, 20).unwrap();
        marks.mark(2, u64::MAX - 1, u64::MAX).unwrap();
        assert!(marks.mark(1, 0, 1).is_err());
        marks.clear_marks(1, 12);
        assert_eq!((marks.blocks(), marks.touches(1, 12, 100)), (3, false));
        marks.clear_marks(2, 0);
        assert!(!marks.has_any_of(2));
        let (saved, changes) = marks.save();
        assert_eq!(saved, [(1, 10, 12)]);
        assert_eq!(Uncorrectable::restore(&saved, changes), marks);
    }

    proptest! {
        #[test]
        fn uncorrectable_marks_equal_a_set_of_blocks(
            steps in proptest::collection::vec((any::<bool>(), 0..40u64, 1..12u64), 0..40),
        ) {
            let (mut marks, mut model) = (Uncorrectable::default(), BTreeSet::new());
            for (mark, from, len) in steps {
                let to = from + len;
                if mark {
                    marks.mark(3, from, to).unwrap();
                    model.extend(from..to);
                } else {
                    marks.clear(3, from, to);
                    model.retain(|block| !(from..to).contains(block));
                }
                let reported: Vec<u64> = marks.of(3, 0, 100).flat_map(|(a, b)| a..b).collect();
                prop_assert_eq!(reported, model.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(marks.blocks(), model.len() as u64);
                prop_assert_eq!(marks.has_any_of(3), !model.is_empty());
                prop_assert_eq!(marks.touches(3, from, to), model.range(from..to).next().is_some());
                // Ranges do not overlap.
                let ranges: Vec<_> = marks.of(3, 0, 100).collect();
                let apart = ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0);
                prop_assert!(apart);
            }
        }
    }
}
