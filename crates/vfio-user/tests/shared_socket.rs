//! Shared sockets: a second thread, the poller, polls the socket of a client for doorbell writes,
//! in addition to the reactor.

mod common;

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use common::*;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use shadowbell_vfio_user::server::Limits;
use shadowbell_vfio_user::wire::{self, command, header_flags};
use shadowbell_vfio_user::{Errno, PolledWrites, SharedSocket};
use zerocopy::IntoBytes;

const TOKEN: u64 = 7;
const STOP: u64 = 8;

/// State that a [`Poller`] and its test share.
#[derive(Default)]
struct PollerState {
    /// True if the thread sleeps in epoll, or is about to.
    waits: AtomicBool,
    thread: AtomicU32,
    /// Result of each poll of the shared socket by the thread.
    polled: Mutex<Vec<PolledWrites>>,
}

/// Thread that sleeps until its epoll instance reports an event.
struct Poller {
    epoll: Arc<OwnedFd>,
    stop: OwnedFd,
    state: Arc<PollerState>,
    thread: Option<JoinHandle<Option<SharedSocket>>>,
}

impl Poller {
    fn epoll() -> Arc<OwnedFd> {
        Arc::new(epoll::create(CreateFlags::CLOEXEC).unwrap())
    }

    /// Starts a thread that sleeps in `epoll`. If there is a `socket`, the thread polls it at each
    /// wakeup, and handles writes at [`DOORBELL`].
    fn start(
        epoll: Arc<OwnedFd>,
        socket: Option<SharedSocket>,
        shared: &Arc<TestDeviceState>,
    ) -> Self {
        let stop = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        epoll::add(&epoll, &stop, EventData::new_u64(STOP), EventFlags::IN).unwrap();
        let state = Arc::<PollerState>::default();
        let (shared, ours, sleeps_in) =
            (Arc::clone(shared), Arc::clone(&state), Arc::clone(&epoll));
        let thread = std::thread::spawn(move || {
            ours.thread.store(gettid(), Ordering::SeqCst);
            loop {
                ours.waits.store(true, Ordering::SeqCst);
                let tokens = wait(&sleeps_in, true);
                ours.waits.store(false, Ordering::SeqCst);
                for token in tokens {
                    match &socket {
                        _ if token == STOP => return socket,
                        Some(socket) => {
                            let polled = poll_writes(socket, &shared);
                            ours.polled.lock().unwrap().push(polled);
                        }
                        None => {
                            ours.polled.lock().unwrap().push(PolledWrites { writes: 0, all: true })
                        }
                    }
                }
            }
        });
        let poller = Self { epoll, stop, state, thread: Some(thread) };
        poller.wait_asleep();
        poller
    }

    fn wait_asleep(&self) {
        eventually("the poller sleeps", || {
            self.state.waits.load(Ordering::SeqCst)
                && sleeps(self.state.thread.load(Ordering::SeqCst))
        });
    }

    fn polled(&self) -> Vec<PolledWrites> {
        self.state.polled.lock().unwrap().clone()
    }

    fn stop(&mut self) -> Option<SharedSocket> {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).unwrap();
        self.thread.take()?.join().unwrap()
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Waits for events. Returns the tokens that the epoll instance reports.
fn wait(epoll: &OwnedFd, blocks: bool) -> Vec<u64> {
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut events = [const { MaybeUninit::uninit() }; 8];
    match epoll::wait(epoll, &mut events[..], if blocks { None } else { Some(&now) }) {
        Ok((events, _)) => events.iter().map(|event| event.data.u64()).collect(),
        Err(Errno::INTR) => Vec::new(),
        Err(errno) => panic!("{errno}"),
    }
}

fn poll_writes(socket: &SharedSocket, shared: &TestDeviceState) -> PolledWrites {
    socket.poll_writes(&mut |region, offset, data| {
        if (region, offset) != (0, DOORBELL) {
            return false;
        }
        shared.doorbell_writes.lock().unwrap().push((data[0], false));
        true
    })
}

/// Message that writes `value` at [`DOORBELL`].
fn doorbell(raw: &mut Raw, value: u8, flags: u32) -> Vec<u8> {
    let access = access(0, DOORBELL, 1);
    raw.message(command::REGION_WRITE, flags, &[access.as_bytes(), &[value]])
}

fn ring(raw: &mut Raw, value: u8) {
    let bytes = doorbell(raw, value, header_flags::NO_REPLY);
    raw.send(&bytes);
}

/// Attaches a client. Returns the client, and the shared socket that the device has got.
fn share(path: &Path, shared: &TestDeviceState) -> (Raw, SharedSocket) {
    let mut raw = Raw::attach(path);
    let socket = request_shared_socket(&mut raw, shared);
    (raw, socket)
}

/// Lets the device request the shared socket of a client, and returns the socket.
fn request_shared_socket(raw: &mut Raw, shared: &TestDeviceState) -> SharedSocket {
    shared.wants.store(true, Ordering::SeqCst);
    raw.read(0, 1).ok();
    let mut socket = None;
    eventually("the socket is shared", || {
        socket = shared.shared_sockets.lock().unwrap().pop();
        socket.is_some()
    });
    socket.unwrap()
}

/// Attaches a client whose socket is in two epoll instances: first in the instance of a sleeping
/// poller, then in that of the reactor. The kernel tries to wake them in this order.
fn shared_with_poller(limits: Limits) -> (Server, PathBuf, Arc<TestDeviceState>, Raw, Poller) {
    let (server, path, shared) = Server::with_device(limits);
    let (raw, socket) = share(&path, &shared);
    let epoll = Poller::epoll();
    socket.watch(&epoll, TOKEN).unwrap();
    let poller = Poller::start(epoll, Some(socket), &shared);
    // In its next turn, the reactor registers the socket in its own epoll instance again, behind
    // that of the poller. Then the reactor sleeps.
    wait_idle(&server, &poller);
    (server, path, shared, raw, poller)
}

/// Waits until both threads sleep. Each thread may still have to handle a message that the other
/// thread has received.
fn wait_idle(server: &Server, poller: &Poller) {
    poller.wait_asleep();
    eventually("the reactor sleeps", || sleeps(server.tid));
    poller.wait_asleep();
}

fn doorbell_writes(shared: &TestDeviceState) -> Vec<(u8, bool)> {
    shared.doorbell_writes.lock().unwrap().clone()
}

fn wait_doorbell_writes(shared: &TestDeviceState, count: usize) -> Vec<(u8, bool)> {
    eventually("all doorbell writes arrived", || doorbell_writes(shared).len() >= count);
    doorbell_writes(shared)
}

#[test]
fn a_sleeping_poller_is_woken_instead_of_the_reactor() {
    let (server, _path, shared, mut raw, poller) = shared_with_poller(Limits::default());
    for value in 0..50 {
        ring(&mut raw, value);
        wait_doorbell_writes(&shared, usize::from(value) + 1);
        wait_idle(&server, &poller);
    }
    assert!(
        doorbell_writes(&shared).iter().all(|(_, by_reactor)| !by_reactor),
        "{:?}",
        doorbell_writes(&shared)
    );
    let all = PolledWrites { writes: 1, all: true };
    wait_idle(&server, &poller);
    assert_eq!(poller.polled().iter().filter(|polled| **polled == all).count(), 50);
    // A doorbell write may require a reply, and gets one.
    let bytes = doorbell(&mut raw, 50, 0);
    raw.send(&bytes);
    assert_eq!(raw.reply().ok(), access(0, DOORBELL, 1).as_bytes());
    // If the server stores checkpoints, a write that requires a reply is handled by the reactor,
    // because then only the reactor sends replies.
    assert_eq!(doorbell_writes(&shared).last(), Some(&(50, is_recorded())));
}

/// Runs all tests of this file again, with servers that store checkpoints.
#[test]
fn all_tests_pass_with_recorded_servers() {
    if is_recorded() {
        return;
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .env("SHADOWBELL_TEST_RECORDED", "1")
        .status()
        .unwrap();
    assert!(status.success());
}

/// Encodes a doorbell write that the poller may handle: with checkpoints, a write without a reply.
fn takable_write(raw: &mut Raw, value: u8) -> Vec<u8> {
    doorbell(raw, value, if is_recorded() { header_flags::NO_REPLY } else { 0 })
}

#[test]
fn an_awake_poller_leaves_writes_to_the_reactor() {
    let (_server, _path, shared, mut raw, mut poller) = shared_with_poller(Limits::default());
    let socket = poller.stop().unwrap();
    for value in 0..50 {
        ring(&mut raw, value);
        wait_doorbell_writes(&shared, usize::from(value) + 1);
    }
    assert!(doorbell_writes(&shared).iter().all(|(_, by_reactor)| *by_reactor));
    // Writes that were handled are not reported again.
    assert_eq!(wait(&poller.epoll, false), [STOP]);
    assert_eq!(poll_writes(&socket, &shared), PolledWrites { writes: 0, all: true });
}

#[test]
fn the_reactor_handles_other_messages_and_all_after_them() {
    let (_server, _path, shared, mut raw, poller) = shared_with_poller(Limits::default());
    let mut stream = takable_write(&mut raw, 1);
    stream.extend(takable_write(&mut raw, 2));
    let access = access(0, 16, 1);
    stream.extend(raw.message(command::REGION_WRITE, 0, &[access.as_bytes(), &[77]]));
    stream.extend(doorbell(&mut raw, 3, 0));
    raw.send(&stream);
    let mut last = raw.reply().header.id;
    for _ in 0..if is_recorded() { 1 } else { 3 } {
        let id = raw.reply().header.id;
        assert_eq!(id, last + 1);
        last = id;
    }
    assert_eq!(doorbell_writes(&shared), [(1, false), (2, false), (3, true)]);
    assert_eq!(raw.read(16, 1).ok()[16..], [77]);
    let both = PolledWrites { writes: 2, all: false };
    eventually("it was polled so", || poller.polled().contains(&both));
}

#[test]
fn fuse_daemon() {
    shadowbell_testing::stalled::run_daemon_if_requested();
}

/// The poller has received a descriptor that follows a doorbell write, and the client disconnects
/// before the reactor handles the message. Closing the descriptor would block. So neither of the
/// two threads may close it: another thread must.
#[test]
fn a_hung_descriptor_behind_a_doorbell_blocks_neither_thread() {
    let (server, path, shared) = Server::with_device(Limits::default());
    let (other, other_shared, _) = server.add("other");
    // If the reactor hangs in a system call, the unmount ends it. So the mount must be dropped
    // before the server.
    let Some(mount) = shadowbell_testing::stalled::Mount::new("fuse_daemon") else { return };
    let file: &'static OwnedFd = Box::leak(Box::new(mount.open()));
    let (mut raw, socket) = share(&path, &shared);
    eventually("the reactor sleeps", || sleeps(server.tid));
    // Another client keeps the reactor busy while the poller receives.
    let (busy, is_busy) = std::sync::mpsc::channel();
    let (go_on, wait) = std::sync::mpsc::channel();
    *other_shared.hook.lock().unwrap() = Some(Box::new(move || {
        busy.send(()).unwrap();
        wait.recv().unwrap();
    }));
    let mut other_raw = Raw::attach(&other);
    let write = access(0, HOOK, 1);
    let posted = header_flags::NO_REPLY;
    let bytes = other_raw.message(command::REGION_WRITE, posted, &[write.as_bytes(), &[1]]);
    other_raw.send(&bytes);
    is_busy.recv().unwrap();
    // The client reads no more, so the server cannot send a reply.
    raw.stream.shutdown(std::net::Shutdown::Read).unwrap();
    let (first, second) = (takable_write(&mut raw, 1), doorbell(&mut raw, 2, 0));
    raw.send(&first);
    let taken = PolledWrites { writes: 1, all: is_recorded() };
    assert_eq!(poll_writes(&socket, &shared), taken);
    raw.send_with_fds(&second, &[file.as_fd()]);
    assert_eq!(poll_writes(&socket, &shared), PolledWrites { writes: 0, all: false });
    go_on.send(()).unwrap();
    drop(other_raw);
    for path in [&other, &path] {
        let mut raw = Raw::connect(path);
        raw.negotiate();
        raw.write(3, &[42]).ok();
    }
    assert_eq!(doorbell_writes(&shared)[0], (1, false));
    assert!(is_recorded() || doorbell_writes(&shared).len() == 1);
}

/// If the poller is preempted while it handles messages of a client, only this client waits for the
/// poller.
#[test]
fn a_preempted_poller_delays_no_other_client() {
    let (server, path, shared) = Server::with_device(Limits::default());
    let (other, other_shared, _) = server.add("other");
    let (mut raw, socket) = share(&path, &shared);
    eventually("the reactor sleeps", || sleeps(server.tid));
    // Another client keeps the reactor busy while the poller starts.
    let (busy, is_busy) = std::sync::mpsc::channel();
    let (go_on, wait) = std::sync::mpsc::channel();
    *other_shared.hook.lock().unwrap() = Some(Box::new(move || {
        busy.send(()).unwrap();
        wait.recv().unwrap();
    }));
    let mut other_raw = Raw::attach(&other);
    let write = access(0, HOOK, 1);
    let posted = header_flags::NO_REPLY;
    let bytes = other_raw.message(command::REGION_WRITE, posted, &[write.as_bytes(), &[1]]);
    other_raw.send(&bytes);
    is_busy.recv().unwrap();
    ring(&mut raw, 1);
    let (began, has_begun) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (poller, seen) = (socket, Arc::clone(&shared));
    let poller = std::thread::spawn(move || {
        poller.poll_writes(&mut |_, _, data| {
            began.send(()).unwrap();
            let _ = released.recv();
            seen.doorbell_writes.lock().unwrap().push((data[0], false));
            true
        })
    });
    has_begun.recv().unwrap();
    // The write is followed by a message that only the reactor handles.
    let access = access(0, 16, 1);
    let bytes = raw.message(command::REGION_WRITE, 0, &[access.as_bytes(), &[77]]);
    raw.send(&bytes);
    go_on.send(()).unwrap();
    other_raw.write(3, &[42]).ok();
    drop(release);
    poller.join().unwrap();
    raw.reply().ok();
    assert_eq!(doorbell_writes(&shared), [(1, false)]);
    assert_eq!(raw.read(16, 1).ok()[16..], [77]);
}

#[test]
fn messages_with_descriptors_go_to_the_reactor() {
    let (_server, _path, shared, mut raw, _listener) = shared_with_poller(Limits::default());
    let map = wire::DmaMap { argsz: 32, flags: 3, offset: 0, address: 0x1000, size: 0x1000 };
    raw.request_with_fds(command::DMA_MAP, &[map.as_bytes()], &[memfd(0x1000)]).ok();
    assert_eq!(shared.log().last().unwrap(), "map 0x1000+0x1000 rw at 0x0");
    // If a doorbell write has a descriptor, the reactor handles the message.
    let bytes = doorbell(&mut raw, 9, 0);
    let file = memfd(1);
    raw.send_with_fds(&bytes, &[std::os::fd::AsFd::as_fd(&file)]);
    raw.reply().ok();
    assert_eq!(doorbell_writes(&shared), [(9, true)]);
}

#[test]
fn half_a_message_is_left_to_the_reactor() {
    let (server, _path, shared, mut raw, poller) = shared_with_poller(short_limits());
    let bytes = doorbell(&mut raw, 1, header_flags::NO_REPLY);
    let (first, second) = bytes.split_at(7);
    let before = poller.polled().len();
    raw.send(first);
    eventually("a poll of the socket", || poller.polled().len() > before);
    assert_eq!(poller.polled().last(), Some(&PolledWrites { writes: 0, all: false }));
    raw.send(second);
    assert_eq!(wait_doorbell_writes(&shared, 1), [(1, true)]);
    wait_idle(&server, &poller);
    ring(&mut raw, 2);
    assert_eq!(wait_doorbell_writes(&shared, 2), [(1, true), (2, false)]);
    // The message is incomplete. The reactor waits for the rest until a timeout, and then closes
    // the connection.
    let bytes = doorbell(&mut raw, 3, header_flags::NO_REPLY);
    raw.send(&bytes[..20]);
    raw.assert_closed();
    shared.wait_log("disconnected");
}

#[test]
fn a_flood_of_doorbell_writes_is_taken_in_parts() {
    let (_server, _path, shared, mut raw, poller) = shared_with_poller(Limits::default());
    let mut flood = Vec::new();
    (0..=255).for_each(|value| flood.extend(doorbell(&mut raw, value, header_flags::NO_REPLY)));
    raw.send(&flood);
    let writes = wait_doorbell_writes(&shared, 256);
    assert!(writes.iter().map(|(value, _)| *value).eq(0..=255), "in order: {writes:?}");
    assert!(poller.polled().iter().all(|polled| polled.writes <= 16), "{:?}", poller.polled());
}

#[test]
fn garbage_on_a_shared_socket_ends_the_connection() {
    let (_server, path, shared, mut raw, _listener) = shared_with_poller(Limits::default());
    raw.send(&[0xff; 64]);
    raw.assert_closed();
    shared.wait_log("disconnected");
    assert_eq!(Raw::attach(&path).read(0, 4).ok().len(), 20);
}

#[test]
fn a_disconnect_on_a_shared_socket_frees_the_device() {
    let (_server, path, shared, mut raw, mut poller) = shared_with_poller(Limits::default());
    ring(&mut raw, 1);
    drop(raw);
    shared.wait_log("disconnected");
    assert_eq!(doorbell_writes(&shared).len(), 1, "writes before the disconnect count");
    // After a disconnect, the shared socket of the old client has no effect, neither on the device
    // nor on the next client.
    let (mut next, socket) = share(&path, &shared);
    let old = poller.stop().unwrap();
    assert!(old.watch(&poller.epoll, TOKEN).is_err());
    assert_eq!(poll_writes(&old, &shared), PolledWrites { writes: 0, all: false });
    drop(old);
    assert_eq!(next.read(0, 4).ok().len(), 20);
    socket.watch(&poller.epoll, TOKEN).unwrap();
    assert_eq!(next.read(0, 4).ok().len(), 20);
}

#[test]
fn a_device_with_a_shared_socket_can_be_removed() {
    let (server, _path, shared, mut raw, _listener) = shared_with_poller(Limits::default());
    let (path, other, port) = server.add("other");
    let (mut second, socket) = share(&path, &other);
    let epoll = Poller::epoll();
    socket.watch(&epoll, TOKEN).unwrap();
    let _ = server.handle.remove(port).recv();
    second.assert_closed();
    assert_eq!(other.log().last().unwrap(), "disconnected");
    let mut server = server;
    server.stop();
    raw.assert_closed();
    assert_eq!(shared.log().last().unwrap(), "disconnected");
}

/// Keeps the reactor busy in the device of `raw`, until the channel gets a message or is dropped.
fn hold_reactor(raw: &mut Raw, shared: &TestDeviceState) -> std::sync::mpsc::Sender<()> {
    let (go, gone) = std::sync::mpsc::channel();
    *shared.hook.lock().unwrap() = Some(Box::new(move || {
        let _ = gone.recv();
    }));
    let access = access(0, HOOK, 1);
    let payload = [access.as_bytes(), &[1]];
    let message = raw.message(command::REGION_WRITE, header_flags::NO_REPLY, &payload);
    raw.send(&message);
    eventually("the reactor is busy", || shared.hook.lock().unwrap().is_none());
    go
}

#[test]
fn a_doorbell_write_between_the_reactors_last_read_and_its_sleep_is_not_lost() {
    let (_server, _path, shared, mut raw, mut poller) = shared_with_poller(Limits::default());
    let socket = poller.stop();
    // The reactor has read all messages. It polls the socket again only after an event.
    let go = hold_reactor(&mut raw, &shared);
    let epoll = Arc::clone(&poller.epoll);
    epoll::delete(&epoll, &poller.stop).unwrap();
    let poller = Poller::start(epoll, socket, &shared);
    ring(&mut raw, 5);
    eventually("the poller was woken", || !poller.polled().is_empty());
    // The poller may be woken several times before the reactor continues. It must handle no write.
    let nothing = PolledWrites { writes: 0, all: false };
    assert!(poller.polled().iter().all(|polled| *polled == nothing), "{:?}", poller.polled());
    go.send(()).unwrap();
    assert_eq!(wait_doorbell_writes(&shared, 1), [(5, true)]);
}

#[test]
fn a_doorbell_write_after_the_poller_stopped_is_not_lost() {
    let (server, _path, shared, mut raw, mut poller) = shared_with_poller(Limits::default());
    let socket = poller.stop().unwrap();
    let epoll = Arc::clone(&poller.epoll);
    epoll::delete(&epoll, &poller.stop).unwrap();
    // Another thread sleeps in the epoll instance of the stopped poller, as a thread that has other
    // events.
    let stopped = Poller::start(epoll, None, &shared);
    let (path, other, _) = server.add("other");
    let mut second = Raw::attach(&path);
    let go = hold_reactor(&mut second, &other);
    drop(socket);
    ring(&mut raw, 6);
    eventually("a wakeup of the poller", || !stopped.polled().is_empty());
    go.send(()).unwrap();
    assert_eq!(wait_doorbell_writes(&shared, 1), [(6, true)]);
    // From here on, only the reactor polls the socket.
    for value in 0..20 {
        ring(&mut raw, value);
    }
    assert!(wait_doorbell_writes(&shared, 21).iter().all(|(_, by_reactor)| *by_reactor));
    assert_eq!(stopped.polled().len(), 1);
}

/// Generator of deterministic pseudo-random numbers (SplitMix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27) % sides
    }
}

/// The two threads poll in a random order. No message may be lost, repeated or reordered.
#[test]
fn every_message_is_handled_once_and_in_order() {
    for seed in 0..12 {
        let mut dice = Dice(seed);
        let (_server, path, shared) = Server::with_device(Limits::default());
        let (mut raw, socket) = share(&path, &shared);
        let epoll = Poller::epoll();
        socket.watch(&epoll, TOKEN).unwrap();
        let mut poller = Poller::start(epoll, Some(socket), &shared);
        let mut rings = 0_u8;
        for _ in 0..200 {
            let mut bytes = Vec::new();
            let mut replies = 0;
            for _ in 0..=dice.roll(3) {
                match dice.roll(8) {
                    0 => {
                        let access = access(0, 0, 4);
                        let payload = [access.as_bytes()];
                        bytes.extend(raw.message(command::REGION_READ, 0, &payload));
                        replies += 1;
                    }
                    1 => {
                        bytes.extend(doorbell(&mut raw, rings, 0));
                        replies += 1;
                        rings = rings.wrapping_add(1);
                    }
                    _ => {
                        bytes.extend(doorbell(&mut raw, rings, header_flags::NO_REPLY));
                        rings = rings.wrapping_add(1);
                    }
                }
            }
            // The message is sent in one piece or in two.
            let at = if dice.roll(4) == 0 { dice.roll(bytes.len() as u64) as usize } else { 0 };
            raw.send(&bytes[..at]);
            if dice.roll(2) == 0 {
                std::thread::yield_now();
            }
            raw.send(&bytes[at..]);
            (0..replies).for_each(|_| drop(raw.reply().ok()));
            match dice.roll(40) {
                // Replaces the poller. A write arrives in between, as if the poller were awake for
                // a while. The new poller may have no socket.
                0 => {
                    let socket = poller.stop();
                    let (epoll, kept) = (Arc::clone(&poller.epoll), dice.roll(2) == 0);
                    epoll::delete(&epoll, &poller.stop).unwrap();
                    ring(&mut raw, rings);
                    rings = rings.wrapping_add(1);
                    poller = Poller::start(epoll, socket.filter(|_| kept), &shared);
                }
                1 => poller.wait_asleep(),
                _ => {}
            }
        }
        raw.read(0, 1).ok();
        let values: Vec<_> = doorbell_writes(&shared).iter().map(|(value, _)| *value).collect();
        assert_eq!(values.last(), Some(&rings.wrapping_sub(1)), "seed {seed}");
        assert!(values.windows(2).all(|w| w[0].wrapping_add(1) == w[1]), "seed {seed}: {values:?}");
    }
}

#[test]
fn a_frozen_server_has_taken_the_socket_back() {
    if !is_recorded() {
        // Without checkpoints, a server is not replaced.
        return;
    }
    let (mut server, _path, shared, mut raw, poller) = shared_with_poller(Limits::default());
    ring(&mut raw, 0);
    assert_eq!(wait_doorbell_writes(&shared, 1), [(0, false)]);
    let old = server.freeze();
    let polled = poller.polled().len();
    (1..=5).for_each(|value| ring(&mut raw, value));
    // If the poller had been woken, it would have polled the socket before it slept again.
    poller.wait_asleep();
    assert_eq!(poller.polled().len(), polled, "the poller is not woken");
    assert_eq!(doorbell_writes(&shared).len(), 1);
    let new = server.successor(&[&shared]);
    old.release_to_successor();
    server.run(new);
    let writes = wait_doorbell_writes(&shared, 6);
    assert_eq!(writes[1..], [(1, true), (2, true), (3, true), (4, true), (5, true)]);
    // The next server shares the socket in the same way.
    let socket = request_shared_socket(&mut raw, &shared);
    let epoll = Poller::epoll();
    socket.watch(&epoll, TOKEN).unwrap();
    let poller = Poller::start(epoll, Some(socket), &shared);
    wait_idle(&server, &poller);
    ring(&mut raw, 6);
    assert_eq!(wait_doorbell_writes(&shared, 7)[6], (6, false));
}

/// The poller has received a message with a descriptor, and the reactor has not handled it. If the
/// server is replaced now, the message is not lost.
#[test]
fn messages_received_by_the_poller_are_handed_over() {
    if !is_recorded() {
        // Without checkpoints, a server is not replaced.
        return;
    }
    let (mut server, path, shared) = Server::with_device(Limits::default());
    let (other, other_shared, _) = server.add("other");
    let (mut raw, socket) = share(&path, &shared);
    let mut other_raw = Raw::attach(&other);
    let go = hold_reactor(&mut other_raw, &other_shared);
    // The reactor must freeze before it handles the next message, so the freeze is requested first.
    server.handle.freeze();
    let map = wire::DmaMap { argsz: 32, flags: 3, offset: 0, address: 0x1000, size: 0x1000 };
    let bytes = raw.message(command::DMA_MAP, 0, &[map.as_bytes()]);
    let file = memfd(0x1000);
    raw.send_with_fds(&bytes, &[file.as_fd()]);
    assert_eq!(poll_writes(&socket, &shared), PolledWrites { writes: 0, all: false });
    go.send(()).unwrap();
    let old = server.frozen();
    assert!(shared.maps.lock().unwrap().is_empty());
    let new = server.successor(&[&shared, &other_shared]);
    old.release_to_successor();
    server.run(new);
    raw.reply().ok();
    assert_eq!(shared.maps.lock().unwrap().len(), 1);
}

#[test]
fn no_message_is_lost_in_a_replacement_with_a_poller() {
    if !is_recorded() {
        // Without checkpoints, a server is not replaced.
        return;
    }
    for seed in 0..4 {
        let mut dice = Dice(100 + seed);
        let (mut server, path, shared) = Server::with_device(Limits::default());
        let mut raw = Raw::attach(&path);
        let mut rings = 0_u8;
        for _ in 0..40 {
            let socket = request_shared_socket(&mut raw, &shared);
            let epoll = Poller::epoll();
            // The call fails while the reactor uses the session, so it is repeated.
            eventually("the registration in epoll", || socket.watch(&epoll, TOKEN).is_ok());
            let _poller = Poller::start(epoll, Some(socket), &shared);
            let mut replies = 0;
            for _ in 0..dice.roll(4) + 1 {
                for _ in 0..dice.roll(20) {
                    let posted = dice.roll(3) != 0;
                    let flags = if posted { header_flags::NO_REPLY } else { 0 };
                    let bytes = doorbell(&mut raw, rings, flags);
                    rings = rings.wrapping_add(1);
                    replies += u32::from(!posted);
                    let at = if dice.roll(4) == 0 { dice.roll(bytes.len() as u64) } else { 0 };
                    raw.send(&bytes[..at as usize]);
                    raw.send(&bytes[at as usize..]);
                }
                match dice.roll(3) {
                    0 => server.replace(&[&shared]),
                    1 => {
                        let old = server.freeze();
                        server.run(old);
                    }
                    _ => {}
                }
            }
            (0..replies).for_each(|_| drop(raw.reply().ok()));
        }
        raw.read(0, 1).ok();
        let values: Vec<_> = doorbell_writes(&shared).iter().map(|(value, _)| *value).collect();
        assert_eq!(values.last(), Some(&rings.wrapping_sub(1)), "seed {seed}");
        assert!(values.windows(2).all(|w| w[0].wrapping_add(1) == w[1]), "seed {seed}: {values:?}");
    }
}
