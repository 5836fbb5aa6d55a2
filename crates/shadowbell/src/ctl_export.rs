//! `shadowbell ctl export`: lists, adds and removes exports of a server's disks.

use clap::Subcommand;
use hyper::Method;
use shadowbell_control_api::api::{Export, ExportSpec};
use shadowbell_control_api::client::{Client, part};
use shadowbell_process::output::show;
use shadowbell_process::table::Table;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum ExportVerb {
    /// List the exports
    Ls,
    /// Export a disk by NBD or vhost-user-blk; no effect if an equal export exists
    Add {
        /// Id of the export
        id: String,
        /// Id of the disk
        disk: String,
        /// Listen address for NBD: unix:/run/disk.sock, tcp:127.0.0.1:10809
        #[arg(long, value_name = "unix:PATH|tcp:ADDRESS")]
        nbd: Option<String>,
        /// Socket for a VM, which gets the disk as a virtio disk
        #[arg(long, value_name = "PATH", required_unless_present = "nbd", conflicts_with = "nbd")]
        vhost_user_blk: Option<PathBuf>,
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
    /// Remove an export; its clients are disconnected
    Remove {
        /// Id of the export
        id: String,
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
        ExportVerb::Remove { id } => return client.send::<()>(&Method::DELETE, &path(id), &()),
        ExportVerb::Add {
            id,
            disk,
            nbd,
            vhost_user_blk,
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
            let nbd = nbd.as_ref().map(|nbd| match nbd.strip_prefix("unix:") {
                Some(path) => absolute(Path::new(path)).map(|path| format!("unix:{path}")),
                None => Ok(nbd.clone()),
            });
            let spec = ExportSpec {
                disk: crate::ctl_disk::canonical_id(disk),
                nbd: nbd.transpose()?,
                vhost_user_blk: vhost_user_blk.as_deref().map(absolute).transpose()?,
                queues: *queues,
                name: name.clone(),
                tls_certificates: tls_certificates.as_deref().map(absolute).transpose()?,
                tls_any_client: *tls_any_client,
                read_only: *read_only,
                share: *share,
            };
            vec![client.send(&Method::PUT, &path(id), &spec)?]
        }
    };
    show(&now, json, exports)
}

fn exports(out: &mut dyn Write, all: &Vec<Export>) -> io::Result<()> {
    let mut table =
        Table::new(["Export", "Disk", "Protocol", "Address", "Name", "TLS", "Writes", "Failed"]);
    for export in all {
        let yes_or_no = |is_so: bool| if is_so { "yes" } else { "no" }.to_owned();
        table.line([
            export.id.clone(),
            export.disk.clone(),
            if export.nbd.is_some() { "NBD" } else { "vhost-user-blk" }.to_owned(),
            export.nbd.clone().or_else(|| export.vhost_user_blk.clone()).unwrap_or_default(),
            export.name.clone(),
            yes_or_no(export.tls),
            yes_or_no(!export.read_only),
            export.failures.to_string(),
        ]);
    }
    write!(out, "{table}")
}
