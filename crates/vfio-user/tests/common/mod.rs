//! Memory device that logs its requests, and a raw client that can send any bytes.
#![allow(dead_code)]

use shadowbell_testing::wait;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use shadowbell_state::{Bytes, Descriptors};
use shadowbell_vfio_user::codec::{Decoder, SendQueue};
use shadowbell_vfio_user::descriptor::{Closer, PeerFd};
use shadowbell_vfio_user::device::{
    Area, Completer, Deferral, Device, DmaMap, DmaUnmap, IoFds, IrqData, IrqInfo, Mapping, Peer,
    RegionInfo, SetIrqs, irq, region,
};
use shadowbell_vfio_user::pci::{Bar, ConfigSpace, Function, Msix};
use shadowbell_vfio_user::server::{
    Handle, Limits, PortId, PortRecorder, RestoredPort, RunEnd, SavedPort,
};
use shadowbell_vfio_user::wire::{self, Header, command, header_flags};
use shadowbell_vfio_user::{Errno, Listener, Reactor, RestoreError, SaveError, SharedSocket};
use zerocopy::IntoBytes;

/// Size of BAR0, which is plain memory.
pub(crate) const BAR0_SIZE: u64 = 0x1_0000;
/// Offset in BAR0 for slow writes: while [`TestDeviceState::hold`] is set, a write here is pending
/// until the test completes it.
pub(crate) const SLOW: u64 = 0x8000;
/// Offset in BAR0 at which a write calls [`TestDeviceState::hook`].
pub(crate) const HOOK: u64 = 0x9000;
/// Offset in BAR0 at which a write of a byte is recorded in [`TestDeviceState::doorbell_writes`].
pub(crate) const DOORBELL: u64 = 0xa000;
/// Mappable part of BAR2, which is a file.
pub(crate) const AREA: Area = Area { offset: 0x1000, len: 0x2000 };
/// Offset of BAR2 in its file.
pub(crate) const BAR2_FILE_OFFSET: u64 = 0x1000;
pub(crate) const BAR2_SIZE: u64 = 0x4000;
pub(crate) const VECTORS: u32 = 33;
/// Advertised maximum of DMA ranges.
pub(crate) const MAX_MAPS: u32 = 5;

/// State of a device that tests can examine and control.
#[derive(Default)]
pub(crate) struct TestDeviceState {
    /// Requests that the device has received, as text.
    pub(crate) log: Mutex<Vec<String>>,
    /// True if the device stores completion callbacks in `held` instead of completing them.
    pub(crate) hold: AtomicBool,
    pub(crate) held: Mutex<Vec<Completer>>,
    /// Closure that the next write at [`HOOK`] calls.
    pub(crate) hook: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Values written at [`DOORBELL`], each with true if the reactor has handled the write.
    pub(crate) doorbell_writes: Mutex<Vec<(u8, bool)>>,
    /// True if the device requests that a second thread polls the client's socket too.
    pub(crate) wants: AtomicBool,
    pub(crate) shared_sockets: Mutex<Vec<SharedSocket>>,
    pub(crate) eventfds: Mutex<Vec<PeerFd>>,
    pub(crate) maps: Mutex<Vec<PeerFd>>,
    /// Content of BAR0, which survives a replacement of the device, as a controller's registers do.
    bar0: Mutex<Vec<u8>>,
}

impl TestDeviceState {
    pub(crate) fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock().unwrap())
    }

    /// Waits until the device has stored a completion callback, and returns it.
    pub(crate) fn wait_held(&self) -> Completer {
        let mut done = None;
        eventually("a completion handle is held", || {
            done = self.held.lock().unwrap().pop();
            done.is_some()
        });
        done.unwrap()
    }

    /// Waits until the device has stored `count` completion callbacks, and returns them in order.
    pub(crate) fn wait_all_held(&self, count: usize) -> Vec<Completer> {
        eventually("completion handles are held", || self.held.lock().unwrap().len() == count);
        std::mem::take(&mut self.held.lock().unwrap())
    }

    pub(crate) fn wait_log(&self, line: &str) {
        eventually(line, || self.log.lock().unwrap().iter().any(|seen| seen == line));
    }

    fn note(&self, line: impl Into<String>) {
        self.log.lock().unwrap().push(line.into());
    }

    fn done(&self, done: Completer) {
        if self.hold.load(Ordering::SeqCst) {
            self.held.lock().unwrap().push(done);
        } else {
            done.ok();
        }
    }
}

/// Device with plain memory as BAR0.
pub(crate) struct TestDevice {
    shared: Arc<TestDeviceState>,
    bar2: OwnedFd,
    config: ConfigSpace,
}

impl TestDevice {
    pub(crate) fn new() -> (Box<Self>, Arc<TestDeviceState>) {
        let shared = Arc::new(TestDeviceState::default());
        (Self::of(&shared), shared)
    }

    /// Creates a device with the given test state. Several devices may share one test state.
    pub(crate) fn of(shared: &Arc<TestDeviceState>) -> Box<Self> {
        let shared = Arc::clone(shared);
        let bar2 = rustix::fs::memfd_create("device", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&bar2, BAR2_FILE_OFFSET + BAR2_SIZE).unwrap();
        let config = ConfigSpace::new(&Function {
            vendor: 0x1234,
            device: 0x5678,
            class: 0x010802,
            bars: vec![
                Bar { index: 0, size: BAR0_SIZE, prefetchable: false },
                Bar { index: 2, size: BAR2_SIZE, prefetchable: false },
                Bar { index: 4, size: 0x1000, prefetchable: false },
            ],
            msix: Some(Msix { vectors: VECTORS as u16, table: (4, 0), pba: (4, 0x800) }),
            ..Function::default()
        })
        .unwrap();
        shared.bar0.lock().unwrap().resize(BAR0_SIZE as usize, 0);
        Box::new(Self { shared, bar2, config })
    }

    /// Calls `access` with these bytes of BAR0.
    fn bar0(&self, offset: u64, len: usize, access: impl FnOnce(&mut [u8])) -> Result<(), Errno> {
        let start = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
        let mut bar0 = self.shared.bar0.lock().unwrap();
        access(bar0.get_mut(start..start + len).ok_or(Errno::INVAL)?);
        Ok(())
    }
}

impl Device for TestDevice {
    fn max_dma_maps(&self) -> u32 {
        MAX_MAPS
    }

    fn region_info(&mut self, index: u32) -> Result<RegionInfo, Errno> {
        let plain = |size| RegionInfo { size, readable: true, writable: true, mapping: None };
        Ok(match index {
            region::BAR0 => plain(BAR0_SIZE),
            2 => RegionInfo {
                mapping: Some(Mapping {
                    fd: self.bar2.try_clone().map_err(|_| Errno::MFILE)?,
                    offset: BAR2_FILE_OFFSET,
                    areas: vec![AREA],
                }),
                ..plain(BAR2_SIZE)
            },
            4 => plain(0x1000),
            region::CONFIG => plain(0x1000),
            _ => RegionInfo::default(),
        })
    }

    fn region_io_fds(&mut self, index: u32) -> Result<IoFds, Errno> {
        match index {
            // Areas of 4 bytes at multiples of 8 use the first two eventfds alternately. One more
            // area uses the last eventfd. Its index exceeds the number of descriptors that any
            // client accepts.
            0 => Ok(IoFds {
                events: eventfds(100),
                areas: (0..300)
                    .map(|n| (Area { offset: n * 8, len: 4 }, n as usize % 2))
                    .chain([(Area { offset: 9999, len: 4 }, 99)])
                    .collect(),
            }),
            2 => Ok(IoFds::default()),
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    fn irq_info(&mut self, index: u32) -> Result<IrqInfo, Errno> {
        Ok(match index {
            irq::MSIX => {
                IrqInfo { count: VECTORS, eventfd: true, noresize: true, ..IrqInfo::default() }
            }
            _ => IrqInfo::default(),
        })
    }

    fn connected(&mut self, peer: &Peer) {
        self.shared.note(format!("connected, {} fds", peer.max_msg_fds));
    }

    fn disconnected(&mut self, done: Completer) {
        self.shared.note("disconnected");
        self.shared.maps.lock().unwrap().clear();
        self.shared.eventfds.lock().unwrap().clear();
        self.shared.done(done);
    }

    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        match region {
            region::BAR0 => self.bar0(offset, data.len(), |bar0| data.copy_from_slice(bar0))?,
            region::CONFIG => self.config.read(offset, data)?,
            _ => return Err(Errno::NXIO),
        }
        Ok(())
    }

    fn region_write(
        &mut self,
        region: u32,
        offset: u64,
        data: &[u8],
        deferral: &mut Deferral<'_>,
    ) -> Result<(), Errno> {
        match region {
            region::BAR0 => self.bar0(offset, data.len(), |bar0| bar0.copy_from_slice(data))?,
            region::CONFIG => drop(self.config.write(offset, data)?),
            _ => return Err(Errno::NXIO),
        }
        if (region, offset) == (region::BAR0, DOORBELL) {
            self.shared.doorbell_writes.lock().unwrap().push((data[0], true));
        }
        if offset == HOOK {
            let hook = self.shared.hook.lock().unwrap().take();
            hook.unwrap()();
        }
        if offset == SLOW {
            self.shared.note("slow write");
            let done = deferral.completer().unwrap();
            assert!(deferral.completer().is_none());
            self.shared.done(done);
        }
        Ok(())
    }

    fn requests_shared_socket(&mut self) -> bool {
        self.shared.wants.swap(false, Ordering::SeqCst)
    }

    fn share_socket(&mut self, socket: SharedSocket) {
        self.shared.shared_sockets.lock().unwrap().push(socket);
    }

    fn set_irqs(&mut self, set: SetIrqs) -> Result<(), Errno> {
        if set.index != irq::MSIX || set.start + set.count > VECTORS {
            return Err(Errno::INVAL);
        }
        let data = match set.data {
            IrqData::None => "nothing".to_owned(),
            IrqData::Bools(bools) => format!("{bools:?}"),
            IrqData::Eventfds(fds) => {
                let text = format!("{} eventfds", fds.len());
                self.shared.eventfds.lock().unwrap().extend(fds);
                text
            }
        };
        self.shared.note(format!("{:?} {}+{} with {data}", set.action, set.start, set.count));
        Ok(())
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let DmaMap { iova, len, readable, writable, fd, fd_offset } = map;
        let access =
            format!("{}{}", if readable { "r" } else { "" }, if writable { "w" } else { "" });
        self.shared.note(format!("map {iova:#x}+{len:#x} {access} at {fd_offset:#x}"));
        self.shared.maps.lock().unwrap().push(fd.ok_or(Errno::OPNOTSUPP)?);
        Ok(())
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap, done: Completer) {
        self.shared.note(match unmap {
            DmaUnmap::All => "unmap all".to_owned(),
            DmaUnmap::Range { iova, len } => format!("unmap {iova:#x}+{len:#x}"),
        });
        self.shared.done(done);
    }

    fn reset(&mut self, done: Completer) {
        self.shared.note("reset");
        self.config.reset();
        self.shared.done(done);
    }

    fn record(&mut self, _fds: &mut Descriptors) -> Result<serde_json::Value, SaveError> {
        Ok(serde_json::to_value(Bytes(self.config.bytes().to_vec()))?)
    }

    fn restore(
        &mut self,
        saved: serde_json::Value,
        _fds: &mut Descriptors,
        _closer: &Arc<Closer>,
    ) -> Result<(), RestoreError> {
        let config: Bytes = serde_json::from_value(saved)?;
        self.config.restore(config.0.as_slice().try_into().unwrap());
        Ok(())
    }
}

/// True if every server of the tests stores checkpoints. Clients must not notice a difference.
pub(crate) fn is_recorded() -> bool {
    std::env::var_os("SHADOWBELL_TEST_RECORDED").is_some()
}

/// Checkpoint of a port.
type Checkpoint = (SavedPort, Vec<OwnedFd>);

/// Recorder that stores the last checkpoint of a port.
#[derive(Clone, Default)]
pub(crate) struct Last(Arc<Mutex<Option<Checkpoint>>>);

impl PortRecorder for Last {
    fn record(&mut self, port: &SavedPort, fds: Descriptors) {
        *self.0.lock().unwrap() = Some((port.clone(), fds.into_fds()));
    }
}

impl Last {
    /// Text of the checkpoint.
    pub(crate) fn text(&self) -> String {
        serde_json::to_string(&self.0.lock().unwrap().as_ref().unwrap().0).unwrap()
    }

    /// Copy of the checkpoint, as the next process receives it.
    pub(crate) fn copy(&self) -> (SavedPort, Descriptors) {
        let saved = serde_json::from_str(&self.text()).unwrap();
        let last = self.0.lock().unwrap();
        let fds = last.as_ref().unwrap().1.iter().map(|fd| fd.try_clone().unwrap());
        (saved, fds.collect::<Vec<_>>().into())
    }
}

/// Reactor on its own thread. It is stopped when the value is dropped.
pub(crate) struct Server {
    pub(crate) handle: Handle,
    pub(crate) directory: tempfile::TempDir,
    /// Thread id of the reactor.
    pub(crate) tid: u32,
    thread: Option<JoinHandle<(Reactor, RunEnd)>>,
    pub(crate) limits: Limits,
    is_recorded: bool,
    /// Checkpoints of the devices, in the order in which they were added.
    pub(crate) checkpoints: Mutex<Vec<Last>>,
}

impl Server {
    pub(crate) fn start(limits: Limits) -> Self {
        // The reactor's stop must not wait long for callbacks that are still stored at the end of a
        // test.
        let stop = limits.stop.min(Duration::from_millis(200));
        let limits = Limits { stop, ..limits };
        let reactor = Reactor::new(limits).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut server = Self {
            handle: reactor.handle(),
            directory,
            tid: 0,
            thread: None,
            limits,
            is_recorded: is_recorded(),
            checkpoints: Mutex::default(),
        };
        server.run(reactor);
        server
    }

    /// Runs a reactor on a new thread.
    pub(crate) fn run(&mut self, mut reactor: Reactor) {
        self.handle = reactor.handle();
        let thread = std::thread::Builder::new().name("reactor".into());
        let (started, tid) = std::sync::mpsc::channel();
        let thread = thread.spawn(move || {
            started.send(gettid()).unwrap();
            let ended = reactor.run().unwrap();
            (reactor, ended)
        });
        self.tid = tid.recv().unwrap();
        self.thread = Some(thread.unwrap());
    }

    /// True if the reactor has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.as_ref().unwrap().is_finished()
    }

    /// Waits until the reactor is quiesced, and returns it.
    pub(crate) fn frozen(&mut self) -> Reactor {
        let (reactor, ended) = self.thread.take().unwrap().join().unwrap();
        assert_eq!(ended, RunEnd::Frozen);
        reactor
    }

    pub(crate) fn freeze(&mut self) -> Reactor {
        self.handle.freeze();
        self.frozen()
    }

    /// Creates the next reactor from the last checkpoints.
    pub(crate) fn successor(&self, devices: &[&Arc<TestDeviceState>]) -> Reactor {
        let checkpoints = self.checkpoints.lock().unwrap();
        assert_eq!(checkpoints.len(), devices.len());
        let mut new = Reactor::new(self.limits).unwrap();
        for (last, shared) in checkpoints.iter().zip(devices) {
            let (saved, mut fds) = last.copy();
            let device = TestDevice::of(shared);
            let restored = RestoredPort::new(saved, &mut fds, device, &self.limits).unwrap();
            assert_eq!(fds.iter().count(), 0, "descriptors that the port has not taken");
            let port = new.serve_restored(restored).unwrap();
            new.record_with(port, Box::new(last.clone()));
        }
        new
    }

    /// Replaces the reactor while clients are connected.
    pub(crate) fn replace(&mut self, devices: &[&Arc<TestDeviceState>]) {
        let old = self.freeze();
        let new = self.successor(devices);
        old.release_to_successor();
        self.run(new);
    }

    /// Starts a server with one memory device.
    pub(crate) fn with_device(limits: Limits) -> (Self, PathBuf, Arc<TestDeviceState>) {
        let server = Self::start(limits);
        let (path, shared, _) = server.add("device");
        (server, path, shared)
    }

    /// Starts a server with one memory device, which stores checkpoints and can be replaced.
    pub(crate) fn with_recorded_device(limits: Limits) -> (Self, PathBuf, Arc<TestDeviceState>) {
        let mut server = Self::start(limits);
        server.is_recorded = true;
        let (path, shared, _) = server.add("device");
        (server, path, shared)
    }

    pub(crate) fn add(&self, name: &str) -> (PathBuf, Arc<TestDeviceState>, PortId) {
        let path = self.directory.path().join(name);
        let (device, shared) = TestDevice::new();
        let listener = Listener::bind(&path).unwrap();
        let port = match self.is_recorded {
            true => {
                let last = Last::default();
                self.checkpoints.lock().unwrap().push(last.clone());
                self.handle.add_recorded(listener, device, Box::new(last))
            }
            false => self.handle.add(listener, device),
        };
        (path, shared, port)
    }

    pub(crate) fn stop(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Reply to a request, received completely.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
}

impl Reply {
    pub(crate) fn ok(self) -> Vec<u8> {
        assert_eq!(self.header.flags, header_flags::REPLY, "{:?}", self.header);
        self.payload
    }

    /// `Ok` for a success reply, or the errno of an error reply.
    pub(crate) fn errno_or_ok(self) -> Result<(), Errno> {
        match self.header.flags & header_flags::ERROR {
            0 => Ok(()),
            _ => Err(self.errno()),
        }
    }

    /// Errno of an error reply. Checks that the reply consists only of a header.
    pub(crate) fn errno(&self) -> Errno {
        assert_eq!(self.header.flags, header_flags::REPLY | header_flags::ERROR);
        assert!(self.payload.is_empty());
        Errno::from_raw_os_error(self.header.error as i32)
    }
}

/// Client that can send any bytes.
pub(crate) struct Raw {
    pub(crate) stream: UnixStream,
    decoder: Decoder,
    next_id: u16,
}

impl Raw {
    pub(crate) fn connect(path: &Path) -> Self {
        Self::new(UnixStream::connect(path).unwrap())
    }

    pub(crate) fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(wait::LIMIT)).unwrap();
        Self { stream, decoder: Decoder::new(2 << 20), next_id: 100 }
    }

    /// Connects to the server and negotiates the version.
    pub(crate) fn attach(path: &Path) -> Self {
        let mut raw = Self::connect(path);
        raw.negotiate();
        raw
    }

    pub(crate) fn negotiate(&mut self) {
        let version = wire::Version { major: 0, minor: 1 };
        let data = b"{\"capabilities\":{\"max_msg_fds\":8,\"write_multiple\":true}}\0";
        let reply = self.request(command::VERSION, &[version.as_bytes(), data]);
        assert_eq!(reply.ok()[..4], [0, 0, 1, 0]);
    }

    pub(crate) fn message(&mut self, command: u16, flags: u32, payload: &[&[u8]]) -> Vec<u8> {
        self.next_id += 1;
        let header = Header { id: self.next_id, command, size: 0, flags, error: 0 };
        let mut out = SendQueue::default();
        out.put(header, payload);
        out.front().0.to_vec()
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn send_with_fds(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        let buffers = [std::io::IoSlice::new(bytes)];
        let sent = sendmsg(&self.stream, &buffers, &mut control, SendFlags::empty()).unwrap();
        assert_eq!(sent, bytes.len());
    }

    pub(crate) fn request(&mut self, command: u16, payload: &[&[u8]]) -> Reply {
        let bytes = self.message(command, 0, payload);
        self.send(&bytes);
        let reply = self.reply();
        assert_eq!((reply.header.id, reply.header.command), (self.next_id, command));
        reply
    }

    pub(crate) fn request_with_fds(
        &mut self,
        command: u16,
        payload: &[&[u8]],
        fds: &[OwnedFd],
    ) -> Reply {
        let bytes = self.message(command, 0, payload);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.send_with_fds(&bytes, &fds);
        self.reply()
    }

    pub(crate) fn try_reply(&mut self) -> Option<Reply> {
        loop {
            if let Some(message) = self.decoder.decode().unwrap() {
                let payload = message.payload.to_vec();
                return Some(Reply { header: message.header, payload });
            }
            match self.stream.read(self.decoder.space()) {
                Ok(0) => return None,
                Ok(len) => self.decoder.advance(len, Vec::new()),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub(crate) fn reply(&mut self) -> Reply {
        self.try_reply().expect("the server closed the connection")
    }

    /// Checks that the server has closed the connection without a further reply.
    pub(crate) fn assert_closed(&mut self) {
        if let Some(reply) = self.try_reply() {
            panic!("{reply:?}");
        }
    }

    /// Checks that no data arrive for a short time.
    pub(crate) fn assert_silent(&mut self) {
        // Only data that arrive within this time are detected.
        self.stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let error = self.stream.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        self.stream.set_read_timeout(Some(wait::LIMIT)).unwrap();
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Reply {
        let access = access(0, offset, data.len());
        self.request(command::REGION_WRITE, &[access.as_bytes(), data])
    }

    pub(crate) fn read(&mut self, offset: u64, len: usize) -> Reply {
        let access = access(0, offset, len);
        self.request(command::REGION_READ, &[access.as_bytes()])
    }
}

pub(crate) fn access(region: u32, offset: u64, len: usize) -> wire::RegionAccess {
    wire::RegionAccess { offset, region, count: len as u32 }
}

/// Waits until a condition is true.
#[track_caller]
pub(crate) fn eventually(what: &str, so: impl FnMut() -> bool) {
    wait::until(what, so);
}

/// Thread id of the calling thread.
pub(crate) fn gettid() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// True if a thread of this process sleeps.
pub(crate) fn sleeps(tid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat"));
    stat.is_ok_and(|stat| stat.rsplit(')').next().unwrap().starts_with(" S"))
}

pub(crate) fn eventfds(count: usize) -> Vec<OwnedFd> {
    use rustix::event::{EventfdFlags, eventfd};
    (0..count)
        .map(|_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
        .collect()
}

pub(crate) fn memfd(len: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    fd
}

/// Duration of each limit of [`short_limits`]. It is short enough to wait for, and long enough for
/// a busy machine.
pub(crate) const SHORT_LIMIT: Duration = Duration::from_secs(2);

/// Limits for tests that wait until a limit is exceeded.
pub(crate) fn short_limits() -> Limits {
    Limits {
        negotiation: SHORT_LIMIT,
        message: SHORT_LIMIT,
        unread_replies: SHORT_LIMIT,
        ..Limits::default()
    }
}
