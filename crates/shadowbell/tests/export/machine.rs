//! A virtual machine with a vhost-user-blk disk, whose VMM reconnects after the death of the
//! device's process.

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shadowbell_testing::wait::pause;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use vhost::vhost_user::message::{
    VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// Entries of the virtqueue.
const ENTRIES: u16 = 64;
/// Maximum number of requests in flight. Each has three descriptors.
const SLOTS: u16 = 16;
pub(crate) const BLOCK: u64 = 4096;
pub(crate) const BLOCKS: u64 = 64;

const MEMORY: u64 = 0x10_0000;
const TABLE: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const HEADERS: u64 = 0x4000;
const STATUSES: u64 = 0x5000;
const DATA: u64 = 0x1_0000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

type Failed = Box<dyn std::error::Error>;

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct RequestInFlight {
    block: u64,
    /// Version of the block that a write stores, or that a read must return.
    version: u64,
    writes: bool,
}

/// A virtual machine.
pub(crate) struct Machine {
    memory: GuestMemoryMmap<()>,
    inflight: Option<(VhostUserInflight, File)>,
    frontend: Option<Frontend>,
    kick: EventFd,
    call: EventFd,
    available: u16,
    seen: u16,
    requests: [Option<RequestInFlight>; SLOTS as usize],
    /// Version of each block: the number of its writes.
    versions: [u64; BLOCKS as usize],
    random: u64,
    pub(crate) answered: u64,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, MEMORY).unwrap();
        let range = (GuestAddress(0), MEMORY as usize, Some(FileOffset::new(file.into(), 0)));
        let event = || EventFd::new(rustix::fs::OFlags::NONBLOCK.bits() as i32).unwrap();
        Self {
            memory: GuestMemoryMmap::from_ranges_with_files([range]).unwrap(),
            inflight: None,
            frontend: None,
            kick: event(),
            call: event(),
            available: 0,
            seen: 0,
            requests: [None; SLOTS as usize],
            versions: [0; BLOCKS as usize],
            random: 0x9e37_79b9_7f4a_7c15,
            answered: 0,
        }
    }

    /// Connects as QEMU does.
    pub(crate) fn connect(&mut self, socket: &Path) -> Result<(), Failed> {
        self.frontend = None;
        let mut frontend = Frontend::connect(socket, 1)?;
        frontend.set_owner()?;
        let wanted = 1 << 32 | 1 << 30 | 1 << 9;
        assert_eq!(frontend.get_features()? & wanted, wanted);
        frontend.set_features(wanted)?;
        let features = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        assert!(frontend.get_protocol_features()?.contains(features));
        frontend.set_protocol_features(features)?;
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let regions = self.memory.iter().map(VhostUserMemoryRegionInfo::from_guest_region);
        frontend.set_mem_table(&regions.collect::<Result<Vec<_>, _>>()?)?;
        if self.inflight.is_none() {
            let queues = VhostUserInflight::new(0, 0, 1, ENTRIES);
            self.inflight = Some(frontend.get_inflight_fd(&queues)?);
        }
        let (shape, file) = self.inflight.as_ref().unwrap();
        frontend.set_inflight_fd(shape, file.as_raw_fd())?;
        let address = |at| self.memory.get_host_address(GuestAddress(at)).unwrap() as usize as u64;
        let queue = VringConfigData {
            queue_max_size: ENTRIES,
            queue_size: ENTRIES,
            flags: 0,
            desc_table_addr: address(TABLE),
            used_ring_addr: address(USED),
            avail_ring_addr: address(AVAILABLE),
            log_addr: None,
        };
        frontend.set_vring_num(0, ENTRIES)?;
        frontend.set_vring_addr(0, &queue)?;
        // The VMM does not know how many requests the dead process has taken. So it lets the device
        // continue at the used index, which is in guest memory.
        let used: u16 = self.memory.load(GuestAddress(USED + 2), Ordering::Acquire).unwrap();
        frontend.set_vring_base(0, used)?;
        frontend.set_vring_call(0, &self.call)?;
        frontend.set_vring_kick(0, &self.kick)?;
        frontend.set_vring_enable(0, true)?;
        self.frontend = Some(frontend);
        Ok(())
    }

    /// Stops the queue as a VMM does when it pauses the guest.
    pub(crate) fn pause(&mut self) {
        let frontend = self.frontend.take().unwrap();
        let base = frontend.get_vring_base(0).unwrap();
        let used: u16 = self.memory.load(GuestAddress(USED + 2), Ordering::Acquire).unwrap();
        assert_eq!(base, u32::from(used), "every taken request is completed");
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    /// Submits requests in most of the free slots, to blocks that no other request uses.
    pub(crate) fn submit_requests(&mut self) {
        for slot in 0..SLOTS {
            if self.requests[usize::from(slot)].is_some() || self.random(4) == 0 {
                continue;
            }
            let block = self.random(BLOCKS);
            if self.requests.iter().flatten().any(|request| request.block == block) {
                continue;
            }
            let writes = self.random(3) > 0;
            let version = self.versions[block as usize] + u64::from(writes);
            self.requests[usize::from(slot)] = Some(RequestInFlight { block, version, writes });
            self.submit(slot, block, version, writes);
        }
        self.kick.write(1).unwrap();
    }

    fn submit(&mut self, slot: u16, block: u64, version: u64, writes: bool) {
        let header = HEADERS + 16 * u64::from(slot);
        let data = DATA + BLOCK * u64::from(slot);
        let mut bytes = u32::from(writes).to_le_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend((block * (BLOCK / 512)).to_le_bytes());
        self.write(header, &bytes);
        self.write(
            data,
            &if writes { content(block, version) } else { vec![0xee; BLOCK as usize] },
        );
        let status = STATUSES + u64::from(slot);
        self.write(status, &[0xff]);
        let head = 4 * slot;
        let flags = if writes { NEXT } else { NEXT | WRITE };
        for (nth, (at, len, flags)) in
            [(header, 16, NEXT), (data, BLOCK as u32, flags), (status, 1, WRITE)]
                .into_iter()
                .enumerate()
        {
            let index = head + nth as u16;
            let mut bytes = at.to_le_bytes().to_vec();
            bytes.extend(len.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend((index + 1).to_le_bytes());
            self.write(TABLE + 16 * u64::from(index), &bytes);
        }
        let place = AVAILABLE + 4 + 2 * u64::from(self.available % ENTRIES);
        self.write(place, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.memory.store(self.available, GuestAddress(AVAILABLE + 2), Ordering::SeqCst).unwrap();
    }

    /// Checks the completed requests. The error names the first wrong one.
    pub(crate) fn check_completions(&mut self) -> Result<(), String> {
        let used: u16 = self.memory.load(GuestAddress(USED + 2), Ordering::Acquire).unwrap();
        if used.wrapping_sub(self.seen) > SLOTS {
            return Err(format!("the used ring goes from {} to {used}", self.seen));
        }
        while self.seen != used {
            let at = USED + 4 + 8 * u64::from(self.seen % ENTRIES);
            let head: u32 = self.memory.read_obj(GuestAddress(at)).unwrap();
            self.seen = self.seen.wrapping_add(1);
            let slot = (head / 4) as usize;
            let request = self.requests.get_mut(slot).and_then(Option::take);
            let request = request.ok_or_else(|| format!("slot {slot} is answered twice"))?;
            let status: u8 = self.memory.read_obj(GuestAddress(STATUSES + slot as u64)).unwrap();
            if status != 0 {
                return Err(format!("{request:?} ends with status {status}"));
            }
            self.answered += 1;
            if request.writes {
                self.versions[request.block as usize] = request.version;
                continue;
            }
            let mut bytes = vec![0; BLOCK as usize];
            let data = GuestAddress(DATA + BLOCK * slot as u64);
            self.memory.read_slice(&mut bytes, data).unwrap();
            if bytes != content(request.block, request.version) {
                let found = &bytes[..16];
                return Err(format!("{request:?} is something else: {found:?}"));
            }
        }
        Ok(())
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.requests.iter().all(Option::is_none)
    }

    /// Waits a short time for a notification; returns whether there was one.
    pub(crate) fn wait(&self) -> bool {
        let is_notified = || self.call.read().is_ok();
        is_notified()
            || (0..10).any(|_| {
                pause();
                is_notified()
            })
    }

    /// Expected contents of the disk.
    pub(crate) fn image(&self) -> Vec<u8> {
        let blocks = (0..BLOCKS).zip(self.versions);
        blocks.flat_map(|(block, version)| content(block, version)).collect()
    }
}

/// Contents of a block after `version` writes.
fn content(block: u64, version: u64) -> Vec<u8> {
    if version == 0 {
        return vec![0; BLOCK as usize];
    }
    let words = (0..BLOCK / 8).map(|nth| (version << 32 | block << 16 | nth) ^ 0x5555_0000_0000);
    words.flat_map(u64::to_le_bytes).collect()
}
