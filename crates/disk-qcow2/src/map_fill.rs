//! Fills the [`Map`](crate::map::Map) with clusters that the fast path may access.

use crate::image::Image;
use shadowbell_disk::{DiskError, Op, Request};

impl Image {
    /// Adds to the map the clusters of an executed request. If a part of the map is new, adds all
    /// clusters of the part.
    pub(crate) fn fill_map(&self, request: &Request) {
        if matches!(request.op, Op::Read | Op::Write { .. }) {
            // If the look-up fails, the clusters stay unmapped. The next request reports the error.
            let _ = self.contained(|| self.look_up(request));
        }
    }

    fn look_up(&self, request: &Request) -> Result<(), DiskError> {
        let Some(map) = &self.map else { return Ok(()) };
        // No cluster is closed or gets another location while this lock is held.
        let meta = &mut *self.format.meta();
        let Some(fill) = map.fill() else { return Ok(()) };
        let (layout, len) = (&self.format.layout, self.format.data().len());
        for cluster in fill.unknown(request.offset, request.len).into_iter().flatten() {
            let Ok(found) = self.format.look_up(meta, cluster) else { continue };
            let Some(host) = found.host.filter(|_| found.alloc == layout.all()) else { continue };
            // On a writable disk, a write to a shared cluster has to allocate a new one. So a
            // shared cluster is mapped only on a read-only disk.
            let may_stay = self.info.read_only || found.is_owned;
            // The last cluster may extend beyond the end of the disk. Only the used part must be in
            // the file.
            let used = layout.cluster().min(layout.size - (cluster << layout.bits));
            if may_stay && host.checked_add(used).is_some_and(|end| end <= len) {
                fill.add(cluster, host, self.writes_fast);
            }
        }
        Ok(())
    }
}
