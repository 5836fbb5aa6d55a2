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
//! | `grant` | access to images for a sandboxed server |
//! | `queue_options` | doorbell and completion modes of the driver |
//! | `block_pattern`, `rng` | verifiable block content; random number generator |
//! | `report`, `latency` | results of measurements as JSON; latency histograms |
//! | `page` | HTML reports of measurements |
//!
//! Lower crates: `shadowbell-process` (exit statuses, log, output), `shadowbell-config`,
//! `shadowbell-control-api`, `shadowbell-storage`,
//! `shadowbell-supervisor`, `shadowbell-server` (the verb `serve`).
#![forbid(unsafe_code)]

mod attach_many;
mod banner;
mod bench;
mod bind;
mod block_pattern;
mod cli;
mod ctl;
mod ctl_ana;
mod ctl_disk;
mod ctl_plan;
mod ctl_trace;
mod demo;
mod export;
mod grant;
mod inspect;
mod latency;
mod load;
mod local;
mod manage;
mod manual;
mod overwrite;
mod page;
mod queue_options;
mod report;
mod rng;
mod session;
mod top;
mod trace;
mod transfer;
mod upgrade;
mod verify;

pub use cli::main;

/// Items for the tests and fuzz targets of this workspace only.
#[doc(hidden)]
pub mod testing {
    pub use crate::bench::Args as BenchArgs;
    pub use crate::load::{LoadConfig, MetadataMode, Outcome, Workload, measure};
    pub use crate::local::connect;
    pub use crate::session::Session;
    pub use crate::verify::{Args as VerifyArgs, verify};
    pub use shadowbell_config::target::Target;

    /// Parses and validates a file as `serve --config` does.
    ///
    /// # Errors
    /// All errors of the file.
    pub fn check_config_file(path: &std::path::Path) -> anyhow::Result<()> {
        shadowbell_config::config_file::read(path, |path| std::fs::File::open(path)).map(drop)
    }
}
