//! The client's memory, and when the controller may have it.

use super::files::{Bytes, Files, Parting};
use shadowbell_controller::Controller;
use shadowbell_memory::{DmaError, Protection};
use shadowbell_vfio_user::Errno;
use shadowbell_vfio_user::device::{DmaMap, Done};
use std::collections::BTreeMap;
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

/// The client's memory. The controller has it while bus mastering is on.
pub(super) struct Memory {
    controller: Controller,
    ranges: BTreeMap<u64, Range>,
    files: Files,
    /// The controller has all ranges that can be mapped.
    given: bool,
}

impl Memory {
    pub(super) fn new(controller: Controller) -> Self {
        Self { controller, ranges: BTreeMap::new(), files: Files::default(), given: false }
    }

    /// The client shares a range.
    pub(super) fn map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let outcome = self.try_map(&map);
        if let Some(fd) = map.fd.filter(|_| outcome.is_err()) {
            // Nobody else may have it.
            shadowbell_vfio_user::descriptor::let_go(fd);
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
        if let Some(bytes) = bytes.as_ref().filter(|_| self.given) {
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
        let parting: Parting = removed.filter_map(|range| range.bytes).collect();
        if parting.is_empty() || !self.given {
            return done.ok();
        }
        let shared = share(done);
        let ok = shared.clone();
        let gone = move || {
            ok(Ok(()));
            drop(parting);
        };
        if let Err(error) = self.controller.unmap_dma(iova, len, gone) {
            shared(Err(errno(&error)));
        }
    }

    /// The client takes everything back.
    pub(super) fn unmap_all(&mut self, done: Done) {
        let parting = self.part();
        self.controller.unmap_all(move || {
            done.ok();
            drop(parting);
        });
    }

    /// The client is gone; the controller is told otherwise. What is returned is to be held until it
    /// has let go.
    #[must_use]
    pub(super) fn forget(&mut self) -> Parting {
        self.given = false;
        self.part()
    }

    fn part(&mut self) -> Parting {
        std::mem::take(&mut self.ranges).into_values().filter_map(|range| range.bytes).collect()
    }

    pub(super) fn is_given(&self) -> bool {
        self.given
    }

    /// Lets the controller have the memory.
    pub(super) fn give(&mut self) {
        if std::mem::replace(&mut self.given, true) {
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

    /// Takes it away again: `done` when nothing touches it.
    pub(super) fn take(&mut self, done: Done) {
        self.take_later()(done);
    }

    /// The same, for later; from now on the controller counts as not having it.
    pub(super) fn take_later(&mut self) -> impl FnOnce(Done) + Send + 'static {
        self.given = false;
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

/// The same end of a request for two, of whom only one gets to use it.
fn share(done: Done) -> impl Fn(Result<(), Errno>) + Clone + Send + 'static {
    let done = std::sync::Arc::new(std::sync::Mutex::new(Some(done)));
    move |outcome| {
        let done = done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
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
