//! Namespace of one controller on one I/O thread: the queue to its disk, draining queues, and disk
//! errors.
//!
//! The queue of a removed or changed namespace drains: it gets no new requests, and is dropped when
//! its requests in flight have ended. Disk errors are converted to NVMe status codes.

use super::quota::cost;
use crate::namespace::{INACTIVE, Namespace, Namespaces};
use crate::reservations::Access;
use crate::subsystem::Member;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use shadowbell_disk::{DiskError, Metadata, MetadataFormat, Op, Queue, Request, Submitted};
use shadowbell_memory::{Ring, Segments};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::RwFields;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::status::Status;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Namespace flags: write-protected; disk with a volatile write cache; uncorrectable blocks present
/// (all commands then take the slow path).
const READ_ONLY: u8 = 1;
const VOLATILE_CACHE: u8 = 2;
const MARKED: u8 = 4;

/// Namespace and this I/O thread's queue to its disk. An inactive NSID is a namespace without
/// blocks.
pub(crate) struct NamespaceQueue {
    pub(super) blocks: u64,
    pub(super) block_shift: u8,
    flags: u8,
    /// Smallest NLB field (number of blocks - 1) with which a command takes the slow path
    /// (`is_long`).
    long_from: u32,
    /// Status of commands if the NSID is inactive.
    pub(super) absence: Status,
    /// Attributes that most namespaces do not have.
    extra: Option<Box<Extra>>,
    pub(super) queue: Box<dyn Queue>,
}

// With 40 bytes per element, x86 addressing computes an element's address (base + 5 * 8 * index)
// without a multiplication. With 48 bytes, an I/O took 7 more instructions, mostly register spills.
const _: () = assert!(size_of::<NamespaceQueue>() == 40);

/// Attributes that most namespaces do not have. With metadata or zones, all commands take the slow
/// path.
#[derive(Clone, Debug)]
struct Extra {
    /// Subsystem attributes, if other controllers share the namespace.
    shared: Option<SharedNamespace>,
    metadata: Option<MetadataFormat>,
    /// True for a zoned namespace.
    is_zoned: bool,
}

/// Subsystem attributes of a shared namespace.
#[derive(Clone, Debug)]
pub(super) struct SharedNamespace {
    pub(super) member: Arc<Member>,
    pub(super) uuid: [u8; 16],
    nsid: u32,
    /// Access of the controller under reservations and ANA. If the access is restricted, all
    /// commands of the namespace take the slow path.
    access: Access,
}

fn long_from(block_shift: u8) -> u32 {
    (cost::SHORT_BYTES >> block_shift) as u32
}

impl NamespaceQueue {
    pub(crate) fn open(namespace: &Namespace) -> io::Result<Self> {
        let queue = namespace.disk().queue()?;
        let (nsid, uuid) = (namespace.nsid(), namespace.uuid());
        let shared = namespace.member().cloned().map(|member| SharedNamespace {
            member,
            uuid,
            nsid,
            access: Access::ALL,
        });
        let metadata = namespace.info().metadata;
        let is_zoned = namespace.info().zoned.is_some();
        let has_extra = shared.is_some() || metadata.is_some() || is_zoned;
        let extra = has_extra.then(|| Box::new(Extra { shared, metadata, is_zoned }));
        let block_shift = namespace.block_shift() as u8;
        let mut opened = Self {
            blocks: namespace.blocks(),
            block_shift,
            flags: if namespace.read_only() { READ_ONLY } else { 0 }
                | if namespace.info().volatile_cache { VOLATILE_CACHE } else { 0 },
            long_from: long_from(block_shift),
            absence: INACTIVE,
            extra,
            queue: if namespace.write_through() { Box::new(WriteThrough(queue)) } else { queue },
        };
        opened.review_access();
        Ok(opened)
    }

    /// Opens the namespace of this NSID, or creates an [absent](Self::absent) one.
    pub(crate) fn open_any(namespaces: &Namespaces, nsid: u32) -> io::Result<Self> {
        match namespaces.get(nsid) {
            Some(namespace) => Self::open(namespace),
            None => Ok(Self::absent(namespaces.absence(nsid))),
        }
    }

    /// Creates the queue of an inactive NSID, whose commands end with `absence`.
    pub(super) fn absent(absence: Status) -> Self {
        Self { absence, ..Self::none() }
    }

    /// Creates the queue of an inactive NSID.
    pub(super) fn none() -> Self {
        Self {
            blocks: 0,
            block_shift: 9,
            flags: READ_ONLY,
            long_from: long_from(9),
            absence: INACTIVE,
            extra: None,
            queue: Box::new(InactiveQueue),
        }
    }

    /// Sets whether the namespace has uncorrectable blocks.
    pub(super) fn set_marked(&mut self, is_marked: bool) {
        self.flags = self.flags & !MARKED | if is_marked { MARKED } else { 0 };
        self.review_long();
    }

    fn review_long(&mut self) {
        let has_more = self.metadata().is_some() || self.is_zoned();
        let all_are = self.is_marked() || self.access().restricts() || has_more;
        self.long_from = if all_are { 0 } else { long_from(self.block_shift) };
    }

    /// Refreshes the access of the controller under reservations and ANA.
    pub(super) fn review_access(&mut self) {
        if let Some(shared) = self.extra.as_mut().and_then(|extra| extra.shared.as_mut()) {
            shared.access = shared.member.access(shared.nsid, &shared.uuid);
        }
        self.review_long();
    }

    /// Access of the controller under reservations and ANA.
    pub(super) fn access(&self) -> Access {
        self.shared().map_or(Access::ALL, |shared| shared.access)
    }

    /// Subsystem attributes, if the namespace is shared.
    pub(super) fn shared(&self) -> Option<&SharedNamespace> {
        self.extra.as_ref()?.shared.as_ref()
    }

    /// Metadata format, if the blocks have metadata.
    pub(super) fn metadata(&self) -> Option<&MetadataFormat> {
        self.extra.as_ref()?.metadata.as_ref()
    }

    /// True if the namespace is zoned.
    pub(super) fn is_zoned(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| extra.is_zoned)
    }

    /// True if the namespace has uncorrectable blocks.
    pub(super) fn is_marked(&self) -> bool {
        self.flags & MARKED != 0
    }

    /// True if the namespace is write-protected.
    #[inline]
    pub(super) fn is_read_only(&self) -> bool {
        self.flags & READ_ONLY != 0
    }

    /// True if the disk has a volatile write cache.
    #[inline]
    pub(super) fn has_volatile_cache(&self) -> bool {
        self.flags & VOLATILE_CACHE != 0
    }

    /// Number of requests that the disk has not answered.
    pub(crate) fn pending(&self) -> usize {
        self.queue.pending()
    }

    pub(super) fn is_none(&self) -> bool {
        self.blocks == 0
    }

    /// Byte range of `rw` on the disk.
    #[inline]
    pub(super) fn range(&self, rw: &RwFields) -> Result<(u64, u64), Status> {
        match rw.end() {
            Some(end) if end <= self.blocks => {}
            _ => return Err(self.out_of_range()),
        }
        Ok((rw.slba << self.block_shift, u64::from(rw.blocks()) << self.block_shift))
    }

    /// Status of a command whose blocks do not exist. The check for an inactive NSID is here, in
    /// the cold path, so that commands of active namespaces do not pay for it.
    #[cold]
    #[inline(never)]
    fn out_of_range(&self) -> Status {
        if self.is_none() { self.absence } else { Status::LBA_OUT_OF_RANGE.with_dnr() }
    }

    /// True if a read or write takes the slow path: it has more than [`cost::SHORT_BYTES`] or Force
    /// Unit Access, or needs further checks. One comparison covers both size and FUA, because FUA
    /// is a higher bit of CDW12 than NLB.
    #[inline]
    pub(super) fn is_long(&self, sqe: &Sqe) -> bool {
        const FUA: u32 = 1 << 30;
        const NLB: u32 = 0xffff;
        sqe.cdw12 & (FUA | NLB) >= self.long_from
    }

    /// Registers the disk's file descriptors with `epoll`, to wake the I/O thread on completions.
    pub(crate) fn watch(&self, epoll: &OwnedFd) -> io::Result<()> {
        if let Some(timer) = self.queue.timer_fd() {
            epoll::add(epoll, timer, EventData::new_u64(DISK_TOKEN), EventFlags::IN)?;
        }
        let Some(fd) = self.queue.wake_fd() else { return Ok(()) };
        let edges = if self.queue.wakes_by_edges() { EventFlags::ET } else { EventFlags::empty() };
        match epoll::add(epoll, fd, EventData::new_u64(DISK_TOKEN), EventFlags::IN | edges) {
            Err(Errno::EXIST) if self.queue.shares_wake_fd() => Ok(()),
            outcome => Ok(outcome?),
        }
    }

    /// Removes the file descriptors that [`watch`](Self::watch) registered, except one that other
    /// queues share.
    pub(crate) fn unwatch(&self, epoll: &OwnedFd) {
        let own = self.queue.wake_fd().filter(|_| !self.queue.shares_wake_fd());
        for fd in own.into_iter().chain(self.queue.timer_fd()) {
            let _ = epoll::delete(epoll, fd);
        }
    }
}

/// Epoll data of disk events.
const DISK_TOKEN: u64 = 1;

/// Index of namespace `nsid` in `list`, which has an element for every valid NSID.
#[inline]
pub(super) fn index_of(list: &[NamespaceQueue], nsid: u32) -> Result<usize, Status> {
    let index = (nsid as usize).wrapping_sub(1);
    match list.get(index) {
        Some(namespace) if namespace.is_none() => Err(namespace.absence),
        Some(_) => Ok(index),
        None => Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr()),
    }
}

/// Announces to the disk the command in ring entry `index`. It will be started after `ahead - 1`
/// other commands. The entry is not validated here; it is read again when it is fetched.
#[inline]
pub(super) fn prefetch_hint(
    list: &[NamespaceQueue],
    ring: &Ring<{ Sqe::SIZE }>,
    index: u32,
    ahead: u32,
) {
    const READ: u8 = NvmOpcode::Read as u8;
    const WRITE: u8 = NvmOpcode::Write as u8;
    let op = match ring.peek::<u8>(index, 0) {
        Some(READ) => Op::Read,
        Some(WRITE) => Op::Write { fua: false },
        _ => return,
    };
    let Some(nsid) = ring.peek::<u32>(index, 4) else { return };
    let Some(slba) = ring.peek::<u64>(index, 40) else { return };
    let Some(nlb) = ring.peek::<u16>(index, 48) else { return };
    if let Some(namespace) = list.get((nsid as usize).wrapping_sub(1))
        && slba < namespace.blocks
    {
        let len = (usize::from(nlb) + 1) << namespace.block_shift;
        namespace.queue.prefetch_hint(op, slba << namespace.block_shift, len, ahead);
    }
}

/// Disk queue of an inactive NSID. It receives no requests.
struct InactiveQueue;

impl Queue for InactiveQueue {
    fn submit(&mut self, _: u32, _: &Request, _: &mut Segments) -> Submitted {
        Submitted::Done(Err(DiskError::OutOfRange))
    }
}

/// Queue to a disk whose volatile cache is hidden from the host: all writes have Force Unit Access.
struct WriteThrough(Box<dyn Queue>);

/// Adds Force Unit Access to an operation.
fn with_fua(op: Op) -> Op {
    match op {
        Op::Write { .. } => Op::Write { fua: true },
        Op::WriteZeroes { deallocate, .. } => Op::WriteZeroes { deallocate, fua: true },
        Op::CompareAndWrite { .. } => Op::CompareAndWrite { fua: true },
        Op::Append { .. } => Op::Append { fua: true },
        other => other,
    }
}

impl Queue for WriteThrough {
    fn inner(&self) -> Option<&dyn Queue> {
        Some(&*self.0)
    }

    fn inner_mut(&mut self) -> Option<&mut dyn Queue> {
        Some(&mut *self.0)
    }

    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        self.0.submit(tag, &Request { op: with_fua(request.op), ..*request }, data)
    }

    fn submit_with_metadata(
        &mut self,
        tag: u32,
        request: &Request,
        metadata: &Metadata,
        data: &mut Segments,
    ) -> Submitted {
        let request = Request { op: with_fua(request.op), ..*request };
        self.0.submit_with_metadata(tag, &request, metadata, data)
    }
}

/// First place number of draining queues. It is above all namespace indexes, so that an in-flight
/// entry can store a place or an index in the same field.
const FIRST: usize = 1 << 31;

/// Disk queues that get no new requests and have requests in flight.
#[derive(Default)]
pub(super) struct Draining(Vec<Option<NamespaceQueue>>);

impl Draining {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a queue and returns its place.
    pub(super) fn push(&mut self, queue: NamespaceQueue) -> usize {
        self.0.push(Some(queue));
        FIRST + self.0.len() - 1
    }

    pub(super) fn get_mut(&mut self, place: usize) -> Option<&mut NamespaceQueue> {
        self.0.get_mut(place.checked_sub(FIRST)?)?.as_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &NamespaceQueue> {
        self.0.iter().flatten()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut NamespaceQueue> {
        self.0.iter_mut().flatten()
    }

    /// Removes and returns the queue at this place, if its disk has no request in flight.
    pub(super) fn take_idle(&mut self, place: usize) -> Option<NamespaceQueue> {
        let kept = self.0.get_mut(place.checked_sub(FIRST)?)?;
        let queue = kept.take_if(|queue| queue.queue.pending() == 0);
        // In-flight entries refer to queues by place, so the other queues keep their places.
        if self.0.iter().all(Option::is_none) {
            self.0.clear();
        }
        queue
    }
}

/// NVMe status of a disk error; `reading` selects the status of I/O errors.
pub(super) fn status_of(error: DiskError, reading: bool) -> Status {
    match error {
        DiskError::OutOfRange => Status::LBA_OUT_OF_RANGE.with_dnr(),
        DiskError::ReadOnly => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
        DiskError::NoSpace => Status::CAPACITY_EXCEEDED.with_dnr(),
        DiskError::CompareFailed => Status::COMPARE_FAILURE.with_dnr(),
        DiskError::GuardCheck => Status::GUARD_CHECK,
        DiskError::ApplicationTagCheck => Status::APPLICATION_TAG_CHECK,
        DiskError::ReferenceTagCheck => Status::REFERENCE_TAG_CHECK,
        DiskError::ZoneBoundary => Status::ZONE_BOUNDARY_ERROR.with_dnr(),
        DiskError::ZoneFull => Status::ZONE_IS_FULL.with_dnr(),
        DiskError::ZoneReadOnly => Status::ZONE_IS_READ_ONLY.with_dnr(),
        DiskError::ZoneOffline => Status::ZONE_IS_OFFLINE.with_dnr(),
        DiskError::ZoneInvalidWrite => Status::ZONE_INVALID_WRITE.with_dnr(),
        DiskError::TooManyActiveZones => Status::TOO_MANY_ACTIVE_ZONES.with_dnr(),
        DiskError::TooManyOpenZones => Status::TOO_MANY_OPEN_ZONES.with_dnr(),
        DiskError::ZoneTransition => Status::INVALID_ZONE_STATE_TRANSITION.with_dnr(),
        DiskError::InvalidZone => Status::INVALID_FIELD.with_dnr(),
        DiskError::BadBuffer => Status::DATA_XFER_ERROR,
        DiskError::Unsupported => Status::INVALID_OPCODE.with_dnr(),
        DiskError::Cancelled => Status::ABORT_REQUESTED,
        DiskError::Device(bits) => Status::from_bits(bits),
        DiskError::Io(_) if reading => Status::UNRECOVERED_READ,
        DiskError::Io(_) => Status::WRITE_FAULT,
        _ => Status::INTERNAL,
    }
}

/// True if the status is a media error.
pub(super) fn is_media_error(status: Status) -> bool {
    let code = status.code();
    code == Status::UNRECOVERED_READ || code == Status::WRITE_FAULT
}
