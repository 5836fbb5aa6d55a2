//! Where the clusters of a disk are in the image's file, for requests that need nothing else of the
//! format: those of clusters that are allocated, and not compressed, shared or below.
//!
//! # Who may do what
//!
//! Any thread looks a cluster up and *enters* it, without a lock: the same word that says where the
//! cluster is counts the requests that are at work there. Whoever changes where a cluster is
//! *closes* it first: nobody enters it any more, and those who have are waited for. So a request
//! never works on a place that is another cluster's by then, or a table's. Requests on clusters
//! that are here neither allocate nor free anything.
//!
//! An entry is *learnt* when a request has gone the long way, by whoever carries it out. Learning
//! and changing exclude each other (`Image::format`), or what was looked up before a change would
//! be noted after it.
//!
//! # Its size
//!
//! Entries are in parts of [`PART`] clusters, of which there are as many as the disk has, and
//! [`MAX_PARTS`] at most. On larger disks parts share places, and one that is learnt takes the
//! place of another that nobody is at work in.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Clusters of a part: 4 KiB of entries.
pub(crate) const PART: u64 = 512;
/// The most parts: 16 MiB of entries, for 128 GiB of a disk with clusters of 64 KiB.
const MAX_PARTS: u64 = 4096;

/// Of an entry: the requests that are at work there,
const COUNT: u64 = (1 << 22) - 1;
/// that it may be read,
const READS: u64 = 1 << 22;
/// that it may be written, too,
const WRITES: u64 = 1 << 23;
/// and the cluster of the file.
const HOST_SHIFT: u32 = 24;
/// No part is here.
const NOBODY: u64 = u64::MAX;

/// Where clusters are.
pub(crate) struct Map {
    cluster_bits: u32,
    /// Clusters of the disk.
    clusters: u64,
    slots: Box<[Slot]>,
    /// Locked while somebody learns: parts take each other's places then.
    learning: Mutex<()>,
    /// For who closes.
    closing: Mutex<()>,
    left: Condvar,
}

/// The place of a part.
struct Slot {
    /// Which one, or `NOBODY`.
    part: AtomicU64,
    /// All of it was looked up once.
    is_learnt: AtomicBool,
    entries: OnceLock<Box<[AtomicU64]>>,
}

/// What a request has entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entered {
    first: u64,
    count: u64,
}

impl Map {
    /// Of a disk of `size` bytes, which knows nothing yet.
    pub(crate) fn new(cluster_bits: u32, size: u64) -> Self {
        let clusters = size.div_ceil(1 << cluster_bits);
        let slot = || Slot {
            part: AtomicU64::new(NOBODY),
            is_learnt: AtomicBool::new(false),
            entries: OnceLock::new(),
        };
        let slots = clusters.div_ceil(PART).min(MAX_PARTS);
        Self {
            cluster_bits,
            clusters,
            slots: (0..slots).map(|_| slot()).collect(),
            learning: Mutex::default(),
            closing: Mutex::default(),
            left: Condvar::new(),
        }
    }

    /// The clusters that a range of bytes, which is not empty, has a part in.
    pub(crate) fn clusters(&self, offset: u64, len: u64) -> std::ops::Range<u64> {
        let end = offset.saturating_add(len).div_ceil(1 << self.cluster_bits);
        offset >> self.cluster_bits..end.min(self.clusters)
    }

    fn slot(&self, part: u64) -> Option<&Slot> {
        self.slots.get((part % (self.slots.len() as u64).max(1)) as usize)
    }

    /// The entry of a cluster, if its part has a place.
    fn entry(&self, cluster: u64) -> Option<(&Slot, &AtomicU64)> {
        let slot = self.slot(cluster / PART)?;
        if slot.part.load(Ordering::Acquire) != cluster / PART {
            return None;
        }
        Some((slot, slot.entries.get()?.get((cluster % PART) as usize)?))
    }

    /// Enters a cluster; which cluster of the file it is.
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
        // Another part may have taken the place before it was entered. Then this is its entry.
        if slot.part.load(Ordering::Acquire) != cluster / PART {
            self.leave_entry(entry);
            return None;
        }
        Some(now >> HOST_SHIFT)
    }

    /// Enters a range of bytes of the disk, if it is in one piece in the file. Where it begins
    /// there.
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

    /// Leaves what was entered: the request has ended.
    pub(crate) fn leave(&self, entered: Entered) {
        for cluster in entered.first..entered.first + entered.count {
            // Its part keeps its place as long as somebody is there.
            if let Some((_, entry)) = self.entry(cluster) {
                self.leave_entry(entry);
            }
        }
    }

    fn leave_entry(&self, entry: &AtomicU64) {
        let before = entry.fetch_sub(1, Ordering::AcqRel);
        if before & READS == 0 && before & COUNT == 1 {
            // Who closes looks while this is locked, and then waits.
            let _locked = self.closing.lock();
            self.left.notify_all();
        }
    }

    /// Closes a range of bytes, and waits until nobody is at work there. Whoever calls it lets
    /// nobody learn anything until the change is over.
    pub(crate) fn close(&self, offset: u64, len: u64) {
        let mut clusters = self.clusters(offset, len);
        // Of many clusters most parts may not be here.
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

    /// Whoever has this learns, unless somebody else does.
    pub(crate) fn learning(&self) -> Option<Learning<'_>> {
        Some(Learning { map: self, _alone: self.learning.try_lock()? })
    }

    /// What is known of this cluster may be written, too. Not while somebody learns.
    pub(crate) fn allow_writes(&self, cluster: u64) {
        if let Some((_, entry)) = self.entry(cluster) {
            let may = |now: u64| (now & READS != 0).then_some(now | WRITES);
            let _ = entry.fetch_update(Ordering::AcqRel, Ordering::Relaxed, may);
        }
    }
}

/// Notes where clusters are. One at a time.
pub(crate) struct Learning<'a> {
    map: &'a Map,
    _alone: MutexGuard<'a, ()>,
}

impl Learning<'_> {
    /// Which clusters to look up because of a request for these bytes: their whole parts, where
    /// that was not done yet, or those of them that are not known.
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

    /// Sees to it that a part has a place, unless there is somebody at work in the one that has it.
    /// Whether all of the part was learnt before.
    fn take_place(&self, part: u64) -> bool {
        let Some(slot) = self.map.slot(part) else { return true };
        if slot.part.load(Ordering::Acquire) == part {
            return slot.is_learnt.swap(true, Ordering::Relaxed);
        }
        let new = || (0..PART).map(|_| AtomicU64::new(0)).collect();
        let entries = slot.entries.get_or_init(new);
        for entry in entries {
            let now = entry.load(Ordering::Relaxed);
            let free = now & COUNT == 0
                && entry.compare_exchange(now, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if !free {
                // What was forgotten until here is learnt again.
                slot.is_learnt.store(false, Ordering::Relaxed);
                return true;
            }
        }
        slot.part.store(part, Ordering::Release);
        slot.is_learnt.store(true, Ordering::Relaxed);
        false
    }

    /// Notes that a cluster is at byte `host` of the file, which holds all of it.
    pub(crate) fn learn(&self, cluster: u64, host: u64, writes: bool) {
        let Some((_, entry)) = self.map.entry(cluster) else { return };
        let host = host >> self.map.cluster_bits;
        if host >> (u64::BITS - HOST_SHIFT) != 0 {
            return;
        }
        let known = host << HOST_SHIFT | READS | if writes { WRITES } else { 0 };
        let mut now = entry.load(Ordering::Relaxed);
        loop {
            // Nobody changes it now, so if it is known it is known to be there.
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

    /// All of them, as if each were `shift` clusters farther on in the file.
    fn learn(map: &Map, clusters: std::ops::Range<u64>, shift: u64) {
        let learning = map.learning().unwrap();
        let (offset, len) = (clusters.start * CLUSTER, (clusters.end - clusters.start) * CLUSTER);
        for range in learning.unknown(offset, len) {
            range.for_each(|cluster| learning.learn(cluster, (cluster + shift) * CLUSTER, true));
        }
    }

    #[test]
    fn what_was_learnt_is_entered_until_it_is_closed() {
        let map = map(1000);
        assert_eq!(map.enter(0, 512, false), None);
        learn(&map, 3..4, 10);
        let (at, entered) = map.enter(5 * CLUSTER + 512, 4096, true).unwrap();
        assert_eq!(at, 15 * CLUSTER + 512, "the whole part was learnt");
        map.leave(entered);
        map.close(5 * CLUSTER + 1024, 512);
        assert_eq!(map.enter(5 * CLUSTER, 512, false), None);
        assert_eq!(map.enter(4 * CLUSTER, 2 * CLUSTER, false), None, "a part of it is closed");
        map.close(4 * CLUSTER, CLUSTER);
        let learning = map.learning().unwrap();
        let unknown = learning.unknown(4 * CLUSTER, CLUSTER);
        assert!(unknown.into_iter().flatten().eq(4..5), "not the whole part again");
    }

    #[test]
    fn a_range_is_entered_if_it_is_in_one_piece() {
        let map = map(1000);
        let learning = map.learning().unwrap();
        assert!(learning.unknown(0, CLUSTER).into_iter().flatten().eq(0..PART));
        for (cluster, host) in [(0, 7), (1, 8), (2, 9), (3, 11), (4, 12)] {
            learning.learn(cluster, host * CLUSTER, cluster != 4);
        }
        assert!(map.learning().is_none());
        drop(learning);
        let (at, entered) = map.enter(512, 3 * CLUSTER - 512, true).unwrap();
        assert_eq!(at, 7 * CLUSTER + 512);
        map.leave(entered);
        assert_eq!(map.enter(2 * CLUSTER, 2 * CLUSTER, false), None);
        assert_eq!(map.enter(3 * CLUSTER, 2 * CLUSTER, true), None, "one of them is only read");
        let (_, entered) = map.enter(3 * CLUSTER, 2 * CLUSTER, false).unwrap();
        map.leave(entered);
        map.allow_writes(4);
        map.allow_writes(5);
        assert!(map.enter(3 * CLUSTER, 2 * CLUSTER, true).is_some());
        assert_eq!(map.enter(5 * CLUSTER, 512, false), None);
        // Nobody was left behind where it was refused: this would wait for ever.
        map.close(0, 3 * CLUSTER);
    }

    #[test]
    fn who_closes_waits_for_those_at_work() {
        let map = map(10);
        learn(&map, 0..10, 0);
        let (_, entered) = map.enter(0, 3 * CLUSTER, true).unwrap();
        let closed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                map.close(2 * CLUSTER, 4 * CLUSTER);
                closed.store(true, Ordering::SeqCst);
            });
            wait::moment();
            assert!(!closed.load(Ordering::SeqCst));
            assert_eq!(map.enter(2 * CLUSTER, 512, false), None, "it is closing");
            map.leave(entered);
        });
        assert!(closed.load(Ordering::SeqCst));
    }

    #[test]
    fn a_part_takes_the_place_of_one_that_nobody_is_in() {
        let map = map(2 * MAX_PARTS * PART);
        let far = MAX_PARTS * PART;
        learn(&map, 0..1, 0);
        let (_, entered) = map.enter(CLUSTER, CLUSTER, true).unwrap();
        learn(&map, far..far + 1, 0);
        assert_eq!(map.enter(far * CLUSTER, 512, false), None, "somebody is in the other one");
        map.leave(entered);
        learn(&map, far..far + 1, 0);
        let (at, entered) = map.enter((far + 9) * CLUSTER, 512, true).unwrap();
        assert_eq!(at, (far + 9) * CLUSTER);
        assert_eq!(map.enter(9 * CLUSTER, 512, false), None);
        map.leave(entered);
        // What is too far away in the file is not noted.
        map.learning().unwrap().learn(far, 1 << 62, true);
        assert_eq!(map.enter(far * CLUSTER, 512, false).unwrap().0, far * CLUSTER);
    }

    /// Each cluster moves to and fro between two places, and a counter at each place says that
    /// somebody is at work there: whoever moves one finds nobody at the old place.
    #[test]
    fn nobody_is_at_work_where_a_cluster_was() {
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
                            let Some(learning) = map.learning() else { continue };
                            for range in learning.unknown(cluster * CLUSTER, 512) {
                                for cluster in range {
                                    let place = cluster + places[cluster as usize] * CLUSTERS;
                                    learning.learn(cluster, place * CLUSTER, true);
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
