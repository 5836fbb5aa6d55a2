//! Queues that the frontend stops or disables while the guest submits requests.

use crate::vhost::{Guest, LONG_QUEUE, MEMORY, READ, Rig, each_block_size};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shadowbell_testing::wait;
use std::sync::atomic::{AtomicBool, Ordering};
use vhost::vhost_user::VhostUserFrontend;

/// The guest submits requests faster than the device completes them, so the queue always has
/// available requests.
#[test]
fn a_disabled_queue_is_not_read_while_its_guest_submits() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let file = memfd_create("busy", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, MEMORY).unwrap();
        let guest = Guest::connect_with(&rig, 1, 0, file.into(), LONG_QUEUE);
        let Guest { mut frontend, mut rings, .. } = guest;
        let answers = rings[0].answers();
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (ring, enough) = (&mut rings[0], &enough);
            let (begin, began) = std::sync::mpsc::channel();
            scope.spawn(move || ring.never_stop(|| begin.send(()).unwrap(), enough));
            began.recv().unwrap();
            let mut wrong = Vec::new();
            for round in 0..8 {
                frontend.set_vring_enable(0, false).unwrap();
                // Messages are processed in order. So a reply to a later message proves that
                // SET_VRING_ENABLE was processed.
                frontend.get_queue_num().unwrap();
                let then = answers();
                wait::short_pause();
                let now = answers();
                let more = now.wrapping_sub(then);
                if more > 0 {
                    wrong.push(format!("round {round}: {more} more"));
                }
                frontend.set_vring_enable(0, true).unwrap();
                // The guest does not notify the device again. So the device has to check the queue
                // itself when it is enabled.
                wait::until("an answer", || answers() != now);
            }
            enough.store(true, Ordering::Relaxed);
            assert!(wrong.is_empty(), "{wrong:?}");
        });
        drop(frontend);
        rig.end(0);
    });
}

/// Requests that became available before the queue was enabled are executed afterwards.
#[test]
fn requests_of_a_disabled_queue_run_after_it_is_enabled() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let mut guest = Guest::connect(&rig, 1, 0);
        for round in 0..20 {
            guest.frontend.set_vring_enable(0, false).unwrap();
            assert!(guest.is_served());
            guest.rings[0].submit(1, READ, round, b"", 512);
            assert!(guest.rings[0].has_nothing(), "it is not enabled");
            guest.frontend.set_vring_enable(0, true).unwrap();
            assert_eq!(guest.rings[0].take(), (1, 513, 0));
        }
        drop(guest);
        rig.end(0);
    });
}

/// Requests that the disk already executes when the queue is disabled still complete.
#[test]
fn requests_in_flight_complete_while_a_queue_is_disabled() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let mut guest = Guest::connect(&rig, 1, 0);
        rig.backing.instruct(|instructions| instructions.hold = true);
        guest.rings[0].submit(1, READ, 0, b"", 512);
        rig.backing.expect(1);
        guest.frontend.set_vring_enable(0, false).unwrap();
        assert!(guest.is_served());
        guest.rings[0].submit(2, READ, 1, b"", 512);
        rig.backing.instruct(|instructions| instructions.hold = false);
        assert_eq!(guest.rings[0].take(), (1, 513, 0));
        wait::short_pause();
        assert!(guest.rings[0].has_nothing(), "it is not enabled");
        guest.frontend.set_vring_enable(0, true).unwrap();
        assert_eq!(guest.rings[0].take(), (2, 513, 0));
        drop(guest);
        rig.end(0);
    });
}
