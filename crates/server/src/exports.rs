//! Exports of the server's disks to programs other than NVMe hosts: NBD, vhost-user-blk, FUSE,
//! ublk.
//!
//! An export refers to a disk by id, and uses the same open disk as a controller. Its listening
//! socket has the mode and group of the controllers' sockets. After a crash or an upgrade, the next
//! server process listens again, and clients connect again. A VMM then passes the virtio requests
//! that were in flight. They are executed when all I/O of the old process has ended.
//!
//! A FUSE file is mounted by `ctl`, which passes the descriptor of `/dev/fuse`. The descriptor is
//! in the checkpoint, so the mount outlives a server process. The next process requests that the
//! kernel sends the requests in flight again.

use super::builder::bind_socket;
use super::disks::ListedDisk;
use super::guard::{self, Effect};
use super::path_broker;
use super::reconfigure::Changes;
use super::running_exports::{ExportDevice, RunningExport, tls_of};
use anyhow::{Context, anyhow};
use bytesize::ByteSize;
use shadowbell_block::{BlockDevice, BlockOptions};
use shadowbell_config::export_config::{ExportConfig, Protocol, UblkConfig};
use shadowbell_disk::Disk;
use shadowbell_export::fuse::{self, Session};
use shadowbell_export::nbd::{Address, Listener, Options, Server};
use shadowbell_export::ublk::{self, Ublk, WhyCopied};
use shadowbell_export::vhost::VhostUserBlk;
use shadowbell_process::exit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tracing::{debug, info, warn};

/// Default of the maximum time for which a thread of an export polls before it sleeps.
const POLL: Duration = Duration::from_micros(50);

impl Changes {
    /// Starts the configured exports. If `is_required`, the first error is returned; otherwise
    /// errors are logged, and the other exports are started. An export whose disk is not recovered
    /// yet is then started later, by [`start_missing_exports`](Self::start_missing_exports).
    ///
    /// # Errors
    /// An export cannot be served.
    pub(super) fn start_exports(&self, is_required: bool) -> anyhow::Result<()> {
        for export in self.exports().wanted() {
            let id = export.id.clone();
            if !is_required && self.disk(&export.disk).is_err() {
                info!("export {id} waits for the recovery of its disk {}", export.disk);
                continue;
            }
            match self.serve_export(export, !is_required) {
                Err(error) if is_required => return Err(error.context(format!("export {id}"))),
                Err(error) => warn!("export {id} is not served: {}", exit::line(&error)),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Starts the configured exports that do not run, because their disks may have been recovered
    /// since.
    pub(super) fn start_missing_exports(&self) {
        for export in self.exports().wanted() {
            let id = export.id.clone();
            let is_there = self.exports().running.lock().contains_key(&id);
            let is_startable = !is_there && self.disk(&export.disk).is_ok();
            if is_startable && let Err(error) = self.serve_export(export, true) {
                info!("export {id} is not served: {}", exit::line(&error));
            }
        }
    }

    /// Adds an export. `device` is the descriptor of `/dev/fuse` for a FUSE file. Returns false if
    /// the export exists already.
    ///
    /// # Errors
    /// The export cannot be served, or its id belongs to a different export.
    pub(super) fn add_export(
        &self,
        wanted: ExportConfig,
        device: Option<OwnedFd>,
    ) -> anyhow::Result<bool> {
        let _guard = self.change_lock();
        self.put_export(wanted, device)
    }

    /// Like [`add_export`](Self::add_export), for a caller that holds the lock of changes.
    ///
    /// # Errors
    /// As for [`add_export`](Self::add_export).
    pub(super) fn put_export(
        &self,
        wanted: ExportConfig,
        device: Option<OwnedFd>,
    ) -> anyhow::Result<bool> {
        wanted.protocol().map_err(|why| exit::bad_input(anyhow!(why)))?;
        let there = self.exports().wanted().into_iter().find(|export| export.id == wanted.id);
        let is_running = self.exports().running.lock().contains_key(&wanted.id);
        if let Some(there) = there.filter(|_| is_running) {
            return match there.is_same(&wanted) {
                true => Ok(false),
                false => Err(exit::conflict(anyhow!(
                    "an export `{}` exists already, with other properties; remove it first",
                    wanted.id
                ))),
            };
        }
        self.check_files_of_export(&wanted)?;
        if let Some(device) = device.filter(|_| wanted.fuse.is_some()) {
            if let Some(checkpoint) = self.checkpoint() {
                checkpoint.put_fuse_device(&wanted.id, device.as_fd());
            }
            let before = self.exports().devices().insert(wanted.id.clone(), device);
            self.serve_export(wanted.clone(), false).inspect_err(|_| match before {
                Some(before) => {
                    if let Some(checkpoint) = self.checkpoint() {
                        checkpoint.put_fuse_device(&wanted.id, before.as_fd());
                    }
                    self.exports().devices().insert(wanted.id.clone(), before);
                }
                None => self.drop_fuse_device(&wanted.id),
            })?;
        } else {
            self.serve_export(wanted.clone(), false)?;
        }
        let mut all = self.exports().wanted();
        all.retain(|export| export.id != wanted.id);
        all.push(wanted);
        self.record_exports(all);
        Ok(true)
    }

    /// Removes an export. `forced` is required if it has clients, which are then disconnected.
    ///
    /// # Errors
    /// The export does not exist, has clients and `forced` is false, or its FUSE file is in use.
    pub(super) fn remove_export(&self, id: &str, forced: bool) -> anyhow::Result<()> {
        let _guard = self.change_lock();
        guard::check(self.exports().loss(id).as_slice(), forced)?;
        self.drop_export(id)
    }

    /// Like [`remove_export`](Self::remove_export), for a caller that holds the lock of changes.
    ///
    /// # Errors
    /// As for [`remove_export`](Self::remove_export).
    pub(super) fn drop_export(&self, id: &str) -> anyhow::Result<()> {
        let mut all = self.exports().wanted();
        let before = all.len();
        all.retain(|export| export.id != id);
        if all.len() == before {
            return Err(exit::not_found(anyhow!(
                "there is no export `{id}`; `shadowbell ctl export ls` lists them"
            )));
        }
        self.check_unused(id)?;
        self.record_exports(all);
        let export = self.exports().running.lock().remove(id);
        let failures = export.map(|export| export.device.stop());
        self.drop_fuse_device(id);
        match failures {
            Some(failures) => info!("export {id}: removed; failed requests: {failures}"),
            None => info!("export {id}: removed; it was not served"),
        }
        Ok(())
    }

    /// Refuses the removal of an export whose FUSE file is in use.
    ///
    /// # Errors
    /// The file is mounted, or programs use it.
    pub(super) fn check_unused(&self, id: &str) -> anyhow::Result<()> {
        // A FUSE file in use is not removed, because the end of its session would abort requests of
        // programs.
        if let Some(path) = self.exports().file_in_use(id) {
            let file = path.display();
            return Err(exit::conflict(anyhow!(
                "{file}, the file of the export {id}, is mounted, perhaps in another mount namespace, or \
                 in use: `umount {file}`, end the programs that use it, and remove the export again"
            )));
        }
        Ok(())
    }

    /// Makes the exports of the disk `id` serve `disk`: the same disk after a change, whose effect
    /// on clients is `effect`. Sockets, addresses and mounts stay. Clients that lose something are
    /// disconnected.
    pub(super) fn update_exports(&self, id: &str, disk: &Arc<dyn Disk>, effect: &Effect) {
        for id in self.exports().of(id) {
            let Some(export) = self.exports().running.lock().remove(&id) else { continue };
            match self.update_export(export, Arc::clone(disk), effect) {
                Ok(export) => drop(self.exports().running.lock().insert(id, export)),
                Err(error) => warn!("export {id} is not served any more: {}", exit::line(&error)),
            }
        }
    }

    fn update_export(
        &self,
        export: RunningExport,
        disk: Arc<dyn Disk>,
        effect: &Effect,
    ) -> anyhow::Result<RunningExport> {
        let RunningExport { config, block: old, device } = export;
        let disconnects = effect.on_export(config.read_only).is_some();
        let block = old.with_disk(disk).map_err(exit::bad_input)?;
        let device = match device {
            ExportDevice::Nbd(server) => {
                server.replace_disk(block.clone(), disconnects);
                ExportDevice::Nbd(server)
            }
            ExportDevice::VhostUserBlk(device) => {
                device.replace_disk(block.clone(), disconnects);
                ExportDevice::VhostUserBlk(device)
            }
            ExportDevice::Fuse(session, path) => {
                let _ = session.stop();
                ExportDevice::Fuse(self.start_session(&config, &block, &path)?, path)
            }
            ExportDevice::Ublk(device) if !disconnects => {
                let path = device.path().display();
                info!("{path} is as before the change until its export is added again");
                return Ok(RunningExport {
                    config,
                    block: old,
                    device: ExportDevice::Ublk(device),
                });
            }
            ExportDevice::Ublk(device) => {
                let wanted =
                    UblkConfig { id: Some(device.id()), ..config.ublk.unwrap_or_default() };
                let _ = device.stop();
                let device = self.start_ublk_export(&config, &block, wanted)?;
                ExportDevice::Ublk(Box::new(device))
            }
        };
        Ok(RunningExport { config, block, device })
    }

    fn start_session(
        &self,
        config: &ExportConfig,
        block: &BlockDevice,
        path: &Path,
    ) -> anyhow::Result<Session> {
        let device = self.fuse_device(&config.id)?;
        let mut options = fuse::Options::default();
        options.owner = config.owner;
        let ended = self.exports().on_end(&config.id, format!("{} was unmounted", path.display()));
        Session::start(block, device, &options, ended).map_err(exit::unusable)
    }

    fn start_ublk_export(
        &self,
        config: &ExportConfig,
        block: &BlockDevice,
        wanted: UblkConfig,
    ) -> anyhow::Result<Ublk> {
        let is_shared = self.exports().wanted().len() > 1;
        let why = "the block device was removed by another program".to_owned();
        start_ublk(block, wanted, is_shared, self.exports().on_end(&config.id, why))
    }

    /// Refuses an export that would be a second writer of its disk, unless both writers permit it
    /// (`share`).
    ///
    /// # Errors
    /// The disk has another writer.
    fn check_writers(&self, wanted: &ExportConfig, disk: &ListedDisk) -> anyhow::Result<()> {
        if wanted.read_only || disk.open.disk.info().read_only {
            return Ok(());
        }
        let controller = disk.namespaces.first();
        let controller = controller
            .filter(|_| !(wanted.share && disk.share))
            .map(|(served, nsid)| format!("namespace {nsid} of {}", served.name));
        let running = self.exports().running.lock();
        let mut others = running.values().map(|export| &export.config);
        let other = others.find(|other| {
            other.disk == disk.id && !other.read_only && !(wanted.share && other.share)
        });
        let writer = controller.or_else(|| other.map(|other| format!("the export {}", other.id)));
        match writer {
            None => Ok(()),
            Some(writer) => Err(exit::conflict(anyhow!(
                "the disk {} is written by {writer}: export it with `read-only`, or set `share` for \
                 both, if the programs that write can share a disk",
                disk.id
            ))),
        }
    }

    /// Refuses a controller that would write a disk which an export writes, unless both permit it
    /// (`share`).
    ///
    /// # Errors
    /// An export writes the disk.
    pub(super) fn check_exports(&self, disk: &str, share: bool) -> anyhow::Result<()> {
        let running = self.exports().running.lock();
        let writes = |export: &&RunningExport| {
            let config = &export.config;
            config.disk == disk && !config.read_only && !(share && config.share)
        };
        match running.values().find(writes) {
            None => Ok(()),
            Some(export) => Err(exit::conflict(anyhow!(
                "the disk {disk} is written by the export {}: remove it, or set `share` for both, if \
                 the programs that write can share a disk",
                export.config.id
            ))),
        }
    }

    /// Refuses to make a disk writable if it would then have several writers and one of them does
    /// not permit another (`share`).
    pub(super) fn check_made_writable(&self, disk: &ListedDisk) -> anyhow::Result<()> {
        let running = self.exports().running.lock();
        let exports = running.values().map(|export| &export.config);
        let exports = exports.filter(|config| config.disk == disk.id && !config.read_only);
        let exports = exports.map(|config| (format!("the export {}", config.id), config.share));
        let namespace = disk.namespaces.first();
        let namespace = namespace
            .map(|(served, nsid)| (format!("namespace {nsid} of {}", served.name), disk.share));
        let writers: Vec<_> = namespace.into_iter().chain(exports).collect();
        match &writers[..] {
            [(one, _), (other, _), ..] if writers.iter().any(|(_, share)| !share) => {
                Err(exit::conflict(anyhow!(
                    "the disk {} would be written by {one} and {other}: remove one of them, or set \
                     `share` for all, if the programs that write can share a disk",
                    disk.id
                )))
            }
            _ => Ok(()),
        }
    }

    fn drop_fuse_device(&self, id: &str) {
        if self.exports().devices().remove(id).is_some()
            && let Some(checkpoint) = self.checkpoint()
        {
            checkpoint.drop_fuse_device(id);
        }
    }

    /// Starts an export. `resumes`: requests of its clients may have been in flight when the
    /// previous process died.
    fn serve_export(&self, mut config: ExportConfig, resumes: bool) -> anyhow::Result<()> {
        let protocol = config.protocol().map_err(|why| exit::bad_input(anyhow!(why)))?;
        let disk = self.disk(&config.disk)?;
        self.check_writers(&config, &disk)?;
        if resumes && !config.read_only && disk.open.disk.may_have_late_writes() {
            return Err(exit::conflict(anyhow!(
                "the storage of the disk {} may still execute writes of the dead process; add the \
                 export again when it no longer does",
                disk.id
            )));
        }
        if let Some(path) = config.socket().filter(|path| path.is_dir()) {
            let why = anyhow!("{} is a directory: name a socket in it", path.display());
            return Err(exit::bad_input(why));
        }
        let mut options = BlockOptions::default();
        options.read_only = config.read_only;
        options.queues = config.queues.unwrap_or_else(ExportConfig::default_queues).into();
        options.poll = config.poll_max_us.map_or(POLL, |us| Duration::from_micros(us.into()));
        if let Some(seconds) = config.timeout {
            options.timeout = Duration::from_secs(seconds.into());
        }
        let block = self.block_device(&disk, &options)?;
        let device = match protocol {
            Protocol::Nbd(address) => {
                let target = self.exports().target.get();
                let description = target.unwrap_or(&disk.id);
                ExportDevice::Nbd(start_nbd(block.clone(), address, &config, description)?)
            }
            Protocol::VhostUserBlk(path) => {
                let listener = bind_socket(path).map_err(super::sandbox::explain)?;
                let is_short_form = self.exports().target.get().is_some();
                let serial = match &*config.name {
                    "" if is_short_form => "shadowbell",
                    "" => &disk.id,
                    name => name,
                };
                let device = VhostUserBlk::start(block.clone(), listener, serial);
                ExportDevice::VhostUserBlk(device.map_err(exit::unusable)?)
            }
            Protocol::Fuse(path) => {
                let device = self.fuse_device(&config.id)?;
                if resumes && !Session::resend(device.as_fd()) {
                    warn!(
                        "export {}: programs with requests in flight wait until it is unmounted, \
                         because the kernel cannot send them again (Linux 6.9 can)",
                        config.id
                    );
                }
                drop(device);
                ExportDevice::Fuse(self.start_session(&config, &block, path)?, path.to_owned())
            }
            Protocol::Ublk(wanted) => {
                ExportDevice::Ublk(Box::new(self.start_ublk_export(&config, &block, wanted)?))
            }
        };
        info!(
            "export {}: exporting {} ({}{}) at {}",
            config.id,
            block.disk().name(),
            ByteSize(block.geometry().bytes).display().iec(),
            if block.geometry().read_only { ", read-only" } else { "" },
            device.address()
        );
        config.disk = disk.id;
        let id = config.id.clone();
        self.exports().running.lock().insert(id, RunningExport { config, block, device });
        Ok(())
    }

    /// Returns a block device on a disk. The block devices of all exports of a disk share the locks
    /// of written ranges.
    fn block_device(
        &self,
        disk: &ListedDisk,
        options: &BlockOptions,
    ) -> anyhow::Result<BlockDevice> {
        let running = self.exports().running.lock();
        let other = running.values().find(|export| export.config.disk == disk.id);
        let now = Arc::clone(&disk.open.disk);
        let block = match other.map(|export| export.block.with_options(options)) {
            // The other export's block device may hold the disk as it was before a change.
            Some(block) => block.with_disk(now),
            None => BlockDevice::new(now, options),
        };
        block.map_err(exit::bad_input)
    }

    /// Duplicates an export's descriptor of `/dev/fuse`.
    fn fuse_device(&self, id: &str) -> anyhow::Result<OwnedFd> {
        let devices = self.exports().devices();
        let device = devices.get(id).context(
            "there is no descriptor of /dev/fuse, which `shadowbell ctl export add --fuse` passes",
        );
        Ok(device.map_err(exit::bad_input)?.try_clone()?)
    }

    fn record_exports(&self, all: Vec<ExportConfig>) {
        self.exports().set_wanted(all.clone());
        if let Some(checkpoint) = self.checkpoint() {
            checkpoint.set_exports(all);
        }
    }
}

/// Starts an NBD server for a disk.
fn start_nbd(
    block: BlockDevice,
    address: &str,
    config: &ExportConfig,
    description: &str,
) -> anyhow::Result<Server> {
    let address: Address =
        address.parse().map_err(|why: String| exit::bad_input(anyhow!("`{address}`: {why}")))?;
    let mut options = Options::default();
    options.name.clone_from(&config.name);
    description.clone_into(&mut options.description);
    options.tls = tls_of(config)?;
    let clients_are_known = config.tls_certificates.is_some() && !config.tls_any_client;
    if let Address::Tcp(tcp) = address
        && !tcp.ip().is_loopback()
        && !clients_are_known
    {
        warn!(
            "all hosts that can reach {tcp} can read the disk{}, because NBD without client \
             certificates has no authentication; `tcp:127.0.0.1:{}` permits only this machine",
            if config.read_only { "" } else { " and write it" },
            tcp.port()
        );
    }
    let (listener, address) = match address {
        Address::Unix(path) => {
            let listener = bind_socket(&path).map_err(super::sandbox::explain)?;
            (Listener::Unix(listener), Address::Unix(path))
        }
        Address::Tcp(address) => {
            let (listener, address) = path_broker::listen_tcp(address)
                .with_context(|| format!("cannot listen on {address}"))
                .map_err(exit::unusable)
                .map_err(super::sandbox::explain_tcp)?;
            (Listener::Tcp(listener), Address::Tcp(address))
        }
    };
    Server::start(block, listener, address, &options).map_err(exit::unusable)
}

/// Creates a ublk device on a disk, or recovers it.
fn start_ublk(
    block: &BlockDevice,
    wanted: UblkConfig,
    is_shared: bool,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<Ublk> {
    let mut options = ublk::Options::default();
    (options.id, options.recover, options.copy) = (wanted.id, wanted.recover, wanted.copy);
    options.shared = is_shared;
    let device = Ublk::start(block, options, ended).map_err(exit::unusable)?;
    let path = device.path().display();
    if device.was_recovered() {
        info!("{path}: recovered");
    }
    match device.why_copied() {
        None => info!("{path}: zero-copy I/O to the disk"),
        // A disk without a local file never has zero-copy, so this is normal and logged only for
        // debugging.
        Some(WhyCopied::NoFile) => debug!("{path}: {}", WhyCopied::NoFile),
        Some(why) => info!("{path}: data is copied: {why}"),
    }
    Ok(device)
}
