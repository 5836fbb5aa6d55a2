//! `cargo xtask bench`: how fast it is, next to what this machine could do at best.
//!
//! # Architecture
//!
//! From the bottom up; each module uses only what stands above it.
//!
//! * [`workspace`] and [`table`]: the repository and cargo in it, and the one way to print a table.
//!   The guest suites of `xtask` use them as well. [`figures`] writes numbers with their units.
//! * `settings`: what all suites measure by.
//! * `machine`, `process`, `server`: the machine, running processes, and `shadowbell serve`.
//! * `load`: one measurement of the program as a user would run it, `shadowbell serve` in a process
//!   pinned to one processor, `shadowbell bench` in another on another. `syscalls` counts for it.
//! * `wire`, `memcpy`, `fio`: the yardsticks of queues, of memory and of files.
//! * `samples`: one figure of several rounds.
//! * `suites`: a file each. A suite returns tables.
//! * `run`: the command line; it runs the suites, prints their tables and ends with the rows as
//!   JSON.
//!
//! # Rounds
//!
//! What is compared is measured in turns: all contestants under one condition, then the next
//! condition, then all of it again. So a machine that gets slower does so for all of them. A figure
//! is the median of the rounds, and a ratio is the median of the ratios within a round.
#![forbid(unsafe_code)]

mod certificates;
pub mod figures;
mod fio;
mod held;
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
