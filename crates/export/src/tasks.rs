//! Futures in numbered slots, run by the thread that owns them: what a connection's requests are
//! while they are in flight.
//!
//! A slot is used again and again, so a request costs no allocation. Wakers are made once for each
//! slot; they put its number on a list and, if the thread sleeps, signal the descriptor that it
//! sleeps on.

use parking_lot::Mutex;
use shadowbell_memory::EventFd;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// The slots that were woken: what the thread and the wakers share.
struct ReadyList {
    state: Mutex<ReadyState>,
    /// Whether there is something on the list, to look at without the lock.
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
    /// It is on the list.
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

/// A number of slots for futures. They are made when they are first needed: a future can be large,
/// and a client that says nothing needs none.
pub(crate) struct Tasks<F> {
    slots: Vec<Slot<F>>,
    /// How many there may be.
    most: usize,
    free: Vec<usize>,
    ready: Arc<ReadyList>,
    batch: Vec<usize>,
}

impl<F: Future> Tasks<F> {
    /// As many slots as `most`.
    pub(crate) fn new(most: usize) -> io::Result<Self> {
        let state = ReadyState { list: Vec::with_capacity(most), sleeping: false };
        let any = AtomicBool::new(false);
        let ready = Arc::new(ReadyList { state: Mutex::new(state), any, event: EventFd::new()? });
        let (slots, free, batch) = (Vec::new(), Vec::new(), Vec::with_capacity(most));
        Ok(Self { slots, most, free, ready, batch })
    }

    /// A slot, taken until it is [released](Self::release); nothing if there is none.
    pub(crate) fn reserve(&mut self) -> Option<usize> {
        self.free.pop().or_else(|| self.make())
    }

    fn make(&mut self) -> Option<usize> {
        let slot = self.slots.len();
        if slot == self.most {
            return None;
        }
        let ready = Arc::clone(&self.ready);
        let flag = Arc::new(SlotWaker { slot, listed: AtomicBool::new(false), ready });
        let waker = Waker::from(Arc::clone(&flag));
        self.slots.push(Slot { future: Box::pin(None), waker, flag });
        Some(slot)
    }

    /// Gives a slot back in which nothing runs.
    pub(crate) fn release(&mut self, slot: usize) {
        self.free.push(slot);
    }

    /// Starts a future in a reserved slot. It is polled by the next [`run`](Self::run).
    pub(crate) fn start(&mut self, slot: usize, future: F) {
        if let Some(there) = self.slots.get_mut(slot) {
            there.future.set(Some(future));
            there.waker.wake_by_ref();
        }
    }

    /// How many slots are reserved.
    pub(crate) fn reserved(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Polls every future that was woken, and hands those to `done` that are: the slot stays
    /// reserved. Whether there was any.
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
            slot.flag.listed.store(false, Ordering::Release);
            let Some(future) = slot.future.as_mut().as_pin_mut() else { continue };
            if let Poll::Ready(output) = future.poll(&mut Context::from_waker(&slot.waker)) {
                slot.future.set(None);
                done(index, output);
            }
        }
        any
    }

    /// Whether a future was woken and not polled since.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.any.load(Ordering::Relaxed)
    }

    /// Whether the thread may sleep on [`event`](Self::event). If so, the next future that is
    /// woken signals it.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        let mut state = self.ready.state.lock();
        state.sleeping = state.list.is_empty();
        state.sleeping
    }

    /// To be called after a sleep.
    pub(crate) fn after_sleep(&mut self) {
        self.ready.state.lock().sleeping = false;
    }

    /// An event that ends the thread's sleep.
    pub(crate) fn waker(&self) -> io::Result<EventFd> {
        self.ready.event.try_clone()
    }

    /// What to sleep on.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.ready.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_testing::wait::LIMIT;
    use std::collections::VecDeque;

    /// Is ready when its cell is set, by another thread.
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
    fn slots_are_made_when_they_are_needed() {
        let mut tasks = Tasks::<Cell>::new(3).unwrap();
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
        let mut tasks = Tasks::new(8).unwrap();
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
