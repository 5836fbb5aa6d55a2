//! Guard of destructive changes: a change that takes something from a connected client needs
//! `force`. Requests of the control socket, `ctl apply` and SIGHUP all use this rule.

use super::registry::ServedController;
use anyhow::anyhow;
use shadowbell_process::exit;
use std::fmt;
use tracing::warn;

/// Loss of a connected client: `the client of vm0 would lose namespace 2`.
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
    /// Returns the loss of a controller's client. `None` if the controller has no client.
    pub(super) fn of_controller(served: &ServedController, what: String) -> Option<Self> {
        served.has_client().then(|| Self { client: served.id.clone(), what })
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
        warn!("forced, although {}", texts.join("; "));
        return Ok(());
    }
    Err(exit::needs_force(anyhow!(
        "nothing was changed: {}; disconnect the client first, or repeat this with --force (HTTP: \
         `force=true`)",
        texts.join("; ")
    )))
}

/// Function that returns the losses of a disk's clients. Its argument is what they find after the
/// change: `4 KiB instead of 1 MiB`.
type Losses<'a> = dyn Fn(&str) -> Vec<Loss> + 'a;

/// Guard of a change of one disk.
pub(super) struct DiskGuard<'a> {
    pub(super) losses: &'a Losses<'a>,
    pub(super) forced: bool,
}

impl DiskGuard<'_> {
    /// Refuses a change after which each client of the disk finds `what`.
    ///
    /// # Errors
    /// The change has to be forced.
    pub(super) fn check(&self, what: &str) -> anyhow::Result<()> {
        check(&(self.losses)(what), self.forced)
    }
}
