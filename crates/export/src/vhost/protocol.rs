//! vhost-user messages of a frontend.
//!
//! The frontend is untrusted. A descriptor is accepted only if no other process can block an access
//! to it: a memfd or a file of a local disk as guest memory, and an eventfd as an eventfd of a
//! queue.

use super::config::{self, feature};
use super::device::Device;
use super::inflight::{Region as InflightRegion, Shape, ShapeError};
use super::memory::Region;
use super::request::QUEUE_SIZE;
use super::ring::Ring;
use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use shadowbell_memory::{DmaError, EventFd, MapError};
use shadowbell_vfio_user::descriptor::{Channel, Descriptor, PeerFd};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

/// Size of a header in bytes: request, flags, length of the payload.
const HEADER: usize = 12;
/// Largest number of bytes of a payload, and of the configuration space.
const MAX_PAYLOAD: usize = 4096;
/// Largest number of descriptors of a message.
const MAX_FDS: usize = 32;
/// Largest number of memory regions.
const MAX_REGIONS: usize = 509;
/// Page size, for the length of the memory for in-flight tracking.
const PAGE: u64 = 4096;

/// Bits of a message's flags: its version, the reply flag, and the request for a reply.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// Flag in the word with the index of a queue: the message has no descriptor.
const NO_FD: u64 = 1 << 8;

/// Requests of the frontend (vhost-user, "Front-end message types").
mod request {
    pub(super) const GET_FEATURES: u32 = 1;
    pub(super) const SET_FEATURES: u32 = 2;
    pub(super) const SET_OWNER: u32 = 3;
    pub(super) const RESET_OWNER: u32 = 4;
    pub(super) const SET_MEM_TABLE: u32 = 5;
    pub(super) const SET_VRING_NUM: u32 = 8;
    pub(super) const SET_VRING_ADDR: u32 = 9;
    pub(super) const SET_VRING_BASE: u32 = 10;
    pub(super) const GET_VRING_BASE: u32 = 11;
    pub(super) const SET_VRING_KICK: u32 = 12;
    pub(super) const SET_VRING_CALL: u32 = 13;
    pub(super) const SET_VRING_ERR: u32 = 14;
    pub(super) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(super) const GET_QUEUE_NUM: u32 = 17;
    pub(super) const SET_VRING_ENABLE: u32 = 18;
    pub(super) const GET_CONFIG: u32 = 24;
    pub(super) const GET_INFLIGHT_FD: u32 = 31;
    pub(super) const SET_INFLIGHT_FD: u32 = 32;
    pub(super) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(super) const ADD_MEM_REG: u32 = 37;
    pub(super) const REM_MEM_REG: u32 = 38;
}

/// Protocol feature bits.
mod protocol_feature {
    pub(super) const MQ: u64 = 1 << 0;
    pub(super) const REPLY_ACK: u64 = 1 << 3;
    pub(super) const CONFIG: u64 = 1 << 9;
    pub(super) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(super) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub(super) const ALL: u64 = MQ | REPLY_ACK | CONFIG | INFLIGHT_SHMFD | CONFIGURE_MEM_SLOTS;
}

/// Reason for the disconnect of a frontend.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProtocolError {
    #[error(
        "it shares a descriptor that is not what request {0} takes: guest memory has to be a memfd, \
         or a file of tmpfs, hugetlbfs or a local disk, and notifications have to be eventfds"
    )]
    Descriptor(u32),
    #[error("it sends descriptors in the middle of a message, or more than {MAX_FDS}")]
    Descriptors,
    #[error("it sends a message of {0} bytes")]
    Length(usize),
    #[error("request {0} is not supported, or needs a feature that was not negotiated")]
    Unsupported(u32),
    #[error("request {request} is malformed: {len} bytes with {fds} descriptors")]
    Malformed { request: u32, len: usize, fds: usize },
    #[error("the device has no queue {0}")]
    Queue(u64),
    #[error("features {0:#x} were not offered")]
    Features(u64),
    #[error("a queue of {0} entries is not supported, only a power of two up to {QUEUE_SIZE}")]
    QueueSize(u32),
    #[error("a ring is not in the guest's memory")]
    RingAddress,
    #[error("guest memory cannot be mapped: {0}")]
    Map(#[from] MapError),
    #[error("the regions of the guest's memory are invalid: {0}")]
    Memory(#[from] DmaError),
    #[error("it adds more than {MAX_REGIONS} memory regions, or removes one that does not exist")]
    Regions,
    #[error(transparent)]
    Inflight(#[from] ShapeError),
    #[error("resources of the machine are exhausted: {0}")]
    System(#[from] io::Error),
    #[error("{0}")]
    Socket(#[from] Errno),
}

/// Received message.
struct Message<'a> {
    request: u32,
    payload: &'a [u8],
    fds: Vec<PeerFd>,
}

/// Reply to a message.
#[derive(Default)]
struct Reply {
    payload: Vec<u8>,
    fd: Option<OwnedFd>,
}

impl From<u64> for Reply {
    fn from(value: u64) -> Self {
        Self { payload: value.to_ne_bytes().to_vec(), fd: None }
    }
}

/// Handles the messages of a frontend until it disconnects. `socket` is the frontend's socket, for
/// replies.
pub(super) fn serve(
    frontend: &mut Channel,
    socket: &UnixStream,
    device: &Device,
) -> Result<(), ProtocolError> {
    let mut session = Session { device, features: 0 };
    loop {
        let mut bytes = [0; HEADER + MAX_PAYLOAD];
        let (header, payload) = bytes.split_at_mut(HEADER);
        let mut fds = Vec::new();
        if !fill(frontend, header, Some(&mut fds))? {
            return Ok(());
        }
        let (fields, _) = header.as_chunks();
        let &[request, flags, len] = fields else { return Ok(()) };
        let [request, flags, len] = [request, flags, len].map(u32::from_ne_bytes);
        let len = len as usize;
        let payload = payload.get_mut(..len).ok_or(ProtocolError::Length(len))?;
        let fds = allowed(request, fds)?;
        if !fill(frontend, payload, None)? {
            return Ok(());
        }
        if flags & !NEED_REPLY != VERSION {
            return Err(ProtocolError::Unsupported(request));
        }
        let outcome = session.handle(&Message { request, payload, fds });
        let acknowledged = flags & NEED_REPLY != 0 && session.has(protocol_feature::REPLY_ACK);
        let reply = match &outcome {
            Ok(Some(_)) => None,
            Ok(None) => acknowledged.then(|| Reply::from(0)),
            Err(_) => acknowledged.then(|| Reply::from(1)),
        };
        match reply.or(outcome?).map_or(Ok(()), |reply| send(socket, request, &reply)) {
            // The frontend has disconnected.
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
            sent => sent?,
        }
    }
}

/// State of a frontend's connection.
struct Session<'a> {
    device: &'a Device,
    /// Protocol features that the frontend has accepted.
    features: u64,
}

impl Session<'_> {
    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Executes a request. Returns its reply, if it has one.
    fn handle(&mut self, message: &Message<'_>) -> Result<Option<Reply>, ProtocolError> {
        let device = self.device;
        match message.request {
            request::GET_FEATURES => {
                message.fields::<0>()?;
                return Ok(Some(config::features(&device.geometry).into()));
            }
            request::SET_FEATURES => {
                let [features] = message.fields()?;
                if features & !config::features(&device.geometry) != 0 {
                    return Err(ProtocolError::Features(features));
                }
                device.set_features(features);
            }
            request::SET_OWNER => drop(message.fields::<0>()?),
            request::RESET_OWNER => self.features = 0,
            request::GET_PROTOCOL_FEATURES => {
                message.fields::<0>()?;
                return Ok(Some(protocol_feature::ALL.into()));
            }
            request::SET_PROTOCOL_FEATURES => [self.features] = message.fields()?,
            request::GET_QUEUE_NUM if self.has(protocol_feature::MQ) => {
                message.fields::<0>()?;
                return Ok(Some((device.queues() as u64).into()));
            }
            request::GET_CONFIG if self.has(protocol_feature::CONFIG) => {
                return self.configuration(message).map(Some);
            }
            request::SET_MEM_TABLE => self.set_memory(message)?,
            request::GET_MAX_MEM_SLOTS if self.has(protocol_feature::CONFIGURE_MEM_SLOTS) => {
                return Ok(Some((MAX_REGIONS as u64).into()));
            }
            request::ADD_MEM_REG if self.has(protocol_feature::CONFIGURE_MEM_SLOTS) => {
                let ([_, region @ ..], [file]) = (message.fields::<5>()?, &message.fds[..]) else {
                    return Err(message.malformed());
                };
                let mut regions = device.memory().regions.clone();
                if regions.len() >= MAX_REGIONS {
                    return Err(ProtocolError::Regions);
                }
                regions.push(message.region(region, file)?);
                device.set_memory(regions)?;
            }
            request::REM_MEM_REG if self.has(protocol_feature::CONFIGURE_MEM_SLOTS) => {
                let [_, guest, len, _, _] = message.fields()?;
                let mut regions = device.memory().regions.clone();
                let found = regions.iter().position(|region| region.is_at(guest, len));
                regions.remove(found.ok_or(ProtocolError::Regions)?);
                device.set_memory(regions)?;
            }
            request::GET_INFLIGHT_FD if self.has(protocol_feature::INFLIGHT_SHMFD) => {
                let mut shape = Shape::parse(message.payload, device.queues())?;
                shape.len = shape.needed().next_multiple_of(PAGE);
                let mut payload = [shape.len, 0].map(u64::to_ne_bytes).concat();
                payload.extend(message.payload.get(16..).unwrap_or_default());
                return Ok(Some(Reply { payload, fd: Some(InflightRegion::make(&shape)?) }));
            }
            request::SET_INFLIGHT_FD if self.has(protocol_feature::INFLIGHT_SHMFD) => {
                let shape = Shape::parse(message.payload, device.queues())?;
                shape.check_length()?;
                let [file] = &message.fds[..] else { return Err(message.malformed()) };
                device.inflight.set(InflightRegion::map(file, shape)?);
            }
            _ => return self.handle_queue(message),
        }
        Ok(None)
    }

    /// Executes a request that configures a queue.
    fn handle_queue(&self, message: &Message<'_>) -> Result<Option<Reply>, ProtocolError> {
        let device = self.device;
        match message.request {
            request::SET_VRING_NUM => {
                let (ring, _, size) = self.ring_and_value(message)?;
                let most = u16::try_from(size)
                    .ok()
                    .filter(|size| size.is_power_of_two() && usize::from(*size) <= QUEUE_SIZE);
                let size = most.ok_or(ProtocolError::QueueSize(size))?;
                ring.change(|config| config.size = size);
            }
            request::SET_VRING_ADDR => self.set_addresses(message)?,
            request::SET_VRING_BASE => {
                let (ring, _, base) = self.ring_and_value(message)?;
                ring.change(|config| config.next_available = base as u16);
            }
            request::GET_VRING_BASE => {
                let (ring, index, _) = self.ring_and_value(message)?;
                ring.change(|config| config.ready = false);
                device.stop_queue(index as usize);
                ring.set_kick(None);
                ring.set_call(None);
                let base = u32::from(ring.config().next_available);
                let payload = [index, base].map(u32::to_ne_bytes).concat();
                return Ok(Some(Reply { payload, fd: None }));
            }
            request::SET_VRING_KICK => {
                let (ring, kick) = self.ring_and_event(message)?;
                let is_there = kick.is_some();
                ring.set_kick(kick);
                ring.change(|config| config.ready |= is_there);
            }
            request::SET_VRING_CALL => {
                let (ring, call) = self.ring_and_event(message)?;
                ring.set_call(call);
                // The new eventfd is signalled, because the queue's thread may have signalled the
                // previous one after the frontend had read it for the last time. For example, QEMU
                // replaces the eventfd when the guest unmasks the interrupt vector.
                ring.signal();
            }
            // Errors of a queue are only logged.
            request::SET_VRING_ERR => drop(self.ring_and_event(message)?),
            request::SET_VRING_ENABLE
                if device.acked.load(Ordering::Relaxed) & feature::PROTOCOL_FEATURES != 0 =>
            {
                let (ring, _, enabled) = self.ring_and_value(message)?;
                if enabled > 1 {
                    return Err(message.malformed());
                }
                ring.change(|config| config.enabled = enabled == 1);
            }
            unknown => return Err(ProtocolError::Unsupported(unknown)),
        }
        Ok(None)
    }

    fn ring(&self, index: u64) -> Result<&Ring, ProtocolError> {
        let ring = usize::try_from(index).ok().and_then(|index| self.device.ring(index));
        ring.ok_or(ProtocolError::Queue(index))
    }

    /// Decodes a payload with the index of a queue and a value.
    fn ring_and_value(&self, message: &Message<'_>) -> Result<(&Ring, u32, u32), ProtocolError> {
        let [index, value] = halves(message.fields::<1>()?);
        Ok((self.ring(index.into())?, index, value))
    }

    /// Decodes a message with the index of a queue and an eventfd.
    fn ring_and_event(
        &self,
        message: &Message<'_>,
    ) -> Result<(&Ring, Option<EventFd>), ProtocolError> {
        let [value] = message.fields()?;
        let ring = self.ring(value & 0xff)?;
        let event = match &message.fds[..] {
            [] if value & NO_FD != 0 => None,
            [fd] if value & NO_FD == 0 => Some(EventFd::from_fd(fd.as_fd().try_clone_to_owned()?)?),
            _ => return Err(message.malformed()),
        };
        Ok((ring, event))
    }

    fn set_addresses(&self, message: &Message<'_>) -> Result<(), ProtocolError> {
        let [first, addresses @ ..] = message.fields::<5>()?;
        let [index, flags] = halves([first]);
        let ring = self.ring(index.into())?;
        let [descriptors, used, available, _log] = addresses;
        let is_aligned = descriptors % 16 == 0 && available % 2 == 0 && used % 4 == 0;
        // The only flag is for dirty logging, and is ignored.
        if flags > 1 || !is_aligned {
            return Err(message.malformed());
        }
        let memory = self.device.memory();
        let address = |user| memory.guest_address(user).ok_or(ProtocolError::RingAddress);
        let (descriptors, available, used) =
            (address(descriptors)?, address(available)?, address(used)?);
        // SET_VRING_BASE has only the position in the available ring. The position in the used ring
        // is read from the guest's memory, as other backends do.
        let index = used.checked_add(2).and_then(|at| memory.table.bytes(at, 2));
        let index = index.and_then(|bytes| bytes.load_u16_acquire(0));
        let next_used = index.map(u16::from_le).ok_or(ProtocolError::RingAddress)?;
        drop(memory);
        ring.change(|config| {
            (config.descriptors, config.available, config.used) = (descriptors, available, used);
            config.next_used = next_used;
        });
        Ok(())
    }

    fn set_memory(&self, message: &Message<'_>) -> Result<(), ProtocolError> {
        let (fields, rest) = message.payload.as_chunks::<8>();
        let [count, regions @ ..] = fields else { return Err(message.malformed()) };
        let [count, padding] = halves([u64::from_ne_bytes(*count)]);
        let (regions, other) = regions.as_chunks::<4>();
        let is_whole = rest.is_empty() && other.is_empty() && padding == 0;
        let counts = [count as usize, message.fds.len()];
        if !is_whole || counts != [regions.len(); 2] || regions.is_empty() {
            return Err(message.malformed());
        }
        let regions = regions
            .iter()
            .zip(&message.fds)
            .map(|(region, file)| message.region(region.map(u64::from_ne_bytes), file));
        Ok(self.device.set_memory(regions.collect::<Result<_, _>>()?)?)
    }

    fn configuration(&self, message: &Message<'_>) -> Result<Reply, ProtocolError> {
        let malformed = || message.malformed();
        let (head, rest) = message.payload.split_at_checked(12).ok_or_else(malformed)?;
        let &[offset, size, _flags] = head.as_chunks().0 else { return Err(malformed()) };
        let [offset, size] = [offset, size].map(|field| u32::from_ne_bytes(field) as usize);
        if size == 0 || size != rest.len() || offset + size > MAX_PAYLOAD {
            return Err(malformed());
        }
        let payload = [head, &self.device.configuration(offset, size)].concat();
        Ok(Reply { payload, fd: None })
    }
}

impl Message<'_> {
    fn malformed(&self) -> ProtocolError {
        let (len, fds) = (self.payload.len(), self.fds.len());
        ProtocolError::Malformed { request: self.request, len, fds }
    }

    /// Payload of `N` words of eight bytes.
    fn fields<const N: usize>(&self) -> Result<[u64; N], ProtocolError> {
        let (fields, rest) = self.payload.as_chunks::<8>();
        let fields: Option<[[u8; 8]; N]> = fields.try_into().ok().filter(|_| rest.is_empty());
        Ok(fields.ok_or_else(|| self.malformed())?.map(u64::from_ne_bytes))
    }

    /// Maps a memory region.
    fn region(&self, fields: [u64; 4], file: &PeerFd) -> Result<Region, ProtocolError> {
        let [guest, len, user, offset] = fields;
        let ends = [guest, user, offset].map(|start| start.checked_add(len));
        if len == 0 || ends.contains(&None) {
            return Err(self.malformed());
        }
        Ok(Region::map(file, offset, (guest, len, user))?)
    }
}

/// Splits a word of eight bytes into two words of four bytes.
fn halves([value]: [u64; 1]) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_ne_bytes();
    [[a, b, c, d], [e, f, g, h]].map(u32::from_ne_bytes)
}

/// Receives all of `into`. Returns false at the end of the stream. Descriptors are accepted only
/// if `fds` is given.
fn fill(
    frontend: &mut Channel,
    into: &mut [u8],
    mut fds: Option<&mut Vec<Descriptor>>,
) -> Result<bool, ProtocolError> {
    let mut done = 0;
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match frontend.receive(rest) {
            Ok((0, _)) | Err(Errno::CONNRESET) => return Ok(false),
            Ok((received, came)) => {
                done += received;
                match &mut fds {
                    Some(fds) => fds.extend(came),
                    None if came.is_empty() => {}
                    None => return Err(ProtocolError::Descriptors),
                }
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(true)
}

/// Checks the descriptors of a request.
fn allowed(request: u32, fds: Vec<Descriptor>) -> Result<Vec<PeerFd>, ProtocolError> {
    if fds.len() > MAX_FDS {
        return Err(ProtocolError::Descriptors);
    }
    // A descriptor of REM_MEM_REG is to be ignored (vhost-user, REM_MEM_REG).
    if request == request::REM_MEM_REG {
        return Ok(Vec::new());
    }
    let fds = fds.into_iter().map(|fd| match (request, fd) {
        (
            request::SET_MEM_TABLE | request::ADD_MEM_REG | request::SET_INFLIGHT_FD,
            Descriptor::Memory(file),
        ) => Ok(file),
        (
            request::SET_VRING_KICK | request::SET_VRING_CALL | request::SET_VRING_ERR,
            Descriptor::Event(fd),
        ) => Ok(fd),
        _ => Err(ProtocolError::Descriptor(request)),
    });
    fds.collect()
}

fn send(to: &UnixStream, request: u32, reply: &Reply) -> Result<(), Errno> {
    let header = [request, VERSION | REPLY, reply.payload.len() as u32];
    let bytes = [&header.map(u32::to_ne_bytes).concat()[..], &reply.payload].concat();
    let fds: Vec<_> = reply.fd.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::TOOMANYREFS);
    }
    let mut sent = 0;
    while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
        match sendmsg(to, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL) {
            Ok(more) => {
                sent += more;
                // The kernel has sent the descriptor with the first bytes, so it must not be sent
                // again.
                control.clear();
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
