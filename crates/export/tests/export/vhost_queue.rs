//! Queues that the frontend reconfigures while the guest submits requests, and requests with long
//! data.

use crate::vhost::{EVENT_IDX, Guest, READ, Rig, Ring, WRITE, each_block_size, short_blocks};
use shadowbell_disk::Op;
use shadowbell_testing::wait;
use std::time::{Duration, Instant};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Guest address of the header of a request, and that of its indirect descriptor table (`TABLE`).
const HEADER: u64 = 0x60_0000;
const TABLE: u64 = 0x60_1000;
/// Data segments of a request, as guest address and length.
const PIECES: [(u64, u32); 4] =
    [(0x10_0000, 300_001), (0x20_0003, 7), (0x30_0000, 400_000), (0x40_0100, 349_592)];

/// Submits a request for the data segments [`PIECES`], with indirect descriptors. For a write, the
/// segments already contain the data.
fn scatter(ring: &mut Ring, kind: u32, sector: u64) {
    const NEXT: u16 = 1;
    const INDIRECT: u16 = 4;
    let mut header = u64::from(kind).to_le_bytes().to_vec();
    header.extend(sector.to_le_bytes());
    ring.write(HEADER, &header);
    ring.write(ring.status(0), &[0xff]);
    let data = if kind == READ { 2 } else { 0 };
    let middle = PIECES.iter().map(|(at, len)| (*at, *len, NEXT | data));
    let ends = ((HEADER, 16, NEXT), (ring.status(0), 1, 2));
    let all = [ends.0].into_iter().chain(middle).chain([ends.1]);
    let entries = all.clone().count() as u32;
    let table = all.zip(1u16..).flat_map(|((at, len, flags), next)| {
        let mut bytes = at.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend([flags, next].map(u16::to_le_bytes).concat());
        bytes
    });
    ring.write(TABLE, &table.collect::<Vec<_>>());
    ring.descriptor(0, TABLE, 16 * entries, INDIRECT, 0);
    ring.offer(0);
}

#[test]
fn long_requests_come_to_the_disk_in_parts_of_a_mebibyte() {
    short_blocks(|| {
        let rig = Rig::new(false);
        let mut guest = Guest::connect(&rig, 1, 0);
        let ring = &mut guest.rings[0];
        let len: u32 = PIECES.iter().map(|(_, len)| len).sum();
        let data: Vec<u8> = (0..len).map(|n| (n ^ n >> 9) as u8).collect();
        let mut from = 0;
        for (at, len) in PIECES {
            ring.write(at, &data[from..from + len as usize]);
            from += len as usize;
        }
        scatter(ring, WRITE, 5);
        assert_eq!(ring.take(), (0, 1, 0));
        PIECES.iter().for_each(|(at, len)| ring.write(*at, &vec![0; *len as usize]));
        scatter(ring, READ, 5);
        assert_eq!(ring.take(), (0, len + 1, 0));
        let mut found = Vec::new();
        for (at, len) in PIECES {
            let mut piece = vec![0; len as usize];
            ring.memory_at(at, &mut piece);
            found.extend(piece);
        }
        assert!(found == data);
        let seen = rig.backing.seen();
        let parts: Vec<_> = seen.iter().map(|seen| (seen.op, seen.offset, seen.len)).collect();
        let (first, second) = ((5 * 512, 1 << 20), (5 * 512 + (1 << 20), 1024));
        let write = Op::Write { fua: false };
        let wanted = [write, Op::Read].map(|op| [(op, first.0, first.1), (op, second.0, second.1)]);
        assert_eq!(parts, wanted.concat());
        drop(guest);
        rig.end(0);
    });
}

/// The frontend changes the memory table, the call eventfd (VHOST_USER_SET_VRING_CALL) and the
/// enable flag of a running queue.
#[test]
fn a_running_queue_survives_new_memory_and_eventfds() {
    for without in [0, EVENT_IDX] {
        each_block_size(|| {
            let rig = Rig::new(false);
            let mut guest = Guest::connect(&rig, 2, without);
            for round in 0..10u8 {
                assert_eq!(guest.rings[1].run(WRITE, round.into(), &[round; 512], 0), 0);
                match round % 3 {
                    0 => guest.share_again(),
                    1 => {
                        let call = guest.rings[1].call.try_clone().unwrap();
                        guest.frontend.set_vring_call(1, &call).unwrap();
                    }
                    _ => {
                        guest.frontend.set_vring_enable(1, false).unwrap();
                        // Messages are processed in order. So a reply to a later message proves
                        // that SET_VRING_ENABLE was processed.
                        assert!(guest.is_served());
                        guest.rings[1].submit(2, READ, round.into(), b"", 512);
                        wait::short_pause();
                        assert!(guest.rings[1].has_nothing(), "it is not enabled");
                        guest.frontend.set_vring_enable(1, true).unwrap();
                        assert_eq!(guest.rings[1].take(), (2, 513, 0));
                    }
                }
                assert_eq!(guest.rings[1].run(READ, round.into(), b"", 512), 0);
                assert_eq!(guest.rings[1].bytes(0, 512), [round; 512]);
            }
            // Stops the queue, and starts it again at the same index.
            let place = guest.frontend.get_vring_base(1).unwrap();
            let rings = &guest.rings;
            assert_eq!(place, u32::from(rings[1].count()));
            guest.frontend.set_vring_base(1, place as u16).unwrap();
            guest.frontend.set_vring_call(1, &rings[1].call).unwrap();
            guest.frontend.set_vring_kick(1, &rings[1].kick).unwrap();
            assert_eq!(guest.rings[1].run(READ, 9, b"", 512), 0);
            assert_eq!(guest.rings[1].bytes(0, 512), [9; 512]);
            drop(guest);
            rig.end(0);
        });
    }
}

/// A new call eventfd is signalled by the device when the frontend sets it. The reason: the last
/// completion may have been signalled to the previous eventfd after the frontend has last read it.
#[test]
fn a_new_call_eventfd_is_signalled() {
    short_blocks(|| {
        let rig = Rig::new(false);
        let mut guest = Guest::connect(&rig, 2, 0);
        assert_eq!(guest.rings[0].run(READ, 0, b"", 512), 0);
        let call = EventFd::new(EFD_NONBLOCK).unwrap();
        guest.frontend.set_vring_call(0, &call).unwrap();
        // Messages are processed in order.
        assert!(guest.is_served());
        assert_eq!(call.read().unwrap(), 1);
        drop(guest);
        rig.end(0);
    });
}

/// The frontend stops a queue repeatedly while the queue's thread begins to poll it. Each time the
/// thread must stop polling, and execute the guest's requests after the next start.
#[test]
fn a_queue_is_stopped_at_any_moment() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let mut guest = Guest::connect(&rig, 1, 0);
        assert_eq!(guest.rings[0].run(WRITE, 3, &[3; 512], 0), 0);
        for round in 0..300 {
            guest.rings[0].kick.write(1).unwrap();
            // The thread begins to poll the queue a few microseconds after the notification.
            let until = Instant::now() + Duration::from_micros(round % 30);
            while Instant::now() < until {}
            if round % 2 == 0 {
                let place = guest.frontend.get_vring_base(0).unwrap();
                assert_eq!(place, u32::from(guest.rings[0].count()));
                let ring = &guest.rings[0];
                guest.frontend.set_vring_base(0, place as u16).unwrap();
                guest.frontend.set_vring_call(0, &ring.call).unwrap();
                guest.frontend.set_vring_kick(0, &ring.kick).unwrap();
            } else {
                guest.frontend.set_vring_enable(0, false).unwrap();
                guest.frontend.set_vring_enable(0, true).unwrap();
            }
            if round % 10 < 2 {
                assert_eq!(guest.rings[0].run(READ, 3, b"", 512), 0);
            }
        }
        drop(guest);
        rig.end(0);
    });
}

/// A thread that polls an idle queue sleeps after a short time.
#[test]
fn a_queue_without_requests_keeps_no_thread_busy() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let mut guest = Guest::connect(&rig, 2, 0);
        for _ in 0..50 {
            assert_eq!(guest.rings[0].run(READ, 0, b"", 512), 0);
        }
        let used = || {
            let times = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
            Duration::new(times.tv_sec as u64, times.tv_nsec as u32)
        };
        // The condition is repeated, because other tests of this process also use processor time,
        // until they have ended.
        wait::until("an idle process", || {
            let before = used();
            // A thread that polls would use processor time for most of this sleep.
            std::thread::sleep(Duration::from_millis(40));
            // An idle process uses less processor time than this.
            used() - before < Duration::from_millis(10)
        });
        drop(guest);
        rig.end(0);
    });
}
