//! Builds a controller and its socket from the configuration.

use super::event::{EventSender, ServerEvent};
use super::path_broker;
use super::registry::ServedController;
use anyhow::Context;
use bytesize::ByteSize;
use shadowbell_config::controller_config::{ConfigureError, OfferedDoorbells};
use shadowbell_config::disk_spec::DiskSpecError;
use shadowbell_config::server_config::{SocketConfig, WorkerChoice};
use shadowbell_config::uuid_text::uuid_text;
use shadowbell_controller::{Carrier, Config, Controller, RelocateError};
use shadowbell_disk::Disk;
use shadowbell_frontend::vfio_user::{ClientEvent, ClientEventHandler};
use shadowbell_process::exit::{bad_input, unavailable};
use shadowbell_storage::disk_kinds;
use shadowbell_supervisor::path_protocol::Kind;
use shadowbell_vfio_user::server::{BindError, Listener};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::warn;

/// Transport properties of a controller, and the receiver of its events.
pub(super) fn carrier(served: &SocketConfig, events: &EventSender) -> Carrier {
    let events = events.clone();
    Carrier {
        mapped_doorbells: served.controller.doorbells == OfferedDoorbells::Mapped,
        listener: Some(Box::new(move |event| events.send(ServerEvent::Controller(*event)))),
    }
}

/// Assigns the controller to its configured I/O thread. Without a configured one, a controller
/// with a disk that may block its I/O thread gets a thread of its own.
pub(super) fn assign_io_thread(
    served: &SocketConfig,
    controller: &Controller,
) -> anyhow::Result<()> {
    let disks = &served.controller.disks;
    match served.worker {
        None if disks.iter().any(|disk| disk_kinds::may_block(&disk.disk)) => {
            isolate(controller);
        }
        None => {}
        Some(WorkerChoice::Own(_)) => controller.isolate()?,
        Some(WorkerChoice::Shared(worker)) => controller.pin_to(worker)?,
    }
    Ok(())
}

/// Gives a controller an I/O thread of its own, because one of its disks may block the thread.
pub(super) fn isolate(controller: &Controller) {
    match controller.isolate() {
        // The controller has an I/O thread of its own already, or is quiesced for an upgrade.
        Ok(()) | Err(RelocateError::Placed | RelocateError::Frozen) => {}
        Err(error) => warn!(
            "{}: {error}; so a disk that does not answer will delay other controllers too",
            controller.config().serial
        ),
    }
}

/// Event handler of a controller's socket. Besides sending the events, it stores in `client`
/// whether a client is connected.
pub(super) fn client_events(events: EventSender, client: &Arc<AtomicBool>) -> ClientEventHandler {
    let client = Arc::clone(client);
    Arc::new(move |event| {
        match event {
            ClientEvent::Attached => client.store(true, Ordering::Relaxed),
            ClientEvent::Detached => client.store(false, Ordering::Relaxed),
            ClientEvent::NoSharedMemory | ClientEvent::MemoryNotShared => {}
        }
        events.send(ServerEvent::Client(event));
    })
}

/// Opens the disks of a controller. A disk that is open already is used again: `named` finds it by
/// its id.
pub(super) fn open_one(
    served: &SocketConfig,
    open: impl Fn(&str) -> Result<Arc<dyn Disk>, DiskSpecError>,
    named: impl Fn(Option<&str>) -> Option<anyhow::Result<Arc<dyn Disk>>>,
) -> anyhow::Result<Config> {
    let location = served.absolute_socket();
    let location = location.to_string_lossy();
    let config = served.controller.open_by(&location, |nth, spec| {
        let id = served.controller.disks.get(nth).and_then(|disk| disk.id.as_deref());
        named(id).map_or_else(|| open(spec), |disk| disk.map_err(DiskSpecError::Other))
    });
    with_origin(served, config.map_err(ConfigureError::into_error))
}

/// Creates the socket of a controller.
pub(super) fn bind_one(served: &SocketConfig) -> anyhow::Result<Listener> {
    with_origin(served, bind_socket(&served.socket))
}

/// Creates a socket for clients, with the configured mode and group.
pub(super) fn bind_socket(path: &Path) -> anyhow::Result<Listener> {
    path_broker::listen(path, Kind::Controller).map_err(|error| match error {
        BindError::System { .. } => error.into(),
        _ if error.can_pass() => unavailable(error),
        _ => bad_input(error),
    })
}

pub(super) fn with_origin<T>(
    served: &SocketConfig,
    outcome: anyhow::Result<T>,
) -> anyhow::Result<T> {
    match &served.origin {
        None => outcome,
        Some(origin) => outcome.with_context(|| origin.clone()),
    }
}

pub(super) fn summary(served: &ServedController) -> String {
    let namespaces = served.controller.namespaces();
    let disks: Vec<_> = namespaces
        .iter()
        .map(|(_, namespace)| {
            let info = namespace.disk.info();
            let read_only = if info.read_only { ", read-only" } else { "" };
            format!(
                "{} ({}{read_only})",
                namespace.disk.name(),
                ByteSize(info.bytes()).display().iec()
            )
        })
        .collect();
    let uuids: Vec<_> = namespaces.iter().map(|(_, disk)| uuid_text(&disk.uuid)).collect();
    let model = &served.controller.config().model;
    let serial = &served.controller.config().serial;
    if disks.is_empty() {
        return format!(
            "{}: serving no namespace yet; serial {serial}, model {model}",
            served.name
        );
    }
    let (disks, uuids) = (disks.join(", "), uuids.join(", "));
    format!("{}: serving {disks}; serial {serial}, model {model}, UUID {uuids}", served.name)
}
