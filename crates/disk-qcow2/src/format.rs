//! qcow2 format: look-up of clusters, reads, and closing. Writes are in [`write`](crate::write).

use crate::compressed::inflate;
use crate::header::Header;
use crate::map::Map;
use crate::refcount::Refcounts;
use crate::snapshot::Snapshot;
use crate::storage::FileStorage;
use crate::tables::{CACHE, COPIED, Cache, Cluster, Layout, OFFSET, damaged, for_each_entry};
use parking_lot::{Mutex, MutexGuard};
use shadowbell_disk_file::{BytesLock, BytesLocks};
use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Maximum number of clusters that are looked up at once.
const MOST: u64 = 4096;
/// Maximum number of clusters that contain tables. The set of their numbers has at most 72 MiB.
const MOST_TABLES: usize = 6 << 20;
/// Limit of the size of all tables in bytes: `DENSITY` times the space that the file occupies in
/// its file system, plus `HOLES`.
const DENSITY: u64 = 64;
const HOLES: u64 = 64 << 20;

/// Open image, or backing file, in the qcow2 format.
pub(crate) struct Format {
    pub(crate) header: Header,
    pub(crate) layout: Layout,
    pub(crate) file: FileStorage,
    /// External data file.
    pub(crate) data_file: Option<FileStorage>,
    base: Option<Base>,
    meta: Mutex<Meta>,
    /// Last decompressed cluster: its L2 entry and its content.
    inflated: Mutex<Option<(u64, Arc<Vec<u8>>)>>,
    /// Map of the fast path, if there is one.
    pub(crate) map: OnceLock<Arc<Map>>,
    /// Range locks of the data, if the disk has a fast path that needs them.
    pub(crate) locks: OnceLock<BytesLocks>,
}

/// Tables of an image.
pub(crate) struct Meta {
    pub(crate) cache: Cache,
    pub(crate) counts: Refcounts,
}

/// Backing file.
pub(crate) enum Base {
    Raw(FileStorage),
    Qcow2(Box<Format>),
}

/// Range of the disk whose content is of one kind and, if in the file, contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Data at this offset of the file.
    Data(u64),
    Zero,
    /// Data of the backing file.
    Base,
    /// Compressed cluster with this L2 entry.
    Packed(u64),
    /// The L2 entry is damaged.
    Bad,
}

impl Format {
    /// Creates the format of an image whose `header` was checked before.
    pub(crate) fn new(
        header: Header,
        file: FileStorage,
        data_file: Option<FileStorage>,
        base: Option<Base>,
    ) -> Self {
        let meta = Meta { cache: Cache::new(header.cluster_bits), counts: Refcounts::new(&header) };
        let layout = Layout::new(&header);
        let (meta, inflated) = (Mutex::new(meta), Mutex::default());
        Self {
            header,
            layout,
            file,
            data_file,
            base,
            meta,
            inflated,
            map: OnceLock::new(),
            locks: OnceLock::new(),
        }
    }

    /// Divides the size of one cache among the caches of the `count` backing files.
    pub(crate) fn limit_caches(&self, count: usize) {
        let mut base = &self.base;
        while let Some(Base::Qcow2(format)) = base {
            format.meta().cache.limit(CACHE / count.max(1) as u64);
            base = &format.base;
        }
    }

    /// Locks the tables.
    pub(crate) fn meta(&self) -> MutexGuard<'_, Meta> {
        self.meta.lock()
    }

    /// File with the data of the guest.
    pub(crate) fn data(&self) -> &FileStorage {
        self.data_file.as_ref().unwrap_or(&self.file)
    }

    pub(crate) fn has_base(&self) -> bool {
        self.base.is_some()
    }

    /// Prepares the image for changes: reads the refcount table, and records the clusters of the
    /// header and of all tables, so that these clusters are never used for data. Returns the defect
    /// if two tables have the same location, or if there are too many tables.
    pub(crate) fn protect_tables(&self, snapshots: &[Snapshot]) -> io::Result<Result<(), String>> {
        let (bits, header) = (self.header.cluster_bits, &self.header);
        let counts = &mut self.meta().counts;
        counts.read(&self.file, header)?;
        let is_place = |at: u64| at != 0 && at.is_multiple_of(1 << bits) && at < self.file.len();
        let of = |offset: u64, len: u64| offset >> bits..(offset + len).div_ceil(1 << bits);
        let blocks: Vec<u64> = counts.blocks().collect();
        if !blocks.iter().all(|at| is_place(*at)) {
            return Ok(Err("one of its refcount blocks is at an invalid offset".to_owned()));
        }
        let snapshot_table = of(header.snapshots.0, Snapshot::table_len(snapshots));
        let all = (0..1)
            .chain(of(header.l1.offset, header.l1.entries * 8))
            .chain(of(header.refcounts.offset, header.refcounts.entries * 8))
            .chain(snapshot_table)
            .chain(snapshots.iter().flat_map(|it| of(it.l1.offset, it.l1.entries * 8)));
        let tables = &mut counts.tables;
        let mut defect = None;
        let mut add = |cluster: u64| {
            if tables.len() >= MOST_TABLES {
                defect = Some(format!("it has more than {MOST_TABLES} clusters with tables"));
            } else if !tables.insert(cluster) {
                defect = Some(format!("two of its tables are at byte {}", cluster << bits));
            }
            defect.is_none()
        };
        let is_sound = all.chain(blocks.iter().map(|at| at >> bits)).all(&mut add)
            && for_each_entry(&self.file, header.l1, |entry| {
                !is_place(entry & OFFSET) || add((entry & OFFSET) >> bits)
            })?;
        if is_sound && tables.len() as u64 > self.max_tables()? {
            defect = Some("it refers to more tables than fit into its file".to_owned());
        }
        Ok(defect.map_or(Ok(()), Err))
    }

    /// Maximum number of clusters with tables, by the space that the file occupies. Without this
    /// limit, a small file could refer to very many tables in holes, and reading them would take
    /// very long. The limit is generous, because valid tables occupy little space if they are empty
    /// or if the file system compresses them.
    pub(crate) fn max_tables(&self) -> io::Result<u64> {
        let bytes = self.file.occupied()?.saturating_mul(DENSITY).saturating_add(HOLES);
        Ok(bytes >> self.header.cluster_bits)
    }

    /// Offset of the L2 table with the entry of a cluster, if there is one. Also returns true if no
    /// snapshot shares the table.
    pub(crate) fn table(&self, meta: &mut Meta, cluster: u64) -> io::Result<Option<(u64, bool)>> {
        let entry = meta.cache.number(&self.file, self.l1_entry(cluster)?)?;
        match entry & OFFSET {
            0 => Ok(None),
            at if at.is_multiple_of(self.layout.cluster()) && at < self.file.len() => {
                Ok(Some((at, entry & COPIED != 0)))
            }
            _ => Err(damaged("an L2 table at an invalid offset")),
        }
    }

    /// Offset of the L1 entry of a cluster.
    pub(crate) fn l1_entry(&self, cluster: u64) -> io::Result<u64> {
        let (l1, nth) = (self.header.l1, cluster / self.layout.per_table());
        match nth < l1.entries {
            true => Ok(l1.offset + nth * 8),
            false => Err(damaged("an L1 table that is too short")),
        }
    }

    /// Looks a cluster of the disk up.
    ///
    /// # Errors
    /// The entry is damaged, or its table cannot be read.
    pub(crate) fn look_up(&self, meta: &mut Meta, cluster: u64) -> io::Result<Cluster> {
        let Some((table, is_owned)) = self.table(meta, cluster)? else {
            return Ok(Cluster::default());
        };
        let at = table + cluster % self.layout.per_table() * self.layout.entry;
        let entry = meta.cache.number(&self.file, at)?;
        let bitmap =
            if self.layout.units > 1 { meta.cache.number(&self.file, at + 8)? } else { 0 };
        let (bits, tables) = (self.layout.bits, &meta.counts.tables);
        let fixed = self.data_file.is_some().then_some(cluster << bits);
        let mut found = Cluster::decode((entry, bitmap), &self.layout, fixed)?;
        found.is_owned &= is_owned;
        let (clusters, start) = match (found.packed, found.host) {
            (Some(entry), _) => {
                let (clusters, bytes) = self.layout.compressed(entry);
                (clusters, bytes.start)
            }
            (None, Some(host)) if fixed.is_none() => (host >> bits..(host >> bits) + 1, host),
            _ => return Ok(found),
        };
        if start >= self.file.len() {
            return Err(damaged("a cluster beyond the end of the file"));
        }
        if clusters.into_iter().any(|cluster| tables.contains(&cluster)) {
            return Err(damaged("a table as data"));
        }
        Ok(found)
    }

    /// Splits a range of the disk into runs of one kind of content, in order. Covers at most
    /// [`MOST`] clusters, so the result may end before the range.
    pub(crate) fn runs(&self, offset: u64, len: u64) -> Vec<Run> {
        let (layout, end) = (&self.layout, offset + len);
        let meta = &mut *self.meta();
        let mut runs: Vec<Run> = Vec::new();
        let mut add = |run: Run| match runs.last_mut() {
            Some(last) if last.is_before(&run) => last.len += run.len,
            _ => runs.push(run),
        };
        let first = offset >> layout.bits;
        for cluster in first..end.div_ceil(layout.cluster()).min(first + MOST) {
            let base = cluster << layout.bits;
            let (from, to) = (offset.max(base), end.min(base + layout.cluster()));
            let found = match self.look_up(meta, cluster) {
                Ok(found) => found,
                Err(_) => {
                    add(Run { offset: from, len: to - from, kind: Kind::Bad });
                    continue;
                }
            };
            if let Some(entry) = found.packed {
                add(Run { offset: from, len: to - from, kind: Kind::Packed(entry) });
                continue;
            }
            let mut at = from;
            while at < to {
                let nth = (at - base) / layout.unit();
                let next = to.min(base + (nth + 1) * layout.unit());
                let kind = match found.host {
                    Some(host) if found.alloc >> nth & 1 != 0 => Kind::Data(host + at - base),
                    _ if found.zero >> nth & 1 != 0 || !self.is_in_base(at) => Kind::Zero,
                    _ => Kind::Base,
                };
                add(Run { offset: at, len: next - at, kind });
                at = next;
            }
        }
        runs
    }

    /// Locks a range of the file with the data: other requests of the slow path and of the fast
    /// path that overlap it wait. So blocks are read and written atomically.
    pub(crate) fn lock_data(&self, host: u64, len: u64, writes: bool) -> Option<BytesLock> {
        Some(self.locks.get()?.lock(host, len, writes))
    }

    /// True if the backing file has a byte at this offset.
    fn is_in_base(&self, offset: u64) -> bool {
        match &self.base {
            Some(Base::Raw(file)) => offset < file.len(),
            Some(Base::Qcow2(format)) => offset < format.header.size,
            None => false,
        }
    }

    /// Fills `into` with the content of the disk. Bytes beyond its end are zeroes.
    pub(crate) fn read(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let len = into.len().min(self.header.size.saturating_sub(offset) as usize);
        into[len..].fill(0);
        let mut done = 0;
        while done < len {
            for run in self.runs(offset + done as u64, (len - done) as u64) {
                let piece = &mut into[done..done + run.len as usize];
                match run.kind {
                    Kind::Data(host) => {
                        let _lock = self.lock_data(host, run.len, false);
                        self.data().read(piece, host)?;
                    }
                    Kind::Zero => piece.fill(0),
                    Kind::Base => self.read_base(piece, run.offset)?,
                    Kind::Packed(entry) => {
                        let from = (run.offset & (self.layout.cluster() - 1)) as usize;
                        let cluster = self.inflate(entry)?;
                        piece.copy_from_slice(&cluster[from..from + run.len as usize]);
                    }
                    Kind::Bad => {
                        // The look-up is repeated only to return its error, which the run does not
                        // contain.
                        self.look_up(&mut self.meta(), run.offset >> self.layout.bits)?;
                        return Err(damaged("a damaged L2 entry"));
                    }
                }
                done += run.len as usize;
            }
        }
        Ok(())
    }

    fn read_base(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        match &self.base {
            Some(Base::Raw(file)) => file.read(into, offset),
            Some(Base::Qcow2(format)) => format.read(into, offset),
            None => {
                into.fill(0);
                Ok(())
            }
        }
    }

    /// Returns the content of a compressed cluster.
    fn inflate(&self, entry: u64) -> io::Result<Arc<Vec<u8>>> {
        if let Some((other, cluster)) = &*self.inflated.lock()
            && *other == entry
        {
            return Ok(Arc::clone(cluster));
        }
        let bytes = self.layout.compressed(entry).1;
        let mut packed = vec![0; (bytes.end - bytes.start) as usize];
        self.file.read(&mut packed, bytes.start)?;
        let cluster = inflate(packed, self.header.is_zstd, self.layout.cluster() as usize)?;
        let cluster = Arc::new(cluster);
        *self.inflated.lock() = Some((entry, Arc::clone(&cluster)));
        Ok(cluster)
    }

    /// Calls `tell` for each part of a range in order, with its length and a flag that is true if
    /// the part is allocated in the image or in a backing file. Stops if `tell` returns false.
    pub(crate) fn extents(
        &self,
        range: Range<u64>,
        tell: &mut dyn FnMut(u64, bool) -> bool,
    ) -> bool {
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(self.header.size);
            if at >= end {
                return tell(range.end - at, false);
            }
            for run in self.runs(at, end - at) {
                let goes_on = match (run.kind, &self.base) {
                    (Kind::Base, Some(Base::Qcow2(format))) => {
                        format.extents(run.offset..run.offset + run.len, tell)
                    }
                    (kind, _) => tell(run.len, kind != Kind::Zero),
                };
                if !goes_on {
                    return false;
                }
                at = run.offset + run.len;
            }
        }
        true
    }

    /// Makes all completed writes durable, and then releases the clusters that were freed before
    /// the sync.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let freed = self.meta().counts.take_freed();
        let data = self.data_file.as_ref().map_or(Ok(()), FileStorage::sync);
        let synced = data.and_then(|()| self.file.sync());
        let meta = &mut *self.meta();
        if synced.is_err() {
            meta.counts.keep_freed(freed);
            return synced;
        }
        if let Err(error) = meta.counts.release(&self.file, &mut meta.cache, freed) {
            // Only the release of freed clusters has failed; they leak. The data are durable, so
            // the sync itself succeeds. If the error persists, the next change of the image reports
            // it.
            tracing::warn!("unused clusters of a qcow2 image could not be released: {error}");
        }
        Ok(())
    }

    /// True if the reserve is empty. False if another thread holds the lock of the tables.
    pub(crate) fn is_settled(&self) -> bool {
        self.meta.try_lock().is_some_and(|meta| !meta.counts.has_reserve())
    }

    /// Releases the reserve: the clusters that are counted for later allocations.
    pub(crate) fn return_reserve(&self) -> io::Result<()> {
        let meta = &mut *self.meta();
        meta.counts.return_reserve(&self.file, &mut meta.cache).map(drop)
    }

    /// Releases the freed clusters and the reserve.
    pub(crate) fn settle(&self) -> io::Result<()> {
        let meta = &mut *self.meta();
        meta.counts.close(&self.file, &mut meta.cache)
    }
}

impl Run {
    /// True if `next` continues this run.
    fn is_before(&self, next: &Run) -> bool {
        match (self.kind, next.kind) {
            (Kind::Data(host), Kind::Data(other)) => host + self.len == other,
            (Kind::Packed(_), _) => false,
            (kind, other) => kind == other,
        }
    }
}
