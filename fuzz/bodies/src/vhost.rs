//! A virtio-blk guest behind vhost-user: chains of descriptors of any shape, indirect tables,
//! invalid rings, and memory in several parts that may be truncated.
//!
//! The queue is notified by a function call, without a socket. This body checks that
//!
//! * a valid request is answered once, with the expected status and the disk's contents; an invalid
//!   one is refused;
//! * in the guest's memory only the used ring and writable descriptors are written;
//! * the queue ends its work, however chains and tables refer to each other;
//! * a process that recovers the queue of a dead process answers the requests that the dead process
//!   had taken exactly once, and then the others, whatever the in-flight memory contains.

use crate::limits::Limits;
use crate::source::Source;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shadowbell_block::{BlockDevice, BlockOptions};
use shadowbell_export::vhost::testing::{Place, Queue, Region};
use shadowbell_memory::{EventFd, Mapping, Protection, SharedBytes};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, OnceLock};

const ACTIONS: usize = 96;
const SECTOR: usize = 512;
const SECTORS: usize = 256;
/// Parts of the guest's memory: address and number of bytes. The last two parts are adjacent.
const REGIONS: [(u64, usize); 3] = [(0, 0x8000), (0x10_0000, 0x1_0000), (0x11_0000, 0x4000)];
/// Maximum number of entries of the queue.
const ENTRIES: u16 = 64;
const TABLE: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
/// Size of the used ring in bytes.
const USED_LEN: u64 = 6 + 8 * ENTRIES as u64;
/// Address of the first of eight descriptor tables, and the distance between two tables.
const TABLES: u64 = 0x3000;
const APART: u64 = 0x400;
/// Size of the in-flight memory in bytes, and the size of its entries.
const INFLIGHT: usize = 16 + MARK * ENTRIES as usize;
const MARK: usize = 16;
/// Address of request headers.
const HEADERS: u64 = 0x11_3000;
/// Maximum number of requests that are in flight together. Each of them uses its own part of the
/// disk and of the guest's memory.
const AT_ONCE: usize = 4;
const PART: usize = SECTORS / AT_ONCE;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    // Programs use the same disk, so only one of them may run at a time.
    let disk = disk().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut source = Source::new(input);
    let limits = Limits::begin();
    // The disk has blocks of one sector, or longer ones.
    let mut guest = Guest::new(&disk[input.len() % 2]);
    for _ in 0..ACTIONS {
        if source.is_empty() {
            break;
        }
        guest.act(&mut source);
        limits.step("vhost");
    }
}

/// Disks of both block sizes in this process. All fuzz programs use the same disks.
fn disk() -> &'static Mutex<[BlockDevice; 2]> {
    static DISK: OnceLock<Mutex<[BlockDevice; 2]>> = OnceLock::new();
    DISK.get_or_init(|| {
        Mutex::new([512, 4096].map(|block| {
            let disk = format!("mem:{}?block-size={block}", SECTORS * SECTOR);
            let disk = shadowbell_disk_file::open(&disk).expect("a disk");
            BlockDevice::new(disk, &BlockOptions::default()).expect("a disk")
        }))
    })
}

/// A descriptor.
#[derive(Clone, Copy)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

/// Pieces of memory: address and length.
type Pieces = Vec<(u64, usize)>;

/// Submitted request that is valid, or whose error the model predicts.
struct Submitted {
    head: u16,
    status_at: u64,
    status: u8,
    /// Pieces of guest memory that the device writes, and their expected contents after the
    /// request.
    read: Option<(Pieces, Vec<u8>)>,
    /// Length that the device must store in the used ring entry.
    len: u32,
    write: Option<(usize, Vec<u8>)>,
}

struct Guest {
    queue: Queue,
    memory: [SharedBytes; REGIONS.len()],
    files: [OwnedFd; REGIONS.len()],
    inflight: SharedBytes,
    inflight_file: OwnedFd,
    /// Expected contents of the disk. `None` if they are unknown.
    disk: Option<Vec<u8>>,
    entries: u16,
    available: u16,
    /// Address and length of each writable descriptor.
    writable: Vec<(u64, u64)>,
    /// True if a random write may have changed the descriptors, so that the model does not know
    /// them.
    wild: bool,
    /// True as long as no random write has changed the rings.
    fresh: bool,
    /// Number of descriptors in use.
    taken: u16,
    tables: u64,
}

impl Guest {
    fn new(disk: &BlockDevice) -> Self {
        let files = REGIONS.map(|(_, len)| {
            let file: OwnedFd = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
            ftruncate(&file, len as u64).expect("room");
            file
        });
        let memory = std::array::from_fn(|n| {
            let mapping =
                Mapping::from_fd(&files[n], 0, REGIONS[n].1 as u64, Protection::ReadWrite);
            mapping.expect("memory").bytes()
        });
        let mut queue = Queue::new(disk, "fuzz").expect("a queue");
        let (inflight, inflight_file) = inflight(&mut queue);
        let mut guest = Self {
            memory,
            files,
            inflight,
            inflight_file,
            queue,
            disk: None,
            entries: ENTRIES,
            available: 0,
            writable: Vec::new(),
            wild: false,
            fresh: false,
            taken: 0,
            tables: 0,
        };
        guest.queue.set_call(Some(EventFd::new().expect("an eventfd")));
        guest.share();
        guest
    }

    /// Shares all memory with the queue.
    fn share(&mut self) {
        let files = self.files.iter().map(|file| file.try_clone().expect("a descriptor"));
        let regions = files.zip(REGIONS).map(|(file, (address, len))| Region {
            address,
            len,
            file: File::from(file),
            offset: 0,
        });
        let regions = regions.collect();
        self.queue.set_memory(regions).expect("memory");
        self.fresh = false;
    }

    /// Restarts the queue.
    fn restart(&mut self, source: &mut Source<'_>) {
        self.memory[0].fill(0, REGIONS[0].1, 0).expect("memory");
        self.inflight.fill(0, INFLIGHT, 0).expect("memory");
        let (descriptors, available, used) = (TABLE, AVAILABLE, USED);
        let place = Place { entries: self.entries, descriptors, available, used };
        self.queue.start(place, source.bool(), !source.rarely(4)).expect("a place");
        (self.available, self.taken, self.tables) = (0, 0, 0);
        (self.wild, self.fresh) = (false, true);
        self.writable.clear();
    }

    fn poke(&self, at: u64, bytes: &[u8]) {
        for (memory, (address, len)) in self.memory.iter().zip(REGIONS) {
            let from = at.wrapping_sub(address);
            if from < len as u64 && bytes.len() as u64 <= len as u64 - from {
                memory.write_from(from as usize, bytes).expect("memory");
            }
        }
    }

    fn peek(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for (memory, (address, size)) in self.memory.iter().zip(REGIONS) {
            let from = at.wrapping_sub(address);
            if from < size as u64 && len as u64 <= size as u64 - from {
                memory.read_into(from as usize, &mut bytes).expect("memory");
            }
        }
        bytes
    }

    fn peek16(&self, at: u64) -> u16 {
        let bytes = self.peek(at, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    fn all(&self) -> Vec<Vec<u8>> {
        REGIONS.iter().map(|(address, len)| self.peek(*address, *len)).collect()
    }

    fn write_descriptor(&mut self, table: u64, index: u16, descriptor: Descriptor) {
        let Descriptor { address, len, flags, next } = descriptor;
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend([flags, next].map(u16::to_le_bytes).concat());
        self.poke(table + 16 * u64::from(index), &bytes);
        if flags & WRITE != 0 {
            self.writable.push((address, len.into()));
        }
    }

    /// Adds a chain to the available ring.
    fn offer(&mut self, head: u16) {
        let at = AVAILABLE + 4 + 2 * u64::from(self.available % self.entries);
        self.poke(at, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.poke(AVAILABLE + 2, &self.available.to_le_bytes());
    }

    fn act(&mut self, source: &mut Source<'_>) {
        match source.below(20) {
            0..=7 => self.submit_known(source),
            8..=11 => self.confuse(source),
            12 => {
                // After a random write, the contents of descriptors and rings are unknown.
                let at = source.below(REGIONS[0].1) as u64;
                let bytes = source.bytes(64);
                self.poke(at, &bytes);
                (self.wild, self.fresh, self.disk) = (true, false, None);
                self.notify();
            }
            13 => self.restart(source),
            14 => self.misplace(source),
            15 => self.queue.replace().expect("a queue"),
            16 | 17 => self.forge(source),
            18 => {
                // The in-flight file is truncated, and later replaced.
                ftruncate(&self.inflight_file, source.of(&[0, 16, 64])).expect("to cut");
                self.confuse(source);
                (self.inflight, self.inflight_file) = inflight(&mut self.queue);
            }
            _ => self.change_memory(source),
        }
    }

    /// Serves the queue, and checks that it has changed no protected memory.
    fn notify(&mut self) -> bool {
        let before = self.all();
        let served = self.queue.serve();
        let now = self.all();
        let rings = (0, REGIONS[0].1 as u64);
        let overlaps = |(at, len): (u64, u64)| at < rings.1 && len > 0;
        if self.wild || self.writable.iter().any(|range| overlaps(*range)) {
            // The data of a reply may have overwritten descriptors, so the model does not know them
            // any more.
            (self.wild, self.fresh) = (true, false);
            return served.is_ok();
        }
        const CHUNK: usize = 256;
        for ((was, is), (address, _)) in before.iter().zip(&now).zip(REGIONS) {
            if was == is {
                continue;
            }
            // Most of the memory is unchanged, so large chunks are compared first.
            let chunks = was.chunks(CHUNK).zip(is.chunks(CHUNK)).enumerate();
            let others = chunks.filter(|(_, (was, is))| was != is).flat_map(|(nth, (was, is))| {
                let differs = was.iter().zip(is).enumerate().filter(|(_, (was, is))| was != is);
                differs.map(move |(at, _)| nth * CHUNK + at)
            });
            for at in others {
                let at = address + at as u64;
                let used = (USED, USED_LEN);
                let mut ranges = self.writable.iter().chain([&used]);
                let allowed = ranges.any(|(from, len)| at.wrapping_sub(*from) < *len);
                assert!(
                    allowed,
                    "byte {at:#x} of the guest's memory was written without a descriptor"
                );
            }
        }
        served.is_ok()
    }

    /// Submits requests with known results.
    fn submit_known(&mut self, source: &mut Source<'_>) {
        if !self.fresh {
            self.restart(source);
        }
        // Removes the descriptors of earlier requests.
        self.memory[0].fill(TABLE as usize, 16 * usize::from(ENTRIES), 0).expect("memory");
        self.memory[0].fill(TABLES as usize, (8 * APART) as usize, 0).expect("memory");
        self.writable.clear();
        (self.taken, self.tables) = (0, 0);
        let used = self.peek16(USED + 2);
        assert_eq!(used, self.available, "requests are not answered");
        let count = 1 + source.below(AT_ONCE);
        let submitted: Vec<Submitted> = if self.disk.is_none() {
            vec![self.wipe(source)]
        } else {
            (0..count).map(|n| self.request(source, n)).collect()
        };
        if source.rarely(3) {
            self.simulate_crash(source, &submitted);
        }
        assert!(self.notify(), "a queue that makes sense is refused");
        let now = self.peek16(USED + 2);
        assert_eq!(now.wrapping_sub(used), submitted.len() as u16, "requests that are answered");
        let mut answers: Vec<(u32, u32)> = (0..submitted.len() as u16)
            .map(|n| {
                let at = USED + 4 + 8 * u64::from(used.wrapping_add(n) % self.entries);
                let entry = self.peek(at, 8);
                let word = |at: usize| entry[at..at + 4].try_into().map(u32::from_le_bytes);
                (word(0).expect("four"), word(4).expect("four"))
            })
            .collect();
        for submitted in submitted {
            let at = answers.iter().position(|(head, _)| *head == u32::from(submitted.head));
            let (_, len) = answers.swap_remove(at.expect("each request is answered once"));
            assert_eq!(self.peek(submitted.status_at, 1), [submitted.status], "the status");
            assert_eq!(len, submitted.len, "bytes to look at");
            let mut wanted = submitted.read.iter().flat_map(|(pieces, data)| {
                let mut rest = &data[..];
                pieces.iter().map(move |(at, len)| {
                    let (piece, others) = rest.split_at(*len);
                    rest = others;
                    (*at, piece)
                })
            });
            assert!(wanted.all(|(at, piece)| self.peek(at, piece.len()) == piece), "a read");
            if let (Some((at, data)), Some(disk)) = (submitted.write, &mut self.disk) {
                disk[at..at + data.len()].copy_from_slice(&data);
            }
        }
    }

    /// Simulates the crash of a process that had started some of the requests `submitted`: marks
    /// them as in flight, for the next process.
    fn simulate_crash(&mut self, source: &mut Source<'_>, submitted: &[Submitted]) {
        // A process that starts a queue stores a version number in the in-flight memory. The dead
        // process has started the queue, so this memory must contain the number.
        self.queue.replace().expect("a queue");
        let version = self.inflight.load_u64_acquire(8).expect("a word").to_ne_bytes();
        if version[..2] == [0; 2] {
            return;
        }
        let taken = source.below(submitted.len() + 1);
        let first = source.of(&[0, 1, 1 << 40]);
        for (submitted, number) in submitted.iter().take(taken).zip(first..) {
            let at = 16 + MARK * usize::from(submitted.head);
            self.inflight.store_u64_release(at + 8, number).expect("a word");
            let mark = u64::from_ne_bytes([1, 0, 0, 0, 0, 0, 0, 0]);
            self.inflight.store_u64_release(at, mark).expect("a word");
        }
    }

    /// Writes invalid in-flight entries.
    fn forge(&mut self, source: &mut Source<'_>) {
        for _ in 0..1 + source.below(6) {
            let index = source.near(&[0, 1, 63]) as usize % (INFLIGHT / 8);
            let at = source.of(&[8, 8 * index, 16 + MARK * (index % usize::from(ENTRIES))]);
            let halves = [(); 4].map(|()| source.near(&[0, 1, 1, 64, 0xffff]) as u16);
            let mut word = [0; 8];
            word.copy_from_slice(&halves.map(u16::to_ne_bytes).concat());
            self.inflight.store_u64_release(at, u64::from_ne_bytes(word)).expect("a word");
        }
        (self.wild, self.fresh, self.disk) = (true, false, None);
        self.queue.replace().expect("a queue");
        self.notify();
    }

    /// A request that zeroes the whole disk, so that the contents are known.
    fn wipe(&mut self, source: &mut Source<'_>) -> Submitted {
        let mut segment = 0u64.to_le_bytes().to_vec();
        segment.extend((SECTORS as u32).to_le_bytes());
        segment.extend([0; 4]);
        let at = REGIONS[1].0;
        self.poke(at, &segment);
        self.disk = Some(vec![0; SECTORS * SECTOR]);
        let head = self.chain(source, 0, (13, 0), &[(at, segment.len())], &[]);
        Submitted { head: head.0, status_at: head.1, status: 0, read: None, len: 1, write: None }
    }

    fn request(&mut self, source: &mut Source<'_>, n: usize) -> Submitted {
        let sectors = source.below(16);
        let first = n * PART + source.below(PART - sectors + 1);
        let (offset, len) = (first * SECTOR, sectors * SECTOR);
        let pieces = pieces(source, n, len);
        let far = source.of(&[SECTORS as u64, SECTORS as u64 - 1, u64::MAX, u64::MAX / 512]);
        let beyond = source.rarely(12) && far.saturating_add(sectors as u64) > SECTORS as u64;
        let sector = if beyond { far } else { first as u64 };
        let failed = u8::from(beyond);
        let known = self.disk.clone();
        let mut submitted =
            Submitted { head: 0, status_at: 0, status: failed, read: None, len: 1, write: None };
        let kind = source.of(&[0u32, 0, 0, 1, 1, 1, 4, 8, 99]);
        let (head, status_at) = match kind {
            0 => {
                if !beyond {
                    submitted.len += len as u32;
                    let data = known.map(|disk| disk[offset..offset + len].to_vec());
                    submitted.read = data.map(|data| (pieces.clone(), data));
                }
                self.chain(source, n, (kind, sector), &[], &pieces)
            }
            1 => {
                let data = source.pattern(len);
                let mut rest = &data[..];
                for (at, len) in &pieces {
                    let (piece, others) = rest.split_at(*len);
                    self.poke(*at, piece);
                    rest = others;
                }
                if !beyond {
                    submitted.write = Some((offset, data));
                }
                self.chain(source, n, (kind, sector), &pieces, &[])
            }
            8 => {
                let mut id = b"fuzz".to_vec();
                id.resize(id.len().min(len), 0);
                submitted.status = 0;
                submitted.len = 1 + len.min(20) as u32;
                let mut whole = b"fuzz".to_vec();
                whole.resize(20, 0);
                let mut left = whole.len().min(len);
                let mut known = Vec::new();
                for (at, len) in &pieces {
                    known.push((*at, left.min(*len)));
                    left -= left.min(*len);
                }
                whole.truncate(len.min(20));
                submitted.read = Some((known, whole));
                self.chain(source, n, (kind, sector), &[], &pieces)
            }
            _ => {
                submitted.status = if kind == 4 { 0 } else { 2 };
                self.chain(source, n, (kind, sector), &[], &[])
            }
        };
        // If the byte offset of the sector overflows, every type of request is refused.
        if sector.checked_mul(SECTOR as u64).is_none() {
            (submitted.status, submitted.len, submitted.read) = (1, 1, None);
        }
        (submitted.head, submitted.status_at) = (head, status_at);
        submitted
    }

    /// Creates a descriptor chain with a header, data and a status. It may be continued in an
    /// indirect table. Returns the head of the chain, and the address of the status.
    fn chain(
        &mut self,
        source: &mut Source<'_>,
        n: usize,
        (kind, sector): (u32, u64),
        given: &[(u64, usize)],
        room: &[(u64, usize)],
    ) -> (u16, u64) {
        let at = HEADERS + 64 * n as u64;
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        header.push(0xff);
        self.poke(at, &header);
        let status_at = at + 16;
        let cut = if source.rarely(4) { 1 + source.below(15) } else { 16 };
        let mut list = vec![(at, cut, 0)];
        list.push((at + cut as u64, 16 - cut, 0));
        list.extend(given.iter().map(|(at, len)| (*at, *len, 0)));
        list.extend(room.iter().map(|(at, len)| (*at, *len, WRITE)));
        list.push((status_at, 1, WRITE));
        list.retain(|(_, len, _)| *len > 0);
        // The rest of the chain may be in an indirect table.
        let split = if source.bool() { source.below(3) } else { list.len() };
        let direct = split.min(list.len());
        let head = self.taken;
        let total = direct + usize::from(direct < list.len());
        self.taken += total as u16;
        let mut sink = Vec::new();
        for (k, (address, len, flags)) in list.iter().take(direct).enumerate() {
            let more = k + 1 < total;
            let next = if more { head + k as u16 + 1 } else { 0 };
            let flags = flags | if more { NEXT } else { 0 };
            sink.push((TABLE, head + k as u16, (*address, *len as u32, flags, next)));
        }
        if direct < list.len() {
            let table = TABLES + self.tables * APART;
            self.tables += 1;
            let rest = &list[direct..];
            let len = 16 * rest.len() as u32;
            sink.push((TABLE, head + direct as u16, (table, len, INDIRECT, 0)));
            for (k, (address, len, flags)) in rest.iter().enumerate() {
                let more = k + 1 < rest.len();
                let (flags, next) = if more { (flags | NEXT, k as u16 + 1) } else { (*flags, 0) };
                sink.push((table, k as u16, (*address, *len as u32, flags, next)));
            }
        }
        for (table, index, (address, len, flags, next)) in sink {
            self.write_descriptor(table, index, Descriptor { address, len, flags, next });
        }
        self.offer(head);
        (head, status_at)
    }

    /// Writes any content to descriptors and rings.
    fn confuse(&mut self, source: &mut Source<'_>) {
        if source.rarely(4) {
            self.restart(source);
        }
        self.disk = None;
        self.fresh = false;
        for _ in 0..1 + source.below(12) {
            let table = if source.bool() { TABLE } else { TABLES + APART * source.below(8) as u64 };
            let flags = source.of(&[NEXT, NEXT, NEXT | WRITE, WRITE, 0, INDIRECT, INDIRECT | NEXT]);
            let index = source.below(usize::from(ENTRIES)) as u16;
            let (address, len) = if flags & INDIRECT != 0 {
                let address = match source.below(8) {
                    0 => source.near(&[TABLE, REGIONS[1].0, REGIONS[0].1 as u64]),
                    _ => TABLES + APART * source.below(8) as u64,
                };
                self.wild |=
                    !(TABLES..TABLES + 8 * APART).contains(&address) || !address.is_multiple_of(16);
                (address, source.near(&[16, 64, 160, 0, 1024, 1 << 20]) as u32)
            } else {
                let ends =
                    [REGIONS[1].0, REGIONS[2].0 - 8, REGIONS[2].0, HEADERS, REGIONS[2].0 + 0x3ff0];
                (source.near(&ends), source.near(&[16, 512, 1, 4096, 0, 0x1_0000]) as u32)
            };
            let next = source.near(&[1, 2, index.into(), 63]) as u16;
            self.write_descriptor(table, index, Descriptor { address, len, flags, next });
        }
        // A valid header.
        let kind = source.of(&[0u32, 1, 4, 8, 11, 13, 99]);
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(source.near(&[0, 1, 255, 256]).to_le_bytes());
        self.poke(source.of(&[HEADERS, REGIONS[1].0]), &header);
        for _ in 0..1 + source.below(6) {
            self.offer(source.near(&[0, 1, 2, 3, 15, 63]) as u16);
        }
        if source.rarely(8) {
            self.available = source.near(&[self.available.into(), 0, 64, 1000]) as u16;
            self.poke(AVAILABLE + 2, &self.available.to_le_bytes());
        }
        self.notify();
    }

    /// Sets an invalid address of the queue.
    fn misplace(&mut self, source: &mut Source<'_>) {
        let ends = [0u64, 0x1000, REGIONS[0].1 as u64 - 2, REGIONS[1].0, REGIONS[2].0 - 4];
        let place = Place {
            entries: source.near(&[64, 0, 1, 1024, 3, 32768]) as u16,
            descriptors: source.near(&ends),
            available: source.near(&ends),
            used: source.near(&ends),
        };
        let _ = self.queue.start(place, source.bool(), source.bool());
        (self.wild, self.fresh, self.disk) = (true, false, None);
        self.notify();
        // The size that the queue has accepted may be another one, but later chains are made
        // available as in a ring of `ENTRIES` entries.
        self.entries = ENTRIES;
    }

    /// Shares invalid memory, or removes memory.
    fn change_memory(&mut self, source: &mut Source<'_>) {
        match source.below(4) {
            0 => {
                let regions = (0..source.below(4)).map(|_| Region {
                    address: source.near(&[0, 0x8000, 0x10_0000, u64::MAX - 0xfff]),
                    len: source.near(&[0x4000, 0, 0x1000, 0x8000, 1]) as usize,
                    file: File::from(self.files[1].try_clone().expect("a descriptor")),
                    offset: source.near(&[0, 0x1000, 0x1_0000, u64::MAX - 4095]),
                });
                let regions = regions.collect();
                let _ = self.queue.set_memory(regions);
                (self.wild, self.disk) = (true, None);
                self.notify();
                self.share();
            }
            1 => {
                // The memory is truncated while requests use it.
                let part = 1 + source.below(2);
                let len = source.of(&[0, 1, 2]) * 4096;
                ftruncate(&self.files[part], len).expect("to cut");
                self.confuse(source);
                let _ = self.queue.has_lost_memory();
                let file: OwnedFd = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
                let size = REGIONS[part].1 as u64;
                ftruncate(&file, size).expect("room");
                let mapping = Mapping::from_fd(&file, 0, size, Protection::ReadWrite);
                self.memory[part] = mapping.expect("memory").bytes();
                self.files[part] = file;
                self.share();
            }
            _ => self.share(),
        }
    }
}

/// Creates in-flight memory, which the queue uses from its next start on.
fn inflight(queue: &mut Queue) -> (SharedBytes, OwnedFd) {
    let file: OwnedFd = memfd_create("inflight", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&file, INFLIGHT as u64).expect("room");
    queue.track(&file, ENTRIES).expect("memory");
    let mapping = Mapping::from_fd(&file, 0, INFLIGHT as u64, Protection::ReadWrite);
    (mapping.expect("memory").bytes(), file)
}

/// Pieces of memory for `len` bytes of a request. Some cross the border of two parts.
fn pieces(source: &mut Source<'_>, n: usize, len: usize) -> Pieces {
    let mut at = REGIONS[1].0 + (n * 0x4000) as u64 + u64::from(source.u8());
    if n == AT_ONCE - 1 {
        // The data of the last request end in the next part.
        at = REGIONS[2].0 - source.of(&[0x100, 1, 0x1000, 0]);
    }
    let (mut left, mut pieces) = (len, Vec::new());
    while left > 0 {
        let last = pieces.len() >= 5;
        let most = if last { left } else { 1 + source.below(left) };
        let most = if last { most } else { most.min(source.of(&[SECTOR, 1, 4096])) };
        // The data may cross the border of two memory regions. The test accesses each region by a
        // mapping of its own, so it splits the data at the border.
        let border = REGIONS[2].0;
        let most = if at < border { most.min((border - at) as usize) } else { most };
        pieces.push((at, most));
        (at, left) = (at + most as u64, left - most);
    }
    pieces
}
