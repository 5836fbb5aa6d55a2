//! The shadowbell program. It is a library only for its tests and the fuzz targets ([`testing`]).
//! The crate for integration into other programs is `shadowbell-frontend`.
//!
//! # Architecture
//!
//! `cli` is the command line. Each verb has a module with `Args` (its options) and `run`. Verbs do
//! not use each other: shared code is in the modules of the second table.
//!
//! | verbs | function |
//! |---|---|
//! | `serve` | serve controllers over vfio-user sockets |
//! | `demo` | measure the benefit of shadow doorbells |
//! | `bench` | measure the performance of a controller |
//! | `verify` | verify the data integrity of a controller |
//! | `inspect` | `list`, `id-ctrl` and other query verbs of nvme-cli |
//! | `manage` | namespace management, format, sanitize |
//! | `transfer` | `read`, `write`, `copy` |
//! | `export` | export a disk by NBD, FUSE, ublk or vhost-user-blk |
//! | `bind` | `bind`, `unbind`: bind a PCI function to vfio-pci or to its kernel driver |
//! | `upgrade` | restart a running `serve` for an upgrade |
//! | `ctl`, `ctl_ana`, `ctl_plan`, `ctl_trace` | query and change a running `serve` |
//! | `top` | show live statistics of running servers |
//! | `trace` | print a recording of `serve --trace` |
//! | `attach_many` | attach many controllers at once |
//! | `manual` | generate manual pages and shell completions, for packages |
//!
//! | shared | contents |
//! |---|---|
//! | `load` | load generator and measurement |
//! | `session` | attached controller with the namespace of a TARGET |
//! | `overwrite` | confirmation before a disk is overwritten |
//! | `banner` | description of an attached controller |
//! | `local` | in-process controller for the driver |
//! | `controller_config` | controller as requested by the user, and its configuration |
//! | `ana_state` | ANA states and groups |
//! | `doorbell_mode` | doorbell mechanisms of a controller |
//! | `disk_spec`, `disk_layers`, `limits` | disk specifications: parsing, opening, layers, rate limits |
//! | `disk_recovery` | recovery of disks after the death of a server process |
//! | `pool`, `pool_disks` | pools of namespaces that hosts create |
//! | `transport` | connection of the driver to a controller |
//! | `target` | TARGET arguments: controllers and namespaces |
//! | `supervisor` | process that starts and restarts the server process, unless `--no-keeper` |
//! | `checkpoint` | checkpoint of a server process, for recovery, and its packets |
//! | `checkpoint_codec` | serialization of a checkpoint for the next supervisor |
//! | `path_broker` | protocol for sockets and files that the supervisor creates |
//! | `grant` | access to images for a sandboxed server |
//! | `control` | control interface: types, client, discovery |
//! | `live_stats` | statistics protocol of `serve` and `top` |
//! | `queue_options` | doorbell and completion modes of the driver |
//! | `block_pattern`, `rng` | verifiable block content; random number generator |
//! | `report`, `latency` | results of measurements as JSON; latency histograms |
//! | `page` | HTML reports of measurements |
//! | `parse`, `cpu_list`, `uuid_text` | parsers of sizes, times, CPU lists and UUIDs |
//! | `subsystems` | NVM subsystems of several controllers |
//!
//! Exit statuses, logging, signals and output are in `shadowbell-process`.
#![forbid(unsafe_code)]

mod ana_state;
mod attach_many;
mod banner;
mod bench;
mod bind;
mod block_pattern;
mod checkpoint;
mod checkpoint_codec;
mod cli;
mod control;
mod controller_config;
mod cpu_list;
mod ctl;
mod ctl_ana;
mod ctl_disk;
mod ctl_plan;
mod ctl_trace;
mod demo;
mod disk_layers;
mod disk_recovery;
mod disk_spec;
mod doorbell_mode;
mod export;
mod grant;
mod inspect;
mod latency;
mod limits;
mod live_stats;
mod load;
mod local;
mod manage;
mod manual;
mod overwrite;
mod page;
mod parse;
mod path_broker;
mod pool;
mod pool_disks;
mod queue_options;
mod report;
mod rng;
mod serve;
mod session;
mod subsystems;
mod supervisor;
mod target;
mod top;
mod trace;
mod transfer;
mod transport;
mod upgrade;
mod uuid_text;
mod verify;

pub use cli::main;

/// Items for the tests and fuzz targets of this workspace only.
#[doc(hidden)]
pub mod testing {
    pub use crate::bench::Args as BenchArgs;
    pub use crate::load::{LoadConfig, MetadataMode, Outcome, Workload, measure};
    pub use crate::local::connect;
    pub use crate::session::Session;
    pub use crate::target::Target;
    pub use crate::verify::{Args as VerifyArgs, verify};

    /// Parses and validates a file as `serve --config` does.
    ///
    /// # Errors
    /// All errors of the file.
    pub fn check_config_file(path: &std::path::Path) -> anyhow::Result<()> {
        crate::serve::read_config_file(path).map(drop)
    }
}
