//! Sequence locks: they make reads and writes of the blocks of a memory disk atomic while several
//! threads copy them.
//!
//! A controller promises that a logical block is read and written atomically (NVM Command Set 1.1,
//! 2.1.4.2: AWUN is at least one block), across all queues. A copy by the CPU is not atomic: two
//! concurrent copies can mix their data.
//!
//! Each region of the disk has a sequence number, which is odd while a writer copies. The number is
//! also the lock by which writers exclude each other. A reader compares the number before and after
//! its copy. If it has changed, the reader takes the lock of the writers and copies again. While
//! there are no writers, all CPUs can hold the cache line of the number, so readers do not slow
//! each other down.

use std::hint::spin_loop;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};

/// Number of bytes per region. A long request is copied region by region. Larger regions are
/// faster, but a reader may have to wait until one region is copied. That takes some microseconds.
const REGION: usize = 128 << 10;
/// Number of sequence locks. Region n uses lock n modulo this number.
const NUMBERS: usize = 256;
/// Number of spins before a waiting thread yields its CPU. So many spins take longer than the copy
/// of one region.
const SPINS: u32 = 4096;

/// Sequence number of one or more regions, in a separate cache line. A writer increments it before
/// and after each write.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Number(AtomicU64);

/// Sequence locks of a disk, shared by its regions and by all of its queues.
#[derive(Debug)]
pub(crate) struct Regions(Box<[Number]>);

/// Write lock on a region; dropping it ends the write.
struct RegionLock<'a> {
    number: &'a AtomicU64,
    /// Sequence number to store when the write ends.
    end: u64,
}

impl Number {
    /// Waits until no other writer holds the lock, and takes it.
    #[cold]
    fn wait(&self) -> RegionLock<'_> {
        let mut spins = 0;
        loop {
            if let Some(lock) = self.try_lock() {
                return lock;
            }
            spins += 1;
            if spins < SPINS {
                spin_loop();
            } else {
                // The copy of the other writer takes longer than usual: its thread was preempted,
                // or waits for a page of guest memory. Spinning longer would waste the CPU.
                std::thread::yield_now();
            }
        }
    }

    #[inline]
    fn try_lock(&self) -> Option<RegionLock<'_>> {
        let now = self.0.load(Relaxed);
        if !now.is_multiple_of(2) || self.0.compare_exchange(now, now + 1, AcqRel, Relaxed).is_err()
        {
            return None;
        }
        // The fence orders the odd number before the write: a reader that sees any byte of the
        // write also sees the odd number.
        fence(Release);
        Some(RegionLock { number: &self.0, end: now.wrapping_add(2) })
    }

    #[inline]
    fn lock(&self) -> RegionLock<'_> {
        self.try_lock().unwrap_or_else(|| self.wait())
    }
}

impl RegionLock<'_> {
    /// Releases the lock and restores the old sequence number, because nothing was written.
    fn unlock_unchanged(mut self) {
        self.end = self.end.wrapping_sub(2);
    }
}

impl Drop for RegionLock<'_> {
    #[inline]
    fn drop(&mut self) {
        self.number.store(self.end, Release);
    }
}

impl Regions {
    pub(crate) fn new() -> Self {
        Self((0..NUMBERS).map(|_| Number::default()).collect())
    }

    #[inline]
    fn number(&self, at: usize) -> &Number {
        &self.0[at / REGION % NUMBERS]
    }

    /// Copies `[at, at + len)` from the disk. Calls `copy` once per region, in ascending order,
    /// with the offset from `at`, the position on the disk and the length. If a write to the region
    /// runs at the same time, `copy` is called again under the lock, and the result of the first
    /// call is ignored.
    #[inline]
    pub(crate) fn read<E>(
        &self,
        at: usize,
        len: usize,
        mut copy: impl FnMut(usize, usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        for_regions(at, len, |done, at, len| {
            let number = self.number(at);
            let before = number.0.load(Acquire);
            if before.is_multiple_of(2) {
                let outcome = copy(done, at, len);
                fence(Acquire);
                if number.0.load(Relaxed) == before {
                    return outcome;
                }
            }
            let lock = number.wait();
            let outcome = copy(done, at, len);
            lock.unlock_unchanged();
            outcome
        })
    }

    /// Copies to the disk. Calls `copy` exactly once per region, with the arguments of
    /// [`read`](Self::read).
    #[inline]
    pub(crate) fn write<E>(
        &self,
        at: usize,
        len: usize,
        mut copy: impl FnMut(usize, usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        for_regions(at, len, |done, at, len| {
            let _lock = self.number(at).lock();
            copy(done, at, len)
        })
    }

    /// Calls `change` while no other thread reads or writes `[at, at + len)`. The range must not be
    /// empty.
    pub(crate) fn change<T>(&self, at: usize, len: usize, change: impl FnOnce() -> T) -> T {
        let (first, last) = (at / REGION, (at + len - 1) / REGION);
        let mut numbers: Vec<_> = (first..=last).take(NUMBERS).map(|at| at % NUMBERS).collect();
        // All threads take the locks in ascending order, which prevents deadlocks.
        numbers.sort_unstable();
        let _locks: Vec<_> = numbers.into_iter().map(|at| self.0[at].lock()).collect();
        change()
    }
}

#[inline]
fn for_regions<E>(
    at: usize,
    len: usize,
    mut each: impl FnMut(usize, usize, usize) -> Result<(), E>,
) -> Result<(), E> {
    let mut done = 0;
    loop {
        let at = at + done;
        let part = (len - done).min(REGION - at % REGION);
        each(done, at, part)?;
        done += part;
        if done == len {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn parts(at: usize, len: usize) -> Vec<(usize, usize, usize)> {
        let mut parts = Vec::new();
        let each = |done, at, len| {
            parts.push((done, at, len));
            Ok::<_, Infallible>(())
        };
        let Ok(()) = for_regions(at, len, each);
        parts
    }

    #[test]
    fn ranges_are_split_at_region_boundaries() {
        assert_eq!(parts(0, 4096), [(0, 0, 4096)]);
        assert_eq!(parts(5, REGION - 5), [(0, 5, REGION - 5)]);
        assert_eq!(parts(512, REGION), [(0, 512, REGION - 512), (REGION - 512, REGION, 512)]);
        assert_eq!(parts(3 * REGION, 2 * REGION).len(), 2);
        assert_eq!(parts(7, 0), [(0, 7, 0)]);
    }

    #[test]
    fn a_reader_that_has_met_a_writer_reads_once_more() {
        let regions = Regions::new();
        let (mut calls, mut value) = (0, 0);
        let read = regions.read(0, 512, |_, _, _| {
            calls += 1;
            value = calls;
            if calls == 1 {
                // The write below changes the region during the first copy. So the error of the
                // first copy must be ignored.
                regions.write(4096, 512, |_, _, _| Ok::<_, ()>(()))?;
                return Err(());
            }
            Ok(())
        });
        assert_eq!((read, calls, value), (Ok(()), 2, 2));
        assert_eq!(regions.0[0].0.load(Relaxed), 2, "the reader has written nothing");
    }

    #[test]
    fn requests_over_many_regions_do_not_deadlock() {
        let regions = Regions::new();
        let all = (NUMBERS + 3) * REGION;
        std::thread::scope(|scope| {
            for first in [0, 100] {
                let regions = &regions;
                scope.spawn(move || {
                    for _ in 0..100 {
                        regions.change(first * REGION, all, || ());
                        regions.change(first * REGION + 1, 1, || ());
                    }
                });
            }
        });
        assert!(regions.0.iter().all(|number| number.0.load(Relaxed) % 2 == 0));
    }
}
