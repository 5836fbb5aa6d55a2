//! Number of server processes that died by a fault while they recovered a controller or a disk, or
//! handled the first message of a recovered client.
//!
//! A recovery that crashes the process would crash each next process too, and so all clients would
//! lose their controllers. So the checkpoint has a table in a memfd, which outlives each process: a
//! byte for each item that is recovered. A thread marks the byte while it recovers the item, but
//! not while it waits for storage. Once the process serves, the byte is also not marked while
//! storage is opened, because an open may hang, and the process may die meanwhile for another
//! reason. The reactor marks the byte while it handles the first message in a recovered client's
//! socket, because that is the message with which the dead process may have crashed. The next
//! process counts a death for each marked byte, if the process died by a fault.
//! After one death the item is a suspect: no two suspects are recovered at once, so the next death
//! shows which of them is the cause. After [`LIMIT`] deaths the item's client is dropped, and after
//! one more death the item is not accessed any more. Several items may cause deaths in turn, and
//! deaths may have no known cause. The supervisor counts all deaths, and discards the checkpoint
//! after the seventh. It sends its count to each process, which drops the clients of all suspects
//! before the seventh death.

use super::checkpoint_items;
use parking_lot::{Condvar, Mutex};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{ReadWriteFlags, pwritev2};
use shadowbell_supervisor::checkpoint::Checkpoint;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::warn;

/// Key of the item with the table.
pub(super) const ATTEMPTS: &str = "attempts";

/// Number of deaths after which a controller is recovered without its client.
pub(super) const LIMIT: u8 = 3;
/// Number of deaths in the supervisor's count that suspects are assumed not to have caused. A
/// suspect counts as the cause of all other deaths. So the clients of suspects are dropped two
/// deaths before the supervisor discards the checkpoint.
const OTHERS: u8 = 2;
/// Flag bit of an item's byte: its recovery is in progress.
const MARK: u8 = 0x80;
/// Time for which a suspect waits for other suspects, one of which may hang.
const ALONE: Duration = Duration::from_secs(10);
/// Log text after a failed access to the table: the consequence of the failure.
const NOT_COUNTED: &str = "a crash during a recovery will not be attributed to its controller";

/// Position of a controller or disk in the table of attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(u64);

impl Slot {
    /// Slot of the controller with this index.
    pub(super) fn of_controller(index: usize) -> Self {
        Self(2 * index as u64 + 2)
    }

    /// Slot of the disk whose item has the key `key`. The key ends with a unique number.
    pub(super) fn of_disk(key: &str) -> Self {
        Self(2 * checkpoint_items::number(key).unwrap_or_default() + 3)
    }
}

/// Table of the deaths of processes during recoveries.
pub(super) struct Attempts {
    table: File,
    /// Number of recent deaths for any reason, by the supervisor's count.
    all: u8,
    /// Suspect that is being recovered, or whose first message is being handled.
    suspect: Mutex<Option<Slot>>,
    suspect_ended: Condvar,
    /// Items whose storage is being opened, as long as this process does not serve. `None` once it
    /// serves.
    opening: Mutex<Option<Vec<Slot>>>,
}

impl Attempts {
    /// Creates an empty table.
    ///
    /// # Errors
    /// The descriptor limit is reached.
    pub(super) fn new() -> io::Result<Self> {
        let table = memfd_create("shadowbell-attempts", MemfdFlags::CLOEXEC)?;
        Ok(Self::of(table.into()))
    }

    fn of(table: File) -> Self {
        Self {
            table,
            all: 0,
            suspect: Mutex::default(),
            suspect_ended: Condvar::new(),
            opening: Mutex::new(Some(Vec::new())),
        }
    }

    /// Takes the table out of a dead process's checkpoint, or creates one if it has none.
    ///
    /// # Errors
    /// The descriptor limit is reached.
    pub(super) fn take(items: &mut Checkpoint) -> io::Result<Self> {
        let item = items.remove(ATTEMPTS).map(|item| item.read()).transpose()?;
        match item.and_then(|(_, fds)| fds.into_iter().next()) {
            Some(table) => Ok(Self::of(table.into())),
            None => Self::new(),
        }
    }

    /// Descriptor of the table, for the checkpoint.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.table.as_fd()
    }

    /// Number of deaths that is compared with [`LIMIT`]: the number counted for this item, or a
    /// larger number if the item is a suspect and the supervisor has counted many deaths.
    pub(super) fn deaths(&self, slot: Slot) -> u8 {
        match self.counted(slot) {
            0 => 0,
            deaths => deaths.max(self.all.saturating_sub(OTHERS)),
        }
    }

    /// Number of server processes that crashed while they recovered this item, or handled its
    /// client's first message.
    fn counted(&self, slot: Slot) -> u8 {
        self.get(slot) & !MARK
    }

    /// Removes the marks of a dead process, and counts its death for each marked item if it died by
    /// a fault. `slots`: the items of its checkpoint. The bytes of all other items become zero.
    /// `all`: the supervisor's count of recent deaths. Returns true if a death was counted. Then an
    /// item is suspected, and not a command in flight.
    pub(super) fn count(
        &mut self,
        slots: impl Iterator<Item = Slot>,
        by_fault: bool,
        all: u8,
    ) -> bool {
        self.all = all;
        let before: Vec<_> = slots.map(|slot| (slot, self.get(slot))).collect();
        let is_counted = by_fault && before.iter().any(|(_, byte)| byte & MARK != 0);
        if let Err(error) = ftruncate(&self.table, 0) {
            warn!("{NOT_COUNTED}: {error}");
        }
        for (slot, byte) in before.into_iter().filter(|(_, byte)| *byte != 0) {
            let more = u8::from(by_fault && byte & MARK != 0);
            self.set(slot, (byte & !MARK).saturating_add(more).min(LIMIT + 1));
        }
        is_counted
    }

    /// Excludes an item from all further recoveries. A recovery would have to wait for the fence of
    /// the dead process, and no checkpoint contains this fence any more.
    pub(super) fn give_up(&self, slot: Slot) {
        self.set(slot, LIMIT + 1);
    }

    /// Removes the marks of items whose storage is being opened, because this process serves.
    pub(super) fn begin_serving(&self) {
        let mut opening = self.opening.lock();
        for slot in opening.take().into_iter().flatten() {
            self.set(slot, self.counted(slot));
        }
    }

    /// Marks an item until the guard is dropped. A suspect waits for other suspects.
    pub(super) fn begin(&self, slot: Slot) -> Attempt<'_> {
        let attempt = Attempt { attempts: self, slot, opens: Cell::new(false) };
        attempt.mark();
        attempt
    }

    /// Sets the count of a recovered controller, which has the new slot `to`. The count stays if
    /// the controller has a client (`has_client`), until the client's first message is handled.
    pub(super) fn recovered(&self, from: Slot, to: Slot, has_client: bool) {
        self.set(to, if has_client { self.counted(from) } else { 0 });
    }

    /// Marks the controller of a recovered client, whose first message is handled. Returns false if
    /// the client is a suspect, and another suspect is being recovered or handled. The client has
    /// waited for `waited` so far.
    fn begin_replay(&self, slot: Slot, waited: Duration) -> bool {
        let deaths = self.counted(slot);
        if deaths != 0 && !self.begin_suspect(slot, Duration::ZERO) && waited < ALONE {
            return false;
        }
        self.set(slot, deaths | MARK);
        true
    }

    /// Removes the mark of an item, and sets its count.
    fn unmark(&self, slot: Slot, deaths: u8) {
        self.set(slot, deaths);
        if self.suspect.lock().take_if(|suspect| *suspect == slot).is_some() {
            self.suspect_ended.notify_one();
        }
    }

    /// Waits until no other suspect is being recovered or handled. Returns false after `limit`.
    fn begin_suspect(&self, slot: Slot, limit: Duration) -> bool {
        let mut suspect = self.suspect.lock();
        let is_other = |suspect: &mut Option<Slot>| suspect.is_some_and(|other| other != slot);
        self.suspect_ended.wait_while_for(&mut suspect, is_other, limit);
        *suspect.get_or_insert(slot) == slot
    }

    fn get(&self, slot: Slot) -> u8 {
        let mut byte = [0];
        // Beyond the end of the file, the byte stays zero.
        let _ = self.table.read_at(&mut byte, slot.0);
        byte[0]
    }

    fn set(&self, slot: Slot, byte: u8) {
        let byte = [byte];
        let bytes = [IoSlice::new(&byte)];
        if let Err(error) = pwritev2(&self.table, &bytes, slot.0, ReadWriteFlags::empty()) {
            warn!("{NOT_COUNTED}: {error}");
        }
    }
}

/// Guard that keeps an item marked during its recovery.
pub(super) struct Attempt<'a> {
    attempts: &'a Attempts,
    slot: Slot,
    /// True while storage of the item is opened.
    opens: Cell<bool>,
}

impl Attempt<'_> {
    fn mark(&self) {
        if self.opens.get() && self.attempts.opening.lock().is_none() {
            return;
        }
        let deaths = self.attempts.counted(self.slot);
        if deaths != 0 {
            self.attempts.begin_suspect(self.slot, ALONE);
        }
        let opening = self.attempts.opening.lock();
        if !self.opens.get() || opening.is_some() {
            self.attempts.set(self.slot, deaths | MARK);
        } else {
            self.attempts.unmark(self.slot, deaths);
        }
    }

    fn unmark(&self) {
        self.attempts.unmark(self.slot, self.attempts.counted(self.slot));
    }

    /// Calls `open` to open storage of the item. If this process already serves, the item is not
    /// marked while `open` runs.
    pub(super) fn open<T>(&self, open: impl FnOnce() -> T) -> T {
        self.opens.set(true);
        let serves = match &mut *self.attempts.opening.lock() {
            Some(slots) => {
                slots.push(self.slot);
                false
            }
            None => true,
        };
        if serves {
            self.unmark();
        }
        let opened = open();
        if let Some(slots) = &mut *self.attempts.opening.lock() {
            slots.retain(|slot| *slot != self.slot);
        }
        self.opens.set(false);
        self.mark();
        opened
    }

    /// Calls `wait` to wait for storage. The item is not marked while `wait` runs.
    pub(super) fn pause<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.unmark();
        let waited = wait();
        self.mark();
        waited
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.unmark();
    }
}

/// Replay of a recovered client: the handling of its first message.
pub(super) struct Replay {
    attempts: Arc<Attempts>,
    slot: Slot,
    /// Time of the first attempt to begin the replay.
    since: Option<Instant>,
}

impl Replay {
    /// Replay of the client of the controller with this index.
    pub(super) fn of(attempts: &Arc<Attempts>, index: usize) -> Self {
        Self { attempts: Arc::clone(attempts), slot: Slot::of_controller(index), since: None }
    }

    /// Begins the replay. Returns false if it has to wait for another suspect.
    pub(super) fn begin(&mut self) -> bool {
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        self.attempts.begin_replay(self.slot, waited)
    }

    /// Ends the replay, which resets the count, or interrupts it before the message was handled.
    pub(super) fn end(&self, is_done: bool) {
        let deaths = if is_done { 0 } else { self.attempts.counted(self.slot) };
        self.attempts.unmark(self.slot, deaths);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the table of the next process after a death.
    fn next(attempts: &Attempts, slots: &[Slot], by_fault: bool) -> Attempts {
        next_after(attempts, slots, by_fault, 0)
    }

    /// Returns the table of the next process after a death. `all` is the supervisor's count of
    /// deaths, including this death.
    fn next_after(attempts: &Attempts, slots: &[Slot], by_fault: bool, all: u8) -> Attempts {
        let table = attempts.table.try_clone().unwrap();
        let mut next = Attempts::of(table);
        let is_marked = slots.iter().any(|slot| attempts.get(*slot) & MARK != 0);
        let is_counted = next.count(slots.iter().copied(), by_fault, all);
        assert_eq!(is_counted, is_marked && by_fault);
        next
    }

    #[test]
    fn deaths_are_counted_for_the_items_that_are_being_recovered() {
        let slots = [Slot::of_controller(3), Slot::of_disk("disk/unattached.3")];
        let mut attempts = Attempts::new().unwrap();
        // No death is counted if the process was killed, if the item waits for storage, or if its
        // recovery has ended.
        std::mem::forget(attempts.begin(slots[0]));
        attempts = next(&attempts, &slots, false);
        let waiting = attempts.begin(slots[0]);
        drop(attempts.begin(slots[1]));
        let after = waiting.pause(|| next(&attempts, &slots, true));
        drop(waiting);
        attempts = after;
        assert_eq!(slots.map(|slot| attempts.deaths(slot)), [0, 0]);
        for deaths in [1, 2, LIMIT, LIMIT + 1, LIMIT + 1] {
            std::mem::forget(attempts.begin(slots[0]));
            attempts = next(&attempts, &slots, true);
            assert_eq!(slots.map(|slot| attempts.deaths(slot)), [deaths, 0]);
        }
        // A new item has no counted deaths.
        attempts = next(&attempts, &slots[1..], true);
        assert_eq!(attempts.deaths(slots[0]), 0);
    }

    #[test]
    fn all_suspects_are_dropped_before_the_checkpoint_is_discarded() {
        let slots = [0, 1, 2, 3].map(Slot::of_controller);
        let mut attempts = Attempts::new().unwrap();
        let suspects = [&slots[..3], &slots[..1], &slots[1..2], &slots[2..3], &slots[..1]];
        for (all, suspects) in (1..).zip(suspects) {
            assert!(slots.iter().all(|slot| attempts.deaths(*slot) < LIMIT));
            suspects.iter().for_each(|slot| std::mem::forget(attempts.begin(*slot)));
            attempts = next_after(&attempts, &slots, true, all);
        }
        assert_eq!(slots.map(|slot| attempts.deaths(slot)), [LIMIT, LIMIT, LIMIT, 0]);
        attempts.give_up(slots[1]);
        let attempts = next(&attempts, &slots, false);
        assert_eq!(slots.map(|slot| attempts.deaths(slot)), [LIMIT, LIMIT + 1, 2, 0]);
    }

    /// The supervisor also counts deaths without a known cause, so a suspect has fewer attempts.
    #[test]
    fn a_suspect_is_dropped_earlier_if_other_deaths_have_no_known_cause() {
        let slots = [0, 1].map(Slot::of_controller);
        let mut attempts = Attempts::new().unwrap();
        for (all, is_known) in (1..=6).zip([false, false, false, true, true, true]) {
            assert!(attempts.deaths(slots[0]) <= LIMIT, "it is not served any more");
            if is_known {
                std::mem::forget(attempts.begin(slots[0]));
            }
            attempts = next_after(&attempts, &slots, true, all);
            let is_dropped = attempts.deaths(slots[0]) >= LIMIT;
            assert_eq!(is_dropped, all >= 5, "{all} deaths");
        }
        // After the sixth death, the item is not accessed at all, because after a seventh death the
        // supervisor would discard the checkpoint.
        assert_eq!(slots.map(|slot| attempts.deaths(slot)), [LIMIT + 1, 0]);
    }

    #[test]
    fn a_process_that_serves_does_not_count_the_opening_of_storage() {
        let slots = [0, 1].map(Slot::of_controller);
        let mut attempts = Attempts::new().unwrap();
        let marked = |attempts: &Attempts| slots.map(|slot| attempts.get(slot) & MARK != 0);
        let [early, late] = slots.map(|slot| attempts.begin(slot));
        early.open(|| {
            assert_eq!(marked(&attempts), [true, true]);
            attempts.begin_serving();
            assert_eq!(marked(&attempts), [false, true]);
            early.pause(|| ());
            assert_eq!(marked(&attempts), [false, true]);
        });
        late.open(|| late.pause(|| assert_eq!(marked(&attempts), [true, false])));
        assert_eq!(marked(&attempts), [true, true]);
        drop(late);
        std::mem::forget(early);
        attempts = next(&attempts, &slots, true);
        assert_eq!(slots.map(|slot| attempts.deaths(slot)), [1, 0]);
    }

    #[test]
    fn suspects_are_recovered_one_after_the_other() {
        let slots = [0, 1].map(Slot::of_controller);
        let attempts = Attempts::new().unwrap();
        slots.into_iter().for_each(|slot| std::mem::forget(attempts.begin(slot)));
        let attempts = next(&attempts, &slots, true);
        let first = attempts.begin(slots[0]);
        assert_eq!(*attempts.suspect.lock(), Some(slots[0]));
        // While a suspect waits for its storage, the other suspect can be recovered.
        first.pause(|| drop(attempts.begin(slots[1])));
        assert_eq!(*attempts.suspect.lock(), Some(slots[0]));
        drop(first);
        assert_eq!(*attempts.suspect.lock(), None);
    }

    /// The first message of a recovered client crashes each process. The controller has another
    /// slot in each process.
    #[test]
    fn deaths_are_counted_for_the_first_message_of_a_client() {
        let slots = [0, 1, 2, 3].map(Slot::of_controller);
        let (bystander, other) = (Slot::of_controller(8), Slot::of_controller(9));
        let mut attempts = Arc::new(Attempts::new().unwrap());
        for (deaths, pair) in (0..).zip(slots.windows(2)) {
            attempts.recovered(pair[0], pair[1], true);
            assert_eq!(attempts.deaths(pair[1]), deaths);
            for slot in [bystander, other] {
                attempts.recovered(slot, slot, true);
                assert!(attempts.begin_replay(slot, Duration::ZERO));
                attempts.unmark(slot, 0);
            }
            assert!(attempts.begin_replay(pair[1], Duration::ZERO));
            attempts = Arc::new(next(&attempts, &[pair[1], bystander, other], true));
        }
        assert_eq!([slots[3], bystander, other].map(|slot| attempts.deaths(slot)), [LIMIT, 0, 0]);
        // The client was dropped.
        attempts.recovered(slots[3], Slot::of_controller(4), false);
        assert_eq!(attempts.deaths(Slot::of_controller(4)), 0);
        // A message that is handled resets the count.
        attempts.recovered(slots[3], other, true);
        let mut replay = Replay::of(&attempts, 9);
        assert!(replay.begin());
        replay.end(true);
        assert_eq!(attempts.deaths(other), 0);
    }

    #[test]
    fn the_first_messages_of_suspects_are_handled_one_after_the_other() {
        let slots = [0, 1, 2].map(Slot::of_controller);
        let attempts = Attempts::new().unwrap();
        slots[..2].iter().for_each(|slot| assert!(attempts.begin_replay(*slot, Duration::ZERO)));
        let attempts = next(&attempts, &slots, true);
        assert!(attempts.begin_replay(slots[0], Duration::ZERO));
        assert!(!attempts.begin_replay(slots[1], Duration::ZERO));
        assert!(attempts.begin_replay(slots[2], Duration::ZERO), "it is no suspect");
        attempts.unmark(slots[0], 0);
        assert!(attempts.begin_replay(slots[1], Duration::ZERO));
        let attempts = next(&attempts, &slots, true);
        assert_eq!(slots.map(|slot| attempts.deaths(slot)), [0, 2, 1]);
        // A suspect does not wait for ever.
        assert!(attempts.begin_replay(slots[1], Duration::ZERO));
        assert!(attempts.begin_replay(slots[2], ALONE));
    }
}
