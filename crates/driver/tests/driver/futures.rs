//! The asynchronous API, and the effect of dropping a future.

use crate::fake::Fake;
use crate::{attach, impatient, options};
use shadowbell_driver::{
    AsyncNamespace, AsyncQueue, AttachOptions, BufferPool, Controller, IoErrorKind, QueueError,
    RequestError, SpinPolicy,
};
use shadowbell_spec::Status;
use shadowbell_spec::nvm::DsmRange;
use shadowbell_testing::wait::{self, LIMIT};
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Minimal executor.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    let began = Instant::now();
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        assert!(began.elapsed() < LIMIT, "a lost wakeup");
        std::thread::park_timeout(LIMIT);
    }
}

/// Waker that counts its wakes.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn poll_once<F: Future + Unpin>(future: &mut F, count: &Arc<Count>) -> Poll<F::Output> {
    let waker = Waker::from(Arc::clone(count));
    Pin::new(future).poll(&mut Context::from_waker(&waker))
}

#[track_caller]
fn wait_for(what: impl FnMut() -> bool) {
    wait::until("the state that the test waits for", what);
}

struct Setup {
    fake: Fake,
    controller: Controller,
    disk: AsyncNamespace,
    pool: BufferPool,
}

fn setup_with(options: &AttachOptions) -> Setup {
    let fake = Fake::new();
    let mut controller = Controller::attach(fake.transport(), options).unwrap();
    let queue = AsyncQueue::start(controller.take_queue_pair().unwrap()).unwrap();
    let disk = queue.open(controller.namespace(1).unwrap());
    let pool = controller.buffers(64, 4096).unwrap();
    Setup { fake, controller, disk, pool }
}

fn setup() -> Setup {
    setup_with(&options())
}

#[test]
fn every_command_works_as_a_future() {
    for interrupts in [true, false] {
        let Setup { disk, pool, .. } = setup_with(&AttachOptions { interrupts, ..options() });
        block_on(async {
            let mut buffer = pool.take().unwrap();
            buffer.fill(0x17);
            let buffer = disk.write(8, buffer).await.unwrap();
            let mut buffer = disk.compare(8, buffer).await.unwrap();
            buffer.fill(0);
            let buffer = disk.read(8, buffer).await.unwrap();
            assert_eq!(buffer.to_vec(4096), vec![0x17; 4096]);
            disk.flush().await.unwrap();
            disk.verify(0, 2048).await.unwrap();
            disk.write_zeroes(8, 4, true).await.unwrap();
            disk.discard(&[DsmRange { attributes: 0, blocks: 8, slba: 0 }; 256]).await.unwrap();
            let buffer = disk.read(8, buffer).await.unwrap();
            let bytes = buffer.to_vec(4096);
            assert!(bytes[..2048].iter().all(|b| *b == 0));
            assert!(bytes[2048..].iter().all(|b| *b == 0x17));
            let error = disk.compare(0, buffer).await.unwrap_err();
            assert!(matches!(
                error.kind,
                IoErrorKind::Status { status: Status::COMPARE_FAILURE, opcode: 5, .. }
            ));
            assert!(error.buffer.is_some(), "the device no longer uses the buffer");
        });
        assert_eq!(pool.available(), 64);
    }
}

#[test]
fn invalid_requests_fail_and_return_their_buffer() {
    let Setup { disk, pool, controller, .. } = setup();
    let error = block_on(disk.read(2047, pool.take().unwrap())).unwrap_err();
    assert!(matches!(error.kind, IoErrorKind::Request(RequestError::PastEnd { .. })), "{error}");
    assert!(error.buffer.is_some());
    drop(error);
    let odd = controller.buffers(1, 1000).unwrap();
    let error = block_on(disk.write(0, odd.take().unwrap())).unwrap_err();
    assert!(matches!(error.kind, IoErrorKind::Request(RequestError::Unaligned { .. })), "{error}");
    let error = block_on(disk.discard(&[])).unwrap_err();
    assert!(matches!(error.kind, IoErrorKind::Request(RequestError::Ranges { .. })), "{error}");
    let raw = shadowbell_driver::Command::raw(2, 1, [0; 4], 8192);
    let error = block_on(disk.queue().submit(raw, pool.take())).unwrap_err();
    assert!(matches!(error.kind, IoErrorKind::Queue(QueueError::BufferTooShort { .. })), "{error}");
    assert!(error.buffer.is_some());
    drop(error);
    assert_eq!(pool.available(), 64);
}

#[test]
fn a_dropped_future_leaves_its_buffer_to_the_device() {
    let Setup { fake, disk, pool, .. } = setup();
    fake.with(|state| {
        state.hold = true;
        state.blocks.fill(0x5a);
    });
    let count = Arc::new(Count::default());
    let buffer = pool.take().unwrap();
    let bytes = buffer.bytes().clone();
    bytes.fill(0, 4096, 0).unwrap();
    let mut future = disk.read(0, buffer);
    assert!(poll_once(&mut future, &count).is_pending());
    wait_for(|| fake.state().held.len() == 1);
    drop(future);
    assert_eq!(pool.available(), 63, "the device may still write to the buffer");
    // All other buffers are available, and none of them is the buffer in flight.
    let others: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    assert!(others.iter().all(|other| other.bytes().address() != bytes.address()));
    drop(others);
    wait::short_pause();
    fake.complete(0);
    assert_eq!(bytes.read::<u8>(4095), Some(0x5a), "the device wrote to the buffer");
    wait_for(|| pool.available() == 64);
    assert_eq!(count.0.load(Ordering::SeqCst), 0, "no waker is called");
}

#[test]
fn an_unpolled_future_submits_nothing() {
    let Setup { fake, disk, pool, .. } = setup();
    fake.with(|state| state.hold = true);
    drop(disk.read(0, pool.take().unwrap()));
    assert_eq!(pool.available(), 64);
    wait::short_pause();
    assert!(fake.state().held.is_empty());
}

#[test]
fn a_completed_future_can_be_dropped() {
    let Setup { disk, pool, .. } = setup();
    let count = Arc::new(Count::default());
    for _ in 0..40 {
        let before = count.0.load(Ordering::SeqCst);
        let mut future = disk.read(0, pool.take().unwrap());
        assert!(poll_once(&mut future, &count).is_pending());
        wait_for(|| count.0.load(Ordering::SeqCst) > before);
        drop(future);
        assert_eq!(pool.available(), 64);
    }
}

#[test]
fn excess_requests_wait_in_order() {
    let Setup { fake, disk, .. } = setup();
    fake.with(|state| state.hold = true);
    let count = Arc::new(Count::default());
    let mut futures: Vec<_> = (0..40).map(|i| (i, disk.verify(i, 1))).collect();
    for (_, future) in &mut futures {
        assert!(poll_once(future, &count).is_pending());
    }
    wait_for(|| fake.state().held.len() == 15);
    // The test drops two futures that wait for a slot, and one whose command is in flight.
    drop(futures.remove(30));
    drop(futures.remove(16));
    drop(futures.remove(3));
    let mut order = Vec::new();
    while !futures.is_empty() {
        wait_for(|| !fake.state().held.is_empty());
        order.push(fake.state().held[0].1.cdw10);
        fake.complete(0);
        let began = Instant::now();
        let before = futures.len();
        loop {
            futures.retain_mut(|(_, future)| match poll_once(future, &count) {
                Poll::Ready(outcome) => {
                    outcome.unwrap();
                    false
                }
                Poll::Pending => true,
            });
            // The future of command 3 was dropped, so the completion of this command completes no
            // future.
            if futures.len() < before || order.last() == Some(&3) {
                break;
            }
            assert!(began.elapsed() < LIMIT);
            std::thread::yield_now();
        }
    }
    let expected: Vec<u32> = (0..40).filter(|i| ![16, 30].contains(i)).collect();
    assert_eq!(order, expected);
}

#[test]
fn an_unwanted_slot_goes_to_the_next_future() {
    let Setup { fake, disk, .. } = setup();
    fake.with(|state| state.hold = true);
    let count = Arc::new(Count::default());
    let mut in_flight: Vec<_> = (0..15).map(|i| disk.verify(i, 1)).collect();
    in_flight.iter_mut().for_each(|future| assert!(poll_once(future, &count).is_pending()));
    let (first, second) = (Arc::new(Count::default()), Arc::new(Count::default()));
    let mut waits = disk.verify(100, 1);
    let mut waits_too = disk.verify(101, 1);
    assert!(poll_once(&mut waits, &first).is_pending());
    assert!(poll_once(&mut waits_too, &second).is_pending());
    wait_for(|| fake.state().held.len() == 15);
    fake.complete(0);
    wait_for(|| poll_once(&mut in_flight[0], &count).is_ready());
    assert_eq!(first.0.load(Ordering::SeqCst), 1);
    assert_eq!(second.0.load(Ordering::SeqCst), 0);
    drop(waits);
    assert_eq!(second.0.load(Ordering::SeqCst), 1);
    assert!(poll_once(&mut waits_too, &second).is_pending());
    wait_for(|| fake.state().held.back().is_some_and(|(_, sqe)| sqe.cdw10 == 101));
    // A queue that is being closed waits for its commands in flight.
    fake.with(|state| state.hold = false);
    while !fake.state().held.is_empty() {
        fake.complete(0);
    }
}

#[test]
fn a_command_that_never_completes_times_out_and_keeps_its_buffer() {
    for interrupts in [true, false] {
        let Setup { fake, disk, pool, .. } =
            setup_with(&AttachOptions { interrupts, ..impatient() });
        fake.with(|state| state.hold = true);
        let began = Instant::now();
        let error = block_on(disk.read(0, pool.take().unwrap())).unwrap_err();
        assert!(matches!(error.kind, IoErrorKind::TimedOut { opcode: 2, .. }), "{error}");
        assert!(error.to_string().starts_with("Read was not completed within 80ms"), "{error}");
        assert!(error.buffer.is_none());
        // The command must not time out before the limit.
        assert!(began.elapsed() >= impatient().timeouts.io);
        assert_eq!(pool.available(), 63);
        // The controller completes the command after its timeout.
        fake.complete(0);
        wait_for(|| pool.available() == 64);
        fake.with(|state| state.hold = false);
        block_on(disk.flush()).unwrap();
    }
}

#[test]
fn closing_a_queue_has_a_timeout() {
    let Setup { fake, disk, pool, controller } = setup_with(&impatient());
    fake.with(|state| state.hold = true);
    let mut future = disk.read(0, pool.take().unwrap());
    assert!(poll_once(&mut future, &Arc::new(Count::default())).is_pending());
    wait_for(|| fake.state().held.len() == 1);
    drop(future);
    let began = Instant::now();
    drop(disk);
    // The drop must wait until the command times out.
    assert!(began.elapsed() >= impatient().timeouts.io);
    assert_eq!(fake.state().deleted, [1]);
    assert_eq!(pool.available(), 64, "a deleted queue writes nowhere");
    assert!(controller.create_queue_pair(16).is_ok());
}

#[test]
fn futures_fail_when_the_controller_is_detached() {
    let Setup { fake, disk, pool, controller } = setup_with(&impatient());
    fake.with(|state| state.hold = true);
    let mut futures: Vec<_> = (0..20).map(|_| disk.read(0, pool.take().unwrap())).collect();
    let count = Arc::new(Count::default());
    futures.iter_mut().for_each(|future| assert!(poll_once(future, &count).is_pending()));
    wait_for(|| fake.state().held.len() == 15);
    controller.detach().unwrap();
    // Each future ends with an error after the queue thread has noticed the detach, at its next
    // wakeup.
    for future in futures {
        let error = block_on(future).unwrap_err();
        assert!(
            matches!(error.kind, IoErrorKind::Queue(_) | IoErrorKind::TimedOut { .. }),
            "{error}"
        );
    }
    let error = block_on(disk.flush()).unwrap_err();
    assert!(matches!(error.kind, IoErrorKind::Queue(QueueError::Detached { .. })), "{error}");
    drop(disk);
    assert_eq!(pool.available(), 64);
}

#[test]
fn many_tasks_on_many_threads_share_a_queue() {
    for spin in [SpinPolicy::default(), SpinPolicy::SLEEP] {
        let Setup { disk, pool, .. } = setup_with(&AttachOptions { spin, ..options() });
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let (disk, pool) = (disk.clone(), pool.clone());
                scope.spawn(move || {
                    block_on(async move {
                        let mut buffer = pool.take().unwrap();
                        for round in 0..300u64 {
                            let lba = thread * 64 + round % 8 * 8;
                            buffer.fill((thread * 37 + round) as u8);
                            buffer = disk.write(lba, buffer).await.unwrap();
                            buffer.fill(0);
                            buffer = disk.read(lba, buffer).await.unwrap();
                            let byte = (thread * 37 + round) as u8;
                            assert_eq!(buffer.bytes().read::<u8>(4095), Some(byte));
                        }
                    });
                });
            }
        });
        assert_eq!(pool.available(), 64);
    }
}

#[test]
fn an_idle_queue_sleeps() {
    let Setup { disk, .. } = setup();
    block_on(disk.flush()).unwrap();
    // The condition is repeated, because the queue thread may still be about to sleep. It never
    // holds if a timer wakes the thread more often than every 100 ms.
    wait::until("100 ms without a wakeup", || {
        let before = disk.queue().stats().sleeps;
        // Interval in which the queue thread must not wake up.
        std::thread::sleep(Duration::from_millis(100));
        disk.queue().stats().sleeps == before
    });
}

#[test]
fn a_future_may_hold_the_last_handle() {
    let Setup { disk, controller, fake, pool } = setup();
    let future = disk.read(0, pool.take().unwrap());
    drop(disk);
    drop(controller);
    assert!(block_on(future).is_ok());
    assert!(!fake.state().csts.rdy());
    let _ = attach(&fake);
}
