//! A load on a controller, and what it measures: the engine of `bench` and `demo`.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | `config` | what a run does, and where: [`LoadConfig`] |
//! | `run` | [`measure`]: gives the jobs to threads, and adds up |
//! | `schedule` | when the threads measure and when they stop |
//! | `phase` | what the schedule and the threads share |
//! | `job_thread` | a thread's loop over its jobs |
//! | `job` | a queue pair that is kept full, and the latencies of its I/Os |
//! | `pace` | when the next I/O is due, for a load of so many a second |
//! | `timeline` | what was done when, for a report |
//! | `server_cpu` | the processor time of the process at the other end |
//! | `io_source` | where a job's I/Os come from, and what it does to their content |
//! | `host_metadata` | the same, with protection information made and checked here |
//! | `pattern` | where the next I/O goes |
//!
//! # What is measured
//!
//! A job submits an I/O for every one that completes, so that `iodepth` are always in flight. It
//! rings as the driver thinks best, for each I/O while the queue is short and for several while it
//! is long; with `--iodepth-batch 1` for each at once, as Linux does. One thread drives a job, or
//! several if there are fewer of them (`--threads`).
//!
//! Looking at the clock twice for every I/O would be a good part of what is measured, so latency is
//! taken of some I/Os only: with `--latency-sample` of one in so many, otherwise of as many as make
//! about 20000 a second and thread (of all, where there are fewer). A row says how many were timed.
//!
//! With `--rate-iops` the load is an open loop: an I/O is due when its time has come, and its
//! latency counts from there, however late it could be submitted. All I/Os are timed then. A job
//! that sleeps for completions still waits awake for the time of an I/O when it is near and nothing
//! is in flight; that is no processor time of the driver's, and taken off.
//!
//! Doorbell writes are counted by the driver, where it writes the register. Interrupts are those
//! that woke a job. Processor time is that of the threads of the jobs, load generation included.
//!
//! # What it does not do
//!
//! fio's job files, mixed block sizes and trims.

mod config;
mod host_metadata;
mod io_source;
mod job;
mod job_thread;
mod pace;
mod pattern;
mod phase;
mod run;
mod schedule;
mod server_cpu;
mod timeline;

pub use config::{LoadConfig, MetadataMode, Workload};
pub(crate) use job::Directions;
pub(crate) use run::{Direction, Usage};
pub use run::{Outcome, measure};
pub(crate) use timeline::{Doorbells, Interval, QueueSum, Timeline, interval};
