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
//! | [`demo`] | `demo`: the tables of shadow doorbells, measured |
//! | [`inspect`] | `list`, `id-ctrl` and the other verbs of nvme-cli |
//! | [`transfer`] | `read`, `write`, `copy` |
//! | [`banner`] | what was attached, for a person |
//! | [`bench`] | `bench`: what a controller can do |
//! | [`verify`] | `verify`: whether a controller keeps what it is given |
//! | [`bind`] | `bind`, `unbind`: who has a PCI device |
//! | [`serve`] | `serve`: controllers behind vfio-user sockets |
//! | [`export`] | `export`: a disk for everyone who can not use the driver |
//! | [`top`] | `top`: what the controllers of a running `serve` do |
//! | [`trace`] | `trace`: what `serve --trace` recorded, for a person |
//! | [`target`] | TARGETs: namespaces as people write them, and the way to them |
//! | [`report`] | measurements, for machines and for people |
//! | [`local`] | a controller in this process, as the driver reaches it |
//! | [`medium`] | what a namespace keeps its bytes in, as people write it |
//! | [`plan`] | from what a person asked for to a controller's configuration |
//! | [`config`] | the file of `serve --config` |
//! | [`exit`] | what the program's exit status means |
//! | [`logging`] | lines for a person, on standard error |
#![forbid(unsafe_code)]

pub mod banner;
pub mod bench;
pub mod bind;
pub mod cli;
pub mod config;
pub mod demo;
pub mod exit;
pub mod export;
pub mod inspect;
pub mod local;
pub mod logging;
pub mod medium;
mod nohup;
pub mod plan;
pub mod report;
pub mod serve;
pub mod target;
pub mod top;
pub mod trace;
pub mod transfer;
pub mod verify;
