//! Writer of a queue's in-flight tracking, and its evaluation by the next process.

use super::layout::{Header, Mark, VERSION, Words, features, number, store_number};

/// Reason why the tracking memory of a queue is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Inconsistent {
    #[error("features {0:#x} with version {1} are not supported, only version 1 without features")]
    Version(u64, u16),
    #[error("it is for {0} descriptors, and was shared as one for {1}")]
    Entries(u16, u16),
    #[error("the queue has {0} entries, and there is room for {1}")]
    Room(u16, u16),
    #[error("it names descriptor {0}, which the queue does not have")]
    Head(u16),
    #[error("it has requests in flight, and does not match the used ring index {0}")]
    Used(u16),
    #[error("it has no part for this queue")]
    None,
}

/// State that a dead process has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Heads of the requests that must be executed again, in this order.
    pub(crate) heads: Vec<u16>,
    /// Position in the available ring of the first request that has not been taken.
    pub(crate) available: u16,
}

/// Writer of a queue's tracking memory.
pub(crate) struct Tracker<W> {
    words: W,
    header: Header,
    /// Number of the next request.
    number: u64,
}

impl<W: Words> Tracker<W> {
    /// Starts the tracking of a queue of `size` entries, whose used ring has the index `used`. The
    /// memory was shared for `entries` entries. Returns the state that a dead process has left, if
    /// there is any.
    pub(crate) fn start(
        words: W,
        entries: u16,
        size: u16,
        used: u16,
    ) -> Result<(Self, Option<Found>), Inconsistent> {
        if size > entries {
            return Err(Inconsistent::Room(size, entries));
        }
        let (features, header) = (features(&words), Header::load(&words));
        if features != 0 || header.version > VERSION {
            return Err(Inconsistent::Version(features, header.version));
        }
        if header.version == 0 {
            let none = Mark { in_flight: false, next: 0 };
            (0..entries).for_each(|head| none.store(&words, head));
            let header = Header { version: VERSION, entries, last: 0, used };
            header.store(&words);
            return Ok((Self { words, header, number: 0 }, None));
        }
        if header.entries != entries {
            return Err(Inconsistent::Entries(header.entries, entries));
        }
        Self { words, header, number: 0 }.resume(size, used)
    }

    fn resume(mut self, size: u16, used: u16) -> Result<(Self, Option<Found>), Inconsistent> {
        let entries = self.header.entries;
        let mut marks: Vec<_> = (0..entries).map(|head| Mark::load(&self.words, head)).collect();
        let batch = used.wrapping_sub(self.header.used);
        let mut replied = Vec::new();
        // If no request has a mark, the indices are not compared, because the guest may have reset
        // its queue meanwhile.
        if marks.iter().any(|mark| mark.in_flight) {
            if batch > size {
                return Err(Inconsistent::Used(used));
            }
            let mut head = self.header.last;
            for _ in 0..batch {
                let mark = marks.get_mut(usize::from(head)).ok_or(Inconsistent::Head(head))?;
                mark.in_flight = false;
                replied.push((head, *mark));
                head = mark.next;
            }
        }
        let in_flight = (0..entries).zip(&marks).filter(|(_, mark)| mark.in_flight);
        let mut found: Vec<_> =
            in_flight.map(|(head, _)| (number(&self.words, head), head)).collect();
        if let Some((_, head)) = found.iter().find(|(_, head)| *head >= size) {
            return Err(Inconsistent::Head(*head));
        }
        found.sort_unstable();
        self.number = found.last().map_or(0, |(number, _)| number.wrapping_add(1));
        // The whole memory was validated before the first store. If this process dies during these
        // stores, the next process finds an equivalent state.
        replied.into_iter().for_each(|(head, mark)| mark.store(&self.words, head));
        self.header.used = used;
        self.header.store(&self.words);
        let heads: Vec<_> = found.into_iter().map(|(_, head)| head).collect();
        let available = used.wrapping_add(heads.len() as u16);
        Ok((self, Some(Found { heads, available })))
    }

    /// Records that a request was taken from the available ring.
    pub(crate) fn taken(&mut self, head: u16) {
        if head >= self.header.entries {
            return;
        }
        store_number(&self.words, head, self.number);
        self.number = self.number.wrapping_add(1);
        Mark { in_flight: true, next: 0 }.store(&self.words, head);
    }

    /// Records that a request will be put into the used ring next.
    pub(crate) fn answering(&mut self, head: u16) {
        if head >= self.header.entries {
            return;
        }
        Mark { in_flight: true, next: self.header.last }.store(&self.words, head);
        self.header.last = head;
        self.header.store(&self.words);
    }

    /// Records that a request is in the used ring, whose index is now `used`.
    pub(crate) fn replied(&mut self, head: u16, used: u16) {
        if head >= self.header.entries {
            return;
        }
        self.header.used = used;
        Mark { in_flight: false, next: 0 }.store(&self.words, head);
        self.header.store(&self.words);
    }

    /// Volatile state, which is lost when the process dies.
    #[cfg(test)]
    pub(super) fn state(&self) -> TrackerState {
        (self.header, self.number)
    }

    /// Restores a tracker from its volatile state, as if its process had not died.
    #[cfg(test)]
    pub(super) fn with_state(words: W, (header, number): TrackerState) -> Self {
        Self { words, header, number }
    }
}

/// Volatile state of a tracker.
#[cfg(test)]
pub(super) type TrackerState = (Header, u64);

#[cfg(test)]
mod tests {
    use super::super::layout::{Words, queue_bytes};
    use super::*;
    use std::cell::RefCell;

    const ENTRIES: u16 = 8;

    struct Memory(RefCell<Vec<u64>>);

    impl Words for &Memory {
        fn load(&self, at: usize) -> u64 {
            self.0.borrow()[at / 8]
        }

        fn store(&self, at: usize, word: u64) {
            self.0.borrow_mut()[at / 8] = word;
        }
    }

    impl Memory {
        /// Memory as another implementation leaves it, with the given marks and numbers.
        fn left(last: u16, used: u16, marks: &[(u16, u16, u64)]) -> Self {
            let memory = Self(RefCell::new(vec![0; queue_bytes(ENTRIES) / 8]));
            Header { version: VERSION, entries: ENTRIES, last, used }.store(&&memory);
            for (head, next, number) in marks {
                Mark { in_flight: true, next: *next }.store(&&memory, *head);
                store_number(&&memory, *head, *number);
            }
            memory
        }

        fn found(&self, used: u16) -> Result<Found, Inconsistent> {
            let (_, found) = Tracker::start(self, ENTRIES, ENTRIES, used)?;
            Ok(found.expect("something that was left"))
        }
    }

    /// Other implementations answer several requests before they store the index of the used ring.
    #[test]
    fn a_completed_batch_is_not_executed_again() {
        let marks = [(1, 0, 40), (2, 6, 41), (6, 3, 39), (3, 7, 38), (5, 0, 37)];
        // The indices wrap around.
        let memory = Memory::left(2, 0xfffe, &marks);
        let found = memory.found(1).unwrap();
        assert_eq!(found, Found { heads: vec![5, 1], available: 3 });
        // A second recovery before any answer finds the same state, as after another death.
        assert_eq!(memory.found(1).unwrap(), found);
        let (mut tracker, _) = Tracker::start(&memory, ENTRIES, ENTRIES, 1).unwrap();
        tracker.taken(2);
        assert_eq!(memory.found(1).unwrap().heads, [5, 1, 2], "the last one is the newest");
    }

    #[test]
    fn invalid_inflight_memory_is_refused_and_unchanged() {
        let refused = |memory: Memory, size: u16, used: u16| {
            let before = memory.0.borrow().clone();
            let refused = Tracker::start(&memory, ENTRIES, size, used).map(|(_, found)| found);
            assert_eq!(*memory.0.borrow(), before);
            refused.unwrap_err()
        };
        let left = |last, marks: &[_]| Memory::left(last, 10, marks);
        assert_eq!(refused(left(0, &[]), 16, 10), Inconsistent::Room(16, 8));
        assert_eq!(refused(left(8, &[(2, 0, 0)]), 8, 11), Inconsistent::Head(8));
        assert_eq!(refused(left(2, &[(2, 9, 0)]), 8, 12), Inconsistent::Head(9));
        assert_eq!(refused(left(0, &[(5, 0, 0)]), 4, 10), Inconsistent::Head(5));
        assert_eq!(refused(left(0, &[(5, 0, 0)]), 8, 0), Inconsistent::Used(0));
        // The guest has reset the queue, and no request is in flight.
        for used in [0, 12] {
            let found = left(8, &[]).found(used).unwrap();
            assert_eq!(found, Found { heads: Vec::new(), available: used });
        }
    }
}
