//! Stalled disks: a scanner compares the commands in flight each second, and finds disks whose
//! storage has not answered a request for some time.
//!
//! The commands in flight are those in the journals of the controllers, and cancelled writes that
//! the storage may still execute. The age of a request is the time since the scanner has seen it
//! first, so its error is at most a second. While the I/O threads sleep and no command is in
//! flight, the scanner sleeps.

use super::disks::ListedDisk;
use super::in_flight::InFlight;
use super::reconfigure::Changes;
use super::server::Server;
use shadowbell_controller::{notify_activity, wait_for_activity};
use shadowbell_disk_layers::LimitedDisk;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tracing::warn;

/// Time between two scans.
const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum sleep of the scanner while the I/O threads sleep.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// NSID of a command for all namespaces (broadcast).
const ALL: u32 = u32::MAX;

/// Thread of the scanner. A drop ends the thread.
pub(super) struct StallWatch(Arc<AtomicBool>);

impl StallWatch {
    /// Starts the thread. A disk is stalled if a request is older than `limit`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(server: &Server, limit: Duration) -> anyhow::Result<Self> {
        let is_over = Arc::new(AtomicBool::new(false));
        let (its, changes) = (Arc::clone(&is_over), Arc::downgrade(server.changes()));
        std::thread::Builder::new()
            .name("sb-stalls".into())
            .spawn(move || watch(&its, &changes, limit))?;
        Ok(Self(is_over))
    }
}

impl Drop for StallWatch {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
        notify_activity();
    }
}

fn watch(is_over: &AtomicBool, changes: &Weak<Changes>, limit: Duration) {
    let mut scanner = Scanner { limit, ..Scanner::default() };
    loop {
        // While the thread waits, it holds only a weak reference, so that disks can be closed.
        let Some(strong) = changes.upgrade() else { return };
        let activity = strong.pool().activity();
        let disks = scanner.scan(&strong, Instant::now());
        let is_idle = disks.is_empty();
        *strong.in_flight().lock() = disks;
        drop(strong);
        std::thread::sleep(INTERVAL);
        if is_idle {
            // Without activity for a whole interval, the next request wakes an I/O thread.
            wait_for_activity(LONGEST_SLEEP, || {
                let now = changes.upgrade().map(|changes| changes.pool().activity());
                is_over.load(Ordering::Acquire) || now != Some(activity)
            });
        }
        if is_over.load(Ordering::Acquire) {
            return;
        }
    }
}

/// Key of a request: index of its controller, and the request's identifier in that controller.
type RequestKey = (usize, u64);

#[derive(Default)]
struct Scanner {
    limit: Duration,
    /// Requests of the last scan: id of the disk, and time when the request was seen first.
    seen: HashMap<RequestKey, (String, Instant)>,
    /// Time when cancelled writes of a disk were seen first.
    orphans: HashMap<String, Instant>,
    /// Time of the last scan in which a request of the disk had ended.
    progress: HashMap<String, Instant>,
    /// Ids of the stalled disks, and time when the oldest unanswered request of each was seen
    /// first.
    stalled: BTreeMap<String, Instant>,
}

impl Scanner {
    /// Finds the requests in flight at all disks, and logs disks that stall or answer again.
    fn scan(&mut self, changes: &Changes, now: Instant) -> BTreeMap<String, InFlight> {
        let mut requests: Vec<(RequestKey, u32)> = Vec::new();
        for served in changes.registry().all() {
            // An error only affects this scan: the requests of the controller are missing.
            let commands = served.controller.in_flight().unwrap_or_default();
            requests.extend(commands.iter().map(|one| ((served.index, one.id), one.nsid)));
        }
        let has_orphans = changes.has_orphans();
        if requests.is_empty() && self.seen.is_empty() && self.stalled.is_empty() && !has_orphans {
            self.orphans.clear();
            self.progress.clear();
            return BTreeMap::new();
        }
        let disks = changes.disks();
        let ids = ids_by_namespace(&disks);
        let mut in_flight: HashMap<RequestKey, String> = HashMap::new();
        for ((index, id), nsid) in requests {
            let disk = match nsid {
                ALL => ids.iter().find(|((of, _), _)| *of == index).map(|(_, id)| id),
                nsid => ids.get(&(index, nsid)),
            };
            if let Some(disk) = disk {
                in_flight.insert((index, id), disk.clone());
            }
        }
        let orphans = disks.iter().map(|disk| (disk.id.clone(), disk.open.disk.orphans() as u64));
        let orphans: BTreeMap<_, _> = orphans.filter(|(_, count)| *count != 0).collect();
        let all = self.update(in_flight, &orphans, now);
        let mut found = BTreeMap::new();
        for (id, (requests, since)) in all {
            let limited = disks.iter().any(|disk| disk.id == id && is_limited(disk));
            // Requests of a rate-limited disk wait for the limit, so a disk of which other requests
            // end is not stalled.
            let moved =
                self.progress.get(&id).filter(|_| limited).map_or(since, |at| since.max(*at));
            let stalled = now.saturating_duration_since(moved) >= self.limit;
            found.insert(id, InFlight { requests, since, stalled });
        }
        self.report(&found, &disks, now);
        found
    }

    /// Compares the requests in flight with those of the last scan: number of requests and time of
    /// the oldest, by disk.
    fn update(
        &mut self,
        in_flight: HashMap<RequestKey, String>,
        orphans: &BTreeMap<String, u64>,
        now: Instant,
    ) -> BTreeMap<String, (u64, Instant)> {
        for (key, (disk, _)) in &self.seen {
            if !in_flight.contains_key(key) {
                self.progress.insert(disk.clone(), now);
            }
        }
        let seen = in_flight.into_iter().map(|(key, disk)| {
            let since = self.seen.get(&key).map_or(now, |(_, since)| *since);
            (key, (disk, since))
        });
        self.seen = seen.collect();
        self.orphans.retain(|disk, _| orphans.contains_key(disk));
        let mut all: BTreeMap<String, (u64, Instant)> = BTreeMap::new();
        for (disk, since) in self.seen.values() {
            let (count, oldest) = all.entry(disk.clone()).or_insert((0, *since));
            *count += 1;
            *oldest = (*oldest).min(*since);
        }
        for (disk, orphans) in orphans {
            let since = *self.orphans.entry(disk.clone()).or_insert(now);
            let (count, oldest) = all.entry(disk.clone()).or_insert((0, since));
            *count += orphans;
            *oldest = (*oldest).min(since);
        }
        all
    }

    fn report(&mut self, found: &BTreeMap<String, InFlight>, disks: &[ListedDisk], now: Instant) {
        let source = |id: &str| {
            let disk = disks.iter().find(|disk| disk.id == id);
            disk.map(|disk| disk.open.disk.name()).unwrap_or_default()
        };
        for (id, InFlight { requests, since, stalled }) in found {
            if *stalled && !self.stalled.contains_key(id) {
                let seconds = now.saturating_duration_since(*since).as_secs();
                warn!(
                    "the disk {id} ({}) is stalled: its storage has not answered {requests} \
                     request{} for {seconds} s",
                    source(id),
                    if *requests == 1 { "" } else { "s" }
                );
                self.stalled.insert(id.clone(), *since);
            }
        }
        let is_over = |id: &&String| found.get(*id).is_none_or(|disk| !disk.stalled);
        let over: Vec<String> = self.stalled.keys().filter(is_over).cloned().collect();
        for id in over {
            let Some(since) = self.stalled.remove(&id) else { continue };
            let seconds = now.saturating_duration_since(since).as_secs();
            warn!("the disk {id} ({}) answers again, after {seconds} s", source(&id));
        }
    }
}

/// Ids of the disks by controller index and NSID.
fn ids_by_namespace(disks: &[ListedDisk]) -> BTreeMap<(usize, u32), String> {
    let of = |disk: &ListedDisk| -> Vec<_> {
        let namespaces = disk.namespaces.iter();
        namespaces.map(|(served, nsid)| ((served.index, *nsid), disk.id.clone())).collect()
    };
    disks.iter().flat_map(of).collect()
}

fn is_limited(disk: &ListedDisk) -> bool {
    LimitedDisk::of(&*disk.open.disk).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_age_of_a_request_begins_when_it_is_seen_first() {
        let (mut scanner, start) = (Scanner::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let of = |ids: &[u64]| ids.iter().map(|id| ((0, *id), "a".to_owned())).collect();
        let none = BTreeMap::new();
        assert_eq!(scanner.update(of(&[1, 2]), &none, at(0))["a"], (2, at(0)));
        assert_eq!(scanner.update(of(&[2, 3, 4]), &none, at(1))["a"], (3, at(0)));
        assert_eq!(scanner.progress["a"], at(1));
        // Requests 2 and 4 have ended, and request 5 is new.
        assert_eq!(scanner.update(of(&[3, 5]), &none, at(2))["a"], (2, at(1)));
        // A cancelled write is a request in flight, although no command waits for it.
        let orphans = BTreeMap::from([("a".to_owned(), 1), ("b".to_owned(), 2)]);
        let all = scanner.update(of(&[]), &orphans, at(3));
        assert_eq!((all["a"], all["b"]), ((1, at(3)), (2, at(3))));
        let all = scanner.update(of(&[6]), &orphans, at(9));
        assert_eq!((all["a"], all["b"]), ((2, at(3)), (2, at(3))));
        assert!(scanner.update(of(&[]), &none, at(10)).is_empty());
    }
}
