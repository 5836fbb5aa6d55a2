//! Layer that divides a disk into zones.

use super::queue::ZonedQueue;
use super::table::{Found, Layout, Table};
use super::zones::ZoneSet;
use shadowbell_disk::{
    Disk, DiskInfo, Extent, Queue, ReportExtent, ResizeError, ZoneFormat, Zones,
};
use std::io;
use std::sync::Arc;

/// Zoned disk (ZNS) on another disk. The other disk must be memory or a raw image. The first part
/// of the disk below contains the zone table.
#[derive(Clone, Debug)]
pub struct ZonedDisk {
    inner: Arc<dyn Disk>,
    zones: Arc<ZoneSet>,
}

impl ZonedDisk {
    /// Opens the zones on `disk`, or creates them if the first page is zero. Open zones become
    /// closed, as after a power cycle. If `recovers` is true, they stay open, because this process
    /// continues the disk of another one, and the host must not notice that.
    ///
    /// # Errors
    /// A sentence with the reason.
    pub fn new(disk: Arc<dyn Disk>, format: ZoneFormat, recovers: bool) -> Result<Self, String> {
        let info = disk.info();
        let name = disk.name();
        let invalid = |why: String| format!("{name}: {why}");
        format.check(info.block_size).map_err(invalid)?;
        if info.metadata.is_some() {
            return Err(invalid("a zoned disk cannot have metadata".to_owned()));
        }
        let cannot_map = || invalid("only memory and raw images can have zones".to_owned());
        let page = disk.map(Table::HEADER_BYTES).ok_or_else(cannot_map)?;
        let (layout, is_new) = match Table::find(&page, format, info.block_size) {
            Found::Else(why) => return Err(invalid(why)),
            Found::Zones(layout) => (layout, false),
            Found::Nothing => {
                let fitting = Layout::fitting(format, info.block_size, info.bytes());
                let layout =
                    fitting.ok_or_else(|| invalid("it is too small for a zone".to_owned()))?;
                (layout, true)
            }
        };
        if !layout.fits(info.bytes()) {
            return Err(invalid("it is smaller than when its zones were created".to_owned()));
        }
        let memory = disk.map(layout.table_bytes()).ok_or_else(cannot_map)?;
        let table = Table::new(layout, memory);
        if is_new && table.create().is_none() {
            return Err(invalid("zones cannot be created, because it is read-only".to_owned()));
        }
        let zones = Arc::new(ZoneSet::new(table, recovers));
        Ok(Self { inner: disk, zones })
    }

    /// Message about damaged entries of the zone table, if any.
    #[must_use]
    pub fn damaged(&self) -> Option<String> {
        let (name, damaged) = (self.name(), self.zones.damaged);
        let sentence =
            format!("{name}: the stored state of {damaged} zones is damaged: they are read-only");
        (damaged != 0).then_some(sentence)
    }
}

impl Disk for ZonedDisk {
    fn info(&self) -> DiskInfo {
        let (layout, inner) = (self.zones.layout(), self.inner.info());
        let bytes = layout.zones * layout.format.size;
        DiskInfo {
            blocks: bytes / u64::from(inner.block_size),
            granularity: 1,
            zoned: Some(layout.format),
            ..inner
        }
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        let (queue, zones) = (self.inner.queue()?, Arc::clone(&self.zones));
        Ok(Box::new(ZonedQueue::new(queue, zones, &self.info())?))
    }

    fn inner(&self) -> Option<&Arc<dyn Disk>> {
        Some(&self.inner)
    }

    fn queue_files(&self) -> u64 {
        // This layer adds an eventfd, and an epoll descriptor that merges it with the timer of the
        // inner queue.
        self.inner.queue_files() + 2
    }

    fn name(&self) -> String {
        self.inner.name()
    }

    fn extents(&self, offset: u64, len: u64, report: &mut ReportExtent<'_>) {
        let (mut at, end) = (offset, offset.saturating_add(len));
        let size = self.zones.format().size;
        while at < end {
            // At most one zone is looked up per step, so the time between two calls of `report` is
            // bounded.
            let to = end.min((at / size + 1) * size);
            let written = self.zones.written(at, to - at, false).unwrap_or_default();
            let data = written.first().map_or(0, |piece| piece.len);
            for extent in [Extent::data(data), Extent::hole(to - at - data)] {
                if extent.len != 0 && !report(extent) {
                    return;
                }
            }
            at = to;
        }
    }

    fn resized(&self, _: Option<u64>) -> Result<Arc<dyn Disk>, ResizeError> {
        Err(ResizeError::Zoned { disk: self.name() })
    }

    fn with_writes(&self, taken: bool) -> Result<Arc<dyn Disk>, ResizeError> {
        let inner = self.inner.with_writes(taken)?;
        Ok(Arc::new(Self { inner, zones: Arc::clone(&self.zones) }))
    }
}
