//! Job: a queue pair, and the loop that keeps it at its queue depth.

use super::config::{LoadConfig, Slice};
use super::io_source::{CheckSummary, IoSource};
use super::schedule::Pace;
use crate::latency::histogram;
use crate::rng::Rng;
use anyhow::{Context, bail};
use hdrhistogram::Histogram;
use shadowbell_driver::{Buffer, Command, Completion, QueuePair, QueueStats};
use std::time::{Duration, Instant};

/// A paced job spins instead of sleeping if its next I/O is due sooner than this. The time is
/// somewhat longer than the wake-up latency of a thread.
const SPIN_BEFORE_DUE: Duration = Duration::from_micros(200);

/// Bit of an element of `Job::stamps`: the I/O is a write of a mixed workload.
const WRITE: u64 = 1;

/// Separate results of reads and writes in a mixed workload.
struct Mixed {
    writes: u64,
    latencies: Directions<Histogram<u64>>,
}

/// Pair of values for reads and writes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Directions<T> {
    /// Value for reads.
    pub read: T,
    /// Value for writes.
    pub write: T,
}

impl Directions<Histogram<u64>> {
    /// Merges other histograms into these.
    pub(super) fn add(&mut self, others: &Self) -> anyhow::Result<()> {
        let both = [(&mut self.read, &others.read), (&mut self.write, &others.write)];
        for (sum, of_others) in both {
            sum.add(of_others).context("adding up the latencies")?;
        }
        Ok(())
    }
}

/// Queue pair with its workload and measurements. After the start, its loop neither allocates
/// memory nor makes system calls, apart from doorbell writes that are vfio-user messages.
pub(super) struct Job<L> {
    queue: QueuePair,
    /// Read and write commands for the first blocks of the namespace; only the LBA varies.
    templates: Directions<Command>,
    source: L,
    first_block: u64,
    blocks_per_io: u32,
    /// Buffers that are not in flight.
    spare: Vec<Buffer>,
    /// I/Os left to submit.
    remaining: u64,
    /// I/Os per doorbell write; `None` leaves it to the driver.
    batch: Option<u32>,
    /// I/Os submitted since the last doorbell write.
    unpublished: u32,
    commands: u64,
    /// Submission time of each command by slot of the queue, in nanoseconds after `epoch`, or 0 if
    /// its latency is not measured. Only a sample is measured, because reading the clock costs a
    /// considerable part of an I/O. The lowest bit marks a write of a mixed workload ([`WRITE`]).
    stamps: Box<[u64]>,
    epoch: Instant,
    sample_every: u32,
    until_sample: u32,
    histogram: Histogram<u64>,
    /// Separate results of reads and writes in a mixed workload.
    mixed: Option<Mixed>,
    /// Start times of the I/Os; `None` starts an I/O as soon as a buffer is free.
    pace: Option<Pace>,
    /// CPU time spent spinning until an I/O was due.
    paced: Duration,
}

impl<L: IoSource> Job<L> {
    pub(super) fn new(
        queue: QueuePair,
        templates: Directions<Command>,
        source: L,
        buffers: Vec<Buffer>,
        config: &LoadConfig,
        slice: Slice,
        index: u16,
    ) -> anyhow::Result<Self> {
        let mut spare = buffers;
        let mut rng = Rng::new(config.seed ^ u64::from(index));
        let mut random = vec![0; config.bs as usize];
        for buffer in &mut spare {
            // Random data, so that devices cannot compress or deduplicate it.
            random.as_chunks_mut::<8>().0.iter_mut().for_each(|w| *w = rng.next().to_le_bytes());
            if !buffer.copy_from(0, &random) {
                bail!("a buffer is shorter than an I/O");
            }
        }
        Ok(Self {
            stamps: vec![0; queue.capacity()].into_boxed_slice(),
            queue,
            templates,
            source,
            first_block: slice.of_job(index),
            blocks_per_io: slice.blocks_per_io,
            spare,
            remaining: config.number_ios.unwrap_or(u64::MAX),
            batch: config.iodepth_batch.map(|batch| if batch == 0 { u32::MAX } else { batch }),
            unpublished: 0,
            commands: 0,
            epoch: Instant::now(),
            sample_every: config.latency_sample.unwrap_or(1),
            until_sample: 1,
            histogram: histogram()?,
            mixed: if config.is_mixed() { Some(Mixed::new()?) } else { None },
            pace: config.rate_iops.map(Pace::new),
            paced: Duration::ZERO,
        })
    }

    /// Submits an I/O for every free buffer (in a paced job, only the I/Os that are due), and rings
    /// the doorbell.
    pub(super) fn fill(&mut self) -> anyhow::Result<()> {
        if self.pace.is_some() {
            self.issue_due()?;
        } else {
            self.issue_spare()?;
        }
        self.ring()
    }

    /// Handles completions. If `go` is true, submits as many new I/Os, or in a paced job those that
    /// are due. Returns the number of completions.
    #[inline]
    pub(super) fn turn(&mut self, go: bool) -> anyhow::Result<u64> {
        if self.pace.is_some() {
            return self.paced_turn(go);
        }
        let mut found = 0;
        while found < self.stamps.len()
            && let Some(completion) = self.queue.pop()
        {
            found += 1;
            let buffer = self.complete(completion)?;
            if go && let Some(buffer) = buffer {
                self.issue(buffer)?;
            } else {
                self.spare.extend(buffer);
            }
        }
        if found != 0 {
            if go && !self.spare.is_empty() {
                self.issue_spare()?;
            }
            match self.batch {
                // The driver may defer the doorbell write, because the next call may add I/Os.
                None if go => self.ring_in_time()?,
                _ => self.ring()?,
            }
        } else if self.unpublished != 0 {
            self.ring()?;
        }
        Ok(found as u64)
    }

    /// Handles completions. If `go` is true, submits the I/Os that are due.
    #[cold]
    fn paced_turn(&mut self, go: bool) -> anyhow::Result<u64> {
        let mut found = 0;
        while found < self.stamps.len()
            && let Some(completion) = self.queue.pop()
        {
            found += 1;
            let buffer = self.complete(completion)?;
            self.spare.extend(buffer);
        }
        let started = if go { self.issue_due()? } else { 0 };
        if found + started != 0 {
            self.ring()?;
        }
        Ok(found as u64)
    }

    /// Submits the I/Os that are due, as far as buffers are free. Returns their number. An I/O that
    /// waits for a buffer is late, which counts as latency.
    fn issue_due(&mut self) -> anyhow::Result<usize> {
        let mut started = 0;
        while self.remaining != 0
            && let Some(pace) = &mut self.pace
        {
            let now = nanoseconds_since(self.epoch);
            let due = pace.due(now);
            if due > now {
                break;
            }
            let Some(buffer) = self.spare.pop() else { break };
            let Some(slot) = self.start(buffer)? else { break };
            if let Some(stamp) = self.stamps.get_mut(slot) {
                *stamp |= due & !WRITE;
            }
            if let Some(pace) = &mut self.pace {
                pace.advance();
            }
            started += 1;
        }
        Ok(started)
    }

    /// Time until the next I/O is due; `None` for a job that is not paced.
    fn until_due(&mut self) -> Option<Duration> {
        let now = nanoseconds_since(self.epoch);
        let due = self.pace.as_mut()?.due(now);
        Some(Duration::from_nanos(due.saturating_sub(now)))
    }

    #[inline(always)]
    fn ring_in_time(&mut self) -> anyhow::Result<()> {
        if self.queue.ring_in_time()? {
            self.unpublished = 0;
        }
        Ok(())
    }

    #[inline]
    fn ring(&mut self) -> anyhow::Result<()> {
        self.unpublished = 0;
        Ok(self.queue.ring()?)
    }

    /// Accounts for a completion and returns its buffer.
    #[inline(always)]
    fn complete(&mut self, completion: Completion) -> anyhow::Result<Option<Buffer>> {
        let slot = completion.token.index();
        if !completion.status.is_success() {
            bail!("{}: an I/O ended with: {}", self.queue_name(), completion.status);
        }
        if let Some(stamp) = self.stamps.get_mut(slot)
            && *stamp != 0
        {
            let submitted = std::mem::take(stamp);
            if submitted != WRITE {
                let latency = nanoseconds_since(self.epoch).saturating_sub(submitted & !WRITE);
                self.histogram.saturating_record(latency);
                if let Some(mixed) = &mut self.mixed {
                    mixed.record(submitted, latency);
                }
            }
            if let Some(mixed) = &mut self.mixed {
                mixed.writes += submitted & WRITE;
            }
        }
        self.source.completed(slot, completion.buffer.as_ref());
        self.commands += 1;
        Ok(completion.buffer)
    }

    /// Submits an I/O, and stores its submission time if it belongs to the latency sample. Returns
    /// false, and keeps the buffer as spare, if there is no I/O to submit.
    #[inline(always)]
    fn issue(&mut self, buffer: Buffer) -> anyhow::Result<bool> {
        let Some(slot) = self.start(buffer)? else { return Ok(false) };
        self.until_sample -= 1;
        if self.until_sample == 0 {
            self.until_sample = self.sample_every;
            if let Some(stamp) = self.stamps.get_mut(slot) {
                *stamp |= nanoseconds_since(self.epoch) & !WRITE;
            }
        }
        self.unpublished += 1;
        match self.batch {
            None => self.ring_in_time()?,
            Some(batch) if self.unpublished == batch => self.ring()?,
            Some(_) => {}
        }
        Ok(true)
    }

    /// Submits an I/O and returns its slot in the queue. Returns `None`, and keeps the buffer as
    /// spare, if there is no I/O to submit.
    #[inline(always)]
    fn start(&mut self, mut buffer: Buffer) -> anyhow::Result<Option<usize>> {
        if self.remaining == 0 {
            self.spare.push(buffer);
            return Ok(None);
        }
        let Some(io) = self.source.next() else {
            self.spare.push(buffer);
            return Ok(None);
        };
        // The job's share is inside the namespace, so the block needs no range check.
        let block = self.first_block + io.index * u64::from(self.blocks_per_io);
        let command = if io.write {
            self.source.fill(io, &mut buffer);
            self.templates.write
        } else {
            self.templates.read
        };
        let io_at = (command.from_block(block), io, block);
        let token = match self.source.submit(&mut self.queue, io_at, buffer) {
            Ok(token) => token,
            Err(refused) => bail!(refused.reason),
        };
        if io.write && self.mixed.is_some() {
            self.mark_write(token.index());
        }
        self.source.submitted(token.index(), io);
        self.remaining -= 1;
        Ok(Some(token.index()))
    }

    fn mark_write(&mut self, slot: usize) {
        if let Some(stamp) = self.stamps.get_mut(slot) {
            *stamp = WRITE;
        }
    }

    /// Submits an I/O for each spare buffer, as far as the source has I/Os.
    fn issue_spare(&mut self) -> anyhow::Result<()> {
        while let Some(buffer) = self.spare.pop() {
            if !self.issue(buffer)? {
                break;
            }
        }
        Ok(())
    }

    fn queue_name(&self) -> String {
        format!("queue {}", self.queue.qid())
    }

    /// True if all I/Os were submitted and have completed.
    pub(super) fn is_finished(&self) -> bool {
        self.remaining == 0 && self.is_empty()
    }

    /// True if a completion is available.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        self.queue.is_ready()
    }

    /// True if no I/O is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.outstanding() == 0
    }

    /// True if I/Os are started at fixed times instead of by completions.
    pub(super) fn is_paced(&self) -> bool {
        self.pace.is_some()
    }

    /// Sleeps until a completion arrives, the next I/O is due, or `limit` has passed.
    pub(super) fn wait(&mut self, limit: Duration) -> anyhow::Result<()> {
        let may_start = self.remaining != 0 && !self.spare.is_empty();
        let limit = longest_wait(limit, may_start, self.until_due());
        if !self.is_empty() {
            self.queue.wait(Some(Instant::now() + limit))?;
        } else if self.is_paced() {
            self.wait_for_time(limit);
        }
        Ok(())
    }

    /// Waits for the next start time while no I/O is in flight. A timer wakes the thread later than
    /// requested, by more than the duration of an I/O, so the thread sleeps only until
    /// [`SPIN_BEFORE_DUE`] before the start time, and then spins. The CPU time of spinning counts
    /// as the load generator's, not as the driver's.
    fn wait_for_time(&mut self, limit: Duration) {
        let began = Instant::now();
        let slept = limit.saturating_sub(SPIN_BEFORE_DUE);
        if !slept.is_zero() {
            std::thread::sleep(slept);
        }
        let awake = Instant::now();
        while began.elapsed() < limit {
            std::hint::spin_loop();
        }
        self.paced += awake.elapsed();
    }

    /// CPU time spent spinning until an I/O was due.
    pub(super) fn paced(&self) -> Duration {
        self.paced
    }

    /// I/Os completed so far.
    pub(super) fn commands(&self) -> u64 {
        self.commands
    }

    /// Statistics of the queue pair.
    pub(super) fn stats(&self) -> QueueStats {
        self.queue.stats()
    }

    /// Discards the latencies so far. `sample_every` sets a new sampling interval.
    pub(super) fn restart_latencies(&mut self, sample_every: Option<u32>) {
        self.histogram.reset();
        if let Some(mixed) = &mut self.mixed {
            mixed.latencies.read.reset();
            mixed.latencies.write.reset();
        }
        if let Some(every) = sample_every {
            self.sample_every = every.max(1);
            self.until_sample = self.sample_every;
        }
    }

    /// Discards the latencies of an ended interval of the time line.
    pub(super) fn discard_latencies(&mut self) {
        self.histogram.reset();
    }

    /// Queue identifier.
    pub(super) fn qid(&self) -> u16 {
        self.queue.qid()
    }

    /// Latencies since the last call of `discard_latencies`.
    pub(super) fn latencies(&self) -> &Histogram<u64> {
        &self.histogram
    }

    /// Separate latencies of reads and writes in a mixed workload.
    pub(super) fn mixed_latencies(&self) -> Option<&Directions<Histogram<u64>>> {
        self.mixed.as_ref().map(|mixed| &mixed.latencies)
    }

    /// Writes completed so far in a mixed workload; otherwise 0.
    pub(super) fn mixed_writes(&self) -> u64 {
        self.mixed.as_ref().map_or(0, |mixed| mixed.writes)
    }

    /// Starts the verification pass. Returns false if the source has none.
    pub(super) fn read_back(&mut self) -> bool {
        self.pace = None;
        let begins = self.source.read_back();
        self.remaining = if begins { u64::MAX } else { 0 };
        begins
    }

    /// Result of the verification.
    pub(super) fn checks(&self) -> Option<CheckSummary> {
        self.source.checks()
    }
}

impl Mixed {
    fn new() -> anyhow::Result<Self> {
        Ok(Self { writes: 0, latencies: Directions { read: histogram()?, write: histogram()? } })
    }

    /// Records the latency of a read or a write. Bit [`WRITE`] of the I/O's `stamp` (an element of
    /// `Job::stamps`) distinguishes the two.
    fn record(&mut self, stamp: u64, latency: u64) {
        let Directions { read, write } = &mut self.latencies;
        if stamp & WRITE == 0 { read } else { write }.saturating_record(latency);
    }
}

/// Longest time to wait for a completion: the time until the next I/O is due, but at most `limit`.
/// Without a free buffer (`may_start` is false) it is `limit` even if an I/O is overdue, because
/// only a completion frees a buffer.
fn longest_wait(limit: Duration, may_start: bool, due: Option<Duration>) -> Duration {
    due.filter(|_| may_start).map_or(limit, |due| due.min(limit))
}

/// Nanoseconds since `epoch`, at least 2, because 0 and 1 are stamps of I/Os that are not measured.
fn nanoseconds_since(epoch: Instant) -> u64 {
    u64::try_from(epoch.elapsed().as_nanos()).unwrap_or(u64::MAX).max(2)
}

#[cfg(test)]
mod tests {
    use super::longest_wait;
    use std::time::Duration;

    #[test]
    fn an_overdue_io_without_a_buffer_does_not_shorten_the_wait() {
        // The test compares durations and does not wait for them.
        let limit = Duration::from_millis(100);
        let due = |us| Some(Duration::from_micros(us));
        assert_eq!(longest_wait(limit, false, due(0)), limit, "overdue, and no buffer");
        assert_eq!(longest_wait(limit, true, due(0)), Duration::ZERO);
        // The test compares durations and does not wait for them.
        assert_eq!(longest_wait(limit, true, due(20)), Duration::from_micros(20));
        assert_eq!(longest_wait(limit, true, due(1 << 30)), limit);
        assert_eq!(longest_wait(limit, true, None), limit, "not paced");
    }
}
