//! Replacements of the server while clients are connected. The clients must not see an error.

mod common;

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use common::*;
use rustix::net::SendFlags;
use shadowbell_state::Descriptors;
use shadowbell_testing::wait;
use shadowbell_vfio_user::codec::SendQueue;
use shadowbell_vfio_user::server::{Limits, PortRecorder, RestoredPort, SavedPort};
use shadowbell_vfio_user::wire::{self, Header, command, header_flags};
use shadowbell_vfio_user::{Listener, Reactor};
use zerocopy::IntoBytes;

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27) % sides
    }
}

fn message(id: u16, command: u16, flags: u32, payload: &[&[u8]]) -> Vec<u8> {
    let mut out = SendQueue::default();
    out.put(Header { id, command, size: 0, flags, error: 0 }, payload);
    out.front().0.to_vec()
}

/// Expected reply: its message identifier, and, for a read, the value.
type Expected = (u16, Option<u32>);

/// Client that sends requests without waiting for the replies, and splits them at random places.
struct PipeliningClient {
    raw: Raw,
    dice: Dice,
    expected: Sender<Expected>,
    id: u16,
    rings: u8,
    value: u32,
    maps: Arc<AtomicU32>,
}

impl PipeliningClient {
    fn expect(&mut self, read: Option<u32>) -> u16 {
        self.id = self.id.wrapping_add(1);
        self.expected.send((self.id, read)).unwrap();
        self.id
    }

    fn ring(&mut self, replies: bool) -> Vec<u8> {
        let access = access(0, DOORBELL, 1);
        self.rings = self.rings.wrapping_add(1);
        let (id, flags) = match replies {
            true => (self.expect(None), 0),
            false => (0, header_flags::NO_REPLY),
        };
        message(id, command::REGION_WRITE, flags, &[access.as_bytes(), &[self.rings]])
    }

    fn read(&mut self) -> Vec<u8> {
        let id = self.expect(Some(self.value));
        message(id, command::REGION_READ, 0, &[access(0, 16, 4).as_bytes()])
    }

    fn write(&mut self) -> Vec<u8> {
        self.value = self.value.wrapping_add(1);
        let (id, value) = (self.expect(None), self.value.to_le_bytes());
        message(id, command::REGION_WRITE, 0, &[access(0, 16, 4).as_bytes(), &value])
    }

    /// Creates a message with several writes. One write is to `SLOW`: while the device holds
    /// completion callbacks, this write does not complete at once.
    fn write_several(&mut self) -> Vec<u8> {
        let entry = |offset, count, value: u32| {
            let mut data = [0; 8];
            data[..4].copy_from_slice(&value.to_le_bytes());
            wire::MultiEntry { offset, region: 0, count, data }
        };
        self.value = self.value.wrapping_add(1);
        self.rings = self.rings.wrapping_add(1);
        let entries = [
            entry(16, 4, self.value.wrapping_add(77)),
            entry(SLOW, 1, 1),
            entry(DOORBELL, 1, self.rings.into()),
            entry(16, 4, self.value),
        ];
        let head = wire::WriteMulti { count: 4 };
        let id = self.expect(None);
        message(id, command::REGION_WRITE_MULTI, 0, &[head.as_bytes(), entries.as_bytes()])
    }

    fn slow_write(&mut self) -> Vec<u8> {
        let id = self.expect(None);
        message(id, command::REGION_WRITE, 0, &[access(0, SLOW, 1).as_bytes(), &[1]])
    }

    /// Sends a DMA_MAP in several parts, with the descriptor in the last one.
    fn map(&mut self) {
        let n = self.maps.fetch_add(1, Ordering::SeqCst) + 1;
        let len = u64::from(n) * 4096;
        let map = wire::DmaMap { argsz: 32, flags: 3, offset: 0, address: 0x1000, size: len };
        let id = self.expect(None);
        let bytes = message(id, command::DMA_MAP, 0, &[map.as_bytes()]);
        let at = self.dice.roll(bytes.len() as u64) as usize;
        let before = self.dice.roll(at as u64 + 1) as usize;
        let file = memfd(len);
        self.send(&bytes[..before]);
        self.raw.send_with_fds(&bytes[before..=at], &[file.as_fd()]);
        self.send(&bytes[at + 1..]);
    }

    fn send(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let some = match self.dice.roll(3) {
                0 => self.dice.roll(bytes.len() as u64) as usize + 1,
                _ => bytes.len(),
            };
            self.raw.send(&bytes[..some]);
            bytes = &bytes[some..];
            if self.dice.roll(4) == 0 {
                std::thread::yield_now();
            }
        }
    }

    fn batch(&mut self) {
        let mut bytes = Vec::new();
        for _ in 0..=self.dice.roll(8) {
            bytes.extend(match self.dice.roll(7) {
                0 | 1 => self.ring(false),
                2 => self.ring(true),
                3 => self.write(),
                4 => self.write_several(),
                5 => self.slow_write(),
                _ => self.read(),
            });
        }
        self.send(&bytes);
        if self.dice.roll(30) == 0 && self.maps.load(Ordering::SeqCst) < 300 {
            self.map();
        }
    }
}

/// Reads replies, and checks their order. Pauses at random, so that the server sometimes has unread
/// replies.
fn listen(mut raw: Raw, expected: &Receiver<Expected>, seed: u64) {
    let mut dice = Dice(seed);
    while let Ok((id, read)) = expected.recv() {
        if dice.roll(200) == 0 {
            // The pause lets unread replies accumulate.
            std::thread::sleep(Duration::from_millis(2));
        }
        let reply = raw.reply();
        assert_eq!(reply.header.id, id, "seed {seed}");
        let payload = reply.ok();
        if let Some(value) = read {
            assert_eq!(payload[16..], value.to_le_bytes(), "seed {seed}");
        }
    }
    raw.assert_silent();
}

/// The server is replaced at random moments. Some replacements are cancelled or fail. Each request
/// must be executed once and in order, and get one reply.
#[test]
fn every_request_is_answered_once_across_replacements() {
    for seed in 0..4 {
        let mut dice = Dice(1000 + seed);
        let (mut server, path, shared) = Server::with_recorded_device(Limits::default());
        let raw = Raw::attach(&path);
        let listener = Raw::new(raw.stream.try_clone().unwrap());
        shared.hold.store(true, Ordering::SeqCst);
        let (expected, due) = channel();
        let (enough, maps) = (Arc::<AtomicBool>::default(), Arc::<AtomicU32>::default());
        let over = Arc::<AtomicBool>::default();
        let mut talker = PipeliningClient {
            raw,
            dice: Dice(seed),
            expected,
            id: 0,
            rings: 0,
            value: 0,
            maps: Arc::clone(&maps),
        };
        let talks = std::thread::spawn({
            let enough = Arc::clone(&enough);
            move || {
                while !enough.load(Ordering::SeqCst) {
                    talker.batch();
                }
                talker
            }
        });
        let listens = std::thread::spawn(move || listen(listener, &due, seed));
        // This thread completes stored callbacks after a random time.
        let finishes = std::thread::spawn({
            let (shared, over) = (Arc::clone(&shared), Arc::clone(&over));
            let mut dice = Dice(2000 + seed);
            move || {
                while !over.load(Ordering::SeqCst) {
                    let done = shared.held.lock().unwrap().pop();
                    match done {
                        Some(done) => done.ok(),
                        None if dice.roll(2) == 0 => std::thread::yield_now(),
                        // The duration is random, so that the test covers many moments.
                        None => std::thread::sleep(Duration::from_micros(dice.roll(300))),
                    }
                }
            }
        });
        for _ in 0..100 {
            // The duration is random, so that the test covers many moments.
            std::thread::sleep(Duration::from_micros(dice.roll(1500)));
            let old = server.freeze();
            match dice.roll(5) {
                // Cancels the replacement: the old server continues.
                0 => server.run(old),
                // The replacement fails: the next server is dropped before it runs, and the old one
                // continues.
                1 => {
                    drop(server.successor(&[&shared]));
                    server.run(old);
                }
                _ => {
                    let new = server.successor(&[&shared]);
                    old.release_to_successor();
                    server.run(new);
                }
            }
        }
        enough.store(true, Ordering::SeqCst);
        let talker = talks.join().unwrap();
        let last = talker.rings;
        let PipeliningClient { raw, expected, .. } = talker;
        drop(expected);
        listens.join().unwrap();
        over.store(true, Ordering::SeqCst);
        finishes.join().unwrap();
        shared.hold.store(false, Ordering::SeqCst);
        let writes = shared.doorbell_writes.lock().unwrap();
        let values: Vec<_> = writes.iter().map(|(value, _)| *value).collect();
        assert_eq!(values.last(), Some(&last), "seed {seed}");
        assert!(values.windows(2).all(|w| w[0].wrapping_add(1) == w[1]), "seed {seed}");
        // Each file has arrived with the message to which it belongs.
        let files = shared.maps.lock().unwrap();
        assert_eq!(files.len(), maps.load(Ordering::SeqCst) as usize);
        for (n, file) in files.iter().enumerate() {
            let size = rustix::fs::fstat(file).unwrap().st_size;
            assert_eq!(size, (n as i64 + 1) * 4096, "seed {seed}");
        }
        drop(raw);
    }
}

/// A replacement transfers unread replies with their descriptors, and the requests that wait behind
/// them.
#[test]
fn unread_replies_survive_a_replacement() {
    let (mut server, path, shared) = Server::with_recorded_device(Limits::default());
    let mut raw = Raw::attach(&path);
    raw.write(0, b"first").ok();
    // The replies exceed the buffers of socket and server.
    const LEN: usize = 0x8000;
    let mut ids = Vec::new();
    for _ in 0..100 {
        let ask =
            wire::RegionInfo { argsz: 32, flags: 0, index: 2, cap_offset: 0, size: 0, offset: 0 };
        for (command, payload) in [
            (command::REGION_READ, access(0, 0, LEN).as_bytes()),
            (command::DEVICE_GET_REGION_INFO, ask.as_bytes()),
        ] {
            let id = ids.len() as u16;
            raw.send(&message(id, command, 0, &[payload]));
            ids.push(id);
        }
    }
    for _ in 0..5 {
        server.replace(&[&shared]);
    }
    // The client has not read all replies, so the server still has some in its own buffer. The
    // replacement must transfer these replies as well.
    for id in &ids {
        if *id == 100 {
            server.replace(&[&shared]);
        }
        let reply = raw.reply();
        assert_eq!(reply.header.id, *id);
        match reply.header.command {
            command::REGION_READ => assert_eq!(reply.ok()[16..21], *b"first"),
            _ => assert_eq!(reply.ok().len(), 32),
        }
    }
    raw.assert_silent();
}

/// After a replacement, each descriptor arrives with the reply to which it belongs.
#[test]
fn descriptors_of_unread_replies_survive_a_replacement() {
    let (mut server, path, shared) = Server::with_recorded_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let read = raw.message(command::REGION_READ, 0, &[access(0, 0, 0x4000).as_bytes()]);
    let ask =
        wire::RegionInfo { argsz: 256, flags: 0, index: 2, cap_offset: 0, size: 0, offset: 0 };
    let info = raw.message(command::DEVICE_GET_REGION_INFO, 0, &[ask.as_bytes()]);
    for _ in 0..40 {
        raw.send(&read);
        raw.send(&info);
    }
    server.replace(&[&shared]);
    server.replace(&[&shared]);
    let (read, info) = (16 + 16 + 0x4000, 16 + 32 + 16 + 16);
    let (mut bytes, mut fds) = (0, 0);
    while bytes < 40 * (read + info) {
        let (some, files) = receive(&raw.stream);
        assert_ne!(some, 0);
        bytes += some;
        for file in files {
            let size = rustix::fs::fstat(file).unwrap().st_size as u64;
            assert_eq!(size, BAR2_FILE_OFFSET + BAR2_SIZE);
            fds += 1;
        }
        let begun = (0..40).filter(|n| n * (read + info) + read < bytes).count();
        assert_eq!(fds, begun, "after {bytes} bytes");
    }
    assert_eq!(bytes, 40 * (read + info));
}

fn receive(stream: &UnixStream) -> (usize, Vec<std::os::fd::OwnedFd>) {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; 1 << 16];
    let mut into = [std::io::IoSliceMut::new(&mut bytes)];
    let received = recvmsg(stream, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            fds.extend(some);
        }
    }
    (received.bytes, fds)
}

#[test]
fn a_freeze_waits_for_the_request_in_flight_only() {
    let (mut server, path, shared) = Server::with_recorded_device(Limits::default());
    let (other_path, other, _) = server.add("other");
    let mut neighbour = Raw::attach(&other_path);
    let mut raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    raw.send(&message(1, command::REGION_WRITE, 0, &[access(0, SLOW, 1).as_bytes(), &[1]]));
    raw.send(&message(2, command::DEVICE_RESET, 0, &[]));
    let done = shared.wait_held();
    server.handle.freeze();
    // The device still executes a request, so the reactor has not quiesced, and the freeze can be
    // cancelled.
    neighbour.send(&message(9, command::REGION_READ, 0, &[access(0, 0, 1).as_bytes()]));
    eventually("the reactor waits", || sleeps(server.tid));
    assert!(!server.has_ended());
    neighbour.assert_silent();
    server.handle.thaw();
    assert_eq!(neighbour.reply().header.id, 9);
    server.handle.freeze();
    assert!(!server.has_ended());
    done.ok();
    let old = server.frozen();
    assert_eq!(raw.reply().header.id, 1);
    raw.assert_silent();
    assert_eq!(shared.log().last().unwrap(), "slow write", "the reset waits");
    let new = server.successor(&[&shared, &other]);
    old.release_to_successor();
    server.run(new);
    shared.wait_held().ok();
    assert_eq!(raw.reply().header.id, 2);
    assert_eq!(shared.log().last().unwrap(), "reset");
    neighbour.read(0, 1).ok();
}

/// Two unmaps wait for the same slow access, and a message has overtaken the first one. Both end
/// while the freeze waits.
#[test]
fn a_freeze_ends_when_several_unmaps_end_together() {
    let (mut server, path, shared) = Server::with_device(Limits::default());
    let (other_path, other, _) = server.add("other");
    let (mut raw, mut neighbour) = (Raw::attach(&path), Raw::attach(&other_path));
    shared.hold.store(true, Ordering::SeqCst);
    let unmap = wire::DmaUnmap { argsz: 24, flags: 0, address: 0x1000, size: 0x1000 };
    let unmap = |id| message(id, command::DMA_UNMAP, 0, &[unmap.as_bytes()]);
    raw.send(&unmap(1));
    let first = shared.wait_held();
    raw.read(0, 1).ok();
    raw.send(&unmap(2));
    let second = shared.wait_held();
    // The reactor's thread calls the hook, so the reactor handles all three together.
    let handle = server.handle.clone();
    *other.hook.lock().unwrap() = Some(Box::new(move || {
        handle.freeze();
        first.ok();
        second.ok();
    }));
    neighbour.write(HOOK, &[1]).ok();
    eventually("the reactor is quiesced", || server.has_ended());
    drop(server.frozen());
    let mut ids = [raw.reply(), raw.reply()].map(|reply| reply.header.id);
    ids.sort_unstable();
    assert_eq!(ids, [1, 2]);
}

#[test]
fn a_freeze_waits_for_a_disconnect_in_progress() {
    let (mut server, path, shared) = Server::with_recorded_device(Limits::default());
    shared.hold.store(true, Ordering::SeqCst);
    drop(Raw::attach(&path));
    let done = shared.wait_held();
    let mut next = Raw::connect(&path);
    server.handle.freeze();
    eventually("the reactor waits", || sleeps(server.tid));
    assert!(!server.has_ended());
    done.ok();
    let old = server.frozen();
    assert_eq!(shared.log(), ["connected, 8 fds", "disconnected"]);
    let new = server.successor(&[&shared]);
    old.release_to_successor();
    server.run(new);
    next.negotiate();
    assert_eq!(shared.log()[2..], ["connected, 8 fds"]);
}

#[test]
fn the_successor_notices_a_client_that_left_meanwhile() {
    let (mut server, path, shared) = Server::with_recorded_device(Limits::default());
    let raw = Raw::attach(&path);
    let old = server.freeze();
    let new = server.successor(&[&shared]);
    drop(raw);
    old.release_to_successor();
    assert_eq!(shared.log(), ["connected, 8 fds"]);
    server.run(new);
    shared.wait_log("disconnected");
    Raw::attach(&path).read(0, 1).ok();
}

#[test]
fn the_socket_file_exists_until_the_last_server_ends() {
    let (mut server, path, shared) = Server::with_recorded_device(Limits::default());
    let old = server.freeze();
    // If the next server is dropped before it runs, the socket file stays.
    drop(server.successor(&[&shared]));
    let mut waiting = Raw::connect(&path);
    let new = server.successor(&[&shared]);
    new.handle().freeze();
    old.release_to_successor();
    server.run(new);
    // The freeze was requested before this server ran, so it quiesces as soon as it runs.
    let new = server.frozen();
    server.run(new);
    waiting.negotiate();
    assert!(path.exists());
    assert!(Listener::bind(&path).is_err(), "the socket has a listener");
    server.stop();
    waiting.assert_closed();
    assert!(!path.exists());
}

/// Negotiated limits stay valid in the next server, even if its own limits differ.
#[test]
fn a_successor_keeps_the_negotiated_limits() {
    let (mut server, path, shared) = Server::with_recorded_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let old = server.freeze();
    server.limits.max_data_xfer_size = 64;
    let new = server.successor(&[&shared]);
    old.release_to_successor();
    server.run(new);
    raw.write(0, &[7; 0x4000]).ok();
    assert_eq!(raw.read(0, 0x4000).ok()[16..], [7; 0x4000]);
}

/// The timeout for the rest of a message is suspended between the freeze of one server and the
/// start of the next.
#[test]
fn a_freeze_suspends_the_message_timeout() {
    // The limit is long enough for a busy machine before and after the pause, and shorter than the
    // pause.
    let limits = Limits { message: Duration::from_secs(5), ..Limits::default() };
    let (mut server, path, shared) = Server::with_recorded_device(limits);
    let mut raw = Raw::attach(&path);
    let bytes = message(5, command::REGION_READ, 0, &[access(0, 0, 1).as_bytes()]);
    raw.send(&bytes[..20]);
    eventually("the reactor waits for the rest", || sleeps(server.tid));
    let old = server.freeze();
    // The pause is longer than the limit.
    std::thread::sleep(Duration::from_millis(5200));
    server.run(old);
    // If the timeout had run during the pause, the reactor would now disconnect the client.
    eventually("the reactor has checked its timeouts", || sleeps(server.tid));
    raw.send(&bytes[20..]);
    assert_eq!(raw.reply().header.id, 5);
    assert_eq!(shared.log(), ["connected, 8 fds"]);
}

/// Recorder of a process that dies, as seen from its sockets. When `is_due` is true and a
/// checkpoint contains `words`, it sends the checkpoint to the test, and the reactor waits until
/// the test ends.
struct Death {
    is_due: Arc<AtomicBool>,
    words: &'static str,
    checkpoints: Sender<Last>,
    end: Arc<std::sync::Mutex<Receiver<()>>>,
}

impl PortRecorder for Death {
    fn record(&mut self, port: &SavedPort, fds: Descriptors) {
        let mut last = Last::default();
        last.record(port, fds);
        if self.is_due.load(Ordering::SeqCst) && last.text().contains(self.words) {
            let _ = self.checkpoints.send(last);
            let _ = self.end.lock().unwrap().recv();
        }
    }
}

/// The socket is full when a process dies before it has sent a reply, and also when the next one
/// dies.
#[test]
fn a_reply_survives_two_deaths_with_a_full_socket() {
    let mut servers: Vec<_> = (0..3).map(|_| Server::start(Limits::default())).collect();
    let (checkpoints, last) = channel();
    let (_over, end) = channel();
    let end = Arc::new(std::sync::Mutex::new(end));
    let is_due = Arc::new(AtomicBool::new(false));
    let death = |words| {
        let (is_due, checkpoints, end) =
            (Arc::clone(&is_due), checkpoints.clone(), Arc::clone(&end));
        Box::new(Death { is_due, words, checkpoints, end })
    };
    let next = || last.recv_timeout(wait::LIMIT).expect("a checkpoint");
    let path = servers[0].directory.path().join("device");
    let (device, shared) = TestDevice::new();
    let listener = Listener::bind(&path).unwrap();
    servers[0].handle.add_recorded(listener, device, death("\"handled\":{"));
    let mut raw = Raw::attach(&path);
    raw.read(0, 1).ok();
    is_due.store(true, Ordering::SeqCst);
    let reset = raw.message(command::DEVICE_RESET, 0, &[]);
    raw.send(&reset);
    let (saved, mut fds) = next().copy();
    // Earlier replies that the client has not read.
    let send = |fd| rustix::net::send(fd, &[0; 4096], SendFlags::DONTWAIT).unwrap_or(0);
    let unread: usize = fds
        .iter()
        .map(|fd| std::iter::repeat_with(|| send(fd)).take_while(|n| *n != 0).sum::<usize>())
        .sum();
    assert!(unread > 0);
    for server in &mut servers[1..] {
        drop(server.freeze());
    }
    let reactor = |server: &Server, saved, fds: &mut Descriptors, recorder| {
        let mut reactor = Reactor::new(server.limits).unwrap();
        let device = TestDevice::of(&shared);
        let restored = RestoredPort::new(saved, fds, device, &server.limits).unwrap();
        let port = reactor.serve_restored(restored).unwrap();
        reactor.record_with(port, recorder);
        reactor
    };
    // The second process dies after the first checkpoint that it stores while it sends the reply.
    let second = reactor(&servers[1], saved, &mut fds, death("\"handled\":null"));
    servers[1].run(second);
    let (saved, mut fds) = next().copy();
    let third = reactor(&servers[2], saved, &mut fds, Box::<Last>::default());
    servers[2].run(third);
    raw.stream.read_exact(&mut vec![0; unread]).unwrap();
    assert_eq!(raw.reply().header.command, command::DEVICE_RESET);
    raw.read(0, 1).ok();
}
