//! The client's memory, and when the controller may use it.

use super::files::Files;
use parking_lot::Mutex;
use shadowbell_controller::Controller;
use shadowbell_memory::{DmaError, DmaTable, Protection, SharedBytes};
use shadowbell_vfio_user::Errno;
use shadowbell_vfio_user::LogLimit;
use shadowbell_vfio_user::descriptor::Closer;
use shadowbell_vfio_user::device::{DmaMap, Done};
use std::collections::BTreeMap;
use std::sync::Arc;
use tracing::debug;

/// Most ranges that a client may share. A machine has a few dozen; with an emulated IOMMU a guest's
/// kernel shares page by page. As many as VFIO's own IOMMU driver takes.
pub(super) const MAX_RANGES: u32 = 65_535;

/// The smallest page of any host, in bytes.
const PAGE: u64 = 4096;

/// A range that the client shared.
struct Range {
    len: u64,
    /// Its bytes; `None` if it came without a descriptor, so that it can not be mapped.
    bytes: Option<SharedBytes>,
}

impl Range {
    fn last(&self, iova: u64) -> u64 {
        iova.saturating_add(self.len - 1)
    }
}

/// So many ranges are let go of in no time.
const FEW: usize = 256;

/// Memory that the client took back, and the map that it was in. What is left of it is unmapped by
/// the client's [`Closer`]; but letting go of tens of thousands of ranges takes a while, too.
pub(super) struct Released {
    ranges: BTreeMap<u64, Range>,
    table: Option<Arc<DmaTable>>,
    closer: Option<Arc<Closer>>,
}

impl Drop for Released {
    fn drop(&mut self) {
        if let Some(closer) = self.closer.take().filter(|_| self.ranges.len() > FEW) {
            let ranges = std::mem::take(&mut self.ranges);
            closer.drop_later(Box::new((ranges, self.table.take())));
        }
    }
}

/// The client's memory. The controller may use it while bus mastering is on.
pub(super) struct Memory {
    controller: Controller,
    ranges: BTreeMap<u64, Range>,
    files: Files,
    /// The controller may use all ranges that can be mapped.
    is_granted: bool,
    /// Ranges were added of which the controller does not know yet.
    is_unsettled: bool,
    closer: Option<Arc<Closer>>,
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
            is_unsettled: false,
            closer: None,
            log: LogLimit::default(),
        }
    }

    /// The controller may use everything that was mapped up to here.
    pub(super) fn settle(&mut self) {
        if std::mem::take(&mut self.is_unsettled) && self.is_granted {
            self.controller.settle_dma();
        }
    }

    /// The client shares a range; [`settle`](Self::settle) has to follow.
    pub(super) fn map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let DmaMap { iova, len, readable, writable, fd, fd_offset } = map;
        if self.ranges.len() >= MAX_RANGES as usize {
            self.log.warn(format_args!(
                "a client shares more than {MAX_RANGES} ranges of memory, which is refused"
            ));
            return Err(Errno::NOSPC);
        }
        let Some(last) = len.checked_sub(1).and_then(|len| iova.checked_add(len)) else {
            return Err(Errno::INVAL);
        };
        // As every IOMMU has it. What is aligned in the client's addresses, such as a queue, would
        // otherwise not be aligned in ours.
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
                self.closer = Some(Arc::clone(fd.closer()));
                let bytes = self.files.map(&Arc::new(fd), fd_offset, len, protection);
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
            self.is_unsettled = true;
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
        let ranges = if inside.len() <= FEW {
            inside.iter().filter_map(|start| self.ranges.remove_entry(start)).collect()
        } else {
            // One by one would take a while.
            let mut removed = self.ranges.split_off(&iova);
            if let Some(after) = last.checked_add(1) {
                self.ranges.append(&mut removed.split_off(&after));
            }
            removed
        };
        let released = self.release(ranges);
        if released.ranges.values().all(|range| range.bytes.is_none()) {
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

    fn release(&self, ranges: BTreeMap<u64, Range>) -> Released {
        let table = (ranges.len() > FEW).then(|| self.controller.dma_table());
        Released { ranges, table, closer: self.closer.clone() }
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
        self.is_unsettled = false;
        let ranges = std::mem::take(&mut self.ranges);
        self.release(ranges)
    }

    pub(super) fn is_granted(&self) -> bool {
        self.is_granted
    }

    /// Lets the controller use the memory.
    pub(super) fn grant(&mut self) {
        if !std::mem::replace(&mut self.is_granted, true) {
            self.is_unsettled = false;
            self.controller.enable_dma();
        }
    }

    /// Takes the memory away from the controller: `done` when nothing touches it.
    pub(super) fn revoke(&mut self, done: Done) {
        self.revoke_later()(done);
    }

    /// What takes the memory away from the controller when it is called. (Until then the controller
    /// may also get what is shared meanwhile.)
    pub(super) fn revoke_later(&mut self) -> impl FnOnce(Done) + Send + 'static {
        self.is_granted = false;
        let controller = self.controller.clone();
        move |done| controller.disable_dma(move || done.ok())
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
        bytes.read_into(offset, &mut copy).is_some() && copy.iter().all(|byte| *byte == 0)
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
