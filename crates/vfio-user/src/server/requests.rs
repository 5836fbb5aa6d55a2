//! From a message to a call of the device, and from its answer to the reply.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shadowbell_state::{Descriptors, StateError};

use tracing::debug;
use zerocopy::{FromBytes, IntoBytes};

use super::inbox::{self, Inbox, PortId};
use super::limits::{Limits, MAX_MSG_FDS};
use super::migrating::{Asked, Migrating, Progress};
use super::saved::{Agreed, SavedLink};
use crate::Errno;
use crate::capabilities::{Capabilities, MigrationCapability};
use crate::codec::{MESSAGE_OVERHEAD, Message, SendQueue};
use crate::descriptor::Descriptor;
use crate::device::{
    Device, DmaMap, DmaUnmap, Done, IoFds, IrqAction, IrqData, Later, Peer, RegionInfo, SetIrqs,
};
use crate::exchange::Exchange;
use crate::migration::{LoggingReport, MigrationState};
use crate::wire::{self, Header, command, split, wire_size};

/// Regions beyond those that a device has, about which a client may ask in vain without being
/// refused. SPDK's client gives up if any of ten cannot be described.
const ASKABLE_REGIONS: u32 = 16;

/// The most interrupts of a kind that a PCI function has.
const MAX_VECTORS: usize = 2048;

/// What a request needs to know of its surroundings.
pub(super) struct Context<'a> {
    pub(super) inbox: &'a Arc<Inbox>,
    pub(super) port: PortId,
    pub(super) limits: &'a Limits,
    /// Counts the [`Done`]s of this port, so that one that comes late is known as such.
    pub(super) sequence: &'a mut u64,
    /// When others are to have their turn.
    pub(super) slice: Slice,
    /// What a client does is recorded, in case that this process dies.
    pub(super) is_recorded: bool,
    /// Answers those that are recorded.
    pub(super) exchange: Option<&'a mut Exchange>,
}

/// How long the requests of one client are handled before the others get their turn. (It is
/// looked at between two requests, or two of those writes that come as one.)
const SLICE: Duration = Duration::from_micros(100);

/// A client's turn.
pub(super) struct Slice(Instant);

impl Slice {
    pub(super) fn begin() -> Self {
        Self(Instant::now() + SLICE)
    }

    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }
}

impl Context<'_> {
    /// A handle, and the number under which its completion arrives.
    pub(super) fn done(&mut self) -> (u64, Done) {
        *self.sequence += 1;
        (*self.sequence, inbox::done(self.inbox, self.port, *self.sequence))
    }
}

/// A request whose answer depends on a [`Done`].
struct Waiting {
    sequence: u64,
    header: Header,
    then: Then,
}

/// What to do when the [`Done`] has come, and it was good.
enum Then {
    /// Repeat the request.
    Unmapped(wire::DmaUnmap),
    /// Reply to a write.
    Written(wire::RegionAccess),
    /// Go on with what is left.
    Next(Rest),
    /// The device was reset: it runs, whatever it did before.
    Reset,
}

/// The protocol's side of a connection: what has been agreed, what is to be sent, what is awaited.
#[derive(Default)]
pub(super) struct Link {
    pub(super) out: SendQueue,
    agreed: Option<Agreed>,
    waiting: Option<Waiting>,
    /// Writes that came as one, of which some are left for the next turn, or the like.
    unfinished: Option<Unfinished>,
    migrating: Migrating,
    /// Something has happened that a successor has to know.
    changed: bool,
}

/// A request that is carried out in parts.
struct Unfinished {
    header: Header,
    rest: Rest,
}

/// What is left of it.
enum Rest {
    /// These writes, of so many.
    Writes { left: std::vec::IntoIter<wire::MultiEntry>, count: u64 },
    /// The device is on its way to another state.
    State { to: MigrationState, flags: u32 },
    /// To send this.
    Reply(Vec<u8>),
    /// The log is known, and to be read.
    Log { report: LoggingReport, flags: u32 },
}

/// The connection cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    #[error("its first message was {} and not VERSION", command::name(*.0))]
    NotVersion(u16),
    #[error("its VERSION could not be agreed to: {0}")]
    Disagreed(Errno),
    #[error("it sent a reply that nobody asked for")]
    UnexpectedReply,
}

impl Link {
    /// Version negotiation is over, and the device knows of the client.
    pub(super) fn is_agreed(&self) -> bool {
        self.agreed.is_some()
    }

    /// The number of the [`Done`] that has to come before anything else happens.
    pub(super) fn awaits(&self) -> Option<u64> {
        self.waiting.as_ref().map(|waiting| waiting.sequence)
    }

    /// Nothing is to be sent or awaited, and what comes are requests.
    pub(super) fn is_idle(&self) -> bool {
        let waits = self.waiting.is_some() || self.unfinished.is_some();
        self.agreed.is_some() && !waits && self.out.is_empty()
    }

    /// Whether something has happened that a successor has to know, since this was last asked.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// No request is half carried out.
    pub(super) fn is_at_rest(&self) -> bool {
        self.waiting.is_none() && self.unfinished.is_none()
    }

    /// What was agreed and what is to be sent, of a link [at rest](Self::is_at_rest).
    pub(super) fn save(&self, fds: &mut Descriptors) -> io::Result<SavedLink> {
        Ok(SavedLink { out: self.out.save(fds)?, agreed: self.agreed })
    }

    /// The other side of [`save`](Self::save).
    pub(super) fn restore(saved: SavedLink, fds: &mut Descriptors) -> Result<Self, StateError> {
        let SavedLink { out, agreed } = saved;
        Ok(Self { out: SendQueue::restore(out, fds)?, agreed, ..Self::default() })
    }

    /// The most bytes in one data transfer, once that is agreed.
    pub(super) fn max_xfer(&self) -> Option<u32> {
        self.agreed.map(|agreed| agreed.max_xfer)
    }

    /// A request was carried out in part only, so that others get their turn.
    pub(super) fn is_unfinished(&self) -> bool {
        self.unfinished.is_some()
    }

    /// Goes on with what was carried out in part only.
    pub(super) fn go_on(&mut self, device: &mut dyn Device, context: &mut Context<'_>) {
        let Some(Unfinished { header, rest }) = self.unfinished.take() else { return };
        let outcome = match (self.agreed, rest) {
            (Some(agreed), Rest::Writes { left, count }) => {
                self.write_each(agreed, &header, left, count, device, context)
            }
            (Some(_), Rest::State { to, flags }) => {
                self.change_state(&header, to, flags, device, context)
            }
            (Some(_), Rest::Log { report, flags }) => Migrating::report(&report, flags, device)
                .map(|reply| self.out.put_reply(&header, &[&reply])),
            (Some(_), Rest::Reply(reply)) => {
                self.out.put_reply(&header, &[&reply]);
                Ok(())
            }
            (None, _) => Err(Errno::INVAL),
        };
        if let Err(errno) = outcome {
            self.refuse(&header, errno);
        }
    }

    /// Handles one message. Afterwards there may be something to send, or to wait for.
    pub(super) fn handle(
        &mut self,
        message: Message<'_>,
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<(), Violation> {
        let Message { header, payload, fds } = message;
        if header.is_reply() {
            return Err(Violation::UnexpectedReply);
        }
        let Some(agreed) = self.agreed else {
            let outcome = if header.command == command::VERSION {
                self.version(&header, payload, device, context).map_err(Violation::Disagreed)
            } else {
                Err(Violation::NotVersion(header.command))
            };
            if let Err(violation) = outcome {
                self.out.put_error(&header, Errno::INVAL);
                return Err(violation);
            }
            return Ok(());
        };
        let outcome = if fds.len() > MAX_MSG_FDS as usize {
            Err(Errno::INVAL)
        } else {
            self.dispatch(agreed, &header, payload, fds, device, context)
        };
        if let Err(errno) = outcome {
            self.refuse(&header, errno);
        }
        Ok(())
    }

    /// Handles a message that is a write which `write` takes; false if it is not, and nothing is
    /// done.
    pub(super) fn handle_write(
        &mut self,
        header: &Header,
        payload: &[u8],
        write: &mut dyn FnMut(u32, u64, &[u8]) -> bool,
    ) -> bool {
        let is_write = !header.is_reply()
            && header.command == command::REGION_WRITE
            && self.migrating.is_running();
        let access = split::<wire::RegionAccess>(payload).ok().filter(|_| is_write);
        let (Some(agreed), Some((access, rest))) = (self.agreed, access) else { return false };
        let data = agreed.check(&access).ok().and_then(|len| rest.get(..len));
        let taken = data.is_some_and(|data| write(access.region, access.offset, data));
        if taken {
            self.out.put_reply(header, &[access.as_bytes()]);
        }
        taken
    }

    /// The [`Done`] that was awaited has come.
    pub(super) fn completed(&mut self, outcome: Result<(), Errno>) {
        let Some(Waiting { header, then, .. }) = self.waiting.take() else { return };
        match (outcome, then) {
            (Err(errno), Then::Next(Rest::State { to, .. })) => {
                self.migrating.failed(to);
                self.refuse(&header, errno);
            }
            (Err(errno), _) => self.refuse(&header, errno),
            (Ok(()), Then::Reset) => {
                self.migrating.reset();
                self.out.put_reply(&header, &[]);
            }
            (Ok(()), Then::Unmapped(unmap)) => self.out.put_reply(&header, &[unmap.as_bytes()]),
            (Ok(()), Then::Written(access)) => self.out.put_reply(&header, &[access.as_bytes()]),
            (Ok(()), Then::Next(rest)) => {
                if let Rest::State { to, .. } = &rest {
                    self.migrating.stepped(*to);
                }
                self.unfinished = Some(Unfinished { header, rest });
            }
        }
    }

    fn refuse(&mut self, header: &Header, errno: Errno) {
        debug!(
            command = command::name(header.command),
            number = header.command,
            posted = header.no_reply(),
            "request refused: {errno}"
        );
        self.out.put_error(header, errno);
    }

    fn version(
        &mut self,
        header: &Header,
        payload: &[u8],
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let (theirs, data) = split::<wire::Version>(payload)?;
        if data.len() > MESSAGE_OVERHEAD {
            debug!("version data of {} bytes", data.len());
            return Err(Errno::INVAL);
        }
        if theirs.major != wire::VERSION.0 {
            debug!(theirs.major, theirs.minor, "unknown protocol version");
            return Err(Errno::INVAL);
        }
        let proposed = Capabilities::from_version_data(data).map_err(|error| {
            debug!("version data: {error}");
            Errno::INVAL
        })?;
        let ours = Capabilities {
            max_msg_fds: MAX_MSG_FDS,
            max_data_xfer_size: context.limits.max_data_xfer_size.into(),
            max_dma_maps: device.max_dma_maps(),
            // Only what was proposed may be agreed to. A message of several writes of one doorbell
            // can not be carried out twice, as may become necessary.
            write_multiple: proposed.write_multiple && !context.is_recorded,
            migration: proposed
                .migration
                .filter(|_| device.migration().is_some())
                .map(|_| MigrationCapability::of_server(context.limits.max_data_xfer_size.into())),
        };
        let version =
            wire::Version { major: theirs.major, minor: theirs.minor.min(wire::VERSION.1) };
        self.out.put_reply(header, &[version.as_bytes(), &ours.to_version_data()]);
        let info = device.info();
        let max_fds = proposed.max_msg_fds.min(MAX_MSG_FDS);
        self.changed = true;
        self.agreed = Some(Agreed { max_xfer: context.limits.max_data_xfer_size, max_fds, info });
        device.connected(&Peer {
            max_msg_fds: proposed.max_msg_fds,
            max_data_xfer_size: proposed.max_data_xfer_size,
        });
        Ok(())
    }

    fn dispatch(
        &mut self,
        agreed: Agreed,
        header: &Header,
        payload: &[u8],
        fds: Vec<Descriptor>,
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        self.changed |= changes(header.command, payload);
        match header.command {
            // The two that a busy guest sends.
            command::REGION_WRITE => self.write(agreed, header, payload, device, context),
            command::REGION_READ => self.read(agreed, header, payload, device),
            command::REGION_WRITE_MULTI => {
                let (multi, rest) = split::<wire::WriteMulti>(payload)?;
                let count = usize::try_from(multi.count).map_err(|_| Errno::INVAL)?;
                let len = count.checked_mul(size_of::<wire::MultiEntry>()).ok_or(Errno::INVAL)?;
                let entries = rest.get(..len).ok_or(Errno::INVAL)?;
                let entries: Vec<_> = entries
                    .chunks_exact(size_of::<wire::MultiEntry>())
                    .filter_map(|entry| wire::MultiEntry::read_from_bytes(entry).ok())
                    .collect();
                let entries = entries.into_iter();
                self.write_each(agreed, header, entries, multi.count, device, context)
            }
            command::DMA_MAP => {
                device.dma_map(dma_map(payload, fds)?)?;
                self.out.put_reply(header, &[]);
                Ok(())
            }
            command::DMA_UNMAP => {
                // A descriptor may come along; it is of no use, and closed.
                let (unmap, _) = split::<wire::DmaUnmap>(payload)?;
                let range = dma_unmap(&unmap)?;
                let (sequence, done) = context.done();
                self.wait(sequence, header, Then::Unmapped(unmap));
                device.dma_unmap(range, done);
                Ok(())
            }
            command::DEVICE_RESET => {
                if !agreed.info.resettable {
                    return Err(Errno::OPNOTSUPP);
                }
                let (sequence, done) = context.done();
                self.wait(sequence, header, Then::Reset);
                device.reset(done);
                Ok(())
            }
            command::DEVICE_GET_INFO => {
                let info = wire::DeviceInfo {
                    argsz: wire_size::<wire::DeviceInfo>(),
                    flags: wire::device_flags::PCI
                        | flag(agreed.info.resettable, wire::device_flags::RESET),
                    num_regions: agreed.info.regions,
                    num_irqs: agreed.info.irqs,
                };
                self.out.put_reply(header, &[info.as_bytes()]);
                Ok(())
            }
            command::DEVICE_GET_REGION_INFO => self.region_info(agreed, header, payload, device),
            command::DEVICE_GET_REGION_IO_FDS => self.io_fds(agreed, header, payload, device),
            command::DEVICE_GET_IRQ_INFO => {
                let (asked, _) = split::<wire::IrqInfo>(payload)?;
                if asked.index >= agreed.info.irqs {
                    return Err(Errno::INVAL);
                }
                let irq = device.irq_info(asked.index)?;
                let info = wire::IrqInfo {
                    argsz: wire_size::<wire::IrqInfo>(),
                    flags: flag(irq.eventfd, wire::irq_info_flags::EVENTFD)
                        | flag(irq.maskable, wire::irq_info_flags::MASKABLE)
                        | flag(irq.automasked, wire::irq_info_flags::AUTOMASKED)
                        | flag(irq.noresize, wire::irq_info_flags::NORESIZE),
                    index: asked.index,
                    count: irq.count,
                };
                self.out.put_reply(header, &[info.as_bytes()]);
                Ok(())
            }
            command::DEVICE_SET_IRQS => {
                device.set_irqs(set_irqs(agreed, payload, fds)?)?;
                self.out.put_reply(header, &[]);
                Ok(())
            }
            command::DEVICE_FEATURE => {
                let max_xfer = agreed.max_xfer;
                match self.migrating.feature(payload, max_xfer, device)? {
                    Asked::Reply(reply) => self.out.put_reply(header, &[&reply]),
                    Asked::State { to, flags } => {
                        return self.change_state(header, to, flags, device, context);
                    }
                    Asked::Logs(reply) => {
                        self.settle_log(header, Rest::Reply(reply), device, context)?;
                    }
                    Asked::Log { report, flags } => {
                        self.settle_log(header, Rest::Log { report, flags }, device, context)?;
                    }
                }
                Ok(())
            }
            command::MIG_DATA_READ => {
                device.migration().ok_or(Errno::OPNOTSUPP)?;
                let reply = self.migrating.read(payload, agreed.max_xfer)?;
                self.out.put_reply(header, &[&reply]);
                Ok(())
            }
            command::MIG_DATA_WRITE => {
                device.migration().ok_or(Errno::OPNOTSUPP)?;
                self.migrating.write(payload, agreed.max_xfer)?;
                self.out.put_reply(header, &[]);
                Ok(())
            }
            // There is one version for one connection.
            command::VERSION => Err(Errno::INVAL),
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    /// Has the device go to another state, as far as it takes no time.
    fn change_state(
        &mut self,
        header: &Header,
        to: MigrationState,
        flags: u32,
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let mut sequence = 0;
        let progress = self.migrating.go_to(to, device, || {
            let (number, done) = context.done();
            sequence = number;
            done
        });
        match progress? {
            Progress::Arrived => {
                self.out.put_reply(header, &[&Migrating::state_reply(to, flags)]);
            }
            Progress::Waits => {
                self.wait(sequence, header, Then::Next(Rest::State { to, flags }));
            }
        }
        Ok(())
    }

    /// Goes on with `rest` when all is in the log that was written until now.
    fn settle_log(
        &mut self,
        header: &Header,
        rest: Rest,
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let device = device.migration().ok_or(Errno::NOTTY)?;
        let (sequence, done) = context.done();
        self.wait(sequence, header, Then::Next(rest));
        device.settle_log(done);
        Ok(())
    }

    fn wait(&mut self, sequence: u64, header: &Header, then: Then) {
        self.waiting = Some(Waiting { sequence, header: *header, then });
    }

    fn read(
        &mut self,
        agreed: Agreed,
        header: &Header,
        payload: &[u8],
        device: &mut dyn Device,
    ) -> Result<(), Errno> {
        let (access, _) = split::<wire::RegionAccess>(payload)?;
        let len = agreed.check(&access)?;
        self.out.put_reply_filled(header, access.as_bytes(), len, |data| {
            if data.is_empty() {
                return Ok(());
            }
            device.region_read(access.region, access.offset, data)
        });
        Ok(())
    }

    fn write(
        &mut self,
        agreed: Agreed,
        header: &Header,
        payload: &[u8],
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let (access, rest) = split::<wire::RegionAccess>(payload)?;
        let len = agreed.check(&access)?;
        let data = rest.get(..len).ok_or(Errno::INVAL)?;
        self.check_write(&access)?;
        match region_write(&access, data, device, context)? {
            None => self.out.put_reply(header, &[access.as_bytes()]),
            Some(sequence) => self.wait(sequence, header, Then::Written(access)),
        }
        Ok(())
    }

    fn write_each(
        &mut self,
        agreed: Agreed,
        header: &Header,
        mut entries: std::vec::IntoIter<wire::MultiEntry>,
        count: u64,
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        while entries.len() != 0 {
            if context.slice.is_over() {
                let rest = Rest::Writes { left: entries, count };
                self.unfinished = Some(Unfinished { header: *header, rest });
                return Ok(());
            }
            let Some(entry) = entries.next() else { break };
            let wire::MultiEntry { offset, region, count: len, data } = entry;
            let access = wire::RegionAccess { offset, region, count: len };
            let len = agreed.check(&access)?;
            let data = data.get(..len).ok_or(Errno::INVAL)?;
            self.check_write(&access)?;
            if let Some(sequence) = region_write(&access, data, device, context)? {
                let rest = Rest::Writes { left: entries, count };
                self.wait(sequence, header, Then::Next(rest));
                return Ok(());
            }
        }
        self.out.put_reply(header, &[wire::WriteMulti { count }.as_bytes()]);
        Ok(())
    }

    /// The registers of a device that does not run stay as they are: they are in the stream.
    fn check_write(&self, access: &wire::RegionAccess) -> Result<(), Errno> {
        let is_register = access.region == crate::device::region::BAR0;
        if is_register && !self.migrating.is_running() { Err(Errno::BUSY) } else { Ok(()) }
    }

    fn region_info(
        &mut self,
        agreed: Agreed,
        header: &Header,
        payload: &[u8],
        device: &mut dyn Device,
    ) -> Result<(), Errno> {
        let (asked, _) = split::<wire::RegionInfo>(payload)?;
        let fixed = wire_size::<wire::RegionInfo>();
        if asked.argsz < fixed {
            return Err(Errno::INVAL);
        }
        let RegionInfo { size, readable, writable, mapping } = if asked.index < agreed.info.regions
        {
            device.region_info(asked.index)?
        } else if asked.index < ASKABLE_REGIONS {
            RegionInfo::default()
        } else {
            return Err(Errno::INVAL);
        };
        let mut info = wire::RegionInfo {
            argsz: fixed,
            flags: flag(readable, wire::region_flags::READ)
                | flag(writable, wire::region_flags::WRITE),
            index: asked.index,
            cap_offset: 0,
            size,
            offset: 0,
        };
        let Some(mapping) = mapping else {
            self.out.put_reply(header, &[info.as_bytes()]);
            return Ok(());
        };
        info.flags |= wire::region_flags::MMAP;
        info.offset = mapping.offset;
        let mut capabilities = Vec::new();
        if !mapping.areas.is_empty() {
            let count = u32::try_from(mapping.areas.len()).map_err(|_| Errno::OVERFLOW)?;
            let id = wire::CAPABILITY_SPARSE_MMAP;
            let start = wire::CapabilityHeader { id, version: 1, next: 0 };
            capabilities.extend_from_slice(start.as_bytes());
            let sparse = wire::SparseMmap { nr_areas: count, reserved: 0 };
            capabilities.extend_from_slice(sparse.as_bytes());
            for area in &mapping.areas {
                let area = wire::SparseArea { offset: area.offset, size: area.len };
                capabilities.extend_from_slice(area.as_bytes());
            }
            info.argsz += u32::try_from(capabilities.len()).map_err(|_| Errno::OVERFLOW)?;
            // Stated even if they do not fit and are left out: QEMU takes a capability flag with
            // an offset of 0 for an error, rather than for an invitation to ask again.
            info.flags |= wire::region_flags::CAPS;
            info.cap_offset = fixed;
        }
        if asked.argsz < info.argsz {
            capabilities.clear();
        }
        self.out.put_reply_with_fds(header, &[info.as_bytes(), &capabilities], [mapping.fd]);
        Ok(())
    }

    fn io_fds(
        &mut self,
        agreed: Agreed,
        header: &Header,
        payload: &[u8],
        device: &mut dyn Device,
    ) -> Result<(), Errno> {
        let (asked, _) = split::<wire::RegionIoFds>(payload)?;
        if asked.index >= agreed.info.regions || asked.flags != 0 || asked.count != 0 {
            return Err(Errno::INVAL);
        }
        let IoFds { mut events, areas } = device.region_io_fds(asked.index)?;
        // What does not travel with one message is left out: a write does as well.
        events.truncate(usize::try_from(agreed.max_fds).unwrap_or(usize::MAX));
        let mut list = Vec::new();
        let mut count = 0;
        for (area, event) in areas.into_iter().filter(|(_, event)| *event < events.len()) {
            let entry = wire::IoFd {
                offset: area.offset,
                size: area.len,
                fd_index: u32::try_from(event).map_err(|_| Errno::OVERFLOW)?,
                kind: wire::IO_FD_EVENT,
                flags: 0,
                padding: 0,
                datamatch: 0,
            };
            list.extend_from_slice(entry.as_bytes());
            count += 1;
        }
        if count == 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let size = size_of::<wire::RegionIoFds>() + list.len();
        let argsz = u32::try_from(size).map_err(|_| Errno::OVERFLOW)?;
        let info = wire::RegionIoFds { argsz, flags: 0, index: asked.index, count };
        if asked.argsz < argsz {
            // The client learns how much room it takes, and asks again.
            self.out.put_reply(header, &[info.as_bytes()]);
        } else {
            self.out.put_reply_with_fds(header, &[info.as_bytes(), &list], events);
        }
        Ok(())
    }
}

impl Agreed {
    /// Checks what does not take the device to check, and returns the length.
    fn check(&self, access: &wire::RegionAccess) -> Result<usize, Errno> {
        if access.region >= self.info.regions
            || access.count > self.max_xfer
            || access.offset.checked_add(access.count.into()).is_none()
        {
            return Err(Errno::INVAL);
        }
        usize::try_from(access.count).map_err(|_| Errno::INVAL)
    }
}

/// Whether a request changes what [`Device::save`] and the connection's own state say. What the
/// device keeps by itself, which is behind its first region, does not count.
fn changes(number: u16, payload: &[u8]) -> bool {
    match number {
        command::REGION_WRITE => split::<wire::RegionAccess>(payload)
            .is_ok_and(|(access, _)| access.region != crate::device::region::BAR0),
        // A device that does not run is not one that a successor has run.
        command::DEVICE_FEATURE => Migrating::changes(payload),
        command::REGION_WRITE_MULTI
        | command::DMA_MAP
        | command::DMA_UNMAP
        | command::DEVICE_RESET
        | command::DEVICE_SET_IRQS => true,
        _ => false,
    }
}

/// The number of the [`Done`] that the write waits for, if it does.
fn region_write(
    access: &wire::RegionAccess,
    data: &[u8],
    device: &mut dyn Device,
    context: &mut Context<'_>,
) -> Result<Option<u64>, Errno> {
    if data.is_empty() {
        return Ok(None);
    }
    let mut taken = None;
    let mut make = || {
        if taken.is_some() {
            return None;
        }
        let (sequence, done) = context.done();
        taken = Some(sequence);
        Some(done)
    };
    device.region_write(access.region, access.offset, data, &mut Later::new(&mut make))?;
    Ok(taken)
}

fn dma_map(payload: &[u8], mut fds: Vec<Descriptor>) -> Result<DmaMap, Errno> {
    let (map, _) = split::<wire::DmaMap>(payload)?;
    if map.size == 0
        || map.address.checked_add(map.size).is_none()
        || map.offset.checked_add(map.size).is_none()
        || fds.len() > 1
    {
        return Err(Errno::INVAL);
    }
    let fd = match fds.pop() {
        None => None,
        Some(Descriptor::Memory(file)) => Some(file),
        Some(_) => return Err(Errno::INVAL),
    };
    Ok(DmaMap {
        iova: map.address,
        len: map.size,
        readable: map.flags & wire::dma_map_flags::READ != 0,
        writable: map.flags & wire::dma_map_flags::WRITE != 0,
        fd,
        fd_offset: map.offset,
    })
}

fn dma_unmap(unmap: &wire::DmaUnmap) -> Result<DmaUnmap, Errno> {
    if unmap.flags & wire::dma_unmap_flags::GET_DIRTY_BITMAP != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    if unmap.flags & wire::dma_unmap_flags::ALL != 0 {
        return match (unmap.address, unmap.size) {
            (0, 0) => Ok(DmaUnmap::All),
            _ => Err(Errno::INVAL),
        };
    }
    if unmap.size == 0 || unmap.address.checked_add(unmap.size).is_none() {
        return Err(Errno::INVAL);
    }
    Ok(DmaUnmap::Range { iova: unmap.address, len: unmap.size })
}

fn set_irqs(agreed: Agreed, payload: &[u8], fds: Vec<Descriptor>) -> Result<SetIrqs, Errno> {
    use wire::set_irqs_flags as flags;
    let (set, rest) = split::<wire::SetIrqs>(payload)?;
    if set.index >= agreed.info.irqs || set.start.checked_add(set.count).is_none() {
        return Err(Errno::INVAL);
    }
    let action = match set.flags & flags::ACTION_BITS {
        flags::ACTION_MASK => IrqAction::Mask,
        flags::ACTION_UNMASK => IrqAction::Unmask,
        flags::ACTION_TRIGGER => IrqAction::Trigger,
        _ => return Err(Errno::INVAL),
    };
    let count = usize::try_from(set.count).map_err(|_| Errno::INVAL)?;
    let data = match set.flags & flags::DATA_MASK {
        flags::DATA_NONE => IrqData::None,
        // No function has more vectors.
        flags::DATA_BOOL if count <= MAX_VECTORS => {
            let bytes = rest.get(..count).ok_or(Errno::INVAL)?;
            IrqData::Bools(bytes.iter().map(|byte| *byte != 0).collect())
        }
        flags::DATA_EVENTFD if fds.is_empty() || fds.len() == count => {
            let events = fds.into_iter().map(|fd| match fd {
                Descriptor::Event(fd) => Ok(fd),
                _ => Err(Errno::INVAL),
            });
            IrqData::Eventfds(events.collect::<Result<_, _>>()?)
        }
        _ => return Err(Errno::INVAL),
    };
    Ok(SetIrqs { index: set.index, start: set.start, count: set.count, action, data })
}

fn flag(set: bool, bit: u32) -> u32 {
    if set { bit } else { 0 }
}
