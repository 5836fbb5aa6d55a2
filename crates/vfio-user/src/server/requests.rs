//! Handlers of received messages: they call the device and queue the reply.

use std::io;

use shadowbell_state::{Bytes, CommandStep, Descriptors, StateError, abort_command};

use tracing::debug;
use zerocopy::{FromBytes, IntoBytes};

use super::decode::{dma_map, dma_unmap, flag, set_irqs};
use super::limits::MAX_MSG_FDS;
use super::migrating::{FeatureOutcome, Migrating, Progress};
use super::saved::{Agreed, SavedLink};
use super::turn::Context;
use crate::Errno;
use crate::codec::{Message, SendQueue};
use crate::descriptor::Descriptor;
use crate::device::{Deferral, Device};
use crate::migration::{LoggingReport, MigrationState};
use crate::wire::{self, Header, command, split, split_sized, wire_size};

/// Request whose reply waits for a [`Completer`].
pub(super) struct Waiting {
    sequence: u64,
    header: Header,
    next_step: NextStep,
}

/// Next step of a request after its [`Completer`] has succeeded.
pub(super) enum NextStep {
    /// Send the reply to an unmap: it repeats the payload of the request.
    Unmapped(wire::DmaUnmap),
    /// Send the reply to a write.
    Written(wire::RegionAccess),
    /// Continue with the rest of the request.
    Next(Remaining),
    /// Set the migration state to RUNNING, and send the reply to a reset.
    Reset,
}

/// Maximum number of unmaps whose reply waits while later messages are handled.
const MAX_UNMAPS: usize = 64;

/// Unmap whose reply waits for accesses in flight, while later messages are handled.
struct PostponedUnmap {
    sequence: u64,
    header: Header,
    unmap: wire::DmaUnmap,
    outcome: Option<Result<(), Errno>>,
}

/// Protocol state of a connection: negotiated limits, unsent replies, outstanding requests.
#[derive(Default)]
pub(super) struct Link {
    pub(super) out: SendQueue,
    pub(super) agreed: Option<Agreed>,
    pub(super) waiting: Option<Waiting>,
    /// Unmaps whose reply is outstanding, while later messages were already handled.
    unmaps: Vec<PostponedUnmap>,
    /// Request that is partly executed. The reactor continues it when the connection has its next
    /// time slice.
    pub(super) unfinished: Option<Unfinished>,
    pub(super) migrating: Migrating,
    /// True if a message has changed state that belongs in a checkpoint.
    pub(super) changed: bool,
}

/// Request that is executed in parts.
pub(super) struct Unfinished {
    header: Header,
    remaining: Remaining,
}

/// Remaining work of a request.
pub(super) enum Remaining {
    /// Writes of a REGION_WRITE_MULTI request that are not executed yet, and the number of all its
    /// writes.
    Writes { left: std::vec::IntoIter<wire::MultiEntry>, count: u64 },
    /// Further state transitions until the migration state `to` is reached.
    State { to: MigrationState, flags: u32 },
    /// Payload of the reply, to send when the device's `sync_log` has completed.
    Reply(Vec<u8>),
    /// Report of the dirty page log, to send when the log contains all earlier writes.
    Log { report: LoggingReport, flags: u32 },
}

/// Protocol violation that ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    #[error("its first message was {} and not VERSION", command::name(*.0))]
    NotVersion(u16),
    #[error("its VERSION could not be agreed to: {0}")]
    Disagreed(Errno),
    #[error("it sent an unexpected reply")]
    UnexpectedReply,
}

impl Link {
    /// True if version negotiation is complete, and the device has been notified of the client.
    pub(super) fn is_agreed(&self) -> bool {
        self.agreed.is_some()
    }

    /// Sequence number of the outstanding [`Completer`]. The next request is handled only after
    /// this completer was called, or if the waiting request is [postponed](Self::postpone).
    pub(super) fn awaits(&self) -> Option<u64> {
        self.waiting.as_ref().map(|waiting| waiting.sequence)
    }

    /// True if the waiting request is an unmap. The device has removed the range, and waits only
    /// for the end of accesses in flight. Slow storage can delay that end.
    pub(super) fn is_unmapping(&self) -> bool {
        let next_step = self.waiting.as_ref().map(|waiting| &waiting.next_step);
        matches!(next_step, Some(NextStep::Unmapped(_)))
    }

    /// True if later messages may overtake the waiting request.
    pub(super) fn can_postpone(&self) -> bool {
        self.is_unmapping() && self.has_room()
    }

    /// True if fewer postponed unmaps than the maximum wait for accesses in flight.
    fn has_room(&self) -> bool {
        self.unmaps.iter().filter(|unmap| unmap.outcome.is_none()).count() < MAX_UNMAPS
    }

    /// True if a postponed unmap has ended, and its reply is not queued yet.
    pub(super) fn has_ended_unmaps(&self) -> bool {
        self.unmaps.iter().any(|unmap| unmap.outcome.is_some())
    }

    /// Lets later messages overtake the waiting unmap, if
    /// [`can_postpone`](Self::can_postpone) returns true.
    pub(super) fn postpone(&mut self) {
        if !self.has_room() {
            return;
        }
        if let Some(waiting) = self.waiting.take() {
            let Waiting { sequence, header, next_step } = waiting;
            match next_step {
                NextStep::Unmapped(unmap) => {
                    let outcome = None;
                    self.unmaps.push(PostponedUnmap { sequence, header, unmap, outcome });
                }
                next_step => self.waiting = Some(Waiting { sequence, header, next_step }),
            }
        }
    }

    /// Queues the replies to postponed unmaps that have ended. Returns false if there are none.
    pub(super) fn reply_to_unmaps(&mut self) -> bool {
        let ended = self.unmaps.extract_if(.., |unmap| unmap.outcome.is_some());
        let ended: Vec<_> = ended.collect();
        for PostponedUnmap { header, unmap, outcome, .. } in &ended {
            match outcome {
                Some(Err(errno)) => self.refuse(header, *errno),
                _ => self.out.put_reply(header, &[unmap.as_bytes()]),
            }
        }
        !ended.is_empty()
    }

    /// True if the version is negotiated, all replies are sent, and no request is outstanding or
    /// partly executed.
    pub(super) fn is_idle(&self) -> bool {
        self.agreed.is_some() && self.is_quiesced() && self.out.is_empty()
    }

    /// Returns whether state for the checkpoint has changed, and clears the flag.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// True if no request is outstanding or partly executed. Postponed unmaps count as outstanding.
    pub(super) fn is_quiesced(&self) -> bool {
        self.is_between_requests() && self.unmaps.is_empty()
    }

    /// True if no request is outstanding or partly executed. Postponed unmaps do not count.
    pub(super) fn is_between_requests(&self) -> bool {
        self.waiting.is_none() && self.unfinished.is_none()
    }

    /// Serializes a link. No request may be outstanding or partly executed, except for postponed
    /// unmaps.
    pub(super) fn save(&self, fds: &mut Descriptors) -> io::Result<SavedLink> {
        let unmaps = self.unmaps.iter().map(|PostponedUnmap { header, unmap, .. }| {
            (Bytes(header.as_bytes().to_vec()), Bytes(unmap.as_bytes().to_vec()))
        });
        Ok(SavedLink { out: self.out.save(fds)?, agreed: self.agreed, unmaps: unmaps.collect() })
    }

    /// Restores a link of [`save`](Self::save). All postponed unmaps count as ended: they waited
    /// for accesses of the previous process, and this process has ended.
    pub(super) fn restore(saved: SavedLink, fds: &mut Descriptors) -> Result<Self, StateError> {
        let SavedLink { out, agreed, unmaps } = saved;
        let unmaps = unmaps.iter().filter_map(|(header, unmap)| {
            let header = Header::read_from_bytes(&header.0).ok()?;
            let unmap = wire::DmaUnmap::read_from_bytes(&unmap.0).ok()?;
            Some(PostponedUnmap { sequence: 0, header, unmap, outcome: Some(Ok(())) })
        });
        let (out, unmaps) = (SendQueue::restore(out, fds)?, unmaps.collect());
        Ok(Self { out, agreed, unmaps, ..Self::default() })
    }

    /// Negotiated maximum of bytes per data transfer.
    pub(super) fn max_xfer(&self) -> Option<u32> {
        self.agreed.map(|agreed| agreed.max_xfer)
    }

    /// True if a request is partly executed. The reactor continues it in the next time slice of
    /// this connection, so that other clients do not wait.
    pub(super) fn is_unfinished(&self) -> bool {
        self.unfinished.is_some()
    }

    /// Continues the request that is partly executed.
    pub(super) fn resume(&mut self, device: &mut dyn Device, context: &mut Context<'_>) {
        let Some(Unfinished { header, remaining }) = self.unfinished.take() else { return };
        let outcome = match (self.agreed, remaining) {
            (Some(agreed), Remaining::Writes { left, count }) => {
                self.write_each(agreed, &header, left, count, device, context)
            }
            (Some(_), Remaining::State { to, flags }) => {
                self.change_state(&header, to, flags, device, context)
            }
            (Some(_), Remaining::Log { report, flags }) => {
                Migrating::report(&report, flags, device)
                    .map(|reply| self.out.put_reply(&header, &[&reply]))
            }
            (Some(_), Remaining::Reply(reply)) => {
                self.out.put_reply(&header, &[&reply]);
                Ok(())
            }
            (None, _) => Err(Errno::INVAL),
        };
        if let Err(errno) = outcome {
            self.refuse(&header, errno);
        }
    }

    /// Handles one message. It may queue replies, or create a [`Completer`] whose completion must
    /// be awaited.
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

    /// Handles a message if it is a write that `write` accepts. Returns false for other messages,
    /// and changes nothing.
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
        let (Some(agreed), Some((access, remaining))) = (self.agreed, access) else { return false };
        let data = agreed.check(&access).ok().and_then(|len| remaining.get(..len));
        let taken = data.is_some_and(|data| write(access.region, access.offset, data));
        if taken {
            self.out.put_reply(header, &[access.as_bytes()]);
        }
        taken
    }

    /// Handles the completion of the [`Completer`] with number `sequence`. Returns false if no
    /// request waits for it.
    pub(super) fn completed(&mut self, sequence: u64, outcome: Result<(), Errno>) -> bool {
        let is_it =
            |unmap: &&mut PostponedUnmap| unmap.sequence == sequence && unmap.outcome.is_none();
        if let Some(unmap) = self.unmaps.iter_mut().find(is_it) {
            unmap.outcome = Some(outcome);
            return true;
        }
        let waiting = self.waiting.take_if(|waiting| waiting.sequence == sequence);
        let Some(Waiting { header, next_step, .. }) = waiting else { return false };
        match (outcome, next_step) {
            (Err(errno), NextStep::Next(Remaining::State { to, .. })) => {
                self.migrating.failed(to);
                self.refuse(&header, errno);
            }
            (Err(errno), _) => self.refuse(&header, errno),
            (Ok(()), NextStep::Reset) => {
                self.migrating.reset();
                self.out.put_reply(&header, &[]);
            }
            (Ok(()), NextStep::Unmapped(unmap)) => self.out.put_reply(&header, &[unmap.as_bytes()]),
            (Ok(()), NextStep::Written(access)) => {
                self.out.put_reply(&header, &[access.as_bytes()])
            }
            (Ok(()), NextStep::Next(remaining)) => {
                if let Remaining::State { to, .. } = &remaining {
                    self.migrating.stepped(*to);
                }
                self.unfinished = Some(Unfinished { header, remaining });
            }
        }
        true
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

    fn dispatch(
        &mut self,
        agreed: Agreed,
        header: &Header,
        payload: &[u8],
        fds: Vec<Descriptor>,
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        abort_command(CommandStep::Message, u64::from(header.command));
        self.changed |= changes(header.command, payload);
        match header.command {
            // REGION_WRITE and REGION_READ come first, because a busy guest causes them most often.
            command::REGION_WRITE => self.write(agreed, header, payload, device, context),
            command::REGION_READ => self.read(agreed, header, payload, device),
            command::REGION_WRITE_MULTI => {
                let (multi, remaining) = split::<wire::WriteMulti>(payload)?;
                let count = usize::try_from(multi.count).map_err(|_| Errno::INVAL)?;
                let len = count.checked_mul(size_of::<wire::MultiEntry>()).ok_or(Errno::INVAL)?;
                let entries = remaining.get(..len).ok_or(Errno::INVAL)?;
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
                // If the message has a descriptor, the descriptor is ignored and closed.
                let (unmap, _) = split::<wire::DmaUnmap>(payload)?;
                let range = dma_unmap(&unmap)?;
                let (sequence, done) = context.done();
                self.wait(sequence, header, NextStep::Unmapped(unmap));
                device.dma_unmap(range, done);
                Ok(())
            }
            command::DEVICE_RESET => {
                if !agreed.info.resettable {
                    return Err(Errno::OPNOTSUPP);
                }
                let (sequence, done) = context.done();
                self.wait(sequence, header, NextStep::Reset);
                device.reset(done);
                Ok(())
            }
            command::DEVICE_GET_INFO => {
                split_sized::<wire::DeviceInfo>(payload)?;
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
                let (request, _) = split_sized::<wire::IrqInfo>(payload)?;
                if request.index >= agreed.info.irqs {
                    return Err(Errno::INVAL);
                }
                let irq = device.irq_info(request.index)?;
                let info = wire::IrqInfo {
                    argsz: wire_size::<wire::IrqInfo>(),
                    flags: flag(irq.eventfd, wire::irq_info_flags::EVENTFD)
                        | flag(irq.maskable, wire::irq_info_flags::MASKABLE)
                        | flag(irq.automasked, wire::irq_info_flags::AUTOMASKED)
                        | flag(irq.noresize, wire::irq_info_flags::NORESIZE),
                    index: request.index,
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
                    FeatureOutcome::Reply(reply) => self.out.put_reply(header, &[&reply]),
                    FeatureOutcome::State { to, flags } => {
                        return self.change_state(header, to, flags, device, context);
                    }
                    FeatureOutcome::Logs(reply) => {
                        self.sync_log(header, Remaining::Reply(reply), device, context)?;
                    }
                    FeatureOutcome::Log { report, flags } => {
                        self.sync_log(header, Remaining::Log { report, flags }, device, context)?;
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
            // The version is already negotiated, and a connection negotiates it only once.
            command::VERSION => Err(Errno::INVAL),
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    /// Changes the migration state in one or more steps. If a step is asynchronous, the request
    /// continues when the device has completed it.
    fn change_state(
        &mut self,
        header: &Header,
        to: MigrationState,
        flags: u32,
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let mut sequence = 0;
        let progress = self.migrating.step_towards(to, device, || {
            let (number, done) = context.done();
            sequence = number;
            done
        });
        match progress? {
            Progress::Reached => {
                self.out.put_reply(header, &[&Migrating::state_reply(to, flags)]);
            }
            Progress::Waits => {
                self.wait(sequence, header, NextStep::Next(Remaining::State { to, flags }));
            }
        }
        Ok(())
    }

    /// Starts to bring the dirty page log up to date. When it contains all earlier writes, the
    /// request continues with `remaining`.
    fn sync_log(
        &mut self,
        header: &Header,
        remaining: Remaining,
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let device = device.migration().ok_or(Errno::NOTTY)?;
        let (sequence, done) = context.done();
        self.wait(sequence, header, NextStep::Next(remaining));
        device.sync_log(done);
        Ok(())
    }

    fn wait(&mut self, sequence: u64, header: &Header, next_step: NextStep) {
        self.waiting = Some(Waiting { sequence, header: *header, next_step });
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
        let (access, remaining) = split::<wire::RegionAccess>(payload)?;
        let len = agreed.check(&access)?;
        let data = remaining.get(..len).ok_or(Errno::INVAL)?;
        self.check_write(&access)?;
        match region_write(&access, data, device, context)? {
            None => self.out.put_reply(header, &[access.as_bytes()]),
            Some(sequence) => self.wait(sequence, header, NextStep::Written(access)),
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
                let remaining = Remaining::Writes { left: entries, count };
                self.unfinished = Some(Unfinished { header: *header, remaining });
                return Ok(());
            }
            let Some(entry) = entries.next() else { break };
            let wire::MultiEntry { offset, region, count: len, data } = entry;
            let access = wire::RegionAccess { offset, region, count: len };
            let len = agreed.check(&access)?;
            let data = data.get(..len).ok_or(Errno::INVAL)?;
            self.check_write(&access)?;
            if let Some(sequence) = region_write(&access, data, device, context)? {
                let remaining = Remaining::Writes { left: entries, count };
                self.wait(sequence, header, NextStep::Next(remaining));
                return Ok(());
            }
        }
        self.out.put_reply(header, &[wire::WriteMulti { count }.as_bytes()]);
        Ok(())
    }

    /// Refuses writes to the registers of a stopped device, because the migration stream already
    /// contains their values.
    fn check_write(&self, access: &wire::RegionAccess) -> Result<(), Errno> {
        let is_register = access.region == crate::device::region::BAR0;
        if is_register && !self.migrating.is_running() { Err(Errno::BUSY) } else { Ok(()) }
    }
}

impl Agreed {
    /// Checks an access as far as possible without the device. Returns the length.
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

/// True if a request changes state that a checkpoint contains: the state of [`Device::record`] or
/// of the link. Writes to BAR0 (the registers) do not count, because the device stores its own
/// checkpoints of its registers.
fn changes(number: u16, payload: &[u8]) -> bool {
    match number {
        command::REGION_WRITE => split::<wire::RegionAccess>(payload)
            .is_ok_and(|(access, _)| access.region != crate::device::region::BAR0),
        // The checkpoint must contain the new migration state. Otherwise the next process would run
        // a device that the client has stopped.
        command::DEVICE_FEATURE => Migrating::changes(payload),
        command::REGION_WRITE_MULTI
        | command::DMA_MAP
        | command::DMA_UNMAP
        | command::DEVICE_RESET
        | command::DEVICE_SET_IRQS => true,
        _ => false,
    }
}

/// Writes to a region. Returns the number of the [`Completer`] that the device has taken, if any.
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
    device.region_write(access.region, access.offset, data, &mut Deferral::new(&mut make))?;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Commands that never change state that a checkpoint contains.
    const UNCHANGED: [u16; 10] = [
        command::VERSION,
        command::DEVICE_GET_INFO,
        command::DEVICE_GET_REGION_INFO,
        command::DEVICE_GET_REGION_IO_FDS,
        command::DEVICE_GET_IRQ_INFO,
        command::REGION_READ,
        command::DMA_READ,
        command::DMA_WRITE,
        command::MIG_DATA_READ,
        command::MIG_DATA_WRITE,
    ];

    #[test]
    fn every_command_is_known_to_change_the_state_or_not() {
        // It depends on the payload whether REGION_WRITE and DEVICE_FEATURE change the state.
        // DIRTY_PAGES (14) is always refused.
        let others = [command::REGION_WRITE, command::DEVICE_FEATURE, 14];
        for number in (0..64).filter(|number| command::name(*number) != command::name(0)) {
            let is_listed = UNCHANGED.contains(&number) || others.contains(&number);
            assert!(changes(number, &[]) != is_listed, "{}", command::name(number));
        }
    }
}
