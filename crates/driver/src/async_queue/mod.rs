//! The asynchronous API: futures over a queue pair, for any executor.
//!
//! A queue pair belongs to one thread at a time: the one that drives it. It submits what futures
//! leave in the inbox, in batches, and wakes them when their commands complete. It polls while there
//! is work, for as long as the queue's [`SpinPolicy`](crate::SpinPolicy) says, and then sleeps on one
//! descriptor, which the controller's interrupt and new work both signal. Nothing here needs an
//! executor of a certain kind: `std::task::Waker` is all.
//!
//! # Who drives
//!
//! An [`AsyncQueue`] has a thread of its own for that, so futures get on wherever they are polled.
//! But a command that goes to another thread and back costs two wakeups, which is more than the
//! command itself. A thread that polls futures and has nothing better to do than to wait for them
//! (an event loop, a blocking call) therefore drives the queue itself, as long as it has a [`Driver`]:
//!
//! ```no_run
//! # use shadowbell_driver::AsyncQueue;
//! # fn poll_futures_that_were_woken() -> bool { false }
//! # fn serve(queue: &AsyncQueue) {
//! let Some(mut driver) = queue.try_drive() else { return /* somebody else does */ };
//! loop {
//!     // What they submit goes to the controller in one batch, with one doorbell.
//!     let polled = poll_futures_that_were_woken();
//!     if driver.step() || polled {
//!         continue;
//!     }
//!     if driver.is_idle() {
//!         break;
//!     }
//!     if !driver.spin(|| false) {
//!         driver.sleep(None, || false);
//!     }
//! }
//! # }
//! ```
//!
//! Futures of other threads are served as well meanwhile. When the [`Driver`] is dropped, whatever
//! is under way goes on, by the queue's own thread.
//!
//! # Dropping a future
//!
//! never touches the device and never frees memory that the device may use. A command that was not
//! submitted yet is forgotten, and its buffer goes back to its pool. One that was submitted runs to
//! its end: the queue keeps its buffer, and gives it back to its pool with the completion.
//!
//! # Order, and time
//!
//! Commands are submitted in the order of the first poll of their futures. A queue that is full has
//! them wait, first come, first served. The controller may carry commands out in any order. A
//! command that does not complete in time ([`Timeouts::io`](crate::Timeouts)) fails its future, and
//! so does one that finds no place for so long.

mod driver;
mod future;
mod state;
mod thread;
mod worker;

pub use self::driver::Driver;
pub use self::future::{Done, Io, Transfer, Unit};

use self::state::{ASKED, Inner};
use self::worker::Worker;
use crate::command::Command;
use crate::dma::{Buffer, BufferPool, DmaError};
use crate::error::{IoError, IoErrorKind, RequestError};
use crate::namespace::Namespace;
use crate::queue::{QueuePair, QueueStats};
use shadowbell_spec::nvm::{CopyRange, DsmRange};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use zerocopy::IntoBytes;

/// Buffers for the ranges of Dataset Management and Copy commands.
const RANGE_BUFFERS: usize = 8;
/// Bytes of each: 256 ranges of the longer kind.
const RANGE_BYTES: usize = 256 * size_of::<CopyRange>();

/// A queue pair with a thread of its own, for futures of any executor. A clone is another handle on
/// the same queue.
///
/// When the last handle and the last future are dropped, the thread waits for what is outstanding
/// (until its deadline), deletes the queue pair and ends, and the drop waits for that.
#[derive(Clone)]
pub struct AsyncQueue(Arc<Handle>);

struct Handle {
    inner: Arc<Inner>,
    thread: Mutex<Option<JoinHandle<()>>>,
    ranges: OnceLock<BufferPool>,
}

impl AsyncQueue {
    /// Gives `queue` a thread.
    ///
    /// # Errors
    /// The system's, when there is no thread or descriptor to be had.
    pub fn start(queue: QueuePair) -> io::Result<Self> {
        let sleeping = Arc::new(AtomicU32::new(0));
        let inner = Arc::new(Inner::new(&queue, &sleeping)?);
        inner.park(Box::new(Worker::new(queue, sleeping)));
        let thread = Mutex::new(Some(thread::spawn(Arc::clone(&inner))?));
        Ok(Self(Arc::new(Handle { inner, thread, ranges: OnceLock::new() })))
    }

    /// The way to use `namespace` through this queue.
    #[must_use]
    pub fn open(&self, namespace: &Namespace) -> AsyncNamespace {
        AsyncNamespace { queue: self.clone(), namespace: Arc::new(namespace.clone()) }
    }

    /// Any I/O command, with its buffer if it has data. It is submitted when the future is first
    /// polled.
    pub fn submit(&self, command: Command, buffer: Option<Buffer>) -> Io {
        Io::new(self.clone(), command, buffer)
    }

    /// The right to drive this queue, if nobody else has it at the moment.
    #[must_use]
    pub fn try_drive(&self) -> Option<Driver> {
        Driver::new(self.clone())
    }

    /// The same for an event loop, which comes here again soon: if it is the queue's own thread that
    /// drives, it lets go, even with commands under way.
    #[must_use]
    pub fn ask_to_drive(&self) -> Option<Driver> {
        let driver = self.try_drive();
        if driver.is_none() {
            self.0.inner.wish(ASKED);
        }
        driver
    }

    /// Ends the sleep of whoever drives the queue, or has its thread look at it.
    pub fn nudge(&self) {
        self.0.inner.nudge();
    }

    /// What is signalled, as an eventfd is, while whoever drives the queue sleeps and there is
    /// something to do. For event loops: edge-triggered, since nobody takes its count back.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.0.inner.event().as_fd()
    }

    /// A socket that hangs up when the device has gone, if it is one that has such a thing: to be
    /// watched (`EPOLLRDHUP`) together with [`event`](Self::event), and followed by
    /// [`Driver::check_gone`].
    #[must_use]
    pub fn hang_up(&self) -> Option<BorrowedFd<'_>> {
        self.0.inner.hang_up().map(AsFd::as_fd)
    }

    /// What the queue did, as of the last time that its driver had nothing better to do.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.0.inner.lock().stats
    }

    /// How many commands may be outstanding at once; further ones wait.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.0.inner.capacity
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.0.inner
    }

    fn range_buffer(&self, len: usize) -> Result<Buffer, DmaError> {
        let make = |count| self.0.inner.pool(count, len.max(RANGE_BYTES));
        let pool = match self.0.ranges.get() {
            Some(pool) => pool,
            None => {
                let pool = make(RANGE_BUFFERS)?;
                self.0.ranges.get_or_init(|| pool)
            }
        };
        if let Some(buffer) = pool.take() {
            return Ok(buffer);
        }
        // A pool that was just made has its one buffer.
        make(1)?.take().ok_or(DmaError::Map(shadowbell_memory::MapError::Shape {
            len: len as u64,
            offset: 0,
            why: "the pool has no buffer",
        }))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inner.close();
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // The last handle may go down with a waker, on the thread itself.
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for AsyncQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncQueue").field("capacity", &self.capacity()).finish_non_exhaustive()
    }
}

/// A namespace, through an [`AsyncQueue`].
///
/// Every future here may be dropped at any time: see the [module](self) for what happens then.
#[derive(Clone, Debug)]
pub struct AsyncNamespace {
    queue: AsyncQueue,
    namespace: Arc<Namespace>,
}

impl AsyncNamespace {
    /// What the namespace is.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The queue that the commands go through.
    #[must_use]
    pub fn queue(&self) -> &AsyncQueue {
        &self.queue
    }

    /// Reads into all of `buffer`, from block `lba` on. Gives the buffer back.
    pub fn read(&self, lba: u64, buffer: Buffer) -> Transfer {
        let blocks = self.blocks(&buffer);
        self.transfer(blocks.and_then(|blocks| self.namespace.read(lba, blocks)), buffer)
    }

    /// Writes all of `buffer`, from block `lba` on. Gives the buffer back.
    pub fn write(&self, lba: u64, buffer: Buffer) -> Transfer {
        let blocks = self.blocks(&buffer);
        self.transfer(blocks.and_then(|blocks| self.namespace.write(lba, blocks)), buffer)
    }

    /// Compares all of `buffer` with what is there from block `lba` on: Compare Failure if they
    /// differ. Gives the buffer back.
    pub fn compare(&self, lba: u64, buffer: Buffer) -> Transfer {
        let blocks = self.blocks(&buffer);
        self.transfer(blocks.and_then(|blocks| self.namespace.compare(lba, blocks)), buffer)
    }

    /// Makes everything that was written before durable.
    pub fn flush(&self) -> Unit {
        Unit(self.queue.submit(self.namespace.flush(), None))
    }

    /// Has the controller check that `blocks` blocks from `lba` can be read.
    pub fn verify(&self, lba: u64, blocks: u32) -> Unit {
        self.unit(self.namespace.verify(lba, blocks))
    }

    /// Makes `blocks` blocks from `lba` zero; the controller may deallocate them if `deallocate`.
    pub fn write_zeroes(&self, lba: u64, blocks: u32, deallocate: bool) -> Unit {
        self.unit(self.namespace.write_zeroes(lba, blocks, deallocate))
    }

    /// Tells the controller that nobody needs the data of these ranges (1 to 256) any more: Dataset
    /// Management, Deallocate. What they read as afterwards is the controller's choice.
    pub fn discard(&self, ranges: &[DsmRange]) -> Unit {
        self.with_ranges(self.namespace.deallocate(ranges.len()), ranges.as_bytes())
    }

    /// Has the controller copy the blocks of `sources`, one range after the other, to `to` and what
    /// follows: see [`Namespace::copy`].
    pub fn copy(&self, to: u64, sources: &[CopyRange]) -> Unit {
        self.with_ranges(self.namespace.copy(to, sources), sources.as_bytes())
    }

    fn with_ranges(&self, command: Result<Command, RequestError>, ranges: &[u8]) -> Unit {
        let command = match command {
            Ok(command) => command,
            Err(error) => return self.unit(Err(error)),
        };
        match self.queue.range_buffer(ranges.len()) {
            Ok(mut buffer) => {
                // It has room for the most ranges that there may be.
                let _ = buffer.copy_from(0, ranges);
                Unit(self.queue.submit(command, Some(buffer)))
            }
            Err(error) => {
                let kind = IoErrorKind::Dma(Arc::new(error));
                Unit(Io::refused(self.queue.clone(), IoError { kind, buffer: None }))
            }
        }
    }

    fn blocks(&self, buffer: &Buffer) -> Result<u32, RequestError> {
        let bytes = buffer.len() as u64;
        let blocks = self.namespace.blocks_in(bytes)?;
        let max = self.namespace.max_transfer_bytes();
        u32::try_from(blocks).map_err(|_| RequestError::TooLong { bytes, max })
    }

    fn transfer(&self, command: Result<Command, RequestError>, buffer: Buffer) -> Transfer {
        Transfer(match command {
            Ok(command) => self.queue.submit(command, Some(buffer)),
            Err(error) => {
                let kind = IoErrorKind::Request(error);
                Io::refused(self.queue.clone(), IoError { kind, buffer: Some(buffer) })
            }
        })
    }

    fn unit(&self, command: Result<Command, RequestError>) -> Unit {
        Unit(match command {
            Ok(command) => self.queue.submit(command, None),
            Err(error) => {
                let kind = IoErrorKind::Request(error);
                Io::refused(self.queue.clone(), IoError { kind, buffer: None })
            }
        })
    }
}
