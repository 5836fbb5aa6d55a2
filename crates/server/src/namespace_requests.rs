//! Execution of namespace management, Format NVM and Sanitize commands of guests with a
//! [pool](shadowbell_config::pool), on a thread for each pool.
//!
//! Namespaces are attached and detached through [`Changes`], like those of `shadowbell ctl`, so the
//! checkpoint is updated as well. The pool's index is written first. If the process dies before the
//! controller has changed, the next process makes the controller match the index before it executes
//! other commands.

use super::namespaces::explicit;
use super::reconfigure::Changes;
use super::registry::ServedController;
use super::server::Server;
use anyhow::Context;
use parking_lot::MutexGuard;
use rustix::io::Errno;
use shadowbell_config::pool::erase::{is_vacant, overwrite, vacate, wipe};
use shadowbell_config::pool::index::{Entry, MAX_NAMESPACES, Phase, SavedSanitize};
use shadowbell_config::pool::{self, HostPool};
use shadowbell_config::pool_disks;
use shadowbell_controller::{PoolAct, PoolOrder, PoolOutcome};
use shadowbell_disk::MetadataFormat;
use shadowbell_spec::Status;
use shadowbell_spec::admin::Sanitize;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{debug, error, info, warn};

/// Interval at which the thread checks whether the previous process has unlocked the pool.
const LOCK_RETRY: Duration = Duration::from_millis(20);
/// Maximum pause after a command. The thread pauses for as long as the command took, but at most
/// this long, so that a guest uses at most half of the storage's performance by short commands.
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// Starts the threads for the pools of the server's controllers.
///
/// # Errors
/// A thread cannot be started.
pub(super) fn begin(server: &Server) -> io::Result<()> {
    server.controllers().iter().try_for_each(|served| begin_one(served, server.changes()))
}

/// Starts the thread of one controller's pool, if the controller has one.
///
/// # Errors
/// The thread cannot be started.
pub(super) fn begin_one(served: &ServedController, changes: &Arc<Changes>) -> io::Result<()> {
    let Some(pool) = served.requested().controller.pool.as_ref().and_then(pool::opened) else {
        return Ok(());
    };
    let Some(orders) = pool.take_orders() else { return Ok(()) };
    let executor = PoolExecutor { pool, changes: Arc::clone(changes), id: served.id.clone() };
    std::thread::Builder::new().name("sb-pool".into()).spawn(move || {
        executor.wait_for_lock();
        executor.resume();
        while let Ok((order, done)) = orders.recv() {
            let began = Instant::now();
            let outcome = executor.execute(&order);
            debug!(?order, ?outcome, "a pool command");
            done.end(outcome);
            executor.continue_sanitize();
            std::thread::sleep(began.elapsed().min(MAX_PAUSE));
        }
    })?;
    Ok(())
}

struct PoolExecutor {
    pool: Arc<HostPool>,
    changes: Arc<Changes>,
    /// Id of the controller.
    id: String,
}

/// A failed command: the error for the log, and the status for the guest.
struct Failed(anyhow::Error, Status);

impl From<anyhow::Error> for Failed {
    fn from(error: anyhow::Error) -> Self {
        Self(error, Status::INTERNAL)
    }
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        let has_no_room = [Errno::NOSPC, Errno::DQUOT, Errno::FBIG];
        let is_full = error.raw_os_error().map(Errno::from_raw_os_error);
        let is_full = is_full.is_some_and(|errno| has_no_room.contains(&errno));
        let status = if is_full {
            Status::NAMESPACE_INSUFFICIENT_CAPACITY.with_dnr()
        } else {
            Status::INTERNAL
        };
        Self(error.into(), status)
    }
}

impl PoolExecutor {
    fn served(&self) -> anyhow::Result<Arc<ServedController>> {
        self.changes.find(&self.id)
    }

    /// Locks the pool. Waits until the previous process has unlocked it, which may take a while.
    fn wait_for_lock(&self) {
        let mut is_logged = false;
        while let Err(error) = self.pool.lock() {
            if !std::mem::replace(&mut is_logged, true) {
                debug!("waits for the pool {}: {error:#}", self.pool.directory().display());
            }
            std::thread::sleep(LOCK_RETRY);
        }
    }

    /// Locks out other changes of controllers and namespaces.
    fn change_lock(&self) -> MutexGuard<'_, ()> {
        loop {
            if let Some(change_lock) = self.changes.pause() {
                return change_lock;
            }
        }
    }

    /// Makes the files and the controller match the index, and continues an interrupted Sanitize
    /// operation.
    fn resume(&self) {
        let outcome = self.match_index();
        if let Err(error) = outcome {
            error!("the pool {}: {error:#}", self.pool.directory().display());
        }
        self.continue_sanitize();
    }

    /// Makes the files and the controller match the index.
    fn match_index(&self) -> anyhow::Result<()> {
        let index = self.pool.index();
        for nsid in (1..=MAX_NAMESPACES).filter(|nsid| index.find(*nsid).is_none()) {
            // The files are left over from an interrupted creation or deletion.
            if !is_vacant(&self.pool, nsid) {
                let _guard = self.change_lock();
                self.detach_from_controller(nsid)?;
                vacate(&self.pool, nsid)?;
            }
        }
        if let Some((nsid, block_size)) = index.formatting {
            let _guard = self.change_lock();
            self.format_one(nsid, block_size, index.formatting_metadata)?;
        }
        let _guard = self.change_lock();
        self.match_controller()
    }

    /// Attaches and detaches namespaces to match the index and the state of a Sanitize operation.
    fn match_controller(&self) -> anyhow::Result<()> {
        let index = self.pool.index();
        let is_inaccessible = self.is_inaccessible();
        let served = self.served()?;
        let there: Vec<_> =
            served.controller.namespaces().into_iter().map(|(nsid, _)| nsid).collect();
        for nsid in self.attached_by_pool(&served) {
            let is_attached = index.find(nsid).is_some_and(|entry| entry.attached);
            if is_inaccessible || !is_attached {
                self.detach_from_controller(nsid)?;
            }
        }
        for entry in index.namespaces.iter().filter(|entry| entry.attached && !is_inaccessible) {
            if !there.contains(&entry.nsid) {
                self.attach_to_controller(entry)?;
            }
        }
        Ok(())
    }

    fn is_inaccessible(&self) -> bool {
        matches!(self.pool.index().sanitize.phase, Phase::InProgress | Phase::Failed)
    }

    /// Namespaces of the pool that are attached to the controller.
    fn attached_by_pool(&self, served: &ServedController) -> Vec<u32> {
        let requested = explicit(served);
        let Some(spec) = &requested.controller.pool else { return Vec::new() };
        let disks =
            requested.controller.disks.iter().filter(|disk| pool_disks::belongs_to(spec, disk));
        disks.filter_map(|disk| disk.nsid).collect()
    }

    /// Attaches a namespace to the controller.
    fn attach_to_controller(&self, entry: &Entry) -> anyhow::Result<()> {
        let served = self.served()?;
        let wanted = pool_disks::disk(&self.pool, entry);
        let disk = self.changes.open_spec_for(&served, &wanted.disk)?;
        self.changes.commit_namespace(&served, entry.nsid, &wanted, disk)
    }

    /// Detaches a namespace from the controller, if it is attached.
    fn detach_from_controller(&self, nsid: u32) -> anyhow::Result<()> {
        let served = self.served()?;
        if !served.controller.namespaces().iter().any(|(other, _)| *other == nsid) {
            return Ok(());
        }
        self.changes.drop_namespace(&served, nsid)
    }

    fn execute(&self, PoolOrder { act, .. }: &PoolOrder) -> PoolOutcome {
        // During an upgrade the command ends with a status after which the host may retry it.
        let Some(_guard) = self.changes.pause() else { return Err(Status::COMMAND_INTERRUPTED) };
        let outcome = match act {
            PoolAct::Create { uuid, blocks, block_size, metadata } => {
                let (nsid, attached) = (0, false);
                let (uuid, blocks, block_size) = (*uuid, *blocks, *block_size);
                let metadata = *metadata;
                self.create(Entry { nsid, uuid, blocks, block_size, metadata, attached })
            }
            PoolAct::Delete(nsids) => {
                nsids.iter().try_for_each(|nsid| self.delete(*nsid)).map(|()| 0)
            }
            PoolAct::Attach(nsid) => self.attach(*nsid).map(|()| 0),
            PoolAct::Detach(nsid) => self.detach(*nsid).map(|()| 0),
            PoolAct::Format { nsids, block_size, metadata } => {
                let mut format = |nsid: &u32| self.format(*nsid, *block_size, *metadata);
                nsids.iter().try_for_each(&mut format).map(|()| 0)
            }
            PoolAct::Sanitize(command) => self.begin_sanitize(*command).map(|()| 0),
        };
        outcome.map_err(|Failed(why, status)| {
            warn!("{}: a pool command of the guest has failed: {why:#}", self.id);
            status
        })
    }

    fn create(&self, mut entry: Entry) -> Result<u32, Failed> {
        let index = self.pool.index();
        if let Some(there) = index.namespaces.iter().find(|there| there.uuid == entry.uuid) {
            return Ok(there.nsid);
        }
        let taken = index.namespaces.iter().map(Entry::bytes);
        let taken = taken.fold(entry.bytes(), u64::saturating_add);
        if taken > self.pool.capacity() {
            let why = anyhow::anyhow!("the pool has no room for {} bytes", entry.bytes());
            return Err(Failed(why, Status::NAMESPACE_INSUFFICIENT_CAPACITY.with_dnr()));
        }
        let there = self.served()?.controller.namespaces();
        let is_free = |nsid: &u32| {
            index.find(*nsid).is_none() && there.iter().all(|(other, _)| other != nsid)
        };
        let Some(nsid) = (1..=MAX_NAMESPACES).find(is_free) else {
            let why = anyhow::anyhow!("a pool has {MAX_NAMESPACES} namespaces at most");
            return Err(Failed(why, Status::NAMESPACE_ID_UNAVAILABLE.with_dnr()));
        };
        entry.nsid = nsid;
        let made = wipe(&self.pool, nsid, entry.bytes())
            .and_then(|()| self.pool.change(|index| index.namespaces.push(entry.clone())));
        if let Err(error) = made {
            let _ = vacate(&self.pool, nsid);
            return Err(error.into());
        }
        info!("{}: the guest has created namespace {nsid} of {} bytes", self.id, entry.bytes());
        Ok(nsid)
    }

    fn delete(&self, nsid: u32) -> Result<(), Failed> {
        // When the index is written, the deletion is final: after a crash, the next process
        // completes it.
        self.pool.change(|index| index.namespaces.retain(|entry| entry.nsid != nsid))?;
        self.detach_from_controller(nsid)?;
        vacate(&self.pool, nsid)?;
        info!("{}: the guest has deleted namespace {nsid}", self.id);
        Ok(())
    }

    fn attach(&self, nsid: u32) -> Result<(), Failed> {
        self.set_attached(nsid, true)?;
        let index = self.pool.index();
        let entry = index.find(nsid).context("the namespace is gone")?;
        let there = self.served()?.controller.namespaces();
        if there.iter().any(|(other, _)| *other == nsid) {
            return Ok(());
        }
        self.attach_to_controller(entry).or_else(|why| {
            self.set_attached(nsid, false)?;
            Err(why.into())
        })
    }

    fn detach(&self, nsid: u32) -> Result<(), Failed> {
        self.set_attached(nsid, false)?;
        Ok(self.detach_from_controller(nsid)?)
    }

    fn set_attached(&self, nsid: u32, attached: bool) -> io::Result<()> {
        self.pool.change(|index| {
            if let Some(entry) = index.find_mut(nsid) {
                entry.attached = attached;
            }
        })
    }

    fn format(
        &self,
        nsid: u32,
        block_size: u32,
        metadata: Option<MetadataFormat>,
    ) -> Result<(), Failed> {
        self.pool.change(|index| {
            (index.formatting, index.formatting_metadata) = (Some((nsid, block_size)), metadata);
        })?;
        self.format_one(nsid, block_size, metadata)?;
        self.match_controller()?;
        info!("{}: the guest has formatted namespace {nsid}", self.id);
        Ok(())
    }

    /// Executes the Format NVM operation that the index records.
    fn format_one(
        &self,
        nsid: u32,
        block_size: u32,
        metadata: Option<MetadataFormat>,
    ) -> anyhow::Result<()> {
        self.detach_from_controller(nsid)?;
        let index = self.pool.index();
        let new = index.find(nsid).and_then(|entry| entry.reformatted(block_size, metadata));
        if let Some(new) = &new {
            wipe(&self.pool, nsid, new.bytes())?;
        }
        self.pool.change(|index| {
            (index.formatting, index.formatting_metadata) = (None, None);
            if let (Some(entry), Some(new)) = (index.find_mut(nsid), new) {
                *entry = new;
            }
        })?;
        Ok(())
    }

    fn begin_sanitize(&self, command: Sanitize) -> Result<(), Failed> {
        if command.sanact == Sanitize::EXIT_FAILURE {
            self.pool.change(|index| {
                if index.sanitize.phase == Phase::Failed {
                    index.sanitize.phase = Phase::FailureModeExited;
                }
            })?;
            return Ok(self.match_controller()?);
        }
        self.pool.set_parts(0);
        self.pool.change(|index| {
            let command = (command.dword10(), command.ovrpat);
            index.sanitize =
                SavedSanitize { phase: Phase::InProgress, command, passes: 0, nsid: 0 };
        })?;
        info!("{}: the guest has started a sanitize operation", self.id);
        Ok(self.match_controller()?)
    }

    /// Performs a pending Sanitize operation until its end.
    fn continue_sanitize(&self) {
        if self.pool.index().sanitize.phase != Phase::InProgress {
            return;
        }
        let outcome = self.sanitize();
        if let Err(error) = &outcome {
            error!("{}: cannot sanitize its namespaces: {error:#}", self.id);
        }
        let _guard = self.change_lock();
        let (phase, outcome_text) = match outcome {
            Ok(()) => (Phase::Successful, "has completed"),
            Err(_) => (Phase::Failed, "has failed"),
        };
        let ended = self.pool.change(|index| index.sanitize.phase = phase);
        let ended = ended.map_err(anyhow::Error::from).and_then(|()| self.match_controller());
        match ended {
            Ok(()) => info!("{}: the sanitize operation {outcome_text}", self.id),
            Err(error) => {
                error!("{}: the sanitize operation {outcome_text}; and then: {error:#}", self.id)
            }
        }
        if let Some(port) = self.pool.port() {
            port.sanitized();
        }
    }

    fn sanitize(&self) -> anyhow::Result<()> {
        let index = self.pool.index();
        // A recovered controller may still have namespaces that Sanitize must detach.
        {
            let _guard = self.change_lock();
            self.match_controller()?;
        }
        let (dword10, dword11) = index.sanitize.command;
        let command = Sanitize::from_dwords(dword10, dword11);
        let all = index.namespaces.iter().map(Entry::bytes).fold(0, u64::saturating_add).max(1);
        if command.sanact == Sanitize::OVERWRITE {
            let passes = command.passes();
            for pass in index.sanitize.passes..passes {
                let from = if pass == index.sanitize.passes { index.sanitize.nsid } else { 0 };
                let mut before = 0_u64;
                for entry in &index.namespaces {
                    let mut report = |at: u64| {
                        let done = u128::from(pass) * u128::from(all) + u128::from(before + at);
                        let parts = done * 65535 / (u128::from(all) * u128::from(passes));
                        self.pool.set_parts(parts as u16);
                        true
                    };
                    if entry.nsid > from {
                        overwrite(&self.pool, entry.nsid, (command, pass), &mut report)?;
                        self.pool.change(|index| index.sanitize.nsid = entry.nsid)?;
                    }
                    before += entry.bytes();
                }
                self.pool.change(|index| {
                    (index.sanitize.passes, index.sanitize.nsid) = (pass + 1, 0);
                })?;
            }
        }
        let mut done = 0_u64;
        for entry in &index.namespaces {
            wipe(&self.pool, entry.nsid, entry.bytes())?;
            done += entry.bytes();
            if command.sanact != Sanitize::OVERWRITE {
                self.pool.set_parts((u128::from(done) * 65535 / u128::from(all)) as u16);
            }
        }
        Ok(())
    }
}
