//! Hostile VMM: messages of every kind with any fields, truncated or joined, with descriptors of
//! all types. They are sent to the vfio-user server of a real controller.
//!
//! The reactor, the I/O thread and the client take turns on one thread. Besides panics, this body
//! checks that
//! * a complete message that requests a reply gets exactly one, with its id and command, and with an
//!   errno other than 0 if it failed; replies are in order, except that later messages overtake an
//!   unmap;
//! * a client with valid framing is not disconnected;
//! * no descriptor of a disconnected client remains open.

pub(crate) mod frames;
pub(crate) mod messages;

use crate::command::{self, BASE, PAGE, PAGES};
use crate::limits::Limits;
use crate::source::Source;
use crate::vmm::{connect, describe_descriptors, descriptors, limits, listen};
use frames::Frames;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown};
use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Polling, Pool, Turns};
use shadowbell_disk_file::MemDisk;
use shadowbell_frontend::ControllerDevice;
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_testing::wait;
use shadowbell_vfio_user::migration::{
    DeviceFeature, DeviceState, MigData, feature, feature_flags,
};
use shadowbell_vfio_user::wire::command as verb;
use shadowbell_vfio_user::{Listener, Reactor};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Number of actions of one program.
const ACTIONS: usize = 64;
/// Maximum number of turns for which the client waits for an operation.
const MAX_TURNS: usize = 2000;
/// Number of consecutive idle turns after which server and client are idle.
const IDLE_TURNS: usize = 2;
/// Number of turns within which the server has handled a disconnection.
const DISCONNECT_TURNS: usize = 12;

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    let before = descriptors();
    let limits = Limits::begin();
    let mut source = Source::new(input);
    let mut connection = Connection::new(&mut source);
    if !source.rarely(8) {
        connection.introduce();
    }
    if !source.rarely(4) {
        connection.enable();
    }
    for _ in 0..ACTIONS {
        if source.is_empty() {
            break;
        }
        connection.act(&mut source);
        limits.step_of("session", &mut connection.turns, &connection.controller);
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

/// A controller behind a socket, and its client.
struct Connection {
    turns: Turns,
    controller: Controller,
    reactor: Reactor,
    listener: OwnedFd,
    /// The client's end of the connection.
    socket: Option<OwnedFd>,
    /// Model of the stream: sent messages, expected replies, and received bytes.
    frames: Frames,
    /// True if the client does not read replies.
    deaf: bool,
    /// The memory that is shared at [`BASE`], and its file.
    file: OwnedFd,
    memory: SharedBytes,
    /// True if the file has ever been shorter than the mapped memory, so that its contents are
    /// unknown.
    cut: bool,
    tails: [u32; 4],
}

impl Connection {
    fn new(source: &mut Source<'_>) -> Self {
        let (pool, turns) = Pool::driven(Polling::Never).expect("a worker");
        let disk = Arc::new(MemDisk::new(128, 512).expect("a disk"));
        let namespaces = vec![NamespaceConfig { disk, uuid: uuid_from("fuzz") }];
        let io_queues = source.of(&[4, 1, 64]);
        let config = Config { namespaces, io_queues, ..Config::default() };
        let carrier = Carrier { mapped_doorbells: source.rarely(4), listener: None };
        let controller = Controller::new(config, pool, carrier).expect("a controller");
        let device =
            ControllerDevice::new(controller.clone(), Arc::new(|_| ())).expect("a function");
        let mut reactor = Reactor::new(limits(source)).expect("a reactor");
        let listener = listen();
        let theirs = Listener::from_fd(listener.try_clone().expect("a descriptor"), "fuzz");
        reactor.add(theirs.expect("a listener"), Box::new(device)).expect("a port");
        let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, PAGE * PAGES).expect("memory");
        let memory = Mapping::from_fd(&file, 0, PAGE * PAGES, Protection::ReadWrite);
        let mut connection = Self {
            turns,
            controller,
            reactor,
            listener,
            socket: None,
            frames: Frames::default(),
            deaf: false,
            file,
            memory: memory.expect("a mapping").bytes(),
            cut: false,
            tails: [0; 4],
        };
        connection.connect();
        connection
    }

    fn connect(&mut self) {
        let listener = self.listener.try_clone().expect("a descriptor");
        self.socket = Some(connect(&listener, || {
            self.step();
        }));
        self.frames = Frames::default();
        self.deaf = false;
        self.pump();
    }

    /// Disconnects, and waits until the server has released the client.
    fn disconnect(&mut self) {
        self.socket = None;
        // In these turns, the reactor reads the end of the stream, and the I/O thread resets the
        // controller and confirms the reset. Then the reactor accepts the next client.
        for _ in 0..DISCONNECT_TURNS {
            self.step();
        }
    }

    /// Takes a turn of the server.
    fn step(&mut self) -> bool {
        let alive = self.reactor.poll_once(Some(Duration::ZERO)).expect("the reactor runs");
        assert!(alive, "the reactor was not stopped");
        self.turns.turn()
    }

    /// Takes turns of server and client until both are idle.
    fn pump(&mut self) {
        let mut idle = 0;
        for _ in 0..MAX_TURNS {
            let busy = self.step() | self.receive();
            idle = if busy { 0 } else { idle + 1 };
            if idle == IDLE_TURNS {
                return;
            }
        }
        panic!("there is always something to do");
    }

    /// Reads replies. Returns true if there were any. The client passes no buffer for descriptors,
    /// so the kernel closes those in the replies.
    fn receive(&mut self) -> bool {
        let Some(socket) = self.socket.as_ref().filter(|_| !self.deaf) else { return false };
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

    /// Sends bytes in `parts` parts, with the descriptors in the last part.
    fn send(&mut self, bytes: &[u8], fds: &[OwnedFd], parts: usize) {
        let chunk = bytes.len().div_ceil(parts.max(1)).max(1);
        let chunks: Vec<_> = bytes.chunks(chunk).collect();
        let last = chunks.len().saturating_sub(1);
        for (n, part) in chunks.into_iter().enumerate() {
            let fds = if n == last { fds } else { &[] };
            self.send_all(part, fds);
            if n != last {
                self.pump();
            }
        }
    }

    fn send_all(&mut self, mut bytes: &[u8], mut fds: &[OwnedFd]) {
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
                // The socket is full, because the server waits until the client reads replies. So
                // the client reads from now on.
                Err(Errno::AGAIN) => self.deaf = false,
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    self.receive();
                    self.socket = None;
                    return;
                }
                Err(errno) => panic!("{errno}"),
            }
            self.pump();
        }
        panic!("the server takes no more bytes");
    }

    /// Sends one complete message of the usual form.
    fn send_message(&mut self, command: u16, payload: &[&[u8]], fds: &[OwnedFd]) {
        self.send(&messages::message(command, 0, payload), fds, 1);
        self.pump();
    }

    fn introduce(&mut self) {
        let json = br#"{"capabilities":{"max_msg_fds":16,"write_multiple":true}}"#;
        self.send_message(verb::VERSION, &[&[0, 0, 1, 0], json, &[0]], &[]);
    }

    /// Shares the memory, turns bus mastering on and enables the controller, as a guest does.
    fn enable(&mut self) {
        let file = self.file.try_clone().expect("a descriptor");
        self.send_message(verb::DMA_MAP, &[&messages::dma_map(BASE, PAGES * PAGE, 0, 3)], &[file]);
        self.write(7, 4, &6u16.to_le_bytes());
        let aqa = (command::ADMIN_ENTRIES - 1) * 0x1_0001;
        self.write(0, shadowbell_spec::regs::AQA, &aqa.to_le_bytes());
        self.write(0, shadowbell_spec::regs::ASQ, &command::ASQ.to_le_bytes());
        self.write(0, shadowbell_spec::regs::ACQ, &command::ACQ.to_le_bytes());
        self.write(0, shadowbell_spec::regs::CC, &0x0046_0001u32.to_le_bytes());
        self.tails = [0; 4];
    }

    /// Stops the device, reads its state, and restores it, possibly modified.
    fn relocate(&mut self, source: &mut Source<'_>) {
        self.set_state(3);
        let before = self.frames.last_reply();
        let ask = MigData { argsz: 0, size: 1 << 19 };
        self.send_message(verb::MIG_DATA_READ, &[ask.as_bytes()], &[]);
        let reply = self.frames.last_reply();
        let stream = if reply == before { Vec::new() } else { reply };
        let mut stream = stream.get(24..).unwrap_or_default().to_vec();
        for _ in 0..source.below(4) {
            let (at, any) = (source.below(stream.len().max(1)), source.u8());
            if let Some(byte) = stream.get_mut(at) {
                *byte = source.of(&[b'0', b'9', b'1', b'"', b'}', b',', any]);
            }
        }
        self.set_state(4);
        let head = MigData { argsz: 0, size: stream.len() as u32 };
        self.send_message(verb::MIG_DATA_WRITE, &[head.as_bytes(), &stream], &[]);
        self.set_state(source.of(&[2, 2, 1, 3]));
    }

    fn set_state(&mut self, state: u32) {
        let flags = feature_flags::SET | feature::MIG_DEVICE_STATE;
        let head = DeviceFeature { argsz: 16, flags };
        let state = DeviceState { state, data_fd: 0 };
        self.send_message(verb::DEVICE_FEATURE, &[head.as_bytes(), state.as_bytes()], &[]);
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        let access = messages::access(region, offset, data.len() as u32);
        self.send_message(verb::REGION_WRITE, &[&access, data], &[]);
    }

    fn act(&mut self, source: &mut Source<'_>) {
        match source.below(21) {
            0..=5 => self.submit(source),
            6..=12 => self.send_any_message(source),
            13 => self.scribble(source),
            14 => {
                let bytes = source.bytes(64);
                self.send(&bytes, &[], 1);
            }
            15 => self.deaf = source.bool(),
            16 => {
                // Truncates or extends the file. The new length may be the correct one.
                let len = source.of(&[PAGES, 0, 1, PAGES / 2, PAGES + 1]) * PAGE;
                self.cut |= len < PAGES * PAGE;
                ftruncate(&self.file, len + u64::from(source.u8())).expect("memory");
            }
            17 => {
                if let Some(socket) = &self.socket {
                    let _ = rustix::net::shutdown(
                        socket,
                        source.of(&[Shutdown::Write, Shutdown::Both, Shutdown::Read]),
                    );
                    self.frames.forfeit();
                }
            }
            18 => {
                self.disconnect();
                self.connect();
                self.introduce();
            }
            19 => self.relocate(source),
            _ => self.enable(),
        }
        if !source.rarely(4) {
            self.pump();
        }
        if self.socket.is_none() {
            self.disconnect();
            self.connect();
            self.introduce();
        }
    }

    /// Sends a complete or truncated message with descriptors.
    fn send_any_message(&mut self, source: &mut Source<'_>) {
        let (mut bytes, fds, odd) = messages::any(source, &self.file);
        if odd {
            self.frames.forfeit();
        }
        if source.rarely(6) {
            messages::mangle(source, &mut bytes);
        }
        let parts = if source.rarely(6) { 1 + source.below(6) } else { 1 };
        self.send(&bytes, &fds, parts);
    }

    /// Stores a command in a queue, and writes the doorbell.
    fn submit(&mut self, source: &mut Source<'_>) {
        let qid = source.of(&[0u16, 0, 1, 1, 2, 3]);
        let sqe = command::command(source, qid == 0);
        let entries = if qid == 0 { command::ADMIN_ENTRIES } else { source.of(&[4, 8, 16, 64]) };
        let tail = &mut self.tails[usize::from(qid)];
        let at = command::sq_at(qid) - BASE + u64::from(*tail % entries) * 64;
        *tail = (*tail + 1) % entries;
        let tail = *tail;
        self.poke(at, sqe.as_bytes());
        if source.rarely(3) {
            let list = command::list(source);
            let at = command::address(source).wrapping_sub(BASE);
            self.poke(at, &list);
        }
        let bell = shadowbell_spec::regs::sq_doorbell_offset(qid, 0);
        self.poke(
            command::SHADOW - BASE + bell - shadowbell_spec::regs::DOORBELLS,
            &tail.to_le_bytes(),
        );
        let access = messages::access(0, bell, 4);
        let flags = if source.bool() { 0x10 } else { 0 };
        let value = tail.to_le_bytes();
        let bytes = messages::message_with(verb::REGION_WRITE, 1, flags, &[&access, &value]);
        self.send(&bytes, &[], 1);
    }

    fn scribble(&mut self, source: &mut Source<'_>) {
        let at = source.below((PAGE * PAGES) as usize) as u64;
        let bytes = source.bytes(128);
        self.poke(at, &bytes);
    }

    /// Writes to the memory, if its file is not truncated.
    fn poke(&mut self, at: u64, bytes: &[u8]) {
        if !self.cut
            && let Ok(at) = usize::try_from(at)
        {
            let _ = self.memory.write_from(at, bytes);
        }
    }

    /// Checks that every message was answered.
    fn finish(&mut self) {
        self.deaf = false;
        self.pump();
        // The wait is for the closer thread: the server accepts a new client only after that thread
        // has closed the descriptors of the last client.
        let until = wait::deadline();
        while self.socket.is_some() && !self.frames.is_answered() && Instant::now() < until {
            wait::pause();
            self.pump();
        }
        if self.socket.is_some() {
            self.frames.check_answered();
        }
        self.disconnect();
    }
}
