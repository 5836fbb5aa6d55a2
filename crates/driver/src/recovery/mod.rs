//! What the driver does when a controller does not do what it should.
//!
//! # The steps
//!
//! 1. A command is not completed within [`Timeouts::io`]: the driver sends Abort. If the controller
//!    aborts the command, it is submitted again.
//! 2. A quarter of that time later it still is not completed: the driver deletes the queue pair and
//!    creates it again.
//! 3. The controller does not delete it, or CSTS.CFS or CSTS.NSSRO come up, or it is found
//!    disabled: the driver resets the controller, and creates every queue pair again.
//! 4. The controller can not be reset in some tries: the driver gives it up, and everything ends
//!    with an error. So it does at once if the registers read as all ones, or if the way to the
//!    controller breaks.
//!
//! Every step is one line in the log, and is counted: see [`RecoveryStats`].
//!
//! # What becomes of commands
//!
//! When a queue pair is created again, the controller has confirmed that the old one is gone (or
//! that it was reset): none of the old commands will have an effect any more. Those for which it
//! makes no difference whether they were carried out already
//! ([`Command::is_repeatable`](crate::Command::is_repeatable)) are submitted again, the oldest
//! first, and complete as if nothing had happened. The others, and those that were repeated
//! [`Recovery::repeats`] times in vain, end with the status Command Aborted By Host: whether they
//! have had an effect is unknown.
//!
//! To submit a write again is safe because it has not completed as far as its submitter knows: what
//! must come after it was not submitted yet. A flush covers what had completed before it was
//! submitted; that is in the controller, and is when the flush is repeated.
//!
//! A buffer is handed back only when the controller is certain not to write to it any more: with
//! its completion, when its queue is confirmed to be deleted, or when the controller is confirmed
//! to be disabled or reset. Otherwise it is kept for as long as the process lives.
//!
//! # Who does it
//!
//! A watchdog thread, one for each controller, sleeps for a tick at a time: [`Timeouts::io`] / 8, a
//! second at most. Then it changes the state epoch, a word that every queue pair compares once for
//! each batch, and the queue pair's own thread counts the tick for its commands. The watchdog reads
//! CSTS if a command was outstanding for two ticks, or if [`Recovery::watch`] has passed. A queue
//! that has nothing outstanding notices a reset when it is used next.
//!
//! | module | what it is |
//! |---|---|
//! | `policy`, `ticks`, `stats` | what is allowed, when, and how often it was done |
//! | `watchdog` | the thread, over whatever is to be watched |
//! | `reset` | resetting a controller, and giving it up |
//! | `watch` | what the watchdog does for an attached controller |
//!
//! [`Timeouts::io`]: crate::Timeouts::io

mod policy;
mod reset;
mod stats;
mod ticks;
mod watch;
mod watchdog;

pub use self::policy::Recovery;
pub(crate) use self::reset::{reset, went_away};
pub use self::stats::RecoveryStats;
pub(crate) use self::stats::{Counters, count};
pub(crate) use self::ticks::TimeoutTicks;
pub(crate) use self::watch::{check_status, read_events};
pub(crate) use self::watchdog::{WatchIntervals, Watchdog, Watched};
