//! Dirty page log of a peer's memory, for live migration.
//!
//! A [`View`](crate::View) of a table with a log records each page that it resolves for writing,
//! without a lock. The view adds its pages to the log when it is dropped. This happens after the
//! end of the last command that was resolved through the view, and so after the last write. To read
//! a complete log, the control plane gives each thread a new view, waits until the old views are
//! dropped, and then reads the log.

use parking_lot::Mutex;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Page size of a log, as a power of two.
const PAGE_SHIFT: u32 = 12;
/// Number of words, and of pages, in a chunk: a bitmap of consecutive pages.
const WORDS: usize = 8;
const CHUNK: u64 = WORDS as u64 * 64;
/// Largest number of chunks of all logs of the process: the pages of 2 TiB, in about 260 MiB. A log
/// gets at most half of what the others leave. If more of its pages were written, all pages count
/// as written.
const MAX_CHUNKS: usize = 1 << 20;

/// Limit for the chunks of several logs together, and their number.
#[derive(Debug)]
struct Quota {
    max: usize,
    used: AtomicUsize,
}

static PROCESS: Quota = Quota::new(MAX_CHUNKS);

impl Quota {
    const fn new(max: usize) -> Self {
        Self { max, used: AtomicUsize::new(0) }
    }
}

/// Chunks that one log has taken from the quota. The drop returns them.
#[derive(Debug)]
struct Charge {
    quota: &'static Quota,
    count: usize,
}

impl Charge {
    /// Takes one more chunk, if the log's share permits it.
    fn take(&mut self) -> bool {
        let others = self.quota.used.load(Ordering::Relaxed).saturating_sub(self.count);
        let is_permitted = self.count < self.quota.max.saturating_sub(others) / 2;
        if is_permitted {
            self.count += 1;
            self.quota.used.fetch_add(1, Ordering::Relaxed);
        }
        is_permitted
    }

    fn release(&mut self, count: usize) {
        self.count -= count;
        self.quota.used.fetch_sub(count, Ordering::Relaxed);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.release(self.count);
    }
}

/// Set of page numbers.
#[derive(Debug)]
struct Pages {
    chunks: BTreeMap<u64, [u64; WORDS]>,
    charge: Charge,
    /// True if the set exceeded its share of the quota. From then on it contains all pages.
    all: bool,
}

impl Default for Pages {
    fn default() -> Self {
        Self::with(&PROCESS)
    }
}

impl Pages {
    const fn with(quota: &'static Quota) -> Self {
        Self { chunks: BTreeMap::new(), charge: Charge { quota, count: 0 }, all: false }
    }

    fn chunk(&mut self, number: u64) -> Option<&mut [u64; WORDS]> {
        if !self.all && !self.chunks.contains_key(&number) && !self.charge.take() {
            self.all = true;
            self.clear();
        }
        (!self.all).then(|| self.chunks.entry(number).or_default())
    }

    /// Removes all chunks.
    fn clear(&mut self) -> BTreeMap<u64, [u64; WORDS]> {
        self.charge.release(self.charge.count);
        std::mem::take(&mut self.chunks)
    }

    /// Adds the pages of `[iova, iova + len)`.
    fn add(&mut self, iova: u64, len: u64) {
        let Some(last) = len.checked_sub(1) else { return };
        let (mut page, last) = (iova >> PAGE_SHIFT, iova.saturating_add(last) >> PAGE_SHIFT);
        while page <= last {
            let Some(chunk) = self.chunk(page / CHUNK) else { return };
            let end = last.min(page | (CHUNK - 1));
            for page in page..=end {
                let bit = page % CHUNK;
                chunk[(bit / 64) as usize] |= 1 << (bit % 64);
            }
            // The sum cannot overflow, because page numbers have 52 bits.
            page = end + 1;
        }
    }

    fn merge(&mut self, other: &mut Self) {
        if self.chunks.is_empty() && !self.all {
            std::mem::swap(self, other);
            return;
        }
        self.all |= other.all;
        for (number, words) in other.clear() {
            let Some(chunk) = self.chunk(number) else { return };
            chunk.iter_mut().zip(words).for_each(|(word, more)| *word |= more);
        }
    }

    /// Removes the pages from `first` to `last`, and calls `each` with the number of each removed
    /// page. Returns false if the set is in the state "all pages": no page can be removed in this
    /// state.
    fn take(&mut self, first: u64, last: u64, mut each: impl FnMut(u64)) -> bool {
        let numbers: Vec<u64> =
            self.chunks.range(first / CHUNK..=last / CHUNK).map(|(number, _)| *number).collect();
        for number in numbers {
            let Some(words) = self.chunks.get_mut(&number) else { continue };
            for (nth, word) in (0..).zip(words.iter_mut()) {
                let base = number * CHUNK + nth * 64;
                let mut left = *word;
                while left != 0 {
                    let bit = left.trailing_zeros();
                    left &= left - 1;
                    let page = base + u64::from(bit);
                    if (first..=last).contains(&page) {
                        *word &= !(1 << bit);
                        each(page);
                    }
                }
            }
            if words.iter().all(|word| *word == 0) {
                self.chunks.remove(&number);
                self.charge.release(1);
            }
        }
        !self.all
    }
}

/// Dirty page log of a peer's memory: see [`DmaSpace::start_log`](crate::DmaSpace::start_log).
#[derive(Debug, Default)]
pub struct DirtyLog(Mutex<Pages>);

impl DirtyLog {
    /// Adds the pages of `[iova, iova + len)`, for writes that bypass the views.
    pub fn add(&self, iova: u64, len: u64) {
        self.0.lock().add(iova, len);
    }

    /// Removes the written pages of `[iova, iova + len)` from the log and sets their bits in
    /// `bitmap`.
    ///
    /// A bit stands for a unit of `unit` bytes (a power of two), counted from `iova`, and is set
    /// if any byte of the unit was written. Bits beyond the end of `bitmap` are dropped. The
    /// range must not be empty or overflow.
    pub fn take(&self, iova: u64, len: u64, unit: u64, bitmap: &mut [u64]) {
        let end = iova.saturating_add(len.saturating_sub(1));
        let max = bitmap.len();
        let mut set = |bit: u64| {
            let word = usize::try_from(bit / 64).ok().and_then(|word| bitmap.get_mut(word));
            if let Some(word) = word {
                *word |= 1 << (bit % 64);
            }
        };
        let mut set_page = |page: u64| {
            let first = (page << PAGE_SHIFT).max(iova);
            let last = (page << PAGE_SHIFT | ((1 << PAGE_SHIFT) - 1)).min(end);
            ((first - iova) / unit..=(last - iova) / unit).for_each(&mut set);
        };
        if !self.0.lock().take(iova >> PAGE_SHIFT, end >> PAGE_SHIFT, &mut set_page) {
            let units = (end - iova) / unit + 1;
            (0..units.min(64 * max as u64)).for_each(set);
        }
    }
}

/// Pages that one view has recorded.
#[derive(Debug, Default)]
pub(crate) struct ViewPages(RefCell<Pages>);

impl ViewPages {
    pub(crate) fn add(&self, iova: u64, len: u64) {
        // The borrow always succeeds, because `add` runs no code that borrows the pages.
        if let Ok(mut pages) = self.0.try_borrow_mut() {
            pages.add(iova, len);
        }
    }

    /// Adds the recorded pages to the log. No access that was resolved through the view may be in
    /// flight.
    pub(crate) fn add_to_log(&self, log: &DirtyLog) {
        if let Ok(mut pages) = self.0.try_borrow_mut() {
            log.0.lock().merge(&mut pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_units(log: &DirtyLog, iova: u64, len: u64, unit: u64) -> Vec<u64> {
        let units = len.div_ceil(unit);
        let mut bitmap = vec![0; units.div_ceil(64) as usize];
        log.take(iova, len, unit, &mut bitmap);
        (0..units.next_multiple_of(64))
            .filter(|bit| bitmap[(bit / 64) as usize] >> (bit % 64) & 1 != 0)
            .collect()
    }

    #[test]
    fn pages_are_taken_once_and_in_any_unit() {
        let log = DirtyLog::default();
        log.add(0x1fff, 2);
        log.add(5 << 20, 0);
        log.add(0x3f_f000, 0x2000);
        assert_eq!(take_units(&log, 0x1000, 0x1000, 4096), [0]);
        assert_eq!(take_units(&log, 0x1000, 0x3000, 4096), [1], "the other one was taken");
        assert!(take_units(&log, 0x1000, 0x3000, 4096).is_empty());
        // Units that are larger and smaller than a page, and a range that starts in the middle of a
        // page.
        assert_eq!(take_units(&log, 0, 8 << 20, 1 << 20), [3, 4]);
        log.add(0x2000, 1);
        assert_eq!(take_units(&log, 0x1c00, 0x1000, 1024), [1, 2, 3]);
        log.add(u64::MAX - 10, 11);
        assert_eq!(take_units(&log, u64::MAX - 4095, 4095, 4096), [0]);
    }

    #[test]
    fn a_dropped_view_adds_its_pages_to_the_log() {
        let log = DirtyLog::default();
        let (one, two) = (ViewPages::default(), ViewPages::default());
        one.add(0x1000, 4096);
        two.add(0x1000, 1);
        two.add(0x9000, 1);
        one.add_to_log(&log);
        two.add_to_log(&log);
        assert_eq!(take_units(&log, 0, 1 << 20, 4096), [1, 9]);
    }

    #[test]
    fn a_log_gets_at_most_half_of_what_the_others_leave() {
        static QUOTA: Quota = Quota::new(64);
        let fill =
            |pages: &mut Pages| (0..).take_while(|chunk| pages.chunk(*chunk).is_some()).count();
        let mut one = Pages::with(&QUOTA);
        (0..30).for_each(|chunk| one.add(chunk << 21, 1));
        let mut two = Pages::with(&QUOTA);
        assert_eq!((fill(&mut two), two.all, two.chunks.len()), (17, true, 0));
        // The chunks of `two` are free again.
        assert_eq!((QUOTA.used.load(Ordering::Relaxed), one.all), (30, false));
        one.take(0, u64::MAX >> PAGE_SHIFT, |_| ());
        assert_eq!(QUOTA.used.load(Ordering::Relaxed), 0);
        assert_eq!(fill(&mut one), 32);
        // The chunks of a view move to the log when the view's pages are merged into it.
        let (mut log, mut view) = (Pages::with(&QUOTA), Pages::with(&QUOTA));
        log.add(0, 1);
        (0..9).for_each(|chunk| view.add(chunk << 21, 1));
        log.merge(&mut view);
        assert_eq!((log.chunks.len(), QUOTA.used.load(Ordering::Relaxed)), (9, 9));
        drop((log, view));
        assert_eq!(QUOTA.used.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn an_overflowing_log_reports_all_pages_as_dirty() {
        let log = DirtyLog::default();
        for chunk in 0..=MAX_CHUNKS as u64 / 2 {
            log.add(chunk << 21, 1);
        }
        assert!(log.0.lock().chunks.is_empty());
        log.add(1 << 50, 1);
        assert_eq!(take_units(&log, 0x5000, 0x2000, 4096), [0, 1], "all of it");
        assert_eq!(take_units(&log, 0x5000, 0x2000, 4096), [0, 1], "from now on");
        // A log that overflowed reports all units, of any size.
        assert_eq!(take_units(&log, 0, u64::MAX, 1 << 62), [0, 1, 2, 3]);
    }
}
