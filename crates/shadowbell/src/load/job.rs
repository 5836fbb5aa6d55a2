//! A job: a queue pair that is kept full.

use super::config::{LoadConfig, Slice};
use super::io_source::{CheckSummary, IoSource};
use super::pace::Pace;
use crate::latency::histogram;
use crate::rng::Rng;
use anyhow::{Context, bail};
use hdrhistogram::Histogram;
use shadowbell_driver::{Buffer, Command, Completion, QueuePair, QueueStats};
use std::time::{Duration, Instant};

/// Nearer to its time than this, the next I/O of a paced job is waited for without sleeping: about
/// what the system needs to wake a thread, and then some.
const SPIN_BEFORE_DUE: Duration = Duration::from_micros(200);

/// The bit of a stamp that says that the I/O is the write of a mixed workload.
const WRITE: u64 = 1;

/// What is known of reads and writes apart.
struct Mixed {
    writes: u64,
    latencies: Directions<Histogram<u64>>,
}

/// Something of reads, and of writes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Directions<T> {
    /// Of reads.
    pub read: T,
    /// Of writes.
    pub write: T,
}

impl Directions<Histogram<u64>> {
    /// With those of others.
    pub(super) fn add(&mut self, others: &Self) -> anyhow::Result<()> {
        let both = [(&mut self.read, &others.read), (&mut self.write, &others.write)];
        for (sum, of_others) in both {
            sum.add(of_others).context("adding up the latencies")?;
        }
        Ok(())
    }
}

/// A queue pair and what it works on. Nothing in here allocates or asks the system for anything
/// once it has started, except that a doorbell may be a message.
pub(super) struct Job<L> {
    queue: QueuePair,
    /// A read and a write, of the first blocks of the namespace.
    forms: Directions<Command>,
    source: L,
    first_block: u64,
    blocks_per_io: u32,
    /// Buffers that are not in flight.
    spare: Vec<Buffer>,
    /// I/Os still to be submitted.
    left: u64,
    /// How many are rung for at once; as the queue sees fit if that is not said.
    batch: Option<u32>,
    /// I/Os that the controller may not know of.
    unrung: u32,
    commands: u64,
    /// By slot of the queue: when the command was submitted, in nanoseconds after `epoch`; 0 for
    /// one that is not timed. Looking at the clock costs as much as a good part of an I/O. The
    /// lowest bit is for a write of a mixed workload ([`WRITE`]).
    stamps: Box<[u64]>,
    epoch: Instant,
    sample_every: u32,
    until_sample: u32,
    histogram: Histogram<u64>,
    /// Reads and writes apart, if there are both.
    mixed: Option<Mixed>,
    /// When to start I/Os; as soon as there is a buffer if `None`.
    pace: Option<Pace>,
    /// Processor time that was spent on nothing but waiting for an I/O to be due.
    paced: Duration,
}

impl<L: IoSource> Job<L> {
    pub(super) fn new(
        queue: QueuePair,
        forms: Directions<Command>,
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
            // A device that compresses or deduplicates shall not have it easy.
            random.as_chunks_mut::<8>().0.iter_mut().for_each(|w| *w = rng.next().to_le_bytes());
            if !buffer.copy_from(0, &random) {
                bail!("a buffer is shorter than an I/O");
            }
        }
        Ok(Self {
            stamps: vec![0; queue.capacity()].into_boxed_slice(),
            queue,
            forms,
            source,
            first_block: slice.of_job(index),
            blocks_per_io: slice.blocks_per_io,
            spare,
            left: config.number_ios.unwrap_or(u64::MAX),
            batch: config.iodepth_batch.map(|batch| if batch == 0 { u32::MAX } else { batch }),
            unrung: 0,
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

    /// Submits as much as there are buffers for, and rings.
    pub(super) fn fill(&mut self) -> anyhow::Result<()> {
        if self.pace.is_some() {
            self.issue_due()?;
        } else {
            self.issue_spare()?;
        }
        self.ring()
    }

    /// Takes the completions that there are, and if it is to `go` on, submits as many I/Os again.
    /// How many completions there were.
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
                // If there are more completions by now, the next turn may make it worth it.
                None if go => self.ring_in_time()?,
                _ => self.ring()?,
            }
        } else if self.unrung != 0 {
            self.ring()?;
        }
        Ok(found as u64)
    }

    /// Takes the completions that there are, and if it is to `go` on, starts what is due.
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

    /// Starts the I/Os that are due, as far as there are buffers; how many. What has to wait for a
    /// buffer is late, and its latency shows that.
    fn issue_due(&mut self) -> anyhow::Result<usize> {
        let mut started = 0;
        while self.left != 0
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

    /// How long it is until the next I/O is due; nothing for a job that is not paced.
    fn until_due(&mut self) -> Option<Duration> {
        let now = nanoseconds_since(self.epoch);
        let due = self.pace.as_mut()?.due(now);
        Some(Duration::from_nanos(due.saturating_sub(now)))
    }

    #[inline(always)]
    fn ring_in_time(&mut self) -> anyhow::Result<()> {
        if self.queue.ring_in_time()? {
            self.unrung = 0;
        }
        Ok(())
    }

    #[inline]
    fn ring(&mut self) -> anyhow::Result<()> {
        self.unrung = 0;
        Ok(self.queue.ring()?)
    }

    /// Takes a completion into account, and gives its buffer back.
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

    /// Submits an I/O, and times it if it is its turn; the buffer is spare if there is none.
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
        self.unrung += 1;
        match self.batch {
            None => self.ring_in_time()?,
            Some(batch) if self.unrung == batch => self.ring()?,
            Some(_) => {}
        }
        Ok(true)
    }

    /// Submits an I/O, and says in which slot of the queue it is; the buffer is spare if there is
    /// none.
    #[inline(always)]
    fn start(&mut self, mut buffer: Buffer) -> anyhow::Result<Option<usize>> {
        if self.left == 0 {
            self.spare.push(buffer);
            return Ok(None);
        }
        let Some(io) = self.source.next() else {
            self.spare.push(buffer);
            return Ok(None);
        };
        // The part of the namespace that is the job's was checked to lie inside of it.
        let block = self.first_block + io.index * u64::from(self.blocks_per_io);
        let command = if io.write {
            self.source.fill(io, &mut buffer);
            self.forms.write
        } else {
            self.forms.read
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
        self.left -= 1;
        Ok(Some(token.index()))
    }

    fn mark_write(&mut self, slot: usize) {
        if let Some(stamp) = self.stamps.get_mut(slot) {
            *stamp = WRITE;
        }
    }

    /// Submits with the buffers that are spare, as far as the source goes.
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

    /// Whether all that was to be submitted was, and has completed.
    pub(super) fn is_finished(&self) -> bool {
        self.left == 0 && self.is_empty()
    }

    /// Whether a completion is there to be taken.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        self.queue.is_ready()
    }

    /// Whether nothing is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.outstanding() == 0
    }

    /// Whether I/Os are started by the clock.
    pub(super) fn is_paced(&self) -> bool {
        self.pace.is_some()
    }

    /// Sleeps until a completion, the time of the next I/O, or for `limit` at most.
    pub(super) fn wait(&mut self, limit: Duration) -> anyhow::Result<()> {
        let may_start = self.left != 0 && !self.spare.is_empty();
        let limit = longest_wait(limit, may_start, self.until_due());
        if !self.is_empty() {
            self.queue.wait(Some(Instant::now() + limit))?;
        } else if self.is_paced() {
            self.wait_for_time(limit);
        }
        Ok(())
    }

    /// Nothing is in flight: waits for the time alone. A timer would be late by more than the I/O
    /// takes, so the last bit is waited for awake, as a program would be that has other things to
    /// do. That is the load's own, and no processor time of the driver's.
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

    /// Processor time that was spent on nothing but waiting for an I/O to be due.
    pub(super) fn paced(&self) -> Duration {
        self.paced
    }

    /// I/Os completed so far.
    pub(super) fn commands(&self) -> u64 {
        self.commands
    }

    /// What the queue pair did so far.
    pub(super) fn stats(&self) -> QueueStats {
        self.queue.stats()
    }

    /// Forgets the latencies so far, and from now on times one I/O in `sample_every`.
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

    /// The latencies so far are those of an interval that is over.
    pub(super) fn forget_latencies(&mut self) {
        self.histogram.reset();
    }

    /// The queue's identifier.
    pub(super) fn qid(&self) -> u16 {
        self.queue.qid()
    }

    /// The latencies since then.
    pub(super) fn latencies(&self) -> &Histogram<u64> {
        &self.histogram
    }

    /// Of a mixed workload, those of reads and of writes.
    pub(super) fn mixed_latencies(&self) -> Option<&Directions<Histogram<u64>>> {
        self.mixed.as_ref().map(|mixed| &mixed.latencies)
    }

    /// Of a mixed workload, the writes completed so far.
    pub(super) fn mixed_writes(&self) -> u64 {
        self.mixed.as_ref().map_or(0, |mixed| mixed.writes)
    }

    /// Begins to read back what was written, if that is what the source is for.
    pub(super) fn read_back(&mut self) -> bool {
        self.pace = None;
        let begins = self.source.read_back();
        self.left = if begins { u64::MAX } else { 0 };
        begins
    }

    /// What checking the content came to.
    pub(super) fn checks(&self) -> Option<CheckSummary> {
        self.source.checks()
    }
}

impl Mixed {
    fn new() -> anyhow::Result<Self> {
        Ok(Self { writes: 0, latencies: Directions { read: histogram()?, write: histogram()? } })
    }

    /// The I/O with this stamp has taken so long.
    fn record(&mut self, stamp: u64, latency: u64) {
        let Directions { read, write } = &mut self.latencies;
        if stamp & WRITE == 0 { read } else { write }.saturating_record(latency);
    }
}

/// How long to wait for a completion: at most `limit`, and until the next I/O is due if it may be
/// started then. One that is overdue for want of a buffer is no reason to stay awake.
fn longest_wait(limit: Duration, may_start: bool, due: Option<Duration>) -> Duration {
    due.filter(|_| may_start).map_or(limit, |due| due.min(limit))
}

/// At least 2, because 0 and 1 stand for an I/O that is not timed.
fn nanoseconds_since(epoch: Instant) -> u64 {
    u64::try_from(epoch.elapsed().as_nanos()).unwrap_or(u64::MAX).max(2)
}

#[cfg(test)]
mod tests {
    use super::longest_wait;
    use std::time::Duration;

    #[test]
    fn an_io_that_has_to_wait_for_a_buffer_keeps_nobody_awake() {
        // Nothing waits: only times are computed.
        let limit = Duration::from_millis(100);
        let due = |us| Some(Duration::from_micros(us));
        assert_eq!(longest_wait(limit, false, due(0)), limit, "overdue, and no buffer");
        assert_eq!(longest_wait(limit, true, due(0)), Duration::ZERO);
        // Nothing waits: only times are computed.
        assert_eq!(longest_wait(limit, true, due(20)), Duration::from_micros(20));
        assert_eq!(longest_wait(limit, true, due(1 << 30)), limit);
        assert_eq!(longest_wait(limit, true, None), limit, "not paced");
    }
}
