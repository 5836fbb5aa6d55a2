//! Single-threaded tests of sleep rounds.

use core::sync::atomic::{AtomicU32, Ordering};

use super::{AWAKE, SLEEPING, Sleeper, WAKING, Waker};
use crate::{FullFence, RingSize, SqTail};

fn tail(register: &AtomicU32) -> SqTail<&AtomicU32> {
    SqTail::new(RingSize::new(8).unwrap(), register)
}

#[test]
fn an_arming_round_without_work_ends_in_sleep() {
    let (state, register) = <(AtomicU32, AtomicU32)>::default();
    let mut sleeper: Sleeper<_> = Sleeper::new(&state);
    let mut tail = tail(&register);
    let mut arming = sleeper.prepare();
    tail.arm(&mut arming);
    let mut fenced = arming.fence();
    tail.recheck(&mut fenced).unwrap();
    fenced.note(false);
    let asleep = fenced.try_sleep();
    assert!(asleep.is_some());
    assert_eq!(state.load(Ordering::Relaxed), SLEEPING);
    drop(asleep);
    assert_eq!(state.load(Ordering::Relaxed), AWAKE);
    assert_eq!(sleeper.stats().slept, 1);
}

#[test]
fn a_forgotten_recheck_prevents_sleep() {
    let state = AtomicU32::new(0);
    let registers = <[AtomicU32; 2]>::default();
    let mut sleeper: Sleeper<_> = Sleeper::new(&state);
    let mut tails = registers.each_ref().map(tail);
    let mut arming = sleeper.prepare();
    for tail in &mut tails {
        tail.arm(&mut arming);
    }
    let mut fenced = arming.fence();
    tails[0].recheck(&mut fenced).unwrap();
    assert!(fenced.try_sleep().is_none());
    assert_eq!(state.load(Ordering::Relaxed), AWAKE);
    assert_eq!(sleeper.stats().stayed_awake, 1);
}

#[test]
fn other_news_prevents_sleep() {
    let mut sleeper: Sleeper<_> = Sleeper::new(AtomicU32::new(0));
    let mut fenced = sleeper.prepare().fence();
    fenced.note(true);
    fenced.note(false);
    assert!(fenced.try_sleep().is_none());
}

#[test]
fn a_dropped_arming_round_leaves_the_thread_awake() {
    let state = AtomicU32::new(0);
    let mut sleeper: Sleeper<_> = Sleeper::new(&state);
    drop(sleeper.prepare());
    assert_eq!(state.load(Ordering::Relaxed), AWAKE);
    drop(sleeper.prepare().fence());
    assert_eq!(state.load(Ordering::Relaxed), AWAKE);
    assert_eq!(sleeper.stats().rounds, 2);
}

#[test]
fn only_a_sleeper_is_signalled_and_only_once() {
    let (state, register) = <(AtomicU32, AtomicU32)>::default();
    let mut sleeper: Sleeper<_> = Sleeper::new(&state);
    let waker = Waker::<_, FullFence>::new(&state);
    assert!(!waker.ring(&&register, 3), "awake: the thread polls by itself");
    assert_eq!(register.load(Ordering::Relaxed), 3);
    let asleep = sleeper.prepare().fence().try_sleep();
    assert!(waker.clone().ring(&&register, 4));
    assert_eq!(state.load(Ordering::Relaxed), WAKING);
    assert!(!waker.kick(), "another waker signals already");
    assert_eq!(register.load(Ordering::Relaxed), 4);
    drop(asleep);
    assert!(!waker.kick());
    let _asleep = sleeper.prepare().fence().try_sleep();
    assert!(waker.kick(), "each sleep needs a signal of its own");
}

#[test]
fn a_sleeping_thread_is_signalled_once_until_it_wakes() {
    let state = AtomicU32::new(0);
    let mut sleeper: Sleeper<_> = Sleeper::new(&state);
    let waker = Waker::<_, FullFence>::new(&state);
    sleeper.prepare().fence().try_sleep().expect("nothing new").stay();
    assert_eq!(state.load(Ordering::Relaxed), SLEEPING);
    assert!(waker.kick());
    assert!(!waker.kick(), "another waker signals already");
    sleeper.rise();
    assert_eq!(state.load(Ordering::Relaxed), AWAKE);
    assert!(!waker.kick());
}
