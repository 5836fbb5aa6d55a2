//! What the server has answered and may still lose: a write is durable only when a flush has come
//! after it. If the server is restarted, all of this is written to it again, so that nobody notices.

use shadowbell_nbd::wire::flag;
use std::collections::VecDeque;
use std::sync::Arc;

/// What an entry takes besides its data.
const OVERHEAD: u64 = 128;

/// A request that has changed the export.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// A request of [`command`](shadowbell_nbd::wire::command)s that change something.
    pub(crate) command: u16,
    pub(crate) flags: u16,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    pub(crate) data: Arc<Vec<u8>>,
}

impl Entry {
    fn cost(&self) -> u64 {
        self.data.capacity() as u64 + OVERHEAD
    }

    /// Whether it changes bytes that `other` changes.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let end = |entry: &Self| entry.offset + u64::from(entry.len);
        self.offset < end(other) && other.offset < end(self)
    }
}

/// How far a flush of the disk's own is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Flush {
    #[default]
    None,
    Wanted,
    UnderWay,
}

#[derive(Debug, Default)]
pub(crate) struct Journal {
    /// In the order in which they were answered: of two that overlap and were not under way at the
    /// same time, the later one is the later one.
    entries: VecDeque<Entry>,
    /// The number of the first entry; numbers are never used again.
    first: u64,
    bytes: u64,
    /// The most bytes; nothing is kept if it is 0.
    most: u64,
    /// The server has nothing to flush.
    is_needless: bool,
    /// A flush of the disk's own, which the caretaker sends.
    pub(crate) flush: Flush,
    /// Something was lost that could not be written again: nothing is durable any more.
    pub(crate) has_lost: bool,
    /// Somebody could not go on because this was full.
    pub(crate) is_waited_for: bool,
    /// As much as was written again.
    pub(crate) replayed: u64,
}

impl Journal {
    /// One that keeps at most so many bytes.
    pub(crate) fn new(most: u64) -> Self {
        Self { most, ..Self::default() }
    }

    /// One for a server that says nothing of flushes: what it has answered is as durable as it
    /// gets.
    pub(crate) fn needless() -> Self {
        Self { is_needless: true, ..Self::default() }
    }

    /// Whether a request with these flags has to be [added](Self::add). One that is durable has to
    /// be if something that is written again could undo it.
    pub(crate) fn keeps(&self, flags: u16) -> bool {
        !self.is_needless && (flags & flag::FUA == 0 || !self.entries.is_empty())
    }

    /// A request was answered.
    pub(crate) fn add(&mut self, mut entry: Entry) {
        if self.most == 0 {
            // Only that there was something.
            entry.data = Arc::default();
            if let Some(first) = self.entries.front_mut() {
                self.first += 1;
                *first = entry;
                return;
            }
        }
        self.bytes += entry.cost();
        self.entries.push_back(entry);
    }

    /// The number that the next entry will have.
    pub(crate) fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// A flush was answered that was sent when [`end`](Self::end) was this. Whether somebody can go
    /// on.
    pub(crate) fn flushed(&mut self, end: u64) -> bool {
        while self.first < end
            && let Some(entry) = self.entries.pop_front()
        {
            self.first += 1;
            self.bytes -= entry.cost();
        }
        !self.is_full() && std::mem::take(&mut self.is_waited_for)
    }

    /// Whether the disk should flush by itself, so that nobody has to wait soon.
    pub(crate) fn wants_flush(&self) -> bool {
        self.most != 0 && self.flush == Flush::None && self.bytes > self.most / 2
    }

    /// Whether nothing more can be written until a flush.
    pub(crate) fn is_full(&self) -> bool {
        self.most != 0 && self.bytes > self.most
    }

    /// What is to be written again; nothing if it was not kept, and so is lost.
    pub(crate) fn entries(&self) -> Option<Vec<Entry>> {
        let is_kept = self.most != 0 || self.entries.is_empty();
        is_kept.then(|| self.entries.iter().cloned().collect())
    }

    /// Gives up what was not flushed. Whether somebody can go on.
    pub(crate) fn lose(&mut self) -> bool {
        self.has_lost = true;
        let end = self.end();
        self.flushed(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_nbd::wire::command;

    fn write(offset: u64, flags: u16) -> Entry {
        let data = Arc::new(vec![1; 4096]);
        Entry { command: command::WRITE, flags, offset, len: 4096, data }
    }

    fn offsets(journal: &Journal) -> Vec<u64> {
        journal.entries().unwrap().iter().map(|entry| entry.offset).collect()
    }

    #[test]
    fn a_flush_lets_go_of_what_was_answered_before_it_was_sent() {
        let mut journal = Journal::new(1 << 20);
        journal.add(write(0, 0));
        journal.add(write(4096, 0));
        let sent = journal.end();
        journal.add(write(8192, 0));
        assert!(!journal.flushed(sent));
        assert_eq!(offsets(&journal), [8192]);
        assert!(!journal.flushed(sent));
        assert_eq!(offsets(&journal), [8192]);
        journal.flushed(journal.end());
        assert_eq!((offsets(&journal), journal.bytes), (vec![], 0));
    }

    #[test]
    fn a_durable_write_is_kept_only_if_something_older_could_undo_it() {
        let mut journal = Journal::new(1 << 20);
        assert!(!journal.keeps(flag::FUA) && journal.keeps(0));
        journal.add(write(0, 0));
        assert!(journal.keeps(flag::FUA));
        assert!(!Journal::needless().keeps(0));
    }

    #[test]
    fn a_full_journal_wants_a_flush_and_is_bounded() {
        let mut journal = Journal::new(16 << 10);
        journal.add(write(0, 0));
        assert!(!journal.wants_flush());
        journal.add(write(0, 0));
        assert!(journal.wants_flush() && !journal.is_full());
        journal.add(write(0, 0));
        journal.add(write(0, 0));
        assert!(journal.is_full());
        journal.is_waited_for = true;
        assert!(journal.flushed(journal.end()));
        assert!(!journal.is_full() && !journal.is_waited_for);
    }

    #[test]
    fn one_that_keeps_nothing_knows_that_something_was_there() {
        let mut journal = Journal::new(0);
        assert!(journal.entries().is_some());
        for _ in 0..1000 {
            journal.add(write(0, 0));
        }
        assert!(journal.entries().is_none() && journal.entries.len() == 1 && !journal.is_full());
        let end = journal.end();
        journal.add(write(0, 0));
        journal.flushed(end);
        assert!(journal.entries().is_none());
        journal.flushed(journal.end());
        assert!(journal.entries().is_some());
    }

    #[test]
    fn ranges_overlap_where_they_share_a_byte() {
        assert!(write(0, 0).overlaps(&write(4095, 0)));
        assert!(!write(0, 0).overlaps(&write(4096, 0)));
        assert!(!write(8192, 0).overlaps(&write(4096, 0)));
    }
}
