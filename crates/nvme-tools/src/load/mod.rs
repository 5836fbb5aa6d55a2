//! Load generator and measurement: the engine of `bench` and `demo`.
//!
//! # Architecture
//!
//! | module | contents |
//! |---|---|
//! | `config` | parameters of a run: [`LoadConfig`] |
//! | `run` | [`measure`]: distributes jobs to threads and sums up the results |
//! | `schedule` | times at which the threads measure and stop; start times of paced I/Os |
//! | `phase` | state shared by the schedule and the threads |
//! | `job_thread` | loop of a thread over its jobs |
//! | `job` | queue pair that is kept at its depth, and the latencies of its I/Os |
//! | `timeline` | results per interval, for a report |
//! | `server_cpu` | CPU time of the server process |
//! | `io_source` | source of a job's I/Os, without or with verification of the content |
//! | `host_metadata` | source with protection information that the host generates and checks |
//! | `pattern` | sequence of offsets and directions |
//!
//! # Measurements
//!
//! A job submits an I/O for every one that completes, so that `iodepth` I/Os are always in flight.
//! The driver decides when to write the doorbell: for each I/O while the queue is short, for
//! several I/Os while it is long. With `--iodepth-batch 1`, it is written for each I/O, as Linux
//! does. A thread drives one job, or several if there are fewer threads than jobs (`--threads`).
//!
//! Reading the clock twice per I/O would distort the measurement, so latency is measured for a
//! sample of I/Os: one in N with `--latency-sample N`, otherwise about 20000 per second and thread,
//! or all at lower rates. The result contains the number of samples.
//!
//! With `--rate-iops` the load is an open loop: an I/O is due at a fixed time, and its latency
//! counts from that time, even if it is submitted later. All I/Os are measured. If a job that
//! sleeps for completions has no I/O in flight, it spins for the last 200 us before a start time;
//! this CPU time is subtracted from the driver's.
//!
//! The driver counts its doorbell register writes. Only interrupts that woke a job are counted.
//! CPU time is that of the job threads, load generation included.
//!
//! # Limitations
//!
//! fio's job files, mixed block sizes and trims are not supported.

mod config;
mod host_metadata;
mod io_source;
mod job;
mod job_thread;
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
