//! Parser and checks of DEVICE_GET_REGION_INFO replies.

use std::sync::Arc;

use zerocopy::{FromBytes, IntoBytes};

use super::connection::{Connection, Reply};
use super::error::ClientError;
use crate::descriptor::{Descriptor, PeerFd};
use crate::device::Area;
use crate::wire::{self, command, region_flags, wire_size};

/// Maximum reply size of the first query, in bytes.
const FIRST_SIZE: u32 = 4096;

/// Maximum reply size of the second query, in bytes.
const MAX_SIZE: u32 = 64 * 1024;

/// Region of the device.
#[derive(Debug)]
pub struct ClientRegion {
    /// Size in bytes; 0 for an absent region.
    pub size: u64,
    /// True if the region can be read.
    pub readable: bool,
    /// True if the region can be written.
    pub writable: bool,
    /// Mappable areas.
    pub areas: Vec<MappableArea>,
}

/// Mappable area of a region.
#[derive(Debug)]
pub struct MappableArea {
    /// Offset in the region, in bytes.
    pub offset: u64,
    /// Length, never 0. The area does not exceed the region.
    pub len: u64,
    /// File to map.
    pub fd: Arc<PeerFd>,
    /// Offset of the area in the file.
    pub fd_offset: u64,
}

/// Queries the region `index`. If the reply does not fit, repeats the query with more space.
pub(super) fn query(connection: &mut Connection, index: u32) -> Result<ClientRegion, ClientError> {
    let mut argsz = FIRST_SIZE;
    loop {
        let query = wire::RegionInfo { argsz, flags: 0, index, cap_offset: 0, size: 0, offset: 0 };
        let answer = connection.request(
            command::DEVICE_GET_REGION_INFO,
            &[query.as_bytes()],
            &[],
            |reply| read(reply, index, argsz),
        )?;
        match answer {
            InfoReply::Region(region) => return Ok(region),
            InfoReply::Needs(size) => argsz = size,
        }
    }
}

enum InfoReply {
    Region(ClientRegion),
    /// The complete reply needs `argsz` of this value.
    Needs(u32),
}

fn read(reply: &mut Reply<'_>, index: u32, argsz: u32) -> Result<InfoReply, String> {
    let fds = std::mem::take(&mut reply.fds).into_iter().map(|fd| match fd {
        Descriptor::Memory(file) => Ok(Arc::new(file)),
        _ => Err("a descriptor is neither memory nor a local file".to_owned()),
    });
    let fds = fds.collect::<Result<Vec<_>, _>>()?;
    let (info, _) = reply.split::<wire::RegionInfo>()?;
    if info.index != index {
        return Err(format!("it describes region {}", info.index));
    }
    if info.argsz > argsz {
        return match info.argsz <= MAX_SIZE && argsz == FIRST_SIZE {
            true => Ok(InfoReply::Needs(info.argsz)),
            // The required size exceeds `MAX_SIZE`, or the second reply requires more than the
            // first one.
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
        return Ok(InfoReply::Region(region));
    }
    let areas = match info.flags & region_flags::CAPS {
        0 => None,
        _ => sparse_areas(reply.payload, info.cap_offset)?,
    };
    let areas = areas.unwrap_or_else(|| vec![Area { offset: 0, len: info.size }]);
    // A server sends one descriptor for all areas, or one for each area.
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
    Ok(InfoReply::Region(region))
}

/// Mappable areas of a region. `None` if the reply has no capability for them, so that the whole
/// region is mappable.
fn sparse_areas(payload: &[u8], first: u32) -> Result<Option<Vec<Area>>, String> {
    let mut at = first;
    let mut least = wire_size::<wire::RegionInfo>();
    while at != 0 {
        // Offsets must increase. Otherwise the list could be a loop.
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
