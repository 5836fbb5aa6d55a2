//! A client socket with two readers: the server's reactor, and a second thread that takes the
//! client's doorbell writes.
//!
//! One thread runs both readers, in an order that the input chooses. Between messages of other
//! kinds, with descriptors, complete or in parts, the client sends numbered writes. This body
//! checks that
//! * each write is executed exactly once and in order, by whichever reader takes it;
//! * each message that requests a reply gets exactly one;
//! * no descriptor of a disconnected client remains open.

use crate::limits::Limits;
use crate::session::frames::Frames;
use crate::session::messages;
use crate::source::Source;
use crate::vmm::{connect, describe_descriptors, descriptors, limits, listen};
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown};
use shadowbell_testing::wait;
use shadowbell_vfio_user::device::{
    Completer, Deferral, Device, DmaMap, DmaUnmap, IrqInfo, RegionInfo, SetIrqs,
};
use shadowbell_vfio_user::wire::command as verb;
use shadowbell_vfio_user::{Listener, Reactor, SharedSocket};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Number of actions of one program.
const ACTIONS: usize = 96;
/// Maximum number of turns of the reactor for which the client waits for an operation.
const MAX_TURNS: usize = 400;
/// Offset at which the client sends the numbered writes.
const DOORBELL: u64 = 0x1000;

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    let before = descriptors();
    let limits = Limits::begin();
    let mut source = Source::new(input);
    let mut connection = Connection::new(&mut source);
    for _ in 0..ACTIONS {
        if source.is_empty() {
            break;
        }
        connection.act(&mut source);
        limits.step("shared");
    }
    connection.finish();
    drop(connection);
    // Some descriptors are closed by a separate thread, the closer thread, so they may remain open
    // for a short time.
    let until = wait::deadline();
    while descriptors() > before {
        let now = descriptors();
        let list = || describe_descriptors();
        assert!(Instant::now() < until, "{before} descriptors, and now {now}: {}", list());
        std::thread::yield_now();
    }
}

/// State of the device.
#[derive(Default)]
struct Seen {
    /// Number that the next executed write must have.
    next: u32,
    socket: Option<SharedSocket>,
    wants: bool,
}

impl Seen {
    fn write(&mut self, data: &[u8]) {
        let number = data.try_into().map(u32::from_le_bytes).expect("four bytes");
        // The first write of a new client has a higher number than all writes of the previous
        // client, some of which may be lost.
        if number >> 16 > self.next >> 16 {
            self.next = number >> 16 << 16;
        }
        assert_eq!(number, self.next, "a write is lost, or comes twice, or too early");
        self.next += 1;
    }
}

struct Port(Arc<Mutex<Seen>>);

impl Device for Port {
    fn region_info(&mut self, _: u32) -> Result<RegionInfo, Errno> {
        Ok(RegionInfo { size: 0x4000, readable: true, writable: true, mapping: None })
    }

    fn irq_info(&mut self, _: u32) -> Result<IrqInfo, Errno> {
        Ok(IrqInfo { count: 4, eventfd: true, ..IrqInfo::default() })
    }

    fn disconnected(&mut self, done: Completer) {
        let socket = self.0.lock().socket.take();
        drop(socket);
        done.ok();
    }

    fn region_read(&mut self, _: u32, _: u64, data: &mut [u8]) -> Result<(), Errno> {
        data.fill(0);
        Ok(())
    }

    fn region_write(
        &mut self,
        _: u32,
        offset: u64,
        data: &[u8],
        _: &mut Deferral<'_>,
    ) -> Result<(), Errno> {
        if offset == DOORBELL {
            self.0.lock().write(data);
        }
        Ok(())
    }

    fn requests_shared_socket(&mut self) -> bool {
        let seen = self.0.lock();
        seen.wants && seen.socket.is_none()
    }

    fn share_socket(&mut self, socket: SharedSocket) {
        let before = self.0.lock().socket.replace(socket);
        drop(before);
    }

    fn set_irqs(&mut self, _: SetIrqs) -> Result<(), Errno> {
        Ok(())
    }

    fn dma_map(&mut self, _: DmaMap) -> Result<(), Errno> {
        Ok(())
    }

    fn dma_unmap(&mut self, _: DmaUnmap, done: Completer) {
        done.ok();
    }

    fn reset(&mut self, done: Completer) {
        done.ok();
    }
}

struct Connection {
    reactor: Reactor,
    seen: Arc<Mutex<Seen>>,
    listener: OwnedFd,
    epoll: Arc<OwnedFd>,
    socket: Option<OwnedFd>,
    frames: Frames,
    file: OwnedFd,
    /// Number that the next write will contain.
    next: u32,
    /// True if the server may end the connection before it has read all sent bytes, so that writes
    /// may be lost.
    unsure: bool,
}

impl Connection {
    fn new(source: &mut Source<'_>) -> Self {
        let mut reactor = Reactor::new(limits(source));
        let listener = listen();
        let theirs = Listener::from_fd(listener.try_clone().expect("a descriptor"), "fuzz");
        let seen = Arc::new(Mutex::new(Seen { wants: true, ..Seen::default() }));
        let reactor_ref = reactor.as_mut().expect("a reactor");
        let port = Box::new(Port(Arc::clone(&seen)));
        reactor_ref.add(theirs.expect("a listener"), port).expect("a port");
        let flags = rustix::event::epoll::CreateFlags::CLOEXEC;
        let epoll = Arc::new(rustix::event::epoll::create(flags).expect("an epoll instance"));
        let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, 1 << 17).expect("memory");
        let mut connection = Self {
            reactor: reactor.expect("a reactor"),
            seen,
            listener,
            epoll,
            socket: None,
            frames: Frames::default(),
            file,
            next: 0,
            unsure: false,
        };
        connection.connect();
        connection
    }

    fn connect(&mut self) {
        let listener = self.listener.try_clone().expect("a descriptor");
        self.socket = Some(connect(&listener, || self.serve()));
        self.frames = Frames::default();
        self.unsure = false;
        // The upper half of a number is the client's number, the lower half counts its writes.
        self.next = ((self.next >> 16) + 1) << 16;
        let hello = [&[0, 0, 1, 0][..], br#"{"capabilities":{"max_msg_fds":16}}"#, &[0]];
        self.send(&messages::message(verb::VERSION, 0, &hello), &[]);
        self.pump();
    }

    fn disconnect(&mut self) {
        self.socket = None;
        for _ in 0..8 {
            self.serve();
        }
    }

    fn serve(&mut self) {
        let alive = self.reactor.poll_once(Some(Duration::ZERO)).expect("the reactor runs");
        assert!(alive, "the reactor was not stopped");
    }

    /// Runs the reader of the second thread once. It executes doorbell writes until it has executed
    /// `most` of them or finds another message.
    fn poll(&mut self, most: u32) {
        let mut seen = self.seen.lock();
        let Some(socket) = seen.socket.take() else { return };
        drop(seen);
        let (mut taken, held) = (0, Arc::clone(&self.seen));
        let polled = socket.poll_writes(&mut |region, offset, data| {
            let takes = region == 0 && offset == DOORBELL && data.len() == 4 && taken < most;
            if takes {
                held.lock().write(data);
                taken += 1;
            }
            takes
        });
        assert!(polled.writes == taken, "{polled:?}, and {taken} were taken");
        seen = self.seen.lock();
        seen.socket.get_or_insert(socket);
    }

    fn pump(&mut self) {
        let mut idle = 0;
        for _ in 0..MAX_TURNS {
            self.serve();
            idle = if self.receive() { 0 } else { idle + 1 };
            if idle == 3 {
                return;
            }
        }
        panic!("there is always something to do");
    }

    fn receive(&mut self) -> bool {
        let Some(socket) = &self.socket else { return false };
        let mut bytes = [0u8; 4096];
        match rustix::io::read(socket, &mut bytes) {
            Ok(0) | Err(Errno::CONNRESET) => {
                self.frames.dropped();
                self.socket = None;
                true
            }
            Ok(len) => {
                self.frames.record_received(&bytes[..len]);
                true
            }
            Err(Errno::AGAIN) => false,
            Err(errno) => panic!("{errno}"),
        }
    }

    fn send(&mut self, mut bytes: &[u8], mut fds: &[OwnedFd]) {
        for _ in 0..MAX_TURNS {
            let Some(socket) = &self.socket else { return };
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(messages::MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            if !borrowed.is_empty() {
                assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(len) => {
                    self.frames.sent(&bytes[..len], fds.len());
                    (bytes, fds) = (&bytes[len..], &[]);
                    if bytes.is_empty() {
                        return;
                    }
                }
                Err(Errno::AGAIN) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    self.receive();
                    self.socket = None;
                    return;
                }
                Err(errno) => panic!("{errno}"),
            }
            self.serve();
            self.receive();
        }
        panic!("the server takes no more bytes");
    }

    /// Message of the next numbered write, with or without a request for a reply.
    fn ring(&mut self, source: &mut Source<'_>) -> Vec<u8> {
        let access = messages::access(0, DOORBELL, 4);
        let flags = if source.bool() { 0x10 } else { 0 };
        let number = self.next.to_le_bytes();
        self.next += 1;
        messages::message_with(verb::REGION_WRITE, 1, flags, &[&access, &number])
    }

    fn act(&mut self, source: &mut Source<'_>) {
        match source.below(16) {
            0..=4 => {
                let bytes = self.ring(source);
                if source.rarely(8) {
                    // Sends a write in two parts. Either reader may run in between.
                    let at = source.below(bytes.len());
                    self.send(&bytes[..at], &[]);
                    self.poll(u32::MAX);
                    self.send(&bytes[at..], &[]);
                } else {
                    self.send(&bytes, &[]);
                }
            }
            5 => {
                // Sends more writes at once than one read call receives.
                let bytes: Vec<u8> = (0..24).flat_map(|_| self.ring(source)).collect();
                self.send(&bytes, &[]);
            }
            6..=8 => {
                let (bytes, fds, odd) = messages::any(source, &self.file);
                if odd {
                    self.frames.forfeit();
                }
                self.unsure |= odd || fds.len() > 16;
                // Random messages must not write at the doorbell offset, because the device would
                // mistake them for the test's numbered writes.
                let writes = [verb::REGION_WRITE, verb::REGION_WRITE_MULTI].map(u16::to_le_bytes);
                if !writes.iter().any(|verb| bytes.get(2..4) == Some(verb)) {
                    self.send(&bytes, &fds);
                }
            }
            9..=11 => self.poll(source.of(&[u32::MAX, 0, 1, 5])),
            12 => {
                let seen = self.seen.lock();
                if let Some(socket) = &seen.socket {
                    // The socket may be registered already. Then the kernel refuses the second
                    // registration, which is no error here.
                    let _ = socket.watch(&self.epoll, 7);
                }
            }
            13 => {
                let socket = self.seen.lock().socket.take();
                drop(socket);
                self.seen.lock().wants = source.bool();
            }
            14 => {
                if source.rarely(3) {
                    if let Some(socket) = &self.socket {
                        let how = source.of(&[Shutdown::Read, Shutdown::Write, Shutdown::Both]);
                        let _ = rustix::net::shutdown(socket, how);
                        self.frames.forfeit();
                        self.unsure = true;
                    }
                } else {
                    self.disconnect();
                    self.connect();
                }
            }
            _ => self.serve(),
        }
        if source.rarely(3) {
            self.pump();
        }
        if self.socket.is_none() {
            self.disconnect();
            self.connect();
        }
    }

    /// True if the device has executed every write of the client, or if writes may have been lost
    /// with the connection.
    fn has_seen_all(&self) -> bool {
        let none = self.next & 0xffff == 0;
        self.unsure || none || !self.frames.is_sound() || self.seen.lock().next == self.next
    }

    fn finish(&mut self) {
        self.pump();
        self.poll(u32::MAX);
        self.pump();
        // The wait is for the closer thread. The server accepts a new client only after that thread
        // has closed the descriptors of the last client. The closer thread also closes the
        // descriptors of a message before the server takes later writes without a reply.
        let until = wait::deadline();
        while self.socket.is_some()
            && !(self.frames.is_answered() && self.has_seen_all())
            && Instant::now() < until
        {
            wait::pause();
            self.poll(u32::MAX);
            self.pump();
        }
        if self.socket.is_some() && !self.unsure && self.frames.is_sound() {
            self.frames.check_answered();
            let seen = self.seen.lock().next;
            assert!(self.has_seen_all(), "writes are lost: {seen:#x}, not {:#x}", self.next);
        }
        self.disconnect();
        let socket = self.seen.lock().socket.take();
        drop(socket);
    }
}
