//! What runs while a disk is exported.

use super::Args;
use crate::exit;
use crate::target::Session;
use ::export::nbd::{self, Server};
use anyhow::{Context, anyhow};
use block::{BlockDevice, BlockOptions, block_on};
use driver::AttachOptions;
use tracing::{info, warn};

/// Commands that may be outstanding per queue, and one.
const QUEUE_DEPTH: u32 = 128;
/// The most queue pairs that are asked for unless somebody says how many.
const MOST_QUEUES: u16 = 4;

/// A disk that is exported.
pub(super) struct Service {
    session: Session,
    disk: BlockDevice,
    nbd: Vec<Server>,
    name: String,
}

impl Service {
    /// Attaches to the controller, and serves its namespace in every way that was asked for.
    pub(super) fn start(args: &Args) -> anyhow::Result<Self> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let queues = u16::try_from(processors).unwrap_or(MOST_QUEUES).min(MOST_QUEUES);
        let options = AttachOptions {
            queue_pairs: args.queues.unwrap_or(queues),
            queue_depth: QUEUE_DEPTH,
            ..AttachOptions::default()
        };
        let mut session = args.target.attach(&options)?;
        let nsid = session.namespace()?.nsid();
        let options = BlockOptions { read_only: args.read_only, ..BlockOptions::default() };
        let disk = BlockDevice::open(&mut session.controller, nsid, &options)
            .with_context(|| args.target.to_string())?;
        let mut service = Self { session, disk, nbd: Vec::new(), name: args.name.clone() };
        service.serve(args)?;
        let geometry = service.disk.geometry();
        info!(
            "exporting {} ({}{})",
            args.target,
            bytesize::ByteSize(geometry.bytes).display().iec(),
            if geometry.read_only { ", read-only" } else { "" }
        );
        Ok(service)
    }

    fn serve(&mut self, args: &Args) -> anyhow::Result<()> {
        let options = nbd::Options {
            name: args.name.clone(),
            description: args.target.to_string(),
            ..nbd::Options::default()
        };
        for address in &args.nbd {
            let server = Server::start(self.disk.clone(), address, &options);
            self.nbd.push(server.map_err(exit::bad_input)?);
        }
        Ok(())
    }

    /// Where NBD clients find it.
    pub(super) fn nbd(&self) -> impl Iterator<Item = &nbd::Address> {
        self.nbd.iter().map(Server::address)
    }

    /// The export's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Finishes what is under way, makes everything durable and leaves the controller.
    pub(super) fn stop(self) -> anyhow::Result<()> {
        let Self { session, disk, nbd, .. } = self;
        let failures: u64 = nbd.iter().map(Server::failures).sum();
        nbd.into_iter().for_each(Server::stop);
        if failures > 0 {
            warn!("{failures} requests failed");
        }
        let target = session.target().to_string();
        let flushed = if disk.geometry().read_only { Ok(()) } else { block_on(disk.flush()) };
        drop(disk);
        let detached = session.detach();
        flushed.map_err(|error| {
            anyhow!("{target}: what was written may not be durable, the last flush failed: {error}")
        })?;
        detached
    }
}
