//! The wire limit: maximum rate of queue entries between two CPUs of this machine.
//!
//! Two pinned threads exchange entries through shared rings: 64 bytes in one direction, and 16
//! bytes in the other. They follow the rules of an NVMe queue pair with shadow doorbells. One
//! thread writes whole entries, and then stores a tail word. The other thread takes up to a burst
//! of entries, and writes their completions together; it writes the phase bit of each completion
//! last. The entries contain no command, and no data are transferred. The only cost is that of
//! cache lines between CPUs, so a queue pair cannot be faster.
//!
//! The tail can be stored for each entry, for all new entries, or for some at a time. The best
//! choice depends on the queue depth and on the machine. All are measured, and the limit is the
//! best result.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};

use crate::machine::pin;

/// Number of entries of each ring. Fewer entries are in flight, so the rings cannot overflow.
const RING: u32 = 256;
/// Maximum number of entries that the completing side takes at once.
const BURST: u32 = 32;
/// Number of completions in a cache line.
const LINE: u32 = 4;
/// Duration of the warm-up before the measurement.
const RAMP: Duration = Duration::from_millis(20);
/// Sum of the word indexes of an entry. Each word has its index in the top byte and the entry's
/// number in the other bytes, so that a torn entry is detected.
const INDEX_SUM: u64 = 28 << 56;

/// A submission queue entry: a cache line.
#[repr(align(64))]
#[derive(Default)]
struct Entry([AtomicU64; 8]);

/// A cache line of completions.
#[repr(align(64))]
#[derive(Default)]
struct Completions([[AtomicU64; 2]; LINE as usize]);

/// A word that has its cache line and the adjacent line, which the hardware prefetches, for itself.
#[repr(align(128))]
#[derive(Default)]
struct CachePadded<T>(T);

/// State that both threads share.
struct Wire {
    entries: Box<[Entry; RING as usize]>,
    completions: Box<[Completions; (RING / LINE) as usize]>,
    tail: CachePadded<AtomicU32>,
    stopped: CachePadded<AtomicBool>,
}

/// Times at which the submitting side stores the tail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TailUpdate {
    /// After each entry.
    Each,
    /// Once after all entries that replace the completions found in one pass.
    Batch,
    /// After each 16 entries, and after the last entry of a pass.
    Few,
}

impl TailUpdate {
    /// All intervals.
    pub(crate) const ALL: [Self; 3] = [Self::Each, Self::Batch, Self::Few];

    /// Maximum number of entries that are written before the tail is stored.
    fn batch(self) -> u32 {
        match self {
            Self::Each => 1,
            Self::Batch => u32::MAX,
            Self::Few => 16,
        }
    }

    /// Name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Each => "each",
            Self::Batch => "batch",
            Self::Few => "few",
        }
    }
}

impl Wire {
    fn new() -> Result<Self> {
        let entries: Box<[Entry]> = (0..RING).map(|_| Entry::default()).collect();
        let completions: Box<[Completions]> =
            (0..RING / LINE).map(|_| Completions::default()).collect();
        Ok(Self {
            entries: entries.try_into().map_err(|_| anyhow!("a ring of another size"))?,
            completions: completions.try_into().map_err(|_| anyhow!("a ring of another size"))?,
            tail: CachePadded::default(),
            stopped: CachePadded::default(),
        })
    }

    fn completion(&self, position: u32) -> &[AtomicU64; 2] {
        let place = position % RING;
        &self.completions[(place / LINE) as usize].0[(place % LINE) as usize]
    }

    /// Phase bit of a new completion at this position.
    fn phase(position: u32) -> u64 {
        u64::from((position / RING).is_multiple_of(2))
    }

    #[inline(always)]
    fn submit(&self, tail: &mut u32, sequence: &mut u64) {
        let entry = &self.entries[(*tail % RING) as usize];
        for (place, word) in (0u64..).zip(&entry.0) {
            word.store(*sequence | place << 56, Ordering::Relaxed);
        }
        *sequence += 1;
        *tail = tail.wrapping_add(1);
    }

    /// Writes `count` entries, and stores the tail once.
    #[inline(always)]
    fn submit_all(&self, tail: &mut u32, sequence: &mut u64, count: &mut u32) {
        for _ in 0..std::mem::take(count) {
            self.submit(tail, sequence);
        }
        self.tail.0.store(*tail, Ordering::Release);
    }

    /// Keeps `depth` entries in flight for `time`. Returns completions per second.
    fn drive(&self, depth: u32, update: TailUpdate, time: Duration) -> Result<f64> {
        let (mut tail, mut head) = (0u32, 0u32);
        let (mut sequence, mut completed) = (0u64, 0u64);
        for _ in 0..depth {
            self.submit(&mut tail, &mut sequence);
        }
        self.tail.0.store(tail, Ordering::Release);
        let started = Instant::now();
        let mut measured: Option<(Instant, u64)> = None;
        let mut turns = 0u32;
        loop {
            let (mut found, mut unpublished) = (0, 0);
            while found < depth {
                let completion = self.completion(head);
                if completion[1].load(Ordering::Acquire) & 1 != Self::phase(head) {
                    break;
                }
                // The sum verifies every word of every entry, and the order of entries.
                let sum = completion[0].load(Ordering::Relaxed);
                if sum != (completed * 8).wrapping_add(INDEX_SUM) {
                    bail!("completion {completed} is for another entry");
                }
                completed += 1;
                found += 1;
                head = head.wrapping_add(1);
                unpublished += 1;
                if unpublished == update.batch() {
                    self.submit_all(&mut tail, &mut sequence, &mut unpublished);
                }
            }
            if found == 0 {
                spin_loop();
            } else if unpublished != 0 {
                self.submit_all(&mut tail, &mut sequence, &mut unpublished);
            }
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(1024) {
                if self.stopped.0.load(Ordering::Relaxed) {
                    bail!("the other side completes no entries");
                }
                let now = Instant::now();
                match measured {
                    None if now - started >= RAMP => measured = Some((now, completed)),
                    // If both threads share a CPU, the other thread may not have run yet.
                    Some((since, before))
                        if now - since >= time && completed - before >= u64::from(RING) =>
                    {
                        return Ok((completed - before) as f64 / (now - since).as_secs_f64());
                    }
                    _ => {}
                }
            }
        }
    }

    /// Completes entries until the end.
    fn serve(&self) {
        let mut head = 0u32;
        let mut idle = 0u32;
        let mut sums = [0u64; BURST as usize];
        loop {
            let ready = self.tail.0.load(Ordering::Acquire).wrapping_sub(head);
            if ready == 0 {
                spin_loop();
                idle = idle.wrapping_add(1);
                if idle.is_multiple_of(256) && self.stopped.0.load(Ordering::Relaxed) {
                    return;
                }
                continue;
            }
            let count = ready.min(BURST);
            for (n, sum) in (0..count).zip(&mut sums) {
                let entry = &self.entries[(head.wrapping_add(n) % RING) as usize];
                let words = entry.0.iter().map(|word| word.load(Ordering::Relaxed));
                *sum = words.fold(0, u64::wrapping_add);
            }
            for (n, sum) in (0..count).zip(&sums) {
                let position = head.wrapping_add(n);
                let completion = self.completion(position);
                completion[0].store(*sum, Ordering::Relaxed);
                let status = u64::from(position) << 32 | Self::phase(position);
                completion[1].store(status, Ordering::Release);
            }
            head = head.wrapping_add(count);
        }
    }
}

/// Entries per second at this queue depth between two CPUs.
pub(crate) fn limit(
    cpus: [usize; 2],
    depth: u32,
    update: TailUpdate,
    time: Duration,
) -> Result<f64> {
    if depth == 0 || depth >= RING {
        bail!("the wire takes 1 to {} entries at once, not {depth}", RING - 1);
    }
    let wire = Wire::new()?;
    pair(
        cpus,
        &wire.stopped.0,
        || wire.serve(),
        || {
            let rate = wire.drive(depth, update, time);
            wire.stopped.0.store(true, Ordering::Relaxed);
            rate
        },
    )?
}

/// The best interval of tail stores, and its rate.
pub(crate) fn best(cpus: [usize; 2], depth: u32, time: Duration) -> Result<(f64, TailUpdate)> {
    let mut best = (0.0, TailUpdate::Each);
    for update in TailUpdate::ALL {
        let rate = limit(cpus, depth, update, time)?;
        if rate > best.0 {
            best = (rate, update);
        }
    }
    Ok(best)
}

/// Time in nanoseconds in which a cache line is transferred from one CPU to the other: half of a
/// round trip.
pub(crate) fn line_time(cpus: [usize; 2], rounds: u32) -> Result<f64> {
    let words: [CachePadded<AtomicU32>; 2] = Default::default();
    let stopped = AtomicBool::new(false);
    let wait = |word: &AtomicU32, value: u32| {
        while word.load(Ordering::Acquire) != value {
            if stopped.load(Ordering::Relaxed) {
                return false;
            }
        }
        true
    };
    pair(
        cpus,
        &stopped,
        || {
            for n in 1..=rounds {
                if !wait(&words[0].0, n) {
                    return;
                }
                words[1].0.store(n, Ordering::Release);
            }
        },
        || {
            let began = Instant::now();
            for n in 1..=rounds {
                words[0].0.store(n, Ordering::Release);
                if !wait(&words[1].0, n) {
                    break;
                }
            }
            began.elapsed().as_secs_f64() * 1e9 / f64::from(rounds) / 2.0
        },
    )
}

/// Runs one function on each CPU. Returns the result of the second function. If one function cannot
/// start, `stopped` ends the other.
fn pair<T: Send>(
    cpus: [usize; 2],
    stopped: &AtomicBool,
    first: impl FnOnce() + Send,
    second: impl FnOnce() -> T + Send,
) -> Result<T> {
    let start = |cpu| {
        let pinned = pin(cpu);
        if pinned.is_err() {
            stopped.store(true, Ordering::Relaxed);
        }
        pinned
    };
    thread::scope(|scope| {
        let first = scope.spawn(move || start(cpus[0]).map(|()| first()));
        let second = scope.spawn(move || start(cpus[1]).map(|()| second()));
        let result = second.join().map_err(|_| anyhow!("the submitting thread panicked"))?;
        if result.is_err() {
            stopped.store(true, Ordering::Relaxed);
        }
        first.join().map_err(|_| anyhow!("the completing thread panicked"))??;
        result
    })
}

#[cfg(test)]
mod tests {
    use rustix::thread::CpuSet;

    use super::*;

    /// Two CPUs that this process may use, or the same CPU twice.
    fn processors() -> [usize; 2] {
        let mine = rustix::thread::sched_getaffinity(None).unwrap();
        let mut list = (0..CpuSet::MAX_CPU).filter(|cpu| mine.is_set(*cpu));
        let first = list.next().unwrap();
        [first, list.next().unwrap_or(first)]
    }

    #[test]
    fn all_entries_arrive_in_order_at_any_depth() {
        // The rate is not checked. The data of each entry are checked, many times around the rings.
        for depth in [1, 3, 32, 33, 128, RING - 1] {
            for update in TailUpdate::ALL {
                // Duration of a measurement. It is not a time limit.
                let rate = limit(processors(), depth, update, Duration::from_millis(20)).unwrap();
                assert!(rate > 0.0, "{depth} {update:?}: {rate}");
            }
        }
    }

    #[test]
    fn a_torn_entry_is_found() {
        let wire = Wire::new().unwrap();
        let (mut tail, mut sequence) = (0, 0);
        wire.submit(&mut tail, &mut sequence);
        wire.tail.0.store(tail, Ordering::Release);
        wire.entries[0].0[5].store(7 << 56, Ordering::Relaxed);
        thread::scope(|scope| {
            scope.spawn(|| wire.serve());
            while wire.completion(0)[1].load(Ordering::Acquire) & 1 == 0 {}
            wire.stopped.0.store(true, Ordering::Relaxed);
        });
        assert_ne!(wire.completion(0)[0].load(Ordering::Relaxed), INDEX_SUM);
    }

    #[test]
    fn invalid_parameters_are_refused() {
        // Duration of a measurement. The measurement is refused because of its parameters. It is
        // not a time limit.
        let time = Duration::from_millis(1);
        assert!(limit(processors(), 0, TailUpdate::Each, time).is_err());
        assert!(limit(processors(), RING, TailUpdate::Each, time).is_err());
        assert!(limit([CpuSet::MAX_CPU, 0], 1, TailUpdate::Each, time).is_err());
        assert!(limit([0, CpuSet::MAX_CPU], 1, TailUpdate::Each, time).is_err());
        assert!(line_time(processors(), 100).unwrap() > 0.0);
    }
}
