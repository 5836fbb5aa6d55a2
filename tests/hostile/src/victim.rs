//! The victim, an honest neighbour: one read at a time, at a fixed rate. The victim uses a
//! controller, or is a client of an export.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::setpriority_process;
use shadowbell_spec::Sqe;

use super::attack::Clock;
use super::watch::{Serving, Threads};
use crate::peer::guest::Guest;
use crate::peer::nbd::NbdClient;
use crate::peer::queue::BAR0;
use shadowbell_spec::regs;

/// Maximum reads per second. The next read is submitted only after the previous one has completed.
const PER_SECOND: u32 = 1000;
/// Number of disk reads for each read of a register.
const REGISTER_EVERY: u64 = 8;
/// Time for which the victim polls for a completion without pauses. After this time it pauses
/// between polls.
const SPIN: Duration = Duration::from_micros(60);
// The pause between two polls for a completion.
const POLL: Duration = Duration::from_micros(20);
/// Time after which a read counts as lost and the measurement ends.
const LOST: Duration = Duration::from_secs(6);
/// Number of blocks of a read.
const BLOCKS: u64 = 8;
/// Number of blocks of the disk that are written and read.
const USED_BLOCKS: u64 = 1024;
/// Memory size of the victim's guest.
const MEMORY: u64 = 1 << 20;

/// Latencies of the victim.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen {
    pub reads: usize,
    pub p50: Duration,
    pub p99: Duration,
    pub longest: Duration,
    /// 99th percentile of the latency, without the time for which the victim and the threads that
    /// serve the read were runnable without a CPU.
    pub served_p99: Duration,
    pub served_longest: Duration,
    /// Longest latency of a register read, and the same without waits for a CPU. The reactor serves
    /// these reads.
    pub register: Duration,
    pub served_register: Duration,
    /// True if a read was lost.
    pub lost: bool,
}

/// An attached victim. Each block of its disk contains the block's number.
#[derive(Debug)]
pub enum Victim {
    /// A guest, and the address of its read buffer.
    Guest(Guest, u64),
    Nbd(NbdClient),
}

/// Raises the priority of the calling thread as far as permitted, so that other load of the
/// machine does not delay it.
pub fn hurry() {
    let _ = setpriority_process(None, -19);
}

/// Gives the calling thread a lower priority than the server and the victim, but a higher one than
/// other load of the machine.
pub fn give_way() {
    let _ = setpriority_process(None, -5);
}

impl Victim {
    /// Attaches to a controller, and writes the blocks that are read later.
    pub fn attach(socket: &std::path::Path) -> Result<Self> {
        let mut guest = Guest::attach(socket, MEMORY)?;
        guest.create_queue(16)?;
        let buffer = guest.alloc(4096)?;
        for block in (0..USED_BLOCKS).step_by(BLOCKS as usize) {
            for part in 0..BLOCKS {
                let at = (buffer + part * 512) as usize;
                guest.memory.write(at, &(block + part)).context("the buffer")?;
            }
            let sqe = Sqe::write(1, block, BLOCKS as u16 - 1, 0);
            let cqe = guest.io(0, sqe.with_prps(Guest::address(buffer), 0))?;
            if !cqe.status().is_success() {
                bail!("the victim's write: {}", cqe.status());
            }
        }
        Ok(Self::Guest(guest, buffer))
    }

    /// Attaches to an export, and writes the blocks that are read later.
    pub fn attach_nbd(socket: &std::path::Path) -> Result<Self> {
        let mut client = NbdClient::attach(socket)?;
        let disk: Vec<u8> = (0..USED_BLOCKS).flat_map(block_of).collect();
        client.write(0, &disk)?;
        Ok(Self::Nbd(client))
    }

    /// Reads until the clock ends, but at least once. Waits of the server's threads for a CPU are
    /// recorded separately.
    pub fn watch(&mut self, clock: &Clock, server: &Serving) -> Result<Seen> {
        let own = Threads::calling()?;
        let mut times = Vec::new();
        let mut served = Vec::new();
        let mut seen = Seen::default();
        let mut due = Instant::now();
        while times.is_empty() || !clock.is_over() {
            let block = (times.len() as u64 * BLOCKS) % USED_BLOCKS;
            let waited = own.waited() + server.io.waited();
            let read = match self {
                Self::Guest(guest, buffer) => read(guest, *buffer, block)?,
                Self::Nbd(client) => Some(read_nbd(client, block)?),
            };
            let Some(time) = read else {
                seen.lost = true;
                times.push(LOST);
                served.push(LOST);
                break;
            };
            times.push(time);
            clock.count_read();
            let waited = (own.waited() + server.io.waited()).saturating_sub(waited);
            served.push(time.saturating_sub(waited));
            if let Self::Guest(guest, _) = self
                && (times.len() as u64).is_multiple_of(REGISTER_EVERY)
            {
                let waited = own.waited() + server.registers.waited();
                let began = Instant::now();
                guest.link.read(BAR0, regs::CSTS, 4)?;
                let took = began.elapsed();
                let waited = (own.waited() + server.registers.waited()).saturating_sub(waited);
                seen.register = seen.register.max(took);
                seen.served_register = seen.served_register.max(took.saturating_sub(waited));
            }
            // The pace of the victim: the next read is due one interval after the previous one was
            // due, but not in the past. So a delayed read delays the following ones.
            due = (due + Duration::from_secs(1) / PER_SECOND).max(Instant::now());
            // The sleep ends when the next read is due.
            sleep(due.saturating_duration_since(Instant::now()));
        }
        seen.reads = times.len();
        for times in [&mut times, &mut served] {
            times.sort_unstable();
        }
        (seen.p50, seen.p99, seen.longest) = (at(&times, 0.5), at(&times, 0.99), at(&times, 1.0));
        (seen.served_p99, seen.served_longest) = (at(&served, 0.99), at(&served, 1.0));
        Ok(seen)
    }
}

/// Quantile `share` of the sorted `times`.
fn at(times: &[Duration], share: f64) -> Duration {
    let index = (times.len() as f64 * share) as usize;
    times.get(index.min(times.len().saturating_sub(1))).copied().unwrap_or_default()
}

/// Contents of a block of the victim's disk.
fn block_of(number: u64) -> [u8; 512] {
    let mut block = [0; 512];
    block[..8].copy_from_slice(&number.to_le_bytes());
    block
}

/// Reads once and verifies the data. Returns the latency, or `None` if the read is lost.
fn read(guest: &mut Guest, buffer: u64, block: u64) -> Result<Option<Duration>> {
    let sqe = Sqe::read(1, block, BLOCKS as u16 - 1, 0);
    let sqe = sqe.with_prps(Guest::address(buffer), 0);
    let (queue, link) = guest.queue(0)?;
    queue.push(sqe)?;
    let began = Instant::now();
    queue.ring(link)?;
    let cqe = loop {
        if let Some(cqe) = queue.pop() {
            break cqe;
        }
        let waited = began.elapsed();
        if waited > LOST {
            return Ok(None);
        }
        if waited > SPIN {
            sleep(POLL);
        }
    };
    let took = began.elapsed();
    queue.consumed(link)?;
    if !cqe.status().is_success() {
        bail!("the victim's read: {}", cqe.status());
    }
    let found: u64 = guest.memory.read(buffer as usize).context("the buffer")?;
    if found != block {
        bail!("the victim read block {found} instead of {block}");
    }
    Ok(Some(took))
}

/// Reads once from an export and verifies the data. A lost read is an error.
fn read_nbd(client: &mut NbdClient, block: u64) -> Result<Duration> {
    let mut data = [0; (BLOCKS * 512) as usize];
    let began = Instant::now();
    client.read(block * 512, &mut data).context("the victim's read")?;
    let took = began.elapsed();
    if data[..8] != block.to_le_bytes() {
        bail!("the victim read something else than block {block}");
    }
    Ok(took)
}
