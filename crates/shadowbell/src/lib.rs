//! The shadowbell program. It is a library only so that its tests and the fuzz targets can use
//! parts of it ([`testing`]); what an integrator embeds is in the crate `shadowbell-frontend`.
//!
//! # Architecture
//!
//! `cli` is the command line. Each verb has a module with `Args` (what may follow the verb) and
//! `run` (what it does). Verbs do not use each other: what they have in common is in the modules
//! below them.
//!
//! | verbs | what they do |
//! |---|---|
//! | `serve` | controllers behind vfio-user sockets |
//! | `demo` | the tables of shadow doorbells, measured |
//! | `bench` | what a controller can do |
//! | `verify` | whether a controller keeps what it is given |
//! | `inspect` | `list`, `id-ctrl` and the other verbs of nvme-cli |
//! | `transfer` | `read`, `write`, `copy` |
//! | `export` | a disk for everyone who can not use the driver |
//! | `bind` | `bind`, `unbind`: who has a PCI device |
//! | `upgrade` | a running `serve` goes on in a new process |
//! | `ctl` | look at a running `serve`, and change it |
//! | `top` | what the controllers of a running `serve` do |
//! | `trace` | what `serve --trace` recorded, for a person |
//! | `attach_many` | many controllers attached at once |
//! | `manual` | manual pages and completions, for packages |
//!
//! | shared | what it is |
//! |---|---|
//! | `load` | a load on a controller, and what it measures |
//! | `session` | an attached controller, with the namespace that a TARGET names |
//! | `overwrite` | whether somebody means to overwrite what a disk holds |
//! | `banner` | what was attached, for a person |
//! | `local` | a controller in this process, as the driver reaches it |
//! | `controller_config` | a controller as a person asks for it, and its configuration |
//! | `ana_word` | what a controller makes of a group of namespaces |
//! | `offered_doorbells` | how doorbells come to a controller |
//! | `disk_spec` | disks as people write them |
//! | `disk_recovery` | the disks of a process that has died, in the next one |
//! | `transport` | the way to a controller outside of this process |
//! | `target` | TARGETs: namespaces as people write them |
//! | `supervisor` | the process that starts and restarts the server process, unless `--no-keeper` |
//! | `checkpoint` | checkpoint of a server process, for recovery, and its packets |
//! | `checkpoint_codec` | serialization of a checkpoint for the next supervisor |
//! | `path_broker` | protocol for sockets and files that the supervisor creates |
//! | `grant` | lets a server in a sandbox have images |
//! | `control` | what a server and those who control it say to each other |
//! | `notify` | what a service manager is told |
//! | `live_stats` | what a server and `top` say to each other |
//! | `queue_options` | how doorbells are rung and completions found |
//! | `content`, `rng` | blocks that show whether they are the right ones; random numbers |
//! | `report`, `latency` | measurements, for machines |
//! | `page` | measurements as a page with diagrams |
//! | `table`, `units` | tables and numbers, for people |
//! | `plain_words` | what libraries say in Rust's words, in a person's |
//! | `parse`, `cpu_list` | sizes, times and processors as people write them |
//! | `subsystems` | what several controllers of a process share |
//! | `shell`, `paste` | words of a command line that a person pastes; how they are printed |
//! | `signals`, `descriptor_limit` | what the program asks of the system |
//! | `log_thread` | lines of the log, until they are written |
//! | `late_close` | descriptors that take their time to close |
//! | `logging`, `exit` | lines on standard error; what the exit status means |
#![forbid(unsafe_code)]

mod ana_word;
mod attach_many;
mod banner;
mod bench;
mod bind;
mod checkpoint;
mod checkpoint_codec;
mod cli;
mod content;
mod control;
mod controller_config;
mod cpu_list;
mod ctl;
mod ctl_ana;
mod ctl_plan;
mod ctl_trace;
mod demo;
mod descriptor_limit;
mod disk_recovery;
mod disk_spec;
mod exit;
mod export;
mod grant;
mod inspect;
mod late_close;
mod latency;
mod layers;
mod limits;
mod live_stats;
mod load;
mod local;
mod log_thread;
mod logging;
mod manage;
mod manual;
mod notify;
mod offered_doorbells;
mod output;
mod overwrite;
mod page;
mod parse;
mod paste;
mod path_broker;
mod plain_words;
mod pool;
mod pool_disks;
mod queue_options;
mod replace;
mod report;
mod rng;
mod self_as_is;
mod serve;
mod session;
mod shell;
mod signals;
mod subsystems;
mod supervisor;
mod table;
mod target;
mod top;
mod trace;
mod transfer;
mod transport;
mod units;
mod upgrade;
mod uuid_text;
mod verify;
mod whole_file;

pub use cli::main;

/// What the tests and the fuzz targets of this workspace use. Nothing else may.
#[doc(hidden)]
pub mod testing {
    pub use crate::bench::Args as BenchArgs;
    pub use crate::load::{LoadConfig, MetadataMode, Outcome, Workload, measure};
    pub use crate::local::connect;
    pub use crate::session::Session;
    pub use crate::target::Target;
    pub use crate::verify::{Args as VerifyArgs, verify};

    /// Reads a file as `serve --config` does, and forgets it.
    ///
    /// # Errors
    /// All that is wrong with it.
    pub fn check_config_file(path: &std::path::Path) -> anyhow::Result<()> {
        crate::serve::read_config_file(path).map(drop)
    }
}
