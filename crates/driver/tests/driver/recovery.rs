//! Recovery of what only a fake can do: a controller that fails while nothing is under way, one
//! that can not be stopped, one that changes.

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
    // Limits that are exceeded in a test, but not by what is only slow on a busy machine.
    let timeouts = Timeouts {
        ready: Some(Duration::from_millis(500)),
        admin: Duration::from_secs(2),
        io: Duration::from_millis(400),
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
fn what_is_wrong_is_seen_without_a_command() {
    for (csts, reason) in [("cfs", "fatal"), ("nssro", "subsystem"), ("rdy", "disabled")] {
        let fake = Fake::new();
        let (controller, mut queue) = attach(&fake);
        fake.with(|state| match csts {
            "cfs" => state.csts = state.csts.with_cfs(true),
            "nssro" => state.csts = state.csts.with_nssro(true),
            // As a reset by somebody else leaves it.
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
        // And that is that.
        wait::moment();
        let stats = controller.recovery_stats();
        assert_eq!((stats.resets, stats.queues_restored), (1, 1), "{stats:?}");
        drop(queue);
        controller.detach().unwrap();
    }
}

#[test]
fn a_subsystem_reset_that_can_not_be_cleared_is_told_once() {
    let fake = Fake::new();
    fake.with(|state| state.keeps_nssro = true);
    let (controller, mut queue) = attach(&fake);
    wait::moment();
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
    assert_eq!(controller.namespaces().len(), 1, "as it was until the program asks");
    assert!(controller.check().unwrap());
    assert_eq!(controller.namespace(2).unwrap().blocks(), 77);
    assert!(!controller.check().unwrap());
    // Whoever wants the event still gets it.
    assert_eq!(controller.admin().take_events(), [AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED]);
    // Another kind of event changes nothing.
    fake.event(AsyncEvent::TEMPERATURE_THRESHOLD.dw0());
    assert!(!controller.check().unwrap());
    assert_eq!(controller.recovery_stats().namespaces_read, 1);
}

#[test]
fn buffers_are_kept_from_a_controller_that_can_not_be_stopped() {
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
    assert!(error.to_string().contains("given up"), "{error}");
    let ended = queue.pop().unwrap();
    assert_eq!(ended.status, Status::ABORTED_BY_HOST);
    assert!(ended.buffer.is_none(), "the controller may write there");
    assert!(queue.pop().is_none());
    let stats = controller.recovery_stats();
    assert_eq!((stats.aborts, stats.queues_recreated, stats.resets), (1, 1, 1), "{stats:?}");
    assert_eq!((stats.given_up, stats.ended), (1, 1), "{stats:?}");
    drop(queue);
    assert_eq!(pool.available(), 2);
    let unmaps = fake.state().unmaps;
    drop(pool);
    assert_eq!(fake.state().unmaps, unmaps, "what it may write to stays its own");
    // It does.
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
        assert!(fake.state().deleted.is_empty(), "the driver knows at once what was deleted");
        wait::pause();
        assert!(began.elapsed() < LIMIT);
    };
    assert_eq!(fake.state().deleted, [1], "not before the queue is deleted");
    // Lower bound: the limit does not expire early.
    assert!(began.elapsed() >= recovering().timeouts.io, "{:?}", began.elapsed());
    assert_eq!((ended.token, ended.status), (token, Status::ABORTED_BY_HOST));
    drop(ended);
    assert_eq!(pool.available(), 1);
}

#[test]
fn what_completes_twice_does_not_end_the_repetition() {
    let fake = Fake::new();
    let (controller, mut queue) = attach(&fake);
    fake.with(|state| state.hold = true);
    let flush = controller.namespace(1).unwrap().flush();
    let token = queue.submit(flush, None).unwrap();
    queue.ring().unwrap();
    // Once it is late, it is aborted.
    let abort = AdminOpcode::Abort as u8;
    wait_for(|| {
        assert!(queue.pop().is_none());
        fake.with(|state| state.admin_log.contains(&abort))
    });
    let aborted = Cqe::new(token.cid(), 1, 0, Status::ABORT_REQUESTED, 0);
    fake.post(1, aborted, 1, None);
    assert!(queue.pop().is_none(), "it is submitted again");
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

/// The controller aborts its late commands in the moment in which their queue is deleted: they are
/// found in the completion queue when there is no submission queue any more to submit them to
/// again.
#[test]
fn what_is_aborted_with_its_queue_is_submitted_to_the_new_one() {
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
    // Nobody takes completions meanwhile.
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
fn futures_do_not_notice_a_queue_that_is_created_again() {
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
        // The commands are lost with their queue.
        fake.with(|state| state.hold = false);
    });
    let stats = controller.recovery_stats();
    assert_eq!((stats.queues_recreated, stats.repeated, stats.resets), (1, 4, 0), "{stats:?}");
    // The end is everybody's.
    fake.with(|state| {
        state.hold = true;
        state.removed = true;
    });
    let error = crate::futures::block_on(disk.read(0, pool.take().unwrap())).unwrap_err();
    assert!(matches!(error.kind, IoErrorKind::Queue(QueueError::Failed { .. })), "{error}");
}

#[test]
fn the_last_handle_shuts_the_controller_down_before_it_is_gone() {
    for round in 0..60 {
        let fake = Fake::new();
        let (controller, queue) = attach(&fake);
        let admin = controller.admin();
        // While the watchdog looks at it every now and then.
        // Random moment: any is good.
        std::thread::sleep(Duration::from_micros(500 * (round % 5)));
        drop(controller);
        drop(admin);
        assert!(fake.state().csts.rdy(), "the queue pair still needs it");
        drop(queue);
        assert!(!fake.state().csts.rdy());
        assert_eq!(fake.state().deleted, [1]);
    }
}
