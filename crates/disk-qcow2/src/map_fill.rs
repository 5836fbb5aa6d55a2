//! Fills the [`Map`](crate::map::Map) with clusters that the fast path may access.

use crate::image::{Image, access, error_of};
use imago::ShallowMapping;
use shadowbell_disk::{DiskError, Op, Request};
use std::sync::atomic::Ordering;

/// Maximum number of clusters that the fast path may write only after their tables are written.
const MAX_UNSAVED: usize = 1 << 16;

impl Image {
    /// Adds the clusters of an executed request, and their neighbours, to the map.
    pub(crate) fn fill_map(&self, request: &Request) {
        if matches!(request.op, Op::Read | Op::Write { .. }) {
            // If the look-up fails, the clusters stay unmapped. The next request reports the error.
            let _ = self.contained(|| self.look_up(request));
        }
    }

    fn look_up(&self, request: &Request) -> Result<(), DiskError> {
        let Some(map) = &self.map else { return Ok(()) };
        // No cluster is closed while this lock is held.
        let format = self.format.read();
        let format = access(&format)?;
        // If another thread is adding entries, the clusters of this request stay unmapped.
        let Some(fill) = map.fill() else { return Ok(()) };
        let (bits, size) = (self.header.cluster_bits, self.header.size);
        for range in fill.unknown(request.offset, request.len) {
            let (mut at, end) = (range.start << bits, (range.end << bits).min(size));
            while at < end {
                let found = format.get_shallow_mapping(at, end - at);
                let (mapping, there) = found.map_err(|error| error_of(&error))?;
                if there == 0 {
                    break;
                }
                if let ShallowMapping::Raw { offset: host, writable, .. } = mapping {
                    for cluster in map.clusters(at, there) {
                        let nth = (cluster << bits) - at;
                        if self.may_be_mapped(cluster, host + nth, writable) {
                            let writes = writable && self.may_write(cluster);
                            fill.add(cluster, host + nth, writes);
                        }
                    }
                }
                at += there;
            }
        }
        Ok(())
    }

    /// True if the fast path can read this cluster of the disk at byte `host` of the file.
    fn may_be_mapped(&self, cluster: u64, host: u64, writable: bool) -> bool {
        let bits = self.header.cluster_bits;
        // The last cluster may extend beyond the end of the disk. Only the used part must be in the
        // file.
        let used = (1 << bits).min(self.header.size - (cluster << bits));
        // A write moves a shared cluster to a new location, so a shared cluster is not mapped on a
        // writable disk.
        (writable || self.info.read_only)
            && host.is_multiple_of(1 << bits)
            && host.checked_add(used).is_some_and(|end| end <= self.longest())
    }

    /// True if the fast path may also write this unshared cluster. With checkpoints, the next
    /// process must find a completed write, so the table that refers to the cluster has to be in
    /// the file first.
    fn may_write(&self, cluster: u64) -> bool {
        if self.info.read_only || !self.is_sound {
            return false;
        }
        if !self.waits_for_tables() {
            return true;
        }
        let mut unsaved = self.unsaved.lock();
        if unsaved.len() < MAX_UNSAVED {
            unsaved.push(cluster);
        }
        false
    }

    /// Allows fast-path writes to clusters whose tables were just written. The caller prevents
    /// changes of tables.
    pub(crate) fn tables_are_saved(&self) {
        let Some(map) = &self.map else { return };
        self.unsaved.lock().drain(..).for_each(|cluster| map.allow_writes(cluster));
    }

    /// True if the fast path is usable. For `writes`, the function also checks the file length by a
    /// system call.
    pub(crate) fn is_as_left(&self, writes: bool) -> bool {
        !self.broken.load(Ordering::Relaxed) && (!writes || self.check().is_ok())
    }
}

#[cfg(test)]
mod tests {
    use crate::image::{ALIGNMENT, Image};
    use crate::open::{ByPath, open};
    use imago::io_buffers::IoBuffer;
    use shadowbell_disk::{DiskInfo, Op, Request};
    use shadowbell_disk_file::FileOptions;

    /// After a write has allocated a cluster, a second write to it has to wait for the tables too.
    /// So the second write takes the slow path until the tables are written.
    #[test]
    fn a_cluster_takes_the_fast_path_after_its_table_is_written() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = directory.path().join("disk.qcow2");
        crate::create(&path, 64 << 20).unwrap();
        let opened = open(&path, &FileOptions::default(), &mut ByPath).unwrap();
        let image = Image::new(opened, DiskInfo::new(512, (64 << 20) / 512), String::new());
        let map = image.map.as_ref().unwrap();
        let known = |at: u64| [false, true].map(|writes| map.enter(at, 512, writes).is_some());
        let write = |at: u64| {
            let mut buffer = IoBuffer::new(4096, ALIGNMENT).unwrap();
            buffer.as_mut().into_slice().fill(7);
            let request = Request { op: Op::Write { fua: false }, offset: at, len: 4096 };
            image.run(&request, Some(&mut buffer)).unwrap();
        };
        write(0);
        assert_eq!(known(0), [true, true], "without checkpoints");
        image.last().unwrap();
        assert_eq!(known(0), [true, true], "its table is in the file");
        write(1 << 20);
        assert_eq!(known(1 << 20), [true, false]);
        write((1 << 20) + 4096);
        assert_eq!(known(1 << 20), [true, false]);
        image.write_back().unwrap();
        assert_eq!(known(1 << 20), [true, true]);
    }
}
