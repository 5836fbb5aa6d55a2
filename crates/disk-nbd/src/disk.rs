//! NBD export as a disk.

use crate::block_status::report_extents;
use crate::connections::{Connections, Connector, Handle};
use crate::error::OpenError;
use crate::export::Export;
use crate::link::Link;
use crate::queue::NbdQueue;
use crate::reconnect;
use crate::recovery::{KEY, NO_SETTLE_TIME, SavedExport, reach, refused, wait_for_server};
use crate::replay::{ReplayError, flush};
use crate::shared::Shared;
use crate::stream::{Patient, Stream};
use crate::unflushed::Unflushed;
use crate::uri::NbdSpec;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;
use shadowbell_disk::{CheckpointError, Disk, DiskInfo, Queue, ReportExtent, ResizeError, Wait};
use shadowbell_memory::EventFd;
use shadowbell_nbd::wire::transmission;
use shadowbell_state::Descriptors;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{fmt, io};

/// Maximum data of one subrequest, in bytes.
const PART: u32 = 256 << 10;
/// Maximum duration of the flush after a recovery.
const FLUSH: Duration = Duration::from_secs(120);

/// Export of an NBD server.
///
/// The connections are closed when the disk and all its queues are dropped.
#[derive(Clone)]
pub struct NbdDisk {
    handle: Arc<Handle>,
    info: DiskInfo,
    may_have_late_writes: bool,
}

impl NbdDisk {
    /// Connects to the server. The server must be reachable now. Later it may become unavailable
    /// for a while.
    ///
    /// # Errors
    /// [`OpenError`]: the message says what is wrong and what to do.
    pub fn open(spec: &NbdSpec) -> Result<Self, OpenError> {
        Self::connect(spec, |_, _, _| Ok(()))
    }

    /// Recovers the disk of a dead process. That process opened it by the same specification, and
    /// stored `state` as its [checkpoint](Disk::checkpoint). If the process `has_quiesced` or the
    /// disk is read-only, connects at once. Otherwise first waits for the time `settle`, after
    /// which no request of the dead process can reach the export any more. Calls `wait` repeatedly
    /// during that time, and while the server is unavailable.
    ///
    /// # Errors
    /// [`OpenError`] if the export has been replaced, if the disk is writable and has no `settle`,
    /// or if `wait` ends the waiting.
    pub fn recover(
        spec: &NbdSpec,
        state: &Value,
        has_quiesced: bool,
        wait: Wait<'_>,
    ) -> Result<Self, OpenError> {
        let saved = saved_export(spec, state)?;
        if !has_quiesced {
            wait_for_server(spec, &saved, wait)?;
        }
        let mut disk = reach(spec, wait, || Self::succeed(spec, &saved))?;
        disk.info = saved
            .with_previous_properties(&disk.info)
            .map_err(|why| refused(spec, why.to_owned()))?;
        Ok(disk)
    }

    /// Opens the disk of a dead process that cannot be [recovered](Self::recover). `state` is its
    /// checkpoint. The disk has the properties that the server offers now, and requests of the dead
    /// process may still be executed. A loss of writes is known as before.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn reopen(spec: &NbdSpec, state: &Value) -> Result<Self, OpenError> {
        let (mut disk, has_settled) = match saved_export(spec, state) {
            Ok(saved) => (Self::succeed(spec, &saved)?, spec.settle.is_some()),
            // The state is invalid, which is the reason why the disk cannot be recovered.
            Err(_) => (Self::open(spec)?, false),
        };
        disk.may_have_late_writes = !disk.info.read_only && !has_settled;
        Ok(disk)
    }

    /// Opens the disk after the death of the process that stored `saved`. Makes the writes that the
    /// server has answered to that process durable.
    fn succeed(spec: &NbdSpec, saved: &SavedExport) -> Result<Self, OpenError> {
        let is_lost = Cell::new(saved.has_lost_writes);
        let disk = Self::connect(spec, |stream, export, stop| {
            if saved.read_only || !export.has(transmission::SEND_FLUSH) {
                return Ok(());
            }
            let until = Instant::now() + FLUSH;
            match flush(&mut Patient { stream, until, stop }, export.structured) {
                Ok(()) => Ok(()),
                Err(ReplayError::Lost(source)) => {
                    Err(OpenError::Connect { disk: spec.to_string(), source })
                }
                Err(error @ ReplayError::Refused(_)) => {
                    tracing::error!(
                        "{spec}: writes since the last flush may be lost: {error}; flushes fail \
                         until the disk is opened again"
                    );
                    is_lost.set(true);
                    Ok(())
                }
            }
        })?;
        disk.connections().shared.unflushed.lock().has_lost_writes = is_lost.get();
        Ok(disk)
    }

    /// True if `state` is the checkpoint of an NBD disk.
    #[must_use]
    pub fn is_checkpoint(state: &Value) -> bool {
        state.get(KEY).is_some()
    }

    /// Connects to the server. Runs `first` on the first connection before any other request.
    fn connect(
        spec: &NbdSpec,
        first: impl Fn(&Stream, &Export, &EventFd) -> Result<(), OpenError>,
    ) -> Result<Self, OpenError> {
        let name = spec.to_string();
        let system = |source| OpenError::System { disk: name.clone(), source };
        let stop = EventFd::new().map_err(system)?;
        let connector = Connector::new(spec)?;
        let (stream, export) = connector.connect(&stop)?;
        let info = info(spec, &export, export.size)?;
        first(&stream, &export, &stop)?;
        let unflushed = if export.has(transmission::SEND_FLUSH) {
            Unflushed::new(spec.replay)
        } else {
            Unflushed::needless()
        };
        let shared = Shared::new(name.clone(), export.clone(), unflushed).map_err(system)?;
        let mut streams = vec![stream];
        if export.has(transmission::CAN_MULTI_CONN) {
            while streams.len() < spec.connections {
                // The server may accept fewer connections than requested.
                match connector.connect(&stop) {
                    Ok((stream, _)) => streams.push(stream),
                    Err(error) => {
                        tracing::info!("{error}; using {} connections", streams.len());
                        break;
                    }
                }
            }
        }
        let mut links = Vec::new();
        for stream in streams {
            let mut link = Link::default();
            link.install(stream, &export, &shared);
            links.push(Mutex::new(link));
        }
        let connections = Arc::new(Connections {
            connector,
            shared: Arc::new(shared),
            links: links.into(),
            part: PART.min(export.max_payload) / info.block_size * info.block_size,
            first: export,
        });
        let of_thread = Arc::clone(&connections);
        let thread = std::thread::Builder::new().name("sb-nbd".into());
        thread.spawn(move || reconnect::run(&of_thread)).map_err(system)?;
        Ok(Self { handle: Arc::new(Handle(connections)), info, may_have_late_writes: false })
    }

    fn connections(&self) -> &Connections {
        &self.handle.0
    }

    fn export(&self) -> Export {
        self.connections().shared.export.lock().clone()
    }

    /// Reason why the disk cannot be recovered after a crash, if it cannot.
    #[must_use]
    pub fn unfenced(&self) -> Option<&'static str> {
        let has_settle_time = self.connections().connector.spec.settle.is_some();
        (!self.info.read_only && !has_settle_time).then_some(NO_SETTLE_TIME)
    }

    /// Describes the export for the operator: `NBD with 4 connections, flushes, FUA, write zeroes`.
    #[must_use]
    pub fn describe(&self) -> String {
        let export = self.export();
        let can = [
            (transmission::SEND_FLUSH, "flushes"),
            (transmission::SEND_FUA, "FUA"),
            (transmission::SEND_WRITE_ZEROES, "write zeroes"),
        ];
        let can = can.iter().filter(|(flag, _)| export.has(*flag)).map(|(_, what)| *what);
        let tls = if self.connections().connector.spec.secure.is_some() { " by TLS" } else { "" };
        let mut words = vec![match self.connections().links.len() {
            1 => format!("NBD{tls} with one connection"),
            many => format!("NBD{tls} with {many} connections"),
        }];
        words.extend(can.map(str::to_owned));
        words.join(", ")
    }
}

/// Decodes the checkpoint of a disk.
fn saved_export(spec: &NbdSpec, state: &Value) -> Result<SavedExport, OpenError> {
    match state.get(KEY).map(SavedExport::deserialize) {
        Some(Ok(saved)) => Ok(saved),
        Some(Err(error)) => Err(refused(spec, error.to_string())),
        None => Err(refused(spec, "its stored state is not that of an NBD export".to_owned())),
    }
}

fn info(spec: &NbdSpec, export: &Export, size: u64) -> Result<DiskInfo, OpenError> {
    let disk = || spec.to_string();
    let block_size = spec.block_size.unwrap_or(512);
    if export.min_block > block_size || export.max_payload < block_size {
        return Err(OpenError::BlockSize { disk: disk(), min_block: export.min_block, block_size });
    }
    let blocks = size / u64::from(block_size);
    if blocks == 0 || !size.is_multiple_of(u64::from(block_size)) || size > i64::MAX as u64 {
        return Err(OpenError::Size { disk: disk(), size, block_size });
    }
    let mut info = DiskInfo::new(block_size, blocks);
    info.read_only = spec.read_only || export.has(transmission::READ_ONLY);
    info.volatile_cache = !info.read_only && export.has(transmission::SEND_FLUSH);
    info.discard = !info.read_only && export.has(transmission::SEND_WRITE_ZEROES);
    info.granularity = (export.preferred.min(1 << 20) / block_size).max(1);
    Ok(info)
}

impl Disk for NbdDisk {
    fn info(&self) -> DiskInfo {
        self.info.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(NbdQueue::new(Arc::clone(&self.handle), &self.info)?))
    }

    fn queue_files(&self) -> u64 {
        2
    }

    fn name(&self) -> String {
        self.connections().shared.name.clone()
    }

    fn extents(&self, offset: u64, len: u64, report: &mut ReportExtent<'_>) {
        report_extents(self.connections(), offset, len, report);
    }

    fn is_full(&self) -> bool {
        self.connections().shared.is_full.load(Ordering::Relaxed)
    }

    fn has_lost_writes(&self) -> bool {
        self.connections().shared.unflushed.lock().has_lost_writes
    }

    fn may_have_late_writes(&self) -> bool {
        self.may_have_late_writes
    }

    fn orphans(&self) -> usize {
        self.connections().shared.orphans.len()
    }

    fn checkpoint(&self, _: &mut Descriptors) -> Result<Value, CheckpointError> {
        let saved = SavedExport::new(&self.info, self.has_lost_writes());
        Ok(serde_json::json!({ KEY: saved }))
    }

    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        *self.connections().shared.on_loss.lock() = Some(changed);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let shared = &self.connections().shared;
        vec![
            ("connections", self.connections().links.len() as u64),
            ("connections_lost", shared.losses.load(Ordering::Relaxed)),
            ("reconnections", shared.reconnections.load(Ordering::Relaxed)),
            ("requests_replayed", shared.unflushed.lock().replayed),
        ]
    }

    fn resized(&self, bytes: Option<u64>) -> Result<Arc<dyn Disk>, ResizeError> {
        let connections = self.connections();
        let disk = self.name();
        let mut there = self.export().size;
        // A server reports a new size only in a new handshake, so the size is queried on a new
        // connection.
        if there == self.info.bytes() || bytes.is_some_and(|bytes| bytes > there) {
            match connections.connector.query_export(&connections.shared.stop) {
                Ok(export) => there = export.size,
                Err(error) => {
                    return Err(ResizeError::System { disk, source: io::Error::other(error) });
                }
            }
            connections.shared.export.lock().size = there;
        }
        let wanted = bytes.unwrap_or(there);
        if wanted > there {
            return Err(ResizeError::Short { disk, there, wanted });
        }
        let block_size = self.info.block_size;
        if wanted == 0 || !wanted.is_multiple_of(block_size.into()) {
            return Err(ResizeError::Size { disk, bytes: wanted, block_size });
        }
        let mut resized = self.clone();
        resized.info.blocks = wanted / u64::from(block_size);
        Ok(Arc::new(resized))
    }
}

impl fmt::Debug for NbdDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdDisk")
            .field("name", &self.connections().shared.name)
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}
