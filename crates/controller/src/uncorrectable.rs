//! Logical blocks that a host has marked by Write Uncorrectable. NVM 1.1, "Write Uncorrectable
//! command".
//!
//! A host decides how many there are and how they lie, so there is a quota of blocks: in the worst
//! case each is a range of its own.

use shadowbell_spec::lba_status::{LbaRange, LbaStatusElement, LbaStatusLog, atype};
use shadowbell_spec::status::Status;
use std::collections::BTreeMap;
use zerocopy::IntoBytes;

/// Marked blocks of a controller, at most.
pub(crate) const MOST_BLOCKS: u64 = 4096;
/// Bytes of the blocks of one Write Uncorrectable command, at most: WUSL of Identify Controller.
pub(crate) const COMMAND_BYTES: u64 = 512 << 10;

/// Blocks of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRange {
    pub(crate) nsid: u32,
    pub(crate) from: u64,
    /// The block after the last.
    pub(crate) to: u64,
}

/// The blocks of one namespace: by the first block of a range, the one after its last.
type Ranges = BTreeMap<u64, u64>;

/// The marked blocks of a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Uncorrectable {
    by_nsid: BTreeMap<u32, Ranges>,
    /// How often there were more: LSGC of the log page.
    changes: u16,
}

impl Uncorrectable {
    /// As they were; those that do not fit are left out.
    pub(crate) fn restore(ranges: &[(u32, u64, u64)], changes: u16) -> Self {
        let mut marks = Self::default();
        for (nsid, from, to) in ranges.iter().filter(|(_, from, to)| from < to) {
            let _ = marks.mark(*nsid, *from, *to);
        }
        Self { changes, ..marks }
    }

    /// NSID, first block, and the one after the last, of each range.
    pub(crate) fn save(&self) -> (Vec<(u32, u64, u64)>, u16) {
        let of = |(nsid, ranges): (&u32, &Ranges)| {
            let nsid = *nsid;
            ranges.iter().map(move |(from, to)| (nsid, *from, *to)).collect::<Vec<_>>()
        };
        (self.by_nsid.iter().flat_map(of).collect(), self.changes)
    }

    /// Whether a namespace has any.
    pub(crate) fn has_any_of(&self, nsid: u32) -> bool {
        self.by_nsid.contains_key(&nsid)
    }

    /// Whether one of `[from, to)` is marked.
    pub(crate) fn touches(&self, nsid: u32, from: u64, to: u64) -> bool {
        self.of(nsid, from, to).next().is_some()
    }

    /// The marked parts of `[from, to)`, in ascending order.
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

    /// How many there are.
    pub(crate) fn blocks(&self) -> u64 {
        let ranges = self.by_nsid.values().flatten();
        ranges.map(|(from, to)| to - from).sum()
    }

    /// The log page LBA Status Information.
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

    /// Marks the blocks of `[from, to)`, which is not empty.
    ///
    /// # Errors
    /// Command Size Limit Exceeded: there would be more than [`MOST_BLOCKS`]. Nothing has changed.
    pub(crate) fn mark(&mut self, nsid: u32, from: u64, to: u64) -> Result<(), Status> {
        let known: u64 = self.of(nsid, from, to).map(|(begin, end)| end - begin).sum();
        if self.blocks() + (to - from - known) > MOST_BLOCKS {
            return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
        }
        let ranges = self.by_nsid.entry(nsid).or_default();
        // With those that it meets it is one.
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

    /// The blocks of `[from, to)` were written.
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

    /// Another namespace is behind this NSID, or none, or one with so many blocks.
    pub(crate) fn forget(&mut self, nsid: u32, blocks: u64) {
        self.clear(nsid, blocks, u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn there_is_a_quota_of_blocks() {
        let mut marks = Uncorrectable::default();
        marks.mark(1, 10, 10 + MOST_BLOCKS - 1).unwrap();
        assert_eq!(marks.mark(2, 0, 2).unwrap_err().code(), Status::COMMAND_SIZE_LIMIT_EXCEEDED);
        assert!(!marks.has_any_of(2));
        // What is marked already takes nothing.
        marks.mark(1, 10, 20).unwrap();
        marks.mark(2, u64::MAX - 1, u64::MAX).unwrap();
        assert!(marks.mark(1, 0, 1).is_err());
        marks.forget(1, 12);
        assert_eq!((marks.blocks(), marks.touches(1, 12, 100)), (3, false));
        marks.forget(2, 0);
        assert!(!marks.has_any_of(2));
        let (saved, changes) = marks.save();
        assert_eq!(saved, [(1, 10, 12)]);
        assert_eq!(Uncorrectable::restore(&saved, changes), marks);
    }

    proptest! {
        #[test]
        fn they_are_as_a_set_of_blocks(
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
                let told: Vec<u64> = marks.of(3, 0, 100).flat_map(|(a, b)| a..b).collect();
                prop_assert_eq!(told, model.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(marks.blocks(), model.len() as u64);
                prop_assert_eq!(marks.has_any_of(3), !model.is_empty());
                prop_assert_eq!(marks.touches(3, from, to), model.range(from..to).next().is_some());
                // No two of them meet.
                let ranges: Vec<_> = marks.of(3, 0, 100).collect();
                let apart = ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0);
                prop_assert!(apart);
            }
        }
    }
}
