//! What the driver does when a controller does not do what it should.
//!
//! # The ladder
//!
//! | what happens | what the driver does |
//! |---|---|
//! | a command is not completed within [`Timeouts::io`] | it sends Abort; if the controller aborts it, it is submitted again |
//! | a quarter of that time later it still is not | deletes the queue pair and creates it again |
//! | the controller does not, or CSTS.CFS or CSTS.NSSRO come up, or it is found disabled | resets the controller, and every queue pair is created again |
//! | the controller can not be reset in some tries | gives it up: everything ends with an error |
//! | its registers read as all ones, or the way to it breaks | the same at once |
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
//! A buffer is handed back only when the controller is certain not to write to it any more: with its
//! completion, when its queue is confirmed to be deleted, or when the controller is confirmed to be
//! disabled or reset. Otherwise it is kept for as long as the process lives.
//!
//! # Who does it
//!
//! A keeper thread, one for each controller, sleeps for [`Timeouts::io`] / 8 (a second at most) at a
//! time; then it changes one word that every queue pair compares once for each batch, and reads CSTS
//! if a command was outstanding for two such looks, or if [`Recovery::watch`] has passed. The queue pair's own thread then looks at the ages of its commands. A queue that has
//! nothing outstanding notices a reset when it is used next.
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
