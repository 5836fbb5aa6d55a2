//! A full completion queue, while the controller has more completions to post to it.

use loom::thread;
use shadowbell_doorbell::{Fence, FullFence, Predicate};

use crate::rig::{DoorbellCells, PREDICATES, explore, in_use, in_use_head, ring, sleep_pair};

/// Kind of doorbell notification that the controller requests from the host.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Request {
    /// EventIdx set by this crate's arming, so that the host notifies when it consumes the next
    /// completion.
    Arm,
    /// EventIdx set to the completion queue's tail. The host notifies too late: only after it has
    /// consumed the last completion.
    AtTheTail,
}

/// A full completion queue of `entries` with its head at `head`. The controller has `count` more
/// completions to post, and the host consumes all of them.
pub(crate) fn full<H: Fence, S: Fence>(
    predicate: Predicate,
    entries: u32,
    head: u16,
    count: u32,
    request: Request,
) {
    let size = ring(entries);
    let cells = DoorbellCells::at(size.back(head, 1));
    let (mut doorbell, mut heads) = in_use_head::<H>(&cells, size, head);
    let (mut sleeper, wake) = sleep_pair::<S, FullFence>();
    let mut tail = size.back(head, 1);
    let host = {
        let (cells, wake) = (cells.clone(), wake.clone());
        thread::spawn(move || {
            for i in 1..=count {
                wake.update(&mut doorbell, predicate, &cells.register, size.forward(head, i));
            }
        })
    };
    let mut left = count;
    while left > 0 {
        let seen = heads.poll(tail).unwrap();
        let room = size.entries() - 1 - size.distance(seen, tail);
        if room > 0 {
            tail = size.forward(tail, 1);
            left -= 1;
            continue;
        }
        let mut arming = sleeper.prepare();
        match request {
            Request::Arm => heads.arm(&mut arming),
            Request::AtTheTail => {
                shadowbell_doorbell::Cell::store_release(&cells.event_idx, tail.into())
            }
        }
        let mut fenced = arming.fence();
        heads.recheck(&mut fenced, tail).unwrap();
        if let Some(_asleep) = fenced.try_sleep() {
            wake.event.wait();
        }
    }
    host.join().unwrap();
}

#[test]
fn room_in_a_full_completion_queue_wakes_the_controller() {
    for predicate in PREDICATES {
        for (entries, head) in [(2, 0), (2, 1), (3, 2), (4, 1)] {
            explore(Some(3), move || {
                full::<FullFence, FullFence>(predicate, entries, head, entries - 1, Request::Arm);
            });
        }
    }
}

/// One fence for both queues: the controller waits for room for a completion, and for submissions.
#[test]
fn one_fence_serves_both_queues() {
    for predicate in PREDICATES {
        explore(Some(3), move || {
            let size = ring(2);
            let (sq, cq) = (DoorbellCells::at(0), DoorbellCells::at(1));
            let (mut sq_host, mut tail) = in_use::<FullFence>(&sq, size, 1);
            let (mut cq_host, mut head) = in_use_head::<FullFence>(&cq, size, 0);
            let (mut sleeper, wake) = sleep_pair::<FullFence, FullFence>();
            let host = {
                let (sq, cq, wake) = (sq.clone(), cq.clone(), wake.clone());
                thread::spawn(move || {
                    wake.update(&mut sq_host, predicate, &sq.register, 0);
                    wake.update(&mut cq_host, predicate, &cq.register, 1);
                })
            };
            // The completion queue of two entries is full, with its tail at 1. The controller
            // executes a command when there are both the command and room for its completion.
            loop {
                let command = tail.poll() == Ok(0);
                let room = head.poll(1) == Ok(1);
                if command && room {
                    break;
                }
                let mut arming = sleeper.prepare();
                tail.arm(&mut arming);
                head.arm(&mut arming);
                let mut fenced = arming.fence();
                tail.recheck(&mut fenced).unwrap();
                head.recheck(&mut fenced, 1).unwrap();
                if let Some(_asleep) = fenced.try_sleep() {
                    wake.event.wait();
                }
            }
            host.join().unwrap();
        });
    }
}
