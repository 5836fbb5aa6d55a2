//! Recovery from command timeouts and controller failures.
//!
//! # Escalation
//!
//! 1. A command does not complete within [`Timeouts::io`]: the driver sends Abort. If the
//!    controller aborts the command, the driver submits the command again.
//! 2. The command does not complete within another quarter of that time: the driver deletes the
//!    queue pair and creates it again.
//! 3. The controller does not delete the queue pair, reports CSTS.CFS or CSTS.NSSRO, or is found
//!    disabled: the driver resets the controller, and creates every queue pair again.
//! 4. Several attempts to reset the controller fail: the controller has failed, and every command
//!    ends with an error. If the registers read as all ones, or the connection to the controller
//!    breaks, the controller fails at once.
//!
//! Every step is logged and counted: see [`RecoveryStats`].
//!
//! # Outstanding commands
//!
//! A queue pair is created again only after the controller has confirmed the deletion of the old
//! one, or a reset: the old commands have no further effect. Commands that may be executed twice
//! ([`Command::is_repeatable`](crate::Command::is_repeatable)) are submitted again, the oldest
//! first, and complete normally. Other commands, and commands that were submitted again
//! [`Recovery::repeats`] times without success, end with the status Command Aborted By Host; their
//! effect is unknown.
//!
//! A second submission of a write is safe: the submitter has not seen the completion of the write,
//! so it has not yet submitted the commands that must follow the write. A flush covers the writes
//! that had completed before its first submission. These writes are in the controller, so a second
//! submission covers them as well.
//!
//! A buffer is returned only when the controller no longer writes to it: when its command has
//! completed, when the deletion of the command's queue is confirmed, or when the controller is
//! disabled or reset. Otherwise the buffer is leaked until the process ends.
//!
//! # Threads
//!
//! Each controller has a watchdog thread, which sleeps for one tick at a time: [`Timeouts::io`] /
//! 8, at most one second. Each tick changes the state epoch, a word that every queue pair compares
//! once for each batch. The thread of the queue pair then counts the tick for its commands. The
//! watchdog reads CSTS if a command was outstanding for two ticks, or after [`Recovery::watch`]. A
//! queue without outstanding commands notices a reset on its next use.
//!
//! | module | contents |
//! |---|---|
//! | `policy`, `ticks` | options and counters, timeouts in ticks |
//! | `watchdog` | the watchdog thread, for any type that implements `WatchedController` |
//! | `reset` | controller reset and failure, and watchdog actions for an attached controller |
//!
//! [`Timeouts::io`]: crate::Timeouts::io

mod policy;
mod reset;
mod ticks;
mod watchdog;

pub(crate) use self::policy::{Counters, count};
pub use self::policy::{Recovery, RecoveryStats};
pub(crate) use self::reset::{check_status, handle_removal, read_events, reset};
pub(crate) use self::ticks::TimeoutTicks;
pub(crate) use self::watchdog::{WatchIntervals, Watchdog, WatchedController};
