//! The NVMe shadow doorbell protocol (Doorbell Buffer Config), both ends, model-checked.
//!
//! A host notifies an NVMe controller that it has submitted commands, or consumed completions, by
//! writing a position to a *doorbell register*. If the controller is emulated, that write traps:
//! it costs the host a trip out of its virtual machine, per command, and it is most of the price of
//! an emulated disk. With the Doorbell Buffer Config command (NVMe Base 2.0, 5.8 and B.5) the host
//! gives the controller two pages of its memory, with an entry per doorbell in each:
//!
//! ```text
//!             host                    memory                     controller
//!
//!             new tail ────────►  Shadow Doorbell  ────────►  looks when it likes
//!        "must I ring?" ◄────────     EventIdx     ◄────────  "ring when you step over this"
//!              rings ────────────► doorbell register (trap) ──────────►  wakes
//! ```
//!
//! The host stores its value in the shadow entry, where it costs nothing. It writes the register
//! only if the update steps over EventIdx, which is how a controller that is about to sleep asks to
//! be woken. A controller that polls keeps EventIdx out of the host's way, and nothing traps at
//! all.
//!
//! So much fits on half a page of the specification. What else is in this crate is what that page
//! does not say, and what shipping products had to find out.
//!
//! | | |
//! |---|---|
//! | [`SqTail`], [`CqHead`] | the controller's end of one doorbell |
//! | [`HostDoorbell`] | the host's end of one doorbell, and the [`Predicate`]s that are in the wild |
//! | [`Sleeper`], [`Waker`] | going to sleep without missing a doorbell |
//! | [`RingSize`] | positions in a queue, and where they wrap |
//! | [`Cell`], [`Fence`] | all that is needed of the machine; loom puts its own underneath |
//!
//! No commands, no threads, no allocation, no state that is shared but for the cells and, if one
//! likes, the counters. Every value that the peer can write is read once, and checked before it is
//! a position.
//!
//! # A doorbell's life
//!
//! ```no_run
//! use core::sync::atomic::AtomicU32;
//! use shadowbell_doorbell::{HostDoorbell, RingSize, Sleeper, SqTail, Waker};
//!
//! let (register, shadow, event_idx) = <(AtomicU32, AtomicU32, AtomicU32)>::default();
//! let state = AtomicU32::new(0);
//!
//! // The host, before and after the Doorbell Buffer Config command.
//! let mut host: HostDoorbell<&AtomicU32> = HostDoorbell::new(0);
//! host.mirror(&shadow, &event_idx);
//! // The controller, as it executes the command.
//! let mut tail = SqTail::new(RingSize::new(1024).unwrap(), &register);
//! tail.enable(&shadow, &event_idx);
//! host.trust();
//!
//! // The controller finds nothing to do, and goes to sleep.
//! let mut sleeper: Sleeper<&AtomicU32> = Sleeper::new(&state);
//! let mut arming = sleeper.prepare();
//! tail.arm(&mut arming);
//! let mut fenced = arming.fence();
//! assert_eq!(tail.recheck(&mut fenced), Ok(0));
//! let asleep = fenced.try_sleep().expect("nothing new");
//!
//! // The host submits: it must ring, and the trap must signal.
//! let waker: Waker<&AtomicU32> = Waker::new(&state);
//! assert!(host.publish(1));
//! assert!(waker.ring(&&register, 1));
//!
//! // Up again, and from here on nothing rings.
//! drop(asleep);
//! assert_eq!(tail.look(), Ok(1));
//! for at in 2..1000 {
//!     assert!(!host.publish(at));
//!     assert_eq!(tail.look(), Ok(at));
//! }
//! ```
//!
//! # The rules, and what each of them costs who breaks it
//!
//! **Publish, fence, look again.** The controller stores EventIdx and then looks at the shadow
//! entry a last time; the host stores the shadow entry and then looks at EventIdx. Each is a store
//! followed by a load of something else, the one order that no processor keeps by itself and that
//! neither release nor acquire expresses. With a full fence between the two on *both* sides, at
//! least one sees what the other did. With one missing, a command is lost now and then, under load,
//! on somebody else's machine: the hosts in Linux and in SPDK both had to add theirs later, and
//! Propolis (#1025) found its own too weak. Here the order is in the types: [`Arming`] becomes
//! [`Fenced`] by the fence and by nothing else, and one fence serves all the queues of a thread.
//!
//! **One truth per doorbell.** Linux and SPDK do not shadow the admin queue, against the letter of
//! the specification; other hosts do, and commands may be in flight when the buffers come. So the
//! register stays the truth until the shadow entry has been seen to *depart* from what it held when
//! the buffers came; from then on the entry is the truth for as long as the queue lives, and a
//! write of the register only wakes. A host cannot come round to the old value unseen: it would
//! have to submit a whole turn of the ring, and before that the controller must have fetched, thus
//! looked. (For that, a look reads the register first and the entry second.)
//!
//! **Never write the shadow entry.** It is tempting to copy every trapped value there, so that
//! there is one place to look. But doorbell writes can be posted, and the entry may be two updates
//! further when they arrive: the tail goes back, and what was in between is never seen.
//!
//! **EventIdx does not stand still.** "Never ring" has no value. Any position is stepped over once
//! per turn, and one outside the ring at every wrap, as the hosts compute with 16 bits. While
//! polling, EventIdx has to run along behind the host; see [the price](#the-price).
//!
//! **Two predicates.** Linux rings if EventIdx lies in \[old, new), as the specification has it,
//! and SPDK if it lies in \[old, new\]. [`arm`](SqTail::arm) is right for both, and running ahead
//! is quiet for both.
//!
//! **A full completion queue arms its head.** A controller that has completions and no room waits
//! for the host's *head* to move. Propolis left that EventIdx at the tail, which the host steps
//! over only after it has consumed everything and more was posted: commands hung, shadow doorbells
//! were not advertised for a while (#1008, #1023), and have notified more than they need to since
//! (#1026, #1043). Arm it while a submission queue waits for room, and only then.
//!
//! **The buffers die with the reset.** OpenVMM went on writing to them after a Controller Level
//! Reset, when they were the memory of the next kernel (#4011, #4080). Drop the cells
//! ([`disable`](SqTail::disable)) before anything else of the reset is done.
//!
//! **The host keeps its own old value.** Linux and SPDK read it back from the shadow entry, where
//! others can write. [`HostDoorbell`] remembers it. It also mirrors every update into the entry
//! *and* the register while Doorbell Buffer Config is under way, so there is no moment at which the
//! controller could look in the wrong one of the two.
//!
//! # The price
//!
//! Let a ring have *n* entries (and let *n*/4 be at least 1). While the controller polls, looking
//! at least once per batch that it completes, a host with at most *n* - *n*/4 commands outstanding
//! never rings, if it is Linux, and with one fewer if it is SPDK: in no schedule, and not even if
//! the controller's look falls between its shadow store and its EventIdx load, for updates of up to
//! *n*/8 entries. Beyond that depth, with the ring full, the worst schedule makes it ring 3 times
//! (SPDK: 5) per turn of the ring. Those are exact, not estimates: `controller/run_ahead_model.rs`
//! visits every state of small rings, and one command more does ring. The controller pays with one
//! store to EventIdx, whose cache line the host reads, per *n*/8 or more entries.
//!
//! A sleep costs a store per queue, the fence, and the second looks; the wakeup one trap. Where
//! nothing has moved, [`disarm`](SqTail::disarm) takes the request back, so that a controller woken
//! by one queue does not make all the others ring.
//!
//! # What cannot be made right
//!
//! - A host that puts the buffers in force with entries that are not at their doorbells' present
//!   values (left at zero, say, with commands in flight), and that then comes round to exactly that
//!   old value: the entry looks untouched. If it does so in one update, EventIdx, which stays in
//!   step with the last value until the entry departs, makes it ring, and the ring is the truth. If
//!   it takes several, faster than the controller looks, or if the host has its old value from the
//!   entry and so believes that nothing moved, the update is seen together with the next one. Hosts
//!   that set the entries first, as [`HostDoorbell::mirror`] does, or that have the buffers before
//!   the queues, as Linux and SPDK do, cannot get there.
//! - A submission queue's tail that overtakes its head, or that is set to zero while the queue is
//!   alive, looks like a full queue of commands. Nothing in the protocol distinguishes the two. A
//!   completion queue's head past what was posted is recognized, and refused.
//!
//! # How it is checked
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p shadowbell-doorbell --release --test loom` explores every
//! interleaving, and every reordering that loom knows of, of hosts of both kinds against a
//! controller that sleeps, at the wrap of the ring, with the completion queue full, and while the
//! buffers come. What loom explores is the code that ships. The same run takes one fence or one
//! rule away at a time and asserts that it then finds the lost wakeup.
#![forbid(unsafe_code)]
#![cfg_attr(not(any(test, loom)), no_std)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

extern crate alloc;

mod cell;
mod controller;
mod host;
mod ring;
mod sleep;
mod stats;

pub use cell::{Cell, Fence, FullFence};
pub use controller::{CqHead, DoorbellState, InvalidDoorbell, SqTail, Truth};
pub use host::{HostDoorbell, Predicate};
pub use ring::RingSize;
pub use sleep::{Arming, Asleep, Fenced, Sleeper, Waker};
pub use stats::{ControllerCounters, ControllerStats, Counter, HostStats, SleeperStats};
