//! Namespaces that a host creates, formats and sanitizes.

use crate::{common, held};
use common::{Host, Queue};
use held::Held;
use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{
    Carrier, Config, Controller, NamespaceConfig, NamespacePool, Polling, Pool, PoolAct,
    PoolCallback, PoolNamespace, PoolOptions, PoolOrder, PoolOutcome, PoolPort, PoolState,
    SanitizePhase, SanitizeStatus,
};
use shadowbell_disk::Disk;
use shadowbell_disk_file::MemDisk;
use shadowbell_spec::admin::{
    FormatNvm, GetLogPage, Identify, NamespaceAttachment, NamespaceManagement, Sanitize,
};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::identify::{
    ControllerList, Flbas, IdentifyController, IdentifyNamespace, NamespaceList, NamespaceToCreate,
    cns,
};
use shadowbell_spec::log::{SanitizeLog, lid, sos};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::{Sqe, Status};
use shadowbell_testing::wait;
use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const CAPACITY: u64 = 8 << 20;
const INACTIVE: Status = Status::INVALID_FIELD.with_dnr();

/// A namespace pool in memory.
#[derive(Debug, Default)]
struct MemPool {
    state: Mutex<PoolState>,
    disks: Mutex<BTreeMap<u32, Arc<dyn Disk>>>,
    controller: Mutex<Option<(Controller, PoolPort)>>,
    port: Mutex<Option<PoolPort>>,
    orders: Mutex<Vec<PoolOrder>>,
    /// True while the pool's requests have to wait.
    holds: Mutex<bool>,
    continues: Condvar,
    /// True if the next sanitize operation has to fail.
    fails: Mutex<bool>,
}

impl MemPool {
    fn new() -> Arc<Self> {
        let state = PoolState { capacity: CAPACITY, ..PoolState::default() };
        Arc::new(Self { state: Mutex::new(state), ..Self::default() })
    }

    fn hold(&self, hold: bool) {
        *self.holds.lock().unwrap() = hold;
        self.continues.notify_all();
    }

    fn waits(&self) {
        let holds = self.holds.lock().unwrap();
        drop(self.continues.wait_while(holds, |holds| *holds).unwrap());
    }

    fn change<T>(&self, change: impl FnOnce(&mut PoolState) -> T) -> T {
        change(&mut self.state.lock().unwrap())
    }

    fn attach(&self, nsid: u32) {
        let disk = Arc::clone(&self.disks.lock().unwrap()[&nsid]);
        let uuid = self.change(|state| state.get(nsid).unwrap().uuid);
        let (done, ended) = channel();
        let controller = self.controller.lock().unwrap().as_ref().unwrap().0.clone();
        let config = NamespaceConfig { disk, uuid };
        controller.add_namespace(Some(nsid), &config, move |end| done.send(end).unwrap()).unwrap();
        ended.recv().unwrap().unwrap();
    }

    fn detach(&self, nsid: u32) {
        let (done, ended) = channel();
        let controller = self.controller.lock().unwrap().as_ref().unwrap().0.clone();
        controller.remove_namespace(nsid, move |end| done.send(end).unwrap()).unwrap();
        ended.recv().unwrap().unwrap();
    }

    fn attached(&self) -> Vec<u32> {
        self.change(|state| {
            let attached = state.namespaces.iter().filter(|namespace| namespace.attached);
            attached.map(|namespace| namespace.nsid).collect()
        })
    }

    fn set_attached(&self, nsid: u32, attached: bool) {
        self.change(|state| {
            let mut all = state.namespaces.iter_mut();
            all.find(|namespace| namespace.nsid == nsid).unwrap().attached = attached;
        });
    }

    fn execute(&self, act: PoolAct) -> PoolOutcome {
        match act {
            PoolAct::Create { uuid, blocks, block_size, metadata } => {
                let taken = |state: &PoolState, nsid| state.get(nsid).is_some();
                let given = self.controller.lock().unwrap().as_ref().unwrap().0.namespaces();
                let given: Vec<_> = given.into_iter().map(|(nsid, _)| nsid).collect();
                let nsid = self.change(|state| {
                    (1..).find(|nsid| !taken(state, *nsid) && !given.contains(nsid)).unwrap()
                });
                let disk = Arc::new(MemDisk::new(blocks, block_size).unwrap());
                self.disks.lock().unwrap().insert(nsid, disk);
                let made =
                    PoolNamespace { nsid, uuid, blocks, block_size, metadata, attached: false };
                self.change(|state| {
                    state.namespaces.push(made);
                    state.namespaces.sort_by_key(|namespace| namespace.nsid);
                });
                Ok(nsid)
            }
            PoolAct::Delete(nsids) => {
                for nsid in nsids {
                    if self.attached().contains(&nsid) {
                        self.detach(nsid);
                    }
                    self.disks.lock().unwrap().remove(&nsid);
                    self.change(|state| state.namespaces.retain(|other| other.nsid != nsid));
                }
                Ok(0)
            }
            PoolAct::Attach(nsid) => {
                self.attach(nsid);
                self.set_attached(nsid, true);
                Ok(0)
            }
            PoolAct::Detach(nsid) => {
                self.set_attached(nsid, false);
                self.detach(nsid);
                Ok(0)
            }
            PoolAct::Format { nsids, block_size, .. } => {
                for nsid in nsids {
                    let is_attached = self.attached().contains(&nsid);
                    if is_attached {
                        self.detach(nsid);
                    }
                    self.waits();
                    let disk = self.disks.lock().unwrap().remove(&nsid).unwrap();
                    assert_eq!(Arc::strong_count(&disk), 1, "the disk has no other user");
                    let blocks = self.change(|state| {
                        let mut all = state.namespaces.iter_mut();
                        let namespace = all.find(|other| other.nsid == nsid).unwrap();
                        let blocks = namespace.bytes() / u64::from(block_size);
                        (namespace.blocks, namespace.block_size) = (blocks, block_size);
                        blocks
                    });
                    let disk = Arc::new(MemDisk::new(blocks, block_size).unwrap());
                    self.disks.lock().unwrap().insert(nsid, disk);
                    if is_attached {
                        self.attach(nsid);
                    }
                }
                Ok(0)
            }
            PoolAct::Sanitize(command) if command.sanact == Sanitize::EXIT_FAILURE => {
                let has_failed = self.change(|state| {
                    let has_failed = state.sanitize.phase == SanitizePhase::Failed;
                    if has_failed {
                        state.sanitize.phase = SanitizePhase::FailureModeExited;
                    }
                    has_failed
                });
                if has_failed {
                    self.attached().into_iter().for_each(|nsid| self.attach(nsid));
                }
                Ok(0)
            }
            PoolAct::Sanitize(command) => {
                let was_open = self.change(|state| {
                    let was_open = state.sanitize.barrier().is_none();
                    let phase = SanitizePhase::InProgress(7);
                    state.sanitize = SanitizeStatus { phase, command, passes: 0 };
                    was_open
                });
                if was_open {
                    self.attached().into_iter().for_each(|nsid| self.detach(nsid));
                }
                Ok(0)
            }
        }
    }

    /// Executes the background part of a sanitize operation.
    fn sanitize(&self) {
        self.waits();
        let fails = *self.fails.lock().unwrap();
        if !fails {
            for namespace in self.change(|state| state.namespaces.clone()) {
                let disk = MemDisk::new(namespace.blocks, namespace.block_size).unwrap();
                self.disks.lock().unwrap().insert(namespace.nsid, Arc::new(disk));
            }
        }
        let phase = if fails { SanitizePhase::Failed } else { SanitizePhase::Successful };
        self.change(|state| state.sanitize.phase = phase);
        if !fails {
            self.attached().into_iter().for_each(|nsid| self.attach(nsid));
        }
        self.port.lock().unwrap().clone().unwrap().sanitized();
    }
}

/// Pool as the controller refers to it. `MemPool` also refers to the controller; the drop of
/// `PoolHost` ends this cycle.
#[derive(Debug)]
struct Shared(Arc<MemPool>);

impl NamespacePool for Shared {
    fn state(&self) -> PoolState {
        self.0.state.lock().unwrap().clone()
    }

    fn connect(&self, port: PoolPort) {
        *self.0.port.lock().unwrap() = Some(port);
    }

    fn order(&self, order: PoolOrder, done: PoolCallback) {
        let pool = Arc::clone(&self.0);
        std::thread::spawn(move || {
            pool.orders.lock().unwrap().push(order.clone());
            let begins = matches!(order.act, PoolAct::Sanitize(command) if command.sanact > 1);
            done.end(pool.execute(order.act));
            if begins {
                pool.sanitize();
            }
        });
    }
}

struct PoolHost {
    host: Host,
    pool: Arc<MemPool>,
}

impl Drop for PoolHost {
    fn drop(&mut self) {
        self.pool.hold(false);
        self.pool.controller.lock().unwrap().take();
    }
}

fn start(pool: &Arc<MemPool>, namespaces: Vec<NamespaceConfig>) -> PoolHost {
    let shared: Arc<dyn NamespacePool> = Arc::new(Shared(Arc::clone(pool)));
    let config = Config { pool: Some(shared), namespaces, ..Config::default() };
    let polling = Polling::Adaptive(Duration::from_micros(50));
    let options = PoolOptions { workers: 2, polling, pin: Vec::new() };
    let workers = Pool::start(&options).unwrap();
    let controller = Controller::new(config, workers, Carrier::default()).unwrap();
    let port = pool.port.lock().unwrap().clone().unwrap();
    *pool.controller.lock().unwrap() = Some((controller.clone(), port));
    let mut host = Host::attach(controller);
    host.enable();
    PoolHost { host, pool: Arc::clone(pool) }
}

fn wanted(blocks: u64, lbaf: u8) -> NamespaceToCreate {
    let flbas = Flbas::new().with_low(lbaf);
    NamespaceToCreate { nsze: blocks, ncap: blocks, flbas, ..NamespaceToCreate::default() }
}

impl PoolHost {
    fn with_data(&mut self, sqe: Sqe, data: &impl AsBytes) -> (Status, u32) {
        let at = self.host.alloc(4096);
        self.host.poke(at, data.bytes());
        self.host.admin(sqe.with_prps(at, 0))
    }

    fn create(&mut self, wanted: &NamespaceToCreate) -> (Status, u32) {
        let fields = NamespaceManagement { sel: NamespaceManagement::CREATE, csi: 0 };
        self.with_data(Sqe::namespace_management(0, fields, 0), wanted)
    }

    fn delete(&mut self, nsid: u32) -> Status {
        let fields = NamespaceManagement { sel: NamespaceManagement::DELETE, csi: 0 };
        self.host.admin(Sqe::namespace_management(nsid, fields, 0)).0
    }

    fn attach(&mut self, nsid: u32, sel: u8, cntlids: &[u16]) -> Status {
        let list = ControllerList::from(0, cntlids.iter().copied());
        let fields = NamespaceAttachment { sel };
        self.with_data(Sqe::namespace_attachment(nsid, fields, 0), &list).0
    }

    /// Creates a namespace, and attaches it.
    fn create_and_attach(&mut self, blocks: u64, lbaf: u8) -> u32 {
        let (status, nsid) = self.create(&wanted(blocks, lbaf));
        assert_eq!(status, Status::SUCCESS);
        assert_eq!(self.attach(nsid, NamespaceAttachment::ATTACH, &[1]), Status::SUCCESS);
        nsid
    }

    fn format(&mut self, nsid: u32, fields: FormatNvm) -> Status {
        self.host.admin(Sqe::format_nvm(nsid, fields, 0)).0
    }

    fn sanitize(&mut self, fields: Sanitize) -> Status {
        self.host.admin(Sqe::sanitize(fields, 0)).0
    }

    fn identify<T: FromBytes>(&mut self, cns: u8, nsid: u32) -> Result<T, Status> {
        let command = Identify { cns, ..Identify::default() }.encode(Sqe::new(6, 0, nsid));
        self.host.page(command).map(|page| T::read_from_bytes(&page[..]).unwrap())
    }

    fn list(&mut self, cns: u8) -> Vec<u32> {
        self.identify::<NamespaceList>(cns, 0).unwrap().iter().collect()
    }

    fn log(&mut self) -> SanitizeLog {
        let fields = GetLogPage { lid: lid::SANITIZE_STATUS, numd0: 127, ..GetLogPage::default() };
        let page = self.host.page(fields.encode(Sqe::new(2, 0, NSID_ALL))).unwrap();
        SanitizeLog::read_from_bytes(&page[..512]).unwrap()
    }

    fn write(&mut self, queue: &mut Queue, nsid: u32, lba: u64, value: u8) -> Status {
        let page = self.host.alloc(4096);
        self.host.poke(page, &[value; 4096]);
        self.host.run(queue, Sqe::write(nsid, lba, 0, 0).with_prps(page, 0)).0
    }

    fn read(&mut self, queue: &mut Queue, nsid: u32, lba: u64) -> Result<u8, Status> {
        let page = self.host.alloc(4096);
        let (status, _) = self.host.run(queue, Sqe::read(nsid, lba, 0, 0).with_prps(page, 0));
        status.into_result().map(|()| self.host.peek(page, 1)[0])
    }

    /// Submits an admin command without waiting for it.
    fn begin(&mut self, sqe: Sqe) {
        let mut admin = std::mem::replace(&mut self.host.admin, Queue::none());
        self.host.submit(&mut admin, &sqe);
        self.host.admin = admin;
    }

    fn wait_completion(&mut self) -> (u16, Status, u32) {
        let mut admin = std::mem::replace(&mut self.host.admin, Queue::none());
        let done = self.host.wait(&mut admin);
        self.host.admin = admin;
        done
    }
}

trait AsBytes {
    fn bytes(&self) -> &[u8];
}

impl<T: IntoBytes + zerocopy::Immutable> AsBytes for T {
    fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }
}

#[test]
fn a_namespace_is_created_used_and_deleted() {
    let mut ours = start(&MemPool::new(), Vec::new());
    let mut queue = ours.host.create(1, 16, false);
    let id: IdentifyController = ours.identify(cns::CONTROLLER, 0).unwrap();
    assert!(id.oacs.namespace_management() && id.oacs.format_nvm());
    assert_eq!((id.tnvmcap.get(), id.unvmcap.get()), (CAPACITY.into(), CAPACITY.into()));
    assert_eq!(id.nn, 256);
    let common: IdentifyNamespace = ours.identify(cns::NAMESPACE, NSID_ALL).unwrap();
    assert_eq!((common.nlbaf, common.lbaf[0].lbads, common.lbaf[1].lbads), (11, 9, 12));

    let (status, nsid) = ours.create(&wanted(256, 1));
    assert_eq!((status, nsid), (Status::SUCCESS, 1));
    assert_eq!(ours.list(cns::ALLOCATED_NAMESPACES), [1]);
    assert_eq!(ours.list(cns::ACTIVE_NAMESPACES), [0; 0]);
    let inactive: IdentifyNamespace = ours.identify(cns::NAMESPACE, 1).unwrap();
    assert_eq!(inactive, IdentifyNamespace::new_zeroed());
    let own: IdentifyNamespace = ours.identify(cns::ALLOCATED_NAMESPACE, 1).unwrap();
    assert_eq!((own.nsze, own.nlbaf, own.flbas.index()), (256, 11, 1));
    let none: IdentifyNamespace = ours.identify(cns::ALLOCATED_NAMESPACE, 2).unwrap();
    assert_eq!(none, IdentifyNamespace::new_zeroed());
    let id: IdentifyController = ours.identify(cns::CONTROLLER, 0).unwrap();
    assert_eq!(id.unvmcap.get(), (CAPACITY - (1 << 20)).into());
    assert_eq!(ours.write(&mut queue, 1, 0, 7), INACTIVE);
    let attached = |ours: &mut PoolHost| -> Vec<u16> {
        let list: ControllerList = ours.identify(cns::NAMESPACE_CONTROLLERS, 1).unwrap();
        list.iter().collect()
    };
    assert_eq!(attached(&mut ours), [0; 0]);

    for (sel, cntlids, ends) in [
        (NamespaceAttachment::DETACH, &[1][..], Status::NAMESPACE_NOT_ATTACHED),
        (NamespaceAttachment::ATTACH, &[], Status::CONTROLLER_LIST_INVALID),
        (NamespaceAttachment::ATTACH, &[2], Status::CONTROLLER_LIST_INVALID),
        (NamespaceAttachment::ATTACH, &[1, 2], Status::CONTROLLER_LIST_INVALID),
        (2, &[1], Status::INVALID_FIELD),
        (NamespaceAttachment::ATTACH, &[1], Status::SUCCESS),
        (NamespaceAttachment::ATTACH, &[1], Status::NAMESPACE_ALREADY_ATTACHED),
    ] {
        assert_eq!(ours.attach(1, sel, cntlids).code(), ends, "{sel} {cntlids:?}");
    }
    assert_eq!(attached(&mut ours), [1]);
    assert_eq!(ours.list(cns::ACTIVE_NAMESPACES), [1]);
    assert_eq!(ours.write(&mut queue, 1, 255, 7), Status::SUCCESS);
    assert_eq!(ours.read(&mut queue, 1, 255), Ok(7));
    assert_eq!(ours.attach(1, NamespaceAttachment::DETACH, &[1]), Status::SUCCESS);
    assert_eq!(ours.read(&mut queue, 1, 255), Err(INACTIVE));
    assert_eq!(ours.attach(1, NamespaceAttachment::ATTACH, &[1]), Status::SUCCESS);
    assert_eq!(ours.read(&mut queue, 1, 255), Ok(7), "what was detached is kept");
    // Deleting an attached namespace detaches it.
    assert_eq!(ours.delete(1), Status::SUCCESS);
    assert_eq!(ours.read(&mut queue, 1, 255), Err(INACTIVE));
    assert_eq!(ours.list(cns::ALLOCATED_NAMESPACES), [0; 0]);
    assert_eq!(ours.delete(1).code(), Status::INVALID_NAMESPACE_OR_FORMAT);
    assert_eq!((ours.create_and_attach(64, 0), ours.create_and_attach(64, 1)), (1, 2));
    assert_eq!(ours.delete(NSID_ALL), Status::SUCCESS);
    assert_eq!(ours.list(cns::ALLOCATED_NAMESPACES), [0; 0]);
}

#[test]
fn invalid_namespace_creations_are_refused() {
    let mut ours = start(&MemPool::new(), Vec::new());
    let most = CAPACITY / 512;
    let with = |change: &dyn Fn(&mut NamespaceToCreate)| {
        let mut of = wanted(64, 0);
        change(&mut of);
        of
    };
    for (of, ends) in [
        (wanted(most + 1, 0), Status::NAMESPACE_INSUFFICIENT_CAPACITY),
        (wanted(u64::MAX, 1), Status::NAMESPACE_INSUFFICIENT_CAPACITY),
        (wanted(64, 12), Status::INVALID_FORMAT),
        (wanted(0, 0), Status::INVALID_FIELD),
        (with(&|of| of.ncap = 32), Status::THIN_PROVISIONING_NOT_SUPPORTED),
        (with(&|of| of.dps.set_pit(1)), Status::INVALID_FORMAT),
        (with(&|of| of.nmic.set_shrns(true)), Status::INVALID_FIELD),
        (with(&|of| of.endgid = 1), Status::INVALID_FIELD),
    ] {
        let (status, _) = ours.create(&of);
        assert_eq!(status.code(), ends);
    }
    let fields = NamespaceManagement { sel: NamespaceManagement::CREATE, csi: 2 };
    let (status, _) = ours.with_data(Sqe::namespace_management(0, fields, 0), &wanted(64, 0));
    assert_eq!(status.code(), Status::INVALID_IO_COMMAND_SET);
    let fields = NamespaceManagement { sel: 2, csi: 0 };
    let (status, _) = ours.host.admin(Sqe::namespace_management(1, fields, 0));
    assert_eq!(status.code(), Status::INVALID_FIELD);
    // A namespace may have the whole capacity of the pool. Then not even one more block fits.
    assert_eq!(ours.create(&wanted(most, 0)), (Status::SUCCESS, 1));
    let (status, _) = ours.create(&wanted(1, 0));
    assert_eq!(status.code(), Status::NAMESPACE_INSUFFICIENT_CAPACITY);
}

#[test]
fn a_configured_namespace_cannot_be_deleted_or_formatted() {
    let disk: Arc<dyn Disk> = Arc::new(MemDisk::new(64, 512).unwrap());
    let given = NamespaceConfig { disk, uuid: uuid_from("given") };
    let mut ours = start(&MemPool::new(), vec![given]);
    let mut queue = ours.host.create(1, 16, false);
    assert_eq!(ours.create_and_attach(64, 0), 2, "the first number is taken");
    assert_eq!(ours.list(cns::ALLOCATED_NAMESPACES), [1, 2]);
    assert_eq!(ours.write(&mut queue, 1, 0, 7), Status::SUCCESS);
    let erase = Sanitize { sanact: Sanitize::BLOCK_ERASE, ..Sanitize::default() };
    for status in [
        ours.delete(1),
        ours.attach(1, NamespaceAttachment::DETACH, &[1]),
        ours.format(1, FormatNvm::default()),
        ours.format(NSID_ALL, FormatNvm::default()),
        ours.sanitize(erase),
    ] {
        assert_eq!(status.code(), Status::OPERATION_DENIED);
    }
    assert_eq!(ours.delete(NSID_ALL), Status::SUCCESS, "all of the pool");
    assert_eq!(ours.list(cns::ALLOCATED_NAMESPACES), [1]);
    assert_eq!(ours.read(&mut queue, 1, 0), Ok(7));
    let id: IdentifyController = ours.identify(cns::CONTROLLER, 0).unwrap();
    assert_eq!(id.tnvmcap.get(), u128::from(CAPACITY + 64 * 512));
}

#[test]
fn pool_commands_are_invalid_without_a_pool() {
    let mut host = Host::new(&["mem:1MiB"], Polling::Never);
    for opcode in [0x0d, 0x15, 0x80, 0x84] {
        let (status, _) = host.admin(Sqe::new(opcode, 0, 1));
        assert_eq!(status.code(), Status::INVALID_OPCODE);
    }
    for cns in [cns::ALLOCATED_NAMESPACES, cns::ALLOCATED_NAMESPACE] {
        let identify = Identify { cns, ..Identify::default() }.encode(Sqe::new(6, 0, 1));
        assert_eq!(host.page(identify).unwrap_err().code(), Status::INVALID_FIELD);
    }
    let fields = GetLogPage { lid: lid::SANITIZE_STATUS, numd0: 127, ..GetLogPage::default() };
    let page = host.page(fields.encode(Sqe::new(2, 0, NSID_ALL)));
    assert_eq!(page.unwrap_err().code(), Status::INVALID_LOG_PAGE);
}

#[test]
fn a_format_changes_the_block_size_and_erases() {
    let mut ours = start(&MemPool::new(), Vec::new());
    let mut queue = ours.host.create(1, 16, false);
    let nsid = ours.create_and_attach(1024, 0);
    let other = ours.create_and_attach(16, 1);
    assert_eq!(ours.write(&mut queue, nsid, 9, 7), Status::SUCCESS);
    assert_eq!(ours.write(&mut queue, other, 9, 7), Status::SUCCESS);
    let plain = FormatNvm::default();
    for fields in [
        FormatNvm { lbaf: 12, ..plain },
        FormatNvm { mset: true, ..plain },
        FormatNvm { pi: 1, ..plain },
        FormatNvm { ses: 2, ..plain },
    ] {
        assert!(!ours.format(nsid, fields).is_success(), "{fields:?}");
    }
    assert_eq!(ours.read(&mut queue, nsid, 9), Ok(7));
    // During a format, the namespace exists, but cannot be accessed.
    ours.pool.hold(true);
    let fields = FormatNvm { lbaf: 1, ses: 1, ..plain };
    ours.begin(Sqe::format_nvm(nsid, fields, 900));
    let start = std::time::Instant::now();
    while ours.read(&mut queue, nsid, 9) == Ok(7) {
        assert!(start.elapsed() < common::LIMIT);
    }
    assert_eq!(ours.read(&mut queue, nsid, 9), Err(Status::FORMAT_IN_PROGRESS));
    assert_eq!(ours.write(&mut queue, nsid, 9, 8), Status::FORMAT_IN_PROGRESS);
    assert_eq!(ours.read(&mut queue, other, 9), Ok(7));
    assert_eq!(ours.list(cns::ACTIVE_NAMESPACES), [nsid, other]);
    ours.pool.hold(false);
    assert_eq!(ours.wait_completion(), (900, Status::SUCCESS, 0));
    let own: IdentifyNamespace = ours.identify(cns::NAMESPACE, nsid).unwrap();
    assert_eq!((own.nsze, own.flbas.index(), own.lbaf[1].lbads), (128, 1, 12));
    assert_eq!(ours.read(&mut queue, nsid, 9), Ok(0));
    assert_eq!(ours.write(&mut queue, nsid, 127, 5), Status::SUCCESS);
    assert_eq!(ours.read(&mut queue, nsid, 127), Ok(5));
    assert_eq!(ours.format(NSID_ALL, plain), Status::SUCCESS);
    assert_eq!(ours.read(&mut queue, other, 9), Ok(0));
    let own: IdentifyNamespace = ours.identify(cns::NAMESPACE, nsid).unwrap();
    assert_eq!((own.nsze, own.flbas.index()), (1024, 0));
}

#[test]
fn a_format_completes_across_a_reset() {
    let mut ours = start(&MemPool::new(), Vec::new());
    let nsid = ours.create_and_attach(1024, 0);
    ours.pool.hold(true);
    ours.begin(Sqe::format_nvm(nsid, FormatNvm { lbaf: 1, ..FormatNvm::default() }, 900));
    ours.host.until("the order", || ours.pool.orders.lock().unwrap().len() == 3);
    ours.host.disable();
    ours.host.enable();
    // This format waits for the end of the previous one.
    ours.begin(Sqe::format_nvm(nsid, FormatNvm::default(), 901));
    ours.pool.hold(false);
    assert_eq!(
        ours.wait_completion(),
        (901, Status::SUCCESS, 0),
        "no completion of the previous format is posted again"
    );
    let own: IdentifyNamespace = ours.identify(cns::NAMESPACE, nsid).unwrap();
    assert_eq!((own.nsze, own.flbas.index()), (1024, 0));
}

/// Test of a format while the disk has commands of the namespace in flight.
#[test]
fn commands_in_flight_end_before_a_format() {
    let pool = MemPool::new();
    let mut ours = start(&pool, Vec::new());
    let mut queue = ours.host.create(1, 16, false);
    let nsid = ours.create_and_attach(64, 0);
    assert_eq!(ours.attach(nsid, NamespaceAttachment::DETACH, &[1]), Status::SUCCESS);
    let held = Held::new(64);
    held.instruct(|instructions| instructions.hold = true);
    pool.disks.lock().unwrap().insert(nsid, Arc::new(held.clone()));
    assert_eq!(ours.attach(nsid, NamespaceAttachment::ATTACH, &[1]), Status::SUCCESS);
    let page = ours.host.alloc(4096);
    ours.host.submit(&mut queue, &Sqe::write(nsid, 0, 0, 77).with_prps(page, 0));
    ours.host.until("the write at the disk", || held.seen().len() == 1);
    ours.begin(Sqe::format_nvm(nsid, FormatNvm { lbaf: 1, ..FormatNvm::default() }, 900));
    ours.host.until("the namespace to go", || held.cancelled() == 1);
    wait::short_pause();
    let block_size = pool.change(|state| state.get(nsid).unwrap().block_size);
    assert_eq!(block_size, 512, "the format waits for the write in flight");
    held.instruct(|instructions| instructions.hold = false);
    let (cid, status, _) = ours.host.wait(&mut queue);
    assert_eq!((cid, status), (77, Status::FORMAT_IN_PROGRESS));
    assert_eq!(ours.wait_completion(), (900, Status::SUCCESS, 0));
    assert_eq!(ours.read(&mut queue, nsid, 0), Ok(0));
}

#[test]
fn a_sanitize_operation_refuses_access_until_its_end() {
    let pool = MemPool::new();
    let mut ours = start(&pool, Vec::new());
    let mut queue = ours.host.create(1, 16, false);
    let nsid = ours.create_and_attach(64, 0);
    assert_eq!(ours.log().sstat.sos(), sos::NEVER);
    assert_eq!(ours.write(&mut queue, nsid, 3, 7), Status::SUCCESS);
    ours.begin(Sqe::new(0x0c, 500, 0));
    for fields in [
        Sanitize { sanact: 0, ..Sanitize::default() },
        Sanitize { sanact: Sanitize::CRYPTO_ERASE, ..Sanitize::default() },
        Sanitize { sanact: Sanitize::BLOCK_ERASE, ndas: true, ..Sanitize::default() },
    ] {
        assert_eq!(ours.sanitize(fields).code(), Status::INVALID_FIELD, "{fields:?}");
    }
    let erase = Sanitize { sanact: Sanitize::BLOCK_ERASE, ause: true, ..Sanitize::default() };
    pool.hold(true);
    assert_eq!(
        ours.sanitize(erase),
        Status::SUCCESS,
        "the command completes when the operation has started"
    );
    assert_eq!(ours.read(&mut queue, nsid, 3), Err(Status::SANITIZE_IN_PROGRESS));
    assert_eq!(ours.write(&mut queue, nsid, 3, 8), Status::SANITIZE_IN_PROGRESS);
    assert_eq!(ours.sanitize(erase).code(), Status::SANITIZE_IN_PROGRESS);
    assert_eq!(ours.log().sprog, 7);
    pool.hold(false);
    assert_eq!(
        ours.wait_completion(),
        (500, Status::SUCCESS, AsyncEvent::SANITIZE_COMPLETED.dw0())
    );
    let log = ours.log();
    assert_eq!((log.sstat.sos(), log.sprog), (sos::SUCCESSFUL, SanitizeLog::NO_PROGRESS));
    assert_eq!(log.scdw10, erase.dword10());
    assert_eq!(ours.read(&mut queue, nsid, 3), Ok(0));

    // The next sanitize operation fails.
    *pool.fails.lock().unwrap() = true;
    assert_eq!(ours.sanitize(erase), Status::SUCCESS);
    ours.host.until("the failure", || {
        pool.state.lock().unwrap().sanitize.phase == SanitizePhase::Failed
    });
    let start = std::time::Instant::now();
    while ours.read(&mut queue, nsid, 3) == Err(Status::SANITIZE_IN_PROGRESS) {
        assert!(start.elapsed() < common::LIMIT);
    }
    assert_eq!(ours.read(&mut queue, nsid, 3), Err(Status::SANITIZE_FAILED));
    assert_eq!(ours.host.run(&mut queue, Sqe::flush(NSID_ALL, 0)).0, Status::SUCCESS);
    assert_eq!(ours.log().sstat.sos(), sos::FAILED);
    assert_eq!(ours.list(cns::ACTIVE_NAMESPACES), [nsid]);
    for status in [
        ours.delete(nsid),
        ours.create(&wanted(1, 0)).0,
        ours.format(nsid, FormatNvm::default()),
        ours.host.admin(Sqe { cdw10: 1, ..Sqe::new(0x14, 0, nsid) }).0,
    ] {
        assert_eq!(status.code(), Status::SANITIZE_FAILED);
    }
    let leave = Sanitize { sanact: Sanitize::EXIT_FAILURE, ..Sanitize::default() };
    assert_eq!(ours.sanitize(leave), Status::SUCCESS);
    assert_eq!(ours.read(&mut queue, nsid, 3), Ok(0));
    assert_eq!(ours.sanitize(leave), Status::SUCCESS, "there is nothing to leave");

    // After a failed restricted sanitize operation, only another restricted one is allowed.
    let restricted = Sanitize { ause: false, ..erase };
    assert_eq!(ours.sanitize(restricted), Status::SUCCESS);
    ours.host.until("the failure", || {
        pool.state.lock().unwrap().sanitize.phase == SanitizePhase::Failed
    });
    assert_eq!(ours.sanitize(leave).code(), Status::SANITIZE_FAILED);
    assert_eq!(ours.sanitize(erase).code(), Status::SANITIZE_FAILED);
    *pool.fails.lock().unwrap() = false;
    assert_eq!(ours.sanitize(restricted), Status::SUCCESS);
    ours.host.until("the end", || {
        pool.state.lock().unwrap().sanitize.phase == SanitizePhase::Successful
    });
    let start = std::time::Instant::now();
    while ours.read(&mut queue, nsid, 3).is_err() {
        assert!(start.elapsed() < common::LIMIT);
    }
}

/// A controller that starts during a sanitize operation refuses access to the namespaces, too.
#[test]
fn a_sanitize_operation_outlives_the_controller() {
    let pool = MemPool::new();
    let mut ours = start(&pool, Vec::new());
    let nsid = ours.create_and_attach(64, 0);
    drop(ours);
    let command = Sanitize { sanact: Sanitize::BLOCK_ERASE, ..Sanitize::default() };
    let phase = SanitizePhase::InProgress(100);
    pool.change(|state| state.sanitize = SanitizeStatus { phase, command, passes: 0 });
    let mut ours = start(&pool, Vec::new());
    let mut queue = ours.host.create(1, 16, false);
    assert_eq!(ours.list(cns::ACTIVE_NAMESPACES), [nsid]);
    let own: IdentifyNamespace = ours.identify(cns::NAMESPACE, nsid).unwrap();
    assert_eq!(own.nsze, 64);
    assert_eq!(ours.read(&mut queue, nsid, 0), Err(Status::SANITIZE_IN_PROGRESS));
    assert_eq!((ours.log().sstat.sos(), ours.log().sprog), (sos::IN_PROGRESS, 100));
    assert_eq!(ours.sanitize(command).code(), Status::SANITIZE_IN_PROGRESS);
    ours.begin(Sqe::new(0x0c, 500, 0));
    pool.sanitize();
    assert_eq!(
        ours.wait_completion(),
        (500, Status::SUCCESS, AsyncEvent::SANITIZE_COMPLETED.dw0())
    );
    assert_eq!(ours.read(&mut queue, nsid, 0), Ok(0));
}
