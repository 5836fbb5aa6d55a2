//! Somebody other than the reactor hears a client as well, for what only wakes it.

mod common;

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use common::*;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use shadowbell_vfio_user::Errno;
use shadowbell_vfio_user::server::{Limits, PolledWrites, SharedSocket};
use shadowbell_vfio_user::wire::{self, command, header_flags};
use zerocopy::IntoBytes;

const TOKEN: u64 = 7;
const STOP: u64 = 8;

/// What a sleeper and its test share.
#[derive(Default)]
struct Bed {
    /// It is about to wait, or waits.
    down: AtomicBool,
    thread: AtomicU32,
    /// What it has heard, each time.
    heard: Mutex<Vec<PolledWrites>>,
}

/// A thread that sleeps until it hears something.
struct Listener {
    epoll: Arc<OwnedFd>,
    stop: OwnedFd,
    bed: Arc<Bed>,
    thread: Option<JoinHandle<Option<SharedSocket>>>,
}

impl Listener {
    fn epoll() -> Arc<OwnedFd> {
        Arc::new(epoll::create(CreateFlags::CLOEXEC).unwrap())
    }

    /// Sleeps in `epoll`; takes writes at [`BELL`] that come by `socket`, if it is not told to be deaf.
    fn start(epoll: Arc<OwnedFd>, socket: Option<SharedSocket>, shared: &Arc<Shared>) -> Self {
        let stop = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        epoll::add(&epoll, &stop, EventData::new_u64(STOP), EventFlags::IN).unwrap();
        let bed = Arc::<Bed>::default();
        let (shared, ours, waits) = (Arc::clone(shared), Arc::clone(&bed), Arc::clone(&epoll));
        let thread = std::thread::spawn(move || {
            ours.thread.store(gettid(), Ordering::SeqCst);
            loop {
                ours.down.store(true, Ordering::SeqCst);
                let tokens = wait(&waits, true);
                ours.down.store(false, Ordering::SeqCst);
                for token in tokens {
                    match &socket {
                        _ if token == STOP => return socket,
                        Some(socket) => {
                            let heard = poll_writes(socket, &shared);
                            ours.heard.lock().unwrap().push(heard);
                        }
                        None => {
                            ours.heard.lock().unwrap().push(PolledWrites { writes: 0, all: true })
                        }
                    }
                }
            }
        });
        let listener = Self { epoll, stop, bed, thread: Some(thread) };
        listener.wait_asleep();
        listener
    }

    fn wait_asleep(&self) {
        eventually("the listener sleeps", || {
            self.bed.down.load(Ordering::SeqCst) && sleeps(self.bed.thread.load(Ordering::SeqCst))
        });
    }

    fn heard(&self) -> Vec<PolledWrites> {
        self.bed.heard.lock().unwrap().clone()
    }

    fn stop(&mut self) -> Option<SharedSocket> {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).unwrap();
        self.thread.take()?.join().unwrap()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The tokens that an epoll instance reports.
fn wait(epoll: &OwnedFd, blocks: bool) -> Vec<u64> {
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut events = [const { MaybeUninit::uninit() }; 8];
    match epoll::wait(epoll, &mut events[..], if blocks { None } else { Some(&now) }) {
        Ok((events, _)) => events.iter().map(|event| event.data.u64()).collect(),
        Err(Errno::INTR) => Vec::new(),
        Err(errno) => panic!("{errno}"),
    }
}

fn poll_writes(socket: &SharedSocket, shared: &Shared) -> PolledWrites {
    socket.poll_writes(&mut |region, offset, data| {
        if (region, offset) != (0, BELL) {
            return false;
        }
        shared.rung.lock().unwrap().push((data[0], false));
        true
    })
}

/// A write of `value` at [`BELL`].
fn bell(raw: &mut Raw, value: u8, flags: u32) -> Vec<u8> {
    let access = access(0, BELL, 1);
    raw.message(command::REGION_WRITE, flags, &[access.as_bytes(), &[value]])
}

fn ring(raw: &mut Raw, value: u8) {
    let bytes = bell(raw, value, header_flags::NO_REPLY);
    raw.send(&bytes);
}

/// A client, and the socket of it.
fn lend(path: &Path, shared: &Shared) -> (Raw, SharedSocket) {
    let mut raw = Raw::attach(path);
    shared.wants.store(true, Ordering::SeqCst);
    raw.read(0, 1).ok();
    let mut socket = None;
    eventually("the socket is lent", || {
        socket = shared.shared_sockets.lock().unwrap().pop();
        socket.is_some()
    });
    (raw, socket.unwrap())
}

/// A client that is heard by a sleeping thread first, and then by the reactor.
fn lent(limits: Limits) -> (Server, PathBuf, Arc<Shared>, Raw, Listener) {
    let (server, path, shared) = Server::with_toy(limits);
    let (raw, socket) = lend(&path, &shared);
    let epoll = Listener::epoll();
    socket.watch(&epoll, TOKEN).unwrap();
    let listener = Listener::start(epoll, Some(socket), &shared);
    // The reactor has stepped back when it sleeps again.
    settle(&server, &listener);
    (server, path, shared, raw, listener)
}

/// Waits until nobody has anything to do: they may have left each other notes.
fn settle(server: &Server, listener: &Listener) {
    listener.wait_asleep();
    eventually("the reactor sleeps", || sleeps(server.tid));
    listener.wait_asleep();
}

fn rung(shared: &Shared) -> Vec<(u8, bool)> {
    shared.rung.lock().unwrap().clone()
}

fn wait_rung(shared: &Shared, count: usize) -> Vec<(u8, bool)> {
    eventually("all was rung", || rung(shared).len() >= count);
    rung(shared)
}

#[test]
fn who_sleeps_is_woken_and_the_reactor_is_not() {
    let (server, _path, shared, mut raw, listener) = lent(Limits::default());
    for value in 0..50 {
        ring(&mut raw, value);
        wait_rung(&shared, usize::from(value) + 1);
        settle(&server, &listener);
    }
    assert!(rung(&shared).iter().all(|(_, by_reactor)| !by_reactor), "{:?}", rung(&shared));
    let all = PolledWrites { writes: 1, all: true };
    settle(&server, &listener);
    assert_eq!(listener.heard().iter().filter(|heard| **heard == all).count(), 50);
    // One that wants a reply gets it.
    let bytes = bell(&mut raw, 50, 0);
    raw.send(&bytes);
    assert_eq!(raw.reply().ok(), access(0, BELL, 1).as_bytes());
    assert_eq!(rung(&shared).last(), Some(&(50, false)));
}

#[test]
fn who_is_awake_leaves_it_to_the_reactor() {
    let (_server, _path, shared, mut raw, mut listener) = lent(Limits::default());
    let socket = listener.stop().unwrap();
    for value in 0..50 {
        ring(&mut raw, value);
        wait_rung(&shared, usize::from(value) + 1);
    }
    assert!(rung(&shared).iter().all(|(_, by_reactor)| *by_reactor));
    // What has been read is not reported any more; nor is there anything.
    assert_eq!(wait(&listener.epoll, false), [STOP]);
    assert_eq!(poll_writes(&socket, &shared), PolledWrites { writes: 0, all: true });
}

#[test]
fn what_is_no_bell_is_the_reactors_and_so_is_all_that_follows() {
    let (_server, _path, shared, mut raw, listener) = lent(Limits::default());
    let mut stream = bell(&mut raw, 1, 0);
    stream.extend(bell(&mut raw, 2, 0));
    let access = access(0, 16, 1);
    stream.extend(raw.message(command::REGION_WRITE, 0, &[access.as_bytes(), &[77]]));
    stream.extend(bell(&mut raw, 3, 0));
    raw.send(&stream);
    let mut last = raw.reply().header.id;
    for _ in 0..3 {
        let id = raw.reply().header.id;
        assert_eq!(id, last + 1);
        last = id;
    }
    assert_eq!(rung(&shared), [(1, false), (2, false), (3, true)]);
    assert_eq!(raw.read(16, 1).ok()[16..], [77]);
    let both = PolledWrites { writes: 2, all: false };
    eventually("it was heard so", || listener.heard().contains(&both));
}

#[test]
fn descriptors_are_not_for_others_to_look_at() {
    let (_server, _path, shared, mut raw, _listener) = lent(Limits::default());
    let map = wire::DmaMap { argsz: 32, flags: 3, offset: 0, address: 0x1000, size: 0x1000 };
    raw.request_with_fds(command::DMA_MAP, &[map.as_bytes()], &[memfd(0x1000)]).ok();
    assert_eq!(shared.log().last().unwrap(), "map 0x1000+0x1000 rw at 0x0");
    // Nor are they beside a bell.
    let bytes = bell(&mut raw, 9, 0);
    let file = memfd(1);
    raw.send_with_fds(&bytes, &[std::os::fd::AsFd::as_fd(&file)]);
    raw.reply().ok();
    assert_eq!(rung(&shared), [(9, true)]);
}

#[test]
fn a_half_is_waited_for_by_the_reactor() {
    let (server, _path, shared, mut raw, listener) = lent(impatient());
    let bytes = bell(&mut raw, 1, header_flags::NO_REPLY);
    let (first, second) = bytes.split_at(7);
    let before = listener.heard().len();
    raw.send(first);
    eventually("it was heard", || listener.heard().len() > before);
    assert_eq!(listener.heard().last(), Some(&PolledWrites { writes: 0, all: false }));
    raw.send(second);
    assert_eq!(wait_rung(&shared, 1), [(1, true)]);
    settle(&server, &listener);
    ring(&mut raw, 2);
    assert_eq!(wait_rung(&shared, 2), [(1, true), (2, false)]);
    // And not for ever.
    let bytes = bell(&mut raw, 3, header_flags::NO_REPLY);
    raw.send(&bytes[..20]);
    raw.assert_closed();
    shared.wait_log("disconnected");
}

#[test]
fn a_flood_is_taken_in_small_parts() {
    let (_server, _path, shared, mut raw, listener) = lent(Limits::default());
    let mut flood = Vec::new();
    (0..=255).for_each(|value| flood.extend(bell(&mut raw, value, header_flags::NO_REPLY)));
    raw.send(&flood);
    let rung = wait_rung(&shared, 256);
    assert!(rung.iter().map(|(value, _)| *value).eq(0..=255), "in order: {rung:?}");
    assert!(listener.heard().iter().all(|heard| heard.writes <= 16), "{:?}", listener.heard());
}

#[test]
fn nonsense_ends_the_connection_whoever_hears_it() {
    let (_server, path, shared, mut raw, _listener) = lent(Limits::default());
    raw.send(&[0xff; 64]);
    raw.assert_closed();
    shared.wait_log("disconnected");
    assert_eq!(Raw::attach(&path).read(0, 4).ok().len(), 20);
}

#[test]
fn who_leaves_is_seen_to_leave_and_the_next_one_is_let_in() {
    let (_server, path, shared, mut raw, mut listener) = lent(Limits::default());
    ring(&mut raw, 1);
    drop(raw);
    shared.wait_log("disconnected");
    assert_eq!(rung(&shared).len(), 1, "what it said before counts");
    // The socket of one that is gone is of no use, and of no harm to the next.
    let (mut next, socket) = lend(&path, &shared);
    let old = listener.stop().unwrap();
    assert!(old.watch(&listener.epoll, TOKEN).is_err());
    assert_eq!(poll_writes(&old, &shared), PolledWrites { writes: 0, all: false });
    drop(old);
    assert_eq!(next.read(0, 4).ok().len(), 20);
    socket.watch(&listener.epoll, TOKEN).unwrap();
    assert_eq!(next.read(0, 4).ok().len(), 20);
}

#[test]
fn a_device_is_removed_and_a_server_stopped_while_a_client_is_lent() {
    let (server, _path, shared, mut raw, _listener) = lent(Limits::default());
    let (path, other, port) = server.add("other");
    let (mut second, socket) = lend(&path, &other);
    let epoll = Listener::epoll();
    socket.watch(&epoll, TOKEN).unwrap();
    let _ = server.handle.remove(port).recv();
    second.assert_closed();
    assert_eq!(other.log().last().unwrap(), "disconnected");
    let mut server = server;
    server.stop();
    raw.assert_closed();
    assert_eq!(shared.log().last().unwrap(), "disconnected");
}

/// Keeps the reactor in the device of `raw` until the other end says something, or goes.
fn detain(raw: &mut Raw, shared: &Shared) -> std::sync::mpsc::Sender<()> {
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
fn a_bell_between_the_reactors_last_look_and_its_rest_is_not_lost() {
    let (_server, _path, shared, mut raw, mut listener) = lent(Limits::default());
    let socket = listener.stop();
    // The reactor has read all that there is, and will not look again by itself.
    let go = detain(&mut raw, &shared);
    let epoll = Arc::clone(&listener.epoll);
    epoll::delete(&epoll, &listener.stop).unwrap();
    let listener = Listener::start(epoll, socket, &shared);
    ring(&mut raw, 5);
    eventually("the listener was woken", || !listener.heard().is_empty());
    assert_eq!(listener.heard(), [PolledWrites { writes: 0, all: false }]);
    go.send(()).unwrap();
    assert_eq!(wait_rung(&shared, 1), [(5, true)]);
}

#[test]
fn a_bell_that_rings_for_one_who_has_stopped_to_listen_is_not_lost() {
    let (server, _path, shared, mut raw, mut listener) = lent(Limits::default());
    let socket = listener.stop().unwrap();
    let epoll = Arc::clone(&listener.epoll);
    epoll::delete(&epoll, &listener.stop).unwrap();
    // It sleeps on in the same place, for other things.
    let deaf = Listener::start(epoll, None, &shared);
    let (path, other, _) = server.add("other");
    let mut second = Raw::attach(&path);
    let go = detain(&mut second, &other);
    drop(socket);
    ring(&mut raw, 6);
    eventually("it was woken", || !deaf.heard().is_empty());
    go.send(()).unwrap();
    assert_eq!(wait_rung(&shared, 1), [(6, true)]);
    // From here on the reactor hears alone.
    for value in 0..20 {
        ring(&mut raw, value);
    }
    assert!(wait_rung(&shared, 21).iter().all(|(_, by_reactor)| *by_reactor));
    assert_eq!(deaf.heard().len(), 1);
}

/// Numbers that look random (SplitMix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27) % sides
    }
}

/// Nothing is lost, repeated or out of order, whoever hears it and whenever.
#[test]
fn whatever_happens_when_every_message_counts_once_and_in_its_order() {
    for seed in 0..12 {
        let mut dice = Dice(seed);
        let (_server, path, shared) = Server::with_toy(Limits::default());
        let (mut raw, socket) = lend(&path, &shared);
        let epoll = Listener::epoll();
        socket.watch(&epoll, TOKEN).unwrap();
        let mut listener = Listener::start(epoll, Some(socket), &shared);
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
                        bytes.extend(bell(&mut raw, rings, 0));
                        replies += 1;
                        rings = rings.wrapping_add(1);
                    }
                    _ => {
                        bytes.extend(bell(&mut raw, rings, header_flags::NO_REPLY));
                        rings = rings.wrapping_add(1);
                    }
                }
            }
            // In one piece or in two.
            let at = if dice.roll(4) == 0 { dice.roll(bytes.len() as u64) as usize } else { 0 };
            raw.send(&bytes[..at]);
            if dice.roll(2) == 0 {
                std::thread::yield_now();
            }
            raw.send(&bytes[at..]);
            (0..replies).for_each(|_| drop(raw.reply().ok()));
            match dice.roll(40) {
                // Awake for a while, or no more interested.
                0 => {
                    let socket = listener.stop();
                    let (epoll, kept) = (Arc::clone(&listener.epoll), dice.roll(2) == 0);
                    epoll::delete(&epoll, &listener.stop).unwrap();
                    ring(&mut raw, rings);
                    rings = rings.wrapping_add(1);
                    listener = Listener::start(epoll, socket.filter(|_| kept), &shared);
                }
                1 => listener.wait_asleep(),
                _ => {}
            }
        }
        raw.read(0, 1).ok();
        let rung: Vec<_> = rung(&shared).iter().map(|(value, _)| *value).collect();
        assert_eq!(rung.last(), Some(&rings.wrapping_sub(1)), "seed {seed}");
        assert!(rung.windows(2).all(|w| w[0].wrapping_add(1) == w[1]), "seed {seed}: {rung:?}");
    }
}
