//! Device side of a split virtqueue (Virtio 1.2, 2.7).
//!
//! The location of the rings in this process is looked up once. Afterwards the rings are accessed
//! directly.

use super::ring::Config;
use ::shadowbell_memory::{DmaTable, SharedBytes};
use std::sync::atomic::{Ordering, fence};

/// Size of a descriptor in bytes.
pub(super) const DESCRIPTOR: usize = 16;
/// Offset of the index in both rings. `ENTRIES` is the offset of the entries; the flags are at
/// offset 0.
const INDEX: usize = 2;
const ENTRIES: usize = 4;
/// Size of an entry of the used ring in bytes.
const USED: usize = 8;
/// Flag of the used ring: the device needs no notifications.
const NO_NOTIFY: u16 = 1;
/// Flag of the available ring: the guest needs no interrupts.
const NO_INTERRUPT: u16 = 1;

/// The index of the available ring announces more requests than the queue has entries.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the available ring announces more requests than it has entries")]
pub(super) struct InvalidIndex;

/// Descriptor that was copied from the guest's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptor {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) flags: u16,
    pub(super) next: u16,
}

impl Descriptor {
    pub(super) fn of([address, rest]: [u64; 2]) -> Self {
        let rest = u64::from_le(rest);
        let (len, flags, next) = (rest as u32, (rest >> 32) as u16, (rest >> 48) as u16);
        Self { address: u64::from_le(address), len, flags, next }
    }
}

/// Split virtqueue.
pub(super) struct SplitRing {
    size: u16,
    event_idx: bool,
    descriptors: SharedBytes,
    available: SharedBytes,
    used: SharedBytes,
    /// Position of the next request. `seen` is the index of the available ring at its last read.
    next_available: u16,
    seen: u16,
    /// Position of the next answer. `published` is the index that was published to the guest.
    next_used: u16,
    published: u16,
    /// Published index at the last decision about an interrupt.
    notified: u16,
    /// True if notifications of the guest are requested.
    wants_kicks: bool,
}

impl SplitRing {
    /// Creates the queue from the frontend's configuration. `None` if a part of the queue is not
    /// completely in one region of the guest's memory.
    pub(super) fn new(queue: &Config, table: &DmaTable) -> Option<Self> {
        let Config { size, event_idx, next_available, next_used, .. } = *queue;
        if !size.is_power_of_two() {
            return None;
        }
        let entries = usize::from(size);
        let event = if event_idx { 2 } else { 0 };
        let available = (ENTRIES + 2 * entries + event) as u64;
        let used = (ENTRIES + USED * entries + event) as u64;
        let ring = Self {
            size,
            event_idx,
            descriptors: table.bytes(queue.descriptors, (DESCRIPTOR * entries) as u64)?,
            available: table.bytes(queue.available, available)?,
            used: table.bytes(queue.used, used)?,
            next_available,
            seen: next_available,
            next_used,
            published: next_used,
            notified: next_used,
            wants_kicks: true,
        };
        // These loads check the alignment. Every later access depends on it.
        ring.available.load_u16_acquire(0)?;
        ring.used.load_u16_acquire(0)?;
        Some(ring)
    }

    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// Positions in the available ring and in the used ring.
    pub(super) fn places(&self) -> (u16, u16) {
        (self.next_available, self.next_used)
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
    }

    /// Takes a request. Returns the index of its first descriptor.
    ///
    /// # Errors
    ///
    /// If the index of the available ring announces more requests than the ring has entries.
    #[inline]
    pub(super) fn take(&mut self) -> Result<Option<u16>, InvalidIndex> {
        if self.seen == self.next_available {
            let index = self.available.load_u16_acquire(INDEX).map(u16::from_le);
            let index = index.ok_or(InvalidIndex)?;
            if index == self.next_available {
                return Ok(None);
            }
            if index.wrapping_sub(self.next_available) > self.size {
                return Err(InvalidIndex);
            }
            self.seen = index;
        }
        let at = ENTRIES + 2 * self.slot(self.next_available);
        let head = self.available.read::<[u8; 2]>(at).ok_or(InvalidIndex)?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(u16::from_le_bytes(head)))
    }

    /// Reads a descriptor of the table, if `index` is valid.
    #[inline]
    pub(super) fn descriptor(&self, index: u16) -> Option<Descriptor> {
        self.descriptors.read::<[u64; 2]>(DESCRIPTOR * usize::from(index)).map(Descriptor::of)
    }

    /// Puts an answer into the used ring. [`publish`](Self::publish) then makes it visible to the
    /// guest.
    #[inline]
    pub(super) fn put(&mut self, head: u16, len: u32) {
        let at = ENTRIES + USED * self.slot(self.next_used);
        let entry = (u64::from(head) | u64::from(len) << 32).to_le_bytes();
        // The write cannot fail, because the length was checked and the memory is writable.
        let _ = self.used.write_from(at, &entry);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Publishes the answers to the guest. Returns true if there are new ones.
    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        if self.published == self.next_used {
            return false;
        }
        self.published = self.next_used;
        let _ = self.used.store_u16_release(INDEX, self.next_used.to_le());
        true
    }

    /// True if the guest requests an interrupt for one of the answers that were published since the
    /// last call.
    #[inline]
    pub(super) fn wants_notification(&mut self) -> bool {
        if self.notified == self.published {
            return false;
        }
        let old = std::mem::replace(&mut self.notified, self.published);
        // The fence orders the store of the index before the load of the guest's request for
        // interrupts. So either the guest sees the index, or this load sees the guest's change of
        // the request.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let at = ENTRIES + 2 * usize::from(self.size);
            let event = self.available.load_u16_acquire(at).map_or(0, u16::from_le);
            let new = self.published;
            return new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old);
        }
        let flags = self.available.load_u16_acquire(0).map_or(0, u16::from_le);
        flags & NO_INTERRUPT == 0
    }

    /// Requests that the guest sends no notifications. With `VIRTIO_F_EVENT_IDX`, the guest may
    /// still send one.
    #[inline]
    pub(super) fn suppress_kicks(&mut self) {
        if std::mem::take(&mut self.wants_kicks) && !self.event_idx {
            let _ = self.used.store_u16_release(0, NO_NOTIFY.to_le());
        }
    }

    /// Requests a notification of the next request. Returns true if a request is already available.
    pub(super) fn ask_for_kicks(&mut self) -> bool {
        if self.event_idx {
            let at = ENTRIES + USED * usize::from(self.size);
            let _ = self.used.store_u16_release(at, self.next_available.to_le());
        } else {
            let _ = self.used.store_u16_release(0, 0);
        }
        self.wants_kicks = true;
        fence(Ordering::SeqCst);
        let index = self.available.load_u16_acquire(INDEX).map_or(0, u16::from_le);
        index != self.next_available
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::shadowbell_memory::{DmaSpace, Mapping};

    const SIZE: u16 = 4;
    const AVAILABLE: u64 = 0x100;
    const USED: u64 = 0x200;

    /// Creates a queue at the start of the guest's memory. Returns it with that memory.
    fn ring(event_idx: bool, len: u64) -> (Option<SplitRing>, SharedBytes) {
        let bytes = Mapping::anonymous(4096).unwrap().bytes();
        let mut space = DmaSpace::default();
        space.map(0, len, &bytes).unwrap();
        let (size, available, used) = (SIZE, AVAILABLE, USED);
        let queue = Config { size, event_idx, available, used, ..Config::default() };
        (SplitRing::new(&queue, space.table()), bytes)
    }

    fn put(bytes: &SharedBytes, at: u64, value: u16) {
        bytes.store_u16_release(at as usize, value).unwrap();
    }

    fn get(bytes: &SharedBytes, at: u64) -> u16 {
        bytes.load_u16_acquire(at as usize).unwrap()
    }

    #[test]
    fn a_ring_beyond_its_memory_is_refused() {
        assert!(ring(false, 4096).0.is_some());
        assert!(ring(false, USED + 4 + 4 * 8).0.is_some());
        assert!(ring(false, USED + 4 + 4 * 8 - 1).0.is_none());
        assert!(ring(true, USED + 4 + 4 * 8).0.is_none(), "no room for its event");
    }

    #[test]
    fn requests_are_taken_in_order_up_to_the_ring_size() {
        let (ring, bytes) = ring(false, 4096);
        let mut ring = ring.unwrap();
        assert_eq!(ring.take().unwrap(), None);
        for (n, head) in [3, 1, 2, 0].into_iter().enumerate() {
            put(&bytes, AVAILABLE + 4 + 2 * n as u64, head);
        }
        put(&bytes, AVAILABLE + 2, 3);
        for head in [3, 1, 2] {
            assert_eq!(ring.take().unwrap(), Some(head));
        }
        assert_eq!(ring.take().unwrap(), None);
        put(&bytes, AVAILABLE + 2, 3 + SIZE + 1);
        assert!(ring.take().is_err());
        put(&bytes, AVAILABLE + 2, 4);
        assert_eq!(ring.take().unwrap(), Some(0));
    }

    #[test]
    fn completions_are_visible_after_publication() {
        let (ring, bytes) = ring(false, 4096);
        let mut ring = ring.unwrap();
        assert!(!ring.publish());
        ring.put(2, 513);
        assert_eq!(get(&bytes, USED + 2), 0);
        assert!(ring.publish() && !ring.publish());
        assert_eq!(get(&bytes, USED + 2), 1);
        assert_eq!(bytes.read::<[u8; 8]>(USED as usize + 4), Some([2, 0, 0, 0, 1, 2, 0, 0]));
        assert_eq!(ring.places(), (0, 1));
    }

    #[test]
    fn a_polling_peer_gets_no_notification() {
        let (ring, bytes) = ring(false, 4096);
        let mut ring = ring.unwrap();
        ring.suppress_kicks();
        assert_eq!(get(&bytes, USED), 1);
        assert!(!ring.ask_for_kicks());
        assert_eq!(get(&bytes, USED), 0);
        put(&bytes, AVAILABLE + 2, 1);
        assert!(ring.ask_for_kicks(), "there is one already");
        let mut reply = |flags| {
            put(&bytes, AVAILABLE, flags);
            ring.put(0, 1);
            ring.publish();
            ring.wants_notification()
        };
        assert!(!reply(1) && reply(0));
        assert!(!ring.wants_notification(), "it knows");
    }

    #[test]
    fn the_event_index_determines_notifications() {
        let (ring, bytes) = ring(true, 4096);
        let mut ring = ring.unwrap();
        let (event, avail_event) = (AVAILABLE + 4 + 8, USED + 4 + 32);
        put(&bytes, AVAILABLE + 2, 2);
        assert!(ring.take().unwrap().is_some() && ring.take().unwrap().is_some());
        assert!(!ring.ask_for_kicks());
        assert_eq!(get(&bytes, avail_event), 2);
        ring.suppress_kicks();
        assert_eq!((get(&bytes, avail_event), get(&bytes, USED)), (2, 0));
        // The guest requests an interrupt only for the second answer.
        put(&bytes, event, 1);
        let mut wanted = Vec::new();
        for _ in 0..3 {
            ring.put(0, 1);
            ring.publish();
            wanted.push(ring.wants_notification());
        }
        assert_eq!(wanted, [false, true, false]);
        // The guest requests an interrupt for the fifth answer: the middle one of three answers
        // that are published together.
        put(&bytes, event, 4);
        (0..3).for_each(|_| ring.put(0, 1));
        ring.publish();
        assert!(ring.wants_notification());
    }
}
