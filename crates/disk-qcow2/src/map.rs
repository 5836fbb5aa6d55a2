//! Map of a disk's clusters to their locations in the image's file, for the fast path. It contains
//! only clusters that are allocated in the image itself and not compressed. A cluster that a
//! snapshot shares is in the map only if the disk is read-only.
//!
//! # Concurrency
//!
//! Any thread can look a cluster up and *enter* it without a lock: the entry of the cluster
//! contains the cluster's location and the number of requests in flight on it. Before a thread
//! changes the location, it *closes* the cluster: no request enters it any more, and the thread
//! waits for the requests in flight. So no request accesses a location after it was reused for
//! another cluster or for a table. Requests on mapped clusters neither allocate nor free clusters.
//!
//! An entry is added after a request on the slow path, by the thread that has executed it. The lock
//! of the tables makes additions and changes exclude each other. Otherwise, a thread could look a
//! location up before a change and add it after the change.
//!
//! # Size
//!
//! Entries are in parts of [`PART`] clusters. There are as many slots for parts as the disk has
//! parts, but at most [`MAX_PARTS`]. On larger disks, several parts share a slot: a new part
//! replaces the part in its slot, if no request is in flight on the clusters of the old part.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Number of clusters per part: 4 KiB of entries.
pub(crate) const PART: u64 = 512;
/// Maximum number of parts: 16 MiB of entries. They cover 128 GiB of a disk with clusters of 64
/// KiB.
const MAX_PARTS: u64 = 4096;

/// Field of an entry: number of requests in flight.
const COUNT: u64 = (1 << 22) - 1;
/// Bit of an entry: reads are allowed.
const READS: u64 = 1 << 22;
/// Bit of an entry: writes are allowed, too.
const WRITES: u64 = 1 << 23;
/// Position, in an entry, of the number of the cluster in the file.
const HOST_SHIFT: u32 = 24;
/// Value of [`Slot::part`] for an empty slot.
const EMPTY: u64 = u64::MAX;

/// Locations of clusters in the file.
pub(crate) struct Map {
    cluster_bits: u32,
    /// Number of clusters of the disk.
    clusters: u64,
    slots: Box<[Slot]>,
    /// Held while entries are added, and while one part replaces another in its slot.
    filling: Mutex<()>,
    /// Mutex of the condition variable `left`. A closing thread waits on this variable until
    /// requests in flight have ended.
    closing: Mutex<()>,
    left: Condvar,
}

/// Slot for a part of the map.
struct Slot {
    /// Number of the part in this slot, or `EMPTY`.
    part: AtomicU64,
    /// True if all clusters of the part were looked up when the part was put into the slot.
    is_looked_up: AtomicBool,
    entries: OnceLock<Box<[AtomicU64]>>,
}

/// Clusters that a request has entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entered {
    first: u64,
    count: u64,
}

impl Map {
    /// Creates an empty map for a disk of `size` bytes.
    pub(crate) fn new(cluster_bits: u32, size: u64) -> Self {
        let clusters = size.div_ceil(1 << cluster_bits);
        let slot = || Slot {
            part: AtomicU64::new(EMPTY),
            is_looked_up: AtomicBool::new(false),
            entries: OnceLock::new(),
        };
        let slots = clusters.div_ceil(PART).min(MAX_PARTS);
        Self {
            cluster_bits,
            clusters,
            slots: (0..slots).map(|_| slot()).collect(),
            filling: Mutex::default(),
            closing: Mutex::default(),
            left: Condvar::new(),
        }
    }

    /// Clusters of a non-empty byte range.
    pub(crate) fn clusters(&self, offset: u64, len: u64) -> std::ops::Range<u64> {
        let end = offset.saturating_add(len).div_ceil(1 << self.cluster_bits);
        offset >> self.cluster_bits..end.min(self.clusters)
    }

    fn slot(&self, part: u64) -> Option<&Slot> {
        self.slots.get((part % (self.slots.len() as u64).max(1)) as usize)
    }

    /// Returns the entry of a cluster, if its part is in a slot.
    fn entry(&self, cluster: u64) -> Option<(&Slot, &AtomicU64)> {
        let slot = self.slot(cluster / PART)?;
        if slot.part.load(Ordering::Acquire) != cluster / PART {
            return None;
        }
        Some((slot, slot.entries.get()?.get((cluster % PART) as usize)?))
    }

    /// Enters a cluster. Returns the number of the cluster in the file, or `None` if it is not
    /// mapped for this access.
    fn enter_one(&self, cluster: u64, needs: u64) -> Option<u64> {
        let (slot, entry) = self.entry(cluster)?;
        let mut now = entry.load(Ordering::Relaxed);
        loop {
            if now & needs == 0 || now & COUNT == COUNT {
                return None;
            }
            match entry.compare_exchange_weak(now, now + 1, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(other) => now = other,
            }
        }
        // If another part took the slot before the increment, the entry belongs to that part.
        if slot.part.load(Ordering::Acquire) != cluster / PART {
            self.leave_entry(entry);
            return None;
        }
        Some(now >> HOST_SHIFT)
    }

    /// Enters all clusters of a byte range, if they are mapped for this access and contiguous in
    /// the file. Returns the offset of the range in the file.
    pub(crate) fn enter(&self, offset: u64, len: u64, writes: bool) -> Option<(u64, Entered)> {
        let needs = if writes { WRITES } else { READS };
        let clusters = self.clusters(offset, len);
        let first = clusters.start;
        let host = self.enter_one(first, needs)?;
        let mut entered = Entered { first, count: 1 };
        for cluster in first + 1..clusters.end {
            let next = self.enter_one(cluster, needs);
            entered.count += u64::from(next.is_some());
            if next != Some(host + entered.count - 1) || next.is_none() {
                self.leave(entered);
                return None;
            }
        }
        let within = offset & ((1 << self.cluster_bits) - 1);
        Some(((host << self.cluster_bits) + within, entered))
    }

    /// Leaves the clusters of a completed request.
    pub(crate) fn leave(&self, entered: Entered) {
        for cluster in entered.first..entered.first + entered.count {
            // The part is still in its slot: a part is not replaced while requests are in flight on
            // its clusters.
            if let Some((_, entry)) = self.entry(cluster) {
                self.leave_entry(entry);
            }
        }
    }

    fn leave_entry(&self, entry: &AtomicU64) {
        let before = entry.fetch_sub(1, Ordering::AcqRel);
        if before & READS == 0 && before & COUNT == 1 {
            // A closing thread checks the count and starts to wait under this lock. So it cannot
            // miss this notification.
            let _locked = self.closing.lock();
            self.left.notify_all();
        }
    }

    /// Closes the clusters of a byte range, and waits for the requests in flight on them. The
    /// caller must prevent additions to the map until its change is complete.
    pub(crate) fn close(&self, offset: u64, len: u64) {
        let mut clusters = self.clusters(offset, len);
        // The range is closed part by part: in a large range, most parts may have no slot and are
        // skipped.
        while clusters.start < clusters.end {
            let part = clusters.start / PART;
            let end = clusters.end.min((part + 1) * PART);
            for cluster in clusters.start..end {
                let Some((_, entry)) = self.entry(cluster) else { break };
                if entry.fetch_and(COUNT, Ordering::AcqRel) & COUNT == 0 {
                    continue;
                }
                let mut closing = self.closing.lock();
                while entry.load(Ordering::Acquire) & COUNT != 0 {
                    self.left.wait(&mut closing);
                }
            }
            clusters.start = end;
        }
    }

    /// Returns the exclusive access for adding entries. `None` if another thread has it.
    pub(crate) fn fill(&self) -> Option<MapFill<'_>> {
        Some(MapFill { map: self, _alone: self.filling.try_lock()? })
    }
}

/// Exclusive access for adding entries.
pub(crate) struct MapFill<'a> {
    map: &'a Map,
    _alone: MutexGuard<'a, ()>,
}

impl MapFill<'_> {
    /// Clusters that have to be looked up after a request for a byte range: all clusters of a part
    /// that was never looked up, and in other parts only the unmapped clusters of the request.
    pub(crate) fn unknown(&self, offset: u64, len: u64) -> Vec<std::ops::Range<u64>> {
        let map = self.map;
        let clusters = map.clusters(offset, len);
        let mut unknown: Vec<std::ops::Range<u64>> = Vec::new();
        let mut add = |range: std::ops::Range<u64>| match unknown.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => unknown.push(range),
        };
        let mut at = clusters.start;
        while at < clusters.end {
            let part = at / PART;
            let end = ((part + 1) * PART).min(map.clusters);
            if !self.take_place(part) {
                add(part * PART..end);
            } else {
                for cluster in at..end.min(clusters.end) {
                    let known = map.entry(cluster).map_or(0, |(_, e)| e.load(Ordering::Relaxed));
                    if known & WRITES == 0 {
                        add(cluster..cluster + 1);
                    }
                }
            }
            at = end;
        }
        unknown
    }

    /// Puts a part into its slot, unless the slot contains another part with requests in flight.
    /// Returns false if the part is in the slot, and the caller has to look up all of its clusters.
    fn take_place(&self, part: u64) -> bool {
        let Some(slot) = self.map.slot(part) else { return true };
        if slot.part.load(Ordering::Acquire) == part {
            return slot.is_looked_up.swap(true, Ordering::Relaxed);
        }
        let new = || (0..PART).map(|_| AtomicU64::new(0)).collect();
        let entries = slot.entries.get_or_init(new);
        for entry in entries {
            let now = entry.load(Ordering::Relaxed);
            let free = now & COUNT == 0
                && entry.compare_exchange(now, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if !free {
                // A request is in flight, so the other part stays. Some of its entries were cleared
                // above, so all of them are looked up again later.
                slot.is_looked_up.store(false, Ordering::Relaxed);
                return true;
            }
        }
        slot.part.store(part, Ordering::Release);
        slot.is_looked_up.store(true, Ordering::Relaxed);
        false
    }

    /// Maps a cluster, all of which is at byte `host` of the file.
    pub(crate) fn add(&self, cluster: u64, host: u64, writes: bool) {
        let Some((_, entry)) = self.map.entry(cluster) else { return };
        let host = host >> self.map.cluster_bits;
        if host >> (u64::BITS - HOST_SHIFT) != 0 {
            return;
        }
        let known = host << HOST_SHIFT | READS | if writes { WRITES } else { 0 };
        let mut now = entry.load(Ordering::Relaxed);
        loop {
            // The caller holds the lock of the tables, so no location changes. A cluster that is
            // already mapped has this location; at most the permission to write is new.
            let next = if now & READS != 0 { now | known & WRITES } else { known | now & COUNT };
            match entry.compare_exchange_weak(now, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => now = other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_testing::wait;

    const BITS: u32 = 16;
    const CLUSTER: u64 = 1 << BITS;

    fn map(clusters: u64) -> Map {
        Map::new(BITS, clusters * CLUSTER)
    }

    /// Maps clusters to locations that are `shift` clusters later in the file.
    fn fill(map: &Map, clusters: std::ops::Range<u64>, shift: u64) {
        let fill = map.fill().unwrap();
        let (offset, len) = (clusters.start * CLUSTER, (clusters.end - clusters.start) * CLUSTER);
        for range in fill.unknown(offset, len) {
            range.for_each(|cluster| fill.add(cluster, (cluster + shift) * CLUSTER, true));
        }
    }

    #[test]
    fn mapped_clusters_are_entered_until_they_are_closed() {
        let map = map(1000);
        assert_eq!(map.enter(0, 512, false), None);
        fill(&map, 3..4, 10);
        let (at, entered) = map.enter(5 * CLUSTER + 512, 4096, true).unwrap();
        assert_eq!(at, 15 * CLUSTER + 512, "the whole part was mapped");
        map.leave(entered);
        map.close(5 * CLUSTER + 1024, 512);
        assert_eq!(map.enter(5 * CLUSTER, 512, false), None);
        assert_eq!(map.enter(4 * CLUSTER, 2 * CLUSTER, false), None, "a part of it is closed");
        map.close(4 * CLUSTER, CLUSTER);
        let fill = map.fill().unwrap();
        let unknown = fill.unknown(4 * CLUSTER, CLUSTER);
        assert!(unknown.into_iter().flatten().eq(4..5), "not the whole part again");
    }

    #[test]
    fn only_contiguous_ranges_are_entered() {
        let map = map(1000);
        let fill = map.fill().unwrap();
        assert!(fill.unknown(0, CLUSTER).into_iter().flatten().eq(0..PART));
        for (cluster, host) in [(0, 7), (1, 8), (2, 9), (3, 11), (4, 12)] {
            fill.add(cluster, host * CLUSTER, cluster != 4);
        }
        assert!(map.fill().is_none());
        drop(fill);
        let (at, entered) = map.enter(512, 3 * CLUSTER - 512, true).unwrap();
        assert_eq!(at, 7 * CLUSTER + 512);
        map.leave(entered);
        assert_eq!(map.enter(2 * CLUSTER, 2 * CLUSTER, false), None);
        assert_eq!(map.enter(3 * CLUSTER, 2 * CLUSTER, true), None, "one of them is only read");
        let (_, entered) = map.enter(3 * CLUSTER, 2 * CLUSTER, false).unwrap();
        map.leave(entered);
        assert_eq!(map.enter(5 * CLUSTER, 512, false), None);
        // A range that was refused must leave no cluster entered. Otherwise this call would wait
        // for ever.
        map.close(0, 3 * CLUSTER);
    }

    #[test]
    fn closing_waits_for_requests_in_flight() {
        let map = map(10);
        fill(&map, 0..10, 0);
        let (_, entered) = map.enter(0, 3 * CLUSTER, true).unwrap();
        let closed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                map.close(2 * CLUSTER, 4 * CLUSTER);
                closed.store(true, Ordering::SeqCst);
            });
            wait::short_pause();
            assert!(!closed.load(Ordering::SeqCst));
            assert_eq!(map.enter(2 * CLUSTER, 512, false), None, "it is closing");
            map.leave(entered);
        });
        assert!(closed.load(Ordering::SeqCst));
    }

    #[test]
    fn a_map_part_replaces_an_unused_one() {
        let map = map(2 * MAX_PARTS * PART);
        let far = MAX_PARTS * PART;
        fill(&map, 0..1, 0);
        let (_, entered) = map.enter(CLUSTER, CLUSTER, true).unwrap();
        fill(&map, far..far + 1, 0);
        assert_eq!(
            map.enter(far * CLUSTER, 512, false),
            None,
            "a request is in flight in the other part"
        );
        map.leave(entered);
        fill(&map, far..far + 1, 0);
        let (at, entered) = map.enter((far + 9) * CLUSTER, 512, true).unwrap();
        assert_eq!(at, (far + 9) * CLUSTER);
        assert_eq!(map.enter(9 * CLUSTER, 512, false), None);
        map.leave(entered);
        // A location that does not fit an entry is not added.
        map.fill().unwrap().add(far, 1 << 62, true);
        assert_eq!(map.enter(far * CLUSTER, 512, false).unwrap().0, far * CLUSTER);
    }

    /// Each cluster alternates between two locations. A counter per location shows the number of
    /// requests in flight on it. After a close, the counter of the old location must be zero.
    #[test]
    fn no_request_is_in_flight_at_a_closed_location() {
        const CLUSTERS: u64 = 8;
        let map = map(CLUSTERS);
        let lock = parking_lot::RwLock::new([0_u64; CLUSTERS as usize]);
        let at_work: Vec<AtomicU64> = (0..2 * CLUSTERS).map(|_| AtomicU64::new(0)).collect();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for seed in 1..3_u64 {
                let (map, at_work, over, lock) = (&map, &at_work, &over, &lock);
                scope.spawn(move || {
                    let mut state = seed;
                    while !over.load(Ordering::Relaxed) {
                        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                        let cluster = (state >> 33) % CLUSTERS;
                        if let Some((at, entered)) = map.enter(cluster * CLUSTER, 512, true) {
                            let place = (at / CLUSTER) as usize;
                            at_work[place].fetch_add(1, Ordering::SeqCst);
                            std::hint::spin_loop();
                            at_work[place].fetch_sub(1, Ordering::SeqCst);
                            map.leave(entered);
                        } else {
                            let places = lock.read();
                            let Some(fill) = map.fill() else { continue };
                            for range in fill.unknown(cluster * CLUSTER, 512) {
                                for cluster in range {
                                    let place = cluster + places[cluster as usize] * CLUSTERS;
                                    fill.add(cluster, place * CLUSTER, true);
                                }
                            }
                        }
                    }
                });
            }
            for turn in 0..20_000_u64 {
                let cluster = turn % CLUSTERS;
                let mut places = lock.write();
                map.close(cluster * CLUSTER, CLUSTER);
                let place = (cluster + places[cluster as usize] * CLUSTERS) as usize;
                assert_eq!(at_work[place].load(Ordering::SeqCst), 0, "turn {turn}");
                places[cluster as usize] ^= 1;
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}
