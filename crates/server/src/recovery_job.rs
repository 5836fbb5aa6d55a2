//! Recovery of one controller, or of one disk without a controller, on a thread that may wait for
//! storage.
//!
//! The job opens the disks, builds the controller and the socket, maps the client's memory, and
//! sends the new items of the checkpoint. Beyond that, it accesses neither disks nor guests,
//! because the old items are valid until the list of the checkpoint names the new ones.

use super::builder;
use super::checkpoint_items;
use super::checkpointer::{Checkpointer, ControllerEntry, DiskEntry, UnattachedEntry};
use super::event::EventSender;
use super::fence_wait::FenceWait;
use super::open_disk::OpenDisk;
use super::recovery_attempts::{Attempt, Attempts, LIMIT, Slot};
use super::registry::{RecoveringItem, Registry, ServedController};
use anyhow::{Context, anyhow, bail};
use rustix::net::sockopt;
use serde::de::DeserializeOwned;
use serde_json::Value;
use shadowbell_config::controller_config::ConfigureError;
use shadowbell_config::disk_spec::{self, DiskSpecError};
use shadowbell_config::server_config::SocketConfig;
use shadowbell_controller::{CauseOfDeath, Config, Controller, Pool, SavedController};
use shadowbell_disk::{Disk, WaitReason};
use shadowbell_frontend::vfio_user::{ControllerDevice, check_memory};
use shadowbell_process::exit;
use shadowbell_state::{Descriptors, ItemFault, item_fault};
use shadowbell_storage::{disk_open, disk_recovery};
use shadowbell_supervisor::checkpoint::{Checkpoint, Item};
use shadowbell_vfio_user::server::{Limits, Listener, RestoredPort, SavedPort};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use tracing::warn;

/// Delay before a log line names the reason for a wait.
const REPORT_DELAY: Duration = Duration::from_millis(100);
/// Pause before a disk that could not be opened is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Objects that all jobs of a recovery share.
pub(super) struct JobContext {
    pub(super) pool: Pool,
    pub(super) events: EventSender,
    pub(super) checkpoint: Arc<Checkpointer>,
    pub(super) fence: Arc<FenceWait>,
    pub(super) registry: Arc<Registry>,
    pub(super) attempts: Arc<Attempts>,
}

/// Items of the dead process, by key.
pub(super) type Items = BTreeMap<String, Arc<Item>>;

/// Recovery of one item by a thread.
pub(super) enum Job {
    Controller(Box<ControllerJob>),
    Disk(DiskJob),
}

/// Job that recovers a controller of the dead process.
pub(super) struct ControllerJob {
    /// Index of the controller in this process.
    pub(super) index: usize,
    /// Entry in the dead process's checkpoint.
    pub(super) entry: ControllerEntry,
    pub(super) death: CauseOfDeath,
    /// New configuration of the controller. `None` if the configuration in the checkpoint is used.
    pub(super) requested: Option<SocketConfig>,
    pub(super) items: Items,
}

/// Job that recovers a disk of the dead process that no controller has.
pub(super) struct DiskJob {
    pub(super) id: String,
    pub(super) entry: UnattachedEntry,
    pub(super) death: CauseOfDeath,
    pub(super) items: Items,
}

/// Result of a job.
pub(super) enum Recovered {
    Controller(Box<RecoveredController>),
    Disk(String, OpenDisk),
    /// No recovery was tried, because earlier ones have crashed more than [`LIMIT`] processes.
    Nothing,
}

/// Recovered controller, which is quiesced and not served yet.
pub(super) struct RecoveredController {
    pub(super) served: Arc<ServedController>,
    pub(super) port: RestoredPort,
    /// Entry in this process's checkpoint; `None` if there is no checkpoint any more.
    pub(super) entry: Option<ControllerEntry>,
    /// State of the dead process's controller. `None` if it could not be used.
    pub(super) saved: Option<SavedController>,
    /// Namespaces that were being changed. The guest may not have been notified of the change.
    pub(super) changing: Vec<u32>,
    /// Cause of death of the process that served the controller.
    pub(super) death: CauseOfDeath,
    /// Number of commands that are executed again.
    pub(super) replays: usize,
    /// Keys of the dead process's items.
    pub(super) old: Vec<String>,
    /// Reason why the client was dropped, if it was dropped.
    pub(super) lost: Option<String>,
}

/// Parts of the dead process's state that a new controller uses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RecoveryMode {
    /// The state of the controller, and the connection of its client.
    Client,
    /// The state of the controller. Its client is disconnected.
    Controller,
    /// The listening socket only. The controller is a new one.
    Socket,
}

impl Job {
    /// Registers the item of the job. Until it is recovered, only the job opens its disks.
    pub(super) fn begin_waiting(&self, registry: &Registry) {
        match self {
            Self::Controller(job) => {
                registry.begin_waiting(job.index, job.entry.config_with(&job.entry.newest_disks()));
            }
            Self::Disk(job) => registry.begin_waiting_disk(&job.id, &job.entry.spec),
        }
    }

    /// Runs the job. `None` if the service ends.
    pub(super) fn run(self, context: &JobContext) -> Option<Recovered> {
        let (item, name, slot) = match &self {
            Self::Controller(job) => {
                (RecoveringItem::Controller(job.index), job.name(), job.slot())
            }
            Self::Disk(job) => {
                let item = RecoveringItem::Disk(job.id.clone());
                (item, format!("disk {}", job.id), Slot::of_disk(&job.entry.key))
            }
        };
        let deaths = context.attempts.deaths(slot);
        if deaths > LIMIT {
            let what = "not served, because its recovery has crashed server processes also \
                        without its client; remove its disks from the configuration, and restart \
                        the service";
            warn!("{name}: {what}");
            context.attempts.give_up(slot);
            context.registry.waits_for(&item, what);
            return Some(Recovered::Nothing);
        }
        let wait = DiskWait::new(context, item, name, slot);
        match self {
            Self::Controller(job) => {
                job.run(&wait, deaths).map(|ready| Recovered::Controller(Box::new(ready)))
            }
            Self::Disk(job) => job.run(&wait, deaths),
        }
    }
}

impl ControllerJob {
    /// Configured path of the controller's socket, for messages.
    pub(super) fn name(&self) -> String {
        self.entry.requested.socket.display().to_string()
    }

    /// Slot of the controller in the table of recovery attempts.
    pub(super) fn slot(&self) -> Slot {
        Slot::of_controller(self.entry.index)
    }

    fn run(self, wait: &DiskWait<'_>, deaths: u8) -> Option<RecoveredController> {
        let (name, lost) = (&wait.name, RefCell::new(None));
        let drop_client = |why: String| {
            if lost.borrow().is_none() {
                warn!("{name}: its client cannot be recovered, and is disconnected: {why}");
                *lost.borrow_mut() = Some(format!("{name}: its client was disconnected: {why}"));
            }
        };
        let mut mode = RecoveryMode::Client;
        let disks = match check_deaths(deaths).and_then(|()| self.disks()) {
            Ok(disks) => disks,
            Err(why) => {
                drop_client(exit::line(&why));
                mode = RecoveryMode::Socket;
                self.entry.newest_disks()
            }
        };
        let requested = match &self.requested {
            Some(requested) => requested.clone(),
            None => self.entry.config_with(&disks),
        };
        let is_final = Cell::new(false);
        let seen = as_seen(&requested, &disks);
        let config = wait.until_open(|| {
            let opened = seen.controller.open_by(&location(&requested), |nth, spec| {
                let missing = || anyhow!("the state lacks the disk of a namespace");
                let key = disks.get(nth).ok_or_else(missing).map_err(DiskSpecError::Other)?.key();
                match wait.recover(spec, &self.items, key, self.death) {
                    Err(error) if disk_recovery::is_final(&error) && !wait.is_over() => {
                        is_final.set(true);
                        drop_client(exit::line(&error.into_error()));
                        wait.reopen(spec, &self.items, key)
                    }
                    outcome => outcome,
                }
            });
            let opened = opened.map_err(ConfigureError::into_error);
            builder::with_origin(&requested, opened)
        })?;
        if is_final.get() {
            mode = RecoveryMode::Socket;
        }
        // The disks stay open for the next attempt if the controller cannot be built, so that they
        // are not recovered twice.
        let disks: Vec<_> = config.namespaces.iter().map(|ns| Arc::clone(&ns.disk)).collect();
        let mut config = Some(config);
        loop {
            let configured = match config.take() {
                Some(config) => Ok(config),
                None => self.configure(&seen, disks.clone()),
            };
            let built = configured.and_then(|config| {
                self.build(wait.context, &requested, config, mode, &drop_client)
            });
            match built {
                Ok(mut ready) => {
                    ready.lost = lost.take();
                    return Some(ready);
                }
                Err(why) if mode == RecoveryMode::Client => {
                    drop_client(exit::line(&why));
                    mode = RecoveryMode::Controller;
                }
                Err(why) if mode == RecoveryMode::Controller => {
                    let why = exit::line(&why);
                    warn!("{name}: its state cannot be recovered, and is discarded: {why}");
                    mode = RecoveryMode::Socket;
                }
                Err(why) => {
                    wait.report_wait(&exit::line(&why));
                    if !wait.pause() {
                        return None;
                    }
                }
            }
        }
    }

    /// Disks of the namespaces that the guest has seen.
    fn disks(&self) -> anyhow::Result<Vec<&DiskEntry>> {
        let (saved, _): (SavedController, _) =
            decode(&self.items, &checkpoint_items::controller(self.entry.index))?;
        let disks = saved.namespaces().map(|seen| self.entry.disk_of(&seen));
        disks.collect::<Option<_>>().context("the state lacks the disk of a namespace")
    }

    fn configure(
        &self,
        requested: &SocketConfig,
        disks: Vec<Arc<dyn Disk>>,
    ) -> anyhow::Result<Config> {
        let config = requested.controller.configure(&location(requested), disks);
        builder::with_origin(requested, config.map_err(ConfigureError::into_error))
    }

    /// Returns the listening socket of the checkpoint, without decoding the client's state. If the
    /// checkpoint contains none, creates one.
    fn listener(&self, requested: &SocketConfig) -> anyhow::Result<Listener> {
        let item = self.items.get(&checkpoint_items::port(self.entry.index));
        let mut fds = item.into_iter().flat_map(|item| &item.fds);
        let Some(socket) = fds.find(|fd| sockopt::socket_acceptconn(fd).unwrap_or_default()) else {
            return builder::bind_one(requested);
        };
        Ok(Listener::from_socket(socket.try_clone()?, &requested.absolute_socket()))
    }

    fn build(
        &self,
        context: &JobContext,
        requested: &SocketConfig,
        config: Config,
        mode: RecoveryMode,
        drop_client: &dyn Fn(String),
    ) -> anyhow::Result<RecoveredController> {
        let events = context.events.of(self.index);
        let carrier = builder::carrier(requested, &events);
        let mut state = None;
        let controller = if mode == RecoveryMode::Socket {
            Controller::new(config, context.pool.clone(), carrier)?
        } else {
            let key = checkpoint_items::controller(self.entry.index);
            let (saved, mut fds): (SavedController, _) = decode(&self.items, &key)?;
            let pool = context.pool.clone();
            let controller = Controller::successor(config, pool, carrier, &saved, &mut fds)?;
            state = Some((saved, fds));
            controller
        };
        builder::assign_io_thread(requested, &controller)?;
        let port = match mode {
            RecoveryMode::Client => {
                let (port, fds) = port(&self.items, self.entry.index)?;
                if is_lost(&port) {
                    drop_client(NOT_SAVED.to_owned());
                }
                Some((port, fds))
            }
            RecoveryMode::Controller | RecoveryMode::Socket => None,
        };
        let has_client = port.as_ref().is_some_and(|(port, _)| port.has_client());
        let client = Arc::new(AtomicBool::new(has_client));
        let handler = builder::client_events(events, &client);
        let device = Box::new(ControllerDevice::new(controller.clone(), handler)?);
        let limits = Limits::default();
        let port = match port {
            Some((port, mut fds)) => RestoredPort::new(port, &mut fds, device, &limits)?,
            None => RestoredPort::without_client(self.listener(requested)?, device, &limits),
        };
        let served = ServedController::new(self.index, requested.clone(), controller, client);
        context.attempts.recovered(self.slot(), Slot::of_controller(self.index), has_client);
        let entry = context.checkpoint.put_recovered(&served);
        let replays = match &mut state {
            None => 0,
            Some((saved, fds)) => {
                let recovered = served.controller.recover(saved, fds, self.death);
                recovered.inspect_err(|_| context.checkpoint.discard(entry.as_ref()))?
            }
        };
        Ok(RecoveredController {
            served: Arc::new(served),
            port,
            entry,
            saved: state.map(|(saved, _)| saved),
            changing: self.entry.changing.clone(),
            death: self.death,
            replays,
            old: self.items.keys().cloned().collect(),
            lost: None,
        })
    }
}

impl DiskJob {
    fn run(self, wait: &DiskWait<'_>, deaths: u8) -> Option<Recovered> {
        let Self { id, entry: UnattachedEntry { key, spec, .. }, death, items } = self;
        let disk = wait.until_open(|| {
            let recovered = check_deaths(deaths).map_err(DiskSpecError::Other);
            let is_lost = recovered.is_err();
            let disk = match recovered.and_then(|()| wait.recover(&spec, &items, &key, death)) {
                Err(error) if is_lost || disk_recovery::is_final(&error) && !wait.is_over() => {
                    let why = exit::line(&error.into_error());
                    warn!("disk {id} cannot be recovered, and is opened anew: {why}");
                    match is_lost {
                        true => wait.open(&spec),
                        false => wait.reopen(&spec, &items, &key),
                    }
                }
                outcome => outcome,
            };
            disk.map_err(DiskSpecError::into_error)
        })?;
        Some(Recovered::Disk(id, OpenDisk { spec, disk }))
    }
}

/// Wait of a job until its disks can be opened. `reported` is the reason that was logged last.
struct DiskWait<'a> {
    context: &'a JobContext,
    item: RecoveringItem,
    name: String,
    since: Instant,
    reported: RefCell<String>,
    attempt: Attempt<'a>,
}

/// Returns an error if so many processes have died while they recovered an item or handled its
/// client's first message (`deaths`) that the next one has to drop its client.
pub(super) fn check_deaths(deaths: u8) -> anyhow::Result<()> {
    match deaths {
        0..LIMIT => Ok(()),
        _ => bail!("server processes have crashed during its recovery or its first message"),
    }
}

impl<'a> DiskWait<'a> {
    fn new(context: &'a JobContext, item: RecoveringItem, name: String, slot: Slot) -> Self {
        let attempt = context.attempts.begin(slot);
        let (since, reported) = (Instant::now(), RefCell::default());
        Self { context, item, name, since, reported, attempt }
    }

    fn is_over(&self) -> bool {
        self.context.fence.is_cancelled()
    }

    /// Records the reason for the wait, and logs each reason once.
    fn report_wait(&self, why: &str) {
        let mut reported = self.reported.borrow_mut();
        if *reported != why {
            why.clone_into(&mut reported);
            warn!("{}: waiting for its disks: {why}", self.name);
            self.context.registry.waits_for(&self.item, why);
        }
    }

    /// Text of the reason why the disk `spec` cannot be recovered yet.
    fn text_of(&self, spec: &str, reason: WaitReason<'_>) -> String {
        match reason {
            WaitReason::Unavailable(why) => why.to_owned(),
            // No I/O of the dead process is in flight, so another program holds the lock.
            WaitReason::Locked if self.context.fence.has_ended() => {
                let path = disk_spec::file(spec).unwrap_or_else(|| PathBuf::from(spec));
                let path = path.display();
                format!("{path}: another program has it open (`fuser -v {path}`)")
            }
            WaitReason::Locked | WaitReason::InFlight => {
                format!("I/O of the dead process may be in flight at {spec}")
            }
        }
    }

    /// Waits before the next attempt to open the disks. Returns false if the service ends.
    fn pause(&self) -> bool {
        let until = Instant::now() + RETRY_PAUSE;
        self.attempt.pause(|| {
            while Instant::now() < until {
                if !self.context.fence.wait_for_lock(self.since) {
                    return false;
                }
            }
            true
        })
    }

    /// Calls `open` until it succeeds. `None` if the service ends.
    fn until_open<T>(&self, open: impl Fn() -> anyhow::Result<T>) -> Option<T> {
        loop {
            match open() {
                Ok(opened) => return Some(opened),
                Err(_) if self.is_over() => return None,
                Err(why) => self.report_wait(&exit::line(&why)),
            }
            if !self.pause() {
                return None;
            }
        }
    }

    /// Opens a disk without recovering it.
    fn open(&self, spec: &str) -> Result<Arc<dyn Disk>, DiskSpecError> {
        self.attempt.open(|| disk_open::open_recoverable(spec))
    }

    /// Opens a disk that cannot be recovered.
    fn reopen(&self, spec: &str, items: &Items, key: &str) -> Result<Arc<dyn Disk>, DiskSpecError> {
        let (state, _): (Value, _) = decode(items, key).map_err(DiskSpecError::Other)?;
        self.attempt.open(|| disk_recovery::reopen(spec, &state))
    }

    /// Recovers a disk. If the disk has no lock that proves the end of the dead process's I/O,
    /// first waits for the fence of the whole process.
    fn recover(
        &self,
        spec: &str,
        items: &Items,
        key: &str,
        death: CauseOfDeath,
    ) -> Result<Arc<dyn Disk>, DiskSpecError> {
        let (state, mut fds): (Value, _) = decode(items, key).map_err(DiskSpecError::Other)?;
        let has_quiesced = death == CauseOfDeath::Planned;
        let waits = |reason: WaitReason<'_>| {
            if self.since.elapsed() >= REPORT_DELAY {
                self.report_wait(&self.text_of(spec, reason));
            }
        };
        if !has_quiesced && disk_recovery::needs_process_fence(&state) {
            let wait = || self.context.fence.wait_for_end(|| waits(WaitReason::InFlight));
            if !self.attempt.pause(wait) {
                return Err(DiskSpecError::Other(anyhow!("the service is shutting down")));
            }
        }
        let wait = |reason: WaitReason<'_>| {
            waits(reason);
            self.attempt.pause(|| self.context.fence.wait_for_lock(self.since))
        };
        let recover = || disk_recovery::recover(spec, &state, &mut fds, has_quiesced, &wait);
        self.attempt.open(recover)
    }
}

/// Reason for the loss of a client whose state is not in the checkpoint.
const NOT_SAVED: &str = "it is being migrated, or its state could not be saved";

/// True if the socket's client has no state in the checkpoint.
fn is_lost(port: &SavedPort) -> bool {
    port.device().is_null()
}

/// Configuration of a controller. Disks without a configured UUID get the UUID that the guest has
/// seen: a UUID that is derived from the path of an image would change when the image is renamed or
/// deleted.
fn as_seen(requested: &SocketConfig, disks: &[&DiskEntry]) -> SocketConfig {
    let mut seen = requested.clone();
    for (disk, entry) in seen.controller.disks.iter_mut().zip(disks) {
        disk.uuid = disk.uuid.or(entry.config().uuid);
    }
    seen
}

fn location(requested: &SocketConfig) -> String {
    requested.absolute_socket().to_string_lossy().into_owned()
}

/// Decodes the item of a socket and its client, with the files of the client's memory.
fn port(items: &Items, index: usize) -> anyhow::Result<(SavedPort, Descriptors)> {
    let (port, mut fds): (SavedPort, _) = decode(items, &checkpoint_items::port(index))?;
    let prefix = checkpoint_items::client_files(index);
    for (key, item) in items.range(prefix.clone()..) {
        if !key.starts_with(&prefix) {
            break;
        }
        let file = item.copy()?.1.into_iter().next();
        if let Some((number, file)) = checkpoint_items::number(key).zip(file) {
            fds.add_lasting(number, file);
        }
    }
    Ok((port, fds))
}

/// Decodes an item, and returns its state and duplicates of its descriptors.
pub(super) fn decode<T: DeserializeOwned>(
    items: &Items,
    key: &str,
) -> anyhow::Result<(T, Descriptors)> {
    let item = items.get(key).with_context(|| format!("the state has no section {key}"))?;
    let (body, fds) = item.copy()?;
    match item_fault(key) {
        None => {}
        Some(ItemFault::Undecodable) => bail!("cannot decode section {key} of the state"),
        Some(ItemFault::Panic) => panic!("cannot decode section {key} of the state"),
    }
    Ok((shadowbell_state::read_json(key, &body)?, Descriptors::from(fds)))
}

/// Moves the items of a controller out of a checkpoint.
pub(super) fn take_items(items: &mut Checkpoint, entry: &ControllerEntry) -> Items {
    let index = entry.index;
    let own = [checkpoint_items::controller(index), checkpoint_items::port(index)];
    let files = items.keys(&checkpoint_items::client_files(index));
    let disks = entry.disks.iter().map(|disk| disk.key().to_owned());
    let keys = own.into_iter().chain(files).chain(disks);
    keys.filter_map(|key| items.all.remove_entry(&key)).collect()
}

/// Checks that a controller could be recovered: all of its state is decoded, and the client's
/// memory is mapped and unmapped.
///
/// # Errors
/// The reason why the client would be lost.
pub(super) fn check(entry: &ControllerEntry, items: &Items) -> anyhow::Result<()> {
    let (saved, _): (SavedController, _) =
        decode(items, &checkpoint_items::controller(entry.index))?;
    for seen in saved.namespaces() {
        let disk = entry.disk_of(&seen).context("the state lacks the disk of a namespace")?;
        let _: (Value, _) = decode(items, disk.key())?;
    }
    let (port, mut fds) = port(items, entry.index)?;
    if is_lost(&port) {
        return Err(anyhow!(NOT_SAVED));
    }
    Ok(check_memory(port.device(), &mut fds)?)
}
