//! What a server tells of a region, taken apart and checked.

use std::sync::Arc;

use zerocopy::{FromBytes, IntoBytes};

use super::connection::{Connection, Reply};
use super::error::ClientError;
use crate::descriptor::{Descriptor, PeerFd};
use crate::device::Area;
use crate::wire::{self, command, region_flags, wire_size};

/// Room for the capabilities of a region at the first asking.
const FIRST_SIZE: u32 = 4096;

/// The most that a region's description may take.
const MAX_SIZE: u32 = 64 * 1024;

/// A region of the device.
#[derive(Debug)]
pub struct ClientRegion {
    /// Size in bytes; 0 if the device does not have it.
    pub size: u64,
    /// It can be read.
    pub readable: bool,
    /// It can be written.
    pub writable: bool,
    /// The parts that can be mapped.
    pub areas: Vec<MappableArea>,
}

/// A part of a region that can be mapped.
#[derive(Debug)]
pub struct MappableArea {
    /// Where it begins in the region, in bytes.
    pub offset: u64,
    /// How long it is; never 0, and inside of the region.
    pub len: u64,
    /// The file to map.
    pub fd: Arc<PeerFd>,
    /// Where it begins in the file.
    pub fd_offset: u64,
}

/// Asks about the region `index`, once more if the answer turns out to be long.
pub(super) fn ask(connection: &mut Connection, index: u32) -> Result<ClientRegion, ClientError> {
    let mut argsz = FIRST_SIZE;
    loop {
        let ask = wire::RegionInfo { argsz, flags: 0, index, cap_offset: 0, size: 0, offset: 0 };
        let answer = connection.request(
            command::DEVICE_GET_REGION_INFO,
            &[ask.as_bytes()],
            &[],
            |reply| read(reply, index, argsz),
        )?;
        match answer {
            Answer::Region(region) => return Ok(region),
            Answer::Needs(size) => argsz = size,
        }
    }
}

enum Answer {
    Region(ClientRegion),
    /// Nothing yet: the server needs this much room.
    Needs(u32),
}

fn read(reply: &mut Reply<'_>, index: u32, argsz: u32) -> Result<Answer, String> {
    let fds = std::mem::take(&mut reply.fds).into_iter().map(|fd| match fd {
        Descriptor::Memory(file) => Ok(Arc::new(file)),
        _ => Err("a descriptor is of no memory and no local file".to_owned()),
    });
    let fds = fds.collect::<Result<Vec<_>, _>>()?;
    let (info, _) = reply.split::<wire::RegionInfo>()?;
    if info.index != index {
        return Err(format!("it is about region {}", info.index));
    }
    if info.argsz > argsz {
        return match info.argsz <= MAX_SIZE && argsz == FIRST_SIZE {
            true => Ok(Answer::Needs(info.argsz)),
            // Too many; or more than it needed when it was asked before.
            false => Err(format!("it needs {} bytes to describe a region", info.argsz)),
        };
    }
    let mut region = ClientRegion {
        size: info.size,
        readable: info.flags & region_flags::READ != 0,
        writable: info.flags & region_flags::WRITE != 0,
        areas: Vec::new(),
    };
    if info.flags & region_flags::MMAP == 0 || info.size == 0 {
        return Ok(Answer::Region(region));
    }
    let areas = match info.flags & region_flags::CAPS {
        0 => None,
        _ => sparse_areas(reply.payload, info.cap_offset)?,
    };
    let areas = areas.unwrap_or_else(|| vec![Area { offset: 0, len: info.size }]);
    // One descriptor for all, or one for each.
    let each = fds.len() == areas.len();
    if areas.is_empty() || !(each || fds.len() == 1) {
        return Err(format!("{} areas came with {} descriptors", areas.len(), fds.len()));
    }
    let fds = match fds.first() {
        Some(one) if !each => vec![Arc::clone(one); areas.len()],
        _ => fds,
    };
    for (area, fd) in areas.into_iter().zip(fds) {
        let inside = area.offset.checked_add(area.len).is_some_and(|end| end <= info.size);
        let fd_offset = info.offset.checked_add(area.offset);
        let in_file = fd_offset.is_some_and(|start| start.checked_add(area.len).is_some());
        let (true, true, Some(fd_offset)) = (inside && area.len > 0, in_file, fd_offset) else {
            return Err(format!("area {area:?} is not inside of a region of {} bytes", info.size));
        };
        region.areas.push(MappableArea { offset: area.offset, len: area.len, fd, fd_offset });
    }
    Ok(Answer::Region(region))
}

/// The areas that can be mapped; `None` if the chain of capabilities does not restrict them.
fn sparse_areas(payload: &[u8], first: u32) -> Result<Option<Vec<Area>>, String> {
    let mut at = first;
    let mut least = wire_size::<wire::RegionInfo>();
    while at != 0 {
        // Forward only: a chain that bends back would have no end.
        if at < least {
            return Err(format!("a capability at {at} lies before {least}"));
        }
        let outside = || format!("a capability at {at} exceeds {} bytes", payload.len());
        let rest = usize::try_from(at).ok().and_then(|at| payload.get(at..)).ok_or_else(outside)?;
        let (header, rest) =
            wire::CapabilityHeader::read_from_prefix(rest).map_err(|_| outside())?;
        if header.id == wire::CAPABILITY_SPARSE_MMAP {
            let (sparse, rest) = wire::SparseMmap::read_from_prefix(rest).map_err(|_| outside())?;
            let len = usize::try_from(sparse.nr_areas)
                .ok()
                .and_then(|count| count.checked_mul(size_of::<wire::SparseArea>()))
                .ok_or_else(outside)?;
            let areas = rest
                .get(..len)
                .ok_or_else(outside)?
                .chunks_exact(size_of::<wire::SparseArea>())
                .filter_map(|area| wire::SparseArea::read_from_bytes(area).ok())
                .map(|area| Area { offset: area.offset, len: area.size })
                .collect();
            return Ok(Some(areas));
        }
        least = at.saturating_add(wire_size::<wire::CapabilityHeader>());
        at = header.next;
    }
    Ok(None)
}
