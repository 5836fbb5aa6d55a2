//! Descriptors that stand for writes to a region, taken apart and checked.

use std::sync::Arc;

use zerocopy::{FromBytes, IntoBytes};

use super::connection::{Connection, Reply};
use super::error::ClientError;
use crate::descriptor::{Descriptor, PeerFd};
use crate::device::Area;
use crate::wire::{self, command, wire_size};

/// Room for sub-regions at the first asking.
const FIRST_SIZE: u32 = 8192;

/// The most that they may take.
const MAX_SIZE: u32 = 1 << 20;

/// What a server has for writes to a region: eventfds, a signal of which stands for a write to some
/// part of a region whose value does not matter.
#[derive(Debug, Default)]
pub struct ClientIoFds {
    /// The eventfds.
    pub events: Vec<Arc<PeerFd>>,
    /// Parts of the region, and the index of the eventfd of each.
    pub areas: Vec<(Area, usize)>,
}

/// Asks about the region `index`, once more if the answer turns out to be long.
pub(super) fn ask(connection: &mut Connection, index: u32) -> Result<ClientIoFds, ClientError> {
    let mut argsz = FIRST_SIZE;
    loop {
        let ask = wire::RegionIoFds { argsz, flags: 0, index, count: 0 };
        let answer = connection.request(
            command::DEVICE_GET_REGION_IO_FDS,
            &[ask.as_bytes()],
            &[],
            |reply| read(reply, index, argsz),
        )?;
        match answer {
            Answer::Fds(fds) => return Ok(fds),
            Answer::Needs(size) => argsz = size,
        }
    }
}

enum Answer {
    Fds(ClientIoFds),
    /// Nothing yet: the server needs this much room.
    Needs(u32),
}

fn read(reply: &mut Reply<'_>, index: u32, argsz: u32) -> Result<Answer, String> {
    let events = std::mem::take(&mut reply.fds).into_iter().map(|fd| match fd {
        Descriptor::Event(fd) => Ok(Arc::new(fd)),
        _ => Err("a descriptor is no eventfd".to_owned()),
    });
    let events = events.collect::<Result<Vec<Arc<PeerFd>>, _>>()?;
    let (info, list) = reply.split::<wire::RegionIoFds>()?;
    if info.index != index {
        return Err(format!("it is about region {}", info.index));
    }
    if info.argsz > argsz {
        return match info.argsz <= MAX_SIZE && argsz == FIRST_SIZE {
            true => Ok(Answer::Needs(info.argsz)),
            // Too many; or more than it needed when it was asked before.
            false => Err(format!("it needs {} bytes to list descriptors", info.argsz)),
        };
    }
    // A region without any, from a server that does not refuse then.
    if info.count == 0 {
        return Ok(Answer::Fds(ClientIoFds { events, areas: Vec::new() }));
    }
    // The specification leaves room for longer entries than are known today.
    let room = info.argsz.saturating_sub(wire_size::<wire::RegionIoFds>());
    let each = room.checked_div(info.count).unwrap_or_default();
    if each < wire_size::<wire::IoFd>() {
        return Err(format!("{} sub-regions take {room} bytes", info.count));
    }
    let mut areas = Vec::new();
    for at in 0..u64::from(info.count) {
        let entry = usize::try_from(at * u64::from(each)).ok().and_then(|at| list.get(at..));
        let (entry, _) = entry
            .and_then(|entry| wire::IoFd::read_from_prefix(entry).ok())
            .ok_or_else(|| format!("sub-region {at} is not all there"))?;
        let event = usize::try_from(entry.fd_index).unwrap_or(usize::MAX);
        if event >= events.len() {
            return Err(format!("sub-region {at} has descriptor {event} of {}", events.len()));
        }
        // Other kinds, and those that want a certain value, are for others than us.
        if entry.kind == wire::IO_FD_EVENT && entry.flags == 0 {
            areas.push((Area { offset: entry.offset, len: entry.size }, event));
        }
    }
    Ok(Answer::Fds(ClientIoFds { events, areas }))
}
