//! Parked queue: while its thread serves other queues, the queue has a sleeper of its own. A
//! doorbell write for the queue sends a message to the thread, and wakes the thread if it sleeps.

use loom::sync::Mutex;
use loom::sync::atomic::Ordering;
use loom::thread;
use shadowbell_doorbell::{Fence, FullFence, HostDoorbell, Predicate, Sleeper, SqTail};
use std::sync::Arc;

use crate::rig::{
    DoorbellCells, PREDICATES, Wake, Word, explore, in_use, is_set, ring, sleep_pair, word,
};

/// Wakers for a doorbell write of the host: the waker of the queue's own sleeper, and the waker of
/// the thread, with the messages for the thread.
struct Parking<F> {
    queue: Wake<F>,
    thread: Wake,
    /// Number of doorbell writes for the queue that the thread has not handled. If there are any,
    /// `pending` is set.
    messages: Arc<Mutex<u32>>,
    pending: Word,
}

impl<F> Clone for Parking<F> {
    fn clone(&self) -> Self {
        Self {
            queue: self.queue.clone(),
            thread: self.thread.clone(),
            messages: self.messages.clone(),
            pending: self.pending.clone(),
        }
    }
}

/// Step that the model leaves out, to show that it is necessary.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Without {
    Nothing,
    /// Wakeup of the thread after the message is stored.
    Kick,
    /// Message about a doorbell write for a parked queue. The thread is woken, but does not learn
    /// for which queue.
    Message,
    /// Wakeup of the thread, for a doorbell write for a queue that is not parked.
    Thread,
}

impl<F: Fence> Parking<F> {
    fn new(queue: Wake<F>, thread: Wake) -> Self {
        Self { queue, thread, messages: Arc::default(), pending: word(0) }
    }

    /// Takes the messages. Returns true if there were any.
    fn take_messages(&self) -> bool {
        if !is_set(&self.pending) {
            return false;
        }
        // The flag is cleared before the messages are read: if a message arrives between the two,
        // the flag is set again for the next call.
        self.pending.store(0, Ordering::Release);
        std::mem::take(&mut *self.messages.lock().unwrap()) != 0
    }

    fn trap(&self, register: &Word, value: u16, without: Without) {
        if self.queue.waker.ring(register, u32::from(value)) {
            if without != Without::Message {
                *self.messages.lock().unwrap() += 1;
                self.pending.store(1, Ordering::Release);
            }
            if without != Without::Kick {
                self.thread.kick();
            }
        } else if without != Without::Thread {
            // The queue is not parked, so the thread polls it, or sleeps with its doorbell armed.
            self.thread.kick();
        }
    }
}

/// Runs the thread. It first sleeps once with the queue's doorbell armed. Then it parks the queue
/// when the queue is empty, and sleeps because it has no other work.
fn run_controller(
    tail: &mut SqTail<Word>,
    own: &mut Sleeper<Word, impl Fence>,
    sleeper: &mut Sleeper<Word>,
    park: &Parking<impl Fence>,
    end: u16,
) {
    let (mut parked, mut slept) = (false, false);
    loop {
        if park.take_messages() && parked {
            own.rise();
            tail.disarm(sleeper);
            parked = false;
        }
        if !parked {
            let before = tail.last();
            if tail.poll() == Ok(end) {
                return;
            }
            if tail.last() != before {
                continue;
            }
        }
        if !parked && slept {
            let mut arming = own.prepare();
            tail.arm(&mut arming);
            let mut fenced = arming.fence();
            tail.recheck(&mut fenced).unwrap();
            let Some(asleep) = fenced.try_sleep() else { continue };
            asleep.stay();
            parked = true;
        }
        let mut arming = sleeper.prepare();
        if !parked {
            tail.arm(&mut arming);
        }
        let mut fenced = arming.fence();
        if !parked {
            tail.recheck(&mut fenced).unwrap();
        }
        fenced.note(is_set(&park.pending));
        if let Some(_asleep) = fenced.try_sleep() {
            park.thread.event.wait();
        }
        slept = true;
    }
}

/// Runs the model: the host advances its tail `count` times while the thread runs.
pub(crate) fn parked<H, S, W>(predicate: Predicate, count: u16, without: Without)
where
    H: Fence,
    S: Fence,
    W: Fence,
{
    let (cells, size) = (DoorbellCells::at(0), ring(8));
    let (mut doorbell, mut tail): (HostDoorbell<Word, H>, _) = in_use(&cells, size, 1);
    let (mut own, queue) = sleep_pair::<S, W>();
    let (mut sleeper, thread) = sleep_pair::<FullFence, FullFence>();
    let park = Parking::new(queue, thread);
    let host = {
        let park = park.clone();
        thread::spawn(move || {
            for at in 2..2 + count {
                if doorbell.publish_with(predicate, at) {
                    park.trap(&cells.register, at, without);
                }
            }
        })
    };
    run_controller(&mut tail, &mut own, &mut sleeper, &park, 1 + count);
    host.join().unwrap();
}

#[test]
fn a_parked_queue_is_woken() {
    for predicate in PREDICATES {
        explore(None, move || {
            parked::<FullFence, FullFence, FullFence>(predicate, 1, Without::Nothing);
        });
        explore(Some(3), move || {
            parked::<FullFence, FullFence, FullFence>(predicate, 3, Without::Nothing);
        });
    }
}

/// Two concurrent doorbell writes for a parked queue. Only one of the two writers may send a
/// message, because one message is enough. Between the writes, the queue may be woken and parked
/// again.
#[test]
fn two_doorbell_writes_for_a_parked_queue_lose_no_wakeup() {
    explore(Some(2), || {
        let (size, registers) = (ring(8), [word(0), word(0)]);
        let (mut own, queue) = sleep_pair::<FullFence, FullFence>();
        let (mut sleeper, thread) = sleep_pair::<FullFence, FullFence>();
        let park = Parking::new(queue, thread);
        let mut tails = registers.clone().map(|r| SqTail::<Word>::new(size, r));
        let vcpus = registers.map(|register| {
            let park = park.clone();
            thread::spawn(move || park.trap(&register, 1, Without::Nothing))
        });
        let mut is_parked = false;
        loop {
            if park.take_messages() && is_parked {
                own.rise();
                is_parked = false;
            }
            if !is_parked {
                if tails.each_mut().map(|tail| tail.poll().unwrap()) == [1, 1] {
                    break;
                }
                let mut arming = own.prepare();
                tails.iter_mut().for_each(|tail| tail.arm(&mut arming));
                let mut fenced = arming.fence();
                tails.iter_mut().for_each(|tail| {
                    tail.recheck(&mut fenced).unwrap();
                });
                let Some(asleep) = fenced.try_sleep() else { continue };
                asleep.stay();
                is_parked = true;
            }
            let mut fenced = sleeper.prepare().fence();
            fenced.note(is_set(&park.pending));
            if let Some(_asleep) = fenced.try_sleep() {
                park.thread.event.wait();
            }
        }
        for vcpu in vcpus {
            vcpu.join().unwrap();
        }
    });
}
