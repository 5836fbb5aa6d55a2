//! A client that keeps commands in flight and verifies every block that it reads. It runs in this
//! process, which is not killed.
//!
//! The client is the driver with shadow doorbells and interrupts, but without recovery. A missing
//! completion, a lost interrupt or an error ends the load, so the driver cannot hide an error of
//! the server.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use shadowbell_driver::{
    AttachOptions, Buffer, BufferPool, Completion, Controller, Namespace, QueuePair, Recovery,
    SpinPolicy, Timeouts, VfioUser,
};

use super::counters::add;
use super::pattern::BLOCK;
use super::slots::{Kind, Op, SLOT_BYTES, SlotMap};

/// Time without a completion after which commands count as lost, as in Linux
/// (`nvme_core.io_timeout`).
pub(crate) const STALL: Duration = Duration::from_secs(30);
/// Time for which a client polls before it sleeps. The time is short, because a restarting server
/// needs the CPU.
const SPIN: SpinPolicy = SpinPolicy { max: Duration::from_micros(20), adaptive: false };

/// Rate of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// Number of commands in flight.
    pub(crate) depth: u32,
    /// Pause after the completion of all commands in flight, before new ones are submitted. If it
    /// is zero, the client submits a new command after each completion.
    pub(crate) rest: Duration,
    /// Ratio of all commands to flushes; 0 for no flushes.
    pub(crate) flush_every: u64,
}

/// Progress of a running load.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    /// Number of completed commands.
    pub(crate) commands: AtomicU64,
    /// Number of verified blocks.
    pub(crate) blocks: AtomicU64,
    gap: AtomicU64,
    slowest: AtomicU64,
    failure: Mutex<Option<String>>,
}

impl Meter {
    /// Returns the longest time without a completion, and the longest duration of a command, since
    /// the last call of this function.
    pub(crate) fn take(&self) -> Longest {
        let nanos = |of: &AtomicU64| Duration::from_nanos(of.swap(0, Ordering::Relaxed));
        Longest { gap: nanos(&self.gap), command: nanos(&self.slowest) }
    }

    /// Reason of the failure, if the load has failed.
    pub(crate) fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Longest times of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Longest {
    /// Longest time without a completion.
    pub(crate) gap: Duration,
    /// Longest time from submission to completion.
    pub(crate) command: Duration,
}

/// A disk and its client.
pub(crate) struct Load {
    name: String,
    controller: Controller,
    namespace: Namespace,
    queue: QueuePair,
    pool: BufferPool,
    depth: usize,
    rest: Duration,
    slots: SlotMap,
    /// Operation and submission time of each command in flight, by the index of its token in the
    /// driver's queue.
    in_flight: Vec<Option<(Op, Instant)>>,
    scratch: Vec<u8>,
    /// Time of the last completion.
    last: Instant,
}

impl Load {
    /// Attaches to a controller whose first namespace is the disk.
    ///
    /// # Errors
    ///
    /// Attaching failed.
    pub(crate) fn attach(name: &str, socket: &Path, slots: SlotMap, pace: Pace) -> Result<Self> {
        let Pace { depth, rest, .. } = pace;
        let transport = VfioUser::connect(socket, STALL)?;
        let options = AttachOptions {
            queue_depth: depth + 1,
            spin: SPIN,
            timeouts: Timeouts { admin: STALL, io: STALL, ..Timeouts::default() },
            recovery: Recovery::OFF,
            ..AttachOptions::default()
        };
        let mut controller = Controller::attach(std::sync::Arc::new(transport), &options)?;
        let queue = controller.take_queue_pair().context("no queue pair")?;
        let namespace = controller.namespace(1).context("no namespace")?.clone();
        let pool = controller.buffers(depth as usize, SLOT_BYTES)?;
        if queue.capacity() < depth as usize || !queue.has_interrupt() {
            bail!("{name}: a queue of {} entries, or without an interrupt", queue.capacity());
        }
        let in_flight = vec![None; queue.capacity()];
        Ok(Self {
            name: name.to_owned(),
            controller,
            namespace,
            queue,
            pool,
            depth: depth as usize,
            rest,
            slots,
            in_flight,
            scratch: Vec::new(),
            last: Instant::now(),
        })
    }

    /// Runs until `stop` is set, and then reads all slots once more. Returns the model of the
    /// slots.
    pub(crate) fn run(mut self, stop: &AtomicBool, meter: &Meter) -> Option<SlotMap> {
        let outcome = self.work(stop, meter).and_then(|()| self.read_all(meter));
        if let Err(error) = &outcome {
            *lock(&meter.failure) = Some(format!("{}: {error:#}", self.name));
        }
        outcome.is_ok().then_some(self.slots)
    }

    fn work(&mut self, stop: &AtomicBool, meter: &Meter) -> Result<()> {
        self.last = Instant::now();
        let mut due = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            while self.queue.outstanding() < self.depth {
                let op = self.slots.draw();
                self.submit(op, now)?;
            }
            self.take(meter)?;
            if !self.rest.is_zero() {
                while self.queue.outstanding() > 0 {
                    self.take(meter)?;
                }
                due = (due + self.rest).max(Instant::now());
                // The pace of the load: wait until the next command is due.
                sleep(due.saturating_duration_since(Instant::now()));
                self.last = Instant::now();
            }
        }
        while self.queue.outstanding() > 0 {
            self.take(meter)?;
        }
        Ok(())
    }

    fn read_all(&mut self, meter: &Meter) -> Result<()> {
        let mut nth = 0;
        loop {
            let now = Instant::now();
            while self.queue.outstanding() < self.depth
                && let Some(op) = self.slots.read(nth)
            {
                nth += 1;
                self.submit(op, now)?;
            }
            if self.queue.outstanding() == 0 {
                break;
            }
            self.take(meter)?;
        }
        let stats = self.queue.stats();
        let lost = self.in_flight.iter().filter(|entry| entry.is_some()).count();
        if stats.unknown_completions != 0 || stats.bad_sq_heads != 0 || lost != 0 {
            bail!(
                "{} completions of no command, {} impossible heads, {lost} commands lost",
                stats.unknown_completions,
                stats.bad_sq_heads
            );
        }
        let registers = self.controller.registers().context("the registers")?;
        if registers.csts.cfs() || !registers.csts.rdy() {
            bail!("at the end the controller is not ready: {registers:?}");
        }
        Ok(())
    }

    fn submit(&mut self, op: Op, now: Instant) -> Result<()> {
        let (first, blocks) = (op.first(), op.blocks() as u32);
        let mut buffer = self.pool.take().context("a buffer was not given back")?;
        let command = match op.kind {
            Kind::Flush => self.namespace.flush(),
            Kind::Read => {
                // The buffer is overwritten, because data of an earlier read could hide that this
                // read has transferred nothing.
                buffer.fill(0x5a);
                self.namespace.read(first, blocks)?
            }
            Kind::Write => {
                self.slots.content(op, &mut self.scratch);
                if !buffer.copy_from(0, &self.scratch) {
                    bail!("a buffer is too short");
                }
                self.namespace.write(first, blocks)?
            }
        };
        let buffer = (op.kind != Kind::Flush).then_some(buffer);
        let token =
            self.queue.submit(command, buffer).map_err(|refused| anyhow!(refused.reason))?;
        let entry = self.in_flight.get_mut(token.index()).context("an invalid slot")?;
        if entry.replace((op, now)).is_some() {
            bail!("two commands have one slot");
        }
        Ok(())
    }

    /// Waits for completions and takes them.
    fn take(&mut self, meter: &Meter) -> Result<()> {
        let began = Instant::now();
        // Limit of the wait for an interrupt, after which the load has failed.
        if !self.queue.wait(Some(began + STALL))? && began.elapsed() >= STALL {
            bail!(
                "{} commands have no completion after {} s",
                self.queue.outstanding(),
                STALL.as_secs()
            );
        }
        // There was a completion, but no interrupt for it within the limit, so the interrupt is
        // lost.
        if began.elapsed() >= STALL {
            bail!("there was no interrupt for completions that are there");
        }
        let mut count = 0;
        let now = Instant::now();
        while let Some(completion) = self.queue.pop() {
            count += 1;
            self.complete(completion, now, meter)?;
        }
        self.queue.ring_cq_doorbell_if_needed()?;
        if count != 0 {
            let gap = (now - self.last).as_nanos() as u64;
            meter.gap.fetch_max(gap, Ordering::Relaxed);
            self.last = now;
            add(&meter.commands, count);
        }
        Ok(())
    }

    fn complete(&mut self, completion: Completion, now: Instant, meter: &Meter) -> Result<()> {
        let Completion { token, status, buffer, .. } = completion;
        let taken = self.in_flight.get_mut(token.index()).and_then(Option::take);
        let (op, began) = taken.with_context(|| format!("a completion of no command: {status}"))?;
        let took = now.saturating_duration_since(began).as_nanos() as u64;
        meter.slowest.fetch_max(took, Ordering::Relaxed);
        if !status.is_success() {
            bail!("{:?} of {} blocks at {}: {status}", op.kind, op.blocks(), op.first());
        }
        self.scratch.clear();
        if op.kind == Kind::Read {
            self.scratch.resize(op.blocks() as usize * BLOCK, 0);
            let has_data = buffer.is_some_and(|from: Buffer| from.copy_to(0, &mut self.scratch));
            if !has_data {
                bail!("a read has come back without its buffer");
            }
        }
        add(&meter.blocks, self.slots.completed(op, &self.scratch)?);
        Ok(())
    }
}
