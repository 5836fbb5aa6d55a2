//! `cargo xtask bench`: performance, compared with the limits of this machine and with other
//! programs.
//!
//! # Architecture
//!
//! From bottom to top; each module uses only modules above it in this list.
//!
//! * [`workspace`] and [`table`]: the repository and cargo, and tables. The guest suites of
//!   `xtask` use them as well. [`figures`] formats numbers with units.
//! * `settings`: parameters of all suites.
//! * `machine`, `process`, `server`: the machine, running processes, and `shadowbell serve`.
//! * `load`: one measurement of the program as users run it: `shadowbell serve` in a process
//!   pinned to one CPU, `shadowbell bench` in another process on another CPU. `syscalls` counts
//!   their system calls.
//! * `wire`, `memcpy`, `fio`: references for queues, memory and files.
//! * `samples`: statistics of several rounds.
//! * `suites`: one file per suite. A suite returns tables.
//! * `run`: the command line. It runs the suites, prints their tables, and prints the rows as
//!   JSON.
//!
//! # Rounds
//!
//! Contestants are measured in turns: all of them under one condition, then all under the next
//! condition. After the last condition, the next round starts. So a machine that becomes slower
//! affects all contestants. A figure is the median of the rounds, and a ratio is the median of the
//! ratios within a round.
#![forbid(unsafe_code)]

mod attachments;
mod certificates;
pub mod figures;
mod fio;
mod load;
mod machine;
mod memcpy;
mod peers;
mod process;
mod run;
mod samples;
mod server;
mod settings;
mod suites;
mod syscalls;
pub mod table;
mod wire;
pub mod workspace;

pub use run::{Arguments, EXAMPLES, check_doubling, check_instructions, rbd, run};
