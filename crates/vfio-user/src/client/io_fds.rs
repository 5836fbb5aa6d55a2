//! Parser and checks of DEVICE_GET_REGION_IO_FDS replies.

use std::sync::Arc;

use zerocopy::{FromBytes, IntoBytes};

use super::connection::{Connection, Reply};
use super::error::ClientError;
use crate::descriptor::{Descriptor, PeerFd};
use crate::device::Area;
use crate::wire::{self, command, wire_size};

/// Maximum reply size of the first query, in bytes.
const FIRST_SIZE: u32 = 8192;

/// Maximum reply size of the second query, in bytes.
const MAX_SIZE: u32 = 1 << 20;

/// Eventfds that replace writes to parts of a region. A signal is equivalent to a write, because
/// the server does not use the written value.
#[derive(Debug, Default)]
pub struct ClientIoFds {
    /// The eventfds.
    pub events: Vec<Arc<PeerFd>>,
    /// Parts of the region, and the index of the eventfd of each part.
    pub areas: Vec<(Area, usize)>,
}

/// Queries the region `index`. If the reply does not fit, repeats the query with more space.
pub(super) fn query(connection: &mut Connection, index: u32) -> Result<ClientIoFds, ClientError> {
    let mut argsz = FIRST_SIZE;
    loop {
        let query = wire::RegionIoFds { argsz, flags: 0, index, count: 0 };
        let answer = connection.request(
            command::DEVICE_GET_REGION_IO_FDS,
            &[query.as_bytes()],
            &[],
            |reply| read(reply, index, argsz),
        )?;
        match answer {
            InfoReply::Fds(fds) => return Ok(fds),
            InfoReply::Needs(size) => argsz = size,
        }
    }
}

enum InfoReply {
    Fds(ClientIoFds),
    /// The complete reply needs `argsz` of this value.
    Needs(u32),
}

fn read(reply: &mut Reply<'_>, index: u32, argsz: u32) -> Result<InfoReply, String> {
    let events = std::mem::take(&mut reply.fds).into_iter().map(|fd| match fd {
        Descriptor::Event(fd) => Ok(Arc::new(fd)),
        _ => Err("a descriptor is not an eventfd".to_owned()),
    });
    let events = events.collect::<Result<Vec<Arc<PeerFd>>, _>>()?;
    let (info, list) = reply.split::<wire::RegionIoFds>()?;
    if info.index != index {
        return Err(format!("it describes region {}", info.index));
    }
    if info.argsz > argsz {
        return match info.argsz <= MAX_SIZE && argsz == FIRST_SIZE {
            true => Ok(InfoReply::Needs(info.argsz)),
            // The required size exceeds `MAX_SIZE`, or the second reply requires more than the
            // first one.
            false => Err(format!("it needs {} bytes to list descriptors", info.argsz)),
        };
    }
    // libvfio-user sends an empty list for a region without eventfds; other servers refuse the
    // query.
    if info.count == 0 {
        return Ok(InfoReply::Fds(ClientIoFds { events, areas: Vec::new() }));
    }
    // The specification allows entries that are longer than `IoFd`.
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
            .ok_or_else(|| format!("sub-region {at} is incomplete"))?;
        let event = usize::try_from(entry.fd_index).unwrap_or(usize::MAX);
        if event >= events.len() {
            return Err(format!("sub-region {at} has descriptor {event} of {}", events.len()));
        }
        // Only plain eventfds are supported, which stand for a write of any value. Other entries
        // are ignored.
        if entry.kind == wire::IO_FD_EVENT && entry.flags == 0 {
            areas.push((Area { offset: entry.offset, len: entry.size }, event));
        }
    }
    Ok(InfoReply::Fds(ClientIoFds { events, areas }))
}
