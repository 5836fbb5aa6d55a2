//! A guest and its VMM: guest memory, registers and queues.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_spec::admin::{CreateIoCq, CreateIoSq};
use shadowbell_spec::{Cqe, Sqe, regs};
use shadowbell_vfio_user::wire::command;
use zerocopy::IntoBytes;

use super::connection::{Connection, dma_map};
use super::queue::{BAR0, Queue};

/// DMA address of the guest's memory.
pub const BASE: u64 = 0x10_0000;
/// Page size in bytes.
pub const PAGE: u64 = 4096;
/// Region index of the PCI configuration space.
pub const CONFIG: u32 = 7;
/// CC with EN set, IOSQES 6 and IOCQES 4.
const ENABLED: u32 = 0x0046_0001;
/// Number of entries of the admin queue.
const ADMIN_ENTRIES: u16 = 4096;
/// Time limit of a command of this guest, and of a controller reset.
const PATIENCE: Duration = Duration::from_secs(30);

/// A sparse memfd of `bytes` bytes.
pub fn memfd(bytes: u64) -> Result<OwnedFd> {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, bytes)?;
    Ok(file)
}

/// Guest with one controller.
#[derive(Debug)]
pub struct Guest {
    pub link: Connection,
    pub memory: SharedBytes,
    file: OwnedFd,
    used: u64,
    admin: Queue,
    pub queues: Vec<Queue>,
}

impl Guest {
    /// Connects, shares `bytes` bytes of memory, sets Bus Master Enable, and enables the
    /// controller.
    pub fn attach(path: &Path, bytes: u64) -> Result<Self> {
        let file = memfd(bytes)?;
        let memory = Mapping::from_fd(&file, 0, bytes, Protection::ReadWrite)?.bytes();
        let link = Connection::attach(path)?;
        let admin = Queue::new(0, ADMIN_ENTRIES, memory.clone(), memory.clone());
        let mut guest = Self { link, memory, file, used: 0, admin, queues: Vec::new() };
        let map = dma_map(BASE, bytes, 0);
        guest.link.request(command::DMA_MAP, &[map.as_bytes()], &[guest.file.as_fd()])?;
        guest.link.write(CONFIG, 4, &6u16.to_le_bytes())?;
        guest.admin = guest.rings(0, ADMIN_ENTRIES)?;
        guest.enable()?;
        Ok(guest)
    }

    /// Allocates whole pages for `bytes` bytes. Returns their offset in memory.
    pub fn alloc(&mut self, bytes: u64) -> Result<u64> {
        let at = self.used;
        self.used += bytes.next_multiple_of(PAGE);
        if self.used > self.memory.len() as u64 {
            bail!("the guest has {} bytes and wants {}", self.memory.len(), self.used);
        }
        Ok(at)
    }

    /// DMA address of a memory offset.
    pub fn address(offset: u64) -> u64 {
        BASE + offset
    }

    /// Copies `bytes` into newly allocated pages. Returns their DMA address.
    pub fn place(&mut self, bytes: &[u8]) -> Result<u64> {
        let at = self.alloc(bytes.len() as u64)?;
        self.memory.write_from(at as usize, bytes).context("writing memory")?;
        Ok(Self::address(at))
    }

    /// Allocates a buffer of `bytes` bytes (at most 513 pages) and its PRP list. Returns PRP1 and
    /// PRP2 for a transfer of the whole buffer.
    pub fn buffer(&mut self, bytes: u64) -> Result<(u64, u64)> {
        let at = Self::address(self.alloc(bytes)?);
        let pages: Vec<u64> = (0..bytes.div_ceil(PAGE)).map(|page| at + page * PAGE).collect();
        self.prps(&pages)
    }

    /// PRP1 and PRP2 of these pages. More than two pages need a PRP list.
    pub fn prps(&mut self, pages: &[u64]) -> Result<(u64, u64)> {
        match *pages {
            [] => bail!("no pages"),
            [first] => Ok((first, 0)),
            [first, second] => Ok((first, second)),
            [first, ref rest @ ..] => Ok((first, self.place(rest.as_bytes())?)),
        }
    }

    fn rings(&mut self, qid: u16, entries: u16) -> Result<Queue> {
        let sq_len = u64::from(entries) * Sqe::SIZE as u64;
        let cq_len = u64::from(entries) * Cqe::SIZE as u64;
        let (sq, cq) = (self.alloc(sq_len)?, self.alloc(cq_len)?);
        let part = |at: u64, len: u64| {
            let (at, len) = (at as usize, len as usize);
            let _ = self.memory.fill(at, len, 0);
            self.memory.slice(at, len).context("a ring")
        };
        Ok(Queue::new(qid, entries, part(sq, sq_len)?, part(cq, cq_len)?))
    }

    fn ring_address(&self, ring: usize) -> u64 {
        BASE + (ring - self.memory.address()) as u64
    }

    /// DMA addresses of the two rings of a queue.
    pub fn ring_addresses(&self, queue: &Queue) -> (u64, u64) {
        let (sq, cq) = queue.addresses();
        (self.ring_address(sq), self.ring_address(cq))
    }

    /// Enables the controller after a reset, with an empty admin queue.
    pub fn enable(&mut self) -> Result<()> {
        let (sq, cq) = self.ring_addresses(&self.admin);
        self.admin.clear();
        self.queues.clear();
        let size = u32::from(ADMIN_ENTRIES - 1);
        self.link.write(BAR0, regs::AQA, &(size | size << 16).to_le_bytes())?;
        self.link.write(BAR0, regs::ASQ, &sq.to_le_bytes())?;
        self.link.write(BAR0, regs::ACQ, &cq.to_le_bytes())?;
        self.link.write(BAR0, regs::CC, &ENABLED.to_le_bytes())?;
        self.wait_ready(true).map(drop)
    }

    /// Clears CC.EN and waits for CSTS.RDY 0. Returns the duration.
    pub fn reset(&mut self) -> Result<Duration> {
        self.link.write(BAR0, regs::CC, &(ENABLED & !1).to_le_bytes())?;
        self.wait_ready(false)
    }

    fn wait_ready(&mut self, ready: bool) -> Result<Duration> {
        let began = Instant::now();
        loop {
            let csts = self.link.read(BAR0, regs::CSTS, 4)?;
            if csts.first().is_some_and(|byte| (byte & 1 != 0) == ready) {
                return Ok(began.elapsed());
            }
            // Limit of a guest's wait.
            if began.elapsed() > PATIENCE {
                bail!("CSTS.RDY does not become {}", u8::from(ready));
            }
            // This sleep is short, because it lengthens the wait whose duration is measured.
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Admin queue and connection, for a flood.
    pub fn admin_queue(&mut self) -> (&mut Queue, &mut Connection) {
        (&mut self.admin, &mut self.link)
    }

    /// An I/O queue and the connection.
    pub fn queue(&mut self, index: usize) -> Result<(&mut Queue, &mut Connection)> {
        let queue = self.queues.get_mut(index).context("no such queue")?;
        Ok((queue, &mut self.link))
    }

    /// Executes one admin command. Returns its completion.
    pub fn admin(&mut self, sqe: Sqe) -> Result<Cqe> {
        let (queue, link) = (&mut self.admin, &mut self.link);
        one(queue, link, sqe)
    }

    /// Executes one I/O command. Returns its completion.
    pub fn io(&mut self, index: usize, sqe: Sqe) -> Result<Cqe> {
        let (queue, link) = self.queue(index)?;
        one(queue, link, sqe)
    }

    /// Creates a queue pair with `entries` entries and without interrupts.
    pub fn create_queue(&mut self, entries: u16) -> Result<()> {
        let qid = self.queues.len() as u16 + 1;
        let queue = self.rings(qid, entries)?;
        self.create(queue)
    }

    /// Creates a deleted queue pair again, with its rings emptied.
    pub fn create(&mut self, mut queue: Queue) -> Result<()> {
        queue.clear();
        let (sq, cq) = self.ring_addresses(&queue);
        let (qid, qsize0) = (queue.qid, queue.entries - 1);
        let fields = CreateIoCq { qid, qsize0, pc: true, ..CreateIoCq::default() };
        self.admin_ok(Sqe::create_io_cq(fields, cq, 0))?;
        let fields = CreateIoSq { qid, qsize0, pc: true, cqid: qid, ..CreateIoSq::default() };
        self.admin_ok(Sqe::create_io_sq(fields, sq, 0))?;
        self.queues.push(queue);
        Ok(())
    }

    /// Executes one admin command, which must succeed.
    pub fn admin_ok(&mut self, sqe: Sqe) -> Result<Cqe> {
        let cqe = self.admin(sqe)?;
        if !cqe.status().is_success() {
            bail!("admin command {:02x}h: {}", sqe.opcode, cqe.status());
        }
        Ok(cqe)
    }
}

fn one(queue: &mut Queue, link: &mut Connection, sqe: Sqe) -> Result<Cqe> {
    let cid = queue.push(sqe)?;
    queue.ring(link)?;
    let began = Instant::now();
    loop {
        while let Some(cqe) = queue.pop() {
            queue.consumed(link)?;
            if cqe.cid == cid {
                return Ok(cqe);
            }
        }
        if link.is_closed() {
            bail!("the server has closed the connection");
        }
        // Limit of a guest's wait.
        if began.elapsed() > PATIENCE {
            bail!("command {:02x}h of queue {} has no completion", sqe.opcode, queue.qid);
        }
        // This sleep is short, because it occurs for each command.
        std::thread::sleep(Duration::from_micros(50));
    }
}
