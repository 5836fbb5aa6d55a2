//! Restore of the controllers that another process hands over.

use super::builder;
use super::event::EventSender;
use super::registry::ServedController;
use super::server::Server;
use super::transfer::{self, Served};
use super::worker_link::WorkerLink;
use anyhow::{Context, bail};
use shadowbell_config::controller_config::ConfigureError;
use shadowbell_config::limits::{self, Group};
use shadowbell_config::server_config::{ServerConfig, SocketConfig};
use shadowbell_controller::{Controller, Pool, SavedController};
use shadowbell_frontend::vfio_user::ControllerDevice;
use shadowbell_process::exit;
use shadowbell_state::Parcel;
use shadowbell_storage::disk_open;
use shadowbell_supervisor::protocol::to_supervisor;
use shadowbell_vfio_user::server::SavedPort;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tracing::warn;

/// Controllers that the old process serves, after a check that they match the configuration. The
/// flag is true if they were changed at run time, and so were taken from the old process.
///
/// # Errors
/// The old process serves other controllers than this one is configured for.
pub(super) fn what_is_served(
    config: &ServerConfig,
    parcel: &mut Parcel,
) -> anyhow::Result<(Vec<SocketConfig>, bool)> {
    let served: Vec<Served> = section(parcel, transfer::SERVED)?;
    let changed: Option<Vec<SocketConfig>> = parcel.take(transfer::ASKED)?;
    let is_changed = changed.is_some();
    let asked = changed.unwrap_or_else(|| config.controllers.clone());
    if let Some(why) = transfer::difference(&served, &transfer::served_of(asked.iter())) {
        bail!(why);
    }
    if let Some(groups) = parcel.take::<Vec<Group>>(transfer::GROUPS)? {
        limits::set_groups(&groups);
    }
    Ok((asked, is_changed))
}

/// A controller of the old process that is to be restored.
pub(super) struct Arriving {
    pub(super) served: ServedController,
    pub(super) device: ControllerDevice,
    pub(super) port: SavedPort,
    pub(super) saved: SavedController,
}

impl Arriving {
    /// Creates the controller, without its socket.
    ///
    /// # Errors
    /// A disk cannot be adopted, or the state does not fit the configuration.
    pub(super) fn take(
        parcel: &mut Parcel,
        asked: &SocketConfig,
        index: usize,
        events: EventSender,
        pool: &Pool,
    ) -> anyhow::Result<Self> {
        let saved_disks = asked.controller.disks.iter().enumerate();
        let saved_disks: Vec<serde_json::Value> = saved_disks
            .map(|(nth, _)| section(parcel, &transfer::disk(index, nth)))
            .collect::<Result<_, _>>()?;
        let saved: SavedController = section(parcel, &transfer::controller(index))?;
        let port: SavedPort = section(parcel, &transfer::port(index))?;
        let fds = parcel.descriptors();
        let location = asked.absolute_socket();
        let opened = asked.controller.open_by(&location.to_string_lossy(), |nth, spec| {
            let nothing = serde_json::Value::Null;
            disk_open::adopt(spec, saved_disks.get(nth).unwrap_or(&nothing), fds)
        });
        let opened = builder::with_origin(asked, opened.map_err(ConfigureError::into_error))?;
        let carrier = builder::carrier(asked, &events);
        let controller = Controller::successor(opened, pool.clone(), carrier, &saved, fds)
            .with_context(|| asked.socket.display().to_string())?;
        builder::place(asked, &controller)?;
        let client = Arc::new(AtomicBool::new(port.has_client()));
        let handler = builder::client_events(events, &client);
        let device = ControllerDevice::new(controller.clone(), handler)?;
        let served = ServedController::new(index, asked.clone(), controller, client);
        Ok(Self { served, device, port, saved })
    }
}

fn section<T: serde::de::DeserializeOwned>(parcel: &mut Parcel, name: &str) -> anyhow::Result<T> {
    parcel.take(name)?.with_context(|| format!("the state has no section {name}"))
}

/// Reports the reason to the supervisor before the old process only sees the end of the socket.
pub(super) fn refused(link: &WorkerLink, why: anyhow::Error) -> anyhow::Error {
    link.say(to_supervisor::FAILED, &exit::line(&why));
    why
}

/// Starts the doorbell trace in a new file. The old process's file is kept beside it.
pub(super) fn begin_trace(server: &Server, config: &ServerConfig) {
    if let Err(error) = server.trace(config, true) {
        warn!("the doorbell trace has ended: {error:#}");
    }
}
