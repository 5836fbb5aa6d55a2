//! A plain trapped doorbell, without a shadow entry, against a sleeping I/O thread.

use loom::sync::atomic::Ordering;
use loom::thread;
use shadowbell_doorbell::{Fence, FullFence, SqTail};
use std::sync::Arc;

use crate::rig::{
    Bus, DoorbellCells, Entries, Wake, Word, explore, in_use, is_set, ring, serve, sleep_pair, word,
};

/// One queue with `count` trapped writes.
pub(crate) fn trapped<S: Fence, W: Fence>(count: u16) {
    let size = ring(8);
    let memory = Entries::new(size);
    let register = word(0);
    let (mut sleeper, wake) = sleep_pair::<S, W>();
    let mut tail: SqTail<Word> = SqTail::new(size, register.clone());
    let vcpu = {
        let (memory, wake) = (memory.clone(), wake.clone());
        thread::spawn(move || {
            for at in 0..count {
                memory.write(at);
                wake.trap(&register, at + 1);
            }
        })
    };
    serve(&mut tail, &memory, count, &mut sleeper, &wake);
    vcpu.join().unwrap();
}

#[test]
fn no_trapped_doorbell_is_lost() {
    explore(None, || trapped::<FullFence, FullFence>(1));
    explore(Some(3), || trapped::<FullFence, FullFence>(3));
}

/// Two threads write doorbells at the same time, and one thread may signal for both. If the
/// controller sleeps twice, the second sleep may get a late wakeup that was for the first.
#[test]
fn two_wakers_share_a_signal_and_lose_no_wakeup() {
    explore(Some(3), || {
        let (size, registers) = (ring(8), [word(0), word(0)]);
        let (mut sleeper, wake) = sleep_pair::<FullFence, FullFence>();
        let mut tails = registers.clone().map(|r| SqTail::<Word>::new(size, r));
        let vcpus = registers.map(|register| {
            let wake = wake.clone();
            thread::spawn(move || wake.trap(&register, 1))
        });
        loop {
            let seen = tails.each_mut().map(|tail| tail.poll().unwrap());
            if seen == [1, 1] {
                break;
            }
            let mut arming = sleeper.prepare();
            for tail in &mut tails {
                tail.arm(&mut arming);
            }
            let mut fenced = arming.fence();
            for tail in &mut tails {
                tail.recheck(&mut fenced).unwrap();
            }
            if let Some(_asleep) = fenced.try_sleep() {
                wake.event.wait();
            }
        }
        for vcpu in vcpus {
            vcpu.join().unwrap();
        }
    });
}

/// A control message wakes the thread in the same way as a doorbell. The thread has to check its
/// mailbox between the fence and the sleep.
#[test]
fn a_message_wakes_too() {
    explore(None, || {
        let mailbox = word(0);
        let (mut sleeper, wake) = sleep_pair::<FullFence, FullFence>();
        let sender = {
            let (mailbox, wake) = (mailbox.clone(), wake.clone());
            thread::spawn(move || {
                mailbox.store(1, Ordering::Release);
                wake.kick();
            })
        };
        while !is_set(&mailbox) {
            let mut fenced = sleeper.prepare().fence();
            fenced.note(is_set(&mailbox));
            if let Some(_asleep) = fenced.try_sleep() {
                wake.event.wait();
            }
        }
        sender.join().unwrap();
    });
}

/// A late MMIO write wakes the controller, and its old value does not move the tail.
#[test]
fn a_late_posted_write_does_not_move_the_tail_back() {
    explore(Some(3), || posted(|cells, wake, value| wake.trap(&cells.register, value)));
}

/// A host whose MMIO writes are delivered later by another thread, which calls `deliver`.
pub(crate) fn posted(deliver: impl Fn(&DoorbellCells, &Wake, u16) + Send + 'static) {
    let size = ring(8);
    let cells = DoorbellCells::at(7);
    let (mut doorbell, mut tail) = in_use::<FullFence>(&cells, size, 0);
    let memory = Entries::new(size);
    let (mut sleeper, wake) = sleep_pair::<FullFence, FullFence>();
    let bus = Arc::new(Bus::default());
    let host = {
        let (memory, bus) = (memory.clone(), bus.clone());
        thread::spawn(move || {
            for at in 0..2 {
                memory.write(at);
                if doorbell.publish(at + 1) {
                    bus.post(Some(at + 1));
                }
            }
            bus.post(None);
        })
    };
    let bus = {
        let (cells, wake) = (cells.clone(), wake.clone());
        thread::spawn(move || {
            while let Some(value) = bus.next() {
                deliver(&cells, &wake, value);
            }
        })
    };
    serve(&mut tail, &memory, 2, &mut sleeper, &wake);
    host.join().unwrap();
    bus.join().unwrap();
    // All writes have arrived, and the tail has not moved back.
    assert_eq!(tail.poll(), Ok(2), "the tail moved backwards");
}
