//! The neighbour that is honest: one read at a time, at its own pace. It has a controller, or is a
//! client of an export.

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

/// Reads in a second, at most: a read that takes longer than its turn puts off the next.
const PER_SECOND: u32 = 1000;
/// A register is read after so many reads of the disk.
const REGISTER_EVERY: u64 = 8;
/// How long a read is polled for; then it is looked at every so often.
const SPIN: Duration = Duration::from_micros(60);
// The pause between two looks.
const LOOK: Duration = Duration::from_micros(20);
/// After this a read is taken for lost, and the measurement has ended.
const LOST: Duration = Duration::from_secs(6);
/// Blocks of a read.
const BLOCKS: u64 = 8;
/// Blocks of the disk that are written, and read.
const USED_BLOCKS: u64 = 1024;
/// The memory of the victim's guest.
const MEMORY: u64 = 1 << 20;

/// What the victim saw.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Seen {
    pub(crate) reads: usize,
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    pub(crate) longest: Duration,
    /// The same without the time for which those who serve the read, and the victim itself, were
    /// ready to run and had no processor.
    pub(crate) served_p99: Duration,
    pub(crate) served_longest: Duration,
    /// The longest read of a register, which the reactor answers; and without waits for a
    /// processor.
    pub(crate) register: Duration,
    pub(crate) served_register: Duration,
    /// A read that did not come back.
    pub(crate) lost: bool,
}

/// An attached victim. Its disk holds in each block the number of the block.
#[derive(Debug)]
pub(crate) enum Victim {
    /// A guest, and where it reads to.
    Guest(Guest, u64),
    Nbd(NbdClient),
}

/// Has the calling thread run before all others that have no such word, as far as it is allowed to:
/// what is measured is the server, and not what else the machine does.
pub(crate) fn hurry() {
    let _ = setpriority_process(None, -19);
}

/// Has the calling thread run after the server and the victim, and before whatever else the machine
/// does.
pub(crate) fn give_way() {
    let _ = setpriority_process(None, -5);
}

impl Victim {
    /// Attaches to a controller, and writes its disk.
    pub(crate) fn attach(socket: &std::path::Path) -> Result<Self> {
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

    /// Attaches to an export, and writes its disk.
    pub(crate) fn attach_nbd(socket: &std::path::Path) -> Result<Self> {
        let mut client = NbdClient::attach(socket)?;
        let disk: Vec<u8> = (0..USED_BLOCKS).flat_map(block_of).collect();
        client.write(0, &disk)?;
        Ok(Self::Nbd(client))
    }

    /// Reads until it is over, but at least once. What the threads of the server wait for a
    /// processor is told apart.
    pub(crate) fn watch(&mut self, clock: &Clock, server: &Serving) -> Result<Seen> {
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
            // A rate.
            due = (due + Duration::from_secs(1) / PER_SECOND).max(Instant::now());
            // Until the next read is due.
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

/// How long so many of the times are not longer than.
fn at(times: &[Duration], share: f64) -> Duration {
    let index = (times.len() as f64 * share) as usize;
    times.get(index.min(times.len().saturating_sub(1))).copied().unwrap_or_default()
}

/// What a block of the victim's disk holds.
fn block_of(number: u64) -> [u8; 512] {
    let mut block = [0; 512];
    block[..8].copy_from_slice(&number.to_le_bytes());
    block
}

/// One read, and whether it brought what is there; nothing if it does not come back.
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
            sleep(LOOK);
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

/// The same for an export. It is an error if it does not come back.
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
