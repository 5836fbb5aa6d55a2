//! Job: submits commands to its part of the namespace and keeps its queue pair full. Then it reads
//! all blocks with known content once more.

use super::expected_data::{DESCRIBED, ExpectedData, Kind, Op};
use anyhow::{anyhow, bail};
use shadowbell_driver::{
    Buffer, BufferPool, Command, Completion, Namespace, QueuePair, QueueStats,
};
use shadowbell_spec::Status;
use shadowbell_spec::nvm::DsmRange;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Number of attempts to draw a command that does not overlap one in flight.
const DRAWS: usize = 64;
/// Longest sleep, and so the longest time until a job notices that it has to stop.
const LONGEST_SLEEP: Duration = Duration::from_millis(200);

/// Limits of all jobs.
#[derive(Clone, Copy)]
pub(super) struct JobLimits {
    pub(super) depth: usize,
    /// Number of commands per job.
    pub(super) commands: Option<u64>,
    /// Number of times that a failed command is submitted again.
    pub(super) retries: u32,
    /// Time without completions after which commands in flight are considered lost.
    pub(super) stall_timeout: Duration,
}

#[derive(Clone, Copy)]
struct InFlight {
    op: Op,
    tries: u32,
}

/// Results of a job.
#[derive(Default)]
pub(super) struct JobResult {
    /// Number of commands, indexed as [`Kind::ALL`].
    pub(super) commands: [u64; Kind::ALL.len()],
    /// Failed commands that were submitted again.
    pub(super) retried: u64,
    /// Commands that failed finally.
    pub(super) failed: u64,
    pub(super) checked: u64,
    pub(super) bad: u64,
    /// Descriptions of the first bad blocks and failed commands.
    pub(super) described: Vec<String>,
    pub(super) slowest: Duration,
    pub(super) queue: QueueStats,
}

impl JobResult {
    /// Adds the results of another job.
    pub(super) fn add(&mut self, other: Self) {
        for (sum, count) in self.commands.iter_mut().zip(other.commands) {
            *sum += count;
        }
        self.retried += other.retried;
        self.failed += other.failed;
        self.checked += other.checked;
        self.bad += other.bad;
        self.described.extend(other.described);
        self.described.truncate(DESCRIBED);
        self.slowest = self.slowest.max(other.slowest);
        let QueueStats { sq_doorbell_mmio_writes, cq_doorbell_mmio_writes, .. } = other.queue;
        self.queue.sq_doorbell_mmio_writes += sq_doorbell_mmio_writes;
        self.queue.cq_doorbell_mmio_writes += cq_doorbell_mmio_writes;
        self.queue.unknown_completions += other.queue.unknown_completions;
    }
}

pub(super) struct Job {
    queue: QueuePair,
    namespace: Namespace,
    /// First block of the part in the namespace.
    first_block: u64,
    expected: ExpectedData,
    pool: BufferPool,
    limits: JobLimits,
    /// Commands in flight with their submission times, by slot of the queue.
    in_flight: Box<[Option<(InFlight, Instant)>]>,
    submitted: u64,
    found: JobResult,
}

impl Job {
    pub(super) fn new(
        queue: QueuePair,
        namespace: Namespace,
        first_block: u64,
        expected: ExpectedData,
        pool: BufferPool,
        limits: JobLimits,
    ) -> Self {
        let in_flight = vec![None; queue.capacity()].into();
        let found = JobResult::default();
        Self {
            queue,
            namespace,
            first_block,
            expected,
            pool,
            limits,
            in_flight,
            submitted: 0,
            found,
        }
    }

    /// Runs until `is_done` returns true or the number of commands is reached, then runs the
    /// verification pass. The results are returned even after an error.
    pub(super) fn run(mut self, is_done: &dyn Fn() -> bool) -> (JobResult, anyhow::Result<()>) {
        let outcome = self.work(is_done).and_then(|()| self.check_all());
        let Self { mut found, expected, queue, .. } = self;
        (found.checked, found.bad) = (expected.checked, expected.bad);
        found.described.extend(expected.described);
        found.queue = queue.stats();
        (found, outcome)
    }

    fn work(&mut self, is_done: &dyn Fn() -> bool) -> anyhow::Result<()> {
        self.keep_full(&mut |job| {
            let all = job.limits.commands.is_some_and(|most| job.submitted >= most);
            if all || is_done() {
                return Next::Nothing;
            }
            (0..DRAWS).find_map(|_| job.expected.draw()).map_or(Next::Later, Next::Command)
        })
    }

    fn check_all(&mut self) -> anyhow::Result<()> {
        self.keep_full(&mut |job| job.expected.read_back().map_or(Next::Nothing, Next::Command))
    }

    /// Keeps the queue full of commands from `next`. Ends when `next` has no more commands and none
    /// is in flight.
    fn keep_full(&mut self, next: &mut dyn FnMut(&mut Self) -> Next) -> anyhow::Result<()> {
        let mut last = Instant::now();
        loop {
            let mut over = false;
            while self.queue.outstanding() < self.limits.depth {
                match next(self) {
                    Next::Command(op) => {
                        let Some(buffer) = self.pool.take() else {
                            bail!("a buffer was not returned")
                        };
                        self.submit(InFlight { op, tries: 0 }, buffer)?;
                    }
                    Next::Later => break,
                    Next::Nothing => {
                        over = true;
                        break;
                    }
                }
            }
            if over && self.queue.outstanding() == 0 {
                self.queue.ring_cq_doorbell_if_needed()?;
                return self.is_empty();
            }
            let _ = self.queue.wait(Some(Instant::now() + LONGEST_SLEEP))?;
            // Bounded by the number of slots: a command that is submitted again here may complete
            // at once, and is then handled by the next iteration of the outer loop.
            for _ in 0..self.in_flight.len() {
                let Some(completion) = self.queue.pop() else { break };
                last = Instant::now();
                self.complete(completion)?;
            }
            if last.elapsed() > self.limits.stall_timeout && self.queue.outstanding() != 0 {
                bail!(
                    "queue {}: nothing has completed for {} s, and {} commands are in flight",
                    self.queue.qid(),
                    self.limits.stall_timeout.as_secs(),
                    self.queue.outstanding()
                );
            }
        }
    }

    /// Returns an error if a command is still recorded as in flight after the queue has reported
    /// the end of all commands.
    fn is_empty(&self) -> anyhow::Result<()> {
        let lost = self.in_flight.iter().filter(|entry| entry.is_some()).count();
        if lost != 0 || self.pool.available() != self.pool.count() {
            bail!("queue {}: {lost} commands never completed", self.queue.qid());
        }
        Ok(())
    }

    fn submit(&mut self, it: InFlight, mut buffer: Buffer) -> anyhow::Result<()> {
        let Op { kind, first, blocks, .. } = it.op;
        let (lba, namespace) = (self.first_block + first, &self.namespace);
        let command: Command = match kind {
            Kind::Read => {
                // Overwrites older content of the buffer. Otherwise this content could be mistaken
                // for the data read.
                buffer.fill(0x5a);
                namespace.read(lba, blocks)?
            }
            Kind::Write => namespace.write(lba, blocks)?,
            Kind::Compare => namespace.compare(lba, blocks)?,
            Kind::WriteZeroes => namespace.write_zeroes(lba, blocks, true)?,
            Kind::Deallocate => namespace.deallocate(1)?,
            Kind::Flush => namespace.flush(),
        };
        let filled = match kind {
            Kind::Write | Kind::Compare => self.expected.fill(it.op, &mut buffer),
            Kind::Deallocate => {
                let range = DsmRange { attributes: 0, blocks, slba: lba };
                buffer.copy_from(0, range.as_bytes())
            }
            _ => true,
        };
        if !filled {
            bail!("a buffer is shorter than a command needs");
        }
        let buffer = (command.transfer_bytes() != 0).then_some(buffer);
        let token = match self.queue.submit(command, buffer) {
            Ok(token) => token,
            Err(refused) => bail!(refused.reason),
        };
        let Some(entry) = self.in_flight.get_mut(token.index()) else {
            bail!("a command has slot {}, which the queue does not have", token.index());
        };
        if entry.replace((it, Instant::now())).is_some() {
            bail!("a command has the slot of another that has not completed");
        }
        self.submitted += 1;
        Ok(())
    }

    fn complete(&mut self, completion: Completion) -> anyhow::Result<()> {
        let Completion { token, status, buffer, .. } = completion;
        let taken = self.in_flight.get_mut(token.index()).and_then(Option::take);
        let (it, began) =
            taken.ok_or_else(|| anyhow!("a completion without a command: {status}"))?;
        self.found.slowest = self.found.slowest.max(began.elapsed());
        let op = it.op;
        if status.is_success() {
            let index = Kind::ALL.iter().position(|kind| *kind == op.kind);
            if let Some(count) = index.and_then(|index| self.found.commands.get_mut(index)) {
                *count += 1;
            }
            self.expected.succeeded(op, buffer.as_ref());
            return Ok(());
        }
        if op.kind == Kind::Compare && status.code() == Status::COMPARE_FAILURE {
            self.expected.compare_failed(op);
            return Ok(());
        }
        if it.tries < self.limits.retries
            && let Some(buffer) = buffer.or_else(|| self.pool.take())
        {
            // The state of the blocks is unknown, so the command is repeated before any other
            // command on them.
            self.found.retried += 1;
            return self.submit(InFlight { tries: it.tries + 1, op }, buffer);
        }
        self.found.failed += 1;
        if self.found.described.len() < DESCRIBED {
            let (kind, lba) = (op.kind.name(), self.first_block + op.first);
            self.found.described.push(format!(
                "{kind} of {} blocks at block {lba} ended with: {status}",
                op.blocks
            ));
        }
        self.expected.failed(op);
        Ok(())
    }
}

/// Next step of a job.
enum Next {
    Command(Op),
    /// No command can be drawn until others have completed.
    Later,
    Nothing,
}
