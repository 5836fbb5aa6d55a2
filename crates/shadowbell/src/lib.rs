//! The shadowbell program. It is a library only for its tests and the fuzz targets ([`testing`]).
//! The crate for integration into other programs is `shadowbell-frontend`.
//!
//! # Architecture
//!
//! The program has two files. The verbs `serve` and `export` execute `shadowbell-serve` if that is
//! in its directory, so that the process that faces guests contains no code of the other verbs.
//!
//! `cli` is the command line. Each verb has a module with `Args` (its options) and `run`, here or
//! in another crate: `serve` and `export` in `shadowbell-server`, the verbs that use a controller
//! in `shadowbell-nvme-tools`.
//!
//! | module | contents |
//! |---|---|
//! | `upgrade` | restart a running `serve` for an upgrade |
//! | `ctl`, `ctl_*` | query and change a running `serve` |
//! | `config` | check a configuration file |
//! | `examples` | examples of each command, for its help |
//! | `grant` | access to images for a sandboxed server, for `ctl` |
//! | `ls` | list running servers and their objects |
//! | `top` | show live statistics of running servers |
//! | `manual` | generate manual pages and shell completions, for packages |
#![forbid(unsafe_code)]

mod cli;
mod config;
mod ctl;
mod ctl_ana;
mod ctl_disk;
mod ctl_explain;
mod ctl_export;
mod ctl_paths;
mod ctl_plan;
mod ctl_trace;
mod examples;
mod grant;
mod ls;
mod manual;
mod text_diff;
mod top;
mod upgrade;

pub use cli::{main, serve_main};

/// Items for the tests and fuzz targets of this workspace only.
#[doc(hidden)]
pub mod testing {
    pub use shadowbell_config::target::Target;
    pub use shadowbell_nvme_tools::bench::Args as BenchArgs;
    pub use shadowbell_nvme_tools::load::{LoadConfig, MetadataMode, Outcome, Workload, measure};
    pub use shadowbell_nvme_tools::local::connect;
    pub use shadowbell_nvme_tools::session::Session;
    pub use shadowbell_nvme_tools::verify::{Args as VerifyArgs, verify};

    /// Parses and validates a file as `serve --config` does.
    ///
    /// # Errors
    /// All errors of the file.
    pub fn check_config_file(path: &std::path::Path) -> anyhow::Result<()> {
        shadowbell_config::config_file::read(path).map(drop)
    }
}
