//! The program `serve`, from outside: a process, its sockets, and clients of every kind.

mod bad_input;
mod clients;
mod config;
#[cfg(feature = "faults")]
mod faults;
mod function;
mod harness;
mod idle;
mod io;
mod local;
mod medium;
mod stacked;
mod stalling;
mod telling;
mod top;
