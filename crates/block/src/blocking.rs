//! Blocking API, for threads that only wait for their request.

use crate::device::BlockDevice;
use crate::error::BlockError;
use crate::extents::Extent;
use crate::geometry::Geometry;
use crate::operations::Zeroes;
use parking_lot::Mutex;
use shadowbell_driver::AsyncQueue;
use shadowbell_driver::async_queue::Driver;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Waker of a thread that waits for one future.
struct Sleeping {
    thread: Thread,
    woken: AtomicBool,
    /// Queue that the thread drives while it waits: wakeups nudge the queue instead of the thread.
    driven: Mutex<Option<AsyncQueue>>,
}

impl Sleeping {
    fn is_woken(&self) -> bool {
        self.woken.load(Ordering::Acquire)
    }
}

impl Wake for Sleeping {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.woken.swap(true, Ordering::AcqRel) {
            return;
        }
        match &*self.driven.lock() {
            Some(queue) => queue.nudge(),
            None => self.thread.unpark(),
        }
    }
}

thread_local! {
    static OWN: (Arc<Sleeping>, Waker) = {
        let own = Arc::new(Sleeping {
            thread: std::thread::current(),
            woken: AtomicBool::new(false),
            driven: Mutex::new(None),
        });
        (Arc::clone(&own), Waker::from(own))
    };
}

/// Runs a future to completion on this thread, which sleeps while the future is pending.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        // Without a deadline, `run` returns only with an output.
        if let Some(output) = run(future.as_mut(), None) {
            return output;
        }
    }
}

/// Like [`block_on`], with a timeout.
pub fn block_on_for<F: Future>(future: F, timeout: Duration) -> Option<F::Output> {
    run(pin!(future), Instant::now().checked_add(timeout))
}

fn run<F: Future>(mut future: Pin<&mut F>, deadline: Option<Instant>) -> Option<F::Output> {
    let (own, waker) = OWN.with(Clone::clone);
    let mut context = Context::from_waker(&waker);
    loop {
        own.woken.store(false, Ordering::Release);
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        while !own.is_woken() {
            match deadline {
                None => std::thread::park(),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    std::thread::park_timeout(left);
                }
            }
        }
    }
}

/// Like [`block_on`], for a future whose commands use `queue`: if no other thread drives the queue,
/// this thread drives it while it waits. Saves the wakeups of the queue thread and back.
fn block_on_queue<F: Future>(queue: &AsyncQueue, future: F) -> F::Output {
    let mut future = pin!(future);
    if let Some(driver) = queue.try_drive()
        && let Some(output) = drive(driver, future.as_mut())
    {
        return output;
    }
    block_on(future)
}

/// Drives a queue until the future is ready; `None` if the queue has failed.
fn drive<F: Future>(mut driver: Driver, mut future: Pin<&mut F>) -> Option<F::Output> {
    /// Switches the waker back to unparking the thread, on every exit.
    struct Reset<'a>(&'a Sleeping);
    impl Drop for Reset<'_> {
        fn drop(&mut self) {
            let queue = self.0.driven.lock().take();
            drop(queue);
        }
    }
    let (own, waker) = OWN.with(Clone::clone);
    *own.driven.lock() = Some(driver.queue().clone());
    let _reset = Reset(&own);
    let mut context = Context::from_waker(&waker);
    while !driver.is_over() {
        own.woken.store(false, Ordering::Release);
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        while !driver.is_over() {
            driver.step();
            if own.is_woken() {
                break;
            }
            if !driver.spin(|| own.is_woken()) {
                driver.sleep(None, || own.is_woken());
            }
        }
    }
    None
}

/// Blocking API of a [`BlockDevice`]. The waiting thread drives the disk's queue, unless another
/// thread does. A clone is another handle to the same disk.
#[derive(Clone, Debug)]
pub struct Blocking(BlockDevice);

impl Blocking {
    /// Wraps `disk`, for use on any thread.
    #[must_use]
    pub fn new(disk: BlockDevice) -> Self {
        Self(disk)
    }

    /// The wrapped disk.
    #[must_use]
    pub fn disk(&self) -> &BlockDevice {
        &self.0
    }

    /// Size and features of the disk.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn run<F: Future>(&self, future: F) -> F::Output {
        match self.0.queue() {
            Some(queue) => block_on_queue(queue, future),
            None => block_on(future),
        }
    }

    /// Blocking [`BlockDevice::read`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        self.run(self.0.read(offset, into))
    }

    /// Blocking [`BlockDevice::write`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn write_at(&self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        self.run(self.0.write(offset, from, fua))
    }

    /// Blocking [`BlockDevice::write_zeroes`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn write_zeroes(&self, offset: u64, len: u64, how: Zeroes) -> Result<(), BlockError> {
        self.run(self.0.write_zeroes(offset, len, how))
    }

    /// Blocking [`BlockDevice::discard`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.run(self.0.discard(offset, len))
    }

    /// Blocking [`BlockDevice::compare`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn compare(&self, offset: u64, with: &[u8]) -> Result<bool, BlockError> {
        self.run(self.0.compare(offset, with))
    }

    /// Blocking [`BlockDevice::copy`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn copy(&self, from: u64, to: u64, len: u64) -> Result<(), BlockError> {
        self.run(self.0.copy(from, to, len))
    }

    /// Blocking [`BlockDevice::extents`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn extents(&self, offset: u64, len: u64, most: usize) -> Result<Vec<Extent>, BlockError> {
        self.run(self.0.extents(offset, len, most))
    }

    /// Blocking [`BlockDevice::flush`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn flush(&self) -> Result<(), BlockError> {
        self.run(self.0.flush())
    }
}
