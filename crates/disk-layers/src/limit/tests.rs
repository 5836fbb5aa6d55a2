//! Tests of rate limits with a simulated clock.

use super::counts::Counts;
use super::queue::LimitedQueue;
use super::*;
use crate::ZonedDisk;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_disk::{Disk, DiskError, Op, Queue, Request, Submitted, ZoneFormat};
use shadowbell_disk_file::MemDisk;
use shadowbell_memory::{DmaSpace, Mapping, Segments, View};
use shadowbell_testing::wait::LIMIT;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const READ: Op = Op::Read;
const WRITE: Op = Op::Write { fua: false };
const MS: u64 = 1_000_000;

/// Clock that advances only when a test advances it.
#[derive(Clone, Default)]
struct Hands(Arc<AtomicU64>);

impl Hands {
    fn new() -> Self {
        Self(Arc::new((3600 * 1000 * MS).into()))
    }

    fn clock(&self) -> Clock {
        let hands = Arc::clone(&self.0);
        Arc::new(move || hands.load(Ordering::Relaxed))
    }

    fn advance(&self, ns: u64) {
        self.0.fetch_add(ns, Ordering::Relaxed);
    }
}

fn limits(texts: &[(&str, &str)]) -> Limits {
    let mut limits = Limits::default();
    texts.iter().for_each(|(name, text)| assert_eq!(limits.set(name, text), Ok(true)));
    limits
}

/// Simulated guest with a fixed number of requests in flight.
struct Load {
    queue: Box<dyn Queue>,
    memory: Arc<Mapping>,
    /// Requests that the guest repeats, each with the index of its submission queue.
    requests: Vec<(u32, Request)>,
    free: VecDeque<u32>,
    /// Number of completed requests, by submission queue.
    done: Vec<u64>,
    bytes: u64,
}

impl Load {
    fn new(disk: &dyn Disk, depths: &[(u32, Op, u64)]) -> Self {
        let requests = depths.iter().enumerate().flat_map(|(source, (depth, op, len))| {
            let request = Request { op: *op, offset: 0, len: *len };
            std::iter::repeat_n((source as u32, request), *depth as usize)
        });
        let requests: Vec<_> = requests.collect();
        Self {
            queue: disk.queue().unwrap(),
            memory: Mapping::anonymous(1 << 20).unwrap(),
            free: (0..requests.len() as u32).collect(),
            requests,
            done: vec![0; depths.len()],
            bytes: 0,
        }
    }

    fn ended(&mut self, tag: u32, outcome: Result<(), DiskError>) {
        outcome.unwrap();
        let (source, request) = self.requests[tag as usize];
        self.done[source as usize] += 1;
        self.bytes += request.len;
        self.free.push_back(tag);
    }

    /// Executes one pass of an I/O thread: reaps completions, then submits requests.
    fn pass(&mut self) {
        let mut ended = Vec::new();
        self.queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
        ended.into_iter().for_each(|(tag, outcome)| self.ended(tag, outcome));
        for _ in 0..self.free.len() {
            let Some(tag) = self.free.pop_front() else { return };
            let (source, request) = self.requests[tag as usize];
            self.queue.begin_turn(source);
            let len = if request.op == Op::Flush { 0 } else { request.len as usize };
            let mut data = Segments::from_bytes(&self.memory.bytes().slice(0, len).unwrap());
            match self.queue.submit(tag, &request, &mut data) {
                Submitted::Done(outcome) => self.ended(tag, outcome),
                Submitted::Pending => {}
            }
        }
    }

    fn total(&self) -> u64 {
        self.done.iter().sum()
    }
}

/// Runs for a simulated second, with one pass every `apart` nanoseconds. Returns the number of
/// completed requests in each 100 ms.
fn second(hands: &Hands, load: &mut Load, apart: u64) -> Vec<u64> {
    let mut counts = Vec::new();
    for _ in 0..10 {
        let before = load.total();
        for _ in 0..100 * MS / apart {
            hands.advance(apart);
            load.pass();
        }
        counts.push(load.total() - before);
    }
    counts
}

fn disk(hands: &Hands, texts: &[(&str, &str)]) -> (LimitedDisk, Arc<Limiter>) {
    let limiter = Limiter::with_clock(limits(texts), hands.clock());
    let inner = Arc::new(MemDisk::new(8192, 512).unwrap());
    (LimitedDisk::new(inner, Arc::clone(&limiter), None), limiter)
}

#[track_caller]
fn is_within(value: u64, wanted: u64, percent: u64) {
    let most = wanted * percent / 100;
    assert!(value.abs_diff(wanted) <= most, "{value} is not {wanted} within {percent} %");
}

#[test]
fn a_rate_does_not_depend_on_the_polling_interval() {
    for (name, op) in [("iops", READ), ("iops", WRITE), ("read-iops", READ), ("write-iops", WRITE)]
    {
        for rate in [100, 1000, 30_000, 200_000] {
            for apart in [10_000, MS, 5 * MS] {
                let hands = Hands::new();
                let (disk, _) = disk(&hands, &[(name, &rate.to_string())]);
                let depth = if apart * rate > MS * 1000 { 4096 } else { 64 };
                let mut load = Load::new(&disk, &[(depth, op, 512)]);
                second(&hands, &mut load, MS);
                let counts = second(&hands, &mut load, apart);
                is_within(counts.iter().sum(), rate, 2);
                counts.iter().for_each(|count| is_within(*count, rate / 10, 5));
            }
        }
    }
}

#[test]
fn bytes_are_counted_and_each_direction_for_itself() {
    let hands = Hands::new();
    let limits = [("read-bandwidth", "10MiB"), ("write-bandwidth", "5MiB")];
    let (disk, _) = disk(&hands, &limits);
    let mut reads = Load::new(&disk, &[(8, READ, 4096), (8, READ, 65536)]);
    let mut writes = Load::new(&disk, &[(8, WRITE, 16384)]);
    let mut run = || {
        let before = (reads.bytes, writes.bytes);
        for _ in 0..1000 {
            hands.advance(MS);
            reads.pass();
            writes.pass();
        }
        (reads.bytes - before.0, writes.bytes - before.1)
    };
    run();
    let (read, written) = run();
    is_within(read, 10 << 20, 2);
    is_within(written, 5 << 20, 2);
    is_within(reads.done[0], reads.done[1], 2);
}

#[test]
fn requests_without_a_limit_are_not_delayed() {
    let hands = Hands::new();
    let (disk, _) = disk(&hands, &[("write-iops", "1"), ("bandwidth", "4096:4096")]);
    let mut load = Load::new(&disk, &[(1, Op::Flush, 0)]);
    (0..100).for_each(|_| load.pass());
    assert_eq!(load.total(), 100);
    // A Discard transfers no data, so its length does not count for the bandwidth limit. But it
    // counts as one write for `write-iops`.
    let mut load = Load::new(&disk, &[(1, Op::Discard, 1 << 20)]);
    load.pass();
    assert_eq!(load.total(), 1);
    (0..10).for_each(|_| load.pass());
    assert_eq!(load.total(), 1);
    hands.advance(1000 * MS);
    load.pass();
    assert_eq!(load.total(), 2);
}

#[test]
fn a_burst_is_available_after_lower_load() {
    let hands = Hands::new();
    let (disk, _) = disk(&hands, &[("iops", "1000:500")]);
    let mut load = Load::new(&disk, &[(4096, READ, 512)]);
    load.pass();
    is_within(load.total(), 500, 1);
    assert!(second(&hands, &mut load, MS).iter().all(|count| count.abs_diff(100) <= 1));
    // A load with one request at a time stays below the rate, and so leaves the burst unused.
    let (disk, _) = self::disk(&hands, &[("iops", "1000:500")]);
    let mut slow = Load::new(&disk, &[(1, READ, 512)]);
    for _ in 0..100 {
        hands.advance(2 * MS);
        slow.pass();
    }
    let mut many = Load::new(&disk, &[(4096, READ, 512)]);
    many.pass();
    is_within(many.total(), 500, 1);
}

#[test]
fn queues_and_disks_with_a_common_limit_share_it_fairly() {
    let hands = Hands::new();
    let group = Limiter::with_clock(limits(&[("iops", "3000")]), hands.clock());
    let own = || Limiter::with_clock(Limits::default(), hands.clock());
    let inner: Arc<dyn Disk> = Arc::new(MemDisk::new(8192, 512).unwrap());
    let disks =
        [(); 2].map(|()| LimitedDisk::new(Arc::clone(&inner), own(), Some(Arc::clone(&group))));
    let mut deep = Load::new(&disks[0], &[(256, READ, 512), (8, WRITE, 512)]);
    let mut other = Load::new(&disks[0], &[(16, READ, 4096)]);
    let mut neighbour = Load::new(&disks[1], &[(4, WRITE, 512)]);
    let mut run = |passes: u64| {
        for _ in 0..passes {
            hands.advance(MS / 10);
            deep.pass();
            other.pass();
            neighbour.pass();
        }
        [deep.done[0], deep.done[1], other.total(), neighbour.total()]
    };
    let before = run(1000);
    let after = run(10_000);
    let counts = [0, 1, 2, 3].map(|at| after[at] - before[at]);
    is_within(counts.iter().sum(), 3000, 2);
    for (count, part) in counts.into_iter().zip([500, 500, 1000, 1000]) {
        is_within(count, part, 5);
    }
}

#[test]
fn another_limit_counts_at_once() {
    let hands = Hands::new();
    let (disk, limiter) = disk(&hands, &[("iops", "10")]);
    let mut load = Load::new(&disk, &[(64, READ, 512)]);
    load.pass();
    let began = load.total();
    hands.advance(MS);
    load.pass();
    assert_eq!(load.total(), began, "the next one has to wait");
    limiter.set(limits(&[("iops", "1000")]));
    let counts = second(&hands, &mut load, MS);
    is_within(counts.iter().sum(), 1000, 2);
    limiter.set(limits(&[("iops", "100")]));
    is_within(second(&hands, &mut load, MS).iter().sum(), 100, 2);
    limiter.set(Limits::default());
    let before = load.total();
    load.pass();
    assert!(load.total() >= before + 64, "nothing waits any more");
}

#[test]
fn a_cancelled_request_ends_and_uses_no_allowance() {
    let hands = Hands::new();
    let (disk, _) = disk(&hands, &[("iops", "1:1")]);
    let memory = Mapping::anonymous(4096).unwrap();
    let mut queue = disk.queue().unwrap();
    let request = Request { op: READ, offset: 0, len: 512 };
    for tag in 0..4 {
        let mut data = Segments::from_bytes(&memory.bytes().slice(0, 512).unwrap());
        let submitted = queue.submit(tag, &request, &mut data);
        let expected = if tag == 0 { Submitted::Done(Ok(())) } else { Submitted::Pending };
        assert_eq!(submitted, expected);
    }
    assert_eq!(queue.pending(), 3);
    queue.cancel(1);
    queue.cancel(3);
    let mut ended = Vec::new();
    queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
    assert_eq!(ended, [(1, Err(DiskError::Cancelled)), (3, Err(DiskError::Cancelled))]);
    assert_eq!(queue.pending(), 1);
    hands.advance(3000 * MS);
    queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
    assert_eq!((ended.last(), queue.pending()), (Some(&(2, Ok(()))), 0));
}

/// Cancelling all waiting requests takes time linear in their number. With quadratic time, this
/// test would not end in acceptable time.
#[test]
fn a_hundred_thousand_that_wait_are_cancelled_at_once() {
    const MANY: u32 = 200_000;
    let hands = Hands::new();
    let (disk, _) = disk(&hands, &[("iops", "1:1")]);
    let mut queue = disk.queue().unwrap();
    let request = Request { op: READ, offset: 0, len: 512 };
    let memory = Mapping::anonymous(4096).unwrap().bytes().slice(0, 512).unwrap();
    for tag in 0..=MANY {
        queue.begin_turn(tag % 3);
        queue.submit(tag, &request, &mut Segments::from_bytes(&memory));
    }
    // The last request is cancelled first: the worst order for a search from the front.
    (1..=MANY).rev().for_each(|tag| queue.cancel(tag));
    let mut ended = Vec::new();
    queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
    assert!(ended.into_iter().eq((1..=MANY).rev().map(|tag| (tag, Err(DiskError::Cancelled)))));
    assert_eq!(queue.pending(), 0);
}

/// Quiescing starts all requests that wait for the rate limit. They still count, so that later
/// requests wait longer.
#[test]
fn quiescing_releases_limited_requests() {
    let hands = Hands::new();
    let (disk, limiter) = disk(&hands, &[("iops", "100:1")]);
    let mut load = Load::new(&disk, &[(50, READ, 512)]);
    load.pass();
    assert!(load.queue.pending() > 40);
    limiter.open(true);
    let mut ended = 0;
    load.queue.reap(&mut |_, _, _| ended += 1);
    assert!(ended > 40 && load.queue.pending() == 0);
    limiter.open(false);
    let mut parsed = Load::new(&disk, &[(50, READ, 512)]);
    hands.advance(400 * MS);
    parsed.pass();
    assert_eq!(parsed.total(), 0, "these were had already");
    hands.advance(200 * MS);
    parsed.pass();
    assert!(parsed.total() > 0);
}

/// An unmap of guest memory does not wait until the rate limit admits requests. Requests whose
/// buffers are in the unmapped memory fail at once; other requests continue to wait.
#[test]
fn an_unmap_does_not_wait_for_limited_requests() {
    let hands = Hands::new();
    let (disk, _) = disk(&hands, &[("iops", "100:1")]);
    let mut queue = disk.queue().unwrap();
    let mut space = DmaSpace::default();
    for iova in [0, 8192] {
        space.map(iova, 4096, &Mapping::anonymous(4096).unwrap().bytes()).unwrap();
    }
    let view = View::new(Arc::clone(space.table()));
    let request = Request { op: READ, offset: 0, len: 512 };
    for (tag, iova) in [(1, 0), (2, 0), (3, 8192)] {
        let mut data = Segments::new();
        data.resolve_ranges(&view, &[(iova, 512)], true).unwrap();
        queue.submit(tag, &request, &mut data);
    }
    let watch = view.watch();
    drop(view);
    space.unmap(8192, 4096).unwrap();
    queue.memory_changed(&View::new(Arc::clone(space.table())));
    assert!(watch.is_idle(), "a limited request holds the memory");
    let mut ended = Vec::new();
    hands.advance(5 * MS);
    queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
    assert!(!ended.iter().any(|(tag, _)| *tag == 2), "{ended:?}");
    hands.advance(100 * MS);
    queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
    ended.sort_unstable_by_key(|(tag, _)| *tag);
    ended.retain(|(tag, _)| *tag != 1);
    assert_eq!(ended, [(2, Ok(())), (3, Err(DiskError::BadBuffer))]);
}

/// A sleeping thread is woken once at the start time of a request. The test uses the real clock.
#[test]
fn a_sleeping_thread_is_woken_at_the_start_time() {
    let limiter = Limiter::new(limits(&[("iops", "200:1")]));
    let inner = Arc::new(MemDisk::new(8192, 512).unwrap());
    let disk = LimitedDisk::new(inner, Arc::clone(&limiter), None);
    let mut load = Load::new(&disk, &[(4, READ, 512)]);
    load.pass();
    let is_readable = |load: &Load, time: Duration| {
        let fd = load.queue.timer_fd().unwrap();
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let timeout = Timespec::try_from(time).unwrap();
        rustix::io::retry_on_intr(|| poll(&mut fds, Some(&timeout))).unwrap() == 1
    };
    let mut wakes = 0;
    while load.total() < 20 {
        assert!(is_readable(&load, LIMIT), "no wake-up");
        load.pass();
        wakes += 1;
    }
    assert!(wakes <= 60, "{wakes} wakes for 20 requests");
    // A change of the limits wakes the waiting queue.
    limiter.set(limits(&[("iops", "1:1")]));
    load.pass();
    limiter.set(Limits::default());
    assert!(is_readable(&load, LIMIT));
    let mut ended = 0;
    load.queue.reap(&mut |_, _, _| ended += 1);
    assert_eq!((ended, load.queue.pending()), (4, 0));
    limiter.set(limits(&[("iops", "1:1")]));
    assert!(!is_readable(&load, Duration::ZERO), "no request waits");
}

/// Test queue below the layer. It counts the requests that were submitted and not committed.
struct Uncommitted(Arc<AtomicU64>);

impl Queue for Uncommitted {
    fn submit(&mut self, _: u32, _: &Request, _: &mut Segments) -> Submitted {
        self.0.fetch_add(1, Ordering::Relaxed);
        Submitted::Pending
    }

    fn commit(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// If `reap` starts a delayed request, it also commits the request, because the thread may sleep
/// after `reap` without a call of `commit`.
#[test]
fn a_delayed_request_is_in_flight_when_it_starts() {
    let hands = Hands::new();
    let limiter = Limiter::with_clock(limits(&[("iops", "100:1")]), hands.clock());
    let uncommitted = Arc::<AtomicU64>::default();
    let inner = Box::new(Uncommitted(Arc::clone(&uncommitted)));
    let mut queue = LimitedQueue::new(inner, Arc::new([limiter]), Counts::default()).unwrap();
    let request = Request { op: READ, offset: 0, len: 512 };
    for tag in 0..2 {
        let submitted = queue.submit(tag, &request, &mut Segments::new());
        assert!(matches!(submitted, Submitted::Pending));
    }
    assert_eq!(uncommitted.load(Ordering::Relaxed), 1, "the other request waits");
    queue.commit();
    hands.advance(20 * MS);
    queue.reap(&mut |_, _, _| {});
    assert_eq!(queue.pending(), 0, "its start time has come");
    assert_eq!(uncommitted.load(Ordering::Relaxed), 0);
}

/// Replayed writes to a zone stay replays while a limit delays them: the write pointer has already
/// passed them.
#[test]
fn a_delayed_replay_is_submitted_as_a_replay() {
    let hands = Hands::new();
    let mem = Arc::new(MemDisk::new(8192, 512).unwrap());
    let zoned = ZonedDisk::new(mem, ZoneFormat::new(64 << 10).unwrap(), false).unwrap();
    let limiter = Limiter::with_clock(limits(&[("iops", "100:1")]), hands.clock());
    let limited = LimitedDisk::new(Arc::new(zoned), limiter, None);
    let mut queue = limited.queue().unwrap();
    let memory = Mapping::anonymous(4096).unwrap().bytes();
    let request = |nth: u64| Request { op: WRITE, offset: nth * 512, len: 512 };
    let mut run = |replays, all: &[Request]| {
        let mut outcomes = Vec::new();
        for (tag, request) in (0..).zip(all) {
            queue.set_replays(replays);
            let mut data = Segments::from_bytes(&memory.slice(0, 512).unwrap());
            if let Submitted::Done(outcome) = queue.submit(tag, request, &mut data) {
                outcomes.push(outcome);
            }
            queue.set_replays(false);
        }
        for _ in all {
            hands.advance(20 * MS);
            queue.reap(&mut |_, outcome, _| outcomes.push(outcome));
        }
        outcomes
    };
    let (both, ok) = ([request(0), request(1)], Ok(()));
    assert_eq!(run(false, &both), [ok, ok]);
    assert_eq!(run(true, &both), [ok, ok]);
    assert_eq!(run(false, &both), [Err(DiskError::ZoneInvalidWrite); 2]);
}
