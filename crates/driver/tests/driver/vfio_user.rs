//! The fake controller behind a real vfio-user socket.

use crate::fake::Fake;
use crate::{impatient, options};
use ::shadowbell_vfio_user::device::{
    Area, Deferral, DeviceInfo, DmaMap, DmaUnmap, IrqData, IrqInfo, Mapping as RegionMapping,
    RegionInfo, SetIrqs, irq, region,
};
use ::shadowbell_vfio_user::server::{Handle, Limits};
use ::shadowbell_vfio_user::{Completer, Device, Errno, Listener, Reactor};
use shadowbell_driver::{
    AttachOptions, Controller, DmaError, Doorbells, Recovery, SpinPolicy, Transport,
    TransportError, VfioUser,
};
use shadowbell_memory::{EventFd, Mapping, Protection};
use shadowbell_testing::programs::skipped;
use shadowbell_testing::wait::{self, LIMIT};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

const COMMAND: u64 = 4;

/// State and history of the server.
#[derive(Default)]
struct Board {
    config: Vec<u8>,
    doorbells: Option<Arc<Mapping>>,
    resettable: bool,
    bar0: u64,
    max_dma_maps: u32,
    /// Descriptors of the shared memory.
    memory: Vec<OwnedFd>,
}

struct Served {
    fake: Fake,
    board: Arc<Mutex<Board>>,
}

impl Device for Served {
    fn info(&mut self) -> DeviceInfo {
        let resettable = self.board.lock().unwrap().resettable;
        DeviceInfo { resettable, ..DeviceInfo::default() }
    }

    fn max_dma_maps(&self) -> u32 {
        self.board.lock().unwrap().max_dma_maps
    }

    fn region_info(&mut self, index: u32) -> Result<RegionInfo, Errno> {
        let board = self.board.lock().unwrap();
        let mapping =
            board.doorbells.as_ref().filter(|_| index == region::BAR0).map(|page| RegionMapping {
                fd: page.fd().unwrap().try_clone_to_owned().unwrap(),
                offset: 0,
                areas: vec![Area { offset: 0x1000, len: 0x1000 }],
            });
        let size = match index {
            region::BAR0 => board.bar0,
            region::CONFIG => 256,
            _ => 0,
        };
        Ok(RegionInfo { size, readable: true, writable: true, mapping })
    }

    fn irq_info(&mut self, index: u32) -> Result<IrqInfo, Errno> {
        let count = if index == irq::MSIX { self.fake.irq_vectors() } else { 0 };
        Ok(IrqInfo { count, eventfd: true, ..IrqInfo::default() })
    }

    fn disconnected(&mut self, done: Completer) {
        self.fake.with(|state| {
            state.reset();
            state.irqs.clear();
            state.dma.clear();
        });
        done.ok();
    }

    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        if region == region::CONFIG {
            let board = self.board.lock().unwrap();
            let start = offset as usize;
            data.copy_from_slice(board.config.get(start..start + data.len()).ok_or(Errno::INVAL)?);
            return Ok(());
        }
        match data.len() {
            4 => data.copy_from_slice(&self.fake.read32(offset).unwrap().to_le_bytes()),
            8 => data.copy_from_slice(&self.fake.read64(offset).unwrap().to_le_bytes()),
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }

    fn region_write(
        &mut self,
        region: u32,
        offset: u64,
        data: &[u8],
        _: &mut Deferral<'_>,
    ) -> Result<(), Errno> {
        if region == region::CONFIG {
            let mut board = self.board.lock().unwrap();
            let start = offset as usize;
            let into = board.config.get_mut(start..start + data.len()).ok_or(Errno::INVAL)?;
            into.copy_from_slice(data);
            return Ok(());
        }
        let done = match *data {
            [a, b, c, d] => {
                let value = u32::from_le_bytes([a, b, c, d]);
                if offset >= shadowbell_spec::regs::DOORBELLS {
                    self.fake.write_doorbell(offset, value)
                } else {
                    self.fake.write32(offset, value)
                }
            }
            [a, b, c, d, e, f, g, h] => {
                self.fake.write64(offset, u64::from_le_bytes([a, b, c, d, e, f, g, h]))
            }
            _ => return Err(Errno::INVAL),
        };
        done.map_err(|_| Errno::IO)
    }

    fn set_irqs(&mut self, request: SetIrqs) -> Result<(), Errno> {
        assert_eq!(request.index, irq::MSIX);
        let IrqData::Eventfds(fds) = request.data else { return Err(Errno::INVAL) };
        if fds.is_empty() {
            for vector in request.start..request.start + request.count {
                self.fake.set_irq(vector, None).unwrap();
            }
        }
        for (vector, fd) in (request.start..).zip(fds) {
            self.fake
                .set_irq(
                    vector,
                    Some(&EventFd::of_peer(Arc::new(fd), &Default::default()).unwrap()),
                )
                .unwrap();
        }
        Ok(())
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let fd = map.fd.ok_or(Errno::OPNOTSUPP)?;
        self.board.lock().unwrap().memory.push(fd.as_fd().try_clone_to_owned().unwrap());
        let protection = if map.writable { Protection::ReadWrite } else { Protection::Read };
        let mapping = Mapping::from_fd(&fd, map.fd_offset, map.len, protection).unwrap();
        self.fake.with(|state| state.dma.map(map.iova, map.len, &mapping.bytes())).unwrap();
        Ok(())
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap, done: Completer) {
        let DmaUnmap::Range { iova, len } = unmap else { panic!("not all at once") };
        self.fake.with(|state| state.dma.unmap(iova, len)).unwrap();
        done.ok();
    }

    fn reset(&mut self, done: Completer) {
        self.fake.reset().unwrap();
        let mut board = self.board.lock().unwrap();
        board.config[COMMAND as usize..][..2].fill(0);
        done.ok();
    }
}

struct Server {
    fake: Fake,
    board: Arc<Mutex<Board>>,
    directory: tempfile::TempDir,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(board: Board) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let fake = Fake::new();
        let board = Arc::new(Mutex::new(board));
        let mut reactor = Reactor::new(Limits::default()).unwrap();
        let listener = Listener::bind(directory.path().join("cntrl")).unwrap();
        let served = Served { fake: fake.clone(), board: Arc::clone(&board) };
        reactor.add(listener, Box::new(served)).unwrap();
        let handle = reactor.handle();
        let thread = std::thread::spawn(move || reactor.run().map(|_| ()).unwrap());
        Self { fake, board, directory, handle, thread: Some(thread) }
    }

    fn connect(&self) -> Result<VfioUser, TransportError> {
        // The path is that of the directory. The client connects to the socket `cntrl` in it.
        VfioUser::connect(self.directory.path(), LIMIT)
    }

    fn stop(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A configuration space with an MSI-X capability as its second capability.
fn board() -> Board {
    let mut config = vec![0; 256];
    config[6] = 1 << 4;
    config[0x34] = 0x40;
    config[0x40..0x44].copy_from_slice(&[0x01, 0x50, 0, 0]);
    config[0x50..0x54].copy_from_slice(&[0x11, 0x00, 0x0f, 0x40]);
    Board { config, resettable: true, bar0: 0x4000, max_dma_maps: 65535, ..Board::default() }
}

#[test]
fn exceeding_the_servers_dma_limit_is_no_disconnect() {
    let server = Server::start(Board { max_dma_maps: 4, ..board() });
    let transport = Arc::new(server.connect().unwrap());
    let mut controller = Controller::attach(transport, &options()).unwrap();
    let mut pools = Vec::new();
    let error = loop {
        match controller.buffers(1, 4096) {
            Ok(pool) => pools.push(pool),
            Err(error) => break error,
        }
    };
    let failed = DmaError::Transport(TransportError::Failed {
        device: controller.name().to_owned(),
        operation: "sharing memory",
        source: "the server allows 4 ranges of mapped memory, and all are in use".into(),
    });
    assert_eq!(error.to_string(), failed.to_string());
    pools.pop().expect("one was taken");
    controller.buffers(1, 4096).unwrap();
    let mut queue = controller.take_queue_pair().unwrap();
    queue.submit(controller.namespace(1).unwrap().flush(), None).unwrap();
    assert!(queue.wait(None).unwrap() && queue.pop().unwrap().status.is_success());
}

#[test]
fn data_doorbells_and_interrupts_work_over_the_socket() {
    let server = Server::start(board());
    let transport = Arc::new(server.connect().unwrap());
    assert!(transport.name().starts_with("vfio-user:/"));
    for doorbells in [Doorbells::Shadow, Doorbells::Mmio] {
        let options = AttachOptions { doorbells, spin: SpinPolicy::SLEEP, ..options() };
        let mut controller =
            Controller::attach(Arc::clone(&transport) as Arc<dyn Transport>, &options).unwrap();
        {
            let board = server.board.lock().unwrap();
            // SPDK's target raises INTx if MSI-X is not enabled and INTx is not disabled. If INTx
            // then has no handler, the target fails the controller.
            assert_eq!(board.config[4..6], [6, 4], "memory space, bus master, no interrupt pin");
            assert_eq!(board.config[0x53], 0x80, "MSI-X enabled, and not masked");
        }
        let mut queue = controller.take_queue_pair().unwrap();
        assert!(queue.has_interrupt());
        let namespace = controller.namespace(1).unwrap();
        let pool = controller.buffers(1, 65536).unwrap();
        let mut buffer = pool.take().unwrap();
        let data: Vec<u8> = (0..65536u32).map(|i| (i / 9) as u8).collect();
        assert!(buffer.copy_from(0, &data));
        for command in [namespace.write(5, 128).unwrap(), namespace.read(5, 128).unwrap()] {
            queue.submit(command, Some(buffer)).unwrap();
            assert!(queue.wait(None).unwrap());
            let completion = queue.pop().unwrap();
            assert!(completion.status.is_success());
            buffer = completion.buffer.unwrap();
            assert_eq!(buffer.to_vec(65536), data);
            buffer.fill(0);
        }
        drop((queue, buffer, pool));
        controller.detach().unwrap();
    }
    server.fake.with(|state| {
        assert_eq!(state.dma.table().len(), 0);
        assert!(state.irqs.is_empty());
    });
}

#[test]
fn mapped_doorbells_are_used() {
    let page = Mapping::shared("doorbells", 8192).unwrap();
    let server = Server::start(Board { doorbells: Some(Arc::clone(&page)), ..board() });
    let transport = server.connect().unwrap();
    let doorbells = transport.doorbell_page().unwrap();
    doorbells.write(8, &0x1234u32).unwrap();
    assert_eq!(page.bytes().read::<u32>(0x1008), Some(0x1234), "BAR0 offset 1008h");
    doorbells.write(8, &0u32).unwrap();
    let options = AttachOptions { doorbells: Doorbells::Mapped, ..options() };
    let mut controller = Controller::attach(Arc::new(transport), &options).unwrap();
    assert_eq!(controller.doorbells(), Doorbells::Mapped);
    let mut queue = controller.take_queue_pair().unwrap();
    queue.submit(controller.namespace(1).unwrap().flush(), None).unwrap();
    queue.ring().unwrap();
    assert_eq!(page.bytes().read::<u32>(0x1008), Some(1));
}

#[test]
fn a_reset_leaves_a_device_that_can_be_attached() {
    let server = Server::start(board());
    let transport = Arc::new(server.connect().unwrap());
    let reach = || Arc::clone(&transport) as Arc<dyn Transport>;
    let controller = Controller::attach(reach(), &impatient()).unwrap();
    server.fake.with(|state| state.stuck = true);
    assert!(controller.detach().is_err());
    server.fake.with(|state| state.stuck = false);
    assert_eq!(server.fake.state().resets, 1, "the hung controller needs a reset");
    assert_eq!(
        server.board.lock().unwrap().config[4..6],
        [6, 4],
        "memory space and bus master are enabled after the reset"
    );
    Controller::attach(reach(), &options()).unwrap().detach().unwrap();

    let server = Server::start(Board { resettable: false, ..board() });
    let error = server.connect().unwrap().reset().unwrap_err();
    assert!(matches!(error, TransportError::Unsupported { .. }), "{error}");
}

#[test]
fn a_looping_capability_list_ends() {
    for capabilities in [[0x01u8, 0x40], [0x01, 0xff], [0x11, 0x40]] {
        let mut board = board();
        board.config[0x40..0x42].copy_from_slice(&capabilities);
        let server = Server::start(board);
        let transport = server.connect().unwrap();
        transport.set_irq(0, Some(&EventFd::new().unwrap())).unwrap();
    }
}

#[test]
fn devices_other_than_controllers_are_refused() {
    let server = Server::start(Board { bar0: 0x1000, ..board() });
    let error = server.connect().unwrap_err();
    assert!(error.to_string().contains("too few"), "{error}");
    let nowhere = VfioUser::connect("/nonexistent", LIMIT).unwrap_err();
    assert!(nowhere.to_string().contains("/nonexistent"), "{nowhere}");
    let private = Mapping::anonymous(4096).unwrap();
    let server = Server::start(board());
    let error = server.connect().unwrap().map_dma(&private).unwrap_err();
    assert!(error.to_string().contains("Mapping::shared"), "{error}");
}

#[test]
fn a_lost_server_fails_the_queue() {
    let mut server = Server::start(board());
    let transport = Arc::new(server.connect().unwrap());
    let options = AttachOptions { doorbells: Doorbells::Mmio, ..options() };
    let mut controller = Controller::attach(transport, &options).unwrap();
    let mut queue = controller.take_queue_pair().unwrap();
    server.stop();
    queue.submit(controller.namespace(1).unwrap().flush(), None).unwrap();
    let error = wait::until_some("a doorbell that cannot be rung", || {
        let _ = queue.submit(controller.namespace(1).unwrap().flush(), None);
        queue.ring().err()
    });
    assert!(error.to_string().contains("lost the connection"), "{error}");
    assert!(controller.registers().is_err());
    drop(queue);
    let error = controller.detach().unwrap_err();
    assert!(error.to_string().contains("is kept"), "{error}");
}

/// Reserved huge pages, which only root can configure.
struct HugePages;

const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";

impl HugePages {
    fn new(pages: u32) -> Option<Self> {
        let none = std::fs::read_to_string(HUGE_PAGES).is_ok_and(|pages| pages.trim() == "0");
        if !none || std::fs::write(HUGE_PAGES, pages.to_string()).is_err() {
            skipped("it takes root, and a machine that has no huge pages set aside");
            return None;
        }
        Some(Self)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(HUGE_PAGES, "0");
    }
}

/// The server has the descriptor of the shared memory, and no seal prevents holes in it. After the
/// server has punched a hole, an access there may find no free huge page.
#[test]
fn punched_huge_pages_disconnect_the_server() {
    use rustix::fs::{FallocateFlags, fallocate, fstat};
    const LEN: usize = 4 << 20;
    let Some(pages) = HugePages::new(16) else { return };
    let server = Server::start(board());
    let options = AttachOptions { recovery: Recovery::default(), ..options() };
    let mut controller = Controller::attach(Arc::new(server.connect().unwrap()), &options).unwrap();
    let pool = controller.buffers(1, LEN).unwrap();
    let mut buffer = pool.take().unwrap();
    buffer.fill(1);
    let queue = controller.take_queue_pair().unwrap();
    let memory = std::mem::take(&mut server.board.lock().unwrap().memory);
    let huge = memory.iter().find(|fd| fstat(fd).unwrap().st_blksize == 2 << 20);
    let Some(huge) = huge else {
        skipped("the system had no memory left for huge pages");
        return;
    };
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(huge, hole, 0, LEN as u64).unwrap();
    // The drop returns the reserved huge pages to the system, so none is available for the hole.
    drop(pages);
    buffer.fill(2);
    assert_eq!(buffer.to_vec(LEN), vec![2; LEN]);
    let error = controller.registers().unwrap_err().to_string();
    assert!(error.contains("its server has removed pages from the memory"), "{error}");
    // The watchdog detects the lost pages even if no command is in flight.
    let mut queue = queue;
    let namespace = controller.namespace(1).unwrap().clone();
    let until = wait::deadline();
    let error = loop {
        let ran = queue.submit(namespace.flush(), None).map_err(|failed| failed.reason.to_string());
        let ran = ran.and_then(|_| queue.wait(Some(until)).map_err(|error| error.to_string()));
        match ran {
            Ok(_) => drop(queue.pop()),
            Err(error) => break error,
        }
        assert!(Instant::now() < until, "the loss of the server is not noticed");
    };
    assert!(error.contains("its server has removed pages from the memory"), "{error}");
}
