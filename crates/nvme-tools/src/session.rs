//! Attached controller with the namespace that a TARGET names.

use crate::{banner, local};
use anyhow::{Context, anyhow};
use shadowbell_config::disk_spec::DiskSpecError;
use shadowbell_config::target::Target;
use shadowbell_disk::OpenError;
use shadowbell_driver::{
    AttachOptions, Controller, Doorbells, Namespace, QueueMap, Steered, Transport, steer_interrupts,
};
use shadowbell_process::exit;
use shadowbell_storage::disk_open;
use shadowbell_storage::transport;
use std::sync::Arc;

/// Attached controller with the requested namespace.
#[derive(Debug)]
pub struct Session {
    target: Target,
    /// Requested number of queue pairs.
    requested: u16,
    /// Result of setting the affinity of kernel interrupts, for PCI functions.
    steered: Option<Steered>,
    /// The controller.
    pub controller: Controller,
}

impl Session {
    /// Attaches the driver to the controller that `target` names.
    ///
    /// # Errors
    /// With exit status [`exit::BAD_INPUT`] if there is no such server or disk; otherwise errors of
    /// the driver.
    pub fn attach(target: &Target, options: &AttachOptions) -> anyhow::Result<Self> {
        let transport: Arc<dyn Transport> = match target {
            Target::Local { disk } => {
                let disk = disk_open::open(disk).map_err(|error| match error {
                    DiskSpecError::Disk(OpenError::Missing { path }) => {
                        exit::bad_input(anyhow!(disk_open::nothing_at(&path)))
                    }
                    error => error.into_error(),
                })?;
                if disk.info().zoned.is_some() {
                    return Err(exit::bad_input(anyhow!(
                        "{}: a zoned disk can be served, but not used directly; leave out `zoned`",
                        disk.name()
                    )));
                }
                local::connect(disk, options.doorbells == Doorbells::Mapped)?
            }
            remote => transport::to(remote)?,
        };
        Self::over(target.clone(), transport, options)
    }

    /// Attaches the controller at the other end of `transport`. `target` names it in messages.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn over(
        target: Target,
        transport: Arc<dyn Transport>,
        options: &AttachOptions,
    ) -> anyhow::Result<Self> {
        let controller =
            Controller::attach(transport, options).with_context(|| target.to_string())?;
        let steered = match &target {
            Target::Vfio { address, .. } if controller.has_interrupts() => {
                let map = QueueMap::of_this_machine(controller.queue_pairs());
                Some(steer_interrupts(*address, &map))
            }
            _ => None,
        };
        let requested = options.queue_pairs;
        let session = Self { target, requested, steered, controller };
        for line in session.banner() {
            tracing::debug!("{line}");
        }
        Ok(session)
    }

    /// Description of the controller, as lines for the log.
    #[must_use]
    pub fn banner(&self) -> Vec<String> {
        banner::banner(&self.controller, self.requested, self.steered.as_ref())
    }

    /// Requested target.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Requested namespace.
    ///
    /// # Errors
    /// With exit status [`exit::BAD_INPUT`] if it does not exist or cannot be read and written.
    pub fn namespace(&self) -> anyhow::Result<&Namespace> {
        let namespace = self.any_namespace()?;
        match namespace.unusable() {
            None => Ok(namespace),
            Some(what) => Err(exit::bad_input(anyhow!(
                "{}: the namespace {what}, which this program does not support",
                self.target
            ))),
        }
    }

    /// Requested namespace, if it supports commands with metadata.
    ///
    /// # Errors
    /// As [`namespace`](Self::namespace).
    pub fn namespace_with_metadata(&self) -> anyhow::Result<&Namespace> {
        let namespace = self.any_namespace()?;
        match namespace.metadata() {
            Some(_) => Ok(namespace),
            None => Err(exit::bad_input(anyhow!(
                "{}: the namespace has no metadata that this program supports",
                self.target
            ))),
        }
    }

    fn any_namespace(&self) -> anyhow::Result<&Namespace> {
        let nsid = self.target.nsid();
        let Some(namespace) = self.controller.namespace(nsid) else {
            let there: Vec<_> =
                self.controller.namespaces().iter().map(|ns| ns.nsid().to_string()).collect();
            let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
            return Err(exit::bad_input(anyhow!(
                "{}: there is no namespace {nsid}; active: {there}",
                self.target
            )));
        };
        Ok(namespace)
    }

    /// Device name in reports: `shadowbell`, or the model number of another controller.
    #[must_use]
    pub fn device(&self) -> String {
        let model = self.controller.identity().model().to_string();
        if model.starts_with("Shadowbell") { "shadowbell".to_owned() } else { model }
    }

    /// Shuts the controller down in order.
    ///
    /// # Errors
    /// The controller did not shut down normally.
    pub fn detach(self) -> anyhow::Result<()> {
        self.controller.detach().with_context(|| self.target.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_banner_shows_the_controller_and_the_granted_queues() {
        let target: Target = "local:mem:1MiB?block-size=4096".parse().unwrap();
        let options = AttachOptions { queue_pairs: 2, queue_depth: 32, ..Default::default() };
        let session = Session::attach(&target, &options).unwrap();
        let text = session.banner().join("\n");
        for word in [
            "local:mem:1MiB",
            "Shadowbell",
            "serial ",
            "NVMe 2.",
            "CAP 0x",
            "MQES ",
            "2 queue pairs requested, 2 granted, of 32 entries; interrupts, shadow doorbells",
            "namespace 1: 1.0 MiB, 256 blocks of 4096 bytes",
            "queue map: 1",
        ] {
            assert!(text.contains(word), "no `{word}` in:\n{text}");
        }
        assert!(!text.contains("interrupts go"), "nothing of the kernel's is in this: {text}");
        session.detach().unwrap();
    }
}
