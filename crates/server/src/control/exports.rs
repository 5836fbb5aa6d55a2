//! Export requests: list, add and remove.

use super::lookup::problem;
use super::state::ServerState;
use crate::running_exports::{ExportDevice, RunningExport};
use shadowbell_config::config_file;
use shadowbell_config::export_config::ExportConfig;
use shadowbell_control_api::api::{Code, Export, ExportSpec, Problem};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

fn describe(export: &RunningExport) -> Export {
    let RunningExport { config, device, block } = export;
    let traffic = block.traffic();
    let address = Some(device.address());
    let if_it_is = |is_it: bool| address.clone().filter(|_| is_it);
    Export {
        id: config.id.clone(),
        disk: config.disk.clone(),
        nbd: if_it_is(matches!(device, ExportDevice::Nbd(_))),
        vhost_user_blk: if_it_is(matches!(device, ExportDevice::VhostUserBlk(_))),
        fuse: if_it_is(matches!(device, ExportDevice::Fuse(..))),
        ublk: if_it_is(matches!(device, ExportDevice::Ublk(_))),
        name: config.name.clone(),
        tls: config.tls_certificates.is_some(),
        read_only: config.read_only,
        share: config.share,
        requests: traffic.requests,
        bytes_read: traffic.bytes_read,
        bytes_written: traffic.bytes_written,
        queues: traffic.queues,
        failures: device.failures(),
    }
}

/// List the exports
#[utoipa::path(get, path = "/v1/exports", operation_id = "exports", tag = "exports",
    responses((status = 200, description = "The exports", body = Vec<Export>)))]
pub(super) fn exports(state: &ServerState) -> Vec<Export> {
    state.changes.exports().map(describe)
}

/// Describe an export
#[utoipa::path(get, path = "/v1/exports/{id}", operation_id = "export", tag = "exports",
    params(("id" = String, Path, description = "The export's `id`")),
    responses(
        (status = 200, description = "The export", body = Export),
        (status = 404, description = "No such export", body = Problem)
    ))]
pub(super) fn export(state: &ServerState, id: &str) -> Result<Export, Problem> {
    exports(state).into_iter().find(|export| export.id == id).ok_or_else(|| {
        let why = format!("there is no export `{id}`; `shadowbell ctl export ls` lists them");
        Problem::new(Code::NotFound, why)
    })
}

/// Export a disk
///
/// The disk may have a controller at the same time if the export is read-only, or if both permit
/// another writer. The request is idempotent: if the same export exists already, nothing changes
/// (200).
#[utoipa::path(put, path = "/v1/exports/{id}", operation_id = "add_export", tag = "exports",
    params(("id" = String, Path, description = "`id` of the export")),
    request_body = ExportSpec,
    responses(
        (status = 200, description = "The export exists already", body = Export),
        (status = 201, description = "The export was added", body = Export),
        (status = 400, description = "The export cannot be served", body = Problem),
        (status = 404, description = "No such disk", body = Problem),
        (status = 409, description = "Another export has that id, or the disk has another writer",
            body = Problem)
    ))]
pub(super) fn add_export(
    state: &ServerState,
    id: &str,
    wanted: ExportSpec,
    device: Option<OwnedFd>,
) -> Result<(bool, Export), Problem> {
    config_file::check_id(id).map_err(|why| Problem::new(Code::BadRequest, why))?;
    let wanted = ExportConfig {
        id: id.to_owned(),
        disk: wanted.disk,
        nbd: wanted.nbd,
        vhost_user_blk: wanted.vhost_user_blk.map(PathBuf::from),
        fuse: wanted.fuse.map(PathBuf::from),
        owner: wanted.uid.zip(wanted.gid),
        name: wanted.name,
        tls_certificates: wanted.tls_certificates.map(PathBuf::from),
        tls_any_client: wanted.tls_any_client,
        queues: wanted.queues,
        read_only: wanted.read_only,
        share: wanted.share,
        ..ExportConfig::default()
    };
    let is_new = state.changes.add_export(wanted, device).map_err(problem)?;
    Ok((is_new, export(state, id)?))
}

/// Remove an export
///
/// Requests in flight are completed, and clients are disconnected. The disk stays open. A FUSE file
/// has to be unmounted first.
#[utoipa::path(delete, path = "/v1/exports/{id}", operation_id = "remove_export", tag = "exports",
    params(
        ("id" = String, Path, description = "The export's `id`"),
        ("force" = Option<bool>, Query, description = "Remove the export although clients are connected")
    ),
    responses(
        (status = 204, description = "The export was removed"),
        (status = 404, description = "No such export", body = Problem),
        (status = 409, description = "The FUSE file is mounted, or in use, or clients are connected \
            (`client-attached`)",
            body = Problem)
    ))]
pub(super) fn remove_export(state: &ServerState, id: &str, force: bool) -> Result<(), Problem> {
    state.changes.remove_export(id, force).map_err(problem)
}
