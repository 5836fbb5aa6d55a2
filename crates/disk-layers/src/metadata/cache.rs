//! Write-through cache of stored metadata.
//!
//! The disk below always holds the cached content too. The disk below must have no other writer,
//! because the cache is updated only by reads and writes through this layer. If another process has
//! used the disk, the cache is emptied.

use super::layout::Location;
use parking_lot::Mutex;
use shadowbell_memory::SharedBytes;

/// Maximum number of cached metadata bytes per disk. They cover 8 GiB of data, with blocks of 4096
/// bytes that have 8 bytes of metadata each.
const BYTES: u64 = 16 << 20;
/// Maximum number of blocks of stored metadata that one read adds to the cache. A read of more
/// blocks adds only the first ones.
const MAX_ZONES: usize = 8;
/// Block number of an empty line.
const NONE: u64 = u64::MAX;

/// Cache line, for one block of the disk below at a time. Blocks with the same index modulo the
/// number of lines compete for it.
#[derive(Debug)]
struct Line {
    block: u64,
    /// Number of completed writes to the blocks of this line, plus the number of invalidations.
    version: u32,
    bytes: Box<[u8]>,
}

/// Versions of a request's cache lines, as they were before the request read the disk below.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Versions([u32; MAX_ZONES]);

/// Direct-mapped cache of the metadata blocks of the disk below.
#[derive(Debug)]
pub(super) struct Cache {
    block_size: usize,
    lines: Box<[Mutex<Line>]>,
}

impl Cache {
    /// Creates the cache for a disk with `blocks` metadata blocks.
    pub(super) fn new(block_size: u32, blocks: u64) -> Self {
        let lines = (BYTES / u64::from(block_size)).min(blocks).max(1);
        let line = |_| Mutex::new(Line { block: NONE, version: 0, bytes: Box::default() });
        Self { block_size: block_size as usize, lines: (0..lines).map(line).collect() }
    }

    fn line(&self, block: u64) -> &Mutex<Line> {
        // The index is valid: there is at least one line, and the index is the remainder.
        &self.lines[(block % self.lines.len() as u64) as usize]
    }

    fn blocks(&self, location: &Location) -> impl Iterator<Item = (usize, u64)> + use<> {
        let block = self.block_size as u64;
        (0..).zip(location.from / block..location.to / block)
    }

    /// Copies the metadata of `location` into `stored`, at the offset where a read of the disk
    /// below would put them. With `neighbours`, copies the whole blocks that contain these
    /// metadata. Returns false if not all of the bytes are cached.
    pub(super) fn load(&self, location: &Location, neighbours: bool, stored: &SharedBytes) -> bool {
        let wanted =
            if neighbours { 0..usize::MAX } else { location.at..location.at + location.len };
        self.blocks(location).all(|(nth, block)| {
            let start = nth * self.block_size;
            let from = wanted.start.max(start) - start;
            let to = wanted.end.min(start + self.block_size) - start;
            let line = self.line(block).lock();
            let bytes = line.bytes.get(from..to).filter(|_| line.block == block);
            bytes.is_some_and(|bytes| stored.write_from(start + from, bytes).is_some())
        })
    }

    /// Returns the versions of the cache lines of `location`. The caller reads the disk below
    /// afterwards.
    pub(super) fn versions(&self, location: &Location) -> Versions {
        let mut versions = Versions::default();
        for ((_, block), version) in self.blocks(location).zip(&mut versions.0) {
            *version = self.line(block).lock().version;
        }
        versions
    }

    /// Caches the blocks of `location` after a read, except those that were written after
    /// `versions` were taken. If a write is in flight, its end will update the cache.
    pub(super) fn was_read(&self, location: &Location, versions: &Versions, stored: &SharedBytes) {
        for ((nth, block), version) in self.blocks(location).zip(&versions.0) {
            let mut line = self.line(block).lock();
            if line.version == *version {
                self.keep(&mut line, block, nth, stored);
            }
        }
    }

    /// Updates the cache after a write of the metadata of `location`. No other write to the same
    /// blocks may be in flight. `stored` is `None` if the write failed or its result is unknown.
    /// With `neighbours`, `stored` holds whole blocks of the disk below; otherwise only the bytes
    /// of `location` are valid.
    pub(super) fn was_written(
        &self,
        location: &Location,
        neighbours: bool,
        stored: Option<&SharedBytes>,
    ) {
        for (nth, block) in self.blocks(location) {
            let mut line = self.line(block).lock();
            line.version = line.version.wrapping_add(1);
            let is_cached_block = line.block == block;
            match stored {
                Some(stored) if is_cached_block => {
                    let start = nth * self.block_size;
                    let from = location.at.max(start) - start;
                    let to = (location.at + location.len).min(start + self.block_size) - start;
                    let own = line.bytes.get_mut(from..to);
                    let kept = own.and_then(|own| stored.read_into(start + from, own));
                    if kept.is_none() {
                        line.block = NONE;
                    }
                }
                Some(stored) if neighbours => self.keep(&mut line, block, nth, stored),
                None if is_cached_block => line.block = NONE,
                _ => {}
            }
        }
    }

    fn keep(&self, line: &mut Line, block: u64, nth: usize, stored: &SharedBytes) {
        if line.bytes.is_empty() {
            line.bytes = vec![0; self.block_size].into();
        }
        let kept = stored.read_into(nth * self.block_size, &mut line.bytes);
        line.block = if kept.is_some() { block } else { NONE };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_memory::Mapping;

    fn location_of(from: u64, to: u64, at: usize, len: usize) -> Location {
        Location { from: from * 512, to: to * 512, at, len }
    }

    fn memory(byte: u8) -> SharedBytes {
        let bytes = Mapping::anonymous(4096).unwrap().bytes();
        bytes.fill(0, 4096, byte).unwrap();
        bytes
    }

    #[test]
    fn metadata_that_were_read_or_written_are_cached() {
        let cache = Cache::new(512, 1 << 20);
        let (two, found) = (location_of(7, 9, 504, 16), memory(9));
        assert!(!cache.load(&two, false, &found));
        cache.was_read(&two, &cache.versions(&two), &memory(1));
        assert!(cache.load(&two, false, &found));
        let near = |at| found.read::<u8>(at).unwrap();
        assert_eq!([near(503), near(504), near(519), near(520)], [9, 1, 1, 9]);
        assert!(cache.load(&two, true, &found));
        assert_eq!([near(0), near(503), near(1023), near(1024)], [1, 1, 1, 9]);
        cache.was_written(&location_of(8, 9, 0, 4), true, Some(&memory(2)));
        assert!(cache.load(&two, false, &found));
        assert_eq!([near(511), near(512), near(515), near(516)], [1, 2, 2, 1]);
        cache.was_written(&location_of(8, 9, 0, 8), true, None);
        assert!(!cache.load(&two, false, &found), "the content is unknown");
        assert!(cache.load(&location_of(7, 8, 0, 8), false, &found));
        cache.was_written(&location_of(8, 9, 0, 8), false, Some(&memory(3)));
        assert!(!cache.load(&two, false, &found), "there is only a part of it");
    }

    #[test]
    fn metadata_overwritten_during_a_read_are_not_cached() {
        let cache = Cache::new(512, 1 << 20);
        let (one, found) = (location_of(3, 4, 0, 8), memory(0));
        for stored in [Some(memory(2)), None] {
            let before = cache.versions(&one);
            cache.was_written(&one, true, stored.as_ref());
            cache.was_read(&one, &before, &memory(1));
            assert_eq!(cache.load(&one, false, &found), stored.is_some());
        }
        assert_eq!(found.read::<u8>(0), Some(2));
    }

    #[test]
    fn the_metadata_cache_has_a_bounded_size() {
        let cache = Cache::new(4096, u64::MAX);
        let lines = cache.lines.len() as u64;
        assert_eq!(lines * 4096, BYTES);
        let location =
            |block| Location { from: block * 4096, to: (block + 1) * 4096, at: 0, len: 8 };
        for (block, other) in [(5, 5 + lines), (5 + 2 * lines, 5)] {
            cache.was_written(&location(block), true, Some(&memory(1)));
            assert!(cache.load(&location(block), false, &memory(0)));
            assert!(!cache.load(&location(other), false, &memory(0)));
        }
        assert_eq!(Cache::new(512, 3).lines.len(), 3);
        assert_eq!(Cache::new(512, 0).lines.len(), 1);
    }
}
