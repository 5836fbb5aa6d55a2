//! Requests that describe the connection and the device: VERSION, region info, region I/O fds.

use super::decode::flag;
use super::limits::MAX_MSG_FDS;
use super::requests::Link;
use super::saved::Agreed;
use super::turn::Context;
use crate::Errno;
use crate::capabilities::{Capabilities, MigrationCapability};
use crate::codec::MESSAGE_OVERHEAD;
use crate::device::{Device, IoFds, Peer, RegionInfo};
use crate::wire::{self, Header, split, split_sized, wire_size};
use tracing::debug;
use zerocopy::IntoBytes;

/// Number of region indexes that can be queried. If the device does not have the region, the reply
/// describes an absent region instead of an error, because SPDK's client queries ten regions, and
/// gives up if one query fails.
const ASKABLE_REGIONS: u32 = 16;

impl Link {
    pub(super) fn version(
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
            // The server accepts only a capability that the client has proposed. If checkpoints are
            // on, it does not accept REGION_WRITE_MULTI: recovery may execute a message twice. If a
            // message contained several writes to one doorbell, the repetition would set the
            // doorbell back to an earlier value.
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

    pub(super) fn region_info(
        &mut self,
        agreed: Agreed,
        header: &Header,
        payload: &[u8],
        device: &mut dyn Device,
    ) -> Result<(), Errno> {
        let (asked, _) = split_sized::<wire::RegionInfo>(payload)?;
        let fixed = wire_size::<wire::RegionInfo>();
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
            // Flag and offset are set even if the capabilities do not fit and are omitted. QEMU
            // treats the flag without an offset as an error, and does not repeat the query with a
            // larger buffer.
            info.flags |= wire::region_flags::CAPS;
            info.cap_offset = fixed;
        }
        if asked.argsz < info.argsz {
            capabilities.clear();
        }
        self.out.put_reply_with_fds(header, &[info.as_bytes(), &capabilities], [mapping.fd]);
        Ok(())
    }

    pub(super) fn io_fds(
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
        // Eventfds beyond the message limit are omitted. The client then writes to the region
        // instead.
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
            // The client reads the required size from this reply, and repeats the query.
            self.out.put_reply(header, &[info.as_bytes()]);
        } else {
            self.out.put_reply_with_fds(header, &[info.as_bytes(), &list], events);
        }
        Ok(())
    }
}
