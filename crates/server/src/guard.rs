//! Guard of destructive changes: a change that takes something from a connected client needs
//! `force`. Requests of the control socket, `ctl apply` and SIGHUP all use this rule.

use super::registry::{ServedController, WaitingController};
use anyhow::anyhow;
use shadowbell_process::exit;
use std::fmt;
use tracing::warn;

/// Loss of a connected client by a change, displayed as `the client of vm0 would lose namespace 2`.
#[derive(Debug)]
pub(super) struct Loss {
    /// Controller or export of the client.
    client: String,
    /// Sentence without its subject: `would lose namespace 2`.
    what: String,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the client of {} {}", self.client, self.what)
    }
}

impl Loss {
    /// Loss of the client of a controller. `None` if the controller has no client.
    pub(super) fn of_controller(served: &ServedController, what: String) -> Option<Self> {
        served.has_client().then(|| Self { client: served.id.clone(), what })
    }

    /// Loss of the client of `waiting`, a controller that waits for its disks.
    pub(super) fn of_waiting(waiting: &WaitingController) -> Self {
        let what = "would lose the controller, which waits for its disks".to_owned();
        Self { client: waiting.requested.id(), what }
    }

    /// Loss of the clients of the export `id`.
    pub(super) fn of_export(id: &str, what: String) -> Self {
        Self { client: format!("the export {id}"), what }
    }
}

/// Refuses a change by which connected clients would lose something, unless the change is forced.
///
/// # Errors
/// The change has to be forced.
pub(super) fn check(losses: &[Loss], forced: bool) -> anyhow::Result<()> {
    let texts: Vec<_> = losses.iter().map(Loss::to_string).collect();
    if texts.is_empty() {
        return Ok(());
    }
    if forced {
        warn!("--force was given for a change: {}", texts.join("; "));
        return Ok(());
    }
    Err(exit::needs_force(anyhow!(
        "nothing was changed: {}; disconnect the client first, or repeat this with --force (HTTP: \
         `force=true`)",
        texts.join("; ")
    )))
}

/// Effect of a change of a disk on its connected clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Clients lose nothing. Clients of exports see the change when they connect again.
    None,
    /// Clients find other content or another size: `4 KiB instead of 1 MiB`.
    Content(String),
    /// Clients cannot write any more.
    ReadOnly,
    /// Clients of exports are disconnected, and can connect again. Clients of controllers lose
    /// nothing.
    Reconnect,
}

impl Effect {
    /// Describes what the client of a controller with the disk as namespace `nsid` loses. `None` if
    /// it loses nothing.
    pub(super) fn on_namespace(&self, nsid: u32) -> Option<String> {
        match self {
            Self::None | Self::Reconnect => None,
            Self::Content(what) => Some(format!("would find {what} in namespace {nsid}")),
            Self::ReadOnly => Some(format!("could not write namespace {nsid} any more")),
        }
    }

    /// Describes what the clients of an export of the disk lose. `None` if they lose nothing.
    /// `is_read_only`: clients could not write before the change either.
    pub(super) fn on_export(&self, is_read_only: bool) -> Option<String> {
        match self {
            Self::None => None,
            Self::Content(what) => Some(format!("would find {what}")),
            Self::ReadOnly => {
                (!is_read_only).then(|| "could not write the disk any more".to_owned())
            }
            Self::Reconnect => Some("would be disconnected".to_owned()),
        }
    }
}

/// Function that returns the losses of a disk's connected clients by a change with the given
/// effect.
type Losses<'a> = dyn Fn(&Effect) -> Vec<Loss> + 'a;

/// Guard of a change of one disk.
pub(super) struct DiskGuard<'a> {
    pub(super) losses: &'a Losses<'a>,
    pub(super) forced: bool,
    /// True if the disk has exports.
    pub(super) is_exported: bool,
}

impl DiskGuard<'_> {
    /// Refuses a change of the disk with this effect, unless it is forced.
    ///
    /// # Errors
    /// The change has to be forced.
    pub(super) fn check(&self, effect: &Effect) -> anyhow::Result<()> {
        check(&(self.losses)(effect), self.forced)
    }
}
