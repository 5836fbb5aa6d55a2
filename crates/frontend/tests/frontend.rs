//! Tests of a controller in a program that uses only this crate and its public dependencies.

use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Pool, PoolOptions};
use shadowbell_disk_file::MemDisk;
use shadowbell_driver::{AttachOptions, Controller as Driver, Doorbells, Transport, VfioUser};
use shadowbell_frontend::vfio_user::ClientEvent;
use shadowbell_frontend::{ControllerDevice, InProcess};
use shadowbell_memory::{EventFd, Mapping};
use shadowbell_spec::{Status, regs};
use shadowbell_testing::wait::LIMIT;
use shadowbell_vfio_user::client::{DmaRange, Options};
use shadowbell_vfio_user::device::region;
use shadowbell_vfio_user::server::Handle;
use shadowbell_vfio_user::{Client, Listener, Reactor};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Instant;

fn controller(mapped_doorbells: bool) -> Controller {
    let disk = Arc::new(MemDisk::new(8192, 512).unwrap());
    let namespaces = vec![NamespaceConfig { uuid: uuid_from("a test"), disk }];
    let config = Config { namespaces, shadow_doorbells: !mapped_doorbells, ..Config::default() };
    let pool = Pool::start(&PoolOptions { workers: 1, ..PoolOptions::default() }).unwrap();
    Controller::new(config, pool, Carrier { mapped_doorbells, ..Carrier::default() }).unwrap()
}

/// Controller behind a socket, which is served until the value is dropped.
struct Server {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
    events: Receiver<ClientEvent>,
    directory: tempfile::TempDir,
}

impl Server {
    fn start(controller: Controller) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (sender, events) = channel();
        let handler = Arc::new(move |event| sender.send(event).unwrap_or_default());
        let device = ControllerDevice::new(controller, handler).unwrap();
        let mut reactor = Reactor::new(Default::default()).unwrap();
        let listener = Listener::bind(directory.path().join("socket")).unwrap();
        reactor.add(listener, Box::new(device)).unwrap();
        let handle = reactor.handle();
        let thread = std::thread::spawn(move || reactor.run().map(|_| ()).unwrap());
        Self { handle, thread: Some(thread), events, directory }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    #[track_caller]
    fn expect(&self, event: ClientEvent) {
        assert_eq!(self.events.recv_timeout(LIMIT), Ok(event));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.handle.stop();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Writes a block and reads it back.
fn block_comes_back(transport: Arc<dyn Transport>, doorbells: Doorbells) {
    let mut controller = Driver::attach(transport, &AttachOptions::default()).unwrap();
    assert_eq!(controller.doorbells(), doorbells);
    let namespace = controller.namespace(1).unwrap().clone();
    let buffers = controller.buffers(1, 512).unwrap();
    let mut queue = controller.take_queue_pair().unwrap();
    let mut run = |command, buffer| {
        queue.submit(command, Some(buffer)).unwrap();
        let deadline = Instant::now() + LIMIT;
        while !queue.wait(Some(deadline)).unwrap() {
            assert!(Instant::now() < deadline, "nothing completes");
        }
        let completion = queue.pop().unwrap();
        assert_eq!(completion.status, Status::SUCCESS);
        completion.buffer.unwrap()
    };
    let mut buffer = buffers.take().unwrap();
    assert!(buffer.copy_from(0, b"there and back"));
    let mut buffer = run(namespace.write(100, 1).unwrap(), buffer);
    assert!(buffer.copy_from(0, &[0; 14]));
    let buffer = run(namespace.read(100, 1).unwrap(), buffer);
    assert_eq!(buffer.to_vec(14), b"there and back");
    drop(buffer);
    drop(queue);
    controller.detach().unwrap();
}

#[test]
fn a_block_is_written_and_read_over_a_socket() {
    for (mapped, doorbells) in [(false, Doorbells::Shadow), (true, Doorbells::Mapped)] {
        let server = Server::start(controller(mapped));
        for _ in 0..2 {
            let transport = VfioUser::connect(server.socket(), LIMIT).unwrap();
            server.expect(ClientEvent::Attached);
            block_comes_back(Arc::new(transport), doorbells);
            server.expect(ClientEvent::Detached);
        }
    }
}

#[test]
fn a_block_is_written_and_read_in_process() {
    for (mapped, doorbells) in [(false, Doorbells::Shadow), (true, Doorbells::Mapped)] {
        let transport = Arc::new(InProcess::new(controller(mapped), "a test".into()));
        for _ in 0..2 {
            block_comes_back(transport.clone(), doorbells);
        }
        assert!(transport.controller().stats().io_queues().0.commands >= 4);
    }
}

#[test]
fn unshared_memory_is_reported_once_for_each_client() {
    let server = Server::start(controller(false));
    for _ in 0..2 {
        let client = Client::connect(server.socket(), Options::default()).unwrap();
        server.expect(ClientEvent::Attached);
        let memory = DmaRange {
            iova: 0,
            len: 1 << 20,
            readable: true,
            writable: true,
            fd: None,
            fd_offset: 0,
        };
        client.dma_map(&memory).unwrap();
        assert!(server.events.try_recv().is_err(), "not before a guest uses the controller");
        for enable in [1_u32, 0, 1] {
            client.region_write(region::BAR0, regs::CC, &enable.to_le_bytes()).unwrap();
        }
        server.expect(ClientEvent::NoSharedMemory);
        drop(client);
        server.expect(ClientEvent::Detached);
    }
}

#[test]
fn an_empty_memory_file_is_reported() {
    let server = Server::start(controller(false));
    let client = Client::connect(server.socket(), Options::default()).unwrap();
    server.expect(ClientEvent::Attached);
    let file = Mapping::shared("guest", 1 << 20).unwrap();
    let memory = DmaRange {
        iova: 0,
        len: 1 << 20,
        readable: true,
        writable: true,
        fd: file.fd(),
        fd_offset: 0,
    };
    client.dma_map(&memory).unwrap();
    client.region_write(region::BAR0, regs::DOORBELLS, &1_u32.to_le_bytes()).unwrap();
    server.expect(ClientEvent::MemoryNotShared);
}

#[test]
fn invalid_memory_and_vectors_are_refused_in_process() {
    let transport = InProcess::new(controller(false), "a test".into());
    let event = EventFd::new().unwrap();
    let vectors = transport.irq_vectors();
    transport.set_irq(vectors - 1, Some(&event)).unwrap();
    let error = transport.set_irq(vectors, Some(&event)).unwrap_err();
    assert!(error.to_string().contains("no such vector"), "{error}");
    let memory = Mapping::anonymous(4096).unwrap();
    let iova = transport.map_dma(&memory).unwrap();
    assert!(transport.map_dma(&memory).is_err(), "twice");
    transport.unmap_dma(iova, 4096).unwrap();
    assert!(transport.unmap_dma(iova, 4096).is_err());
    transport.reset().unwrap();
}
