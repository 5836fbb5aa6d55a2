//! Tests in which the server is replaced while a client is attached.

use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Pool, PoolOptions};
use shadowbell_disk_file::MemDisk;
use shadowbell_driver::{AttachOptions, Controller as Driver, VfioUser};
use shadowbell_frontend::ControllerDevice;
use shadowbell_frontend::vfio_user::MSIX_BAR;
use shadowbell_memory::{EventFd, Mapping};
use shadowbell_spec::{Status, regs};
use shadowbell_state::{Descriptors, LastingChange};
use shadowbell_testing::wait::LIMIT;
use shadowbell_vfio_user::client::{DmaRange, Options};
use shadowbell_vfio_user::device::{DmaUnmap, irq, region};
use shadowbell_vfio_user::server::{Limits, PortRecorder, RestoredPort, RunEnd, SavedPort};
use shadowbell_vfio_user::{Client, Listener, Reactor};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

const PAGE: u64 = 4096;

fn controller() -> Controller {
    let disk = Arc::new(MemDisk::new(8192, 512).unwrap());
    let namespaces = vec![NamespaceConfig { uuid: uuid_from("a test"), disk }];
    let config = Config { namespaces, ..Config::default() };
    let pool = Pool::start(&PoolOptions { workers: 1, ..PoolOptions::default() }).unwrap();
    Controller::new(config, pool, Carrier::default()).unwrap()
}

fn device(controller: &Controller) -> Box<ControllerDevice> {
    Box::new(ControllerDevice::new(controller.clone(), Arc::new(|_| ())).unwrap())
}

type Running = JoinHandle<(Reactor, RunEnd)>;

fn run(mut reactor: Reactor) -> Running {
    std::thread::spawn(move || {
        let ended = reactor.run().unwrap();
        (reactor, ended)
    })
}

/// Recorder that stores the last checkpoint of a controller's socket, with the files of the lasting
/// descriptors.
#[derive(Clone, Default)]
struct Last(Arc<Mutex<Checkpoint>>);

#[derive(Default)]
struct Checkpoint {
    port: Option<SavedPort>,
    fds: Vec<OwnedFd>,
    lasting: BTreeMap<u64, OwnedFd>,
}

impl PortRecorder for Last {
    fn record(&mut self, port: &SavedPort, mut fds: Descriptors) {
        let mut checkpoint = self.0.lock().unwrap();
        for change in fds.take_changes() {
            match change {
                LastingChange::Put(number, fd) => drop(checkpoint.lasting.insert(number, fd)),
                LastingChange::Remove(number) => drop(checkpoint.lasting.remove(&number)),
            }
        }
        (checkpoint.port, checkpoint.fds) = (Some(port.clone()), fds.into_fds());
    }
}

impl Last {
    /// Copy of the checkpoint, as the next process receives it, and the number of its descriptors.
    fn copy(&self) -> (SavedPort, Descriptors, usize) {
        let checkpoint = self.0.lock().unwrap();
        let port = serde_json::to_string(checkpoint.port.as_ref().unwrap()).unwrap();
        let copy = |fd: &OwnedFd| fd.try_clone().unwrap();
        let mut fds = Descriptors::from(checkpoint.fds.iter().map(copy).collect::<Vec<_>>());
        checkpoint.lasting.iter().for_each(|(number, fd)| fds.add_lasting(*number, copy(fd)));
        let count = checkpoint.fds.len() + checkpoint.lasting.len();
        (serde_json::from_str(&port).unwrap(), fds, count)
    }
}

/// Controller behind a socket.
struct Server {
    directory: tempfile::TempDir,
    last: Last,
    controller: Controller,
    handle: shadowbell_vfio_user::server::Handle,
    running: Option<Running>,
}

impl Server {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let controller = self::controller();
        let reactor = Reactor::new(Default::default()).unwrap();
        let listener = Listener::bind(directory.path().join("cntrl")).unwrap();
        let (handle, last) = (reactor.handle(), Last::default());
        handle.add_recorded(listener, device(&controller), Box::new(last.clone()));
        Self { directory, last, controller, handle, running: Some(run(reactor)) }
    }

    fn freeze(&mut self) -> Reactor {
        self.handle.freeze();
        let (reactor, ended) = self.running.take().unwrap().join().unwrap();
        assert_eq!(ended, RunEnd::Frozen);
        reactor
    }

    fn resume(&mut self, reactor: Reactor) {
        self.handle = reactor.handle();
        self.running = Some(run(reactor));
    }

    /// Replaces the server. Returns the number of transferred descriptors.
    fn replace(&mut self) -> usize {
        let old = self.freeze();
        let (saved, mut fds, count) = self.last.copy();
        let controller = self::controller();
        let limits = Limits::default();
        let restored = RestoredPort::new(saved, &mut fds, device(&controller), &limits).unwrap();
        assert_eq!(fds.iter().count(), 0, "descriptors that the port has not taken");
        let new = Reactor::new(limits).unwrap();
        new.handle().restore(restored, Box::new(self.last.clone()), || {});
        old.release_to_successor();
        self.controller = controller;
        self.resume(new);
        count
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.handle.stop();
        let _ = self.running.take().map(JoinHandle::join);
    }
}

fn share<'a>(iova: u64, len: u64, fd: Option<BorrowedFd<'a>>, fd_offset: u64) -> DmaRange<'a> {
    DmaRange { iova, len, readable: true, writable: true, fd, fd_offset }
}

#[test]
fn a_client_keeps_its_memory_its_interrupts_and_its_registers() {
    let mut server = Server::start();
    let client = Client::connect(server.directory.path(), Options::default()).unwrap();
    // The client shares four kinds of memory: single pages of one file (more than the server maps
    // one by one), another file, a read-only file, and a range that cannot be mapped.
    let [pages, other, read_only] =
        [600, 8, 2].map(|pages| Mapping::shared("guest", pages * PAGE).unwrap());
    for n in 0..300 {
        pages.bytes().write((2 * n * PAGE) as usize, &(n + 7)).unwrap();
        client.dma_map(&share(2 * n * PAGE, PAGE, pages.fd(), 2 * n * PAGE)).unwrap();
    }
    client.dma_map(&share(1 << 30, 4 * PAGE, other.fd(), 4 * PAGE)).unwrap();
    let read = DmaRange { writable: false, ..share(2 << 30, 2 * PAGE, read_only.fd(), 0) };
    client.dma_map(&read).unwrap();
    client.dma_map(&share(3 << 30, PAGE, None, 0)).unwrap();
    let events = [(); 3].map(|()| EventFd::new().unwrap());
    for (vector, event) in [0_u32, 1, 3].into_iter().zip(&events) {
        client.set_irq_eventfds(irq::MSIX, vector, &[event.as_fd()]).unwrap();
    }
    // The client enables bus mastering, and sets a BAR address and an interrupt line.
    for (offset, value) in [(4, &[6, 4][..]), (0x10, &[0, 0, 0, 0xf0, 1, 0, 0, 0]), (0x3c, &[11])] {
        client.region_write(region::CONFIG, offset, value).unwrap();
    }
    client.region_write(MSIX_BAR, 16, &[1; 16]).unwrap();
    let registers = || {
        // The MSI-X table is read up to its end; bytes beyond it are zeroes.
        [(region::CONFIG, 4096), (MSIX_BAR, 64)].map(|(region, len)| {
            let mut bytes = vec![0; len];
            client.region_read(region, 0, &mut bytes).unwrap();
            bytes
        })
    };
    let before = registers();
    assert_eq!(before[1][16..20], [0, 1, 1, 1]);
    let ranges: Vec<_> = server.controller.dma_table().ranges().collect();
    assert_eq!(ranges.len(), 302);

    for _ in 0..2 {
        // The descriptors are those of the listener, the connected socket, three files, three
        // eventfds, and the list of the client's ranges.
        assert_eq!(server.replace(), 1 + 1 + 3 + 3 + 1);
        assert_eq!(registers(), before);
        let table = server.controller.dma_table();
        assert_eq!(table.ranges().collect::<Vec<_>>(), ranges);
        for n in 0..300 {
            let page = table.bytes(2 * n * PAGE, PAGE).unwrap();
            assert_eq!(page.read::<u64>(0), Some(n + 7));
            assert!(page.is_writable());
        }
        table.bytes(1 << 30, PAGE).unwrap().write(0, &42_u64).unwrap();
        assert_eq!(other.bytes().read::<u64>(4 * PAGE as usize), Some(42));
        assert!(!table.bytes(2 << 30, PAGE).unwrap().is_writable());
        for (vector, event) in [0, 1, 3].into_iter().zip(&events) {
            assert_eq!(event.drain(), 0);
            server.controller.trigger_interrupt(vector);
            assert!(event.wait(Some(LIMIT)).unwrap());
            assert_eq!(event.drain(), 1);
        }
    }
    // The client can still unmap the ranges that it mapped before the replacement.
    assert!(client.dma_map(&share(PAGE, 2 * PAGE, other.fd(), 0)).is_err(), "the map overlaps");
    for iova in [2 * PAGE, 2 << 30, 3 << 30] {
        let len = if iova == 2 << 30 { 2 * PAGE } else { PAGE };
        client.dma_unmap(DmaUnmap::Range { iova, len }).unwrap();
        assert!(client.dma_unmap(DmaUnmap::Range { iova, len }).is_err());
    }
    assert_eq!(server.replace(), 1 + 1 + 2 + 3 + 1);
}

#[test]
fn a_driver_attaches_after_a_replacement() {
    let mut server = Server::start();
    let transport = VfioUser::connect(server.directory.path(), LIMIT).unwrap();
    server.replace();
    let mut driver = Driver::attach(Arc::new(transport), &AttachOptions::default()).unwrap();
    let namespace = driver.namespace(1).unwrap().clone();
    let buffers = driver.buffers(1, 512).unwrap();
    let mut queue = driver.take_queue_pair().unwrap();
    queue.submit(namespace.read(0, 1).unwrap(), Some(buffers.take().unwrap())).unwrap();
    let deadline = Instant::now() + LIMIT;
    while !queue.wait(Some(deadline)).unwrap() {
        assert!(Instant::now() < deadline, "nothing completes");
    }
    assert_eq!(queue.pop().unwrap().status, Status::SUCCESS);
    drop(queue);
    driver.detach().unwrap();
}

/// Bus mastering stays enabled in the next server.
#[test]
fn a_successor_keeps_bus_mastering() {
    let mut server = Server::start();
    let client = Client::connect(server.directory.path(), Options::default()).unwrap();
    let memory = Mapping::shared("guest", 3 * PAGE).unwrap();
    client.dma_map(&share(0, 3 * PAGE, memory.fd(), 0)).unwrap();
    client.region_write(region::CONFIG, 4, &[6, 0]).unwrap();
    server.replace();
    // The first two pages are for admin queues. Identify Controller writes to the third page.
    let write = |offset, value: &[u8]| client.region_write(region::BAR0, offset, value).unwrap();
    write(regs::AQA, &0x000f_000f_u32.to_le_bytes());
    write(regs::ASQ, &0_u64.to_le_bytes());
    write(regs::ACQ, &PAGE.to_le_bytes());
    write(regs::CC, &0x0046_0001_u32.to_le_bytes());
    let deadline = Instant::now() + LIMIT;
    let mut status = [0; 4];
    while status[0] & 1 == 0 {
        client.region_read(region::BAR0, regs::CSTS, &mut status).unwrap();
        assert!(Instant::now() < deadline, "CSTS.RDY is not set: {status:?}");
    }
    let bytes = memory.bytes();
    bytes.write(0, &0x0001_0006_u32).unwrap();
    bytes.write(24, &(2 * PAGE)).unwrap();
    bytes.write(40, &1_u32).unwrap();
    write(regs::DOORBELLS, &1_u32.to_le_bytes());
    let completion = PAGE as usize + 12;
    while bytes.read::<u32>(completion) != Some(0x0001_0001) {
        assert!(Instant::now() < deadline, "{:?}", bytes.read::<u32>(completion));
        std::thread::yield_now();
    }
    assert_ne!(bytes.read::<u32>(2 * PAGE as usize), Some(0));
}

#[test]
fn a_failed_successor_reports_why_and_the_old_server_continues() {
    let mut server = Server::start();
    let client = Client::connect(server.directory.path(), Options::default()).unwrap();
    let memory = Mapping::shared("guest", PAGE).unwrap();
    client.dma_map(&share(0, PAGE, memory.fd(), 0)).unwrap();
    let old = server.freeze();
    let (saved, mut fds, _) = server.last.copy();
    let restore = |saved, fds: &mut Descriptors| {
        let device = device(&controller());
        RestoredPort::new(saved, fds, device, &Limits::default()).err().unwrap().to_string()
    };
    let error = restore(saved.clone(), &mut Descriptors::default());
    assert!(error.contains("refers to descriptor"), "{error}");
    // The saved memory range cannot be mapped.
    let mut text = serde_json::to_value(&saved).unwrap();
    text["device"]["memory"]["ranges"][0][3] = 1.into();
    let error = restore(serde_json::from_value(text).unwrap(), &mut fds);
    assert!(error.contains("memory at IOVA 0x0"), "{error}");
    drop(fds);
    server.resume(old);
    client.dma_unmap(DmaUnmap::Range { iova: 0, len: PAGE }).unwrap();
}
