//! vhost-user-blk with the frontend of a VMM and a guest's virtio-blk driver.

use shadowbell_block::{BlockDevice, BlockOptions};
use shadowbell_disk::{Disk, DiskError, Op};
use shadowbell_disk_layers::{ErrorPolicy, HoldingDisk};
use shadowbell_export::vhost::VhostUserBlk;
use shadowbell_testing::test_disk::TestDisk;
use shadowbell_testing::wait;
use std::cell::Cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

pub(crate) const QUEUE: u16 = 64;
/// Size of a queue in descriptors, for tests with chains of hundreds of descriptors.
pub(crate) const LONG_QUEUE: u16 = 1024;
/// Maximum number of requests in flight. Each has four descriptors.
const SLOTS: u16 = QUEUE / 4;
const RINGS: u64 = 0x10000;
const HEADERS: u64 = 0x40000;
const STATUSES: u64 = 0x50000;
const DATA: u64 = 0x10_0000;
const ROOM: u64 = 0x10_0000;
pub(crate) const MEMORY: u64 = 0x200_0000;

const VERSION_1: u64 = 1 << 32;
const PROTOCOL_FEATURES: u64 = 1 << 30;
pub(crate) const EVENT_IDX: u64 = 1 << 29;
const FLUSH: u64 = 1 << 9;
const MQ: u64 = 1 << 12;

thread_local! {
    /// Block size of the disks in the tests of this thread.
    static BLOCK: Cell<u32> = const { Cell::new(512) };
}

/// Runs a test twice: on disks with blocks of one sector, on which each request consists of whole
/// blocks, and on disks with larger blocks.
pub(crate) fn each_block_size(test: impl Fn()) {
    for block in [512, 4096] {
        BLOCK.set(block);
        println!("blocks of {block} bytes");
        test();
    }
}

/// Runs a test on disks whose block is a sector.
pub(crate) fn short_blocks(test: impl Fn()) {
    BLOCK.set(512);
    test();
}

/// Returns true if a block is a sector.
pub(crate) fn has_short_blocks() -> bool {
    BLOCK.get() == 512
}

/// Serves `disk` at the UNIX socket `path`.
fn serve(disk: BlockDevice, path: &Path, id: &str) -> VhostUserBlk {
    let listener = shadowbell_vfio_user::Listener::bind(path).unwrap();
    VhostUserBlk::start(disk, listener, id).unwrap()
}

pub(crate) struct Rig {
    pub(crate) backing: TestDisk,
    device: Option<VhostUserBlk>,
    directory: TempDir,
}

fn device(backing: Arc<dyn Disk>, read_only: bool) -> BlockDevice {
    let mut options = BlockOptions::default();
    (options.read_only, options.queues) = (read_only, 2);
    // The device's thread polls for a short time before it sleeps. The timeout of requests is too
    // long to expire in a test.
    (options.poll, options.timeout) = (Duration::from_micros(50), wait::LIMIT);
    BlockDevice::new(backing, &options).unwrap()
}

impl Rig {
    pub(crate) fn new(read_only: bool) -> Self {
        Self::with_layers(read_only, |disk| disk)
    }

    /// Serves the disk that `wrap` returns for the test disk.
    fn with_layers(read_only: bool, wrap: impl FnOnce(Arc<dyn Disk>) -> Arc<dyn Disk>) -> Self {
        let block = BLOCK.get();
        let backing = TestDisk::new((8 << 20) / u64::from(block), block);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vhost");
        let disk = wrap(Arc::new(backing.clone()));
        let device = serve(device(disk, read_only), &path, "a test");
        Self { backing, device: Some(device), directory }
    }

    /// Serves a disk with the error policy `stop`. Returns the disk too.
    pub(crate) fn stopping() -> (Self, Arc<dyn Disk>) {
        let mut disk = None;
        let rig = Self::with_layers(false, |inner| {
            Arc::clone(disk.insert(HoldingDisk::wrap(inner, ErrorPolicy::Stop)))
        });
        (rig, disk.unwrap())
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("vhost")
    }

    pub(crate) fn end(mut self, failures: u64) {
        assert_eq!(self.device.take().unwrap().stop(), failures);
        assert!(!self.socket().exists());
    }
}

/// Driver's side of a virtqueue.
pub(crate) struct Ring {
    memory: GuestMemoryMmap<()>,
    base: u64,
    index: u64,
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    submitted: u16,
    taken: u16,
}

impl Ring {
    fn available(&self) -> u64 {
        self.base + 0x2000
    }

    fn used(&self) -> u64 {
        self.base + 0x3000
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    /// Reads guest memory.
    pub(crate) fn memory_at(&self, at: u64, bytes: &mut [u8]) {
        self.memory.read_slice(bytes, GuestAddress(at)).unwrap();
    }

    /// Returns true if the used ring has no new entry.
    pub(crate) fn has_nothing(&self) -> bool {
        u16::from_le_bytes(self.read(self.used() + 2)) == self.taken
    }

    /// Returns a function that reads the used index, for use while another thread drives the queue.
    pub(crate) fn answers(&self) -> impl Fn() -> u16 + use<> {
        let (memory, at) = (self.memory.clone(), GuestAddress(self.used() + 2));
        move || u16::from_le_bytes(memory.read_obj(at).unwrap())
    }

    /// Number of requests submitted so far.
    pub(crate) fn count(&self) -> u16 {
        self.submitted
    }

    fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    pub(crate) fn data(&self, slot: u16) -> u64 {
        DATA + (self.index * u64::from(SLOTS) + u64::from(slot)) % 30 * ROOM
    }

    pub(crate) fn status(&self, slot: u16) -> u64 {
        STATUSES + self.index * 0x100 + u64::from(slot)
    }

    pub(crate) fn descriptor(&self, index: u16, at: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = at.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.write(self.base + u64::from(index) * 16, &bytes);
    }

    /// Makes the chain with this head available, and notifies the device.
    pub(crate) fn offer(&mut self, head: u16) {
        let at = self.available() + 4 + u64::from(self.submitted % QUEUE) * 2;
        self.write(at, &head.to_le_bytes());
        self.submitted = self.submitted.wrapping_add(1);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.write(self.available() + 2, &self.submitted.to_le_bytes());
        self.kick.write(1).unwrap();
    }

    /// Sets the available index without adding entries, so that it announces chains that the driver
    /// has not stored, and notifies the device.
    pub(crate) fn promise(&mut self, count: u16) {
        self.write(self.available() + 2, &count.to_le_bytes());
        self.kick.write(1).unwrap();
    }

    /// Submits GET_ID requests faster than the device completes them, until `enough` is true. Calls
    /// `began` once, after the queue has been full for some time.
    pub(crate) fn never_stop(&mut self, began: impl FnOnce(), enough: &AtomicBool) {
        let mut began = Some(began);
        let mut asked = 0;
        self.submit(0, GET_ID, 0, b"", 20);
        // The chain has 500 descriptors, so that a request takes longer to execute than to submit.
        for index in 2..500 {
            self.descriptor(index, self.data(0), 1, 1 | 2, index + 1);
        }
        self.descriptor(500, self.status(0), 1, 2, 0);
        for entry in 0..u64::from(LONG_QUEUE) {
            self.write(self.available() + 4 + entry * 2, &[0; 2]);
        }
        while !enough.load(std::sync::atomic::Ordering::Relaxed) {
            if asked > 4 * u32::from(LONG_QUEUE)
                && let Some(began) = began.take()
            {
                began();
            }
            let used = u16::from_le_bytes(self.read(self.used() + 2));
            let room = LONG_QUEUE - self.submitted.wrapping_sub(used);
            self.submitted = self.submitted.wrapping_add(room);
            asked += u32::from(room);
            self.write(self.available() + 2, &self.submitted.to_le_bytes());
            let _ = self.kick.write(1);
        }
    }

    /// Submits a request. Its data buffer contains `data` for the device to read, or, if `data` is
    /// empty, has room for `room` bytes that the device writes.
    pub(crate) fn submit(&mut self, slot: u16, kind: u32, sector: u64, data: &[u8], room: u32) {
        const NEXT: u16 = 1;
        const WRITE: u16 = 2;
        let header = HEADERS + self.index * 0x1000 + u64::from(slot) * 16;
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend(sector.to_le_bytes());
        self.write(header, &bytes);
        let head = slot * 4;
        self.write(self.data(slot), data);
        self.write(self.status(slot), &[0xff]);
        let len = if data.is_empty() { room } else { data.len() as u32 };
        if len == 0 {
            self.descriptor(head, header, 16, NEXT, head + 2);
        } else {
            self.descriptor(head, header, 16, NEXT, head + 1);
            let flags = if data.is_empty() { NEXT | WRITE } else { NEXT };
            self.descriptor(head + 1, self.data(slot), len, flags, head + 2);
        }
        self.descriptor(head + 2, self.status(slot), 1, WRITE, 0);
        self.offer(head);
    }

    /// Submits a read whose data goes to these guest addresses, 512 bytes to each.
    pub(crate) fn read_to(&mut self, places: impl Iterator<Item = u64>) {
        const NEXT: u16 = 1;
        const WRITE: u16 = 2;
        let header = HEADERS + self.index * 0x1000;
        self.write(header, &[0; 16]);
        self.descriptor(0, header, 16, NEXT, 1);
        let mut last = 1;
        for place in places {
            self.descriptor(last, place, 512, NEXT | WRITE, last + 1);
            last += 1;
        }
        self.descriptor(last, self.status(0), 1, WRITE, 0);
        self.offer(0);
    }

    /// Waits for the next used entry. Returns the slot, the number of bytes written, and the
    /// status.
    pub(crate) fn take(&mut self) -> (u16, u32, u8) {
        let deadline = wait::deadline();
        loop {
            // If EVENT_IDX was negotiated, this requests a notification for the next used entry.
            self.write(self.available() + 4 + u64::from(QUEUE) * 2, &self.taken.to_le_bytes());
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            let index = u16::from_le_bytes(self.read(self.used() + 2));
            if index != self.taken {
                let at = self.used() + 4 + u64::from(self.taken % QUEUE) * 8;
                let head = u32::from_le_bytes(self.read(at)) as u16;
                let len = u32::from_le_bytes(self.read(at + 4));
                self.taken = self.taken.wrapping_add(1);
                let slot = head / 4;
                return (slot, len, self.read::<1>(self.status(slot))[0]);
            }
            while self.call.read().is_err() {
                assert!(Instant::now() < deadline, "no notification comes");
                // The sleep is shorter than `wait::pause`, because this wait occurs once per
                // request.
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    pub(crate) fn run(&mut self, kind: u32, sector: u64, data: &[u8], room: u32) -> u8 {
        self.submit(0, kind, sector, data, room);
        let (slot, _, status) = self.take();
        assert_eq!(slot, 0);
        status
    }

    pub(crate) fn bytes(&self, slot: u16, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(self.data(slot))).unwrap();
        bytes
    }
}

pub(crate) struct Guest {
    pub(crate) frontend: Frontend,
    pub(crate) rings: Vec<Ring>,
    features: u64,
    config: Vec<u8>,
}

impl Guest {
    pub(crate) fn connect(rig: &Rig, queues: usize, without: u64) -> Self {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, MEMORY).unwrap();
        Self::connect_with(rig, queues, without, file.into(), QUEUE)
    }

    /// Connects with `file` as guest memory, and with `size` descriptors per queue.
    pub(crate) fn connect_with(
        rig: &Rig,
        queues: usize,
        without: u64,
        file: File,
        size: u16,
    ) -> Self {
        Self::connect_prepared(rig, queues, without, file, size, |_| {})
    }

    /// Connects, and calls `prepare` before the queues are set up.
    pub(crate) fn connect_prepared(
        rig: &Rig,
        queues: usize,
        without: u64,
        file: File,
        size: u16,
        prepare: impl FnOnce(&mut Frontend),
    ) -> Self {
        let mut frontend = Frontend::connect(rig.socket(), queues as u64).unwrap();
        frontend.set_owner().unwrap();
        let features = frontend.get_features().unwrap();
        let wanted = VERSION_1 | PROTOCOL_FEATURES | EVENT_IDX | FLUSH | MQ;
        assert_eq!(features & wanted, wanted);
        frontend.set_features(features & wanted & !without).unwrap();
        let protocol = frontend.get_protocol_features().unwrap();
        let wanted = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::MQ;
        assert!(protocol.contains(wanted | VhostUserProtocolFeatures::INFLIGHT_SHMFD));
        frontend.set_protocol_features(wanted | VhostUserProtocolFeatures::INFLIGHT_SHMFD).unwrap();
        prepare(&mut frontend);
        assert_eq!(frontend.get_queue_num().unwrap(), 2);
        let flags = VhostUserConfigFlags::WRITABLE;
        let config = frontend.get_config(0, 60, flags, &[0; 60]).unwrap().1;
        let len = file.metadata().unwrap().len();
        let range = (GuestAddress(0), len as usize, Some(FileOffset::new(file, 0)));
        let memory = GuestMemoryMmap::<()>::from_ranges_with_files([range]).unwrap();
        let regions: Vec<_> = memory
            .iter()
            .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap())
            .collect();
        frontend.set_mem_table(&regions).unwrap();
        let rings = (0..queues as u64).map(|index| {
            let ring = Ring {
                memory: memory.clone(),
                base: RINGS + index * 0x8000,
                index,
                kick: EventFd::new(libc_nonblock()).unwrap(),
                call: EventFd::new(libc_nonblock()).unwrap(),
                submitted: 0,
                taken: 0,
            };
            let address = |at| memory.get_host_address(GuestAddress(at)).unwrap() as usize as u64;
            let config = VringConfigData {
                queue_max_size: size,
                queue_size: size,
                flags: 0,
                desc_table_addr: address(ring.base),
                used_ring_addr: address(ring.used()),
                avail_ring_addr: address(ring.available()),
                log_addr: None,
            };
            let index = index as usize;
            frontend.set_vring_num(index, size).unwrap();
            frontend.set_vring_addr(index, &config).unwrap();
            frontend.set_vring_base(index, 0).unwrap();
            frontend.set_vring_call(index, &ring.call).unwrap();
            frontend.set_vring_kick(index, &ring.kick).unwrap();
            frontend.set_vring_enable(index, true).unwrap();
            ring
        });
        let rings = rings.collect();
        Self { frontend, rings, features, config }
    }

    /// Starts a queue that [`VhostUserFrontend`]'s `get_vring_base` has stopped.
    pub(crate) fn start_again(&mut self, index: usize, base: u32) {
        let ring = &self.rings[index];
        self.frontend.set_vring_base(index, base as u16).unwrap();
        self.frontend.set_vring_call(index, &ring.call).unwrap();
        self.frontend.set_vring_kick(index, &ring.kick).unwrap();
    }

    /// Sends the memory table again.
    pub(crate) fn share_again(&mut self) {
        let regions: Vec<_> = self.rings[0]
            .memory
            .iter()
            .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap())
            .collect();
        self.frontend.set_mem_table(&regions).unwrap();
    }

    /// Returns true if the device still replies to messages.
    pub(crate) fn is_served(&mut self) -> bool {
        self.frontend.get_queue_num().is_ok()
    }
}

fn libc_nonblock() -> i32 {
    rustix::fs::OFlags::NONBLOCK.bits() as i32
}

pub(crate) const READ: u32 = 0;
pub(crate) const WRITE: u32 = 1;
const FLUSH_REQUEST: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

fn segment(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}

#[test]
fn a_guest_configures_and_uses_its_disk() {
    short_blocks(|| {
        let rig = Rig::new(false);
        let mut guest = Guest::connect(&rig, 2, 0);
        assert_eq!(guest.config[..8], 16384u64.to_le_bytes());
        assert_eq!(guest.config[20..24], 512u32.to_le_bytes());
        assert_eq!(guest.config[34..36], 2u16.to_le_bytes());
        for ring in &mut guest.rings {
            let data: Vec<u8> = (0..300 * 512).map(|i: u32| (i ^ i >> 8) as u8 | 1).collect();
            assert_eq!(ring.run(WRITE, 7, &data, 0), 0);
            ring.submit(3, READ, 7, b"", 300 * 512);
            assert_eq!(ring.take(), (3, 300 * 512 + 1, 0));
            assert!(ring.bytes(3, 300 * 512) == data);
            assert_eq!(ring.run(FLUSH_REQUEST, 0, b"", 0), 0);
            assert_eq!(ring.run(WRITE_ZEROES, 0, &segment(8, 2, 1), 0), 0);
            assert_eq!(ring.run(DISCARD, 0, &segment(10, 2, 0), 0), 0);
            assert_eq!(ring.run(READ, 7, b"", 5 * 512), 0);
            let back = ring.bytes(0, 5 * 512);
            assert!(back[..512] == data[..512] && back[512..] == [0; 4 * 512]);
            assert_eq!(ring.run(GET_ID, 0, b"", 20), 0);
            assert_eq!(&ring.bytes(0, 20), b"a test\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        }
        for op in [Op::Flush, Op::WriteZeroes { deallocate: true, fua: false }, Op::Discard] {
            assert_eq!(rig.backing.seen().iter().filter(|seen| seen.op == op).count(), 2, "{op:?}");
        }
        drop(guest);
        rig.end(0);
    });
}

#[test]
fn queues_are_used_at_the_same_time_and_deeply() {
    each_block_size(|| {
        for without in [0, EVENT_IDX] {
            let rig = Rig::new(false);
            let guest = Guest::connect(&rig, 2, without);
            std::thread::scope(|scope| {
                for mut ring in guest.rings {
                    scope.spawn(move || {
                        let me = ring.index;
                        let mut free: Vec<u16> = (0..SLOTS.min(14)).collect();
                        let mut busy = vec![None; usize::from(SLOTS)];
                        let (mut submitted, mut done) = (0u64, 0);
                        while done < 2000 {
                            while submitted < 2000
                                && let Some(slot) = free.pop()
                            {
                                // Each queue uses every second sector, so the queues' sectors are
                                // disjoint.
                                let sector = (submitted % 500) * 2 + me;
                                let byte = (sector as u8).wrapping_mul(7) | 1;
                                if submitted < 500 {
                                    ring.submit(slot, WRITE, sector, &[byte; 512], 0);
                                    busy[usize::from(slot)] = Some(None);
                                } else {
                                    ring.submit(slot, READ, sector, b"", 512);
                                    busy[usize::from(slot)] = Some(Some(byte));
                                }
                                submitted += 1;
                                if submitted == 500 {
                                    break;
                                }
                            }
                            if submitted == 500 {
                                // All writes complete before the test submits the first read.
                                while done < 500 {
                                    let (slot, _, status) = ring.take();
                                    assert_eq!(status, 0);
                                    assert!(busy[usize::from(slot)].take().is_some());
                                    free.push(slot);
                                    done += 1;
                                }
                                continue;
                            }
                            let (slot, _, status) = ring.take();
                            assert_eq!(status, 0);
                            let expected = busy[usize::from(slot)].take().expect("answered twice");
                            if let Some(byte) = expected {
                                assert_eq!(ring.bytes(slot, 512), [byte; 512]);
                            }
                            free.push(slot);
                            done += 1;
                        }
                    });
                }
            });
            rig.end(0);
        }
    });
}

#[test]
fn invalid_requests_only_return_an_error() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let mut guest = Guest::connect(&rig, 1, 0);
        let ring = &mut guest.rings[0];
        const IOERR: u8 = 1;
        const UNSUPPORTED: u8 = 2;
        for (kind, sector, data, room, status) in [
            (READ, 16384, vec![], 512, IOERR),
            (READ, u64::MAX, vec![], 512, IOERR),
            (READ, u64::MAX / 512, vec![], 1024, IOERR),
            (READ, 0, vec![], 511, IOERR),
            (WRITE, 16383, vec![1; 1024], 0, IOERR),
            (WRITE, 0, vec![1; 5], 0, IOERR),
            (WRITE_ZEROES, 0, segment(16384, 1, 0), 0, IOERR),
            (WRITE_ZEROES, 0, segment(u64::MAX, u32::MAX, 0), 0, IOERR),
            (WRITE_ZEROES, 0, segment(0, 1, 2), 0, UNSUPPORTED),
            (WRITE_ZEROES, 0, vec![0; 15], 0, IOERR),
            (DISCARD, 0, segment(0, 1, 1), 0, UNSUPPORTED),
            (DISCARD, 0, [segment(0, 1, 0), segment(1, 1, 0)].concat(), 0, IOERR),
            (4711, 0, vec![], 512, UNSUPPORTED),
        ] {
            assert_eq!(ring.run(kind, sector, &data, room), status, "type {kind} at {sector}");
        }
        // A chain whose header is too short.
        ring.descriptor(0, HEADERS, 8, 1, 2);
        ring.descriptor(2, ring.status(0), 1, 2, 0);
        ring.offer(0);
        assert_eq!(ring.take(), (0, 1, IOERR));
        // A chain without a status descriptor.
        ring.write(ring.status(0), &[0xff]);
        ring.descriptor(0, HEADERS, 16, 0, 0);
        ring.offer(0);
        assert_eq!(ring.take(), (0, 0, 0xff));
        // A cyclic chain.
        ring.descriptor(0, HEADERS, 16, 1, 0);
        ring.offer(0);
        ring.take();
        // A chain whose data is outside of guest memory.
        ring.descriptor(0, HEADERS, 16, 1, 1);
        ring.descriptor(1, MEMORY + 4096, 512, 3, 2);
        ring.descriptor(2, ring.status(0), 1, 2, 0);
        ring.offer(0);
        ring.take();
        assert_eq!(ring.run(READ, 0, b"", 512), 0, "it goes on");
        drop(guest);
        rig.end(0);
    });
}

#[test]
fn a_guest_that_does_not_flush_has_durable_writes() {
    short_blocks(|| {
        let mut rig = Rig::new(false);
        drop(rig.device.take());
        rig.backing.cache = true;
        let disk = device(Arc::new(rig.backing.clone()), false);
        assert!(disk.geometry().volatile_cache);
        rig.device = Some(serve(disk, &rig.socket(), "cached"));
        for (without, fua) in [(0, false), (FLUSH, true)] {
            rig.backing.instruct(|instructions| instructions.seen.clear());
            let mut guest = Guest::connect(&rig, 1, without);
            assert_eq!(guest.rings[0].run(WRITE, 3, &[5; 512], 0), 0);
            assert_eq!(guest.rings[0].run(WRITE_ZEROES, 0, &segment(8, 2, 0), 0), 0);
            let ops: Vec<_> = rig.backing.seen().iter().map(|seen| seen.op).collect();
            assert_eq!(ops, [Op::Write { fua }, Op::WriteZeroes { deallocate: false, fua }]);
        }
        rig.end(0);
    });
}

#[test]
fn read_only_and_failing_disks_return_errors() {
    each_block_size(|| {
        let rig = Rig::new(true);
        let mut guest = Guest::connect(&rig, 1, 0);
        assert_ne!(guest.features & 1 << 5, 0, "VIRTIO_BLK_F_RO");
        assert_eq!(guest.rings[0].run(WRITE, 0, &[1; 512], 0), 1);
        assert_eq!(guest.rings[0].run(READ, 0, b"", 512), 0);
        drop(guest);
        rig.end(0);
        let rig = Rig::new(false);
        let mut guest = Guest::connect(&rig, 1, 0);
        rig.backing.instruct(|instructions| instructions.fail = Some(DiskError::Io(5)));
        assert_eq!(guest.rings[0].run(WRITE, 0, &[1; 512], 0), 1);
        rig.backing.instruct(|instructions| instructions.fail = None);
        assert_eq!(guest.rings[0].run(WRITE, 0, &[1; 512], 0), 0);
        drop(guest);
        rig.end(1);
    });
}

#[test]
fn a_queue_stops_after_its_requests_have_completed() {
    short_blocks(|| {
        let rig = Rig::new(false);
        let mut guest = Guest::connect(&rig, 1, 0);
        rig.backing.instruct(|instructions| instructions.hold = true);
        for slot in 0..8 {
            guest.rings[0].submit(slot, WRITE, slot.into(), &[7; 512], 0);
        }
        rig.backing.expect(8);
        let backing = rig.backing.clone();
        let release = std::thread::spawn(move || {
            wait::short_pause();
            backing.instruct(|instructions| instructions.hold = false);
        });
        assert_eq!(guest.frontend.get_vring_base(0).unwrap(), 8);
        let index = u16::from_le_bytes(guest.rings[0].read(guest.rings[0].used() + 2));
        assert_eq!(index, 8, "all of them are answered");
        release.join().unwrap();
        drop(guest);
        rig.end(0);
    });
}

#[test]
fn frontends_are_served_one_after_another_until_a_stop() {
    each_block_size(|| {
        let mut rig = Rig::new(false);
        for round in 0..5u8 {
            let mut guest = Guest::connect(&rig, 2, 0);
            assert_eq!(guest.rings[1].run(WRITE, 0, &[round; 512], 0), 0);
            if round % 2 == 0 {
                // The frontend disconnects with a request in flight, before the next one connects.
                guest.rings[0].submit(0, WRITE, 9, &[round; 512], 0);
            }
        }
        // Another client sends garbage.
        use std::io::Write;
        let mut other = std::os::unix::net::UnixStream::connect(rig.socket()).unwrap();
        let _ = other.write_all(&[0xff; 100]);
        drop(other);
        let mut guest = Guest::connect(&rig, 1, 0);
        assert_eq!(guest.rings[0].run(READ, 0, b"", 512), 0);
        assert_eq!(guest.rings[0].bytes(0, 512), [4; 512]);
        assert_eq!(rig.device.take().unwrap().stop(), 0);
        assert!(guest.frontend.get_features().is_err(), "the server has hung up");
    });
}
