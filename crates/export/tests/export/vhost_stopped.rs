//! Queues that the frontend stops or disables while the guest submits requests.

use crate::vhost::{Guest, LONG_QUEUE, MEMORY, READ, Rig, WRITE, each_block_size};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shadowbell_disk::DiskError;
use shadowbell_testing::wait;
use std::sync::atomic::{AtomicBool, Ordering};
use vhost::VhostBackend;
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

/// Without in-flight tracking, nothing records the requests that the disk holds. So they end with
/// an error if the queue is no longer served, and get no answer if the server ends: the frontend
/// connects to the next server process, and continues at the last answer.
#[test]
fn requests_that_the_disk_holds_end_with_a_queue_without_tracking() {
    each_block_size(|| {
        let (rig, disk) = Rig::stopping();
        let mut guest = Guest::connect(&rig, 1, 0);
        rig.backing.instruct(|instructions| instructions.fail = Some(DiskError::NoSpace));
        let hold = |guest: &mut Guest| {
            guest.rings[0].submit(1, WRITE, 0, &[7; 512], 0);
            wait::until("a held write", || disk.stopped().is_some());
        };
        hold(&mut guest);
        guest.share_again();
        assert_eq!(guest.rings[0].take(), (1, 1, 1));
        hold(&mut guest);
        assert_eq!(guest.frontend.get_vring_base(0).unwrap(), 2);
        assert_eq!(guest.rings[0].take(), (1, 1, 1));
        guest.start_again(0, 2);
        hold(&mut guest);
        rig.end(2);
        assert!(guest.rings[0].has_nothing());
    });
}
