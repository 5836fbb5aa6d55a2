//! Unflushed writes: requests that the server has answered but may still lose. A write is durable
//! only after a later flush. If the server restarts, these requests are replayed, so that no data
//! are lost.

use shadowbell_nbd::wire::flag;
use std::collections::VecDeque;
use std::sync::Arc;

/// Number of bytes that an entry counts in addition to its data.
const OVERHEAD: u64 = 128;

/// Request that has changed the export.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// NBD [`command`](shadowbell_nbd::wire::command) of the request.
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

    /// True if the ranges of the two requests overlap.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let end = |entry: &Self| entry.offset + u64::from(entry.len);
        self.offset < end(other) && other.offset < end(self)
    }
}

/// State of the automatic flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Flush {
    #[default]
    None,
    Requested,
    InFlight,
}

#[derive(Debug, Default)]
pub(crate) struct Unflushed {
    /// Entries in the order of the replies. If one of two overlapping writes was sent after the
    /// reply to the other, it is later in this order too, so a replay restores the right data.
    entries: VecDeque<Entry>,
    /// Number of the first entry. Entries are numbered consecutively, and numbers are never used
    /// again.
    first: u64,
    bytes: u64,
    /// Limit of `bytes`. With 0, replay is disabled and no data are stored.
    max_bytes: u64,
    /// True if no list is needed, because the server does not support flushes.
    is_needless: bool,
    /// State of the automatic flush. The reconnection thread sends it.
    pub(crate) flush: Flush,
    /// True if data were lost and could not be replayed. From then on, flushes fail.
    pub(crate) has_lost_writes: bool,
    /// True if a queue waits because the limit was reached.
    pub(crate) is_waited_for: bool,
    /// Number of replayed requests.
    pub(crate) replayed: u64,
}

impl Unflushed {
    /// Creates a list that holds at most `max_bytes` bytes.
    pub(crate) fn new(max_bytes: u64) -> Self {
        Self { max_bytes, ..Self::default() }
    }

    /// Creates a list for a server without flushes. It stays empty, because the server offers no
    /// durability beyond the reply to a write.
    pub(crate) fn needless() -> Self {
        Self { is_needless: true, ..Self::default() }
    }

    /// True if a request with these flags has to be [added](Self::add). A FUA write is durable. But
    /// if an earlier entry exists, it has to be added too: otherwise a replay of that entry could
    /// overwrite its data.
    pub(crate) fn must_record(&self, flags: u16) -> bool {
        !self.is_needless && (flags & flag::FUA == 0 || !self.entries.is_empty())
    }

    /// Adds an answered request.
    pub(crate) fn add(&mut self, mut entry: Entry) {
        if self.max_bytes == 0 {
            // Without replay, the list contains only the last entry, without data. It records that
            // unflushed writes exist.
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

    /// Number of the next entry.
    pub(crate) fn next_number(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// Removes the entries before number `end` after a successful flush. `end` is the value of
    /// [`next_number`](Self::next_number) when the flush was sent. Returns true if waiting queues
    /// can continue.
    pub(crate) fn flushed(&mut self, end: u64) -> bool {
        while self.first < end
            && let Some(entry) = self.entries.pop_front()
        {
            self.first += 1;
            self.bytes -= entry.cost();
        }
        !self.is_full() && std::mem::take(&mut self.is_waited_for)
    }

    /// True if an automatic flush should be sent: when half of the limit is exceeded.
    pub(crate) fn needs_flush(&self) -> bool {
        self.max_bytes != 0 && self.flush == Flush::None && self.bytes > self.max_bytes / 2
    }

    /// True if the limit is reached. Writes then have to wait for a flush.
    pub(crate) fn is_full(&self) -> bool {
        self.max_bytes != 0 && self.bytes > self.max_bytes
    }

    /// Entries to replay. `None` if the data of entries were not stored and are therefore lost.
    pub(crate) fn entries(&self) -> Option<Vec<Entry>> {
        let is_kept = self.max_bytes != 0 || self.entries.is_empty();
        is_kept.then(|| self.entries.iter().cloned().collect())
    }

    /// Discards all unflushed writes as lost. Returns true if waiting queues can continue.
    pub(crate) fn set_lost(&mut self) -> bool {
        self.has_lost_writes = true;
        let end = self.next_number();
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

    fn offsets(unflushed: &Unflushed) -> Vec<u64> {
        unflushed.entries().unwrap().iter().map(|entry| entry.offset).collect()
    }

    #[test]
    fn a_flush_removes_writes_completed_before_its_submission() {
        let mut unflushed = Unflushed::new(1 << 20);
        unflushed.add(write(0, 0));
        unflushed.add(write(4096, 0));
        let sent = unflushed.next_number();
        unflushed.add(write(8192, 0));
        assert!(!unflushed.flushed(sent));
        assert_eq!(offsets(&unflushed), [8192]);
        assert!(!unflushed.flushed(sent));
        assert_eq!(offsets(&unflushed), [8192]);
        unflushed.flushed(unflushed.next_number());
        assert_eq!((offsets(&unflushed), unflushed.bytes), (vec![], 0));
    }

    #[test]
    fn a_durable_write_is_recorded_only_after_unflushed_ones() {
        let mut unflushed = Unflushed::new(1 << 20);
        assert!(!unflushed.must_record(flag::FUA) && unflushed.must_record(0));
        unflushed.add(write(0, 0));
        assert!(unflushed.must_record(flag::FUA));
        assert!(!Unflushed::needless().must_record(0));
    }

    #[test]
    fn a_full_journal_requests_a_flush_and_is_bounded() {
        let mut unflushed = Unflushed::new(16 << 10);
        unflushed.add(write(0, 0));
        assert!(!unflushed.needs_flush());
        unflushed.add(write(0, 0));
        assert!(unflushed.needs_flush() && !unflushed.is_full());
        unflushed.add(write(0, 0));
        unflushed.add(write(0, 0));
        assert!(unflushed.is_full());
        unflushed.is_waited_for = true;
        assert!(unflushed.flushed(unflushed.next_number()));
        assert!(!unflushed.is_full() && !unflushed.is_waited_for);
    }

    #[test]
    fn a_journal_without_capacity_records_that_writes_exist() {
        let mut unflushed = Unflushed::new(0);
        assert!(unflushed.entries().is_some());
        for _ in 0..1000 {
            unflushed.add(write(0, 0));
        }
        assert!(
            unflushed.entries().is_none() && unflushed.entries.len() == 1 && !unflushed.is_full()
        );
        let end = unflushed.next_number();
        unflushed.add(write(0, 0));
        unflushed.flushed(end);
        assert!(unflushed.entries().is_none());
        unflushed.flushed(unflushed.next_number());
        assert!(unflushed.entries().is_some());
    }

    #[test]
    fn ranges_overlap_if_they_share_a_byte() {
        assert!(write(0, 0).overlaps(&write(4095, 0)));
        assert!(!write(0, 0).overlaps(&write(4096, 0)));
        assert!(!write(8192, 0).overlaps(&write(4096, 0)));
    }
}
