//! Host whose namespaces change, and the functions that change them.

use crate::common::{self, BASE, Host, MEMORY, Queue};
use crate::late::Late;
use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{
    Carrier, Config, Controller, NamespaceConfig, NamespaceError, Polling, Pool, PoolOptions,
    SavedController,
};
use shadowbell_memory::EventFd;
use shadowbell_spec::admin::{GetFeatures, GetLogPage, Identify, SetFeatures};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::feature::{AsyncEventConfig, fid};
use shadowbell_spec::identify::{IDENTIFY_SIZE, IdentifyNamespace, NamespaceList, cns};
use shadowbell_spec::log::{ChangedNamespaces, lid};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::{Sqe, Status};
use shadowbell_state::Parcel;
use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use zerocopy::FromBytes;

pub(crate) const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));
pub(crate) const INACTIVE: Status = Status::INVALID_FIELD.with_dnr();
pub(crate) const INVALID: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
pub(crate) const OUTSIDE: Status = Status::LBA_OUT_OF_RANGE.with_dnr();

pub(crate) fn pool(workers: usize) -> Pool {
    Pool::start(&PoolOptions { workers, polling: ADAPTIVE, pin: Vec::new() }).unwrap()
}

pub(crate) fn namespace(disk: &Late, name: &str) -> NamespaceConfig {
    NamespaceConfig { disk: disk.shared(), uuid: uuid_from(name) }
}

/// Creates a host of a controller with this disk. Two I/O threads serve the controller.
pub(crate) fn host(disk: &Late) -> Host {
    let config = Config { namespaces: vec![namespace(disk, "first")], ..Config::default() };
    let controller = Controller::new(config, pool(2), Carrier::default()).unwrap();
    let mut host = Host::attach(controller);
    host.enable();
    host
}

pub(crate) type Outcome = Receiver<Result<(), NamespaceError>>;

pub(crate) fn add(host: &Host, nsid: Option<u32>, disk: &Late, name: &str) -> (u32, Outcome) {
    let (done, outcome) = channel();
    let config = namespace(disk, name);
    let added = host.controller.add_namespace(nsid, &config, move |end| done.send(end).unwrap());
    (added.unwrap(), outcome)
}

pub(crate) fn remove(host: &Host, nsid: u32, disk: &Late) -> Outcome {
    let (done, outcome) = channel();
    let disk = disk.clone();
    let told = move |end| {
        disk.is_removed();
        done.send(end).unwrap();
    };
    host.controller.remove_namespace(nsid, told).unwrap();
    outcome
}

pub(crate) fn change(host: &Host, nsid: u32, disk: &Late) -> Outcome {
    let (done, outcome) = channel();
    let told = move |end| done.send(end).unwrap();
    host.controller.change_disk(nsid, disk.shared(), told).unwrap();
    outcome
}

pub(crate) fn ends(outcome: &Outcome) -> Result<(), NamespaceError> {
    outcome.recv_timeout(common::LIMIT).expect("a change comes to its end")
}

pub(crate) fn identify<T: FromBytes>(host: &mut Host, cns: u8, nsid: u32) -> T {
    let page = host.page(Identify { cns, ..Identify::default() }.encode(Sqe::new(6, 0, nsid)));
    T::read_from_bytes(&page.unwrap()[..IDENTIFY_SIZE]).unwrap()
}

pub(crate) fn active(host: &mut Host) -> Vec<u32> {
    identify::<NamespaceList>(host, cns::ACTIVE_NAMESPACES, 0).iter().collect()
}

pub(crate) fn size(host: &mut Host, nsid: u32) -> u64 {
    let identified: IdentifyNamespace = identify(host, cns::NAMESPACE, nsid);
    assert_eq!((identified.ncap, identified.nuse), (identified.nsze, identified.nsze));
    identified.nsze
}

pub(crate) fn changed(host: &mut Host) -> Vec<u32> {
    let fields =
        GetLogPage { lid: lid::CHANGED_ATTACHED_NAMESPACES, numd0: 1023, ..GetLogPage::default() };
    let page = host.page(fields.encode(Sqe::new(2, 0, NSID_ALL))).unwrap();
    ChangedNamespaces::read_from_bytes(&page[..]).unwrap().iter().collect()
}

/// Enables namespace events, and submits one event request with this identifier.
pub(crate) fn want_events(host: &mut Host, cid: u16) {
    let cdw11 = AsyncEventConfig::new().with_nan(true).into_bits();
    let fid = fid::ASYNC_EVENT_CONFIGURATION;
    let fields = SetFeatures { fid, cdw11, ..SetFeatures::default() };
    host.must(fields.encode(Sqe::new(9, 0, 0)));
    request_event(host, cid);
}

pub(crate) fn request_event(host: &mut Host, cid: u16) {
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    host.submit(&mut admin, &Sqe::new(0x0c, cid, 0));
    host.admin = admin;
}

pub(crate) fn event(host: &mut Host, cid: u16) {
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    let done = host.wait(&mut admin);
    host.admin = admin;
    let changed = AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.dw0();
    assert_eq!(done, (cid, Status::SUCCESS, changed));
}

pub(crate) fn no_event(host: &mut Host) {
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    assert_eq!(host.reap(&mut admin), None);
    host.admin = admin;
}

/// Writes one block filled with `value`, and reads it back.
pub(crate) fn write_and_read(
    host: &mut Host,
    queue: &mut Queue,
    nsid: u32,
    lba: u64,
    value: u8,
) -> Status {
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

pub(crate) fn get_features(nsid: u32) -> Sqe {
    GetFeatures { fid: fid::ERROR_RECOVERY, ..GetFeatures::default() }.encode(Sqe::new(10, 0, nsid))
}

/// Replaces the host's controller: serializes its state, and restores the state in a new
/// controller.
pub(crate) fn replace(host: &mut Host, interrupts: &BTreeMap<usize, EventFd>) {
    let (done, frozen) = channel();
    host.controller.freeze(move || done.send(()).unwrap());
    frozen.recv_timeout(common::LIMIT).expect("the controller is quiesced");
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
