//! Access to images for a sandboxed server: its supervisor opens images that were named at the
//! start, and passes files that `ctl` has opened. The server process itself cannot extend its
//! access.

use shadowbell_config::disk_spec;
use shadowbell_control_api::api::Status;
use shadowbell_control_api::client::Client;
use shadowbell_storage::disk_files::{self, DiskFile};
use shadowbell_supervisor::client::SupervisorClient;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Grants the supervisor of a server, if there is one, access to these disks and their backing
/// files, with the rights of this process. Failures are ignored: the server refuses the request if
/// it needs the access.
pub(crate) fn grant<'a>(client: &Client, disks: impl Iterator<Item = &'a str>) {
    let disks: Vec<_> = disks.filter(|disk| disk_spec::file(disk).is_some()).collect();
    if disks.is_empty() {
        return;
    }
    let Some(pid) = client.get("/v1/status").ok().and_then(|s: Status| s.supervisor_pid) else {
        return;
    };
    let Ok(supervisor) = SupervisorClient::find_reported(pid, client.socket()) else { return };
    // Relative paths refer to the working directory of the server.
    let from = supervisor.working_directory();
    let disks = disks.iter().filter_map(|disk| {
        let is_absolute = disk_spec::file(disk)?.is_absolute();
        let from = if is_absolute { Path::new("/") } else { from.as_deref()? };
        Some(disk_files::files(disk, from))
    });
    for wanted in disks.flatten() {
        if let Ok(file) = open(&wanted)
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
