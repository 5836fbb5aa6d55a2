//! The blocks of a disk that is memory, kept whole while several threads copy them.
//!
//! A controller promises that a logical block is written and read as one (NVM Command Set 1.1,
//! 2.1.4.2: AWUN is at least one block), whichever queues the commands come through. A copy by
//! the processor is no such thing: two that meet leave, or find, a bit of each.
//!
//! So each region of the disk has a number that is odd while the region is written. Writers take
//! turns by it. A reader takes nothing: it looks at the number before and after its copy, and only
//! if it has met a writer does it wait for a turn and copy once more. As long as nobody writes,
//! readers on other processors share the line of the number as they share those of the data.

use std::hint::spin_loop;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};

/// Bytes of a region. A long request is so many copies in a row: fewer are faster, and a writer
/// is waited for as long as one takes, some microseconds.
const REGION: usize = 128 << 10;
/// Regions with a number of their own; the others share them.
const NUMBERS: usize = 256;
/// How often a writer's end is looked for before the processor is left to others: longer than a
/// copy takes.
const SPINS: u32 = 4096;

/// How often a region was written, twice, and odd while it is. Alone in its line.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Number(AtomicU64);

/// The regions of a disk, for all that copy its blocks.
#[derive(Debug)]
pub(crate) struct Regions(Box<[Number]>);

/// The right to write a region.
struct Turn<'a> {
    number: &'a AtomicU64,
    /// What the number is to be at the end.
    end: u64,
}

impl Number {
    /// Waits for a turn at the region.
    #[cold]
    fn wait(&self) -> Turn<'_> {
        let mut spins = 0;
        loop {
            if let Some(turn) = self.try_begin() {
                return turn;
            }
            spins += 1;
            if spins < SPINS {
                spin_loop();
            } else {
                // It was interrupted, or waits for memory that its guest has to provide.
                std::thread::yield_now();
            }
        }
    }

    #[inline]
    fn try_begin(&self) -> Option<Turn<'_>> {
        let now = self.0.load(Relaxed);
        if !now.is_multiple_of(2) || self.0.compare_exchange(now, now + 1, AcqRel, Relaxed).is_err()
        {
            return None;
        }
        // Whoever sees a byte of what is written sees the odd number, too.
        fence(Release);
        Some(Turn { number: &self.0, end: now.wrapping_add(2) })
    }

    #[inline]
    fn begin(&self) -> Turn<'_> {
        self.try_begin().unwrap_or_else(|| self.wait())
    }
}

impl Turn<'_> {
    /// Nothing was written.
    fn end_unchanged(mut self) {
        self.end = self.end.wrapping_sub(2);
    }
}

impl Drop for Turn<'_> {
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

    /// Copies `[at, at + len)` from the disk by `copy`, which gets the parts of it in their order
    /// (how far each is from `at`, and its place and length), and some of them twice. What it says
    /// of a part counts only the last time.
    #[inline]
    pub(crate) fn read<E>(
        &self,
        at: usize,
        len: usize,
        mut copy: impl FnMut(usize, usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        for_parts(at, len, |done, at, len| {
            let number = self.number(at);
            let before = number.0.load(Acquire);
            if before.is_multiple_of(2) {
                let outcome = copy(done, at, len);
                fence(Acquire);
                if number.0.load(Relaxed) == before {
                    return outcome;
                }
            }
            let turn = number.wait();
            let outcome = copy(done, at, len);
            turn.end_unchanged();
            outcome
        })
    }

    /// Copies to the disk, as [`read`](Self::read) does from it; each part once.
    #[inline]
    pub(crate) fn write<E>(
        &self,
        at: usize,
        len: usize,
        mut copy: impl FnMut(usize, usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        for_parts(at, len, |done, at, len| {
            let _turn = self.number(at).begin();
            copy(done, at, len)
        })
    }

    /// Calls `change` while nobody else reads or writes `[at, at + len)`, which is not empty.
    pub(crate) fn change<T>(&self, at: usize, len: usize, change: impl FnOnce() -> T) -> T {
        let (first, last) = (at / REGION, (at + len - 1) / REGION);
        let mut numbers: Vec<_> = (first..=last).take(NUMBERS).map(|at| at % NUMBERS).collect();
        // Whoever has several takes them in this order, so that nobody waits for each other.
        numbers.sort_unstable();
        let _turns: Vec<_> = numbers.into_iter().map(|at| self.0[at].begin()).collect();
        change()
    }
}

#[inline]
fn for_parts<E>(
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
        let Ok(()) = for_parts(at, len, each);
        parts
    }

    #[test]
    fn parts_end_where_regions_do() {
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
                // Somebody else, meanwhile. And what is found then is of no interest.
                regions.write(4096, 512, |_, _, _| Ok::<_, ()>(()))?;
                return Err(());
            }
            Ok(())
        });
        assert_eq!((read, calls, value), (Ok(()), 2, 2));
        assert_eq!(regions.0[0].0.load(Relaxed), 2, "the reader has written nothing");
    }

    #[test]
    fn whoever_has_many_waits_for_nobody_that_has_as_many() {
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
