//! A plain trapped doorbell, with no shadow entry, against a worker that sleeps.

use loom::sync::atomic::Ordering;
use loom::thread;
use shadowbell_doorbell::{Fence, FullFence, SqTail};
use std::sync::Arc;

use crate::rig::{Bed, Bell, Bus, Entries, Word, bed, explore, in_use, is_set, ring, serve, word};

/// One queue, `count` trapped writes.
pub(crate) fn trapped<S: Fence, W: Fence>(count: u16) {
    let size = ring(8);
    let memory = Entries::new(size);
    let register = word(0);
    let (mut sleeper, bed) = bed::<S, W>();
    let mut tail: SqTail<Word> = SqTail::new(size, register.clone());
    let vcpu = {
        let (memory, bed) = (memory.clone(), bed.clone());
        thread::spawn(move || {
            for at in 0..count {
                memory.write(at);
                bed.trap(&register, at + 1);
            }
        })
    };
    serve(&mut tail, &memory, count, &mut sleeper, &bed);
    vcpu.join().unwrap();
}

#[test]
fn no_trapped_doorbell_is_slept_through() {
    explore(None, || trapped::<FullFence, FullFence>(1));
    explore(Some(3), || trapped::<FullFence, FullFence>(3));
}

/// Two kickers at once, of which one may leave the signal to the other; and two rounds of sleep,
/// into the second of which a late kicker of the first may fall.
#[test]
fn two_kickers_share_a_signal_and_lose_nothing() {
    explore(Some(3), || {
        let (size, registers) = (ring(8), [word(0), word(0)]);
        let (mut sleeper, bed) = bed::<FullFence, FullFence>();
        let mut tails = registers.clone().map(|r| SqTail::<Word>::new(size, r));
        let vcpus = registers.map(|register| {
            let bed = bed.clone();
            thread::spawn(move || bed.trap(&register, 1))
        });
        loop {
            let seen = tails.each_mut().map(|tail| tail.look().unwrap());
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
            if let Some(_asleep) = fenced.settle() {
                bed.event.wait();
            }
        }
        for vcpu in vcpus {
            vcpu.join().unwrap();
        }
    });
}

/// A control message wakes as a doorbell does, if the sleeper notes its mailbox in the round.
#[test]
fn a_message_wakes_too() {
    explore(None, || {
        let mailbox = word(0);
        let (mut sleeper, bed) = bed::<FullFence, FullFence>();
        let sender = {
            let (mailbox, bed) = (mailbox.clone(), bed.clone());
            thread::spawn(move || {
                mailbox.store(1, Ordering::Release);
                bed.kick();
            })
        };
        while !is_set(&mailbox) {
            let mut fenced = sleeper.prepare().fence();
            fenced.note(is_set(&mailbox));
            if let Some(_asleep) = fenced.settle() {
                bed.event.wait();
            }
        }
        sender.join().unwrap();
    });
}

/// The MMIO write may arrive late, behind the host's back: it wakes, and its old value moves
/// nothing.
#[test]
fn a_late_posted_write_moves_nothing_back() {
    explore(Some(3), || posted(|bell, bed, value| bed.trap(&bell.register, value)));
}

/// A host whose MMIO writes are delivered by another thread, whenever it likes, by `deliver`.
pub(crate) fn posted(deliver: impl Fn(&Bell, &Bed, u16) + Send + 'static) {
    let size = ring(8);
    let bell = Bell::at(7);
    let (mut doorbell, mut tail) = in_use::<FullFence>(&bell, size, 0);
    let memory = Entries::new(size);
    let (mut sleeper, bed) = bed::<FullFence, FullFence>();
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
        let (bell, bed) = (bell.clone(), bed.clone());
        thread::spawn(move || {
            while let Some(value) = bus.next() {
                deliver(&bell, &bed, value);
            }
        })
    };
    serve(&mut tail, &memory, 2, &mut sleeper, &bed);
    host.join().unwrap();
    bus.join().unwrap();
    // Everything has arrived by now, and the tail is where it was.
    assert_eq!(tail.look(), Ok(2), "the tail moved backwards");
}
