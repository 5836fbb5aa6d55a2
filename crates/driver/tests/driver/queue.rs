//! Queue pairs: the polling API.

use crate::fake::{BLOCKS, Fake};
use crate::{attach, impatient, options};
use shadowbell_driver::{
    AttachOptions, Buffer, Command, Controller, Doorbells, QueueError, QueuePair, RequestError,
    Token,
};
use shadowbell_spec::{Cqe, Status};
use shadowbell_testing::wait;
use std::time::{Duration, Instant};

/// Attaches to the controller, and returns it with its only queue pair.
fn one_queue(fake: &Fake, options: &AttachOptions) -> (Controller, QueuePair) {
    let mut controller = Controller::attach(fake.transport(), options).unwrap();
    let queue = controller.take_queue_pair().unwrap();
    (controller, queue)
}

fn read(controller: &Controller, lba: u64, blocks: u32) -> Command {
    controller.namespace(1).unwrap().read(lba, blocks).unwrap()
}

fn write(controller: &Controller, lba: u64, blocks: u32) -> Command {
    controller.namespace(1).unwrap().write(lba, blocks).unwrap()
}

/// Runs one command to its completion.
fn run(
    queue: &mut QueuePair,
    command: Command,
    buffer: Option<Buffer>,
) -> (Status, Option<Buffer>) {
    let token = queue.submit(command, buffer).unwrap();
    queue.ring().unwrap();
    let completion = queue.pop().expect("the fake completes at once");
    assert_eq!(completion.token, token);
    queue.ring_cq_doorbell_if_needed().unwrap();
    (completion.status, completion.buffer)
}

#[test]
fn data_is_correct_with_every_doorbell_and_page_size() {
    for doorbells in [Doorbells::Shadow, Doorbells::Mmio] {
        for page_size in [4096, 65536] {
            let fake = Fake::new();
            let options = AttachOptions { doorbells, page_size: Some(page_size), ..options() };
            let (controller, mut queue) = one_queue(&fake, &options);
            let pool = controller.buffers(2, 128 * 1024).unwrap();
            let mut lba = 3;
            for (round, blocks) in
                [1u32, 8, 9, 16, 17, 200, 256].into_iter().cycle().take(60).enumerate()
            {
                let mut buffer = pool.take().unwrap();
                let data: Vec<u8> =
                    (0..blocks as usize * 512).map(|i| (i / 5 + round) as u8).collect();
                let offset = (round % 3) * 4;
                if data.len() + offset > buffer.len() {
                    continue;
                }
                assert!(buffer.copy_from(offset, &data));
                let command = write(&controller, lba, blocks).at(offset as u32);
                let (status, buffer) = run(&mut queue, command, Some(buffer));
                assert_eq!(status, Status::SUCCESS);
                let mut buffer = buffer.unwrap();
                buffer.fill(0xee);
                let (status, buffer) =
                    run(&mut queue, read(&controller, lba, blocks), Some(buffer));
                assert_eq!(status, Status::SUCCESS);
                assert_eq!(buffer.unwrap().to_vec(data.len()), data);
                lba = (lba + u64::from(blocks)) % 1700;
            }
            let stats = queue.stats();
            assert_eq!(stats.completed, stats.submitted);
            assert_eq!((stats.bad_sq_heads, stats.unknown_completions), (0, 0));
        }
    }
}

#[test]
fn a_queue_accepts_its_capacity_and_wraps() {
    let fake = Fake::new();
    let (controller, mut queue) = one_queue(&fake, &options());
    fake.with(|state| state.hold = true);
    let flush = controller.namespace(1).unwrap().flush();
    for _ in 0..20 {
        let tokens: Vec<Token> = (0..15).map(|_| queue.submit(flush, None).unwrap()).collect();
        let mut slots: Vec<_> = tokens.iter().map(|token| token.index()).collect();
        slots.sort_unstable();
        assert_eq!(slots, (0..15).collect::<Vec<_>>(), "a slot each");
        let refused = queue.submit(flush, None).unwrap_err();
        assert!(matches!(refused.reason, QueueError::Full { qid: 1, outstanding: 15 }));
        queue.ring().unwrap();
        assert_eq!(fake.state().held.len(), 15);
        // The commands complete from the last to the first.
        for n in (0..15).rev() {
            fake.complete(n);
        }
        let mut done = Vec::new();
        assert_eq!(queue.poll(|completion| done.push(completion.token)).unwrap(), 15);
        done.reverse();
        assert_eq!(done, tokens);
        assert_eq!(queue.outstanding(), 0);
    }
    let stats = queue.stats();
    assert_eq!((stats.submitted, stats.completed, stats.batches), (300, 300, 20));
    assert_eq!((stats.bad_sq_heads, stats.unknown_completions), (0, 0));
}

#[test]
fn a_batch_takes_one_doorbell_write_or_none_with_shadow() {
    let fake = Fake::new();
    let plain = AttachOptions { doorbells: Doorbells::Mmio, ..options() };
    let (controller, mut queue) = one_queue(&fake, &plain);
    let flush = controller.namespace(1).unwrap().flush();
    for _ in 0..4 {
        for _ in 0..8 {
            queue.submit(flush, None).unwrap();
        }
        queue.ring().unwrap();
        queue.ring().unwrap();
        assert_eq!(queue.poll(drop).unwrap(), 8);
    }
    let stats = queue.stats();
    assert_eq!(stats.sq_doorbell_mmio_writes, 4);
    // The completion queue has 32 entries, and the driver publishes its head at least once per
    // eight completions.
    assert!((1..=4).contains(&stats.cq_doorbell_mmio_writes), "{stats:?}");
    assert_eq!(stats.mmio_saved, 0);
    drop((queue, controller));

    // EventIdx either follows the doorbell, or has a constant value that is no position of the
    // ring, as with SPDK's target.
    for event_idx in [None, Some(u32::MAX), Some(0xfffe), Some(64)] {
        let fake = Fake::new();
        let (controller, mut queue) = one_queue(&fake, &options());
        fake.with(|state| (state.polling, state.event_idx) = (true, event_idx));
        fake.poll();
        let before = fake.state().doorbell_writes.len();
        for _ in 0..1000 {
            for _ in 0..8 {
                queue.submit(controller.namespace(1).unwrap().flush(), None).unwrap();
            }
            queue.ring().unwrap();
            fake.poll();
            assert_eq!(queue.poll(drop).unwrap(), 8);
        }
        assert_eq!(
            fake.state().doorbell_writes.len(),
            before,
            "a controller that polls sees no register write, EventIdx {event_idx:x?}"
        );
        let stats = queue.stats();
        assert_eq!(stats.doorbell_mmio_writes(), 0);
        assert!(stats.mmio_saved >= 1000);
    }
}

#[test]
fn mapped_doorbells_are_stores() {
    let fake = Fake::new();
    let page = shadowbell_memory::Mapping::anonymous(4096).unwrap().bytes();
    fake.with(|state| state.doorbell_page = Some(page.clone()));
    let options = AttachOptions { doorbells: Doorbells::Mapped, ..options() };
    let (controller, mut queue) = one_queue(&fake, &options);
    let before = fake.state().doorbell_writes.len();
    queue.submit(controller.namespace(1).unwrap().flush(), None).unwrap();
    queue.ring().unwrap();
    assert!(!queue.is_ready());
    assert_eq!(page.read::<u32>(8), Some(1), "the tail of queue 1");
    fake.poll();
    assert_eq!(queue.poll(drop).unwrap(), 1);
    assert_eq!(fake.state().doorbell_writes.len(), before);
    assert_eq!(queue.stats().doorbell_mmio_writes(), 0);
}

#[test]
fn invalid_requests_are_refused() {
    let fake = Fake::new();
    let (controller, mut queue) = one_queue(&fake, &options());
    let namespace = controller.namespace(1).unwrap();
    assert_eq!(namespace.read(0, 0), Err(RequestError::Blocks { blocks: 0 }));
    assert_eq!(
        namespace.read(0, 257),
        Err(RequestError::TooLong { bytes: 257 * 512, max: 128 * 1024 })
    );
    assert!(matches!(namespace.write(BLOCKS - 1, 2), Err(RequestError::PastEnd { .. })));
    assert!(matches!(namespace.read(u64::MAX, 2), Err(RequestError::PastEnd { .. })));
    assert!(matches!(namespace.verify(0, 65537), Err(RequestError::Blocks { .. })));
    assert!(namespace.verify(0, BLOCKS as u32).is_ok(), "no data, no limit");
    assert!(matches!(namespace.blocks_in(513), Err(RequestError::Unaligned { .. })));
    assert!(matches!(namespace.deallocate(0), Err(RequestError::Ranges { .. })));
    assert!(matches!(namespace.deallocate(257), Err(RequestError::Ranges { .. })));
    assert!(namespace.deallocate(256).is_ok());

    let pool = controller.buffers(1, 4096).unwrap();
    let command = read(&controller, 0, 8);
    let refused = queue.submit(command, None).unwrap_err();
    assert!(matches!(refused.reason, QueueError::BufferTooShort { needed: 4096, len: 0, .. }));
    let refused = queue.submit(command.at(4), pool.take()).unwrap_err();
    assert!(matches!(refused.reason, QueueError::BufferTooShort { offset: 4, .. }));
    let buffer = refused.buffer.expect("the buffer is returned");
    let refused = queue.submit(read(&controller, 0, 1).at(2), Some(buffer)).unwrap_err();
    assert!(matches!(refused.reason, QueueError::Misaligned { offset: 2 }));
    let refused = queue
        .submit(Command::raw(2, 1, [0, 0, 7, 0], 1 << 30).at(u32::MAX), refused.buffer)
        .unwrap_err();
    assert!(matches!(refused.reason, QueueError::BufferTooShort { .. }));
    let pool = controller.buffers(1, 256 * 1024).unwrap();
    let long = Command::raw(2, 1, [0, 0, 511, 0], 256 * 1024);
    let refused = queue.submit(long, pool.take()).unwrap_err();
    assert!(matches!(refused.reason, QueueError::TooLong { .. }));
    assert_eq!(queue.outstanding(), 0);
}

#[test]
fn completions_without_a_command_are_ignored() {
    let fake = Fake::new();
    let (controller, mut queue) = one_queue(&fake, &options());
    fake.with(|state| state.hold = true);
    let pool = controller.buffers(4, 4096).unwrap();
    let token = queue.submit(read(&controller, 0, 8), pool.take()).unwrap();
    queue.ring().unwrap();
    // Completions without a command. Their identifiers belong to a free slot, belong to no slot, or
    // are all ones.
    for cid in [token.cid() + 1, 15, 0x7ff, 0xffff] {
        fake.post(1, Cqe::new(cid, 1, 0, Status::SUCCESS, 0), 1, None);
        assert!(queue.pop().is_none());
    }
    assert_eq!(queue.outstanding(), 1);
    assert_eq!(queue.stats().unknown_completions, 4);
    // The command's own completion arrives twice. The duplicate must not complete the next command
    // in the slot.
    fake.complete(0);
    fake.post(1, Cqe::new(token.cid(), 1, 0, Status::INTERNAL, 0), 1, None);
    assert_eq!(queue.pop().unwrap().token, token);
    let next = queue.submit(read(&controller, 0, 8), pool.take()).unwrap();
    assert_eq!(next.index(), token.index());
    queue.ring().unwrap();
    assert!(queue.pop().is_none(), "the repeated completion");
    assert_eq!(queue.stats().unknown_completions, 5);
    fake.complete(0);
    assert_eq!(queue.pop().unwrap().token, next);
}

#[test]
fn a_flood_of_completions_ends() {
    let fake = Fake::new();
    let (_controller, mut queue) = one_queue(&fake, &options());
    // The controller fills the whole completion queue with completions that belong to no command.
    // Their phase tags are correct.
    for _ in 0..3 {
        for _ in 0..32 {
            fake.post(1, Cqe::new(9, 1, 0, Status::SUCCESS, 0), 0, None);
        }
        assert!(queue.pop().is_none());
    }
    assert_eq!(queue.stats().unknown_completions, 96);
}

#[test]
fn a_completion_with_the_wrong_phase_is_ignored() {
    let fake = Fake::new();
    let (controller, mut queue) = one_queue(&fake, &options());
    fake.with(|state| state.hold = true);
    let token = queue.submit(controller.namespace(1).unwrap().flush(), None).unwrap();
    queue.ring().unwrap();
    fake.post(1, Cqe::new(token.cid(), 1, 0, Status::SUCCESS, 0), 1, Some(false));
    // The wait finds no completion in this time.
    let soon = Instant::now() + Duration::from_millis(5);
    assert!(!queue.wait(Some(soon)).unwrap());
    assert!(queue.pop().is_none());
    fake.complete(0);
    assert_eq!(queue.pop().unwrap().token, token);
}

#[test]
fn invalid_queue_heads_are_ignored() {
    let fake = Fake::new();
    let (controller, mut queue) = one_queue(&fake, &options());
    fake.with(|state| state.hold = true);
    let flush = controller.namespace(1).unwrap().flush();
    // Completions with a wrong field: SQHD is outside of the queue or beyond the tail, or SQID is
    // that of another queue.
    for (i, (sq_head, sq_id)) in [(16, 1), (0xffff, 1), (15, 1), (4, 2)].into_iter().enumerate() {
        let token = queue.submit(flush, None).unwrap();
        queue.ring().unwrap();
        fake.with(|state| state.held.clear());
        fake.post(1, Cqe::new(token.cid(), sq_id, 0, Status::SUCCESS, 0), sq_head, None);
        assert_eq!(queue.pop().unwrap().token, token);
        queue.ring_cq_doorbell_if_needed().unwrap();
        assert_eq!(queue.stats().bad_sq_heads, i as u64 + 1);
    }
    fake.with(|state| state.hold = false);
    for _ in 0..100 {
        assert_eq!(run(&mut queue, flush, None).0, Status::SUCCESS);
    }
    assert_eq!(queue.stats().bad_sq_heads, 4);
}

/// If the driver reaps and submits many commands before it publishes the completion queue head,
/// SQHD may advance by more than the length of the submission queue. The driver must accept this
/// SQHD.
#[test]
fn heads_are_correct_for_any_batch_between_two_rings() {
    let fake = Fake::new();
    let (controller, mut queue) = one_queue(&fake, &options());
    fake.with(|state| state.hold = true);
    let flush = controller.namespace(1).unwrap().flush();
    let submit = |queue: &mut QueuePair, count: usize| {
        for _ in 0..count {
            queue.submit(flush, None).unwrap();
        }
        queue.ring().unwrap();
    };
    // The batches have up to 15 commands; the queue has 16 entries.
    for batch in [8, 9, 15, 1, 12, 15, 15] {
        submit(&mut queue, batch);
        for _ in 0..3 {
            for _ in 0..batch {
                fake.complete(0);
                assert!(queue.pop().is_some());
            }
            submit(&mut queue, batch);
        }
        (0..batch).for_each(|_| fake.complete(0));
        assert_eq!(queue.poll(|_| {}).unwrap(), batch);
    }
    assert_eq!(queue.stats().bad_sq_heads, 0);
}

#[test]
fn a_failed_status_is_returned_to_the_caller() {
    let fake = Fake::new();
    let (controller, mut queue) = one_queue(&fake, &options());
    let command = Command::raw(2, 1, [BLOCKS as u32, 0, 0, 0], 512);
    let pool = controller.buffers(1, 512).unwrap();
    let (status, buffer) = run(&mut queue, command, pool.take());
    assert_eq!(status, Status::LBA_OUT_OF_RANGE);
    assert!(buffer.is_some());
}

#[test]
fn waiting_sleeps_until_the_interrupt() {
    let fake = Fake::new();
    let (controller, mut queue) = one_queue(&fake, &options());
    queue.set_spin(shadowbell_driver::SpinPolicy::SLEEP);
    fake.with(|state| state.hold = true);
    queue.submit(controller.namespace(1).unwrap().flush(), None).unwrap();
    let waiter = rustix::thread::gettid();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait::until("a command", || !fake.state().held.is_empty());
            wait::asleep(waiter);
            fake.complete(0);
        });
        // `wait` rings the doorbell of the submitted command.
        assert!(queue.wait(None).unwrap());
    });
    assert!(queue.pop().is_some());
    let stats = queue.stats();
    assert_eq!((stats.sleeps, stats.wakeups), (1, 1));
    // Without a completion, the deadline ends the wait.
    let began = Instant::now();
    let soon = began + Duration::from_millis(20);
    assert!(!queue.wait(Some(soon)).unwrap());
    // The wait must not end before the deadline.
    assert!(Instant::now() >= soon);
    // A signal of another thread also ends the wait.
    let waker = queue.waker().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait::short_pause();
            waker.signal();
        });
        assert!(!queue.wait(None).unwrap());
    });
}

#[test]
fn waiting_polls_without_an_interrupt() {
    let fake = Fake::new();
    let (controller, mut queue) =
        one_queue(&fake, &AttachOptions { interrupts: false, ..options() });
    fake.with(|state| state.hold = true);
    queue.submit(controller.namespace(1).unwrap().flush(), None).unwrap();
    // The wait finds no completion in this time.
    let soon = Instant::now() + Duration::from_millis(10);
    assert!(!queue.wait(Some(soon)).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait::short_pause();
            fake.complete(0);
        });
        assert!(queue.wait(None).unwrap());
    });
    assert_eq!(queue.stats().sleeps, 0);
}

#[test]
fn a_broken_transport_fails_the_queue_with_the_reason() {
    let fake = Fake::new();
    let options = AttachOptions { doorbells: Doorbells::Mmio, ..options() };
    let (controller, mut queue) = one_queue(&fake, &options);
    fake.with(|state| state.broken_doorbells = true);
    let flush = controller.namespace(1).unwrap().flush();
    queue.submit(flush, None).unwrap();
    let error = queue.ring().unwrap_err();
    assert!(error.to_string().contains("it is broken"), "{error}");
    let refused = queue.submit(flush, None).unwrap_err();
    assert!(matches!(refused.reason, QueueError::Failed { qid: 1, .. }), "{refused}");
}

#[test]
fn dropping_a_queue_deletes_it_and_returns_its_buffers() {
    let fake = Fake::new();
    let (controller, mut queue) = one_queue(&fake, &options());
    fake.with(|state| state.hold = true);
    let pool = controller.buffers(3, 4096).unwrap();
    for _ in 0..3 {
        queue.submit(read(&controller, 0, 8), pool.take()).unwrap();
    }
    queue.ring().unwrap();
    assert_eq!(pool.available(), 0);
    drop(queue);
    assert_eq!(fake.state().deleted, [1]);
    assert_eq!(pool.available(), 3);
    // The identifier is free again, and no entry of the old queue is left in its memory.
    let queue = controller.create_queue_pair(16).unwrap();
    assert!(!queue.is_ready());
}

#[test]
fn buffers_of_a_queue_that_is_not_deleted_are_kept() {
    let fake = Fake::new();
    let (controller, mut queue) = one_queue(&fake, &impatient());
    fake.with(|state| {
        state.hold = true;
        state.ignored.insert(0); // Delete I/O Submission Queue
    });
    let pool = controller.buffers(2, 4096).unwrap();
    let buffer = pool.take().unwrap();
    let bytes = buffer.bytes().clone();
    queue.submit(read(&controller, 0, 8), Some(buffer)).unwrap();
    queue.ring().unwrap();
    drop(queue);
    assert_eq!(pool.available(), 1, "the other one");
    let error = controller.create_queue_pair(16).map(|queue| queue.qid());
    // No queue can be created: queue identifier 1 is never used again, and the controller has
    // granted only one I/O queue pair.
    assert!(error.is_err());
    // A late write of the device reaches only the old buffer.
    fake.with(|state| state.blocks.fill(0x5a));
    fake.complete(0);
    assert_eq!(bytes.read::<u8>(0), Some(0x5a));
    let unmaps = fake.state().unmaps;
    drop((pool, bytes));
    assert_eq!(fake.state().unmaps, unmaps, "memory that the device may write to stays mapped");
    drop(controller);
}

#[test]
fn the_largest_and_the_smallest_queue_work() {
    let fake = Fake::new();
    let small = AttachOptions { queue_depth: 2, ..options() };
    let (controller, mut queue) = one_queue(&fake, &small);
    assert_eq!(queue.capacity(), 1);
    let flush = controller.namespace(1).unwrap().flush();
    for _ in 0..70_000 {
        assert_eq!(run(&mut queue, flush, None).0, Status::SUCCESS);
    }
    assert_eq!(queue.stats().unknown_completions, 0);
    drop((queue, controller));
    fake.with(|state| state.cap = state.cap.with_mqes(u16::MAX));
    let large = AttachOptions { queue_depth: 65536, max_transfer_bytes: 4096, ..options() };
    let (controller, mut queue) = one_queue(&fake, &large);
    assert_eq!(queue.capacity(), 65535);
    let flush = controller.namespace(1).unwrap().flush();
    for _ in 0..65535 {
        assert_ne!(queue.submit(flush, None).unwrap().cid(), 0xffff);
    }
    queue.ring().unwrap();
    assert_eq!(queue.poll(drop).unwrap(), 65535);
    // The option requests more entries than the controller supports.
    fake.with(|state| state.cap = state.cap.with_mqes(63));
    drop((queue, controller));
    assert_eq!(one_queue(&fake, &large).1.capacity(), 63);
}

#[test]
fn a_detached_controller_refuses_commands() {
    let fake = Fake::new();
    let mut controller = attach(&fake);
    let mut queue = controller.take_queue_pair().unwrap();
    let flush = controller.namespace(1).unwrap().flush();
    controller.detach().unwrap();
    queue.submit(flush, None).unwrap();
    assert!(matches!(queue.ring(), Err(QueueError::Detached { qid: 1 })));
    assert!(queue.wait(None).is_err());
}

#[test]
fn a_long_queue_is_rung_for_several_commands_at_a_time() {
    let fake = Fake::new();
    let (controller, mut queue) = one_queue(&fake, &options());
    fake.with(|state| state.hold = true);
    let flush = controller.namespace(1).unwrap().flush();
    let mut published = Vec::new();
    for _ in 0..15 {
        queue.submit(flush, None).unwrap();
        published.push(queue.ring_in_time().unwrap());
    }
    // A command is published at once if it is at least half of the commands in flight. The later
    // commands are published in groups of two, then three, then four.
    assert_eq!(published[..4], [true; 4]);
    assert_eq!(published[4..], [0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0].map(|published| published == 1));
    assert_eq!(queue.stats().batches, 7);
    queue.submit(flush, None).unwrap_err();
    queue.ring().unwrap();
    assert!(queue.ring_in_time().unwrap(), "all commands are published");
    assert_eq!(queue.stats().batches, 8);
}
