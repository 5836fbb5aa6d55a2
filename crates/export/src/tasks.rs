//! Futures in numbered slots, executed by the thread that owns them: the requests in flight of a
//! connection.
//!
//! Slots are reused, so a request needs no allocation. Each slot has one permanent waker, which
//! adds the slot's number to a list, and signals the thread's eventfd if the thread sleeps.

use parking_lot::Mutex;
use shadowbell_memory::EventFd;
use std::future::Future;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// List of woken slots, shared by the thread and the wakers.
struct ReadyList {
    state: Mutex<ReadyState>,
    /// True if the list is not empty. The thread reads it without the lock.
    any: AtomicBool,
    event: EventFd,
}

#[derive(Default)]
struct ReadyState {
    list: Vec<usize>,
    sleeping: bool,
}

impl ReadyList {
    fn push(&self, slot: usize) {
        let mut state = self.state.lock();
        state.list.push(slot);
        self.any.store(true, Ordering::Relaxed);
        let asleep = std::mem::take(&mut state.sleeping);
        drop(state);
        if asleep {
            self.event.signal();
        }
    }
}

struct SlotWaker {
    slot: usize,
    /// True while the slot is on the list.
    listed: AtomicBool,
    ready: Arc<ReadyList>,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.listed.swap(true, Ordering::AcqRel) {
            self.ready.push(self.slot);
        }
    }
}

struct Slot<F> {
    future: Pin<Box<Option<F>>>,
    waker: Waker,
    flag: Arc<SlotWaker>,
}

/// Slots for futures. A slot is allocated on first use, because a future can be large, and an idle
/// client needs no slot.
pub(crate) struct Tasks<F> {
    slots: Vec<Slot<F>>,
    /// Largest number of slots.
    capacity: usize,
    free: Vec<usize>,
    ready: Arc<ReadyList>,
    batch: Vec<usize>,
}

impl<F: Future> Tasks<F> {
    /// Creates a set of at most `capacity` slots. `event` ends the thread's sleep.
    pub(crate) fn new(capacity: usize, event: EventFd) -> Self {
        let state = ReadyState { list: Vec::with_capacity(capacity), sleeping: false };
        let any = AtomicBool::new(false);
        let ready = Arc::new(ReadyList { state: Mutex::new(state), any, event });
        let (slots, free, batch) = (Vec::new(), Vec::new(), Vec::with_capacity(capacity));
        Self { slots, capacity, free, ready, batch }
    }

    /// Reserves a slot until it is [released](Self::release). `None` if all slots are reserved.
    pub(crate) fn reserve(&mut self) -> Option<usize> {
        self.free.pop().or_else(|| self.make())
    }

    fn make(&mut self) -> Option<usize> {
        let slot = self.slots.len();
        if slot == self.capacity {
            return None;
        }
        let ready = Arc::clone(&self.ready);
        let flag = Arc::new(SlotWaker { slot, listed: AtomicBool::new(false), ready });
        let waker = Waker::from(Arc::clone(&flag));
        self.slots.push(Slot { future: Box::pin(None), waker, flag });
        Some(slot)
    }

    /// Releases a slot whose future has completed or was never started.
    pub(crate) fn release(&mut self, slot: usize) {
        self.free.push(slot);
    }

    /// Starts a future in a reserved slot. The next [`run`](Self::run) polls it.
    pub(crate) fn start(&mut self, slot: usize, future: F) {
        if let Some(entry) = self.slots.get_mut(slot) {
            entry.future.set(Some(future));
            entry.waker.wake_by_ref();
        }
    }

    /// Starts a future in a reserved slot, and polls it. Returns the result if it is ready. The
    /// slot stays reserved in either case.
    pub(crate) fn start_now(&mut self, slot: usize, future: F) -> Option<F::Output> {
        let entry = self.slots.get_mut(slot)?;
        entry.future.set(Some(future));
        let future = entry.future.as_mut().as_pin_mut()?;
        let Poll::Ready(output) = future.poll(&mut Context::from_waker(&entry.waker)) else {
            return None;
        };
        entry.future.set(None);
        Some(output)
    }

    /// Number of reserved slots.
    pub(crate) fn reserved(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Polls every woken future, and passes the results of completed futures to `done`. The slots
    /// of completed futures stay reserved. Returns true if any future was woken.
    pub(crate) fn run(&mut self, mut done: impl FnMut(usize, F::Output)) -> bool {
        if !self.is_ready() {
            return false;
        }
        let mut state = self.ready.state.lock();
        self.ready.any.store(false, Ordering::Relaxed);
        std::mem::swap(&mut self.batch, &mut state.list);
        drop(state);
        let any = !self.batch.is_empty();
        for index in self.batch.drain(..) {
            let Some(slot) = self.slots.get_mut(index) else { continue };
            // A swap, unlike a store, orders the poll after the writes of a waker that found the
            // slot listed.
            slot.flag.listed.swap(false, Ordering::AcqRel);
            let Some(future) = slot.future.as_mut().as_pin_mut() else { continue };
            if let Poll::Ready(output) = future.poll(&mut Context::from_waker(&slot.waker)) {
                slot.future.set(None);
                done(index, output);
            }
        }
        any
    }

    /// True if a future was woken and has not been polled since.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.any.load(Ordering::Relaxed)
    }

    /// Prepares a sleep on [`event`](Self::event). Returns true if the thread may sleep. Then the
    /// next wakeup of a future signals that event.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        let mut state = self.ready.state.lock();
        state.sleeping = state.list.is_empty();
        state.sleeping
    }

    /// Ends a prepared sleep.
    pub(crate) fn after_sleep(&mut self) {
        self.ready.state.lock().sleeping = false;
    }

    /// Descriptor on which the thread sleeps.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.ready.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_testing::wait::LIMIT;
    use std::collections::VecDeque;

    /// Future that completes when another thread sets its cell.
    #[derive(Clone, Default)]
    struct Cell(Arc<Mutex<(Option<u32>, Option<Waker>)>>);

    impl Cell {
        fn set(&self, value: u32) {
            let mut cell = self.0.lock();
            cell.0 = Some(value);
            let waker = cell.1.take();
            drop(cell);
            waker.into_iter().for_each(Waker::wake);
        }
    }

    impl Future for Cell {
        type Output = u32;

        fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<u32> {
            let mut cell = self.0.lock();
            cell.1 = Some(context.waker().clone());
            cell.0.map_or(Poll::Pending, Poll::Ready)
        }
    }

    #[test]
    fn slots_are_created_on_demand() {
        let mut tasks = Tasks::<Cell>::new(3, EventFd::new().unwrap());
        assert_eq!((tasks.slots.len(), tasks.reserved()), (0, 0));
        let first = tasks.reserve().unwrap();
        tasks.release(first);
        assert_eq!((tasks.reserve(), tasks.slots.len()), (Some(first), 1));
        assert!(tasks.reserve().is_some() && tasks.reserve().is_some());
        assert_eq!((tasks.reserve(), tasks.reserved()), (None, 3));
    }

    #[test]
    fn every_future_is_run_to_its_end_and_no_wakeup_is_lost() {
        const COUNT: u32 = 20_000;
        let mut tasks = Tasks::new(8, EventFd::new().unwrap());
        let (sender, receiver) = std::sync::mpsc::channel::<(u32, Cell)>();
        let other = std::thread::spawn(move || {
            let mut waiting = VecDeque::new();
            while let Ok(next) = receiver.recv() {
                let last = next.0 + 1 == COUNT;
                waiting.push_back(next);
                if waiting.len() > 5 || last {
                    for (value, cell) in waiting.drain(..).rev() {
                        cell.set(value);
                    }
                }
            }
        });
        let (mut started, mut sum, mut ended) = (0, 0u64, 0);
        while ended < COUNT {
            while started < COUNT
                && let Some(slot) = tasks.reserve()
            {
                let cell = Cell::default();
                tasks.start(slot, cell.clone());
                sender.send((started, cell)).unwrap();
                started += 1;
            }
            let mut free = Vec::new();
            tasks.run(|slot, value| {
                sum += u64::from(value);
                free.push(slot);
            });
            ended += free.len() as u32;
            free.into_iter().for_each(|slot| tasks.release(slot));
            if tasks.reserved() == 8 && tasks.prepare_sleep() {
                let woken = tasks.ready.event.wait(Some(LIMIT)).unwrap();
                assert!(woken, "a lost wakeup after {ended}");
                tasks.after_sleep();
                tasks.ready.event.drain();
            }
        }
        assert_eq!(sum, u64::from(COUNT) * u64::from(COUNT - 1) / 2);
        assert_eq!(tasks.reserved(), 0);
        drop(sender);
        other.join().unwrap();
    }
}
