//! `shadowbell ctl export`: lists, adds and removes exports of a server's disks.

use crate::grant::{NamedFiles, grant};
use anyhow::anyhow;
use clap::{ArgGroup, Subcommand};
use hyper::Method;
use shadowbell_control_api::api::{Disk, Export, ExportSpec};
use shadowbell_control_api::client::{Client, forced, part};
use shadowbell_export::fuse::Mount;
use shadowbell_process::exit::{self, bad_input};
use shadowbell_process::output::show;
use shadowbell_process::table::Table;
use shadowbell_storage::disk_files;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time to wait for programs that use the file only briefly, such as one that looks at it.
const USERS: Duration = Duration::from_secs(1);
/// Interval of the attempts to unmount a file.
const RETRY: Duration = Duration::from_millis(50);

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum ExportVerb {
    /// List the exports
    Ls,
    /// Export a disk by NBD, vhost-user-blk or FUSE; no effect if an equal export exists
    #[command(group = ArgGroup::new("protocol").required(true))]
    Add {
        /// Id of the export
        id: String,
        /// Id of the disk
        disk: String,
        /// Listen address for NBD: unix:/run/disk.sock, tcp:127.0.0.1:10809
        #[arg(long, value_name = "unix:PATH|tcp:ADDRESS", group = "protocol")]
        nbd: Option<String>,
        /// Socket for a VM, which gets the disk as a virtio disk
        #[arg(long, value_name = "PATH", group = "protocol")]
        vhost_user_blk: Option<PathBuf>,
        /// File to mount the disk over by FUSE (created if missing), for a loop device
        ///
        /// This command mounts it, with the rights and in the mount namespace of its caller, and
        /// passes it to the server. The mount stays over crashes and upgrades of the server
        /// process, until the export is removed.
        #[arg(long, value_name = "FILE", group = "protocol")]
        fuse: Option<PathBuf>,
        /// With --vhost-user-blk: number of virtio queues [default: one per processor, up to 4]
        #[arg(long, value_name = "COUNT", requires = "vhost_user_blk")]
        queues: Option<u16>,
        /// Name of the NBD export, and serial number of the virtio disk
        #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
        name: String,
        /// Accept only clients with TLS, with the certificates in DIR
        #[arg(long, value_name = "DIR", requires = "nbd")]
        tls_certificates: Option<PathBuf>,
        /// With --tls-certificates: also accept clients without a certificate
        #[arg(long, requires = "tls_certificates")]
        tls_any_client: bool,
        /// Refuse writes
        #[arg(long)]
        read_only: bool,
        /// Permit another writer of the disk, if that one permits it too
        #[arg(long)]
        share: bool,
    },
    /// Remove an export; its clients are disconnected, and its FUSE file is unmounted
    ///
    /// While programs use the file, the export is not removed: end them, and remove it again.
    Remove {
        /// Id of the export
        id: String,
        /// Remove it even if it has clients
        #[arg(long)]
        force: bool,
    },
}

/// Runs a verb.
///
/// # Errors
/// The server refuses the request.
pub(crate) fn export(client: &Client, verb: &ExportVerb, json: bool) -> anyhow::Result<()> {
    let path = |id: &str| format!("/v1/exports/{}", part(id));
    let now = match verb {
        ExportVerb::Ls => client.get("/v1/exports")?,
        ExportVerb::Remove { id, force } => {
            // An export that the server does not know is an error before its file is unmounted.
            let _: Export = client.get(&path(id))?;
            // The server may be compromised, so the path that it reports is not used.
            Mount::of_source(&source(client, id)).iter().try_for_each(unmount)?;
            return client.send::<()>(&Method::DELETE, &forced(&path(id), *force), &());
        }
        ExportVerb::Add {
            id,
            disk,
            nbd,
            vhost_user_blk,
            fuse,
            queues,
            name,
            tls_certificates,
            tls_any_client,
            read_only,
            share,
        } => {
            let absolute = |path: &Path| {
                std::path::absolute(path).map(|path| path.to_string_lossy().into_owned())
            };
            // The path is made canonical, so that it equals the path in the mount table.
            let canonical = |path: &Path| match path.canonicalize() {
                Ok(path) => Ok(path.to_string_lossy().into_owned()),
                Err(_) => absolute(path),
            };
            let nbd = nbd.as_ref().map(|nbd| match nbd.strip_prefix("unix:") {
                Some(path) => absolute(Path::new(path)).map(|path| format!("unix:{path}")),
                None => Ok(nbd.clone()),
            });
            let mut spec = ExportSpec {
                disk: crate::ctl_disk::canonical_id(disk),
                nbd: nbd.transpose()?,
                vhost_user_blk: vhost_user_blk.as_deref().map(absolute).transpose()?,
                fuse: fuse.as_deref().map(canonical).transpose()?,
                uid: fuse.as_ref().map(|_| rustix::process::getuid().as_raw()),
                gid: fuse.as_ref().map(|_| rustix::process::getgid().as_raw()),
                queues: *queues,
                name: name.clone(),
                tls_certificates: tls_certificates.as_deref().map(absolute).transpose()?,
                tls_any_client: *tls_any_client,
                read_only: *read_only,
                share: *share,
            };
            let socket = spec.nbd.as_deref().and_then(|nbd| nbd.strip_prefix("unix:"));
            let socket = socket.or(spec.vhost_user_blk.as_deref()).map(Path::new);
            let (disks, named) = (std::iter::empty(), NamedFiles::default());
            grant(client, disks, socket.into_iter(), &named)?;
            match fuse {
                // A file of an existing export is not mounted again: the server only compares the
                // export with the request.
                Some(file) if served(client, &path(id))?.is_none() => {
                    refuse_image(client, file)?;
                    let (mount, device) = Mount::from_source(file, &source(client, id), *read_only)
                        .map_err(bad_input)?;
                    spec.fuse = Some(mount.path().to_string_lossy().into_owned());
                    let client = client.with_descriptor(device);
                    let added = client.send(&Method::PUT, &path(id), &spec).inspect_err(|_| {
                        drop(client);
                        mount.unmount();
                        mount.remove_file();
                    });
                    vec![added?]
                }
                _ => vec![client.send(&Method::PUT, &path(id), &spec)?],
            }
        }
    };
    show(&now, json, exports)
}

/// Mount source of an export's FUSE file. It names the export and the control socket that the
/// caller has chosen.
fn source(client: &Client, id: &str) -> String {
    let socket = client.socket();
    let socket = socket.canonicalize().or_else(|_| std::path::absolute(socket));
    let socket = socket.unwrap_or_else(|_| client.socket().to_owned());
    format!("shadowbell:{id}@{}", socket.display())
}

/// Unmounts the file of an export. Fails if a program uses the file for longer than [`USERS`].
fn unmount(mount: &Mount) -> anyhow::Result<()> {
    let path = mount.path().display();
    let until = Instant::now() + USERS;
    let outcome = loop {
        match mount.unmount_unused() {
            Err(error) if error.kind() == ErrorKind::ResourceBusy && Instant::now() < until => {
                std::thread::sleep(RETRY);
            }
            outcome => break outcome,
        }
    };
    outcome.map_err(|error| match error.kind() {
        ErrorKind::ResourceBusy => exit::conflict(anyhow!(
            "programs use {path}, the file of the export, so nothing was changed: end them \
             (`fuser -v {path}` lists them), and remove the export again"
        )),
        _ => anyhow::Error::new(error).context(format!("cannot unmount {path}")),
    })
}

/// Export at `path` of the API. `None` if it does not exist, or is not served.
fn served(client: &Client, path: &str) -> anyhow::Result<Option<Export>> {
    match client.get(path) {
        Ok(export) => Ok(Some(export)),
        Err(error) if exit::status(&error) == exit::NOT_FOUND => Ok(None),
        Err(error) => Err(error),
    }
}

/// Refuses to mount over an image of the server.
fn refuse_image(client: &Client, file: &Path) -> anyhow::Result<()> {
    let disks: Vec<Disk> = client.get("/v1/disks")?;
    let here = Path::new("");
    match disks.iter().find(|disk| disk_files::uses(&disk.source, here, file)) {
        None => Ok(()),
        Some(disk) => Err(bad_input(anyhow!(
            "{} is the file of the disk {}: name another file for the mount",
            file.display(),
            disk.id
        ))),
    }
}

fn exports(out: &mut dyn Write, all: &Vec<Export>) -> io::Result<()> {
    let mut table = Table::new([
        "Export", "Disk", "Protocol", "Address", "Name", "TLS", "Writes", "Queues", "Failed",
    ]);
    for export in all {
        let yes_or_no = |is_so: bool| if is_so { "yes" } else { "no" }.to_owned();
        table.line([
            export.id.clone(),
            export.disk.clone(),
            match export {
                Export { nbd: Some(_), .. } => "NBD",
                Export { fuse: Some(_), .. } => "FUSE",
                Export { ublk: Some(_), .. } => "ublk",
                _ => "vhost-user-blk",
            }
            .to_owned(),
            [&export.nbd, &export.vhost_user_blk, &export.fuse, &export.ublk]
                .into_iter()
                .find_map(Clone::clone)
                .unwrap_or_default(),
            export.name.clone(),
            yes_or_no(export.tls),
            yes_or_no(!export.read_only),
            // One for each NBD client, or virtio queue.
            export.queues.to_string(),
            export.failures.to_string(),
        ]);
    }
    write!(out, "{table}")
}
