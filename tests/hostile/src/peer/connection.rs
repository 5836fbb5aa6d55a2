//! vfio-user connection that sends arbitrary messages.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown,
    SocketAddrUnix, SocketFlags, SocketType, connect, recv, sendmsg, shutdown, socket_with,
};
use shadowbell_vfio_user::wire::{self, Header, command, header_flags};
use zerocopy::{FromBytes, IntoBytes};

/// Time limit of one request to the server.
const PATIENCE: Duration = Duration::from_secs(6);
/// Maximum number of descriptors that the kernel accepts in one message (SCM_MAX_FD).
const MAX_FDS: usize = 253;

/// A connected socket, and the received part of a reply.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    id: u16,
    inward: Vec<u8>,
}

/// Encodes a message.
pub fn message(command: u16, flags: u32, payload: &[&[u8]]) -> Vec<u8> {
    let len: usize = payload.iter().map(|part| part.len()).sum();
    let size = (wire::HEADER_LEN + len) as u32;
    let mut bytes = Header { id: 0, command, size, flags, error: 0 }.as_bytes().to_vec();
    payload.iter().for_each(|part| bytes.extend_from_slice(part));
    bytes
}

/// Sends bytes and descriptors over a socket, without waiting.
pub fn send_fds(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    send_with(socket, bytes, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

fn send_with(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOMANYREFS);
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)
}

/// Message of a posted write to a region (no reply), as VMMs use it for doorbells.
pub fn posted_write(region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    let access = wire::RegionAccess { offset, region, count: data.len() as u32 };
    message(command::REGION_WRITE, header_flags::NO_REPLY, &[access.as_bytes(), data])
}

/// Message of a request to read `count` bytes of a region.
pub fn read_request(region: u32, offset: u64, count: u32) -> Vec<u8> {
    let access = wire::RegionAccess { offset, region, count };
    message(command::REGION_READ, 0, &[access.as_bytes()])
}

/// Payload of DMA_MAP for a part of the file whose descriptor is sent in the same message.
pub fn dma_map(address: u64, size: u64, offset: u64) -> wire::DmaMap {
    let flags = wire::dma_map_flags::READ | wire::dma_map_flags::WRITE;
    wire::DmaMap { argsz: size_of::<wire::DmaMap>() as u32, flags, offset, address, size }
}

impl Connection {
    /// Connects without negotiating the version.
    pub fn open(path: &Path) -> Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)
            .with_context(|| format!("connecting to {}", path.display()))?;
        let connection = Self { socket, id: 0, inward: Vec::new() };
        connection.set_patience(PATIENCE)?;
        Ok(connection)
    }

    /// Sets the time limit of one request to the server.
    pub fn set_patience(&self, patience: Duration) -> Result<()> {
        set_socket_timeout(&self.socket, Timeout::Recv, Some(patience))?;
        Ok(set_socket_timeout(&self.socket, Timeout::Send, Some(patience))?)
    }

    /// Shuts down the socket for writing, and waits until the server has closed the connection.
    pub fn hang_up(&mut self) -> Result<()> {
        shutdown(&self.socket, Shutdown::Write).context("hanging up")?;
        let mut bytes = [0u8; 4096];
        loop {
            match recv(&self.socket, &mut bytes[..], RecvFlags::empty()) {
                Ok((0, _)) | Err(Errno::CONNRESET) => return Ok(()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => bail!("the server does not close the connection in time"),
                Err(errno) => bail!("hanging up: {errno}"),
            }
        }
    }

    /// True if the server has closed the connection.
    pub fn is_closed(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        !matches!(recv(&self.socket, &mut [0u8; 1][..], flags), Ok((1, _)) | Err(Errno::AGAIN))
    }

    /// Connects and negotiates the version.
    pub fn attach(path: &Path) -> Result<Self> {
        let mut connection = Self::open(path)?;
        let json = br#"{"capabilities":{"max_msg_fds":16,"write_multiple":true}}"#;
        connection.request(command::VERSION, &[&[0, 0, 1, 0], json, &[0]], &[])?;
        Ok(connection)
    }

    /// The socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends all bytes. The descriptors are attached to the first byte.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let (mut bytes, mut fds) = (bytes, fds);
        while !bytes.is_empty() {
            match send_with(self.socket(), bytes, fds, SendFlags::NOSIGNAL) {
                Ok(sent) => (bytes, fds) = (bytes.get(sent..).unwrap_or_default(), &[]),
                Err(Errno::INTR) => {}
                Err(errno) => bail!("sending to the server: {errno}"),
            }
        }
        Ok(())
    }

    /// Sends whole messages, and discards the replies that arrive meanwhile. Otherwise the server
    /// would stop reading when the unread replies fill its buffers.
    pub fn flood(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            self.throw_away()?;
            match send_fds(self.socket(), rest, &[]) {
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                // Wait until the socket has room for more bytes.
                Err(Errno::AGAIN) => std::thread::sleep(Duration::from_micros(100)),
                Err(Errno::INTR) => {}
                Err(errno) => bail!("sending to the server: {errno}"),
            }
        }
        self.throw_away()
    }

    /// Discards the replies that have arrived, possibly in the middle of one. So
    /// [`settle`](Self::settle) must be called before the next [`request`](Self::request).
    pub fn throw_away(&mut self) -> Result<()> {
        let mut bytes = [0u8; 1 << 16];
        loop {
            match recv(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => bail!("the server has closed the connection"),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => bail!("receiving from the server: {errno}"),
            }
        }
    }

    /// Waits for the replies to all messages sent so far: sends a message with a unique id, and
    /// discards replies until the reply with this id arrives.
    pub fn settle(&mut self) -> Result<()> {
        self.inward.clear();
        let mark = Header {
            id: 0xfeed,
            command: command::DIRTY_PAGES,
            size: wire::HEADER_LEN as u32,
            flags: 0,
            error: 0,
        };
        self.send(mark.as_bytes(), &[])?;
        let start = [mark.id.to_le_bytes(), mark.command.to_le_bytes()].concat();
        loop {
            self.receive()?;
            let tail = self.inward.len().saturating_sub(wire::HEADER_LEN);
            if self.inward.get(tail..).is_some_and(|bytes| bytes.starts_with(&start)) {
                self.inward.clear();
                return Ok(());
            }
            self.inward.drain(..tail);
        }
    }

    /// Sends a command and waits for its reply. An error reply is an error.
    pub fn request(
        &mut self,
        command: u16,
        payload: &[&[u8]],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Vec<u8>> {
        let (header, payload) = self.try_request(command, payload, fds)?;
        if header.error != 0 {
            let error = std::io::Error::from_raw_os_error(header.error as i32);
            bail!("{}: {error}", command::name(command));
        }
        Ok(payload)
    }

    /// Sends a command and waits for its reply, which may be an error reply.
    pub fn try_request(
        &mut self,
        command: u16,
        payload: &[&[u8]],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Header, Vec<u8>)> {
        let mut bytes = message(command, 0, payload);
        self.id = self.id.wrapping_add(1);
        bytes[..2].copy_from_slice(&self.id.to_le_bytes());
        self.send(&bytes, fds)?;
        loop {
            if let Ok((header, _)) = Header::read_from_prefix(&self.inward) {
                let size = header.size as usize;
                if self.inward.len() >= size && size >= wire::HEADER_LEN {
                    let payload = self.inward.drain(..size).skip(wire::HEADER_LEN).collect();
                    if (header.id, header.command) != (self.id, command) {
                        bail!("a reply to something else: {header:?}");
                    }
                    return Ok((header, payload));
                }
            }
            self.receive()?;
        }
    }

    fn receive(&mut self) -> Result<()> {
        let mut bytes = [0u8; 4096];
        match recv(&self.socket, &mut bytes[..], RecvFlags::empty()) {
            Ok((0, _)) => bail!("the server has closed the connection"),
            Ok((len, _)) => self.inward.extend_from_slice(bytes.get(..len).unwrap_or_default()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => bail!("no answer in time"),
            Err(errno) => bail!("receiving from the server: {errno}"),
        }
        Ok(())
    }

    /// Reads a register of a region.
    pub fn read(&mut self, region: u32, offset: u64, count: u32) -> Result<Vec<u8>> {
        let access = wire::RegionAccess { offset, region, count };
        let reply = self.request(command::REGION_READ, &[access.as_bytes()], &[])?;
        Ok(reply.get(access.as_bytes().len()..).unwrap_or_default().to_vec())
    }

    /// Writes a register of a region, and waits for the reply.
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        let access = wire::RegionAccess { offset, region, count: data.len() as u32 };
        self.request(command::REGION_WRITE, &[access.as_bytes(), data], &[]).map(drop)
    }
}
