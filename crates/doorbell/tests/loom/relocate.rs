//! A queue that goes from one sleeping thread to another while its host rings.
//!
//! A writer looks up whose queue it is, stores the register, passes the fence of its ring, and
//! looks up once more: if the queue has gone elsewhere meanwhile, it rings there as well. Who hands
//! the queue over says so before the other may look. So either the new owner sees the register in
//! its last look before it sleeps, or the writer sees the new owner.

use loom::sync::atomic::Ordering;
use loom::thread;
use shadowbell_doorbell::{FullFence, SqTail};

use crate::rig::{Entries, Wake, explore, ring, serve, sleep_pair, word};

/// One doorbell write while the queue goes from worker 0 to worker 1. The writer looks once more
/// only if `twice`.
pub(crate) fn relocated(twice: bool) {
    let (size, register, owner) = (ring(8), word(0), word(0));
    let memory = Entries::new(size);
    // The old owner is awake until it has handed the queue over, and does not look at it any more.
    let (_old, old_wake) = sleep_pair::<FullFence, FullFence>();
    let (mut sleeper, wake) = sleep_pair::<FullFence, FullFence>();
    let host = {
        let (memory, register, owner) = (memory.clone(), register.clone(), owner.clone());
        let wakes: [Wake; 2] = [old_wake, wake.clone()];
        thread::spawn(move || {
            memory.write(0);
            let before = owner.load(Ordering::Acquire);
            wakes[before as usize].trap(&register, 1);
            let now = owner.load(Ordering::Acquire);
            if twice && now != before {
                wakes[now as usize].trap(&register, 1);
            }
        })
    };
    owner.store(1, Ordering::Release);
    // What the queue is made of arrives with a message, which is of no interest here.
    let mut tail = SqTail::new(size, register);
    serve(&mut tail, &memory, 1, &mut sleeper, &wake);
    host.join().unwrap();
}

#[test]
fn a_queue_that_goes_elsewhere_misses_no_doorbell() {
    explore(None, || relocated(true));
}
