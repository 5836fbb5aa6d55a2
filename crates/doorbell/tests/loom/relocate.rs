//! A queue that moves from one sleeping thread to another while its host rings.
//!
//! A doorbell write looks up the queue's owner, stores the register, executes the fence of its
//! ring, and looks up the owner again. If the queue has moved in between, the write also rings the
//! new owner. The old owner stores the identity of the new owner before the new owner may poll. So
//! either the new owner sees the register in its last check before it sleeps, or the writer sees
//! the new owner.

use loom::sync::atomic::Ordering;
use loom::thread;
use shadowbell_doorbell::{FullFence, SqTail};

use crate::rig::{Entries, Wake, explore, ring, serve, sleep_pair, word};

/// One doorbell write while the queue moves from I/O thread 0 to I/O thread 1. If `twice` is true,
/// the writer looks up the owner a second time.
pub(crate) fn relocated(twice: bool) {
    let (size, register, owner) = (ring(8), word(0), word(0));
    let memory = Entries::new(size);
    // The old owner does not sleep before it has moved the queue, and does not poll the queue
    // afterwards.
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
    // In the shipped code, the old owner sends the queue to the new owner in a message. The model
    // omits this message, so that it does not rely on the synchronization by the message.
    let mut tail = SqTail::new(size, register);
    serve(&mut tail, &memory, 1, &mut sleeper, &wake);
    host.join().unwrap();
}

#[test]
fn a_moved_queue_misses_no_doorbell() {
    explore(None, || relocated(true));
}
