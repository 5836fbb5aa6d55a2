//! The program `serve`, from outside: a process, its sockets, and clients of every kind.

mod bad_input;
mod changes;
mod clients;
mod config;
mod control;
mod disk_kinds;
mod failing_storage;
#[cfg(feature = "faults")]
mod faults;
mod fd_store;
mod fence;
mod function;
mod harness;
mod idle;
mod io;
mod keeper;
mod killers;
mod local;
mod log;
mod metrics;
mod migrate;
mod moving;
mod namespaces;
mod notify;
mod output;
mod recover;
mod renewal;
mod restore;
mod sandbox;
mod shared;
mod stacked;
mod stalling;
mod steps;
mod top;
mod trace;
mod upgrade;
