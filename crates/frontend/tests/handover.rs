//! Tests in which the server is replaced while a client is attached.

use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Pool, PoolOptions};
use shadowbell_disk_file::MemDisk;
use shadowbell_driver::{AttachOptions, Controller as Driver, VfioUser};
use shadowbell_frontend::ControllerDevice;
use shadowbell_frontend::vfio_user::MSIX_BAR;
use shadowbell_memory::{EventFd, Mapping};
use shadowbell_spec::{Status, regs};
use shadowbell_state::{Descriptors, Parcel};
use shadowbell_testing::wait::LIMIT;
use shadowbell_vfio_user::client::{DmaRange, Options};
use shadowbell_vfio_user::device::{DmaUnmap, irq, region};
use shadowbell_vfio_user::server::{RunEnd, SavedPort};
use shadowbell_vfio_user::{Client, Listener, Reactor};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
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

/// Controller behind a socket, and its saved state while it is quiesced.
struct Server {
    directory: tempfile::TempDir,
    controller: Controller,
    handle: shadowbell_vfio_user::server::Handle,
    running: Option<Running>,
}

impl Server {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let controller = self::controller();
        let mut reactor = Reactor::new(Default::default()).unwrap();
        let listener = Listener::bind(directory.path().join("cntrl")).unwrap();
        reactor.add(listener, device(&controller)).unwrap();
        let handle = reactor.handle();
        Self { directory, controller, handle, running: Some(run(reactor)) }
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
        let mut old = self.freeze();
        let (saved, mut parcel) = save_and_receive(&mut old);
        let count = parcel.descriptors().len();
        let controller = self::controller();
        let mut new = Reactor::new(Default::default()).unwrap();
        new.restore(saved, parcel.descriptors(), device(&controller)).unwrap();
        parcel.finish().unwrap();
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

fn save_and_receive(old: &mut Reactor) -> (SavedPort, Parcel) {
    let mut parcel = Parcel::new();
    let saved = old.save(parcel.descriptors()).unwrap();
    parcel.add("sockets", true, &saved).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let sender = std::thread::spawn(move || parcel.send(&ours).unwrap());
    let mut parcel = Parcel::receive(&theirs).unwrap();
    sender.join().unwrap();
    let mut saved: Vec<SavedPort> = parcel.take("sockets").unwrap().unwrap();
    (saved.remove(0), parcel)
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
        // The descriptors are those of the listener, the connected socket, three files and three
        // eventfds.
        assert_eq!(server.replace(), 1 + 1 + 3 + 3);
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
    assert_eq!(server.replace(), 1 + 1 + 2 + 3);
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
    let mut old = server.freeze();
    let (saved, mut parcel) = save_and_receive(&mut old);
    let mut new = Reactor::new(Default::default()).unwrap();
    let without = &mut Descriptors::default();
    let error = new.restore(saved.clone(), without, device(&controller())).unwrap_err();
    assert!(error.to_string().contains("refers to descriptor"), "{error}");
    // The saved memory range cannot be mapped.
    let mut text = serde_json::to_value(&saved).unwrap();
    text["device"]["memory"]["ranges"][0][3] = 1.into();
    let saved = serde_json::from_value(text).unwrap();
    let error = new.restore(saved, parcel.descriptors(), device(&controller())).unwrap_err();
    assert!(error.to_string().contains("memory at IOVA 0x0"), "{error}");
    drop((new, parcel));
    server.resume(old);
    client.dma_unmap(DmaUnmap::Range { iova: 0, len: PAGE }).unwrap();
}
