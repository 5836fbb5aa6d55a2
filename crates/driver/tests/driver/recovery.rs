//! Recovery from faults that only a fake controller can have: it fails while idle, cannot be
//! disabled, or changes its properties.

use crate::fake::Fake;
use crate::options;
use shadowbell_driver::{
    AsyncQueue, AttachOptions, Controller, IoErrorKind, QueueError, QueuePair, Recovery, Timeouts,
};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::opcode::AdminOpcode;
use shadowbell_spec::{Cqe, Status};
use shadowbell_testing::wait::{self, LIMIT};
use std::time::{Duration, Instant};

fn recovering() -> AttachOptions {
    let recovery = Recovery { watch: Duration::from_millis(2), ..Recovery::default() };
    // The limits expire in these tests, but are long enough for a busy machine.
    let timeouts = Timeouts {
        ready: Some(Duration::from_millis(500)),
        admin: Duration::from_secs(5),
        io: Duration::from_millis(1500),
        shutdown: Duration::from_millis(50),
    };
    AttachOptions { recovery, timeouts, ..options() }
}

fn attach(fake: &Fake) -> (Controller, QueuePair) {
    let mut controller = Controller::attach(fake.transport(), &recovering()).unwrap();
    let queue = controller.take_queue_pair().unwrap();
    (controller, queue)
}

#[track_caller]
fn wait_for(what: impl FnMut() -> bool) {
    wait::until("the state that the test waits for", what);
}

#[test]
fn a_failed_controller_is_detected_while_idle() {
    for (csts, reason) in [("cfs", "fatal"), ("nssro", "subsystem"), ("rdy", "disabled")] {
        let fake = Fake::new();
        let (controller, mut queue) = attach(&fake);
        fake.with(|state| match csts {
            "cfs" => state.csts = state.csts.with_cfs(true),
            "nssro" => state.csts = state.csts.with_nssro(true),
            // The controller is disabled, as after a reset by another process.
            _ => state.reset(),
        });
        wait_for(|| controller.recovery_stats().resets == 1);
        let stats = controller.recovery_stats();
        let seen = (stats.fatal, stats.subsystem_resets);
        assert_eq!(seen, (u64::from(csts == "cfs"), u64::from(csts == "nssro")), "{reason}");
        let flush = controller.namespace(1).unwrap().flush();
        queue.submit(flush, None).unwrap();
        queue.ring().unwrap();
        assert_eq!(queue.pop().unwrap().status, Status::SUCCESS);
        // No further recovery follows, because the status is healthy.
        wait::short_pause();
        let stats = controller.recovery_stats();
        assert_eq!((stats.resets, stats.queues_restored), (1, 1), "{stats:?}");
        drop(queue);
        controller.detach().unwrap();
    }
}

#[test]
fn a_subsystem_reset_that_cannot_be_cleared_causes_no_reset() {
    let fake = Fake::new();
    fake.with(|state| state.keeps_nssro = true);
    let (controller, mut queue) = attach(&fake);
    wait::short_pause();
    assert_eq!(controller.recovery_stats().resets, 0);
    queue.submit(controller.namespace(1).unwrap().flush(), None).unwrap();
    queue.ring().unwrap();
    assert!(queue.pop().is_some());
}

#[test]
fn namespaces_are_read_again_when_they_change() {
    let fake = Fake::new();
    let (mut controller, _queue) = attach(&fake);
    assert!(!controller.check().unwrap());
    fake.with(|state| {
        let mut namespace = state.namespaces[&1];
        namespace.nsze = 77;
        state.namespaces.insert(2, namespace);
        state.admin_log.clear();
    });
    fake.event(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.dw0());
    wait_for(|| controller.recovery_stats().namespaces_read == 1);
    let log = fake.with(|state| state.admin_log.clone());
    assert!(log.contains(&(AdminOpcode::GetLogPage as u8)), "the event is taken note of");
    assert_eq!(controller.namespaces().len(), 1, "the list changes only when the program asks");
    assert!(controller.check().unwrap());
    assert_eq!(controller.namespace(2).unwrap().blocks(), 77);
    assert!(!controller.check().unwrap());
    // The program also receives the event Namespace Attribute Changed.
    assert_eq!(controller.admin().take_events(), [AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED]);
    // An event of another type does not make the driver execute Identify again.
    fake.event(AsyncEvent::TEMPERATURE_THRESHOLD.dw0());
    assert!(!controller.check().unwrap());
    assert_eq!(controller.recovery_stats().namespaces_read, 1);
}

#[test]
fn buffers_stay_reserved_if_the_controller_cannot_be_stopped() {
    let fake = Fake::new();
    let (controller, mut queue) = attach(&fake);
    let pool = controller.buffers(3, 4096).unwrap();
    fake.with(|state| state.hold = true);
    let buffer = pool.take().unwrap();
    let bytes = buffer.bytes().clone();
    let read = controller.namespace(1).unwrap().read(0, 8).unwrap();
    queue.submit(read, Some(buffer)).unwrap();
    queue.ring().unwrap();
    fake.with(|state| {
        (state.stuck, state.no_reset) = (true, true);
        let ignored = [AdminOpcode::Abort, AdminOpcode::DeleteIoSq];
        state.ignored.extend(ignored.map(|opcode| opcode as u8));
    });
    let error = wait::until_some("the end", || queue.wait(Some(wait::deadline())).err());
    assert!(matches!(error, QueueError::Failed { .. }), "{error}");
    assert!(error.to_string().contains("could not be reset"), "{error}");
    let ended = queue.pop().unwrap();
    assert_eq!(ended.status, Status::ABORTED_BY_HOST);
    assert!(ended.buffer.is_none(), "the controller may write there");
    assert!(queue.pop().is_none());
    let stats = controller.recovery_stats();
    assert_eq!((stats.aborts, stats.queues_recreated, stats.resets), (1, 1, 1), "{stats:?}");
    assert_eq!((stats.failed, stats.ended), (1, 1), "{stats:?}");
    drop(queue);
    assert_eq!(pool.available(), 2);
    let unmaps = fake.state().unmaps;
    drop(pool);
    assert_eq!(fake.state().unmaps, unmaps, "memory that the device may write to stays mapped");
    // The held command still writes to the buffer.
    fake.with(|state| state.blocks.fill(0x5a));
    fake.complete(0);
    assert_eq!(bytes.read::<u8>(0), Some(0x5a));
    assert!(controller.detach().unwrap_err().to_string().contains("kept"));
}

#[test]
fn a_buffer_stays_with_its_command_until_the_queue_is_deleted() {
    let fake = Fake::new();
    let (controller, mut queue) = attach(&fake);
    let pool = controller.buffers(1, 4096).unwrap();
    fake.with(|state| {
        state.hold = true;
        state.ignored.insert(AdminOpcode::Abort as u8);
    });
    let read = controller.namespace(1).unwrap().read(0, 8).unwrap();
    let token = queue.submit(read.once(), pool.take()).unwrap();
    let began = Instant::now();
    queue.ring().unwrap();
    let ended = loop {
        assert_eq!(pool.available(), 0);
        if let Some(ended) = queue.pop() {
            break ended;
        }
        assert!(
            fake.state().deleted.is_empty(),
            "the queue is deleted, but its command has not ended"
        );
        wait::pause();
        assert!(began.elapsed() < LIMIT);
    };
    assert_eq!(fake.state().deleted, [1], "not before the queue is deleted");
    // The command must not end before the timeout.
    assert!(began.elapsed() >= recovering().timeouts.io, "{:?}", began.elapsed());
    assert_eq!((ended.token, ended.status), (token, Status::ABORTED_BY_HOST));
    drop(ended);
    assert_eq!(pool.available(), 1);
}

#[test]
fn a_duplicate_completion_does_not_end_the_repetition() {
    let fake = Fake::new();
    let (controller, mut queue) = attach(&fake);
    fake.with(|state| state.hold = true);
    let flush = controller.namespace(1).unwrap().flush();
    let token = queue.submit(flush, None).unwrap();
    queue.ring().unwrap();
    // The driver sends Abort for the late command.
    let abort = AdminOpcode::Abort as u8;
    wait_for(|| {
        assert!(queue.pop().is_none());
        fake.with(|state| state.admin_log.contains(&abort))
    });
    let aborted = Cqe::new(token.cid(), 1, 0, Status::ABORT_REQUESTED, 0);
    fake.post(1, aborted, 1, None);
    assert!(queue.pop().is_none(), "the command is resubmitted");
    assert_eq!(fake.state().held.len(), 2);
    let unknown = queue.stats().unknown_completions;
    for status in [Status::SUCCESS, Status::ABORT_REQUESTED] {
        fake.post(1, aborted.with_status(status), 1, None);
        assert!(queue.pop().is_none(), "a completion with its first identifier");
    }
    assert_eq!(queue.stats().unknown_completions, unknown + 2);
    fake.complete(1);
    let completion = queue.pop().unwrap();
    assert_eq!((completion.token, completion.status), (token, Status::SUCCESS));
    assert_eq!((queue.stats().repeated, queue.outstanding()), (1, 0));
}

/// Commands that the controller aborts because the driver deletes their queue are resubmitted. The
/// driver deletes the submission queue of late commands. After the deletion, the completions of the
/// aborted commands are in the completion queue, and the driver finds them there.
#[test]
fn commands_aborted_with_their_queue_are_resubmitted() {
    let fake = Fake::new();
    let (controller, mut queue) = attach(&fake);
    fake.with(|state| state.hold = true);
    let flush = controller.namespace(1).unwrap().flush();
    let tokens = [(); 3].map(|()| queue.submit(flush, None).unwrap());
    queue.ring().unwrap();
    let is_in_log =
        |opcode: AdminOpcode| fake.with(|state| state.admin_log.contains(&(opcode as u8)));
    wait_for(|| {
        queue.ring().unwrap();
        is_in_log(AdminOpcode::Abort)
    });
    for token in tokens {
        let aborted = Cqe::new(token.cid(), 1, 0, Status::ABORT_REQUESTED, 0);
        fake.post(1, aborted, 3, None);
    }
    fake.with(|state| state.doorbell_writes.clear());
    // The program does not reap completions in the meantime.
    wait_for(|| {
        queue.ring().unwrap();
        is_in_log(AdminOpcode::DeleteIoSq)
    });
    let held: Vec<_> = fake.state().held.iter().map(|(_, sqe)| sqe.cid).collect();
    assert_eq!(held.len(), 3, "each once, and nothing else: {held:?}");
    let rings = fake.state().doorbell_writes.iter().filter(|(at, _)| *at == 0x1008).count();
    assert_eq!(rings, 1, "none of a queue that does not exist");
    for token in tokens {
        fake.complete(0);
        let completion = queue.pop().unwrap();
        assert_eq!((completion.token, completion.status), (token, Status::SUCCESS));
    }
    let stats = controller.recovery_stats();
    assert_eq!((stats.queues_recreated, stats.resets, stats.ended), (1, 0, 0), "{stats:?}");
    assert_eq!((queue.stats().repeated, queue.outstanding()), (3, 0));
}

#[test]
fn futures_survive_a_recreated_queue() {
    let fake = Fake::new();
    let (controller, queue) = attach(&fake);
    let disk = AsyncQueue::start(queue).unwrap().open(controller.namespace(1).unwrap());
    let pool = controller.buffers(8, 4096).unwrap();
    fake.with(|state| {
        state.hold = true;
        state.blocks.fill(0x17);
    });
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let buffer = pool.take().unwrap();
                let buffer = crate::futures::block_on(disk.read(0, buffer)).unwrap();
                assert_eq!(buffer.to_vec(4096), vec![0x17; 4096]);
            });
        }
        wait_for(|| fake.state().held.len() == 4);
        // The deletion of the queue loses the commands, which get no completion.
        fake.with(|state| state.hold = false);
    });
    let stats = controller.recovery_stats();
    assert_eq!((stats.queues_recreated, stats.repeated, stats.resets), (1, 4, 0), "{stats:?}");
    // After the removal of the device, all futures end with an error.
    fake.with(|state| {
        state.hold = true;
        state.removed = true;
    });
    let error = crate::futures::block_on(disk.read(0, pool.take().unwrap())).unwrap_err();
    assert!(matches!(error.kind, IoErrorKind::Queue(QueueError::Failed { .. })), "{error}");
}

#[test]
fn dropping_the_last_handle_shuts_the_controller_down() {
    for round in 0..60 {
        let fake = Fake::new();
        let (controller, queue) = attach(&fake);
        let admin = controller.admin();
        // The handles are dropped at various moments between two checks of the watchdog.
        std::thread::sleep(Duration::from_micros(500 * (round % 5)));
        drop(controller);
        drop(admin);
        assert!(fake.state().csts.rdy(), "the queue pair keeps the controller enabled");
        drop(queue);
        assert!(!fake.state().csts.rdy());
        assert_eq!(fake.state().deleted, [1]);
    }
}
