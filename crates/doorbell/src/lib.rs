//! The NVMe shadow doorbell protocol (Doorbell Buffer Config), both ends, model-checked.
//!
//! A host notifies an NVMe controller of submitted commands, or of consumed completions, by writing
//! a position to a *doorbell register*. If the controller is emulated, that write traps: per
//! command, it costs the host an exit from its virtual machine, which is most of the cost of an
//! emulated disk. With the Doorbell Buffer Config command (NVMe Base 2.0, 5.8 and B.5) the host
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
//! The host stores its value in the shadow entry, which costs next to nothing. It writes the
//! register only if the update passes EventIdx: a controller that is about to sleep sets EventIdx
//! to be woken. A polling controller keeps EventIdx out of the host's way, so nothing traps.
//!
//! The specification describes this on half a page. This crate contains what that page leaves out
//! and what shipping products had to find out.
//!
//! | | |
//! |---|---|
//! | [`SqTail`], [`CqHead`] | controller end of a doorbell |
//! | [`HostDoorbell`] | host end of a doorbell, and the [`Predicate`]s of existing hosts |
//! | [`Sleeper`], [`Waker`] | sleep without a missed doorbell |
//! | [`RingSize`] | positions in a queue, and their wrap |
//! | [`Cell`], [`Fence`] | machine primitives; loom replaces them |
//!
//! The crate has no commands, no threads, no allocation, and no shared state except the cells and,
//! optionally, the counters. Every value that the peer can write is read once, and checked before
//! it is used as a position.
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
//! # Rules, and the consequences of breaking them
//!
//! **Publish, fence, recheck.** The controller stores EventIdx and then reads the shadow entry
//! again; the host stores the shadow entry and then reads EventIdx. Each is a store followed by a
//! load of another location, the one order that no processor keeps by itself and that release and
//! acquire cannot express. With a full fence between the two on *both* sides, at least one side
//! sees the other's store. Without one of the fences, a command is lost occasionally, under load:
//! the hosts in Linux and in SPDK both had to add their fence later, and Propolis (#1025) found its
//! own too weak. In this crate, the types enforce the order: [`Arming`] becomes [`Fenced`] only by
//! the fence, and one fence serves all the queues of a thread.
//!
//! **One source per doorbell.** Linux and SPDK do not shadow the admin queue, contrary to the
//! specification; other hosts do, and commands may be in flight when the buffers are enabled. So
//! the register is the source of the value until the shadow entry has been seen to *depart* from
//! its initial value. From then on the entry is the source for the lifetime of the queue, and a
//! write of the register is only a wakeup. A host cannot return to the initial value unnoticed: it
//! would have to submit a whole turn of the ring, and before that the controller must have fetched
//! entries, and so have read the doorbell. (For that, a look reads the register first and the entry
//! second.)
//!
//! **Never write the shadow entry.** A controller could copy every trapped value to the entry, to
//! have a single source. But doorbell writes can be posted writes, and the entry may be two updates
//! ahead when they arrive: the tail would move backwards, and the updates in between would be lost.
//!
//! **EventIdx has to move.** No EventIdx value means "never ring". Any position is passed once per
//! turn, and a value outside of the ring at every wrap, because hosts compute with 16 bits. While
//! the controller polls, EventIdx has to follow behind the host; see [the cost](#the-cost).
//!
//! **Two predicates.** Linux rings if EventIdx lies in \[old, new), according to the specification,
//! and SPDK if it lies in \[old, new\]. [`arm`](SqTail::arm) and the running ahead of EventIdx are
//! correct for both.
//!
//! **A full completion queue arms its head.** A controller with completions and no room waits for
//! the host's *head* to move. Propolis left that EventIdx at the tail, which the host passes only
//! after it has consumed everything and more was posted: commands hung, shadow doorbells were not
//! advertised for a while (#1008, #1023), and there are more notifications than necessary since
//! (#1026, #1043). The head has to be armed while a submission queue waits for room, and only then.
//!
//! **A reset disables the buffers.** OpenVMM continued to write to them after a Controller Level
//! Reset, when they were memory of the next kernel (#4011, #4080). Dropping the cells
//! ([`disable`](SqTail::disable)) is the first step of a reset.
//!
//! **The host keeps its own old value.** Linux and SPDK read it back from the shadow entry, where
//! the controller can write. [`HostDoorbell`] remembers it. It also stores every update in the
//! entry *and* in the register while Doorbell Buffer Config is in flight, so that at no time the
//! controller reads a stale source.
//!
//! # The cost
//!
//! For a ring of *n* entries (with *n*/4 of at least 1): while the controller polls, and reads the
//! doorbell at least once per batch that it completes, a host with at most *n* - *n*/4 commands
//! outstanding never rings, if it is Linux, and with one fewer if it is SPDK. That holds in every
//! schedule, even if the controller's look falls between the host's shadow store and its EventIdx
//! load, for updates of up to *n*/8 entries. Beyond that depth, with the ring full, the worst
//! schedule makes the host ring 3 times (SPDK: 5) per turn of the ring. These bounds are exact:
//! `controller/run_ahead_model.rs` visits every state of small rings, and with one command more the
//! host does ring. The controller pays with one store to EventIdx, whose cache line the host reads,
//! per *n*/8 or more entries.
//!
//! A sleep costs a store per queue, the fence, and the rechecks; the wakeup costs one trap. Where
//! no value has changed, [`disarm`](SqTail::disarm) withdraws the request, so that a controller
//! woken by one queue does not make all the others ring.
//!
//! # Limits of the protocol
//!
//! - A host may enable the buffers with entries that differ from the current doorbell values (left
//!   at zero, for example, with commands in flight), and later reach exactly that old value: the
//!   entry looks unchanged. If it does so in one update, EventIdx, which equals the last value
//!   until the entry departs, makes it ring, and the register has the value. If it takes several
//!   updates, faster than the controller polls, or if the host reads its old value from the entry
//!   and so detects no change, the update is seen together with the next one. Hosts that set the
//!   entries first, as [`HostDoorbell::mirror`] does, or that enable the buffers before they create
//!   queues, as Linux and SPDK do, cannot get into that state.
//! - A submission queue's tail that overtakes its head, or that is set to zero while the queue
//!   exists, looks like a full queue of commands. Nothing in the protocol distinguishes the two. A
//!   completion queue's head past the posted entries is detected and refused.
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
pub use controller::{CqHead, DoorbellState, InvalidDoorbell, SqTail, Truth};
pub use host::{HostDoorbell, Predicate};
pub use ring::RingSize;
pub use sleep::{Arming, Asleep, Fenced, Sleeper, Waker};
pub use stats::{ControllerCounters, ControllerStats, Counter, HostStats, SleeperStats};
