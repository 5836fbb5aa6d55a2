//! Completion queue of a disk queue whose requests end on other threads, with its wake-up.

use parking_lot::Mutex;
use shadowbell_memory::EventFd;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Queue of completions. Any thread [pushes](Self::push) them; the owner of a disk queue
/// [takes](Self::take) them in batches.
///
/// The eventfd of this queue is the disk queue's [wake descriptor](crate::Queue::wake_fd), or one
/// of the descriptors that the wake descriptor merges.
///
/// The first completion after a `take` makes the descriptor readable, and the next `take` makes it
/// unreadable again, so it may be watched level-triggered. Further completions before that `take`
/// make no system call, and a `take` without a signal makes none. Neither `push` nor `take` makes a
/// system call under the lock.
///
/// Completions between a signal and the next `take` do not signal again. An owner that watches the
/// descriptor edge-triggered therefore has to call `take` after it has started a request and before
/// it sleeps.
///
/// A cancelled request may end without a completion in this queue. The canceller then calls
/// [`signal`](Self::signal), and the owner itself reports the end of the request.
#[derive(Debug)]
pub struct CompletionQueue<T> {
    completions: Mutex<Vec<T>>,
    /// True from the start of a signal until the `take` that resets it. Only the thread that has
    /// set the flag writes to `event`, so there is one system call per signal.
    is_signalled: AtomicBool,
    event: EventFd,
}

impl<T> CompletionQueue<T> {
    /// Creates an empty queue.
    ///
    /// # Errors
    /// The process is out of file descriptors or memory.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::new()?;
        Ok(Self { completions: Mutex::default(), is_signalled: AtomicBool::new(false), event })
    }

    /// Adds a completion and wakes the owner.
    pub fn push(&self, completion: T) {
        self.completions.lock().push(completion);
        self.signal();
    }

    /// Wakes the owner: makes the descriptor readable, even if there is no completion.
    pub fn signal(&self) {
        if !self.is_signalled.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    /// Moves all completions to the end of `into`, in the order of their [`push`](Self::push).
    ///
    /// If `into` is empty, it is swapped with the list. A caller that always passes the same vector
    /// therefore causes no copies, and after some batches no allocations.
    pub fn take(&self, into: &mut Vec<T>) {
        if !self.is_signalled.load(Ordering::Acquire) {
            return;
        }
        // The flag is cleared only if the descriptor was readable. If it was not, another thread
        // has set the flag and is about to make the descriptor readable; the next call then resets
        // both. The flag is cleared before the list is read, so a completion that is added after
        // the read signals again.
        if self.event.drain() != 0 {
            self.is_signalled.swap(false, Ordering::AcqRel);
        }
        let mut completions = self.completions.lock();
        if into.is_empty() {
            std::mem::swap(&mut *completions, into);
        } else {
            into.append(&mut completions);
        }
    }

    /// Moves all completions to `into`, as [`take`](Self::take) does. Blocks until `into` has at
    /// least one.
    pub fn wait(&self, into: &mut Vec<T>) {
        loop {
            self.take(into);
            if !into.is_empty() {
                return;
            }
            // `wait` fails only for lack of memory; the loop tries again.
            let _ = self.event.wait(None);
        }
    }
}

impl<T> AsFd for CompletionQueue<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_testing::wait;
    use std::sync::Arc;
    use std::time::Duration;

    fn is_readable<T>(queue: &CompletionQueue<T>) -> bool {
        queue.event.wait(Some(Duration::ZERO)).unwrap()
    }

    fn take<T>(queue: &CompletionQueue<T>) -> Vec<T> {
        let mut taken = Vec::new();
        queue.take(&mut taken);
        taken
    }

    #[test]
    fn a_batch_has_one_signal() {
        let queue = CompletionQueue::new().unwrap();
        assert!(!is_readable(&queue));
        assert!(take(&queue).is_empty());
        for round in 0..3 {
            (0..10).for_each(|n| queue.push(round * 10 + n));
            assert!(is_readable(&queue));
            assert_eq!(queue.event.count(), 1, "system calls of a batch");
            assert!(take(&queue).into_iter().eq(round * 10..round * 10 + 10));
            assert!(!is_readable(&queue));
            assert!(take(&queue).is_empty());
        }
    }

    #[test]
    fn completions_follow_those_that_the_list_has() {
        let queue = CompletionQueue::new().unwrap();
        queue.push(2);
        queue.push(3);
        let mut taken = vec![1];
        queue.take(&mut taken);
        assert_eq!(taken, [1, 2, 3]);
    }

    /// The queue and its owner exchange their lists, and both lists keep their capacity.
    #[test]
    fn batches_of_constant_size_do_not_allocate() {
        let queue = CompletionQueue::new().unwrap();
        let mut taken = Vec::new();
        let mut blocks = Vec::new();
        for _ in 0..6 {
            (0..100).for_each(|n| queue.push(n));
            queue.take(&mut taken);
            blocks.push(taken.as_ptr());
            taken.clear();
        }
        assert_eq!(blocks[..2], blocks[2..4]);
        assert_eq!(blocks[..2], blocks[4..]);
    }

    #[test]
    fn a_signal_without_a_completion_wakes_once() {
        let queue = CompletionQueue::<u32>::new().unwrap();
        queue.signal();
        queue.signal();
        assert!(is_readable(&queue));
        assert!(take(&queue).is_empty());
        assert!(!is_readable(&queue));
    }

    #[test]
    fn a_wait_ends_with_a_completion() {
        let queue = Arc::new(CompletionQueue::new().unwrap());
        queue.signal();
        let other = Arc::clone(&queue);
        let thread = std::thread::spawn(move || other.push(1));
        let mut taken = Vec::new();
        queue.wait(&mut taken);
        assert_eq!(taken, [1]);
        thread.join().unwrap();
        queue.wait(&mut taken);
        assert_eq!(taken, [1], "it does not wait for more");
    }

    /// The owner takes a completion after the pushing thread has set the flag, and before that
    /// thread makes the descriptor readable. The next `take` must reset both; otherwise the
    /// descriptor would stay readable for ever.
    #[test]
    fn a_late_signal_is_cleared_by_the_next_take() {
        let queue = CompletionQueue::new().unwrap();
        queue.completions.lock().push(1);
        queue.is_signalled.store(true, Ordering::Release);
        assert_eq!(take(&queue), [1]);
        // Another thread pushes a completion. The pending signal of the first thread announces it
        // too.
        queue.push(2);
        assert!(!is_readable(&queue));
        queue.event.signal();
        assert!(is_readable(&queue));
        assert_eq!(take(&queue), [2]);
        assert!(!is_readable(&queue), "readable without a signal");
        queue.push(3);
        assert!(is_readable(&queue));
        assert_eq!(take(&queue), [3]);
    }

    /// An owner sleeps whenever it finds no completion. It receives each completion once, and the
    /// completions of each thread in order.
    #[test]
    fn no_wake_up_is_lost() {
        const THREADS: usize = 4;
        const PER_THREAD: usize = 20_000;
        let queue = Arc::new(CompletionQueue::new().unwrap());
        let push = |thread: usize| {
            let queue = Arc::clone(&queue);
            std::thread::spawn(move || {
                for n in 0..PER_THREAD {
                    queue.push((thread, n));
                    if n % 7 == 0 {
                        std::thread::yield_now();
                    }
                }
            })
        };
        let threads: Vec<_> = (0..THREADS).map(push).collect();
        let (mut next, mut taken) = ([0; THREADS], Vec::new());
        while next != [PER_THREAD; THREADS] {
            wait::readable("a signal", queue.as_fd());
            queue.take(&mut taken);
            for (thread, n) in taken.drain(..) {
                assert_eq!(n, next[thread]);
                next[thread] += 1;
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // The last signal may arrive after its completion was taken. This `take` resets it.
        assert!(take(&queue).is_empty());
        assert!(!is_readable(&queue));
    }
}
