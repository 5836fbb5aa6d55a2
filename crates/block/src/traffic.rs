//! Counters of the requests that a block device passes to its disk.

use parking_lot::Mutex;
use shadowbell_disk::{Op, Request};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Requests of a block device to its disk since its creation, and its open queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Requests submitted to the disk. An operation may consist of several.
    pub requests: u64,
    /// Bytes of the reads.
    pub bytes_read: u64,
    /// Bytes of the writes.
    pub bytes_written: u64,
    /// Number of open queues.
    pub queues: usize,
}

/// Counters of one queue. Only the queue's thread changes them.
#[derive(Debug, Default)]
pub(crate) struct QueueTraffic {
    requests: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
}

impl QueueTraffic {
    /// Counts a request.
    pub(crate) fn count(&self, request: &Request) {
        // One thread writes the counters, so no atomic addition is needed.
        let add = |counter: &AtomicU64, more: u64| {
            counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
        };
        add(&self.requests, 1);
        match request.op {
            Op::Read => add(&self.bytes_read, request.len),
            Op::Write { .. } => add(&self.bytes_written, request.len),
            _ => {}
        }
    }

    fn add_to(&self, sum: &mut Traffic) {
        sum.requests += self.requests.load(Ordering::Relaxed);
        sum.bytes_read += self.bytes_read.load(Ordering::Relaxed);
        sum.bytes_written += self.bytes_written.load(Ordering::Relaxed);
    }
}

/// Counters of all queues of a block device.
#[derive(Debug, Default)]
pub(crate) struct TrafficCounters(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Sum over the closed queues.
    closed: Traffic,
    open: Vec<Arc<QueueTraffic>>,
}

impl State {
    /// Adds the counters of each closed queue to the sum `closed`, and drops the queue's counters.
    fn retire(&mut self) {
        let Self { closed, open } = self;
        open.retain_mut(|queue| match Arc::get_mut(queue) {
            Some(queue) => {
                queue.add_to(closed);
                false
            }
            None => true,
        });
    }
}

impl TrafficCounters {
    /// Adds a queue, which is open until the result is dropped.
    pub(crate) fn open(&self) -> Arc<QueueTraffic> {
        let mut state = self.0.lock();
        state.retire();
        let queue = Arc::default();
        state.open.push(Arc::clone(&queue));
        queue
    }

    /// Sum over all queues.
    pub(crate) fn sum(&self) -> Traffic {
        let mut state = self.0.lock();
        state.retire();
        let mut sum = state.closed;
        state.open.iter().for_each(|queue| queue.add_to(&mut sum));
        sum.queues = state.open.len();
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_queues_stay_in_the_sum() {
        let counters = TrafficCounters::default();
        let (one, other) = (counters.open(), counters.open());
        let request = |op, len| Request { op, offset: 0, len };
        one.count(&request(Op::Read, 4096));
        one.count(&request(Op::Flush, 0));
        other.count(&request(Op::Write { fua: true }, 512));
        let sum = Traffic { requests: 3, bytes_read: 4096, bytes_written: 512, queues: 2 };
        assert_eq!(counters.sum(), sum);
        drop(one);
        assert_eq!(counters.sum(), Traffic { queues: 1, ..sum });
        drop(other);
        let third = counters.open();
        third.count(&request(Op::Read, 1));
        let sum = Traffic { requests: 4, bytes_read: 4097, queues: 1, ..sum };
        assert_eq!((counters.sum(), counters.0.lock().open.len()), (sum, 1));
    }
}
