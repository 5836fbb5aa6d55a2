//! vfio-user client: blocking, one request at a time, shared by any number of threads.
//!
//! # Architecture
//!
//! A [`Client`] is a connection and a lock. A request takes the lock, sends a message, waits for
//! the reply and checks it. A posted write takes the lock and sends a message. One request at a
//! time is sufficient, because queues and doorbells are in shared memory. Messages transfer only
//! the operations of the control plane, and doorbell writes of devices without shared doorbells.
//!
//! # Failed requests
//!
//! If the server refuses a request, the request fails with [`ClientError::Refused`], and the
//! connection remains usable. Every other failure (a timeout, an invalid reply, a lost connection)
//! ends the connection, because the client could no longer match later replies to their requests.
//! Later requests then fail immediately with [`ClientError::Broken`].

mod connection;
mod error;
mod io_fds;
mod migration;
mod region;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zerocopy::IntoBytes;

use crate::capabilities::Capabilities;
use crate::device::{DeviceInfo, DmaUnmap, IrqAction, IrqInfo};
use crate::wire::{self, command, wire_size};
use connection::Connection;

pub use error::ClientError;
pub use io_fds::ClientIoFds;
pub use region::{ClientRegion, MappableArea};

/// Maximum number of descriptors per reply.
const MAX_REPLY_FDS: u32 = 16;

/// Maximum number of bytes per data transfer.
const MAX_DATA_XFER_SIZE: u32 = 1 << 20;

/// Options of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Maximum time from sending a request to its reply; `None` waits forever. The maximum doubles
    /// if a part of the reply has arrived in time.
    pub timeout: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Self { timeout: Some(Duration::from_secs(10)) }
    }
}

/// One write of [`Client::region_write_multi`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortWrite<'a> {
    /// Region index.
    pub region: u32,
    /// Offset in the region.
    pub offset: u64,
    /// Data, at most 8 bytes.
    pub data: &'a [u8],
}

/// Memory range to map for the device, see [`Client::dma_map`].
#[derive(Debug, Clone, Copy)]
pub struct DmaRange<'a> {
    /// First bus address for the device.
    pub iova: u64,
    /// Length in bytes.
    pub len: u64,
    /// True if the device may read the range.
    pub readable: bool,
    /// True if the device may write the range.
    pub writable: bool,
    /// File that contains the memory. Without a file, the device can access the range only by
    /// messages.
    pub fd: Option<BorrowedFd<'a>>,
    /// Offset of the range in the file, in bytes.
    pub fd_offset: u64,
}

/// Connection to a server.
#[derive(Debug)]
pub struct Client {
    /// Connection. If a panic interrupts a request, further requests fail, because the reply may be
    /// partly read.
    connection: Mutex<Connection>,
    /// Socket of the connection. A caller can watch it for a hang-up without taking the lock.
    socket: Arc<OwnedFd>,
    server: Capabilities,
}

impl Client {
    /// Connects to the server at `path` and negotiates the version. If `path` is a directory, the
    /// socket is its entry `cntrl`.
    ///
    /// If another client is connected, waits until that client disconnects, at most for the
    /// timeout.
    ///
    /// # Errors
    ///
    /// No server listens at the path, or the server uses another protocol.
    pub fn connect(path: impl AsRef<Path>, options: Options) -> Result<Self, ClientError> {
        let path = crate::address::resolve(path.as_ref());
        let stream = connection::connect(&path, options.timeout)
            .map_err(|errno| ClientError::Connect { path, source: errno.into() })?;
        Self::from_stream(stream, options)
    }

    /// Negotiates the version with the server at the other end of `stream`, a connected UNIX
    /// socket.
    ///
    /// # Errors
    ///
    /// The server uses another protocol.
    pub fn from_stream(stream: OwnedFd, options: Options) -> Result<Self, ClientError> {
        let mut connection = Connection::new(stream, options.timeout, MAX_DATA_XFER_SIZE)?;
        let ours = Capabilities {
            max_msg_fds: MAX_REPLY_FDS,
            max_data_xfer_size: MAX_DATA_XFER_SIZE.into(),
            write_multiple: true,
            // The migration capability belongs to servers only.
            ..Capabilities::default()
        };
        let version = wire::Version { major: wire::VERSION.0, minor: wire::VERSION.1 };
        let payload = [version.as_bytes(), &ours.to_version_data()];
        let server = connection.request(command::VERSION, &payload, &[], |reply| {
            let (theirs, data) = reply.split::<wire::Version>()?;
            if theirs.major != version.major || theirs.minor > version.minor {
                return Err(format!("it has protocol version {}.{}", theirs.major, theirs.minor));
            }
            Capabilities::from_version_data(data).map_err(|error| error.to_string())
        })?;
        Ok(Self { socket: connection.socket(), connection: Mutex::new(connection), server })
    }

    /// Capabilities of the server.
    pub fn server(&self) -> Capabilities {
        self.server
    }

    /// Queries the device.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. If the device is not a PCI device, the reply is a bad reply.
    pub fn device_info(&self) -> Result<DeviceInfo, ClientError> {
        let size = wire_size::<wire::DeviceInfo>();
        let query = wire::DeviceInfo { argsz: size, flags: 0, num_regions: 0, num_irqs: 0 };
        self.connection.lock().request(
            command::DEVICE_GET_INFO,
            &[query.as_bytes()],
            &[],
            |reply| {
                let (info, _) = reply.split::<wire::DeviceInfo>()?;
                if info.flags & wire::device_flags::PCI == 0 {
                    return Err("the device is not a PCI device".into());
                }
                Ok(DeviceInfo {
                    resettable: info.flags & wire::device_flags::RESET != 0,
                    regions: info.num_regions,
                    irqs: info.num_irqs,
                })
            },
        )
    }

    /// Queries a region.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. If a mappable area exceeds the region or has no descriptor, the reply
    /// is a bad reply.
    pub fn region_info(&self, index: u32) -> Result<ClientRegion, ClientError> {
        region::query(&mut self.connection.lock(), index)
    }

    /// Queries the eventfds that the client can signal instead of writing to certain parts of a
    /// region.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. A server without eventfds refuses with
    /// [`Errno::OPNOTSUPP`](crate::Errno::OPNOTSUPP).
    pub fn region_io_fds(&self, index: u32) -> Result<ClientIoFds, ClientError> {
        io_fds::query(&mut self.connection.lock(), index)
    }

    /// Queries an interrupt index, see [`irq`](crate::device::irq).
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn irq_info(&self, index: u32) -> Result<IrqInfo, ClientError> {
        use wire::irq_info_flags as flags;
        let size = wire_size::<wire::IrqInfo>();
        let query = wire::IrqInfo { argsz: size, flags: 0, index, count: 0 };
        self.connection.lock().request(
            command::DEVICE_GET_IRQ_INFO,
            &[query.as_bytes()],
            &[],
            |reply| {
                let (info, _) = reply.split::<wire::IrqInfo>()?;
                if info.index != index {
                    return Err(format!("it describes interrupt index {}", info.index));
                }
                Ok(IrqInfo {
                    count: info.count,
                    eventfd: info.flags & flags::EVENTFD != 0,
                    maskable: info.flags & flags::MASKABLE != 0,
                    automasked: info.flags & flags::AUTOMASKED != 0,
                    noresize: info.flags & flags::NORESIZE != 0,
                })
            },
        )
    }

    /// Reads `data.len()` bytes of a region, at most the server's `max_data_xfer_size`.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn region_read(
        &self,
        region: u32,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), ClientError> {
        let access = self.access(command::REGION_READ, region, offset, data.len())?;
        self.connection.lock().request(command::REGION_READ, &[access.as_bytes()], &[], |reply| {
            let (echo, read) = reply.split::<wire::RegionAccess>()?;
            if echo.count != access.count || read.len() != data.len() {
                return Err(format!("{} bytes instead of {}", read.len(), data.len()));
            }
            data.copy_from_slice(read);
            Ok(())
        })
    }

    /// Writes to a region, and waits for the reply.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn region_write(&self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let access = self.access(command::REGION_WRITE, region, offset, data.len())?;
        let payload = [access.as_bytes(), data];
        self.connection.lock().request(command::REGION_WRITE, &payload, &[], |reply| {
            let (echo, _) = reply.split::<wire::RegionAccess>()?;
            if echo.count != access.count {
                return Err(format!("{} bytes written instead of {}", echo.count, access.count));
            }
            Ok(())
        })
    }

    /// Writes to a region without waiting for a reply. The server still handles the write before
    /// later requests. The client does not receive an error if the device refuses the write.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. The write was then not sent.
    pub fn region_write_posted(
        &self,
        region: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<(), ClientError> {
        let access = self.access(command::REGION_WRITE, region, offset, data.len())?;
        self.connection.lock().post(command::REGION_WRITE, &[access.as_bytes(), data])
    }

    /// Writes several values in order, with one message if the server supports that. If `posted`,
    /// the client does not wait for a reply.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. After a refusal, the number of executed writes is unknown.
    pub fn region_write_multi(
        &self,
        writes: &[ShortWrite<'_>],
        posted: bool,
    ) -> Result<(), ClientError> {
        let command = command::REGION_WRITE_MULTI;
        let mut entries = Vec::with_capacity(writes.len());
        for write in writes {
            let mut data = [0; 8];
            let why = "a write of more than 8 bytes";
            data.get_mut(..write.data.len())
                .ok_or(ClientError::Unsendable { command, why })?
                .copy_from_slice(write.data);
            let access = self.access(command, write.region, write.offset, write.data.len())?;
            let wire::RegionAccess { offset, region, count } = access;
            entries.push(wire::MultiEntry { offset, region, count, data });
        }
        if entries.as_bytes().len() > MAX_DATA_XFER_SIZE as usize {
            return Err(ClientError::Unsendable { command, why: "too many writes" });
        }
        if !self.server.write_multiple {
            return writes.iter().try_for_each(|write| match posted {
                true => self.region_write_posted(write.region, write.offset, write.data),
                false => self.region_write(write.region, write.offset, write.data),
            });
        }
        let multi = wire::WriteMulti { count: entries.len() as u64 };
        let payload = [multi.as_bytes(), entries.as_bytes()];
        if posted {
            return self.connection.lock().post(command, &payload);
        }
        self.connection.lock().request(command, &payload, &[], |reply| {
            let (echo, _) = reply.split::<wire::WriteMulti>()?;
            if echo != multi {
                return Err(format!("{} writes done instead of {}", echo.count, multi.count));
            }
            Ok(())
        })
    }

    /// Maps memory for the device.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn dma_map(&self, share: &DmaRange<'_>) -> Result<(), ClientError> {
        use wire::dma_map_flags as flags;
        let map = wire::DmaMap {
            argsz: wire_size::<wire::DmaMap>(),
            flags: if share.readable { flags::READ } else { 0 }
                | if share.writable { flags::WRITE } else { 0 },
            offset: share.fd_offset,
            address: share.iova,
            size: share.len,
        };
        let fds: &[BorrowedFd<'_>] = share.fd.as_slice();
        let mut connection = self.connection.lock();
        let max = self.server.max_dma_maps;
        if connection.maps.len() >= usize::try_from(max).unwrap_or(usize::MAX) {
            return Err(ClientError::TooManyMaps { max });
        }
        connection.request(command::DMA_MAP, &[map.as_bytes()], fds, |_| Ok(()))?;
        connection.maps.insert(share.iova);
        Ok(())
    }

    /// Unmaps memory. When the method returns, the device no longer accesses the memory.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. After any error the device may still access the memory.
    pub fn dma_unmap(&self, range: DmaUnmap) -> Result<(), ClientError> {
        let (flags, address, size) = match range {
            DmaUnmap::Range { iova, len } => (0, iova, len),
            DmaUnmap::All => (wire::dma_unmap_flags::ALL, 0, 0),
        };
        let argsz = wire_size::<wire::DmaUnmap>();
        let unmap = wire::DmaUnmap { argsz, flags, address, size };
        let mut connection = self.connection.lock();
        connection.request(command::DMA_UNMAP, &[unmap.as_bytes()], &[], |_| Ok(()))?;
        match range {
            DmaUnmap::All => connection.maps.clear(),
            DmaUnmap::Range { iova, len } => {
                let last = iova.saturating_add(len.saturating_sub(1));
                let mut after = connection.maps.split_off(&iova);
                if let Some(next) = last.checked_add(1) {
                    connection.maps.append(&mut after.split_off(&next));
                }
            }
        }
        Ok(())
    }

    /// Sets the eventfds of interrupts `start..start + eventfds.len()` of an index. The client
    /// sends several messages if the eventfds exceed the server's maximum per message.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn set_irq_eventfds<Fd: AsFd>(
        &self,
        index: u32,
        start: u32,
        eventfds: &[Fd],
    ) -> Result<(), ClientError> {
        use wire::set_irqs_flags as flags;
        let at_once = usize::try_from(self.server.max_msg_fds.clamp(1, 32)).unwrap_or(1);
        let mut start = start;
        for chunk in eventfds.chunks(at_once) {
            let fds: Vec<_> = chunk.iter().map(AsFd::as_fd).collect();
            let count = u32::try_from(fds.len()).unwrap_or(u32::MAX);
            let set = flags::DATA_EVENTFD | flags::ACTION_TRIGGER;
            self.set_irqs(set, index, start, count, &[], &fds)?;
            start = start.saturating_add(count);
        }
        Ok(())
    }

    /// Removes the eventfds of interrupts `start..start + count`.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn clear_irq_eventfds(
        &self,
        index: u32,
        start: u32,
        count: u32,
    ) -> Result<(), ClientError> {
        use wire::set_irqs_flags as flags;
        let set = flags::DATA_EVENTFD | flags::ACTION_TRIGGER;
        self.set_irqs(set, index, start, count, &[], &[])
    }

    /// Disables all interrupts of an index.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn disable_irqs(&self, index: u32) -> Result<(), ClientError> {
        self.act_on_irqs(index, 0, 0, IrqAction::Trigger)
    }

    /// Masks, unmasks or raises interrupts `start..start + count` of an index.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn act_on_irqs(
        &self,
        index: u32,
        start: u32,
        count: u32,
        action: IrqAction,
    ) -> Result<(), ClientError> {
        let flags = wire::set_irqs_flags::DATA_NONE | action_flag(action);
        self.set_irqs(flags, index, start, count, &[], &[])
    }

    /// Masks, unmasks or raises the interrupts whose flag in `chosen` is true. The first flag is
    /// the one of interrupt `start`.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn act_on_chosen_irqs(
        &self,
        index: u32,
        start: u32,
        chosen: &[bool],
        action: IrqAction,
    ) -> Result<(), ClientError> {
        let flags = wire::set_irqs_flags::DATA_BOOL | action_flag(action);
        let count = u32::try_from(chosen.len()).unwrap_or(u32::MAX);
        self.set_irqs(flags, index, start, count, chosen.as_bytes(), &[])
    }

    /// Resets the device.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn reset(&self) -> Result<(), ClientError> {
        self.connection.lock().request(command::DEVICE_RESET, &[], &[], |_| Ok(()))
    }

    fn set_irqs(
        &self,
        flags: u32,
        index: u32,
        start: u32,
        count: u32,
        data: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let command = command::DEVICE_SET_IRQS;
        if data.len() > MAX_DATA_XFER_SIZE as usize {
            return Err(ClientError::Unsendable { command, why: "too many interrupts" });
        }
        let argsz = wire_size::<wire::SetIrqs>().saturating_add(data.len() as u32);
        let set = wire::SetIrqs { argsz, flags, index, start, count };
        self.connection.lock().request(command, &[set.as_bytes(), data], fds, |_| Ok(()))
    }

    fn access(
        &self,
        command: u16,
        region: u32,
        offset: u64,
        len: usize,
    ) -> Result<wire::RegionAccess, ClientError> {
        let max = self.server.max_data_xfer_size.min(MAX_DATA_XFER_SIZE.into());
        match u32::try_from(len) {
            Ok(count) if u64::from(count) <= max => {
                Ok(wire::RegionAccess { offset, region, count })
            }
            _ => Err(ClientError::Unsendable {
                command,
                why: "more data than fits into one message",
            }),
        }
    }
}

impl AsFd for Client {
    /// Socket, which a caller may watch for a hang-up of the server (`POLLHUP`) while no request is
    /// in flight. The caller must neither read from it nor write to it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn action_flag(action: IrqAction) -> u32 {
    match action {
        IrqAction::Mask => wire::set_irqs_flags::ACTION_MASK,
        IrqAction::Unmask => wire::set_irqs_flags::ACTION_UNMASK,
        IrqAction::Trigger => wire::set_irqs_flags::ACTION_TRIGGER,
    }
}
