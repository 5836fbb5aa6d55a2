//! Honest guests: each writes its disk, and verifies the written data.
//!
//! A disk is divided into slots. In each turn a guest writes the next slot. At the same time it
//! reads the slot of the previous turn, and a slot that was written long ago. Each block contains
//! the number of its controller, its own number and the turn of the write. Every 64 turns a guest
//! disconnects and connects again, like a reboot.

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use shadowbell_spec::Sqe;
use zerocopy::IntoBytes;

use super::counters::{Counters, add};
use super::pattern::pattern;
use shadowbell_hostile::peer::guest::{BASE, Guest, PAGE};
use shadowbell_hostile::victim::hurry;

/// Minimum time between two turns of a guest.
const TURN: Duration = Duration::from_millis(200);
/// Number of turns until a guest reconnects.
const TURNS_ATTACHED: u64 = 64;
/// Time limit of an NVMe command, as in Linux (`nvme_core.io_timeout`), and of a vfio-user request.
/// While a guest attaches, the limit of each request is 6 s.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);
/// Time without a completion after which the guest checks whether the server has closed the
/// connection.
const CONNECTION_CHECK_AFTER: Duration = Duration::from_secs(1);
/// Polling interval of each guest.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Number of slots of a disk, and distance between the starts of two slots in blocks. A slot has 1
/// to `SLOT_BLOCKS` blocks.
const SLOTS: u64 = 32;
const SLOT_BLOCKS: u64 = 32;
const BLOCK: u64 = 512;
/// Size of the disk of a guest, as an option and in bytes. The slots are in its first half.
pub(crate) const DISK: &str = "1MiB";
pub(crate) const DISK_BYTES: u64 = SLOTS * SLOT_BLOCKS * BLOCK * 2;
/// Memory size of a guest: rings and three buffers.
const MEMORY: u64 = 1 << 20;
/// Number of entries of the I/O queue.
const ENTRIES: u16 = 16;

/// Number of blocks of a slot.
fn blocks(slot: u64) -> u64 {
    1 + slot * 7 % SLOT_BLOCKS
}

#[derive(Debug, Clone, Copy, Default)]
struct Buffer {
    prp1: u64,
    prp2: u64,
}

impl Buffer {
    fn offset(self) -> usize {
        (self.prp1 - BASE) as usize
    }
}

/// A command in flight.
#[derive(Debug, Clone, Copy)]
struct Pending {
    cid: u16,
    buffer: Buffer,
    slot: u64,
    is_read: bool,
}

/// Guest with one controller.
#[derive(Debug)]
pub(crate) struct HonestGuest {
    number: u64,
    socket: PathBuf,
    guest: Guest,
    buffers: [Buffer; 3],
    /// Turn of the last write of each slot.
    generations: [u64; SLOTS as usize],
    turn: u64,
    pending: Vec<Pending>,
    began: Instant,
    due: Instant,
    has_failed: bool,
}

fn attach(socket: &Path) -> Result<(Guest, [Buffer; 3])> {
    let mut guest = Guest::attach(socket, MEMORY)?;
    guest.link.set_patience(TIMEOUT)?;
    guest.create_queue(ENTRIES)?;
    let mut buffers = [Buffer::default(); 3];
    for buffer in &mut buffers {
        let (prp1, prp2) = guest.buffer(SLOT_BLOCKS * BLOCK)?;
        *buffer = Buffer { prp1, prp2 };
    }
    Ok((guest, buffers))
}

impl HonestGuest {
    /// Attaches to a controller. The first turn of each guest is delayed by a different part of a
    /// turn, depending on `number`, so that the load of all guests is even.
    pub(crate) fn attach(number: u64, socket: PathBuf) -> Result<Self> {
        let (guest, buffers) = attach(&socket)?;
        let now = Instant::now();
        Ok(Self {
            number,
            socket,
            guest,
            buffers,
            generations: [0; SLOTS as usize],
            turn: 0,
            pending: Vec::new(),
            began: now,
            due: now + TURN * (number % 64) as u32 / 64,
            has_failed: false,
        })
    }

    /// Takes completions, and starts the next turn when it is due.
    fn step(&mut self, counters: &Counters) -> Result<()> {
        self.take(counters)?;
        if self.pending.is_empty() && Instant::now() >= self.due {
            self.due = (self.due + TURN).max(Instant::now());
            if (self.turn + 1 + self.number).is_multiple_of(TURNS_ATTACHED) {
                self.reconnect(counters)?;
            }
            self.begin_turn()?;
        }
        Ok(())
    }

    fn reconnect(&mut self, counters: &Counters) -> Result<()> {
        let began = Instant::now();
        // A controller has one client at a time, so the guest closes its old connection first.
        self.guest.link.hang_up()?;
        (self.guest, self.buffers) = attach(&self.socket).context("reconnecting")?;
        add(&counters.attached, 1);
        counters.record_duration(began.elapsed());
        Ok(())
    }

    fn begin_turn(&mut self) -> Result<()> {
        let written = self.turn % SLOTS;
        let before = (self.turn + SLOTS - 1) % SLOTS;
        let long_ago = (self.turn + SLOTS / 2) % SLOTS;
        let generation = self.turn + 1;
        let [first, second, third] = self.buffers;
        for n in 0..blocks(written) {
            let words = pattern(self.number, written * SLOT_BLOCKS + n, generation);
            let at = first.offset() + (n * BLOCK) as usize;
            self.guest.memory.write_from(at, words.as_bytes()).context("the buffer")?;
        }
        self.push(written, first, false)?;
        self.push(before, second, true)?;
        self.push(long_ago, third, true)?;
        // The generation may be set before the write has completed, because the two reads of this
        // turn read other slots.
        if let Some(slot) = self.generations.get_mut(written as usize) {
            *slot = generation;
        }
        self.turn += 1;
        self.began = Instant::now();
        let (queue, link) = self.guest.queue(0)?;
        queue.ring(link)
    }

    fn push(&mut self, slot: u64, buffer: Buffer, is_read: bool) -> Result<()> {
        let (slba, nlb0) = (slot * SLOT_BLOCKS, blocks(slot) as u16 - 1);
        let sqe = if is_read { Sqe::read(1, slba, nlb0, 0) } else { Sqe::write(1, slba, nlb0, 0) };
        let (queue, _) = self.guest.queue(0)?;
        // One or two pages need no PRP list.
        let prp2 = match (blocks(slot) * BLOCK).div_ceil(PAGE) {
            1 => 0,
            2 => buffer.prp1 + PAGE,
            _ => buffer.prp2,
        };
        let cid = queue.push(sqe.with_prps(buffer.prp1, prp2))?;
        self.pending.push(Pending { cid, buffer, slot, is_read });
        Ok(())
    }

    fn take(&mut self, counters: &Counters) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let mut done = Vec::new();
        let (queue, link) = self.guest.queue(0)?;
        while let Some(cqe) = queue.pop() {
            let at = self.pending.iter().position(|pending| pending.cid == cqe.cid);
            let at = at.with_context(|| format!("a completion of no command: {cqe:?}"))?;
            let pending = self.pending.remove(at);
            if !cqe.status().is_success() {
                let what = if pending.is_read { "read" } else { "write" };
                bail!("the {what} of slot {}: {}", pending.slot, cqe.status());
            }
            done.push(pending);
        }
        let waited = self.began.elapsed();
        if !done.is_empty() {
            queue.consumed(link)?;
            counters.record_duration(waited);
        } else if waited > TIMEOUT {
            bail!("{} commands have no completion after {TIMEOUT:?}", self.pending.len());
        } else if waited > CONNECTION_CHECK_AFTER && link.is_closed() {
            bail!("the server has closed the connection");
        }
        add(&counters.commands, done.len() as u64);
        done.iter()
            .filter(|pending| pending.is_read)
            .try_for_each(|read| self.check(read, counters))
    }

    /// Verifies the data of a read.
    fn check(&self, read: &Pending, counters: &Counters) -> Result<()> {
        let generation = self.generations.get(read.slot as usize).copied().unwrap_or_default();
        let mut found = vec![0; (blocks(read.slot) * BLOCK) as usize];
        self.guest.memory.read_into(read.buffer.offset(), &mut found).context("the buffer")?;
        for (n, found) in found.chunks(BLOCK as usize).enumerate() {
            let block = read.slot * SLOT_BLOCKS + n as u64;
            let wanted = pattern(self.number, block, generation);
            if found != wanted.as_bytes() {
                add(&counters.bad_blocks, 1);
                let word = |at: usize| {
                    let bytes = found.get(at * 8..at * 8 + 8).unwrap_or_default();
                    u64::from_le_bytes(bytes.try_into().unwrap_or_default())
                };
                counters.add_message(format!(
                    "controller {}: block {block} is not of turn {generation}, but of controller \
                     {}, block {}, turn {}",
                    self.number,
                    word(0),
                    word(1),
                    word(2)
                ));
            }
        }
        add(&counters.blocks, blocks(read.slot));
        Ok(())
    }

    /// Waits for commands in flight, and reads the whole disk once more.
    fn finish(&mut self, counters: &Counters) -> Result<()> {
        while !self.pending.is_empty() {
            self.take(counters)?;
            sleep(POLL_INTERVAL);
        }
        let [first, second, third] = self.buffers;
        for at in (0..SLOTS).step_by(3) {
            for (slot, buffer) in (at..SLOTS).zip([first, second, third]) {
                self.push(slot, buffer, true)?;
            }
            self.began = Instant::now();
            let (queue, link) = self.guest.queue(0)?;
            queue.ring(link)?;
            while !self.pending.is_empty() {
                self.take(counters)?;
                // This sleep is shorter than the polling interval, because many guests finish one
                // after another.
                sleep(POLL_INTERVAL / 4);
            }
        }
        self.guest.link.hang_up()
    }

    fn run_unless_failed(
        &mut self,
        counters: &Counters,
        run: impl FnOnce(&mut Self, &Counters) -> Result<()>,
    ) {
        if !self.has_failed
            && let Err(error) = run(self, counters)
        {
            self.has_failed = true;
            counters.error(format!("controller {}: {error:#}", self.number));
        }
    }
}

/// Checks that the server answers a new client of this controller, and that its commands complete.
pub(crate) fn check_responds(socket: &Path) -> Result<()> {
    let (mut guest, [buffer, ..]) = attach(socket)?;
    let cqe = guest.io(0, Sqe::read(1, 0, 7, 0).with_prps(buffer.prp1, 0))?;
    if !cqe.status().is_success() {
        bail!("a read: {}", cqe.status());
    }
    guest.link.hang_up()
}

/// Runs the turns of these guests until the time `until`. Then each guest reads all slots that it
/// has written.
pub(crate) fn drive(guests: &mut [HonestGuest], until: Instant, counters: &Counters) {
    hurry();
    while Instant::now() < until && guests.iter().any(|guest| !guest.has_failed) {
        guests.iter_mut().for_each(|guest| guest.run_unless_failed(counters, HonestGuest::step));
        sleep(POLL_INTERVAL);
    }
    guests.iter_mut().for_each(|guest| guest.run_unless_failed(counters, HonestGuest::finish));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_turn_reads_the_place_that_it_writes_and_all_places_fit() {
        for turn in 0..SLOTS {
            let reads = [(turn + SLOTS - 1) % SLOTS, (turn + SLOTS / 2) % SLOTS];
            assert!(!reads.contains(&(turn % SLOTS)));
        }
        assert!((0..SLOTS).all(|slot| (1..=SLOT_BLOCKS).contains(&blocks(slot))));
        assert_eq!(DISK_BYTES, 1 << 20);
    }
}
