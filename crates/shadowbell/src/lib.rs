//! The shadowbell program, as a library, so that its tests and the workspace's chores can use its
//! parts.
//!
//! # Architecture
//!
//! [`cli`] is the command line. Each verb has a module with `Args` (what may follow the verb) and
//! `run` (what it does), and knows nothing of the other verbs.
//!
//! | module | what it is |
//! |---|---|
//! | [`cli`] | the verbs and the options that all of them have |
//! | [`exit`] | what the program's exit status means |
//! | [`logging`] | lines for a person, on standard error |
#![forbid(unsafe_code)]

pub mod cli;
pub mod exit;
pub mod logging;
