//! Access to images and sockets for a sandboxed server: its supervisor opens images and creates
//! sockets that were named at the start, and those that `ctl` grants. The server process itself
//! cannot extend its access.

use anyhow::{Context, anyhow};
use shadowbell_config::disk_spec;
use shadowbell_config::server_config::ServerConfig;
use shadowbell_control_api::api::Status;
use shadowbell_control_api::client::Client;
use shadowbell_control_api::discovery;
use shadowbell_process::exit::{bad_input, not_found};
use shadowbell_process::logging::COMMON;
use shadowbell_process::process_env::absolute;
use shadowbell_storage::disk_files::{self, DiskFile};
use shadowbell_storage::disk_kinds::{self, Peer};
use shadowbell_supervisor::client::SupervisorClient;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Files that the caller names because a qcow2 image names them. The names in the image are not
/// sufficient, because a server process could have written the image's header.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct NamedFiles {
    /// Backing file, by the path in the qcow2 image, that the server may read for a disk with
    /// `allow-backing=on` (repeatable); not needed below a directory of `serve --allow`
    #[arg(long, global = true, value_name = "FILE", help_heading = COMMON)]
    backing: Vec<PathBuf>,
    /// External data file of a qcow2 image, as --backing; the server may also write it
    #[arg(long, global = true, value_name = "FILE", help_heading = COMMON)]
    data_file: Vec<PathBuf>,
}

impl NamedFiles {
    /// True if no file is named.
    pub(crate) fn is_empty(&self) -> bool {
        self.backing.is_empty() && self.data_file.is_empty()
    }

    /// True if the caller names the file at this absolute path.
    pub(crate) fn contains(&self, path: &Path) -> bool {
        self.files().any(|file| absolute(&file.path) == path)
    }

    fn files(&self) -> impl Iterator<Item = DiskFile> {
        let file = |path: &PathBuf, is_read_only| DiskFile { path: path.clone(), is_read_only };
        let backing = self.backing.iter().map(move |path| file(path, true));
        backing.chain(self.data_file.iter().map(move |path| file(path, false)))
    }
}

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

/// Grants the supervisor of a server, if there is one, access to these disks and to the `named`
/// files, with the rights of this process, to these sockets, and to the NBD servers of the disks.
/// If a grant fails, the server refuses the request if it needs the access.
///
/// # Errors
/// A file of `named` cannot be opened.
pub(crate) fn grant<'a>(
    client: &Client,
    disks: impl Iterator<Item = &'a str>,
    sockets: impl Iterator<Item = &'a Path>,
    named: &NamedFiles,
) -> anyhow::Result<()> {
    let disks: Vec<_> = disks.collect();
    let servers: Vec<_> = disks.iter().filter_map(|disk| disk_kinds::nbd_peer(disk)).collect();
    let disks = disks.into_iter().filter(|disk| disk_spec::file(disk).is_some());
    let disks: Vec<_> = disks.collect();
    let sockets: Vec<_> = sockets.collect();
    let is_empty = disks.is_empty() && servers.is_empty();
    if is_empty && sockets.is_empty() && named.is_empty() {
        return Ok(());
    }
    let supervisor = match supervisor_of(client) {
        Ok(Some(supervisor)) => supervisor,
        Ok(None) => return Ok(()),
        Err(error) => {
            tracing::warn!("the supervisor gets no access to the files and sockets: {error:#}");
            return Ok(());
        }
    };
    // Relative paths refer to the working directory of the server.
    let from = supervisor.working_directory();
    let from = |path: &Path| match path.is_absolute() {
        true => Some(PathBuf::from("/")),
        false => from.clone(),
    };
    for file in disks {
        let file = disk_spec::file(file).and_then(|path| disk_files::image(file, &from(&path)?));
        let Some(file) = file else { continue };
        match open(&file) {
            Ok(opened) => {
                supervisor.grant(&file.path, opened.as_fd());
            }
            // The server may have access of its own: it decides, and does not report the cause for
            // a file outside of its directories.
            Err(error) => {
                let path = file.path.display();
                tracing::warn!("{path}: not passed to the server: {error}");
            }
        }
    }
    for file in named.files() {
        let opened = open(&file).with_context(|| file.path.display().to_string());
        let opened = opened.map_err(bad_input)?;
        supervisor.grant(&std::path::absolute(&file.path)?, opened.as_fd());
    }
    for server in servers {
        match server {
            Peer::Tcp(address) => supervisor.grant_server(address.to_string().as_ref()),
            Peer::Unix(path) => from(&path).is_some_and(|from| {
                supervisor.grant_server(absolute(&from.join(path)).as_os_str())
            }),
        };
    }
    for socket in sockets {
        if let Some(from) = from(socket) {
            supervisor.grant_socket(&from.join(socket));
        }
    }
    Ok(())
}

/// Files that the qcow2 images of a configuration name, and that a server in a sandbox could not
/// open, because `[paths] allow` does not permit them. Files that do not exist are left out.
pub(crate) fn files_to_allow(config: &ServerConfig) -> Vec<PathBuf> {
    let named = config.disk_specs().flat_map(|disk| disk_files::files(disk, Path::new("/")));
    let images: BTreeSet<_> = config.images().map(|(path, _)| path).collect();
    let is_below = |path: &Path, directory: &Path| {
        // The supervisor refuses a link or `..` that leads out of the directory.
        let real = path.canonicalize().ok().zip(directory.canonicalize().ok());
        path.starts_with(directory) && real.is_some_and(|(path, above)| path.starts_with(above))
    };
    let is_allowed = |path: &PathBuf| {
        images.contains(path) || config.allow.iter().any(|allowed| is_below(path, allowed))
    };
    let missing: BTreeSet<_> = named.filter(|path| path.exists() && !is_allowed(path)).collect();
    missing.into_iter().collect()
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
