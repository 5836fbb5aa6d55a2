//! Namespaces that come, go and change while a host uses the controller.

mod common;

use common::{BASE, Host, MEMORY, Queue, config};
use proptest::prelude::*;
use shadowbell_backend::{Disk, DiskError, DiskInfo, MemDisk, NullDisk, Op, Request, Submitted};
use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{
    Carrier, Config, Controller, NamespaceConfig, NamespaceError, Polling, Pool, PoolOptions,
    RestoreError, SavedController,
};
use shadowbell_memory::{EventFd, Segments};
use shadowbell_spec::admin::{GetFeatures, GetLogPage, Identify, SetFeatures};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::feature::{AsyncEventConfig, fid};
use shadowbell_spec::identify::{
    IDENTIFY_SIZE, IdentifyController, IdentifyNamespace, NamespaceList, cns,
};
use shadowbell_spec::log::{ChangedNamespaces, lid};
use shadowbell_spec::nvm::{CopyFields, CopyRange};
use shadowbell_spec::regs::{self, Cc};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::{Sqe, Status};
use shadowbell_state::Parcel;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));
const SHORT: Duration = Duration::from_millis(30);
const INACTIVE: Status = Status::INVALID_FIELD.with_dnr();
const INVALID: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
const OUTSIDE: Status = Status::LBA_OUT_OF_RANGE.with_dnr();

/// What happens to a [`Late`] disk.
#[derive(Debug, Default)]
struct Orders {
    /// Requests stay with the disk.
    hold: AtomicBool,
    /// Nobody may use it any more; and whether somebody did.
    gone: AtomicBool,
    used_after: AtomicBool,
    /// So many queues can be opened.
    queues: AtomicUsize,
    seen: Mutex<Vec<Request>>,
    cancelled: AtomicUsize,
    events: Mutex<Vec<EventFd>>,
}

/// A disk whose requests end when they are reaped, in another order; cancelled ones as they would
/// have.
#[derive(Clone, Debug)]
struct Late {
    inner: Arc<dyn Disk>,
    volatile: bool,
    orders: Arc<Orders>,
}

impl Late {
    fn new(inner: impl Disk + 'static) -> Self {
        Self::of(Arc::new(inner))
    }

    fn of(inner: Arc<dyn Disk>) -> Self {
        let orders = Orders { queues: 1000.into(), ..Orders::default() };
        Self { inner, volatile: false, orders: Arc::new(orders) }
    }

    fn memory(blocks: u64) -> Self {
        Self::new(MemDisk::lasting(blocks, 512).unwrap())
    }

    fn of_blocks(&self, blocks: u64) -> Self {
        Self::of(self.inner.resized(Some(blocks * 512)).unwrap())
    }

    fn shared(&self) -> Arc<dyn Disk> {
        Arc::new(self.clone())
    }

    fn hold(&self, hold: bool) {
        self.orders.hold.store(hold, Ordering::SeqCst);
        self.orders.events.lock().unwrap().iter().for_each(|event| event.signal());
    }

    fn seen(&self) -> Vec<Request> {
        self.orders.seen.lock().unwrap().clone()
    }

    fn is_gone(&self) {
        self.orders.gone.store(true, Ordering::SeqCst);
    }

    fn was_used_after(&self) -> bool {
        self.orders.used_after.load(Ordering::SeqCst)
    }
}

impl Disk for Late {
    fn info(&self) -> DiskInfo {
        let mut info = self.inner.info();
        info.volatile_cache = self.volatile;
        info
    }

    fn queue(&self) -> io::Result<Box<dyn shadowbell_backend::Queue>> {
        let take = |left: usize| left.checked_sub(1);
        let taken = self.orders.queues.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
        taken.map_err(|_| io::Error::other("no queue is left"))?;
        let event = EventFd::new()?;
        self.orders.events.lock().unwrap().push(event.try_clone()?);
        let (disk, inner) = (self.clone(), self.inner.queue()?);
        Ok(Box::new(LateQueue { disk, inner, event, held: Vec::new() }))
    }

    fn name(&self) -> String {
        "late".into()
    }
}

struct LateQueue {
    disk: Late,
    inner: Box<dyn shadowbell_backend::Queue>,
    event: EventFd,
    held: Vec<(u32, Request, Segments)>,
}

impl LateQueue {
    fn used(&self) {
        let Orders { gone, used_after, .. } = &*self.disk.orders;
        used_after.fetch_or(gone.load(Ordering::SeqCst), Ordering::SeqCst);
    }
}

impl shadowbell_backend::Queue for LateQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        self.used();
        self.disk.orders.seen.lock().unwrap().push(*request);
        self.held.push((tag, *request, data.take()));
        self.event.signal();
        Submitted::Pending
    }

    fn longest_inline(&self) -> u64 {
        4096
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        self.event.drain();
        if self.disk.orders.hold.load(Ordering::SeqCst) {
            return;
        }
        while let Some((tag, request, mut data)) = self.held.pop() {
            self.used();
            let Submitted::Done(outcome) = self.inner.submit(tag, &request, &mut data) else {
                panic!("memory does not wait");
            };
            done(tag, outcome, data);
        }
    }

    fn cancel(&mut self, tag: u32) {
        assert!(self.held.iter().any(|(of, ..)| *of == tag), "it has this one");
        self.disk.orders.cancelled.fetch_add(1, Ordering::SeqCst);
    }

    fn pending(&self) -> usize {
        self.held.len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }
}

impl Drop for LateQueue {
    fn drop(&mut self) {
        self.used();
    }
}

fn pool(workers: usize) -> Pool {
    Pool::start(&PoolOptions { workers, polling: ADAPTIVE, pin: Vec::new() }).unwrap()
}

fn namespace(disk: &Late, name: &str) -> NamespaceConfig {
    NamespaceConfig { disk: disk.shared(), uuid: uuid_from(name) }
}

/// A host of a controller with this disk, served by two workers.
fn host(disk: &Late) -> Host {
    let config = Config { namespaces: vec![namespace(disk, "first")], ..Config::default() };
    let controller = Controller::new(config, pool(2), Carrier::default()).unwrap();
    let mut host = Host::attach(controller);
    host.enable();
    host
}

type Outcome = Receiver<Result<(), NamespaceError>>;

fn add(host: &Host, nsid: Option<u32>, disk: &Late, name: &str) -> (u32, Outcome) {
    let (done, outcome) = channel();
    let config = namespace(disk, name);
    let added = host.controller.add_namespace(nsid, &config, move |end| done.send(end).unwrap());
    (added.unwrap(), outcome)
}

fn remove(host: &Host, nsid: u32, disk: &Late) -> Outcome {
    let (done, outcome) = channel();
    let disk = disk.clone();
    let told = move |end| {
        disk.is_gone();
        done.send(end).unwrap();
    };
    host.controller.remove_namespace(nsid, told).unwrap();
    outcome
}

fn change(host: &Host, nsid: u32, disk: &Late) -> Outcome {
    let (done, outcome) = channel();
    let told = move |end| done.send(end).unwrap();
    host.controller.change_disk(nsid, disk.shared(), told).unwrap();
    outcome
}

fn ends(outcome: &Outcome) -> Result<(), NamespaceError> {
    outcome.recv_timeout(common::TIMEOUT).expect("a change comes to its end")
}

fn identify<T: FromBytes>(host: &mut Host, cns: u8, nsid: u32) -> T {
    let page = host.page(Identify { cns, ..Identify::default() }.encode(Sqe::new(6, 0, nsid)));
    T::read_from_bytes(&page.unwrap()[..IDENTIFY_SIZE]).unwrap()
}

fn active(host: &mut Host) -> Vec<u32> {
    identify::<NamespaceList>(host, cns::ACTIVE_NAMESPACES, 0).iter().collect()
}

fn size(host: &mut Host, nsid: u32) -> u64 {
    let identified: IdentifyNamespace = identify(host, cns::NAMESPACE, nsid);
    assert_eq!((identified.ncap, identified.nuse), (identified.nsze, identified.nsze));
    identified.nsze
}

fn changed(host: &mut Host) -> Vec<u32> {
    let fields =
        GetLogPage { lid: lid::CHANGED_ATTACHED_NAMESPACES, numd0: 1023, ..GetLogPage::default() };
    let page = host.page(fields.encode(Sqe::new(2, 0, NSID_ALL))).unwrap();
    ChangedNamespaces::read_from_bytes(&page[..]).unwrap().iter().collect()
}

/// Wants to be told of namespaces; one request is outstanding, with this identifier.
fn want_events(host: &mut Host, cid: u16) {
    let cdw11 = AsyncEventConfig::new().with_nan(true).into_bits();
    let fid = fid::ASYNC_EVENT_CONFIGURATION;
    let fields = SetFeatures { fid, cdw11, ..SetFeatures::default() };
    host.must(fields.encode(Sqe::new(9, 0, 0)));
    request_event(host, cid);
}

fn request_event(host: &mut Host, cid: u16) {
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    host.submit(&mut admin, &Sqe::new(0x0c, cid, 0));
    host.admin = admin;
}

fn event(host: &mut Host, cid: u16) {
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    let done = host.wait(&mut admin);
    host.admin = admin;
    let changed = AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.dw0();
    assert_eq!(done, (cid, Status::SUCCESS, changed));
}

fn no_event(host: &mut Host) {
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    assert_eq!(host.reap(&mut admin), None);
    host.admin = admin;
}

/// One block of this value is written, and read back.
fn write_and_read(host: &mut Host, queue: &mut Queue, nsid: u32, lba: u64, value: u8) -> Status {
    let page = host.alloc(4096);
    host.poke(page, &[value; 512]);
    let (status, _) = host.run(queue, Sqe::write(nsid, lba, 0, 0).with_prps(page, 0));
    if status.is_success() {
        host.poke(page, &[0; 512]);
        let (status, _) = host.run(queue, Sqe::read(nsid, lba, 0, 0).with_prps(page, 0));
        assert!(status.is_success(), "{status}");
        assert_eq!(host.peek(page, 512), [value; 512]);
    }
    status
}

fn get_features(nsid: u32) -> Sqe {
    GetFeatures { fid: fid::ERROR_RECOVERY, ..GetFeatures::default() }.encode(Sqe::new(10, 0, nsid))
}

#[test]
fn a_namespace_comes_and_goes() {
    let (first, other) = (Late::memory(64), Late::memory(100));
    let mut host = host(&first);
    let mut queues = [host.create(1, 16, true), host.create(2, 16, false)];
    want_events(&mut host, 500);
    let (nsid, outcome) = add(&host, Some(3), &other, "other");
    assert_eq!(nsid, 3);
    ends(&outcome).unwrap();
    event(&mut host, 500);
    request_event(&mut host, 501);
    assert_eq!(changed(&mut host), [3]);
    assert_eq!(changed(&mut host), [0; 0]);
    assert_eq!(active(&mut host), [1, 3]);
    assert_eq!((size(&mut host, 1), size(&mut host, 2), size(&mut host, 3)), (64, 0, 100));
    assert_eq!(identify::<IdentifyController>(&mut host, cns::CONTROLLER, 0).nn, 3);
    for queue in &mut queues {
        assert!(write_and_read(&mut host, queue, 3, 99, 7).is_success());
        assert_eq!(write_and_read(&mut host, queue, 3, 100, 7), OUTSIDE);
        // A valid identifier of nothing is another matter than one that can not be.
        assert_eq!(write_and_read(&mut host, queue, 2, 0, 7), INACTIVE);
        assert_eq!(host.run(queue, Sqe::flush(2, 0)).0, INACTIVE);
        assert_eq!(write_and_read(&mut host, queue, 4, 0, 7), INVALID);
        assert_eq!(host.run(queue, Sqe::flush(4, 0)).0, INVALID);
        assert!(host.run(queue, Sqe::flush(NSID_ALL, 0)).0.is_success());
    }
    assert_eq!(host.admin(get_features(2)).0, INACTIVE);
    assert_eq!(host.admin(get_features(4)).0, INVALID);
    assert!(host.admin(get_features(3)).0.is_success());

    ends(&remove(&host, 1, &first)).unwrap();
    event(&mut host, 501);
    assert_eq!(changed(&mut host), [1]);
    assert_eq!(active(&mut host), [3]);
    assert_eq!((size(&mut host, 1), size(&mut host, 3)), (0, 100));
    for queue in &mut queues {
        assert_eq!(write_and_read(&mut host, queue, 1, 0, 7), INACTIVE);
        assert!(write_and_read(&mut host, queue, 3, 5, 9).is_success());
    }
    let there: Vec<_> = host.controller.namespaces().iter().map(|(nsid, _)| *nsid).collect();
    assert_eq!(there, [3]);
    // Events that nobody waits for are not lost, and are one.
    let (nsid, outcome) = add(&host, None, &Late::memory(8), "third");
    assert_eq!(nsid, 1, "the lowest that is free");
    ends(&outcome).unwrap();
    ends(&remove(&host, 3, &other)).unwrap();
    request_event(&mut host, 502);
    event(&mut host, 502);
    assert_eq!(changed(&mut host), [1, 3]);
    request_event(&mut host, 503);
    no_event(&mut host);
    assert!(!first.was_used_after() && !other.was_used_after());
    // Nor are there any before somebody wants to know.
    host.disable();
    host.enable();
    let mut queue = host.create(1, 16, true);
    let outcome = add(&host, None, &Late::memory(9), "fourth").1;
    ends(&outcome).unwrap();
    request_event(&mut host, 504);
    assert_eq!(active(&mut host), [1, 2]);
    no_event(&mut host);
    assert!(write_and_read(&mut host, &mut queue, 2, 8, 1).is_success());
}

#[test]
fn what_can_not_be_is_refused_and_changes_nothing() {
    let first = Late::memory(64);
    let host = host(&first);
    let controller = &host.controller;
    let add = |nsid, disk: Arc<dyn Disk>, name: &str| {
        let config = NamespaceConfig { disk, uuid: uuid_from(name) };
        let told = |_| panic!("nothing was begun");
        controller.add_namespace(nsid, &config, told).unwrap_err()
    };
    let other = || Late::memory(8).shared();
    assert!(matches!(add(Some(1), other(), "a"), NamespaceError::Present(1)));
    for nsid in [0, 257, NSID_ALL] {
        assert!(matches!(add(Some(nsid), other(), "a"), NamespaceError::NoRoom));
    }
    let error = add(Some(9), other(), "first").to_string();
    assert!(error.contains("namespaces 1 and 9 have the same UUID"), "{error}");
    let empty = add(None, Arc::new(NullDisk::new(0, 512)), "a").to_string();
    assert!(empty.contains("namespace 2: the disk") && empty.contains("empty"), "{empty}");
    let told = |_| panic!("nothing was begun");
    assert!(matches!(controller.remove_namespace(2, told), Err(NamespaceError::Missing(2))));
    let change = |nsid, disk| controller.change_disk(nsid, disk, told).unwrap_err();
    assert!(matches!(change(2, other()), NamespaceError::Missing(2)));
    let large: Arc<dyn Disk> = Arc::new(MemDisk::new(8, 4096).unwrap());
    let error = change(1, large).to_string();
    assert!(error.contains("512 bytes") && error.contains("4096"), "{error}");

    // One at a time, of one namespace.
    let mut host = host;
    let mut queue = host.create(1, 16, true);
    let page = host.alloc(4096);
    first.hold(true);
    host.submit(&mut queue, &Sqe::read(1, 1, 0, 1).with_prps(page, 0));
    host.until("the read", || first.seen().len() == 1);
    let outcome = remove(&host, 1, &first);
    let again = host.controller.remove_namespace(1, told);
    assert!(matches!(again, Err(NamespaceError::Changing(1))));
    let config = NamespaceConfig { disk: other(), uuid: uuid_from("b") };
    let same = host.controller.add_namespace(Some(1), &config, told);
    assert!(matches!(same, Err(NamespaceError::Changing(1))));
    assert_eq!(host.controller.add_namespace(None, &config, |_| ()).unwrap(), 2);
    first.hold(false);
    ends(&outcome).unwrap();

    host.controller.freeze(|| ());
    let frozen = host.controller.remove_namespace(2, told);
    assert!(matches!(frozen, Err(NamespaceError::Frozen)));
}

#[test]
fn commands_of_a_removed_namespace_end_and_its_disk_is_let_go() {
    let (first, other) = (Late::memory(4096), Late::memory(64));
    let mut host = host(&first);
    ends(&add(&host, None, &other, "other").1).unwrap();
    let mut queues = [host.create(1, 32, true), host.create(2, 32, false)];
    let page = host.alloc(8192);
    host.poke(page, CopyRange { slba: 4, nlb0: 3, ..CopyRange::default() }.as_bytes());
    let ranges: Vec<u8> = (0..64u64)
        .flat_map(|n| [[0, 0, 0, 0, 1, 0, 0, 0].as_slice(), &(n * 2).to_le_bytes()].concat())
        .collect();
    host.poke(page + 4096, &ranges);
    first.hold(true);
    let copy = CopyFields { sdlba: 100, nr0: 0, ..CopyFields::default() };
    for queue in &mut queues {
        let zeroes = Sqe { cdw12: 4095, ..Sqe::new(0x08, 4, 1) };
        let deallocate = Sqe { cdw10: 63, cdw11: 4, ..Sqe::new(0x09, 5, 1) };
        for sqe in [
            Sqe::read(1, 1, 0, 1).with_prps(page, 0),
            Sqe::write(1, 2, 0, 2).with_prps(page, 0),
            Sqe::copy(1, copy, 3).with_prps(page, 0),
            // These are of many requests, of which some are not begun.
            zeroes,
            deallocate.with_prps(page + 4096, 0),
            Sqe::flush(1, 6),
        ] {
            host.submit(queue, &sqe);
        }
        host.submit(queue, &Sqe::flush(NSID_ALL, 7));
    }
    host.until("the requests", || first.seen().len() > 60);
    let outcome = remove(&host, 1, &first);
    // What comes now is refused; and the other namespace is served beside it.
    let mut ended: [BTreeMap<u16, Status>; 2] = Default::default();
    for (queue, ended) in queues.iter_mut().zip(&mut ended) {
        host.submit(queue, &Sqe::read(1, 1, 0, 20).with_prps(page, 0));
        host.submit(queue, &Sqe::read(2, 1, 0, 21).with_prps(page, 0));
        while !(ended.contains_key(&20) && ended.contains_key(&21)) {
            let (cid, status, _) = host.wait(queue);
            assert_eq!(ended.insert(cid, status), None);
        }
        assert_eq!((ended[&20], ended[&21]), (INACTIVE, Status::SUCCESS));
        assert!(!ended.contains_key(&1), "the disk has it");
    }
    assert_eq!(active(&mut host), [2]);
    std::thread::sleep(SHORT);
    assert_eq!(outcome.try_recv().unwrap_err(), TryRecvError::Empty, "the disk has requests");
    let begun = first.seen().len();
    first.hold(false);
    ends(&outcome).unwrap();
    assert_eq!(first.seen().len(), begun, "nothing more was begun");
    let inner: Weak<Orders> = Arc::downgrade(&first.orders);
    for (queue, ended) in queues.iter_mut().zip(&mut ended) {
        while ended.len() < 9 {
            let (cid, status, _) = host.wait(queue);
            assert_eq!(ended.insert(cid, status), None);
        }
        for cid in 1..7 {
            assert_eq!(ended[&cid], INACTIVE, "command {cid}");
        }
        assert_eq!(ended[&7], Status::SUCCESS, "the others are flushed");
        assert_eq!(host.reap(queue), None);
    }
    assert!(!first.was_used_after());
    drop(first);
    host.until("the disk is let go", || inner.strong_count() == 0);
}

#[test]
fn a_namespace_grows_and_shrinks() {
    let small = Late::memory(64);
    let mut host = host(&small);
    let mut queues = [host.create(1, 16, true), host.create(2, 16, false)];
    want_events(&mut host, 500);
    assert!(write_and_read(&mut host, &mut queues[0], 1, 63, 5).is_success());
    let page = host.alloc(4096);
    // A command that is under way ends where it was begun.
    small.hold(true);
    host.submit(&mut queues[1], &Sqe::read(1, 63, 0, 1).with_prps(page, 0));
    host.until("the read", || small.seen().len() == 3);
    let large = small.of_blocks(1000);
    let outcome = change(&host, 1, &large);
    std::thread::sleep(SHORT);
    no_event(&mut host);
    assert_eq!(size(&mut host, 1), 64);
    small.hold(false);
    ends(&outcome).unwrap();
    assert_eq!(host.wait(&mut queues[1]).1, Status::SUCCESS);
    assert_eq!(host.peek(page, 512), [5; 512]);
    event(&mut host, 500);
    request_event(&mut host, 501);
    assert_eq!((changed(&mut host), size(&mut host, 1)), (vec![1], 1000));
    for queue in &mut queues {
        let (status, _) = host.run(queue, Sqe::read(1, 63, 0, 0).with_prps(page, 0));
        assert!(status.is_success() && host.peek(page, 512) == [5; 512], "it has the same bytes");
        assert!(write_and_read(&mut host, queue, 1, 999, 8).is_success());
        assert_eq!(write_and_read(&mut host, queue, 1, 1000, 8), OUTSIDE);
    }
    let begun = small.seen().len();
    large.hold(true);
    host.submit(&mut queues[1], &Sqe::read(1, 999, 0, 1).with_prps(page, 0));
    host.until("the read", || large.seen().len() == 2 * 3 + 1);
    let outcome = change(&host, 1, &large.of_blocks(10));
    // A smaller size is told at once.
    event(&mut host, 501);
    assert_eq!(size(&mut host, 1), 10);
    large.hold(false);
    ends(&outcome).unwrap();
    assert_eq!(host.wait(&mut queues[1]).1, Status::SUCCESS);
    for queue in &mut queues {
        assert!(write_and_read(&mut host, queue, 1, 9, 8).is_success());
        assert_eq!(write_and_read(&mut host, queue, 1, 10, 8), OUTSIDE);
    }
    assert_eq!(small.seen().len(), begun);
}

#[test]
fn a_disk_that_can_not_be_opened_leaves_all_as_it_was() {
    let first = Late::memory(64);
    let mut host = host(&first);
    let mut queues = [host.create(1, 16, true), host.create(2, 16, false)];
    for queues_left in [0, 1] {
        let broken = Late::memory(100);
        broken.orders.queues.store(queues_left, Ordering::SeqCst);
        let (nsid, outcome) = add(&host, None, &broken, "broken");
        assert!(matches!(ends(&outcome), Err(NamespaceError::Open(of)) if of == nsid));
        assert_eq!(active(&mut host), [1]);
        broken.is_gone();
        for blocks in [100, 10] {
            let broken = first.of_blocks(blocks.min(64));
            broken.orders.queues.store(queues_left, Ordering::SeqCst);
            assert!(matches!(ends(&change(&host, 1, &broken)), Err(NamespaceError::Open(1))));
            assert_eq!(size(&mut host, 1), 64);
        }
        for queue in &mut queues {
            assert!(write_and_read(&mut host, queue, 1, 63, 8).is_success());
            assert_eq!(write_and_read(&mut host, queue, 2, 1, 8), INACTIVE);
        }
        assert!(!broken.was_used_after());
    }
}

#[test]
fn a_cache_that_the_host_was_not_told_of_holds_nothing_back() {
    let mut host = host(&Late::memory(64));
    let mut queue = host.create(1, 16, true);
    let cached = Late { volatile: true, ..Late::memory(64) };
    ends(&add(&host, None, &cached, "cached").1).unwrap();
    assert!(!identify::<IdentifyController>(&mut host, cns::CONTROLLER, 0).vwc.vwcp());
    assert!(write_and_read(&mut host, &mut queue, 2, 1, 8).is_success());
    assert!(host.run(&mut queue, Sqe::new(0x08, 0, 2)).0.is_success());
    let zeroes = Op::WriteZeroes { deallocate: false, fua: true };
    let seen: Vec<_> = cached.seen().iter().map(|request| request.op).collect();
    assert_eq!(seen, [Op::Write { fua: true }, Op::Read, zeroes]);
}

#[test]
fn a_reset_in_between() {
    let first = Late::memory(64);
    let mut host = host(&first);
    let mut queue = host.create(1, 16, true);
    let page = host.alloc(4096);
    first.hold(true);
    host.submit(&mut queue, &Sqe::write(1, 1, 0, 1).with_prps(page, 0));
    host.until("the write", || first.seen().len() == 1);
    let cc = Cc::from_bits(host.read32(regs::CC));
    host.write32(regs::CC, cc.with_en(false).into_bits());
    // The reset waits for the disk, and so does whoever removes it meanwhile.
    let outcome = remove(&host, 1, &first);
    let added = add(&host, None, &Late::memory(9), "other").1;
    std::thread::sleep(SHORT);
    assert_eq!(outcome.try_recv().unwrap_err(), TryRecvError::Empty);
    assert!(host.csts().rdy());
    first.hold(false);
    ends(&outcome).unwrap();
    ends(&added).unwrap();
    host.until("the reset", || !host.csts().rdy());
    // While it is disabled, and with none left.
    ends(&remove(&host, 2, &Late::memory(1))).unwrap();
    host.enable();
    assert_eq!(active(&mut host), [0; 0]);
    let mut queue = host.create(1, 16, true);
    assert_eq!(write_and_read(&mut host, &mut queue, 1, 0, 1), INACTIVE);
    assert!(host.run(&mut queue, Sqe::flush(NSID_ALL, 0)).0.is_success());
    ends(&add(&host, None, &Late::memory(9), "another").1).unwrap();
    assert!(write_and_read(&mut host, &mut queue, 1, 0, 1).is_success());
    assert!(!first.was_used_after());
    // Before anything of it was used.
    let controller = Controller::new(config(&["mem:1MiB"]), pool(1), Carrier::default()).unwrap();
    let mut host = Host::attach(controller);
    ends(&add(&host, Some(7), &Late::memory(9), "another").1).unwrap();
    host.enable();
    assert_eq!(active(&mut host), [1, 7]);
}

/// Another controller goes on with the host.
fn replace(host: &mut Host, interrupts: &BTreeMap<usize, EventFd>) {
    let (done, frozen) = channel();
    host.controller.freeze(move || done.send(()).unwrap());
    frozen.recv_timeout(common::TIMEOUT).expect("it comes to rest");
    let mut parcel = Parcel::new();
    let saved = host.controller.save(parcel.descriptors()).unwrap();
    parcel.add("controller", true, &saved).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let sender = std::thread::spawn(move || parcel.send(&ours).unwrap());
    let mut parcel = Parcel::receive(&theirs).unwrap();
    sender.join().unwrap();
    let saved: SavedController = parcel.take("controller").unwrap().unwrap();
    let there = host.controller.namespaces();
    let nsids = there.iter().map(|(nsid, _)| *nsid).collect();
    let namespaces = there.into_iter().map(|(_, namespace)| namespace).collect();
    let config = Config { nsids, namespaces, ..host.controller.config().clone() };
    let fds = parcel.descriptors();
    let successor =
        Controller::successor(config, pool(2), Carrier::default(), &saved, fds).unwrap();
    successor.map_dma(BASE, MEMORY, &host.memory).unwrap();
    for (vector, event) in interrupts {
        successor.set_interrupt(*vector, Some(event.try_clone().unwrap()));
    }
    drop(std::mem::replace(&mut host.controller, successor));
    host.controller.restore(&saved, fds).unwrap();
    parcel.finish().unwrap();
}

#[test]
fn a_successor_goes_on_with_what_has_become_of_them() {
    let cached = Late { volatile: true, ..Late::memory(64) };
    let mut host = host(&cached);
    ends(&add(&host, Some(5), &Late::memory(9), "fifth").1).unwrap();
    ends(&add(&host, Some(3), &Late::memory(8), "third").1).unwrap();
    ends(&remove(&host, 1, &cached)).unwrap();
    ends(&remove(&host, 5, &Late::memory(1))).unwrap();
    want_events(&mut host, 500);
    let mut queue = host.create(1, 16, false);
    replace(&mut host, &BTreeMap::new());
    let identified: IdentifyController = identify(&mut host, cns::CONTROLLER, 0);
    assert_eq!(identified.nn, 5, "an NSID that was valid is");
    assert!(identified.vwc.vwcp(), "the host was told so");
    assert_eq!(active(&mut host), [3]);
    assert!(write_and_read(&mut host, &mut queue, 3, 7, 4).is_success());
    assert_eq!(write_and_read(&mut host, &mut queue, 1, 0, 4), INACTIVE);
    assert_eq!(write_and_read(&mut host, &mut queue, 5, 0, 4), INACTIVE);
    assert_eq!(write_and_read(&mut host, &mut queue, 6, 0, 4), INVALID);
    ends(&remove(&host, 3, &Late::memory(1))).unwrap();
    event(&mut host, 500);
    // An event and a list that are not read yet go with it, and so does having none left.
    replace(&mut host, &BTreeMap::new());
    assert_eq!((active(&mut host), changed(&mut host)), (vec![], vec![1, 3, 5]));

    // One that would have other namespaces is refused.
    ends(&add(&host, Some(2), &Late::memory(9), "second").1).unwrap();
    let (done, frozen) = channel();
    host.controller.freeze(move || done.send(()).unwrap());
    frozen.recv_timeout(common::TIMEOUT).unwrap();
    let mut parcel = Parcel::new();
    let saved = host.controller.save(parcel.descriptors()).unwrap();
    let namespaces: Vec<_> = host.controller.namespaces().into_iter().map(|(_, ns)| ns).collect();
    let config = Config { namespaces, ..host.controller.config().clone() };
    let other =
        Controller::successor(config, pool(1), Carrier::default(), &saved, parcel.descriptors());
    assert!(matches!(other.unwrap_err(), RestoreError::Shape("set of namespaces")));
}

/// A namespace as the host and its owner know it.
struct Known {
    disk: Late,
    blocks: u64,
    /// What was written where; what was not is zeroes.
    written: BTreeMap<u64, u8>,
}

/// A command under way.
struct Command {
    nsid: u32,
    lba: u64,
    write: Option<u8>,
    /// How often the namespace had been changed, unless it was being changed.
    age: Option<u64>,
    page: u64,
}

#[derive(Clone, Debug)]
enum Step {
    Submit { queue: usize, nsid: u32, count: u8 },
    Reap { queue: usize, count: u8 },
    Add(u32, u64),
    Remove(u32),
    Resize(u32, u64),
    Hold(u32),
    Look,
    Replace,
    Reset,
    Isolate,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (queue, nsid) = (0usize..2, 1u32..5);
    let step = prop_oneof![
        8 => (queue.clone(), nsid.clone(), 1u8..6)
            .prop_map(|(queue, nsid, count)| Step::Submit { queue, nsid, count }),
        4 => (queue, 1u8..12).prop_map(|(queue, count)| Step::Reap { queue, count }),
        3 => (nsid.clone(), 1u64..40).prop_map(|(nsid, blocks)| Step::Add(nsid, blocks)),
        2 => nsid.clone().prop_map(Step::Remove),
        3 => (nsid.clone(), 1u64..60).prop_map(|(nsid, blocks)| Step::Resize(nsid, blocks)),
        2 => nsid.prop_map(Step::Hold),
        2 => Just(Step::Look),
        1 => Just(Step::Replace),
        1 => Just(Step::Reset),
        1 => Just(Step::Isolate),
    ];
    prop::collection::vec(step, 1..60)
}

struct World {
    host: Host,
    queues: Vec<Queue>,
    interrupts: BTreeMap<usize, EventFd>,
    known: BTreeMap<u32, Known>,
    /// How often each has changed.
    ages: BTreeMap<u32, u64>,
    under_way: BTreeMap<(usize, u16), Command>,
    /// Changes under way, and what was let go of when they have ended.
    changing: Vec<(u32, Outcome, Option<Late>)>,
    gone: Vec<Late>,
    next: u16,
    names: u32,
    data: u64,
}

impl World {
    fn new() -> Self {
        let first = Late::memory(20);
        let mut host = host(&first);
        let data = host.alloc(256 * 4096);
        let mut world = Self {
            host,
            queues: Vec::new(),
            interrupts: BTreeMap::new(),
            known: [(1, Known { disk: first, blocks: 20, written: BTreeMap::new() })].into(),
            ages: BTreeMap::new(),
            under_way: BTreeMap::new(),
            changing: Vec::new(),
            gone: Vec::new(),
            next: 0,
            names: 0,
            data,
        };
        world.create_queues();
        world
    }

    fn create_queues(&mut self) {
        self.queues = vec![self.host.create(1, 64, true), self.host.create(2, 64, false)];
        let event = self.queues[0].irq.as_ref().unwrap().try_clone().unwrap();
        self.interrupts.insert(1, event);
    }

    fn age(&self, nsid: u32) -> u64 {
        self.ages.get(&nsid).copied().unwrap_or(0)
    }

    fn is_changing(&self, nsid: u32) -> bool {
        self.changing.iter().any(|(of, ..)| *of == nsid)
    }

    fn submit(&mut self, queue: usize, nsid: u32) {
        if self.under_way.keys().filter(|(of, _)| *of == queue).count() >= 60 {
            return;
        }
        self.next = (self.next + 1) % 0x4000;
        let (cid, n) = (self.next, u64::from(self.next));
        let lba = n * 7 % 64;
        let busy = |command: &Command| (command.nsid, command.lba) == (nsid, lba);
        if self.under_way.values().any(busy) {
            return;
        }
        let page = self.data + n % 256 * 4096;
        let write = (n % 3 != 0).then_some(n as u8 | 1);
        self.host.poke(page, &[write.unwrap_or(0xaa); 512]);
        let sqe = match write {
            Some(_) => Sqe::write(nsid, lba, 0, cid),
            None => Sqe::read(nsid, lba, 0, cid),
        };
        let age = (!self.is_changing(nsid)).then_some(self.age(nsid));
        let command = Command { nsid, lba, write, age, page };
        self.under_way.insert((queue, cid), command);
        let Self { host, queues, .. } = self;
        host.submit(&mut queues[queue], &sqe.with_prps(page, 0));
    }

    fn reap(&mut self, queue: usize) -> bool {
        let Self { host, queues, .. } = self;
        let Some((cid, status, _)) = host.reap(&mut queues[queue]) else { return false };
        let command = self.under_way.remove(&(queue, cid)).expect("each command completes once");
        let Command { nsid, lba, write, age, page } = command;
        let is_settled = age == Some(self.age(nsid)) && !self.is_changing(nsid);
        let known = self.known.get_mut(&nsid);
        if is_settled {
            match &known {
                Some(known) if lba < known.blocks => assert!(status.is_success(), "{status}"),
                Some(_) => assert_eq!(status, OUTSIDE, "namespace {nsid}, block {lba}"),
                // Which of the two depends on when another one was added.
                None => assert!([INACTIVE, INVALID].contains(&status), "{status}"),
            }
        } else {
            let possible = [Status::SUCCESS, OUTSIDE, INACTIVE, INVALID];
            assert!(possible.contains(&status), "{status}");
        }
        let Some(known) = known else { return true };
        match write {
            Some(value) if status.is_success() && is_settled => {
                known.written.insert(lba, value);
            }
            // It may have been to the one before.
            Some(_) => drop(known.written.remove(&lba)),
            None if status.is_success() && is_settled => {
                if let Some(value) = known.written.get(&lba) {
                    let found = self.host.peek(page, 512);
                    assert_eq!(found, [*value; 512], "namespace {nsid}, block {lba}");
                }
            }
            None => {}
        }
        true
    }

    /// Takes note of changes that have come to their end; waits for `all` of them.
    fn settle(&mut self, all: bool) {
        if all {
            // Queues that move to another worker wait for every disk.
            let known = self.known.values().map(|known| &known.disk);
            let leaving = self.changing.iter().filter_map(|(.., gone)| gone.as_ref());
            known.chain(leaving).for_each(|disk| disk.hold(false));
        }
        for (nsid, outcome, gone) in std::mem::take(&mut self.changing) {
            let end = if all { Ok(ends(&outcome)) } else { outcome.try_recv() };
            match end {
                Ok(end) => {
                    end.unwrap();
                    self.gone.extend(gone);
                }
                Err(_) => self.changing.push((nsid, outcome, gone)),
            }
        }
    }

    fn changes(&mut self, nsid: u32) {
        *self.ages.entry(nsid).or_insert(0) += 1;
    }

    fn step(&mut self, step: &Step) {
        self.settle(false);
        match *step {
            Step::Submit { queue, nsid, count } => {
                (0..count).for_each(|_| self.submit(queue, nsid));
            }
            Step::Reap { queue, count } => {
                for _ in 0..count {
                    self.reap(queue);
                }
            }
            Step::Add(nsid, blocks) => {
                if self.known.contains_key(&nsid) || self.is_changing(nsid) {
                    return;
                }
                let disk = Late::memory(blocks);
                self.names += 1;
                self.changes(nsid);
                let outcome = add(&self.host, Some(nsid), &disk, &self.names.to_string()).1;
                self.changing.push((nsid, outcome, None));
                self.known.insert(nsid, Known { disk, blocks, written: BTreeMap::new() });
            }
            Step::Remove(nsid) => {
                if self.is_changing(nsid) {
                    return;
                }
                let Some(known) = self.known.remove(&nsid) else { return };
                self.changes(nsid);
                let outcome = remove(&self.host, nsid, &known.disk);
                self.changing.push((nsid, outcome, Some(known.disk)));
            }
            Step::Resize(nsid, blocks) => {
                if self.is_changing(nsid) || !self.known.contains_key(&nsid) {
                    return;
                }
                self.changes(nsid);
                let known = self.known.get_mut(&nsid).unwrap();
                let disk = known.disk.of_blocks(blocks);
                let outcome = change(&self.host, nsid, &disk);
                known.blocks = blocks;
                let before = std::mem::replace(&mut known.disk, disk);
                self.changing.push((nsid, outcome, Some(before)));
            }
            Step::Hold(nsid) => {
                if let Some(known) = self.known.get(&nsid) {
                    let hold = !known.disk.orders.hold.load(Ordering::SeqCst);
                    known.disk.hold(hold);
                }
            }
            Step::Look => {
                self.settle(true);
                let there: Vec<_> = self.known.keys().copied().collect();
                assert_eq!(active(&mut self.host), there);
                for nsid in 1..5 {
                    let highest = self.ages.keys().max().copied().unwrap_or(0).max(1);
                    if nsid <= highest {
                        let blocks = self.known.get(&nsid).map_or(0, |known| known.blocks);
                        assert_eq!(size(&mut self.host, nsid), blocks);
                    }
                }
            }
            Step::Replace => {
                self.settle(true);
                replace(&mut self.host, &self.interrupts);
            }
            Step::Reset => {
                self.known.values().for_each(|known| known.disk.hold(false));
                self.settle(true);
                self.host.disable();
                self.under_way.clear();
                // What they have written is not known.
                self.known.values_mut().for_each(|known| known.written.clear());
                self.host.enable();
                self.create_queues();
            }
            Step::Isolate => drop(self.host.controller.isolate()),
        }
    }

    fn end(mut self) {
        self.settle(true);
        for queue in 0..2 {
            let began = std::time::Instant::now();
            while self.under_way.keys().any(|(of, _)| *of == queue) {
                assert!(began.elapsed() < common::TIMEOUT, "{:#?}", self.host.controller.stats());
                if !self.reap(queue) {
                    std::thread::yield_now();
                }
            }
        }
        for disk in &self.gone {
            assert!(!disk.was_used_after(), "it was used after it was let go");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 32,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_order_of_changes(steps in steps()) {
        let mut world = World::new();
        steps.iter().for_each(|step| world.step(step));
        world.end();
    }
}
