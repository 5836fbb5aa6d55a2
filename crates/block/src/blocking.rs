//! The same disk for a thread that has nothing else to do.

use crate::device::{BlockDevice, Geometry};
use crate::error::BlockError;
use crate::operations::Zeroes;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

thread_local! {
    static WAKER: Waker = Waker::from(Arc::new(Unpark(std::thread::current())));
}

/// Runs a future to its end on this thread, which sleeps while there is nothing to do.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        // No deadline: it comes back with an output.
        if let Some(output) = run(future.as_mut(), None) {
            return output;
        }
    }
}

/// As [`block_on`], but gives up after `patience`.
pub fn block_on_for<F: Future>(future: F, patience: Duration) -> Option<F::Output> {
    run(pin!(future), Instant::now().checked_add(patience))
}

fn run<F: Future>(mut future: Pin<&mut F>, deadline: Option<Instant>) -> Option<F::Output> {
    let waker = WAKER.with(Waker::clone);
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
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

/// A [`BlockDevice`] whose requests are waited for. A clone is another handle on the same disk.
#[derive(Clone, Debug)]
pub struct Blocking(BlockDevice);

impl Blocking {
    /// The disk, for this thread or for others.
    #[must_use]
    pub fn new(disk: BlockDevice) -> Self {
        Self(disk)
    }

    /// The disk below.
    #[must_use]
    pub fn disk(&self) -> &BlockDevice {
        &self.0
    }

    /// What the disk is and can do.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    /// As [`BlockDevice::read`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        block_on(self.0.read(offset, into))
    }

    /// As [`BlockDevice::write`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn write_at(&self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        block_on(self.0.write(offset, from, fua))
    }

    /// As [`BlockDevice::write_zeroes`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn write_zeroes(&self, offset: u64, len: u64, how: Zeroes) -> Result<(), BlockError> {
        block_on(self.0.write_zeroes(offset, len, how))
    }

    /// As [`BlockDevice::discard`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        block_on(self.0.discard(offset, len))
    }

    /// As [`BlockDevice::compare`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn compare(&self, offset: u64, with: &[u8]) -> Result<bool, BlockError> {
        block_on(self.0.compare(offset, with))
    }

    /// As [`BlockDevice::flush`].
    ///
    /// # Errors
    /// [`BlockError`].
    pub fn flush(&self) -> Result<(), BlockError> {
        block_on(self.0.flush())
    }
}
