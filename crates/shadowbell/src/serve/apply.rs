//! Has a running server be what a configuration says: `ctl apply`, and SIGHUP.

use super::args::Args;
use super::changes::{Changes, Plan};
use super::config_file::Settings;
use super::server_config::ServerConfig;
use crate::exit;
use anyhow::Context;
use std::sync::Arc;
use tracing::{error, info, warn};

/// Has the controllers be those of `config`, and limits that several disks share as it says; with
/// `dry_run` nothing is done. Of what else is in it, nothing.
///
/// # Errors
/// It is not possible; then everything is as it was, if the sentence does not say otherwise.
pub(super) fn apply(
    changes: &Changes,
    config: ServerConfig,
    dry_run: bool,
    forced: bool,
) -> anyhow::Result<Plan> {
    let plan = changes.apply(config.controllers, dry_run, forced)?;
    if !dry_run {
        for group in config.groups {
            changes.limit_group(&group.name, group.limits)?;
        }
    }
    Ok(plan)
}

/// A configuration file that can be read again.
pub(super) struct Reload {
    args: Args,
    settings: Settings,
}

impl Reload {
    /// That of `args`, which gave `config`. `None`: there is no file.
    pub(super) fn of(args: &Args, config: &ServerConfig) -> Option<Arc<Self>> {
        let args = args.has_file().then(|| args.clone())?;
        Some(Arc::new(Self { args, settings: Settings::of(config) }))
    }

    /// Reads it on a thread of its own, because disks may take long to open: `done` runs there
    /// when all is over, whatever came of it, and gets that in a sentence.
    pub(super) fn start(
        self: &Arc<Self>,
        changes: &Arc<Changes>,
        done: impl FnOnce(&str) + Send + 'static,
    ) {
        let (ours, changes) = (Arc::clone(self), Arc::clone(changes));
        let thread = std::thread::Builder::new().name("sb-reload".into());
        let started = thread.spawn(move || done(&ours.run(&changes)));
        if let Err(error) = started {
            error!("the configuration is not read: the system has no more threads ({error})");
        }
    }

    /// What came of it; the log has it too.
    fn run(&self, changes: &Changes) -> String {
        match self.read(changes) {
            Ok(said) => {
                info!("{said}");
                said
            }
            Err(why) => {
                let why = exit::line(&why);
                error!("{why}");
                why
            }
        }
    }

    fn read(&self, changes: &Changes) -> anyhow::Result<String> {
        let refused = "the configuration is refused, and all goes on as it was";
        let config = self.args.clone().config().context(refused)?;
        if Settings::of(&config) != self.settings {
            warn!(
                "the configuration has changed in what is not of controllers and limit groups; \
                 that counts when the server goes on in another process (`shadowbell upgrade`) or \
                 is started again"
            );
        }
        let plan = apply(changes, config, false, false).context("the configuration")?;
        let (add, remove) = (plan.add.len(), plan.remove.len());
        let (replace, unchanged) = (plan.replace.len(), plan.unchanged);
        Ok(format!(
            "the configuration was read again; of its controllers {add} come, {remove} go, \
             {replace} are replaced, {unchanged} stay"
        ))
    }
}
