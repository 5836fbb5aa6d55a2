//! The NVMe shadow doorbell protocol (Doorbell Buffer Config), both ends, model-checked.
//!
//! A host notifies an NVMe controller of submitted commands, or of consumed completions, by writing
//! a position to a *doorbell register*. If the controller is emulated, that write traps. For each
//! command, the trap costs an exit from the host's virtual machine: most of the cost of an emulated
//! disk. With the Doorbell Buffer Config command (NVMe Base 2.0, 5.8 and B.5) the host gives the
//! controller two pages of its memory, with an entry per doorbell in each:
//!
//! ```text
//!             host                    memory                     controller
//!
//!             new tail ────────►  Shadow Doorbell  ────────►  looks when it likes
//!        "must I ring?" ◄────────     EventIdx     ◄────────  "ring when you step over this"
//!              rings ────────────► doorbell register (trap) ──────────►  wakes
//! ```
//!
//! The host stores its value in the shadow entry at a negligible cost. It writes the register only
//! if the update passes EventIdx. A controller that is about to sleep sets EventIdx so that the
//! next update wakes it. A polling controller keeps EventIdx where the host does not pass it, so
//! nothing traps.
//!
//! The specification describes this on half a page. This crate also contains the rules that the
//! specification leaves out, and that the authors of existing products had to discover.
//!
//! | | |
//! |---|---|
//! | [`SqTail`], [`CqHead`] | controller end of a doorbell |
//! | [`HostDoorbell`] | host end of a doorbell, and the [`Predicate`]s of existing hosts |
//! | [`Sleeper`], [`Waker`] | sleep without a missed doorbell |
//! | [`RingSize`] | positions in a queue, and their wrap |
//! | [`Cell`], [`Fence`] | machine primitives; loom replaces them |
//!
//! The crate has no commands and no threads, allocates no memory, and has no shared state except
//! the cells and, optionally, the counters. Every value that the peer can write is read once, and
//! checked before it is used as a position.
//!
//! # Life of a doorbell
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
//! host.attach_shadow(&shadow, &event_idx);
//! // The controller executes the command.
//! let mut tail = SqTail::new(RingSize::new(1024).unwrap(), &register);
//! tail.enable(&shadow, &event_idx).unwrap();
//! host.enable_shadow();
//!
//! // The controller finds no work, and goes to sleep.
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
//! // The controller polls again, and the host does not ring any more.
//! drop(asleep);
//! assert_eq!(tail.poll(), Ok(1));
//! for at in 2..1000 {
//!     assert!(!host.publish(at));
//!     assert_eq!(tail.poll(), Ok(at));
//! }
//! ```
//!
//! # Rules, and the consequences of breaking them
//!
//! **Publish, fence, recheck.** The controller stores EventIdx and then reads the shadow entry
//! again; the host stores the shadow entry and then reads EventIdx. Each end stores to one location
//! and then loads from another. No processor keeps this order without a fence, and release and
//! acquire cannot express it. With a full fence between the two on *both* sides, at least one side
//! sees the other's store. Without one of the fences, a command is occasionally lost under load:
//! Linux and SPDK both had to add the fence of the host later, and the fence of Propolis was too
//! weak (#1025). In this crate, the types enforce the order: only the fence converts [`Arming`] to
//! [`Fenced`], and one fence serves all queues of a thread.
//!
//! **One source per doorbell.** Linux and SPDK do not shadow the admin queue, contrary to the
//! specification; other hosts do, and commands may be in flight when the buffers are enabled. So
//! the register is the source of the value until the controller reads a shadow entry that has
//! *departed* from its initial value (the value in the snapshot). From then on the entry is the
//! source for the lifetime of the queue, and a register write is only a wakeup. The host cannot
//! return to the initial value unnoticed: it would have to submit a whole turn of the ring, for
//! which the controller must fetch entries and so read the doorbell. For the same reason, the
//! controller reads the register first and the entry second.
//!
//! **A second Doorbell Buffer Config takes over the pending value.** The host may have updated the
//! old entry just before the command, or may update it while the command is in flight. So the
//! controller takes the snapshot of the new entry, reads the old entry a last time, and only then
//! replaces it. A host that stores an update in both entries stores it in the old one first. The
//! register is out of date at that time, because the host writes it only on request.
//!
//! **Never write the shadow entry.** A controller could copy every trapped value to the entry, to
//! have a single source. But doorbell writes can be posted writes. When a posted write arrives, the
//! entry may be two updates ahead: the copy would move the tail backwards and lose the updates in
//! between.
//!
//! **EventIdx has to move.** No EventIdx value means "never ring". The host passes any position
//! once per turn, and a value outside of the ring at every wrap, because hosts compute with 16
//! bits. While the controller polls, EventIdx has to follow behind the host: see [the
//! cost](#the-cost).
//!
//! **Two predicates.** Linux rings if EventIdx lies in \[old, new), according to the specification,
//! and SPDK if it lies in \[old, new\]. [`arm`](SqTail::arm) and the moves of EventIdx while
//! polling are correct for both.
//!
//! **A full completion queue arms its head.** A controller with completions and no room to post
//! them waits until the host's *head* moves. Propolis left the EventIdx of the head at the tail,
//! which the host passes only after it has consumed all entries and one more was posted. Commands
//! hung, Propolis did not advertise shadow doorbells for some time (#1008, #1023), and later
//! requested more notifications than necessary (#1026, #1043). The head has to be armed while a
//! submission queue waits for room, and only then.
//!
//! **A reset disables the buffers.** OpenVMM continued to write to the buffers after a Controller
//! Level Reset, when the next kernel already used their memory (#4011, #4080). Dropping the cells
//! ([`disable`](SqTail::disable)) is the first step of a reset.
//!
//! **The host keeps its own old value.** Linux and SPDK read the old value from the shadow entry,
//! although the controller can write to this entry. [`HostDoorbell`] stores the old value itself.
//! While Doorbell Buffer Config is in flight, it also writes every update to both the entry and the
//! register, so that the controller never reads a stale source.
//!
//! # The cost
//!
//! In this section, *n* is the number of entries of the ring, and *n*/4 counts as at least 1. The
//! controller polls, and reads the doorbell at least once per batch that it completes. Then a host
//! with at most *n* - *n*/4 commands outstanding (SPDK: one fewer) never rings. That holds in every
//! schedule, even if the controller reads the doorbell between the host's shadow store and its
//! EventIdx load, for updates of up to *n*/8 entries. At a greater depth, up to a full ring, the
//! worst schedule makes the host ring 3 times (SPDK: 5) per turn of the ring. These limits are
//! exact: `controller/run_ahead_model.rs` visits every state of small rings, and with one command
//! more the host does ring. The cost for the controller is one store to EventIdx, whose cache line
//! the host reads, per *n*/8 or more entries.
//!
//! A sleep costs a store per queue, the fence, and the rechecks; the wakeup costs one trap. After a
//! wakeup by one queue, [`disarm`](SqTail::disarm) withdraws the requests of the queues whose value
//! has not changed, so that their next update does not ring.
//!
//! # Limits of the protocol
//!
//! - A host may enable the buffers while entries differ from the current doorbell values, for
//!   example with entries of zero and commands in flight. If a doorbell later reaches exactly the
//!   value that its entry had, the entry looks unchanged. If this happens in one update, the host
//!   rings, because EventIdx equals the last value until the entry departs; so the register has the
//!   value. Otherwise (several updates faster than the controller polls, or a host that reads its
//!   old value from the entry and so detects no change), the controller sees the update together
//!   with the next one. This state cannot occur if the host sets the entries first, as
//!   [`HostDoorbell::attach_shadow`] does, or enables the buffers before it creates queues, as
//!   Linux and SPDK do. The same holds for a second Doorbell Buffer Config whose entries differ
//!   from the current doorbell values.
//! - A submission queue's tail that overtakes its head, or that is set to zero while the queue
//!   exists, cannot be distinguished from a full queue of commands. A completion queue's head past
//!   the posted entries is detected and refused.
//!
//! # Verification
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p shadowbell-doorbell --release --test loom` explores every
//! interleaving, and every reordering that loom models, of both kinds of hosts with a controller
//! that sleeps, at the wrap of the ring, with the completion queue full, and while the buffers are
//! enabled. Loom explores the shipped code. The same run removes one fence or one rule at a time
//! and asserts that it then finds the lost wakeup.
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
pub use controller::{CqHead, DoorbellState, SqTail, Truth};
pub use host::{HostDoorbell, Predicate};
pub use ring::{InvalidDoorbell, RingSize};
pub use sleep::{Arming, Asleep, Fenced, Sleeper, Waker};
pub use stats::{ControllerCounters, ControllerStats, Counter, HostStats, SleeperStats};
