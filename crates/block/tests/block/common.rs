//! Both ends in one process: a block device on the emulated controller, over a disk of the test's.
//! The tests of the crate `export` use it, too.

use shadowbell_backend::{Disk, DiskError, DiskInfo, MemDisk, Op, Queue, Request, Submitted};
use shadowbell_controller::{
    Carrier, Config, Controller as Emulated, NamespaceConfig, Pool, PoolOptions,
};
use shadowbell_driver::{AttachOptions, Controller, Transport, TransportError};
use shadowbell_memory::{EventFd, Mapping, Segments, SharedBytes};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// The controller, without anything in between.
struct Direct(Emulated);

fn wait(doing: &'static str, done: &mpsc::Receiver<()>) -> Result<(), TransportError> {
    let failed = |why: mpsc::RecvTimeoutError| TransportError::Failed {
        device: "direct".into(),
        doing,
        source: why.into(),
    };
    done.recv_timeout(Duration::from_secs(10)).map_err(failed)
}

impl Transport for Direct {
    fn name(&self) -> &str {
        "direct"
    }

    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        let mut data = [0; 4];
        self.0.read(offset, &mut data);
        Ok(u32::from_le_bytes(data))
    }

    fn read64(&self, offset: u64) -> Result<u64, TransportError> {
        let mut data = [0; 8];
        self.0.read(offset, &mut data);
        Ok(u64::from_le_bytes(data))
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.0.write(offset, &value.to_le_bytes());
        Ok(())
    }

    fn write64(&self, offset: u64, value: u64) -> Result<(), TransportError> {
        self.0.write(offset, &value.to_le_bytes());
        Ok(())
    }

    fn write_doorbell(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.0.write_doorbell(offset, value);
        Ok(())
    }

    fn doorbell_page(&self) -> Option<SharedBytes> {
        None
    }

    fn map_dma(&self, mapping: &Arc<Mapping>) -> Result<u64, TransportError> {
        let iova = mapping.address() as u64;
        self.0.map_dma(iova, mapping.len() as u64, &mapping.bytes()).unwrap();
        Ok(iova)
    }

    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        let (done, waiting) = mpsc::channel();
        self.0.unmap_dma(iova, len, move || done.send(()).unwrap_or_default()).unwrap();
        wait("unmapping", &waiting)
    }

    fn irq_vectors(&self) -> u32 {
        self.0.vectors() as u32
    }

    fn set_irq(&self, vector: u32, event: Option<&EventFd>) -> Result<(), TransportError> {
        let event = event.map(|event| event.try_clone().unwrap());
        assert!(self.0.set_interrupt(vector as usize, event));
        Ok(())
    }

    fn reset(&self) -> Result<(), TransportError> {
        let (done, waiting) = mpsc::channel();
        self.0.reset(move || done.send(()).unwrap_or_default());
        wait("resetting", &waiting)
    }
}

/// A driver on a controller of its own over `disk`.
pub(crate) fn attach(disk: Arc<dyn Disk>, options: &AttachOptions) -> Controller {
    attach_to(disk, options).0
}

/// The same, and the controller itself.
pub(crate) fn attach_to(disk: Arc<dyn Disk>, options: &AttachOptions) -> (Controller, Emulated) {
    let pool = Pool::start(&PoolOptions { workers: 1, ..PoolOptions::default() }).unwrap();
    let uuid = shadowbell_controller::config::uuid_from("a test");
    let namespaces = vec![NamespaceConfig { disk, uuid }];
    let config = Config { namespaces, io_queues: 4, ..Config::default() };
    let emulated = Emulated::new(config, pool, Carrier::default()).unwrap();
    let controller = Controller::attach(Arc::new(Direct(emulated.clone())), options).unwrap();
    (controller, emulated)
}

/// What a [`TestDisk`] has been told to do, and what it saw.
#[derive(Debug, Default)]
pub(crate) struct Orders {
    /// Requests wait, for as long as this is so.
    pub(crate) hold: bool,
    /// Requests at this byte wait, for as long as this is so.
    pub(crate) hold_at: Option<u64>,
    /// Requests that are neither reads nor flushes fail, or all of them.
    pub(crate) fail: Option<DiskError>,
    /// Only so many of them.
    pub(crate) failures: Option<u32>,
    /// Every request that came, in order.
    pub(crate) seen: Vec<Request>,
    bells: Vec<EventFd>,
}

/// Memory that does what a test orders.
#[derive(Clone, Debug)]
pub(crate) struct TestDisk {
    pub(crate) mem: MemDisk,
    /// It says that it has a volatile write cache.
    pub(crate) cache: bool,
    pub(crate) orders: Arc<Mutex<Orders>>,
}

impl TestDisk {
    pub(crate) fn new(blocks: u64, block_size: u32) -> Self {
        let mem = MemDisk::new(blocks, block_size).unwrap();
        Self { mem, cache: false, orders: Arc::default() }
    }

    pub(crate) fn order(&self, order: impl FnOnce(&mut Orders)) {
        let mut orders = self.orders.lock().unwrap();
        order(&mut orders);
        for bell in &orders.bells {
            bell.signal();
        }
    }

    pub(crate) fn seen(&self) -> Vec<Request> {
        self.orders.lock().unwrap().seen.clone()
    }

    /// Waits until this many requests have come.
    #[track_caller]
    pub(crate) fn expect(&self, count: usize) {
        let began = std::time::Instant::now();
        while self.seen().len() < count {
            assert!(began.elapsed() < Duration::from_secs(10), "{:?}", self.seen());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Disk for TestDisk {
    fn info(&self) -> DiskInfo {
        let mut info = self.mem.info();
        info.volatile_cache = self.cache;
        info
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        let bell = EventFd::new()?;
        self.orders.lock().unwrap().bells.push(bell.try_clone()?);
        Ok(Box::new(TestQueue {
            disk: self.clone(),
            inner: self.mem.queue()?,
            bell,
            held: Vec::new(),
        }))
    }

    fn name(&self) -> String {
        "test".into()
    }
}

struct TestQueue {
    disk: TestDisk,
    inner: Box<dyn Queue>,
    bell: EventFd,
    held: Vec<(u32, Request, Segments)>,
}

impl TestQueue {
    fn run(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Result<(), DiskError> {
        if !matches!(request.op, Op::Read | Op::Flush) {
            let mut orders = self.disk.orders.lock().unwrap();
            let left = orders.failures;
            if let Some(error) = orders.fail.filter(|_| left != Some(0)) {
                orders.failures = left.map(|left| left - 1);
                return Err(error);
            }
        }
        match self.inner.submit(tag, request, data) {
            Submitted::Done(outcome) => outcome,
            Submitted::Pending => panic!("memory does not wait"),
        }
    }
}

impl Queue for TestQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        let hold = {
            let mut orders = self.disk.orders.lock().unwrap();
            orders.seen.push(*request);
            orders.hold || orders.hold_at == Some(request.offset)
        };
        if hold {
            self.held.push((tag, *request, data.take()));
            return Submitted::Pending;
        }
        Submitted::Done(self.run(tag, request, data))
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        self.bell.drain();
        let (hold, hold_at) = {
            let orders = self.disk.orders.lock().unwrap();
            (orders.hold, orders.hold_at)
        };
        if hold {
            return;
        }
        let release = |(_, request, _): &mut (_, Request, _)| hold_at != Some(request.offset);
        let released: Vec<_> = self.held.extract_if(.., release).collect();
        for (tag, request, mut data) in released {
            let outcome = self.run(tag, &request, &mut data);
            done(tag, outcome, data);
        }
    }

    fn pending(&self) -> usize {
        self.held.len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.bell.as_fd())
    }
}
