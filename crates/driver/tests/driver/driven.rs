//! Queues that are driven by the thread that polls their futures and waits with a timeout.

use crate::fake::Fake;
use crate::{impatient, options};
use shadowbell_driver::async_queue::Driver;
use shadowbell_driver::{
    AsyncNamespace, AsyncQueue, AttachOptions, BufferPool, Controller, IoErrorKind, SpinPolicy,
};
use shadowbell_testing::wait::{self, LIMIT};
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::ThreadId;
use std::time::Instant;

struct Setup {
    fake: Fake,
    _controller: Controller,
    queue: AsyncQueue,
    disk: AsyncNamespace,
    pool: BufferPool,
}

fn setup_with(options: &AttachOptions) -> Setup {
    let fake = Fake::new();
    let mut controller = Controller::attach(fake.transport(), options).unwrap();
    let queue = AsyncQueue::start(controller.take_queue_pair().unwrap()).unwrap();
    let disk = queue.open(controller.namespace(1).unwrap());
    let pool = controller.buffers(64, 4096).unwrap();
    Setup { fake, _controller: controller, queue, disk, pool }
}

fn setup() -> Setup {
    setup_with(&options())
}

/// Waker that records the waking thread and nudges the queue. The nudge is needed if the driving
/// thread sleeps on the queue.
struct Note {
    woken: AtomicBool,
    by: Mutex<Vec<ThreadId>>,
    queue: AsyncQueue,
}

impl Note {
    fn new(queue: &AsyncQueue) -> Arc<Self> {
        let (woken, by) = (AtomicBool::new(false), Mutex::default());
        Arc::new(Self { woken, by, queue: queue.clone() })
    }
}

impl Wake for Note {
    fn wake(self: Arc<Self>) {
        self.by.lock().unwrap().push(std::thread::current().id());
        self.woken.store(true, Ordering::SeqCst);
        self.queue.nudge();
    }
}

/// Runs a future on this thread, which drives the queue.
fn drive<F: Future>(driver: &mut Driver, future: F) -> (F::Output, Vec<ThreadId>) {
    let mut future = pin!(future);
    let note = Note::new(driver.queue());
    let waker = Waker::from(Arc::clone(&note));
    let began = Instant::now();
    loop {
        note.woken.store(false, Ordering::SeqCst);
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            let by = note.by.lock().unwrap().clone();
            return (output, by);
        }
        let woken = || note.woken.load(Ordering::SeqCst);
        while !woken() {
            assert!(began.elapsed() < LIMIT, "a lost wakeup");
            if !driver.step() && !driver.spin(woken) {
                driver.sleep(Some(wait::deadline()), woken);
            }
        }
    }
}

#[track_caller]
fn wait_for(what: impl FnMut() -> bool) {
    wait::until("the state that the test waits for", what);
}

fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// Takes the right to drive the queue, after the queue thread is idle and has released it.
fn take(queue: &AsyncQueue) -> Driver {
    let mut driver = None;
    wait_for(|| {
        driver = queue.try_drive();
        driver.is_some()
    });
    driver.unwrap()
}

#[test]
fn futures_of_the_driving_thread_stay_on_it() {
    for spin in [SpinPolicy::default(), SpinPolicy::SLEEP] {
        for interrupts in [true, false] {
            let Setup { queue, disk, pool, .. } =
                setup_with(&AttachOptions { spin, interrupts, ..options() });
            let mut driver = take(&queue);
            assert!(queue.try_drive().is_none(), "one at a time");
            let (outcome, by) = drive(&mut driver, async {
                let mut buffer = pool.take().unwrap();
                for round in 0..200u64 {
                    buffer.fill(round as u8);
                    buffer = disk.write(round, buffer).await?;
                    buffer.fill(0xff);
                    buffer = disk.read(round, buffer).await?;
                    assert_eq!(buffer.bytes().read::<u8>(4095), Some(round as u8));
                }
                disk.flush().await
            });
            outcome.unwrap();
            assert_eq!(by.len(), 401);
            assert!(by.iter().all(|id| *id == std::thread::current().id()));
            assert!(driver.is_idle());
            drop(driver);
            assert_eq!(pool.available(), 64);
        }
    }
}

#[test]
fn commands_of_one_step_share_a_doorbell_write() {
    let Setup { fake, queue, disk, .. } = setup();
    fake.with(|state| state.hold = true);
    let mut driver = take(&queue);
    let mut futures: Vec<_> = (0..10).map(|lba| disk.verify(lba, 1)).collect();
    futures.iter_mut().for_each(|future| assert!(poll_once(future).is_pending()));
    assert!(fake.state().held.is_empty(), "only the driving thread submits");
    let before = fake.state().doorbell_writes.len();
    assert!(driver.step());
    assert_eq!(fake.state().held.len(), 10);
    assert!(fake.state().doorbell_writes.len() - before <= 1);
    assert_eq!(driver.outstanding(), 10);
    (0..10).for_each(|_| fake.complete(0));
    assert!(driver.step());
    assert_eq!(driver.outstanding(), 0);
    for future in &mut futures {
        assert!(matches!(poll_once(future), Poll::Ready(Ok(()))));
    }
}

#[test]
fn commands_in_flight_complete_after_the_driver_is_dropped() {
    let Setup { fake, queue, disk, .. } = setup();
    fake.with(|state| state.hold = true);
    let mut driver = take(&queue);
    let (mut submitted, mut left) = (disk.verify(1, 1), disk.verify(2, 1));
    assert!(poll_once(&mut submitted).is_pending());
    assert!(driver.step());
    assert!(poll_once(&mut left).is_pending());
    drop(driver);
    wait_for(|| fake.state().held.len() == 2);
    fake.complete(0);
    fake.complete(0);
    wait_for(|| poll_once(&mut submitted).is_ready());
    wait_for(|| poll_once(&mut left).is_ready());
}

#[test]
fn futures_of_other_threads_are_driven_as_well() {
    let Setup { queue, disk, pool, .. } = setup();
    let mut driver = take(&queue);
    let left = AtomicUsize::new(4);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (disk, pool, queue, left) = (disk.clone(), pool.clone(), queue.clone(), &left);
            scope.spawn(move || {
                let me = std::thread::current();
                struct Unpark(std::thread::Thread);
                impl Wake for Unpark {
                    fn wake(self: Arc<Self>) {
                        self.0.unpark();
                    }
                }
                let waker = Waker::from(Arc::new(Unpark(me)));
                let mut buffer = pool.take();
                for round in 0..300 {
                    let mut future = pin!(disk.write(thread * 300 + round, buffer.take().unwrap()));
                    buffer = Some(loop {
                        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                            Poll::Ready(outcome) => break outcome.unwrap(),
                            Poll::Pending => std::thread::park_timeout(LIMIT),
                        }
                    });
                }
                left.fetch_sub(1, Ordering::SeqCst);
                queue.nudge();
            });
        }
        let began = Instant::now();
        let over = || left.load(Ordering::SeqCst) == 0;
        while !over() {
            assert!(began.elapsed() < LIMIT, "a lost wakeup");
            if !driver.step() && !driver.spin(over) {
                driver.sleep(Some(wait::deadline()), over);
            }
        }
    });
}

#[test]
fn a_queue_with_commands_in_flight_can_be_driven() {
    let Setup { fake, queue, disk, .. } = setup();
    fake.with(|state| state.hold = true);
    let mut future = disk.verify(1, 1);
    assert!(poll_once(&mut future).is_pending());
    wait_for(|| fake.state().held.len() == 1);
    let began = Instant::now();
    let mut driver = loop {
        match queue.ask_to_drive() {
            Some(driver) => break driver,
            // A nudge ends the sleep of the queue thread.
            None if began.elapsed() < LIMIT => queue.nudge(),
            None => panic!("the queue's thread does not release the queue"),
        }
        std::thread::yield_now();
    };
    assert_eq!(driver.outstanding(), 1);
    // The driving thread can query whether another thread has tried to drive.
    assert!(queue.try_drive().is_none());
    assert!(driver.is_wanted() && !driver.is_wanted());
    fake.complete(0);
    assert!(driver.step());
    assert!(poll_once(&mut future).is_ready());
}

#[test]
fn a_driver_notices_the_end_of_its_queue() {
    let Setup { fake, queue, disk, _controller: controller, .. } = setup();
    fake.with(|state| state.hold = true);
    let mut driver = take(&queue);
    let mut futures: Vec<_> = (0..20).map(|lba| disk.verify(lba, 1)).collect();
    futures.iter_mut().for_each(|future| assert!(poll_once(future).is_pending()));
    assert!(driver.step());
    controller.detach().unwrap();
    // The driver notices the detach at the next submission or sleep.
    driver.sleep(Some(Instant::now()), || false);
    driver.step();
    wait_for(|| driver.is_over() || driver.step());
    for mut future in futures {
        wait_for(|| match poll_once(&mut future) {
            Poll::Ready(outcome) => {
                assert!(matches!(outcome.unwrap_err().kind, IoErrorKind::Queue(_)));
                true
            }
            Poll::Pending => false,
        });
    }
    assert!(driver.is_over() && driver.is_idle());
}

#[test]
fn a_future_times_out_on_a_full_queue_and_returns_its_buffer() {
    // The slots are held by the device, or by futures.
    for held in [true, false] {
        let Setup { fake, disk, pool, .. } = setup_with(&impatient());
        fake.with(|state| state.hold = held);
        let mut futures: Vec<_> = (0..15).map(|lba| disk.verify(lba, 1)).collect();
        futures.iter_mut().for_each(|future| assert!(poll_once(future).is_pending()));
        if !held {
            // The commands have completed, but their futures have not taken the results.
            wait::moment();
        }
        let began = Instant::now();
        let mut waits = disk.read(0, pool.take().unwrap());
        let mut waits_too = disk.flush();
        assert!(poll_once(&mut waits).is_pending() && poll_once(&mut waits_too).is_pending());
        let mut outcome = None;
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut context = Context::from_waker(&waker);
        assert!(Pin::new(&mut waits).poll(&mut context).is_pending());
        // The future is not polled until its waker is called.
        wait_for(|| woken.0.load(Ordering::SeqCst));
        wait_for(|| match Pin::new(&mut waits).poll(&mut context) {
            Poll::Ready(Err(error)) => {
                outcome = Some(error);
                true
            }
            Poll::Ready(Ok(_)) => panic!("the queue is full"),
            Poll::Pending => false,
        });
        // The future must not time out before the limit.
        assert!(began.elapsed() >= impatient().timeouts.io);
        let error = outcome.unwrap();
        assert!(matches!(error.kind, IoErrorKind::QueueFull { opcode: 2, .. }), "{error}");
        assert!(error.to_string().starts_with("Read was not submitted"), "{error}");
        assert!(error.buffer.is_some());
        wait_for(|| matches!(poll_once(&mut waits_too), Poll::Ready(Err(_))));
        // Futures that have slots are not affected.
        if !held {
            for future in &mut futures {
                assert!(matches!(poll_once(future), Poll::Ready(Ok(()))));
            }
            let mut next = disk.flush();
            assert!(poll_once(&mut next).is_pending());
            wait_for(|| matches!(poll_once(&mut next), Poll::Ready(Ok(()))));
        }
    }
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}
