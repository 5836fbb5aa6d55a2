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
use shadowbell_controller::{InFlightCommand, notify_activity, wait_for_activity};
use shadowbell_disk_layers::LimitedDisk;
use std::collections::{BTreeMap, HashMap, HashSet};
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
            // Returns at once if an I/O thread was awake during the interval. Otherwise all of them
            // sleep. The next request wakes a thread, and this activity ends the wait.
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

/// Request in flight: its disk, and the time when it was seen first.
#[derive(Clone)]
struct Seen {
    disk: String,
    since: Instant,
    /// True if the storage may take long to execute the request, so that its age is no sign of a
    /// stall.
    is_long: bool,
}

/// Requests in flight of a disk.
struct Requests {
    count: u64,
    /// Time when the oldest was seen first.
    since: Instant,
    /// As `since`, but only for requests that the storage executes quickly. `None` if there are
    /// none.
    since_short: Option<Instant>,
}

/// Stalled disk.
struct Stall {
    /// Time since which the disk has not answered.
    since: Instant,
    /// Time of the last log line about the stall.
    logged: Instant,
}

#[derive(Default)]
struct Scanner {
    limit: Duration,
    /// Requests of the last scan.
    seen: HashMap<RequestKey, Seen>,
    /// Number of cancelled writes of each disk in the last scan, and the time of the first scan
    /// that found cancelled writes.
    orphans: HashMap<String, (u64, Instant)>,
    /// Time of the last scan in which a request of the disk had ended.
    progress: HashMap<String, Instant>,
    /// Time of the last scan in which all requests of the disk waited for its limits.
    limited: HashMap<String, Instant>,
    stalled: BTreeMap<String, Stall>,
}

impl Scanner {
    /// Finds the requests in flight at all disks, and logs disks that stall or answer again.
    fn scan(&mut self, changes: &Changes, now: Instant) -> BTreeMap<String, InFlight> {
        let mut requests: Vec<(RequestKey, InFlightCommand)> = Vec::new();
        let busy: HashSet<usize> = self.seen.keys().map(|(index, _)| *index).collect();
        let mut controllers = HashMap::new();
        for served in changes.registry().all() {
            // A controller without a client gets no new commands. It is skipped, unless the last
            // scan found commands of it (`busy`): a reset may still wait for these commands.
            if !served.has_client() && !busy.contains(&served.index) {
                continue;
            }
            // An error only affects this scan: the requests of the controller are missing.
            let commands = served.controller.in_flight().unwrap_or_default();
            requests.extend(commands.into_iter().map(|one| ((served.index, one.id), one)));
            controllers.insert(served.index, served);
        }
        let has_orphans = changes.has_orphans();
        if requests.is_empty() && self.seen.is_empty() && self.stalled.is_empty() && !has_orphans {
            self.orphans.clear();
            self.progress.clear();
            self.limited.clear();
            return BTreeMap::new();
        }
        let disks = changes.disks();
        let ids = ids_by_namespace(&disks);
        let mut in_flight: HashMap<RequestKey, (String, bool)> = HashMap::new();
        for ((index, id), command) in requests {
            let disk = match command.nsid {
                ALL => ids.iter().find(|((of, _), _)| *of == index).map(|(_, id)| id),
                nsid => ids.get(&(index, nsid)),
            };
            if let Some(disk) = disk {
                in_flight.insert((index, id), (disk.clone(), command.may_take_long()));
            }
        }
        let orphans = disks.iter().map(|disk| (disk.id.clone(), disk.open.disk.orphans() as u64));
        let orphans: BTreeMap<_, _> = orphans.filter(|(_, count)| *count != 0).collect();
        let has_dropped = |(index, id): &RequestKey| {
            controllers.get(index).is_none_or(|served| served.controller.has_dropped(*id))
        };
        let all = self.update(in_flight, has_dropped, &orphans, now);
        let mut found = BTreeMap::new();
        for (id, requests) in all {
            let disk = disks.iter().find(|disk| disk.id == id);
            // Held requests of a stopped disk are not at the storage.
            let is_stopped = disk.is_some_and(|disk| disk.open.disk.stopped().is_some());
            if is_stopped {
                self.limited.insert(id.clone(), now);
            }
            let waiting = disk.and_then(limits).map(LimitedDisk::waiting);
            let stalled = self.is_stalled(&id, &requests, waiting, now) && !is_stopped;
            let Requests { count: requests, since, .. } = requests;
            found.insert(id, InFlight { requests, since, stalled });
        }
        self.report(&found, &disks, now);
        found
    }

    /// True if the storage of a disk has not answered a request for long. `waiting` is the number
    /// of requests that wait for the disk's limits, if it has any: they are not at the storage.
    fn is_stalled(
        &mut self,
        id: &str,
        requests: &Requests,
        waiting: Option<u64>,
        now: Instant,
    ) -> bool {
        if waiting.is_some_and(|waiting| waiting >= requests.count) {
            self.limited.insert(id.to_owned(), now);
        }
        let Some(since) = requests.since_short else { return false };
        // Requests do not tell whether and how long they have waited for the limits. So their age
        // counts at the earliest from the last scan in which all requests waited, or one ended.
        let known = [self.limited.get(id), self.progress.get(id).filter(|_| waiting.is_some())];
        let since = known.into_iter().flatten().copied().fold(since, Instant::max);
        now.saturating_duration_since(since) >= self.limit
    }

    /// Compares the requests in flight with those of the last scan. A missing request has ended,
    /// and this counts as progress of its disk. The exception is `has_dropped`: a reset of the
    /// controller may have dropped the request without an answer of the storage.
    fn update(
        &mut self,
        in_flight: HashMap<RequestKey, (String, bool)>,
        has_dropped: impl Fn(&RequestKey) -> bool,
        orphans: &BTreeMap<String, u64>,
        now: Instant,
    ) -> BTreeMap<String, Requests> {
        for (key, Seen { disk, .. }) in &self.seen {
            if !in_flight.contains_key(key) && !has_dropped(key) {
                self.progress.insert(disk.clone(), now);
            }
        }
        let seen = in_flight.into_iter().map(|(key, (disk, is_long))| {
            let since = self.seen.get(&key).map_or(now, |seen| seen.since);
            (key, Seen { disk, since, is_long })
        });
        self.seen = seen.collect();
        for (disk, (before, _)) in &self.orphans {
            if orphans.get(disk).is_none_or(|count| count < before) {
                self.progress.insert(disk.clone(), now);
            }
        }
        self.orphans.retain(|disk, _| orphans.contains_key(disk));
        let mut all: BTreeMap<String, Requests> = BTreeMap::new();
        let mut add = |disk: &str, count: u64, since: Instant, is_long: bool| {
            let empty = Requests { count: 0, since, since_short: None };
            let requests = all.entry(disk.to_owned()).or_insert(empty);
            requests.count += count;
            requests.since = requests.since.min(since);
            if !is_long {
                requests.since_short = Some(requests.since_short.map_or(since, |at| at.min(since)));
            }
        };
        self.seen.values().for_each(|seen| add(&seen.disk, 1, seen.since, seen.is_long));
        for (disk, count) in orphans {
            // The cancelled writes of a stalled disk were in flight before, so their age counts
            // from the begin of the stall.
            let first = self.stalled.get(disk).map_or(now, |stall| stall.since);
            let (before, since) = self.orphans.entry(disk.clone()).or_insert((*count, first));
            *before = *count;
            add(disk, *count, *since, false);
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
                self.stalled.insert(id.clone(), Stall { since: *since, logged: now });
            }
        }
        let is_over = |id: &&String| found.get(*id).is_none_or(|disk| !disk.stalled);
        let over: Vec<String> = self.stalled.keys().filter(is_over).cloned().collect();
        for id in over {
            let Some(Stall { since, logged }) = self.stalled.remove(&id) else { continue };
            let seconds = now.saturating_duration_since(since).as_secs();
            let source = source(&id);
            if self.progress.get(&id).is_some_and(|at| *at >= logged) {
                warn!("the disk {id} ({source}) answers again, after {seconds} s");
            } else {
                warn!(
                    "the disk {id} ({source}) has no request in flight after {seconds} s: a reset \
                     of its controller has cancelled them, and the storage has not answered"
                );
            }
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

fn limits(disk: &ListedDisk) -> Option<&LimitedDisk> {
    LimitedDisk::of(&*disk.open.disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ids: &[u64]) -> HashMap<RequestKey, (String, bool)> {
        ids.iter().map(|id| ((0, *id), ("a".to_owned(), false))).collect()
    }

    #[test]
    fn the_age_of_a_request_begins_when_it_is_seen_first() {
        let (mut scanner, start) = (Scanner::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let (none, kept) = (BTreeMap::new(), |_: &RequestKey| false);
        let of_disk =
            |all: &BTreeMap<String, Requests>, disk: &str| (all[disk].count, all[disk].since);
        assert_eq!(of_disk(&scanner.update(of(&[1, 2]), kept, &none, at(0)), "a"), (2, at(0)));
        assert_eq!(of_disk(&scanner.update(of(&[2, 3, 4]), kept, &none, at(1)), "a"), (3, at(0)));
        assert_eq!(scanner.progress["a"], at(1));
        // Requests 2 and 4 have ended, and request 5 is new.
        assert_eq!(of_disk(&scanner.update(of(&[3, 5]), kept, &none, at(2)), "a"), (2, at(1)));
        // A cancelled write is a request in flight, although no command waits for it.
        let orphans = BTreeMap::from([("a".to_owned(), 1), ("b".to_owned(), 2)]);
        let all = scanner.update(of(&[]), kept, &orphans, at(3));
        assert_eq!((of_disk(&all, "a"), of_disk(&all, "b")), ((1, at(3)), (2, at(3))));
        let all = scanner.update(of(&[6]), kept, &orphans, at(9));
        assert_eq!((of_disk(&all, "a"), of_disk(&all, "b")), ((2, at(3)), (2, at(3))));
        assert!(scanner.update(of(&[]), kept, &none, at(10)).is_empty());
    }

    #[test]
    fn a_request_that_a_reset_has_dropped_is_no_answer() {
        let (mut scanner, start) = (Scanner::default(), Instant::now());
        scanner.update(of(&[1]), |_| false, &BTreeMap::new(), start);
        let later = start + Duration::from_secs(9);
        scanner.update(of(&[]), |_| true, &BTreeMap::new(), later);
        assert!(!scanner.progress.contains_key("a"));
    }

    #[test]
    fn requests_that_wait_for_a_limit_or_take_long_do_not_make_a_disk_stalled() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        // The limit is compared with the simulated times of `at`.
        let mut scanner = Scanner { limit: Duration::from_secs(5), ..Scanner::default() };
        let requests = |since_short| Requests { count: 4, since: start, since_short };
        let short = requests(Some(start));
        assert!(scanner.is_stalled("a", &short, None, at(5)));
        assert!(!scanner.is_stalled("a", &short, None, at(4)));
        assert!(!scanner.is_stalled("a", &requests(None), None, at(1000)), "a long discard");
        // Nothing has ended for 1000 s, because all requests wait for a low limit.
        assert!(!scanner.is_stalled("b", &short, Some(4), at(1000)));
        // From 1000 s on, only three requests wait for the limit, so the fourth request is in
        // flight at the storage.
        assert!(!scanner.is_stalled("b", &short, Some(3), at(1004)));
        assert!(scanner.is_stalled("b", &short, Some(3), at(1005)));
    }
}
