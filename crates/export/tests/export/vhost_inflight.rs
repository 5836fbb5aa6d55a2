//! In-flight tracking memory: its contents, and frontends that share invalid memory.

use crate::vhost::{Guest, MEMORY, QUEUE, READ, Rig, WRITE, each_block_size};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use shadowbell_disk::{DiskError, Stopped};
use shadowbell_testing::wait;
use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Frontend, VhostUserFrontend};

const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_INFLIGHT_FD: u32 = 32;
const INFLIGHT_SHMFD: u64 = 1 << 12;
/// Size in bytes of the tracking memory of a queue of [`QUEUE`] descriptors.
const REGION: u64 = (16 + 16 * QUEUE as u64).next_multiple_of(64);

fn memory(len: u64) -> File {
    let file = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file.into()
}

/// Connects a guest whose frontend shares `file` as its tracking memory.
fn guest(rig: &Rig, shape: &VhostUserInflight, file: &File) -> Guest {
    guest_with(rig, 2, shape, file)
}

fn guest_with(rig: &Rig, queues: usize, shape: &VhostUserInflight, file: &File) -> Guest {
    let prepare = |frontend: &mut Frontend| {
        frontend.set_inflight_fd(shape, file.as_raw_fd()).unwrap();
    };
    Guest::connect_prepared(rig, queues, 0, memory(MEMORY), QUEUE, prepare)
}

fn words(file: &File, queue: u64) -> Vec<u64> {
    let mut bytes = vec![0; REGION as usize];
    file.read_exact_at(&mut bytes, queue * REGION).unwrap();
    let words = bytes.chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
    words.collect()
}

/// The layout of the tracking memory is that of the vhost-user specification.
#[test]
fn requests_in_flight_are_recorded_in_inflight_memory() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let mut made = None;
        let mut guest = {
            let prepare = |frontend: &mut Frontend| {
                let queues = VhostUserInflight::new(0, 0, 2, QUEUE);
                let (shape, file) = frontend.get_inflight_fd(&queues).unwrap();
                let VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size } = shape;
                assert_eq!((mmap_offset, num_queues, queue_size), (0, 2, QUEUE));
                assert!(mmap_size >= 2 * REGION && file.metadata().unwrap().len() >= mmap_size);
                assert!(ftruncate(&file, 0).is_err(), "nobody can cut it off");
                frontend.set_inflight_fd(&shape, file.as_raw_fd()).unwrap();
                made = Some(file);
            };
            Guest::connect_prepared(&rig, 2, 0, memory(MEMORY), QUEUE, prepare)
        };
        let file = made.unwrap();
        let ring = &mut guest.rings[1];
        assert_eq!(ring.run(WRITE, 0, &[1; 512], 0), 0);
        rig.backing.instruct(|instructions| instructions.hold = true);
        for slot in [5, 2, 9] {
            ring.submit(slot, WRITE, slot.into(), &[7; 512], 0);
        }
        rig.backing.expect(4);
        let mark = |in_flight: u8| u64::from_ne_bytes([in_flight, 0, 0, 0, 0, 0, 0, 0]);
        let header = |last: u16, used: u16| {
            let fields = [1, QUEUE, last, used].map(u16::to_ne_bytes).concat();
            u64::from_ne_bytes(fields.try_into().unwrap())
        };
        let found = words(&file, 1);
        assert_eq!(found[..2], [0, header(0, 1)]);
        for (slot, number) in [(5, 1), (2, 2), (9, 3)] {
            // Each request slot of the test has four descriptors.
            assert_eq!(found[2 + 2 * 4 * slot..][..2], [mark(1), number], "slot {slot}");
        }
        let in_flight =
            |words: &[u64]| words[2..].iter().step_by(2).filter(|word| **word == mark(1)).count();
        assert_eq!((in_flight(&found), in_flight(&words(&file, 0))), (3, 0));
        rig.backing.instruct(|instructions| instructions.hold = false);
        let mut last = 0;
        for _ in 0..3 {
            last = ring.take().0 * 4;
        }
        let settled = || {
            let found = words(&file, 1);
            found[1] == header(last, 4) && in_flight(&found) == 0
        };
        wait::until("a region without requests in flight", settled);
        drop(guest);
        rig.end(0);
    });
}

/// A VMM that pauses its VM or adds memory stops or disables the queues. The disk submits the held
/// requests again when the queues are served again.
#[test]
fn requests_that_the_disk_holds_outlast_changes_of_the_queue_and_the_memory() {
    each_block_size(|| {
        let (rig, disk) = Rig::stopping();
        let (shape, file) = (VhostUserInflight::new(2 * REGION, 0, 2, QUEUE), memory(2 * REGION));
        let mut guest = guest_with(&rig, 1, &shape, &file);
        let wait_for_stop = |times| {
            let is_it = |stopped: Stopped| stopped.times == times && stopped.held == 2;
            wait::until("held requests", || disk.stopped().is_some_and(is_it));
        };
        rig.backing.instruct(|instructions| instructions.fail = Some(DiskError::NoSpace));
        for slot in [1, 2] {
            guest.rings[0].submit(slot, WRITE, 8 * u64::from(slot), &[7; 512], 0);
        }
        wait_for_stop(1);
        guest.frontend.set_vring_enable(0, false).unwrap();
        wait::until("no held requests", || disk.stopped().is_none());
        guest.frontend.set_vring_enable(0, true).unwrap();
        wait_for_stop(2);
        guest.share_again();
        wait_for_stop(3);
        let base = guest.frontend.get_vring_base(0).unwrap();
        assert_eq!((base, disk.stopped()), (2, None));
        assert!(guest.rings[0].has_nothing());
        guest.start_again(0, base);
        wait_for_stop(4);
        assert!(guest.rings[0].has_nothing());
        rig.backing.instruct(|instructions| instructions.fail = None);
        assert!(disk.resume());
        let mut answers = [guest.rings[0].take(), guest.rings[0].take()];
        answers.sort_unstable();
        assert_eq!(answers, [(1, 1, 0), (2, 1, 0)]);
        assert_eq!(guest.rings[0].run(READ, 16, b"", 512), 0);
        assert_eq!(guest.rings[0].bytes(0, 512), [7; 512]);
        drop(guest);
        rig.end(0);
    });
}

fn send(socket: &UnixStream, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut bytes = [request, 1, payload.len() as u32].map(u32::to_ne_bytes).concat();
    bytes.extend(payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn assert_sent_away(mut socket: UnixStream, what: &str) {
    socket.set_read_timeout(Some(wait::LIMIT)).unwrap();
    let end = socket.read(&mut [0; 64]);
    // If a peer closes its socket before it has read a whole message, the connection is reset.
    let is_reset = end.as_ref().is_err_and(|error| error.kind() == ErrorKind::ConnectionReset);
    assert!(is_reset || matches!(end, Ok(0)), "{what}: {end:?}");
}

/// Checks that the device serves the next frontend and can be stopped.
fn assert_served(rig: Rig) {
    let mut guest = Guest::connect(&rig, 2, 0);
    for ring in &mut guest.rings {
        assert_eq!(ring.run(WRITE, 1, &[3; 512], 0), 0);
        assert_eq!(ring.run(READ, 1, b"", 512), 0);
    }
    drop(guest);
    rig.end(0);
}

#[test]
fn messages_that_make_no_sense_end_the_connection() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let file = OwnedFd::from(memory(2 * REGION));
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let payload = |len: u64, offset: u64, queues: u16, entries: u16| {
            let mut payload = [len, offset].map(u64::to_ne_bytes).concat();
            payload.extend([queues, entries, 0, 0].map(u16::to_ne_bytes).concat());
            payload
        };
        let good = payload(2 * REGION, 0, 2, QUEUE);
        let one = &[file.as_fd()][..];
        for (what, payload, fds) in [
            ("no queues", payload(2 * REGION, 0, 0, QUEUE), one),
            ("too many queues", payload(3 * REGION, 0, 3, QUEUE), one),
            ("all queues", payload(u64::MAX, 0, u16::MAX, u16::MAX), one),
            ("no entries", payload(2 * REGION, 0, 2, 0), one),
            ("too many entries", payload(1 << 20, 0, 2, 1025), one),
            ("too few bytes", payload(2 * REGION - 1, 0, 2, QUEUE), one),
            ("an odd place", payload(2 * REGION, 8, 2, QUEUE), one),
            ("a place that is none", payload(2 * REGION, u64::MAX - 4095, 2, QUEUE), one),
            ("half a message", good[..16].to_vec(), one),
            ("a long message", [&good[..], &[0; 8]].concat(), one),
            ("no descriptor", good.clone(), &[]),
            ("two descriptors", good.clone(), &[file.as_fd(), file.as_fd()]),
            ("an eventfd", good.clone(), &[event.as_fd()]),
        ] {
            let socket = UnixStream::connect(rig.socket()).unwrap();
            send(&socket, SET_PROTOCOL_FEATURES, &INFLIGHT_SHMFD.to_ne_bytes(), &[]);
            send(&socket, SET_INFLIGHT_FD, &payload, fds);
            assert_sent_away(socket, what);
        }
        // The frontend sends a message whose protocol feature was not negotiated.
        let socket = UnixStream::connect(rig.socket()).unwrap();
        send(&socket, SET_INFLIGHT_FD, &good, one);
        assert_sent_away(socket, "no feature");
        assert_served(rig);
    });
}

#[test]
fn invalid_inflight_memory_ends_the_connection() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let shape = VhostUserInflight::new(2 * REGION, 0, 2, QUEUE);
        let header = |version: u16, entries: u16, last: u16, used: u16| {
            [version, entries, last, used].map(u16::to_ne_bytes).concat()
        };
        for (what, at, bytes) in [
            ("features", 0, vec![1; 8]),
            ("a version", 8, header(2, QUEUE, 0, 0)),
            ("entries", 8, header(1, QUEUE + 1, 0, 0)),
            // In these cases a request is marked as in flight, and the used ring's index is 0.
            ("a head", 8, [header(1, QUEUE, QUEUE, 0xffff), vec![1]].concat()),
            ("a used ring", 8, [header(1, QUEUE, 0, 0x8000), vec![1]].concat()),
        ] {
            let file = memory(2 * REGION);
            file.write_all_at(&bytes, at).unwrap();
            // The guest has only one queue, because the device disconnects when it starts the first
            // one.
            let mut guest = guest_with(&rig, 1, &shape, &file);
            wait::until(&format!("a refusal of {what}"), || !guest.is_served());
            let mut after = vec![0; bytes.len()];
            file.read_exact_at(&mut after, at).unwrap();
            assert_eq!(after, bytes, "{what} was changed");
        }
        assert_served(rig);
    });
}

#[test]
fn memory_that_is_cut_off_ends_the_connection() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let shape = VhostUserInflight::new(2 * REGION, 0, 2, QUEUE);
        let file = memory(2 * REGION);
        let mut guest = guest(&rig, &shape, &file);
        assert_eq!(guest.rings[0].run(WRITE, 0, &[1; 512], 0), 0);
        ftruncate(&file, 0).unwrap();
        guest.rings[0].submit(0, WRITE, 0, &[1; 512], 0);
        wait::until("the end of the connection", || !guest.is_served());
        drop(guest);
        assert_served(rig);
    });
}
