//! Memory that a client shares, and the controller's access to it (bus mastering).

use super::files::{Files, RetainedFile};
use super::written_ranges::{self, SavedRanges, WrittenRange, WrittenRanges, too_many_files};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_controller::Controller;
use shadowbell_memory::{DmaError, DmaTable, Protection, SharedBytes};
use shadowbell_state::{Descriptors, FdRef};
use shadowbell_vfio_user::descriptor::{Closer, PeerFd};
use shadowbell_vfio_user::device::{Completer, DmaMap};
use shadowbell_vfio_user::{Errno, LogLimit, RestoreError, SaveError};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;
use std::sync::Arc;
use tracing::debug;

/// Maximum number of ranges that a client may share. A machine has a few dozen, but with an
/// emulated IOMMU a guest's kernel shares memory page by page. The value is the limit of VFIO's
/// IOMMU driver.
pub(super) const MAX_RANGES: u32 = 65_535;

/// Smallest page size of any host, in bytes.
const PAGE: u64 = 4096;

/// Range of a client's memory.
struct Range {
    len: u64,
    /// Mapped bytes. `None` for a range without a descriptor, which cannot be mapped.
    bytes: Option<SharedBytes>,
    /// File of the range, if its descriptor is still open. The field after it is the offset of the
    /// range in the file.
    file: Option<Arc<RetainedFile>>,
    offset: u64,
    protection: Protection,
}

impl Range {
    fn write_to(&self, written: &mut WrittenRanges, iova: u64) {
        let file = (self.file.as_ref(), self.offset);
        written.add((iova, self.len), file, self.bytes.is_some(), self.protection);
    }

    fn last(&self, iova: u64) -> u64 {
        iova.saturating_add(self.len - 1)
    }
}

/// Serialized memory of a client, for the next server process.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct SavedMemory {
    is_granted: bool,
    files: Vec<FdRef>,
    ranges: Vec<SavedRange>,
    /// Table of the ranges in shared memory, for a checkpoint with many ranges. `ranges` then
    /// contains only [`NONE`], so that older releases, which do not know this field, refuse the
    /// state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    written: Option<SavedRanges>,
}

/// IOVA, length, index of the file (if there is one), offset in the file, and true if the range is
/// writable. It is serialized as a list, because there may be up to [`MAX_RANGES`].
#[derive(Serialize, Deserialize)]
struct SavedRange(u64, u64, Option<u32>, u64, bool);

impl From<SavedRange> for WrittenRange {
    fn from(SavedRange(iova, len, file, offset, writable): SavedRange) -> Self {
        Self { iova, len, file: file.map(u64::from), offset, writable }
    }
}

/// Serialized range with its file.
struct SavedMapping {
    iova: u64,
    len: u64,
    file: Option<Arc<PeerFd>>,
    offset: u64,
    protection: Protection,
}

/// Decodes serialized memory, and calls `map` with each range. An error of `map` is the reason why
/// the range cannot be mapped.
fn for_each_range(
    saved: SavedMemory,
    fds: &mut Descriptors,
    closer: &Arc<Closer>,
    mut map: impl FnMut(SavedMapping) -> Result<(), String>,
) -> Result<(), RestoreError> {
    let SavedMemory { files, ranges, written, .. } = saved;
    let (ranges, files) = match written {
        Some(written) => written_ranges::read(&written, fds)?,
        None => {
            let files = (0..).zip(files).map(|(number, fd)| Ok((number, fds.take(fd)?)));
            let files = files.collect::<Result<HashMap<_, _>, RestoreError>>()?;
            (ranges.into_iter().map(WrittenRange::from).collect(), files)
        }
    };
    let files = files
        .into_iter()
        .map(|(number, fd)| (number, Arc::new(PeerFd::of_predecessor(fd, closer))));
    let files: HashMap<u64, _> = files.collect();
    for WrittenRange { iova, len, file, offset, writable } in ranges {
        let refused = |why: String| {
            RestoreError::Client(format!("its memory at IOVA {iova:#x} cannot be mapped: {why}"))
        };
        let file = match file.map(|number| files.get(&number)) {
            Some(None) => return Err(refused("its file is missing".to_owned())),
            file => file.flatten().map(Arc::clone),
        };
        let protection = if writable { Protection::ReadWrite } else { Protection::Read };
        map(SavedMapping { iova, len, file, offset, protection }).map_err(refused)?;
    }
    Ok(())
}

/// Maps each range of serialized memory, and unmaps it again.
pub(super) fn check(saved: SavedMemory, fds: &mut Descriptors) -> Result<(), RestoreError> {
    let (closer, mut files) = (Arc::<Closer>::default(), Files::default());
    for_each_range(saved, fds, &closer, |SavedMapping { len, file, offset, protection, .. }| {
        let Some(fd) = file else { return Ok(()) };
        files.map(&fd, offset, len, protection).map(drop).map_err(|error| error.to_string())
    })
}

/// Maximum number of ranges that the calling thread drops itself, instead of the closer's thread.
const MAX_DIRECT_DROPS: usize = 256;

/// Maximum number of ranges that a checkpoint contains directly. A virtual machine without an IOMMU
/// has fewer ranges.
const MAX_INLINE_RANGES: usize = 128;
/// Invalid range. A release of this program that maps the ranges of the state refuses a state with
/// this range.
const NONE: SavedRange = SavedRange(1, 0, None, 0, false);

/// Ranges that the client has unmapped, and the DMA table that contained them. The client's
/// [`Closer`] unmaps their memory. If there are many ranges, the closer also drops the entries of
/// the ranges, because that takes long.
pub(super) struct Released {
    ranges: BTreeMap<u64, Range>,
    table: Option<Arc<DmaTable>>,
    closer: Option<Arc<Closer>>,
}

impl Drop for Released {
    fn drop(&mut self) {
        if let Some(closer) = self.closer.take().filter(|_| self.ranges.len() > MAX_DIRECT_DROPS) {
            let ranges = std::mem::take(&mut self.ranges);
            closer.drop_later(Box::new((ranges, self.table.take())));
        }
    }
}

/// Memory that a client shares. The controller may access it while bus mastering is enabled.
pub(super) struct Memory {
    controller: Controller,
    ranges: BTreeMap<u64, Range>,
    files: Files,
    /// True if the controller may access all mapped ranges (bus mastering is enabled).
    is_granted: bool,
    /// True if ranges were added for which [`publish`](Self::publish) was not called yet.
    is_unpublished: bool,
    closer: Option<Arc<Closer>>,
    /// Table of the ranges in shared memory, if the checkpoints have many ranges.
    written: Option<WrittenRanges>,
    /// Numbers of lasting descriptors that the next checkpoint removes, and the number of the next
    /// lasting descriptor.
    removed: (Vec<u64>, u64),
    log: LogLimit,
}

impl Memory {
    pub(super) fn new(controller: Controller) -> Self {
        controller.disable_dma(|| ());
        Self {
            controller,
            ranges: BTreeMap::new(),
            files: Files::default(),
            is_granted: false,
            is_unpublished: false,
            closer: None,
            written: None,
            removed: (Vec::new(), 0),
            log: LogLimit::default(),
        }
    }

    /// Gives the controller access to the ranges that were added so far.
    pub(super) fn publish(&mut self) {
        if std::mem::take(&mut self.is_unpublished) && self.is_granted {
            self.controller.publish_dma();
        }
    }

    /// Adds a range that the client shares. The caller must call [`publish`](Self::publish)
    /// afterwards.
    pub(super) fn map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let DmaMap { iova, len, readable, writable, fd, fd_offset } = map;
        let protection = match (readable, writable) {
            (_, true) => Protection::ReadWrite,
            (true, false) => Protection::Read,
            (false, false) => return Err(Errno::INVAL),
        };
        self.add(iova, len, fd.map(Arc::new), fd_offset, protection)
    }

    fn add(
        &mut self,
        iova: u64,
        len: u64,
        fd: Option<Arc<PeerFd>>,
        offset: u64,
        protection: Protection,
    ) -> Result<(), Errno> {
        if self.ranges.len() >= MAX_RANGES as usize {
            self.log.warn(format_args!(
                "a client shares more than {MAX_RANGES} ranges of memory, which is refused"
            ));
            return Err(Errno::NOSPC);
        }
        let Some(last) = len.checked_sub(1).and_then(|len| iova.checked_add(len)) else {
            return Err(Errno::INVAL);
        };
        // A range must start at a page boundary, as every IOMMU requires. Otherwise structures that
        // are aligned in the client's address space, such as queues, would not be aligned in this
        // process.
        if !iova.is_multiple_of(PAGE) {
            self.log.warn(format_args!(
                "a client shares memory at IOVA {iova:#x}, which is no multiple of {PAGE}"
            ));
            return Err(Errno::INVAL);
        }
        let below = self.ranges.range(..=last).next_back();
        if below.is_some_and(|(start, range)| range.last(*start) >= iova) {
            return Err(Errno::EXIST);
        }
        let mut file = None;
        let bytes = match fd {
            None => {
                debug!("{len:#x} bytes at IOVA {iova:#x} came without a descriptor");
                None
            }
            Some(fd) => {
                self.closer = Some(Arc::clone(fd.closer()));
                file = self.files.retain_file(&fd, protection);
                let fd = file.as_ref().map_or(&fd, |file| &file.fd);
                let bytes = self.files.map(fd, offset, len, protection);
                Some(bytes.map_err(|error| {
                    self.log.warn(format_args!(
                        "memory that the client shares at IOVA {iova:#x}: {error}"
                    ));
                    error.errno()
                })?)
            }
        };
        if let Some(bytes) = &bytes {
            self.controller.add_dma(iova, len, bytes).map_err(|error| errno(&error))?;
            self.is_unpublished = true;
        }
        let range = Range { len, bytes, file, offset, protection };
        if let Some(written) = &mut self.written {
            range.write_to(written, iova);
        }
        self.ranges.insert(iova, range);
        Ok(())
    }

    /// Serializes the memory for a checkpoint. The cost does not grow with the number of ranges.
    pub(super) fn record(&mut self, fds: &mut Descriptors) -> Result<SavedMemory, SaveError> {
        if self.written.is_none() && self.ranges.len() > MAX_INLINE_RANGES {
            let mut written = WrittenRanges::new(MAX_RANGES, self.removed.1)?;
            self.ranges.iter().for_each(|(iova, range)| range.write_to(&mut written, *iova));
            self.written = Some(written);
        }
        let saved = match &mut self.written {
            None => self.save(fds)?,
            Some(written) => SavedMemory {
                is_granted: self.is_granted,
                files: Vec::new(),
                ranges: vec![NONE],
                written: Some(written.record(fds)?),
            },
        };
        // From here on no step can fail. So a checkpoint that fails removes no descriptors.
        self.removed.0.drain(..).for_each(|number| fds.remove_lasting(number));
        Ok(saved)
    }

    /// Discards the state of earlier checkpoints, so that the next checkpoint is complete.
    pub(super) fn reset_checkpoint(&mut self) {
        self.written = None;
        self.removed = (Vec::new(), 0);
    }

    /// Serializes the memory with all ranges and their files.
    fn save(&self, fds: &mut Descriptors) -> Result<SavedMemory, SaveError> {
        let mut saved = SavedMemory { is_granted: self.is_granted, ..SavedMemory::default() };
        let mut known = HashMap::new();
        for (iova, range) in &self.ranges {
            let file = match (&range.file, &range.bytes) {
                (Some(retained), _) => match known.get(&Arc::as_ptr(retained)) {
                    Some(file) => Some(*file),
                    None => {
                        let file = u32::try_from(saved.files.len()).unwrap_or(u32::MAX);
                        saved.files.push(fds.add(retained.fd.as_fd().try_clone_to_owned()?));
                        known.insert(Arc::as_ptr(retained), file);
                        Some(file)
                    }
                },
                (None, None) => None,
                (None, Some(_)) => return Err(too_many_files()),
            };
            let writable = range.protection == Protection::ReadWrite;
            saved.ranges.push(SavedRange(*iova, range.len, file, range.offset, writable));
        }
        Ok(saved)
    }

    /// Restores memory from the state of [`record`](Self::record).
    pub(super) fn restore(
        &mut self,
        saved: SavedMemory,
        fds: &mut Descriptors,
        closer: &Arc<Closer>,
    ) -> Result<(), RestoreError> {
        let is_granted = saved.is_granted;
        for_each_range(
            saved,
            fds,
            closer,
            |SavedMapping { iova, len, file, offset, protection }| {
                self.add(iova, len, file, offset, protection).map_err(|errno| errno.to_string())
            },
        )?;
        if is_granted {
            self.grant();
        }
        Ok(())
    }

    /// Unmaps all ranges in `iova..iova + len`. Calls `done` when the controller no longer accesses
    /// them.
    pub(super) fn unmap(&mut self, iova: u64, len: u64, done: Completer) {
        let Some(last) = len.checked_sub(1).and_then(|len| iova.checked_add(len)) else {
            return done.complete(Err(Errno::INVAL));
        };
        let before = self.ranges.range(..iova).next_back();
        let tail = self.ranges.range(iova..=last).next_back();
        // A range can only be unmapped as a whole, as with VFIO_IOMMU_UNMAP_DMA of VFIO's IOMMU
        // type 1, version 2.
        if before.is_some_and(|(start, range)| range.last(*start) >= iova)
            || tail.is_some_and(|(start, range)| range.last(*start) > last)
        {
            return done.complete(Err(Errno::INVAL));
        }
        let inside: Vec<u64> = self.ranges.range(iova..=last).map(|(start, _)| *start).collect();
        if inside.is_empty() {
            return done.complete(Err(Errno::NOENT));
        }
        let ranges = if inside.len() <= MAX_DIRECT_DROPS {
            inside.iter().filter_map(|start| self.ranges.remove_entry(start)).collect()
        } else {
            // All ranges are split off together, because removing many of them one by one would
            // take long.
            let mut removed = self.ranges.split_off(&iova);
            if let Some(after) = last.checked_add(1) {
                self.ranges.append(&mut removed.split_off(&after));
            }
            removed
        };
        if let Some(written) = &mut self.written {
            for (iova, range) in &ranges {
                written.remove(*iova, range.file.as_ref(), range.bytes.is_some());
            }
        }
        let released = self.release(ranges);
        if released.ranges.values().all(|range| range.bytes.is_none()) {
            return done.ok();
        }
        let shared = share(done);
        let ok = shared.clone();
        let removed = move || {
            ok(Ok(()));
            drop(released);
        };
        if let Err(error) = self.controller.unmap_dma(iova, len, removed) {
            shared(Err(errno(&error)));
        }
    }

    fn release(&self, ranges: BTreeMap<u64, Range>) -> Released {
        let table = (ranges.len() > MAX_DIRECT_DROPS).then(|| self.controller.dma_table());
        Released { ranges, table, closer: self.closer.clone() }
    }

    /// Unmaps all ranges. Calls `done` when the controller no longer accesses them.
    pub(super) fn unmap_all(&mut self, done: Completer) {
        let released = self.take_ranges();
        self.controller.unmap_all(move || {
            done.ok();
            drop(released);
        });
    }

    /// Removes all ranges of a disconnected client, without notifying the controller. The caller
    /// must hold the returned value until the controller no longer accesses the memory.
    #[must_use]
    pub(super) fn clear(&mut self) -> Released {
        self.is_granted = false;
        self.take_ranges()
    }

    fn take_ranges(&mut self) -> Released {
        self.is_unpublished = false;
        if let Some((given, next)) = self.written.take().map(WrittenRanges::end) {
            self.removed.0.extend(given);
            self.removed.1 = next;
        }
        let ranges = std::mem::take(&mut self.ranges);
        self.release(ranges)
    }

    pub(super) fn is_granted(&self) -> bool {
        self.is_granted
    }

    /// Grants the controller access to the memory.
    pub(super) fn grant(&mut self) {
        if !std::mem::replace(&mut self.is_granted, true) {
            self.is_unpublished = false;
            self.controller.enable_dma();
        }
    }

    /// Revokes the controller's access to the memory. Calls `done` when the last access has ended.
    pub(super) fn revoke(&mut self, done: Completer) {
        self.start_revoke()(done);
    }

    /// Returns a function that revokes the controller's access. Until it is called, the controller
    /// may also access ranges that are added meanwhile.
    pub(super) fn start_revoke(&mut self) -> impl FnOnce(Completer) + Send + 'static {
        self.is_granted = false;
        let controller = self.controller.clone();
        move |done| controller.disable_dma(move || done.ok())
    }

    /// True if the client has shared memory, but none of it can be mapped.
    pub(super) fn is_all_unusable(&self) -> bool {
        !self.ranges.is_empty() && self.ranges.values().all(|range| range.bytes.is_none())
    }

    /// True if `len` bytes at `iova` are readable and all zero.
    pub(super) fn is_zero(&self, iova: u64, len: usize) -> bool {
        let Some((start, range)) = self.ranges.range(..=iova).next_back() else { return false };
        let Some(bytes) = &range.bytes else { return false };
        let Ok(offset) = usize::try_from(iova - start) else { return false };
        let mut copy = vec![0xff; len];
        bytes.read_into(offset, &mut copy).is_some() && copy.iter().all(|byte| *byte == 0)
    }
}

/// Converts the [`Completer`] of a request to a callback that two callers can share. The first call
/// completes the request.
fn share(done: Completer) -> impl Fn(Result<(), Errno>) + Clone + Send + 'static {
    let done = Arc::new(Mutex::new(Some(done)));
    move |outcome| {
        let done = done.lock().take();
        if let Some(done) = done {
            done.complete(outcome);
        }
    }
}

fn errno(error: &DmaError) -> Errno {
    match error {
        DmaError::Overlap { .. } => Errno::EXIST,
        DmaError::NotMapped { .. } => Errno::NOENT,
        DmaError::Range { .. } | DmaError::Split { .. } | DmaError::Short { .. } => Errno::INVAL,
    }
}

#[cfg(test)]
mod tests {
    use super::super::budget::{Amount, Budget};
    use super::*;
    use shadowbell_controller::config::uuid_from;
    use shadowbell_controller::{Carrier, Config, NamespaceConfig, Pool, PoolOptions};
    use shadowbell_state::LastingChange;

    fn memory(descriptors: u64) -> Memory {
        let disk = Arc::new(shadowbell_disk_file::MemDisk::new(8, 512).unwrap());
        let namespaces = vec![NamespaceConfig { uuid: uuid_from("a test"), disk }];
        let config = Config { namespaces, ..Config::default() };
        let pool = Pool::start(&PoolOptions { workers: 1, ..PoolOptions::default() }).unwrap();
        let mut memory = Memory::new(Controller::new(config, pool, Carrier::default()).unwrap());
        let budget = Amount { bytes: 1 << 30, mappings: 1 << 20, descriptors };
        memory.files = Files::new(Budget::new(budget));
        memory
    }

    fn map(memory: &mut Memory, n: u64) {
        let fd = rustix::fs::memfd_create("client", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, PAGE).unwrap();
        let fd = Some(PeerFd::new(fd, &Arc::default()));
        let (iova, len) = (n * PAGE, PAGE);
        let map = DmaMap { iova, len, readable: true, writable: true, fd, fd_offset: 0 };
        memory.map(map).unwrap();
    }

    #[test]
    fn memory_in_too_many_files_is_served_and_cannot_be_saved() {
        let mut memory = memory(100);
        (0..50).for_each(|n| map(&mut memory, n));
        let mut fds = Descriptors::default();
        assert_eq!(memory.save(&mut fds).unwrap().ranges.len(), 50);
        assert_eq!(fds.len(), 50);
        map(&mut memory, 50);
        let error = memory.save(&mut fds).err().unwrap().to_string();
        assert!(error.contains("cannot move to another process:"), "{error}");
        assert!(error.contains("ulimit -n"), "{error}");
        let (sender, unmapped) = std::sync::mpsc::channel();
        memory.unmap(50 * PAGE, PAGE, Completer::new(move |outcome| sender.send(outcome).unwrap()));
        unmapped.recv().unwrap().unwrap();
        memory.save(&mut fds).unwrap();
    }

    /// A client has many ranges in many files. The first checkpoint adds all descriptors, and later
    /// checkpoints only add and remove changed ones.
    #[test]
    fn a_record_has_only_changes_and_recovery_finds_all_ranges() {
        let mut memory = memory(2000);
        (0..MAX_INLINE_RANGES as u64).for_each(|n| map(&mut memory, n));
        let mut fds = Descriptors::default();
        assert_eq!(memory.record(&mut fds).unwrap().ranges.len(), MAX_INLINE_RANGES);
        (MAX_INLINE_RANGES as u64..600).for_each(|n| map(&mut memory, n));
        let mut retained = HashMap::new();
        let mut record = |memory: &mut Memory| {
            let mut fds = Descriptors::default();
            let saved = serde_json::to_string(&memory.record(&mut fds).unwrap()).unwrap();
            let changes = fds.take_changes();
            let count = changes.len();
            for change in changes {
                match change {
                    LastingChange::Put(number, fd) => drop(retained.insert(number, fd)),
                    LastingChange::Remove(number) => drop(retained.remove(&number).unwrap()),
                }
            }
            (saved, fds, count, retained.len())
        };
        let (saved, fds, count, _) = record(&mut memory);
        assert!(saved.len() < 200, "{saved}");
        assert_eq!((fds.len(), count), (1, 600));
        let unmap = |memory: &mut Memory, iova, len| {
            let (sender, unmapped) = std::sync::mpsc::channel();
            memory.unmap(iova, len, Completer::new(move |outcome| sender.send(outcome).unwrap()));
            unmapped.recv().unwrap().unwrap();
        };
        unmap(&mut memory, 7 * PAGE, PAGE);
        map(&mut memory, 1000);
        let (saved, fds, count, all) = record(&mut memory);
        assert_eq!((saved.len() < 200, fds.len(), count, all), (true, 1, 2, 600));
        // The next server process ignores changes after the last checkpoint.
        unmap(&mut memory, 20 * PAGE, PAGE);
        map(&mut memory, 7);
        map(&mut memory, 1001);
        let mut given = Descriptors::from(fds.into_fds());
        for (number, fd) in &retained {
            given.add_lasting(*number, fd.try_clone().unwrap());
        }
        let mut next = self::memory(2000);
        next.restore(serde_json::from_str(&saved).unwrap(), &mut given, &Arc::default()).unwrap();
        let expected: Vec<u64> = (0..600).filter(|n| *n != 7).chain([1000]).collect();
        let ranges: Vec<u64> = next.ranges.keys().map(|iova| iova / PAGE).collect();
        assert_eq!(ranges, expected);
        // A release of this program that does not know the field `written` must refuse the state.
        // Otherwise that release would serve a guest without memory.
        let mut before = serde_json::from_str::<serde_json::Value>(&saved).unwrap();
        before.as_object_mut().unwrap().remove("written").unwrap();
        let before = serde_json::from_value(before).unwrap();
        assert!(self::memory(2000).restore(before, &mut given, &Arc::default()).is_err());
        // When a client disconnects, all its lasting descriptors are removed.
        drop(memory.clear());
        let mut fds = Descriptors::default();
        assert!(memory.record(&mut fds).unwrap().written.is_none());
        let removed = fds.take_changes();
        assert_eq!(removed.len(), 600, "and no descriptor that was never stored");
        for change in removed {
            let LastingChange::Remove(number) = change else { panic!("{change:?}") };
            retained.remove(&number).unwrap();
        }
        assert!(retained.is_empty());
    }
}
