//! Model tests of a queue, on one thread and with random steps: no wakeup is lost, no invalid value
//! is used, and no memory outside of the queue is written.
#![cfg(not(loom))]

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;
use shadowbell_doorbell::{
    Fence, HostDoorbell, InvalidDoorbell, Predicate, RingSize, Sleeper, SqTail, Waker,
};

type Peer = Box<dyn FnMut()>;

thread_local! {
    static AT_FENCE: RefCell<Option<Peer>> = const { RefCell::new(None) };
}

/// Fence that runs one action of the peer, at the critical moment between the store and the load.
struct Intrusive;

impl Fence for Intrusive {
    fn full() {
        let peer = AT_FENCE.with_borrow_mut(Option::take);
        if let Some(mut peer) = peer {
            peer();
        }
    }
}

fn at_next_fence(peer: impl FnMut() + 'static) {
    AT_FENCE.with_borrow_mut(|slot| *slot = Some(Box::new(peer)));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The host submits the given number of entries, or as many as the ring has room for.
    Submit(u32),
    /// The controller polls.
    Poll,
    /// The given number of fetched commands complete, or all of them if there are fewer.
    Complete(u32),
    /// The controller goes to sleep, if it is idle.
    Sleep,
    /// The controller goes to sleep. Right after it has armed EventIdx, the host submits this
    /// number of entries.
    SleepAgainst(u32),
    /// Doorbell Buffer Config is executed.
    Enable,
    /// Doorbell Buffer Config has completed.
    Completed,
    /// An earlier trapped write arrives late.
    LateWrite,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1u32..6).prop_map(Step::Submit),
        4 => Just(Step::Poll),
        3 => (1u32..6).prop_map(Step::Complete),
        3 => Just(Step::Sleep),
        3 => (1u32..6).prop_map(Step::SleepAgainst),
        1 => Just(Step::Enable),
        1 => Just(Step::Completed),
        1 => Just(Step::LateWrite),
    ]
}

fn leak(value: u32) -> &'static AtomicU32 {
    Box::leak(Box::new(AtomicU32::new(value)))
}

struct Host {
    size: RingSize,
    doorbell: HostDoorbell<&'static AtomicU32, Intrusive>,
    waker: Waker<&'static AtomicU32, Intrusive>,
    register: &'static AtomicU32,
    predicate: Predicate,
    submitted: u64,
    completed: u64,
    register_writes: Vec<u16>,
    signalled: bool,
}

impl Host {
    fn submit(&mut self, count: u32) {
        let room = self.size.entries() - 1 - (self.submitted - self.completed) as u32;
        let count = count.min(room);
        if count == 0 {
            return;
        }
        self.submitted += u64::from(count);
        let new = self.size.forward(self.doorbell.current(), count);
        if self.doorbell.publish_with(self.predicate, new) {
            self.register_writes.push(new);
            self.signalled |= self.waker.ring(&self.register, u32::from(new));
        }
    }
}

/// Executes the example of the crate's documentation. As a documentation test, the example is only
/// compiled, because loom would need a model around it.
#[test]
fn the_documentation_example_works() {
    let (register, shadow, event_idx) = <(AtomicU32, AtomicU32, AtomicU32)>::default();
    let state = AtomicU32::new(0);

    // The host, before and after the Doorbell Buffer Config command.
    let mut host: HostDoorbell<&AtomicU32> = HostDoorbell::new(0);
    host.attach_shadow(&shadow, &event_idx);
    // The controller executes the command.
    let mut tail = SqTail::new(RingSize::new(1024).unwrap(), &register);
    tail.enable(&shadow, &event_idx).unwrap();
    host.enable_shadow();

    // The controller is idle, and goes to sleep.
    let mut sleeper: Sleeper<&AtomicU32> = Sleeper::new(&state);
    let mut arming = sleeper.prepare();
    tail.arm(&mut arming);
    let mut fenced = arming.fence();
    assert_eq!(tail.recheck(&mut fenced), Ok(0));
    let asleep = fenced.try_sleep().expect("nothing new");

    // The host submits: it must ring, and the trap must signal.
    let waker: Waker<&AtomicU32> = Waker::new(&state);
    assert!(host.publish(1));
    assert!(waker.ring(&&register, 1));

    // The controller polls again, and the host does not ring any more.
    drop(asleep);
    assert_eq!(tail.poll(), Ok(1));
    for at in 2..1000 {
        assert!(!host.publish(at));
        assert_eq!(tail.poll(), Ok(at));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn no_wakeup_is_lost_in_any_order_of_steps(
        entries in 2u32..12,
        inclusive: bool,
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let size = RingSize::new(entries).unwrap();
        let predicate = if inclusive { Predicate::SpdkInclusive } else { Predicate::Linux };
        let (register, state) = (leak(0), leak(0));
        let pages = [(leak(0), leak(0)), (leak(0), leak(0))];
        let mut sleeper: Sleeper<_, Intrusive> = Sleeper::new(state);
        let host = std::rc::Rc::new(RefCell::new(Host {
            size,
            doorbell: HostDoorbell::new(0),
            waker: Waker::new(state),
            register,
            predicate,
            submitted: 0,
            completed: 0,
            register_writes: Vec::new(),
            signalled: false,
        }));
        let mut tail = SqTail::new(size, register);
        // The host stores its values in the shadow entry from the start. The controller may execute
        // Doorbell Buffer Config at any time, or never.
        let mut page = 0;
        host.borrow_mut().doorbell.attach_shadow(pages[page].0, pages[page].1);
        let (mut enabled, mut trusted) = (false, false);
        let mut fetched = 0u64;
        for step in steps {
            let before = tail.last();
            match step {
                Step::Submit(count) => host.borrow_mut().submit(count),
                Step::Complete(count) => {
                    let mut host = host.borrow_mut();
                    host.completed += u64::from(count).min(fetched - host.completed);
                }
                Step::Enable => {
                    if trusted {
                        // Another Doorbell Buffer Config is submitted.
                        (enabled, trusted, page) = (false, false, 1 - page);
                        host.borrow_mut().doorbell.attach_shadow(pages[page].0, pages[page].1);
                    } else if !enabled {
                        tail.enable(pages[page].0, pages[page].1).unwrap();
                        enabled = true;
                    }
                }
                Step::Completed => {
                    if enabled {
                        host.borrow_mut().doorbell.enable_shadow();
                        trusted = true;
                    }
                }
                Step::LateWrite => {
                    // Only a register write that the host made before the controller used the
                    // shadow entry can arrive late.
                    let host = host.borrow();
                    if tail.state().truth == shadowbell_doorbell::Truth::Shadow
                        && let Some(&old) = host.register_writes.first()
                    {
                        let _ = host.waker.ring(&register, u32::from(old));
                    }
                }
                Step::Poll => {
                    tail.poll().unwrap();
                }
                Step::Sleep | Step::SleepAgainst(_) => {
                    if let Step::SleepAgainst(count) = step {
                        let host = host.clone();
                        at_next_fence(move || host.borrow_mut().submit(count));
                    }
                    host.borrow_mut().signalled = false;
                    let mut arming = sleeper.prepare();
                    tail.arm(&mut arming);
                    let mut fenced = arming.fence();
                    tail.recheck(&mut fenced).unwrap();
                    let slept = fenced.try_sleep().is_some();
                    let host = host.borrow();
                    let behind = size.distance(tail.last(), host.doorbell.current());
                    prop_assert!(!slept || behind == 0 || host.signalled, "slept through {behind}");
                }
            }
            AT_FENCE.with_borrow_mut(|slot| *slot = None);
            // The controller sleeps for the rest of this step, so any update by the host must ring.
            if matches!(step, Step::Sleep) {
                let mut arming = sleeper.prepare();
                tail.arm(&mut arming);
                let mut fenced = arming.fence();
                tail.recheck(&mut fenced).unwrap();
                if let Some(_asleep) = fenced.try_sleep() {
                    let mut host = host.borrow_mut();
                    let submitted = host.submitted;
                    host.signalled = false;
                    host.submit(1);
                    prop_assert!(host.submitted == submitted || host.signalled, "no signal");
                }
            }
            fetched += u64::from(size.distance(before, tail.last()));
            prop_assert!(fetched <= host.borrow().submitted, "the tail moved backwards");
        }
        // At the end, the controller sees all entries.
        tail.poll().unwrap();
        prop_assert_eq!(tail.last(), host.borrow().doorbell.current());
    }

    /// A hostile host writes any value to any cell. Returned values are inside of the ring, and
    /// each invalid value is reported once.
    #[test]
    fn hostile_values_are_reported_and_stay_in_the_ring(
        entries in 2u32..=65536,
        writes in prop::collection::vec((0u8..3, prop_oneof![any::<u32>(), 0u32..70000]), 0..60),
    ) {
        let size = RingSize::new(entries).unwrap();
        let (register, shadow, event_idx) = <(AtomicU32, AtomicU32, AtomicU32)>::default();
        let mut tail = SqTail::new(size, &register);
        tail.enable(&shadow, &event_idx).unwrap();
        let mut has_ended = false;
        for (cell, value) in writes {
            [&register, &shadow, &event_idx][usize::from(cell)].store(value, Ordering::Relaxed);
            let expected = if tail.state().truth == shadowbell_doorbell::Truth::Shadow
                || shadow.load(Ordering::Relaxed) != 0
            {
                shadow.load(Ordering::Relaxed)
            } else {
                register.load(Ordering::Relaxed)
            };
            let before = tail.state();
            match tail.poll() {
                Ok(seen) => prop_assert!(u32::from(seen) < entries),
                Err(InvalidDoorbell { value }) => {
                    prop_assert_eq!(value, expected);
                    prop_assert!(value >= entries);
                    prop_assert_eq!(tail.state().truth, shadowbell_doorbell::Truth::Invalid);
                }
            }
            // After an invalid tail, no value is accepted.
            let is_ended = tail.state().truth == shadowbell_doorbell::Truth::Invalid;
            prop_assert_eq!(is_ended, has_ended || expected >= entries);
            prop_assert_eq!(u32::from(tail.last()), if is_ended { before.last.into() } else { expected });
            has_ended = is_ended;
        }
    }
}
