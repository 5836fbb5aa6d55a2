//! Disk requests: list, add, change and remove.

use super::lookup::problem;
use super::state::ServerState;
use crate::disks::ListedDisk;
use crate::namespaces::NamespaceChange as Change;
use shadowbell_config::config_file;
use shadowbell_config::disk_spec;
use shadowbell_config::limits::DiskLimits;
use shadowbell_config::server_config::NamedDisk;
use shadowbell_control_api::api::{
    Code, Disk, DiskChange, DiskSource, DiskUser, LimitSpec, Problem,
};
use shadowbell_disk_layers::ErrorPolicy;

fn describe(state: &ServerState, disk: &ListedDisk) -> Disk {
    let info = disk.open.disk.info();
    let limits = DiskLimits::split(&disk.open.spec).unwrap_or_default().1;
    let counters = disk.open.disk.counters().into_iter();
    let namespaces = disk.namespaces.iter();
    let stopped = disk.open.disk.stopped();
    let in_flight = state.changes.in_flight().lock().get(&disk.id).cloned();
    Disk {
        id: disk.id.clone(),
        source: disk.open.disk.name(),
        bytes: info.bytes(),
        block_size: info.block_size,
        read_only: info.read_only,
        limits: (!limits.is_none()).then(|| LimitSpec::of(&limits)),
        namespaces: namespaces
            .map(|(served, nsid)| DiskUser { controller: served.id.clone(), nsid: *nsid })
            .collect(),
        stalled_writes: disk.open.disk.orphans() as u64,
        in_flight: in_flight.as_ref().map_or(0, |now| now.requests),
        oldest_ms: in_flight.as_ref().map_or(0, |now| now.since.elapsed().as_millis() as u64),
        deleted: disk.open.disk.is_deleted(),
        stalled: in_flight.as_ref().is_some_and(|now| now.stalled),
        stopped: stopped.map(|stopped| stopped.reason.to_string()),
        held: stopped.map_or(0, |stopped| stopped.held),
        on_error: disk_spec::take_option(&disk.open.spec, ErrorPolicy::OPTION)
            .1
            .filter(|policy| policy != ErrorPolicy::Report.name()),
        exports: state.changes.exports().of(&disk.id),
        counters: counters.map(|(name, count)| (name.to_owned(), count)).collect(),
    }
}

/// List the disks
///
/// Disks of controllers come first, in the order of the configuration.
#[utoipa::path(get, path = "/v1/disks", operation_id = "disks", tag = "disks",
    responses((status = 200, description = "The disks", body = Vec<Disk>)))]
pub(super) fn disks(state: &ServerState) -> Vec<Disk> {
    state.changes.disks().iter().map(|disk| describe(state, disk)).collect()
}

/// Describe a disk
#[utoipa::path(get, path = "/v1/disks/{id}", operation_id = "disk", tag = "disks",
    params(("id" = String, Path, description = "The disk's `id`")),
    responses(
        (status = 200, description = "The disk", body = Disk),
        (status = 404, description = "No such disk", body = Problem)
    ))]
pub(super) fn disk(state: &ServerState, id: &str) -> Result<Disk, Problem> {
    state.changes.disk(id).map(|disk| describe(state, &disk)).map_err(problem)
}

/// Add a disk
///
/// The disk is opened, and has no user yet. The request is idempotent: if the same disk exists
/// already, nothing changes (200).
#[utoipa::path(put, path = "/v1/disks/{id}", operation_id = "add_disk", tag = "disks",
    params(("id" = String, Path, description = "`id` of the disk")),
    request_body = DiskSource,
    responses(
        (status = 200, description = "The disk exists already", body = Disk),
        (status = 201, description = "The disk was added", body = Disk),
        (status = 400, description = "The disk cannot be opened", body = Problem),
        (status = 409, description = "Another disk has that id", body = Problem)
    ))]
pub(super) fn add_disk(
    state: &ServerState,
    id: &str,
    wanted: &DiskSource,
) -> Result<(bool, Disk), Problem> {
    config_file::check_id(id).map_err(|why| Problem::new(Code::BadRequest, why))?;
    let wanted = NamedDisk { id: id.to_owned(), spec: wanted.source.clone(), origin: None };
    let is_new = state.changes.add_disk(&wanted).map_err(problem)?;
    Ok((is_new, disk(state, id)?))
}

/// Remove a disk that has no user
///
/// Written data is flushed, and the disk is closed.
#[utoipa::path(delete, path = "/v1/disks/{id}", operation_id = "remove_disk", tag = "disks",
    params(("id" = String, Path, description = "The disk's `id`")),
    responses(
        (status = 204, description = "The disk was removed"),
        (status = 404, description = "No such disk", body = Problem),
        (status = 409, description = "The disk is in use", body = Problem)
    ))]
pub(super) fn remove_disk(state: &ServerState, id: &str) -> Result<(), Problem> {
    state.changes.remove_disk(id).map_err(problem)
}

/// Resume a stopped disk
///
/// Its held requests are submitted to the storage again. If they fail again, the disk is stopped
/// again. If the disk is not stopped, nothing changes.
#[utoipa::path(post, path = "/v1/disks/{id}/resume", operation_id = "resume_disk", tag = "disks",
    params(("id" = String, Path, description = "The disk's `id`")),
    responses(
        (status = 200, description = "The disk, whose requests are repeated", body = Disk),
        (status = 404, description = "No such disk", body = Problem)
    ))]
pub(super) fn resume_disk(state: &ServerState, id: &str) -> Result<Disk, Problem> {
    let listed = state.changes.disk(id).map_err(problem)?;
    listed.open.disk.resume();
    disk(state, id)
}

/// Change a disk: its size, its source, read-only, or its limits
///
/// A guest that has the disk as a namespace is notified. If the disk has that property already,
/// nothing changes.
#[utoipa::path(patch, path = "/v1/disks/{id}", operation_id = "change_disk", tag = "disks",
    params(
        ("id" = String, Path, description = "The disk's `id`"),
        ("force" = Option<bool>, Query, description = "Change the disk although connected clients lose something by it")
    ),
    request_body = DiskChange,
    responses(
        (status = 200, description = "The disk after the change", body = Disk),
        (status = 400, description = "Invalid change", body = Problem),
        (status = 404, description = "No such disk", body = Problem),
        (status = 409, description = "Change not possible in this state of the disk or the server, or \
            only with `force` (`client-attached`)",
            body = Problem)
    ))]
pub(super) fn change_disk(
    state: &ServerState,
    id: &str,
    wanted: DiskChange,
    force: bool,
) -> Result<Disk, Problem> {
    let wrong = |why: String| Problem::new(Code::BadRequest, why);
    let DiskChange { size, source, read_only, limits } = wanted;
    let all = [
        size.map(Change::Size),
        source.map(Change::Disk),
        read_only.map(Change::ReadOnly),
        limits.map(Change::LimitChange),
    ];
    let mut changes = all.into_iter().flatten();
    let (Some(change), None) = (changes.next(), changes.next()) else {
        let why = "give exactly one of `size`, `source`, `read_only` and `limits`";
        return Err(wrong(why.to_owned()));
    };
    state.changes.change_disk(id, &change, force).map_err(problem)?;
    disk(state, id)
}
