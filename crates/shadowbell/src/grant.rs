//! Access to images for a sandboxed server: its supervisor opens images that were named at the
//! start, and passes files that `ctl` has opened. The server process itself cannot extend its
//! access.

use anyhow::anyhow;
use shadowbell_config::disk_spec;
use shadowbell_control_api::api::Status;
use shadowbell_control_api::client::Client;
use shadowbell_control_api::discovery;
use shadowbell_process::exit::not_found;
use shadowbell_storage::disk_files::{self, DiskFile};
use shadowbell_supervisor::client::SupervisorClient;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Client of the supervisor of a server. `None` if the server has none.
///
/// # Errors
/// The supervisor is not found, or the server reports the process ID of another one.
pub(crate) fn supervisor_of(client: &Client) -> anyhow::Result<Option<SupervisorClient>> {
    let status: Status = client.get("/v1/status")?;
    let (Some(pid), socket) = (status.supervisor_pid, client.socket()) else { return Ok(None) };
    if !discovery::is_supervisor(socket, pid) {
        return Err(not_found(anyhow!(
            "{}: process {pid}, which the server reports as its supervisor, does not listen there",
            socket.display()
        )));
    }
    SupervisorClient::find_reported(pid, socket).map(Some)
}

/// Grants the supervisor of a server, if there is one, access to these disks, with the rights of
/// this process. Backing files and data files that an image names are granted only if `backing`
/// contains them too, because a server process could have written the image's header. Failures are
/// ignored: the server refuses the request if it needs the access.
pub(crate) fn grant<'a>(
    client: &Client,
    disks: impl Iterator<Item = &'a str>,
    backing: &[PathBuf],
) {
    let disks: Vec<_> = disks.filter(|disk| disk_spec::file(disk).is_some()).collect();
    if disks.is_empty() {
        return;
    }
    let Ok(Some(supervisor)) = supervisor_of(client) else { return };
    let id = |about: Metadata| (about.dev(), about.ino());
    let backing: Vec<_> = backing.iter().filter_map(|path| path.metadata().ok().map(id)).collect();
    let is_backing = |about: io::Result<Metadata>| about.is_ok_and(|it| backing.contains(&id(it)));
    // Relative paths refer to the working directory of the server.
    let from = supervisor.working_directory();
    let disks = disks.iter().filter_map(|disk| {
        let is_absolute = disk_spec::file(disk)?.is_absolute();
        let from = if is_absolute { Path::new("/") } else { from.as_deref()? };
        Some(disk_files::files(disk, from))
    });
    for (at, wanted) in disks.flat_map(|files| files.into_iter().enumerate()) {
        // The check before the open avoids side effects, and the second one a replaced file.
        if (at == 0 || is_backing(wanted.path.metadata()))
            && let Ok(file) = open(&wanted)
            && (at == 0 || is_backing(file.metadata()))
            && !supervisor.grant(&wanted.path, file.as_fd())
        {
            return;
        }
    }
}

/// Opens an image for reading and writing, or only for reading if it is a read-only image or this
/// process may not write it.
fn open(DiskFile { path, is_read_only }: &DiskFile) -> io::Result<File> {
    let kind = std::fs::metadata(path)?.file_type();
    // Opening a FIFO would block.
    if !kind.is_file() && !kind.is_block_device() && !kind.is_char_device() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let how = OpenOptions::new().read(true).clone();
    match is_read_only {
        true => how.open(path),
        false => how.clone().write(true).open(path).or_else(|_| how.open(path)),
    }
}
