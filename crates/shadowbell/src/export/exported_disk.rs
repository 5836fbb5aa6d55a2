//! What runs while a disk is exported.

use super::args::Args;
use super::lender::Lender;
use crate::exit;
use crate::session::Session;
use crate::target::Target;
use anyhow::{Context, anyhow};
use shadowbell_block::{BlockDevice, BlockOptions, block_on_for};
use shadowbell_controller::Controller;
use shadowbell_driver::{AttachOptions, SpinPolicy, Timeouts};
use shadowbell_export::QueueThreads;
use shadowbell_export::fuse::{self, Mounted};
use shadowbell_export::nbd::{self, Server};
use shadowbell_export::ublk::{self, Ublk, WhyCopied};
use shadowbell_export::vhost::{LocalDisk, VhostUserBlk};
use shadowbell_tls::ServerTls;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tracing::{info, warn};

/// Commands that may be outstanding per queue, and one.
const QUEUE_DEPTH: u32 = 128;
/// The most queue pairs that are asked for unless somebody says how many.
const MOST_QUEUES: u16 = 4;

/// For how many microseconds a queue looks for completions before it sleeps.
const POLL_MAX: u32 = 50;
/// As that, where one thread serves a queue all by itself.
const LONGEST_POLL: u32 = 100;
/// How much longer than any other command the last flush may take.
const FLUSH_EXTRA: Duration = Duration::from_secs(5);

/// A disk that is exported.
pub(super) struct ExportedDisk {
    session: Session,
    disk: BlockDevice,
    timeout: Duration,
    nbd: Vec<Server>,
    fuse: Option<Mounted>,
    vhost: Option<VhostUserBlk>,
    ublk: Option<Ublk>,
    name: String,
    has_tls: bool,
}

impl ExportedDisk {
    /// Attaches to the controller, and serves its namespace in every way that was asked for. Calls
    /// `unused` when nobody can come to the disk any more.
    pub(super) fn start(
        args: &Args,
        unused: impl Fn() + Clone + Send + 'static,
    ) -> anyhow::Result<Self> {
        if args.ublk {
            ublk::promise_progress();
        }
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let queues = u16::try_from(processors).unwrap_or(MOST_QUEUES).min(MOST_QUEUES);
        // Whoever is served, the thread that serves and the queue's are three already.
        let poll_max = args.poll_max.unwrap_or(if processors <= 2 { 0 } else { POLL_MAX });
        let timeout = Duration::from_secs(args.timeout.into());
        let options = AttachOptions {
            queue_pairs: args.queues.unwrap_or(queues),
            queue_depth: QUEUE_DEPTH,
            spin: SpinPolicy { max: Duration::from_micros(poll_max.into()), adaptive: true },
            timeouts: Timeouts { io: timeout, ..Timeouts::default() },
            ..AttachOptions::default()
        };
        let mut session = Session::attach(&args.target, &options)?;
        let nsid = session.namespace()?.nsid();
        let mut options = BlockOptions::default();
        options.read_only = args.read_only;
        let disk = BlockDevice::open(&mut session.controller, nsid, &options)
            .with_context(|| args.target.to_string())?;
        let name = args.name.clone();
        let mut exported = Self {
            session,
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
        let lender = |controller: &Controller| -> Arc<dyn QueueThreads> {
            Arc::new(Lender(controller.clone()))
        };
        let lender = self.session.local().map(lender);
        options.lender.clone_from(&lender);
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
            let offered = VhostUserBlk::start_on(self.disk.clone(), path, id, self.direct(args));
            self.vhost = Some(offered.map_err(exit::bad_input)?);
        }
        let servers = args.nbd.len()
            + usize::from(args.vhost_user_blk.is_some())
            + usize::from(args.fuse.is_some())
            + usize::from(args.ublk);
        // Each server of the disk that ends by itself counts down; the last one ends the program.
        let servers = Arc::new(AtomicUsize::new(servers));
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
            let ended = gone("the block device was removed by another program".into());
            let local = self.ublk_local(args);
            let device = Ublk::start_on(&self.disk, options, local.as_ref(), ended);
            let device = device.map_err(exit::bad_input)?;
            let path = device.path().display();
            if device.was_taken_over() {
                info!("{path}: recovered");
            }
            match device.why_copied() {
                None => info!("{path}: zero-copy I/O to the disk"),
                // Of a disk that can do no better there is nothing to say.
                Some(WhyCopied::NoFile) => tracing::debug!("{path}: {}", WhyCopied::NoFile),
                Some(why) => info!("{path}: data is copied: {why}"),
            }
            self.ublk = Some(device);
        }
        if let Some(path) = &args.fuse {
            let ended = gone(format!("{} was unmounted", path.display()));
            let mut options = fuse::Options::default();
            options.lender = lender;
            let mounted = Mounted::start_with(self.disk.clone(), path, &options, ended);
            self.fuse = Some(mounted.map_err(exit::bad_input)?);
        }
        Ok(())
    }

    /// The disk below, if it is in this process, and served to a VM alone.
    fn direct(&self, args: &Args) -> Option<LocalDisk> {
        if !args.nbd.is_empty() || args.fuse.is_some() || args.ublk {
            return None;
        }
        self.local(args)
    }

    /// The same, if it is a block device and nothing else.
    fn ublk_local(&self, args: &Args) -> Option<LocalDisk> {
        if !args.nbd.is_empty() || args.fuse.is_some() || args.vhost_user_blk.is_some() {
            return None;
        }
        self.local(args)
    }

    /// The disk below, if it is in this process.
    fn local(&self, args: &Args) -> Option<LocalDisk> {
        let poll = args.poll_max.unwrap_or(LONGEST_POLL);
        let disk = self.session.local_disk()?;
        // A request without a word of protection information has none checked.
        if disk.info().metadata.is_some() {
            return None;
        }
        Some(LocalDisk {
            disk: Arc::clone(disk),
            poll: Duration::from_micros(poll.into()),
            timeout: self.timeout,
        })
    }

    /// Whether NBD clients need TLS.
    pub(super) fn has_tls(&self) -> bool {
        self.has_tls
    }

    /// Where NBD clients find it.
    pub(super) fn nbd(&self) -> impl Iterator<Item = &nbd::Address> {
        self.nbd.iter().map(Server::address)
    }

    /// The file that is the disk.
    pub(super) fn fuse(&self) -> Option<&Path> {
        self.fuse.as_ref().map(Mounted::path)
    }

    /// Where a VMM finds it, and how many queues there are.
    pub(super) fn vhost(&self) -> Option<(&Path, usize)> {
        self.vhost.as_ref().map(|device| (device.path(), self.disk.queues()))
    }

    /// The block device, and its number.
    pub(super) fn ublk(&self) -> Option<(&Path, u32)> {
        self.ublk.as_ref().map(|device| (device.path(), device.id()))
    }

    /// What is exported.
    pub(super) fn target(&self) -> &Target {
        self.session.target()
    }

    /// The export's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Finishes what is under way, makes everything durable and leaves the controller.
    pub(super) fn stop(self) -> anyhow::Result<()> {
        let Self { session, disk, timeout, nbd, fuse, vhost, ublk, .. } = self;
        let mut failures = 0;
        // The device and the file first: who has them open is waited for.
        failures += ublk.map_or(0, Ublk::stop);
        if let Some(fuse) = fuse {
            failures += fuse.stop();
        }
        failures += vhost.map_or(0, VhostUserBlk::stop);
        failures += nbd.into_iter().map(Server::stop).sum::<u64>();
        if failures > 0 {
            warn!("{failures} requests failed");
        }
        let target = session.target().to_string();
        let flushed = match disk.geometry().read_only {
            true => Ok(()),
            // A queue that is full of commands which never end has no place for this one either.
            false => match block_on_for(disk.flush(), timeout + FLUSH_EXTRA) {
                Some(flushed) => flushed.map_err(|error| error.to_string()),
                None => Err("timeout".to_owned()),
            },
        };
        drop(disk);
        let detached = session.detach();
        flushed.map_err(|error| {
            anyhow!("{target}: written data may not be durable: the last flush failed: {error}")
        })?;
        detached
    }
}

/// Whether what the target keeps is gone with the process that serves it.
fn is_forgetful(target: &Target) -> bool {
    matches!(target, Target::Local { disk } if disk.starts_with("mem:"))
}
