//! Exports of one disk: NBD, FUSE, vhost-user-blk and ublk.

use super::args::Args;
use anyhow::anyhow;
use shadowbell_block::{BlockDevice, BlockOptions};
use shadowbell_config::disk_spec::DiskSpecError;
use shadowbell_config::target::Target;
use shadowbell_disk::{Disk, OpenError};
use shadowbell_disk_nvme::Options as NvmeOptions;
use shadowbell_export::fuse::Mounted;
use shadowbell_export::nbd::{self, Server};
use shadowbell_export::ublk::{self, Ublk, WhyCopied};
use shadowbell_export::vhost::VhostUserBlk;
use shadowbell_process::exit;
use shadowbell_storage::disk_open;
use shadowbell_storage::transport;
use shadowbell_tls::ServerTls;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tracing::{info, warn};

/// Default limit of the number of queues.
const MOST_QUEUES: u16 = 4;
/// Queue pairs for NBD, where each client uses a queue of its own.
const NBD_QUEUES: u16 = 16;

/// Default of the longest time for which a thread polls before it sleeps, in microseconds.
const POLL_MAX: u32 = 50;
/// Time by which the last flush may exceed the timeout of other requests.
const FLUSH_EXTRA: Duration = Duration::from_secs(5);

/// A disk and its exports.
pub(super) struct ExportedDisk {
    target: Target,
    disk: BlockDevice,
    timeout: Duration,
    nbd: Vec<Server>,
    fuse: Option<Mounted>,
    vhost: Option<VhostUserBlk>,
    ublk: Option<Ublk>,
    name: String,
    has_tls: bool,
}

/// Opens the disk that `target` names: a disk of this process, or a namespace of a controller, with
/// `queues` queue pairs.
fn open(target: &Target, queues: u16, timeout: Duration) -> anyhow::Result<Arc<dyn Disk>> {
    match target {
        Target::Local { disk } => disk_open::open(disk).map_err(|error| match error {
            DiskSpecError::Disk(OpenError::Missing { path }) => {
                exit::bad_input(anyhow!(disk_open::nothing_at(&path)))
            }
            error => error.into_error(),
        }),
        remote => {
            let mut options = NvmeOptions::default();
            (options.queue_pairs, options.timeout) = (queues, Some(timeout));
            let transport = transport::to(remote)?;
            Ok(Arc::new(disk_open::attach(transport, remote, &remote.to_string(), &options)?))
        }
    }
}

impl ExportedDisk {
    /// Opens the disk, and starts the exports that `args` name. Calls `unused` when all exports
    /// have ended by themselves.
    pub(super) fn start(
        args: &Args,
        unused: impl Fn() + Clone + Send + 'static,
    ) -> anyhow::Result<Self> {
        if args.ublk {
            ublk::promise_progress();
        }
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let queues = u16::try_from(processors).unwrap_or(MOST_QUEUES).min(MOST_QUEUES);
        let queues = args.queues.unwrap_or(queues);
        let timeout = Duration::from_secs(args.timeout.into());
        let pairs = if args.nbd.is_empty() { queues } else { queues.max(NBD_QUEUES) };
        let disk = open(&args.target, pairs, timeout)?;
        let mut options = BlockOptions::default();
        (options.read_only, options.queues) = (args.read_only, queues.into());
        options.poll = Duration::from_micros(args.poll_max.unwrap_or(POLL_MAX).into());
        options.timeout = timeout;
        let disk = BlockDevice::new(disk, &options).map_err(exit::bad_input)?;
        let name = args.name.clone();
        let mut exported = Self {
            target: args.target.clone(),
            disk,
            timeout,
            nbd: Vec::new(),
            fuse: None,
            vhost: None,
            ublk: None,
            name,
            has_tls: args.tls_certificates.is_some(),
        };
        exported.serve(args, unused)?;
        let geometry = exported.disk.geometry();
        info!(
            "exporting {} ({}{})",
            args.target,
            bytesize::ByteSize(geometry.bytes).display().iec(),
            if geometry.read_only { ", read-only" } else { "" }
        );
        Ok(exported)
    }

    fn serve(
        &mut self,
        args: &Args,
        unused: impl Fn() + Clone + Send + 'static,
    ) -> anyhow::Result<()> {
        let mut options = nbd::Options::default();
        options.name.clone_from(&args.name);
        options.description = args.target.to_string();
        if let Some(directory) = &args.tls_certificates {
            let tls = ServerTls::load(directory, args.tls_any_client);
            options.tls = Some(tls.map_err(exit::bad_input)?);
        }
        let clients_are_known = args.tls_certificates.is_some() && !args.tls_any_client;
        for address in &args.nbd {
            if let nbd::Address::Tcp(tcp) = address
                && !tcp.ip().is_loopback()
                && !clients_are_known
            {
                tracing::warn!(
                    "all hosts that can reach {tcp} can read the disk{}, because NBD without client \
                     certificates has no authentication; `tcp:127.0.0.1:{}` permits only this machine",
                    if args.read_only { "" } else { " and write it" },
                    tcp.port()
                );
            }
            let server = Server::start(self.disk.clone(), address, &options);
            self.nbd.push(server.map_err(exit::bad_input)?);
        }
        if let Some(path) = &args.vhost_user_blk {
            let id = if args.name.is_empty() { "shadowbell" } else { &args.name };
            let offered = VhostUserBlk::start(self.disk.clone(), path, id);
            self.vhost = Some(offered.map_err(exit::bad_input)?);
        }
        let count = args.nbd.len()
            + usize::from(args.vhost_user_blk.is_some())
            + usize::from(args.fuse.is_some())
            + usize::from(args.ublk);
        // Number of running exports. When the last one has ended by itself, the program ends.
        let servers = Arc::new(AtomicUsize::new(count));
        let gone = |what: String| {
            let (servers, unused) = (Arc::clone(&servers), unused.clone());
            move || {
                info!("{what}");
                if servers.fetch_sub(1, Ordering::AcqRel) == 1 {
                    unused();
                }
            }
        };
        if args.ublk {
            if args.recover && is_forgetful(&args.target) {
                return Err(exit::bad_input(anyhow!(
                    "{}: the content was lost with the process to recover from",
                    args.target
                )));
            }
            let mut options = ublk::Options::default();
            (options.id, options.recover) = (args.ublk_id, args.recover);
            options.copy = args.ublk_copy;
            options.shared = count > 1;
            let ended = gone("the block device was removed by another program".into());
            let device = Ublk::start(&self.disk, options, ended);
            let device = device.map_err(exit::bad_input)?;
            let path = device.path().display();
            if device.was_taken_over() {
                info!("{path}: recovered");
            }
            match device.why_copied() {
                None => info!("{path}: zero-copy I/O to the disk"),
                // Expected for a disk without a local file, so only debug output.
                Some(WhyCopied::NoFile) => tracing::debug!("{path}: {}", WhyCopied::NoFile),
                Some(why) => info!("{path}: data is copied: {why}"),
            }
            self.ublk = Some(device);
        }
        if let Some(path) = &args.fuse {
            let ended = gone(format!("{} was unmounted", path.display()));
            let mounted = Mounted::start(self.disk.clone(), path, ended);
            self.fuse = Some(mounted.map_err(exit::bad_input)?);
        }
        Ok(())
    }

    /// True if NBD clients need TLS.
    pub(super) fn has_tls(&self) -> bool {
        self.has_tls
    }

    /// Listen addresses of the NBD servers.
    pub(super) fn nbd(&self) -> impl Iterator<Item = &nbd::Address> {
        self.nbd.iter().map(Server::address)
    }

    /// Path of the FUSE file.
    pub(super) fn fuse(&self) -> Option<&Path> {
        self.fuse.as_ref().map(Mounted::path)
    }

    /// Socket and number of queues of the vhost-user-blk device.
    pub(super) fn vhost(&self) -> Option<(&Path, usize)> {
        self.vhost.as_ref().map(|device| (device.path(), self.disk.queues()))
    }

    /// Path and number of the ublk device.
    pub(super) fn ublk(&self) -> Option<(&Path, u32)> {
        self.ublk.as_ref().map(|device| (device.path(), device.id()))
    }

    /// The exported disk or namespace.
    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    /// Name of the export.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Completes the requests in flight, makes everything durable, and closes the disk.
    pub(super) fn stop(self) -> anyhow::Result<()> {
        let Self { target, disk, timeout, nbd, fuse, vhost, ublk, .. } = self;
        let mut failures = 0;
        // ublk and FUSE first: they wait until no program has the device or the file open.
        failures += ublk.map_or(0, Ublk::stop);
        if let Some(fuse) = fuse {
            failures += fuse.stop();
        }
        failures += vhost.map_or(0, VhostUserBlk::stop);
        failures += nbd.into_iter().map(Server::stop).sum::<u64>();
        if failures > 0 {
            warn!("{failures} requests failed");
        }
        if disk.geometry().read_only {
            return Ok(());
        }
        let flushed = match disk.queue() {
            Ok(queue) => match queue.block_on_for(queue.flush(), timeout + FLUSH_EXTRA) {
                Some(flushed) => flushed.map_err(|error| error.to_string()),
                None => Err("timeout".to_owned()),
            },
            Err(error) => Err(error.to_string()),
        };
        flushed.map_err(|error| {
            anyhow!("{target}: written data may not be durable: the last flush failed: {error}")
        })
    }
}

/// True if the disk's data are lost at the end of the process.
fn is_forgetful(target: &Target) -> bool {
    matches!(target, Target::Local { disk } if disk.starts_with("mem:"))
}
