//! Each recovery step in a test of its own, with driver and controller in one process.

use crate::direct::Direct;
use crate::{emulated, inject, options};
use ::shadowbell_disk::Disk;
use ::shadowbell_disk_file::MemDisk;
use shadowbell_controller::Controller as Emulated;
use shadowbell_controller::faults::Fault;
use shadowbell_driver::{
    AttachOptions, BufferPool, Command, Completion, Controller, Doorbells, QueueError, QueuePair,
    Recovery, RecoveryStats, Timeouts,
};
use shadowbell_spec::Status;
use shadowbell_spec::nvm::CopyRange;
use shadowbell_spec::opcode::AdminOpcode;
use shadowbell_testing::wait::{self, LIMIT};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// A controller, the driver attached to it, and its queue.
struct Rig {
    emulated: Emulated,
    controller: Controller,
    queue: QueuePair,
    pool: BufferPool,
}

fn rig_with(options: &AttachOptions) -> Rig {
    let disk: Arc<dyn Disk> = Arc::new(MemDisk::new(4096, 512).unwrap());
    let emulated = emulated(disk);
    let transport = Arc::new(Direct(emulated.clone()));
    let mut controller = Controller::attach(transport, options).unwrap();
    let queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(64, 4096).unwrap();
    Rig { emulated, controller, queue, pool }
}

fn rig() -> Rig {
    rig_with(&options())
}

fn next(queue: &mut QueuePair) -> Completion {
    let deadline = wait::deadline();
    loop {
        let _ = queue.wait(Some(deadline)).unwrap();
        // The wait may end without a completion.
        if let Some(completion) = queue.pop() {
            return completion;
        }
        assert!(Instant::now() < deadline, "the command does not complete: {:?}", queue.stats());
    }
}

impl Rig {
    fn write(&self, lba: u64) -> Command {
        self.controller.namespace(1).unwrap().write(lba, 8).unwrap()
    }

    fn stats(&self) -> RecoveryStats {
        self.controller.recovery_stats()
    }

    /// Writes sixteen ranges, with all writes in flight at once, and reads them back.
    /// `once` forbids the driver to submit a write a second time. Returns the number of
    /// writes that ended with Command Aborted By Host.
    fn exercise(&mut self, once: bool) -> usize {
        let mut tokens = Vec::new();
        for i in 0..16 {
            let mut buffer = self.pool.take().unwrap();
            buffer.fill(0x40 + i as u8);
            let write = self.write(i * 8);
            let command = if once { write.once() } else { write };
            tokens.push(self.queue.submit(command, Some(buffer)).unwrap());
        }
        let mut ended = 0;
        while !tokens.is_empty() {
            let completion = next(&mut self.queue);
            let known = tokens.iter().position(|token| *token == completion.token);
            tokens.swap_remove(known.expect("a completion with the token of its submission"));
            assert!(completion.buffer.is_some());
            match completion.status {
                Status::SUCCESS => {}
                Status::ABORTED_BY_HOST if once => ended += 1,
                status => panic!("{status}"),
            }
        }
        self.verify(once);
        assert_eq!(self.pool.available(), 64);
        ended
    }

    /// Checks the data of all ranges. With `or_not`, a range may also be unwritten.
    fn verify(&mut self, or_not: bool) {
        for i in 0..16 {
            let read = self.controller.namespace(1).unwrap().read(i * 8, 8).unwrap();
            self.queue.submit(read, self.pool.take()).unwrap();
            let completion = next(&mut self.queue);
            assert_eq!(completion.status, Status::SUCCESS);
            let data = completion.buffer.unwrap().to_vec(4096);
            assert!(data == vec![0x40 + i as u8; 4096] || or_not && data == vec![0; 4096]);
        }
    }
}

#[test]
fn a_hung_command_is_aborted_and_resubmitted() {
    let mut rig = rig();
    let faults = inject(&rig.emulated, "hang:every=10:limit=2");
    assert_eq!(rig.exercise(false), 0);
    assert_eq!(faults.total(), 2);
    let stats = rig.stats();
    assert_eq!((stats.late, stats.aborts), (2, 2), "{stats:?}");
    assert_eq!((stats.queues_recreated, stats.resets, stats.ended), (0, 0, 0), "{stats:?}");
    assert_eq!(rig.queue.stats().repeated, 2);
    rig.controller.check().unwrap();
    drop(rig.queue);
    rig.controller.detach().unwrap();
}

#[test]
fn an_unrepeatable_command_ends_with_the_abort_status() {
    let mut rig = rig();
    inject(&rig.emulated, "hang:at=1");
    rig.queue.submit(rig.write(0).once(), rig.pool.take()).unwrap();
    let completion = next(&mut rig.queue);
    assert_eq!(completion.status.code(), Status::ABORT_REQUESTED);
    assert!(completion.buffer.is_some());
    assert_eq!(rig.queue.stats().repeated, 0);
    drop(completion);
    rig.exercise(false);
}

#[test]
fn lost_completions_cost_a_queue_only() {
    for (faults, doorbells) in [
        ("drop-before:every=5:limit=3", Doorbells::Auto),
        ("drop-after:every=5:limit=3", Doorbells::Mmio),
        ("wrong-cid:every=5:limit=3", Doorbells::Auto),
        ("wrong-phase:at=4", Doorbells::Auto),
        // With these faults, the Abort commands have no effect.
        ("hang:every=5:limit=3,ignore=0x08", Doorbells::Auto),
        ("hang:every=5:limit=3,refuse=0x08", Doorbells::Auto),
    ] {
        for interrupts in [true, false] {
            let mut rig = rig_with(&AttachOptions { doorbells, interrupts, ..options() });
            let injected = inject(&rig.emulated, faults);
            assert_eq!(rig.exercise(false), 0, "{faults}");
            assert!(injected.total() > 0);
            let stats = rig.stats();
            assert!(stats.queues_recreated >= 1 && stats.late >= 1, "{faults}: {stats:?}");
            assert_eq!((stats.resets, stats.ended, stats.failed), (0, 0, 0), "{stats:?}");
            assert!(stats.repeated > 0, "{stats:?}");
            drop(rig.queue);
            rig.controller.detach().unwrap();
        }
    }
}

#[test]
fn an_unrepeatable_command_fails_and_returns_its_buffer() {
    for faults in ["drop-before:every=5:limit=3", "drop-after:every=5:limit=3"] {
        let mut rig = rig();
        inject(&rig.emulated, faults);
        assert_eq!(rig.exercise(true), 3);
        let stats = rig.stats();
        assert_eq!((stats.ended, stats.repeated), (3, 0), "{stats:?}");
        assert_eq!(rig.queue.stats().ended, 3);
        assert_eq!(rig.exercise(false), 0, "the queue works");
    }
}

/// A copy whose destination overlaps its source reads different data when it is repeated, so the
/// driver does not repeat it.
#[test]
fn copies_are_repeated_if_repeatable() {
    for fault in ["drop-before:at=1", "drop-after:at=1", "hang:at=1", "hang:at=1,ignore=0x08"] {
        for (to, overlaps) in [(100, false), (4, true)] {
            let mut rig = rig();
            for block in 0..16u8 {
                let mut buffer = rig.pool.take().unwrap();
                buffer.fill(block + 1);
                let namespace = rig.controller.namespace(1).unwrap();
                let write = namespace.write(block.into(), 1).unwrap();
                rig.queue.submit(write, Some(buffer)).unwrap();
                assert_eq!(next(&mut rig.queue).status, Status::SUCCESS);
            }
            let sources = [CopyRange { slba: 0, nlb0: 7, ..CopyRange::default() }];
            let mut buffer = rig.pool.take().unwrap();
            assert!(buffer.copy_from(0, sources.as_bytes()));
            let copy = rig.controller.namespace(1).unwrap().copy(to, &sources).unwrap();
            assert_eq!(copy.is_repeatable(), !overlaps);
            inject(&rig.emulated, fault);
            rig.queue.submit(copy, Some(buffer)).unwrap();
            let completion = next(&mut rig.queue);
            assert!(completion.buffer.is_some());
            let ended = [Status::ABORT_REQUESTED, Status::ABORTED_BY_HOST];
            match completion.status {
                Status::SUCCESS => assert!(!overlaps, "{fault}"),
                status => assert!(overlaps && ended.contains(&status.code()), "{fault}: {status}"),
            }
            assert_eq!(rig.queue.stats().repeated, u64::from(!overlaps), "{fault}");
            let read = rig.controller.namespace(1).unwrap().read(to, 8).unwrap();
            rig.queue.submit(read, rig.pool.take()).unwrap();
            let data = next(&mut rig.queue).buffer.unwrap().to_vec(4096);
            let marks: Vec<u8> = data.chunks(512).map(|block| block[0]).collect();
            let copied = marks == [1, 2, 3, 4, 5, 6, 7, 8];
            let untouched = marks == [5, 6, 7, 8, 9, 10, 11, 12];
            assert!(copied || overlaps && untouched, "{fault}: {marks:?}");
        }
    }
}

#[test]
fn a_command_lost_every_time_fails() {
    let mut rig = rig();
    let recovery = Recovery { repeats: 2, ..options().recovery };
    drop(std::mem::replace(&mut rig, rig_with(&AttachOptions { recovery, ..options() })));
    let faults = inject(&rig.emulated, "drop-after");
    rig.queue.submit(rig.write(0), rig.pool.take()).unwrap();
    let completion = next(&mut rig.queue);
    assert_eq!(completion.status, Status::ABORTED_BY_HOST);
    assert!(completion.buffer.is_some(), "its queue was deleted");
    assert_eq!(faults.total(), 3);
    let stats = rig.stats();
    assert_eq!((stats.repeated, stats.ended, stats.queues_recreated), (2, 1, 3), "{stats:?}");
}

#[test]
fn late_duplicate_or_odd_completions_need_no_recovery() {
    let timeouts = Timeouts { io: LIMIT, ..options().timeouts };
    let mut rig = rig_with(&AttachOptions { timeouts, ..options() });
    let faults = "duplicate:every=2,wrong-head:every=3,wrong-sq-id:every=5,delay=2ms:every=7";
    let faults = inject(&rig.emulated, faults);
    for _ in 0..8 {
        rig.exercise(false);
    }
    assert!(faults.total() > 100);
    let (stats, queue) = (rig.stats(), rig.queue.stats());
    assert_eq!((stats.late, stats.resets), (0, 0), "{stats:?}");
    assert!(queue.unknown_completions > 0 && queue.bad_sq_heads > 0, "{queue:?}");
}

#[test]
fn a_completion_after_its_abort_counts() {
    let mut rig = rig();
    inject(&rig.emulated, "delay=1s:at=1");
    rig.queue.submit(rig.write(0), rig.pool.take()).unwrap();
    let completion = next(&mut rig.queue);
    assert_eq!(completion.status, Status::SUCCESS);
    let stats = rig.stats();
    assert!(stats.late <= 1 && stats.queues_recreated <= 1 && stats.resets == 0, "{stats:?}");
    drop(completion);
    rig.exercise(false);
}

#[test]
fn a_stalled_command_has_no_effect_after_its_end() {
    // Abort ends the command. If the Abort is lost, the deletion of the queue ends the command.
    for faults in ["stall=4s:at=1", "stall=4s:at=1,ignore=0x08"] {
        let mut rig = rig();
        inject(&rig.emulated, faults);
        let mut buffer = rig.pool.take().unwrap();
        buffer.fill(1);
        rig.queue.submit(rig.write(0).once(), Some(buffer)).unwrap();
        let mut ended = next(&mut rig.queue);
        let status = ended.status.code();
        assert!([Status::ABORT_REQUESTED, Status::ABORTED_BY_HOST].contains(&status), "{status}");
        ended.buffer.as_mut().unwrap().fill(2);
        rig.queue.submit(rig.write(0), ended.buffer).unwrap();
        assert_eq!(next(&mut rig.queue).status, Status::SUCCESS);
        // The test waits beyond the time at which the stalled command would have been executed.
        std::thread::sleep(Duration::from_millis(4100));
        let read = rig.controller.namespace(1).unwrap().read(0, 8).unwrap();
        rig.queue.submit(read, rig.pool.take()).unwrap();
        assert_eq!(next(&mut rig.queue).buffer.unwrap().to_vec(4096), vec![2; 4096], "{faults}");
    }
}

#[test]
fn a_failed_queue_deletion_or_creation_costs_a_reset() {
    for (opcode, how) in [
        (AdminOpcode::DeleteIoSq, "refuse"),
        (AdminOpcode::DeleteIoSq, "ignore"),
        (AdminOpcode::DeleteIoCq, "refuse"),
        (AdminOpcode::CreateIoCq, "refuse"),
        (AdminOpcode::CreateIoCq, "ignore"),
        (AdminOpcode::CreateIoSq, "ignore"),
    ] {
        let mut rig = rig_with(&AttachOptions { queue_pairs: 2, ..options() });
        // Another queue has a command in flight.
        let mut other = rig.controller.take_queue_pair().unwrap();
        let faults = format!("{how}={:#x}:limit=1,drop-after:at=3:queue=1", opcode as u8);
        inject(&rig.emulated, &faults);
        assert_eq!(rig.exercise(false), 0, "{faults}");
        let stats = rig.stats();
        assert_eq!(stats.resets, 1, "{faults}: {stats:?}");
        assert_eq!((stats.reset_tries, stats.failed), (1, 0), "{faults}: {stats:?}");
        // A command that was not published before the reset is published now.
        other.submit(rig.write(512), rig.pool.take()).unwrap();
        assert_eq!(next(&mut other).status, Status::SUCCESS);
        assert_eq!(rig.stats().queues_restored, 2, "{faults}");
        drop((rig.queue, other));
        rig.controller.detach().unwrap();
    }
}

#[test]
fn commands_of_every_queue_survive_a_reset() {
    let mut rig = rig_with(&AttachOptions { queue_pairs: 2, ..options() });
    let mut other = rig.controller.take_queue_pair().unwrap();
    inject(&rig.emulated, "hang:limit=2");
    rig.queue.submit(rig.write(0), rig.pool.take()).unwrap();
    let token = other.submit(rig.write(8).once(), rig.pool.take()).unwrap();
    rig.queue.ring().unwrap();
    other.ring().unwrap();
    wait::short_pause();
    rig.controller.reset().unwrap();
    assert_eq!(next(&mut rig.queue).status, Status::SUCCESS);
    // The command of the other queue was published before the reset, so it must not be published
    // again.
    let completion = next(&mut other);
    assert_eq!((completion.token, completion.status), (token, Status::ABORTED_BY_HOST));
    assert!(completion.buffer.is_some());
    other.submit(rig.write(8).once(), completion.buffer).unwrap();
    assert_eq!(next(&mut other).status, Status::SUCCESS);
    let stats = rig.stats();
    assert_eq!((stats.resets, stats.ended, stats.repeated), (1, 1, 1), "{stats:?}");
    rig.exercise(false);
}

#[test]
fn unpublished_commands_are_published_after_a_reset() {
    let mut rig = rig();
    rig.queue.submit(rig.write(0).once(), rig.pool.take()).unwrap();
    rig.controller.reset().unwrap();
    assert_eq!(next(&mut rig.queue).status, Status::SUCCESS);
    assert_eq!(rig.stats().ended, 0);
}

#[test]
fn a_fatal_status_costs_a_reset() {
    for (faults, fatal, subsystem) in
        [("fatal:every=9:limit=2", 2, 0), ("subsystem-reset:every=9:limit=2", 0, 2)]
    {
        let mut rig = rig();
        let injected = inject(&rig.emulated, faults);
        while injected.total() < 2 {
            assert_eq!(rig.exercise(false), 0, "{faults}");
        }
        rig.exercise(false);
        let stats = rig.stats();
        assert_eq!((stats.fatal, stats.subsystem_resets), (fatal, subsystem), "{stats:?}");
        assert_eq!((stats.resets, stats.queues_restored), (2, 2), "{stats:?}");
        assert_eq!((stats.failed, stats.queues_recreated), (0, 0), "{stats:?}");
        drop(rig.queue);
        rig.controller.detach().unwrap();
    }
}

#[test]
fn a_failed_reset_is_retried() {
    for (faults, tries) in [
        ("never-ready:limit=1", 2),
        ("never-ready:limit=2", 3),
        ("never-disabled:limit=1", 1),
        ("refuse=0x06:limit=1", 2),
        ("ignore=0x06:limit=1", 2),
        ("refuse=0x09:limit=1", 2),
        ("refuse=0x7c:limit=1", 2),
        ("ignore=0x7c:limit=1", 2),
    ] {
        let mut rig = rig();
        inject(&rig.emulated, faults);
        rig.controller.reset().unwrap();
        let stats = rig.stats();
        assert_eq!((stats.resets, stats.reset_tries), (1, tries), "{faults}: {stats:?}");
        rig.exercise(false);
        drop(rig.queue);
        rig.controller.detach().unwrap();
    }
}

#[test]
fn a_controller_that_cannot_be_reset_returns_its_buffers() {
    let mut rig = rig();
    inject(&rig.emulated, "fatal:at=5,never-ready");
    for i in 0..16 {
        rig.queue.submit(rig.write(i * 8), rig.pool.take()).unwrap();
    }
    let deadline = wait::deadline();
    let mut ended = Vec::new();
    let error = loop {
        match rig.queue.wait(Some(deadline)) {
            Ok(_) => assert!(Instant::now() < deadline, "the queue fails in time"),
            Err(error) => break error,
        }
        ended.extend(std::iter::from_fn(|| rig.queue.pop()));
    };
    assert!(matches!(error, QueueError::Failed { .. }), "{error}");
    assert!(error.to_string().contains("could not be reset"), "{error}");
    ended.extend(std::iter::from_fn(|| rig.queue.pop()));
    assert_eq!(ended.len(), 16);
    assert!(ended.iter().any(|done| done.status == Status::ABORTED_BY_HOST));
    assert!(ended.iter().all(|done| done.buffer.is_some()), "the controller is disabled");
    drop(ended);
    assert_eq!(rig.pool.available(), 64);
    let stats = rig.stats();
    assert_eq!((stats.failed, stats.reset_tries), (1, 5), "{stats:?}");
    let refused = rig.queue.submit(rig.write(0), rig.pool.take()).unwrap_err();
    assert!(refused.to_string().contains("could not be reset"), "{refused}");
    assert!(rig.controller.admin().identify_controller().is_err());
    assert!(rig.controller.check().is_err());
    assert!(rig.controller.create_queue_pair(8).is_err());
    drop(rig.queue);
    assert!(rig.controller.detach().unwrap_err().to_string().contains("could not be reset"));
}

#[test]
fn a_removal_fails_all_queues_and_keeps_the_buffers() {
    let mut rig = rig_with(&AttachOptions { queue_pairs: 2, ..options() });
    let mut other = rig.controller.take_queue_pair().unwrap();
    let faults = inject(&rig.emulated, "hang:limit=4,removal:at=5");
    other.submit(rig.write(0), rig.pool.take()).unwrap();
    other.ring().unwrap();
    for i in 0..16 {
        rig.queue.submit(rig.write(i * 8), rig.pool.take()).unwrap();
    }
    rig.queue.ring().unwrap();
    for (queue, count) in [(&mut other, 1), (&mut rig.queue, 16)] {
        let error = wait::until_some("the end", || queue.wait(Some(wait::deadline())).err());
        assert!(error.to_string().contains("all ones"), "{error}");
        let ended: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(ended.len(), count);
        for done in ended {
            assert_eq!(done.status, Status::ABORTED_BY_HOST);
            assert!(done.buffer.is_none(), "the controller may still write to the buffer");
        }
    }
    assert_eq!(faults.of(Fault::Removal), 1);
    assert_eq!((rig.stats().removed, rig.stats().resets), (1, 0));
    assert_eq!(rig.pool.available(), 64 - 17);
}

#[test]
fn a_controller_disabled_by_another_process_is_reset() {
    let mut rig = rig();
    rig.exercise(false);
    rig.emulated.reset(|| ());
    rig.exercise(false);
    assert_eq!(rig.stats().resets, 1, "{:?}", rig.stats());
}

#[test]
fn recovery_can_be_turned_off() {
    // The test waits much longer than this timeout, and recovery must not begin.
    let timeouts = Timeouts { io: Duration::from_millis(50), ..options().timeouts };
    let mut rig = rig_with(&AttachOptions { recovery: Recovery::OFF, timeouts, ..options() });
    inject(&rig.emulated, "drop-after:limit=1");
    rig.queue.submit(rig.write(0), rig.pool.take()).unwrap();
    // No command ends in this time.
    let later = Instant::now() + Duration::from_millis(300);
    assert!(!rig.queue.wait(Some(later)).unwrap());
    assert_eq!((rig.queue.outstanding(), rig.stats()), (1, RecoveryStats::default()));
    // An explicit reset by the program works.
    rig.controller.reset().unwrap();
    let completion = next(&mut rig.queue);
    assert_eq!(completion.status, Status::ABORTED_BY_HOST);
}
