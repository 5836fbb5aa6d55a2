//! Serialization of the supervisor's state: the content of a [snapshot](super::snapshot).

use super::broker::Kind;
use super::control::Control;
use super::fd_store::{FdStore, SavedFdStore};
use super::grants::{GRANTS, Image, SavedGrants};
use super::monotonic::Monotonic;
use super::process::Process;
use super::snapshot::Snapshot;
use super::state::{Reading, Supervisor};
use super::upgrade_progress::{Step, Upgrade};
use super::worker::{Death, Left, Worker};
use crate::checkpoint::{Checkpoint, content_of};
use crate::checkpoint_codec::{Fds, SavedCheckpoint, add};
use crate::permissions::{bytes_of, path_of};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use shadowbell_state::{Bytes, Descriptors, FdRef, Parcel, StateError};
use std::os::fd::{AsFd, OwnedFd};

const SUPERVISOR: &str = "supervisor";
const OPENED: &str = "opened";
const HELD: &str = "held";

/// Serialized [`Supervisor`].
#[derive(Debug, Serialize, Deserialize)]
struct SavedSupervisor {
    program: Bytes,
    sockets: Vec<Bytes>,
    is_ready: bool,
    deaths: Vec<u64>,
    died: Option<u64>,
    restart: Option<u64>,
    /// Pending reload of the configuration.
    reading: Option<Reading>,
    worker: Option<SavedWorker>,
    upgrade: Option<SavedUpgrade>,
    left: Option<SavedLeft>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedUpgrade {
    new: SavedWorker,
    step: Step,
    why: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedLeft {
    items: SavedCheckpoint,
    #[serde(flatten)]
    death: Death,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedWorker {
    pid: i32,
    process: Option<FdRef>,
    link: Option<FdRef>,
    program: Bytes,
    serves_since: Option<u64>,
    has_taken: bool,
    why: Option<String>,
    items: SavedCheckpoint,
    is_broken: bool,
    in_parts: bool,
}

/// State that only this process can use, after exec. The next supervisor after a crash cannot use
/// it.
#[derive(Debug, Default, Serialize, Deserialize)]
struct SavedHeld {
    control: Option<FdRef>,
    clients: Vec<FdRef>,
    brokers: Vec<(Kind, FdRef)>,
    /// Both ends of the fd store's socket pair, and its counters.
    journal: Option<(FdRef, FdRef, SavedFdStore)>,
    /// Connection to the requester of an upgrade, for the result.
    asker: Option<FdRef>,
    /// Result of the upgrade that preceded this exec. `asker` receives it after the exec.
    outcome: String,
}

/// State that is passed through exec, but is not part of [`Supervisor`].
#[derive(Default)]
pub(super) struct Held {
    pub(super) brokers: Vec<(Kind, OwnedFd)>,
    pub(super) asker: Option<OwnedFd>,
    pub(super) outcome: String,
}

/// Checks that this program could continue from the snapshot in this memfd.
///
/// # Errors
/// The snapshot has an unknown format or section.
pub(super) fn check(memory: OwnedFd) -> Result<(), StateError> {
    let mut parcel = Parcel::decode(&content_of(memory)?, Vec::new())?;
    section::<SavedSupervisor>(&mut parcel, SUPERVISOR)?;
    section::<SavedGrants>(&mut parcel, OPENED)?;
    parcel.take::<SavedHeld>(HELD)?;
    parcel.finish()
}

fn section<T: serde::de::DeserializeOwned>(
    parcel: &mut Parcel,
    name: &str,
) -> Result<T, StateError> {
    parcel.take(name)?.ok_or(StateError::NotAState("a section is missing"))
}

impl Worker {
    fn save<'a>(&'a self, fds: &mut Fds<'a>, clock: &Monotonic) -> SavedWorker {
        SavedWorker {
            pid: self.process.pid().as_raw_pid(),
            process: self.process.fd().map(|fd| add(fds, fd)),
            link: self.link().map(|link| add(fds, link)),
            program: bytes_of(&self.program),
            serves_since: self.serves_since.map(|since| clock.write(since)),
            has_taken: self.has_taken,
            why: self.why.clone(),
            items: self.items.save(fds),
            is_broken: self.is_broken,
            in_parts: self.in_parts,
        }
    }

    fn restore(
        saved: SavedWorker,
        fds: &mut Descriptors,
        clock: &Monotonic,
        is_child: bool,
    ) -> Result<Self, StateError> {
        let pid = Pid::from_raw(saved.pid).ok_or(StateError::NotAState("no process is 0"))?;
        let fd = saved.process.map(|fd| fds.take(fd)).transpose()?;
        // Changes of an unfinished transaction are not restored, because its further packets may be
        // lost.
        let items = Checkpoint::restore(saved.items, fds)?;
        let process = Process::from_saved(pid, fd, is_child);
        let link = saved.link.map(|link| fds.take(link)).transpose()?;
        let mut worker = Self::new(process, link, &path_of(&saved.program.0));
        worker.serves_since = saved.serves_since.map(|since| clock.read(since));
        (worker.has_taken, worker.why, worker.items) = (saved.has_taken, saved.why, items);
        (worker.is_broken, worker.in_parts) = (saved.is_broken, saved.in_parts);
        worker.has_changed = true;
        Ok(worker)
    }
}

impl Supervisor {
    /// Makes a snapshot with the held images. `held`: state for exec, which only the same process
    /// can use.
    ///
    /// # Errors
    /// Serialization fails.
    pub(super) fn snapshot<'a>(
        &'a self,
        images: &'a [Image],
        held: Option<&'a Held>,
    ) -> Result<Snapshot<'a>, StateError> {
        let clock = Monotonic::read_clock();
        let mut fds = Fds::new();
        let left = self.left.as_ref();
        let saved = SavedSupervisor {
            program: bytes_of(&self.program),
            sockets: self.sockets.iter().map(|path| bytes_of(path)).collect(),
            is_ready: self.is_ready,
            deaths: self.deaths.times.iter().map(|time| clock.write(*time)).collect(),
            died: self.died.map(|time| clock.write(time)),
            restart: self.restart.map(|time| clock.write(time)),
            reading: self.reading,
            worker: self.worker.as_ref().map(|worker| worker.save(&mut fds, &clock)),
            upgrade: self.upgrade.as_ref().map(|upgrade| SavedUpgrade {
                new: upgrade.new.save(&mut fds, &clock),
                step: upgrade.step,
                why: upgrade.why.clone(),
            }),
            left: left
                .map(|left| SavedLeft { items: left.items.save(&mut fds), death: left.death }),
        };
        let mut parcel = Parcel::new();
        parcel.add(SUPERVISOR, true, &saved)?;
        let grants = GRANTS.lock().save(images, |fd| add(&mut fds, fd));
        parcel.add(OPENED, true, &grants)?;
        if let Some(held) = held {
            let (control, brokers) = (self.control.as_ref(), held.brokers.iter());
            let clients = control.iter().flat_map(|control| &control.clients);
            let saved = SavedHeld {
                control: control.map(|control| add(&mut fds, control.socket.as_fd())),
                clients: clients.map(|client| add(&mut fds, client.as_fd())).collect(),
                brokers: brokers.map(|(kind, fd)| (*kind, add(&mut fds, fd.as_fd()))).collect(),
                journal: self.fd_store.as_ref().map(|FdStore { write, read, counters, .. }| {
                    (add(&mut fds, write.as_fd()), add(&mut fds, read.as_fd()), *counters)
                }),
                asker: held.asker.as_ref().map(|asker| add(&mut fds, asker.as_fd())),
                outcome: held.outcome.clone(),
            };
            parcel.add(HELD, true, &saved)?;
        }
        Ok(Snapshot { bytes: parcel.encode(fds.len())?, fds })
    }

    /// Restores a snapshot of this process before exec (`is_same`), or of a killed supervisor.
    ///
    /// # Errors
    /// The snapshot has an unknown format or section.
    pub(super) fn restore(
        &mut self,
        mut parcel: Parcel,
        is_same: bool,
    ) -> Result<Option<Held>, StateError> {
        let clock = Monotonic::read_clock();
        let saved: SavedSupervisor = section(&mut parcel, SUPERVISOR)?;
        let grants: SavedGrants = section(&mut parcel, OPENED)?;
        let held: Option<SavedHeld> = parcel.take(HELD)?;
        let mut fds = std::mem::take(parcel.descriptors());
        parcel.finish()?;
        let fds = &mut fds;
        let mut worker = |saved| Worker::restore(saved, &mut *fds, &clock, is_same);
        let serves = saved.worker.map(&mut worker).transpose()?;
        let upgrade = saved.upgrade.map(|SavedUpgrade { new, step, why }| {
            Ok::<_, StateError>(Upgrade { step, why, ..Upgrade::new(worker(new)?, None) })
        });
        self.upgrade = upgrade.transpose()?;
        let left = saved.left.map(|SavedLeft { items, death }| {
            Ok::<_, StateError>(Left { items: Checkpoint::restore(items, fds)?, death })
        });
        self.left = left.transpose()?;
        self.worker = serves;
        self.program = path_of(&saved.program.0);
        self.sockets = saved.sockets.iter().map(|path| path_of(&path.0)).collect();
        self.deaths.times = saved.deaths.iter().map(|time| clock.read(*time)).collect();
        self.died = saved.died.map(|time| clock.read(time));
        self.restart = saved.restart.map(|time| clock.read(time));
        GRANTS.lock().restore(grants, fds)?;
        if is_same {
            self.is_ready = saved.is_ready;
            self.reading = saved.reading;
        }
        let Some(held) = held else { return Ok(None) };
        let clients: Result<Vec<_>, _> = held.clients.into_iter().map(|fd| fds.take(fd)).collect();
        let clients = clients?;
        if let Some(socket) = held.control {
            self.control = Some(Control { socket: fds.take(socket)?, clients });
        }
        if let Some((write, read, saved)) = held.journal {
            self.fd_store = Some(FdStore::from_saved(fds.take(write)?, fds.take(read)?, saved));
        }
        let brokers = held.brokers.into_iter().map(|(kind, fd)| Ok((kind, fds.take(fd)?)));
        Ok(Some(Held {
            brokers: brokers.collect::<Result<_, StateError>>()?,
            asker: held.asker.map(|asker| fds.take(asker)).transpose()?,
            outcome: held.outcome,
        }))
    }
}
