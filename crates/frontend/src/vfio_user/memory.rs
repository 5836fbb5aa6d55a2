//! The client's memory, and when the controller may use it.

use super::files::{Bytes, Files, Released};
use parking_lot::Mutex;
use shadowbell_controller::Controller;
use shadowbell_memory::{DmaError, Protection};
use shadowbell_vfio_user::Errno;
use shadowbell_vfio_user::device::{DmaMap, Done};
use std::collections::BTreeMap;
use std::sync::Arc;
use tracing::{debug, warn};

/// Most ranges that a client may share. A machine has a few dozen; with an emulated IOMMU a guest's
/// kernel shares page by page. As many as VFIO's own IOMMU driver takes.
pub(super) const MAX_RANGES: u32 = 65_535;

/// The smallest page of any host, in bytes.
const PAGE: u64 = 4096;

/// A range that the client shared.
struct Range {
    len: u64,
    /// Its bytes; `None` if it came without a descriptor, so that it can not be mapped.
    bytes: Option<Bytes>,
}

impl Range {
    fn last(&self, iova: u64) -> u64 {
        iova.saturating_add(self.len - 1)
    }
}

/// The client's memory. The controller may use it while bus mastering is on.
pub(super) struct Memory {
    controller: Controller,
    ranges: BTreeMap<u64, Range>,
    files: Files,
    /// The controller may use all ranges that can be mapped.
    is_granted: bool,
}

impl Memory {
    pub(super) fn new(controller: Controller) -> Self {
        Self { controller, ranges: BTreeMap::new(), files: Files::default(), is_granted: false }
    }

    /// The client shares a range.
    pub(super) fn map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let outcome = self.try_map(&map);
        if let Some(fd) = map.fd.filter(|_| outcome.is_err()) {
            // Nobody else may have it.
            shadowbell_vfio_user::descriptor::close_file(fd);
        }
        outcome
    }

    fn try_map(&mut self, map: &DmaMap) -> Result<(), Errno> {
        let DmaMap { iova, len, readable, writable, ref fd, fd_offset } = *map;
        if self.ranges.len() >= MAX_RANGES as usize {
            warn!("a client shares more than {MAX_RANGES} ranges of memory, which is refused");
            return Err(Errno::NOSPC);
        }
        let Some(last) = len.checked_sub(1).and_then(|len| iova.checked_add(len)) else {
            return Err(Errno::INVAL);
        };
        // As every IOMMU has it. What is aligned in the client's addresses, such as a queue, would
        // otherwise not be aligned in ours.
        if !iova.is_multiple_of(PAGE) {
            warn!("a client shares memory at IOVA {iova:#x}, which is no multiple of {PAGE}");
            return Err(Errno::INVAL);
        }
        let below = self.ranges.range(..=last).next_back();
        if below.is_some_and(|(start, range)| range.last(*start) >= iova) {
            return Err(Errno::EXIST);
        }
        let protection = match (readable, writable) {
            (_, true) => Protection::ReadWrite,
            (true, false) => Protection::Read,
            (false, false) => return Err(Errno::INVAL),
        };
        let bytes = match fd {
            None => {
                debug!("{len:#x} bytes at IOVA {iova:#x} came without a descriptor");
                None
            }
            Some(fd) => {
                let bytes = self.files.map(fd, fd_offset, len, protection);
                Some(bytes.map_err(|error| {
                    warn!("memory that the client shares at IOVA {iova:#x}: {error}");
                    error.errno()
                })?)
            }
        };
        if let Some(bytes) = bytes.as_ref().filter(|_| self.is_granted) {
            self.controller.map_dma(iova, len, bytes.shared()).map_err(|error| errno(&error))?;
        }
        self.ranges.insert(iova, Range { len, bytes });
        Ok(())
    }

    /// The client takes a range back, or all that lie in it: `done` when nothing touches them.
    pub(super) fn unmap(&mut self, iova: u64, len: u64, done: Done) {
        let Some(last) = len.checked_sub(1).and_then(|len| iova.checked_add(len)) else {
            return done.complete(Err(Errno::INVAL));
        };
        let before = self.ranges.range(..iova).next_back();
        let tail = self.ranges.range(iova..=last).next_back();
        // A range is given back as a whole (as VFIO_IOMMU_UNMAP_DMA of type 1 version 2).
        if before.is_some_and(|(start, range)| range.last(*start) >= iova)
            || tail.is_some_and(|(start, range)| range.last(*start) > last)
        {
            return done.complete(Err(Errno::INVAL));
        }
        let inside: Vec<u64> = self.ranges.range(iova..=last).map(|(start, _)| *start).collect();
        if inside.is_empty() {
            return done.complete(Err(Errno::NOENT));
        }
        let removed = inside.iter().filter_map(|start| self.ranges.remove(start));
        let released: Released = removed.filter_map(|range| range.bytes).collect();
        if released.is_empty() || !self.is_granted {
            return done.ok();
        }
        let shared = share(done);
        let ok = shared.clone();
        let gone = move || {
            ok(Ok(()));
            drop(released);
        };
        if let Err(error) = self.controller.unmap_dma(iova, len, gone) {
            shared(Err(errno(&error)));
        }
    }

    /// The client takes everything back.
    pub(super) fn unmap_all(&mut self, done: Done) {
        let released = self.take_ranges();
        self.controller.unmap_all(move || {
            done.ok();
            drop(released);
        });
    }

    /// The client is gone. The controller does not learn it from here; what is returned is to be
    /// held until it no longer touches the memory.
    #[must_use]
    pub(super) fn clear(&mut self) -> Released {
        self.is_granted = false;
        self.take_ranges()
    }

    fn take_ranges(&mut self) -> Released {
        std::mem::take(&mut self.ranges).into_values().filter_map(|range| range.bytes).collect()
    }

    pub(super) fn is_granted(&self) -> bool {
        self.is_granted
    }

    /// Lets the controller use the memory.
    pub(super) fn grant(&mut self) {
        if std::mem::replace(&mut self.is_granted, true) {
            return;
        }
        let ranges = self.ranges.iter().filter_map(|(iova, range)| {
            let bytes = range.bytes.as_ref()?;
            Some((*iova, range.len, bytes.shared()))
        });
        self.controller.map_dma_all(ranges, |iova, error| {
            warn!("memory at IOVA {iova:#x} can not be used: {error}");
        });
    }

    /// Takes the memory away from the controller: `done` when nothing touches it.
    pub(super) fn revoke(&mut self, done: Done) {
        self.revoke_later()(done);
    }

    /// What takes the memory away from the controller when it is called. From now on, ranges that
    /// the client shares are not mapped for the controller any more.
    pub(super) fn revoke_later(&mut self) -> impl FnOnce(Done) + Send + 'static {
        self.is_granted = false;
        let controller = self.controller.clone();
        move |done| controller.unmap_all(move || done.ok())
    }

    /// Whether the client shared memory, and none of it can be mapped.
    pub(super) fn is_all_unusable(&self) -> bool {
        !self.ranges.is_empty() && self.ranges.values().all(|range| range.bytes.is_none())
    }

    /// Whether `len` bytes at `iova` can be read, and all are zero.
    pub(super) fn is_zero(&self, iova: u64, len: usize) -> bool {
        let Some((start, range)) = self.ranges.range(..=iova).next_back() else { return false };
        let Some(bytes) = &range.bytes else { return false };
        let Ok(offset) = usize::try_from(iova - start) else { return false };
        let mut copy = vec![0xff; len];
        bytes.shared().read_into(offset, &mut copy).is_some() && copy.iter().all(|byte| *byte == 0)
    }
}

/// The [`Done`] of a request for two, of which the first to use it completes it.
fn share(done: Done) -> impl Fn(Result<(), Errno>) + Clone + Send + 'static {
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
