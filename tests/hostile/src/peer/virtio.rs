//! vhost-user-blk frontend and its guest: one virtqueue with arbitrary descriptors.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::{EventfdFlags, eventfd};
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use zerocopy::IntoBytes;

use super::connection::send_fds;
use super::guest::memfd;
use crate::random::Random;

/// Number of entries of the virtqueue.
pub const ENTRIES: u16 = 256;
/// Size of the guest's memory, which starts at address 0.
pub const MEMORY: u64 = 64 << 20;
/// Guest addresses of the rings, and of free memory for tables and data.
const AVAIL: usize = 0x2000;
const USED: usize = 0x4000;
pub const ROOM: u64 = 0x1_0000;
/// User address of the guest's memory, as sent in the memory table.
const USER: u64 = 1 << 40;
/// VIRTIO_F_VERSION_1 and VIRTIO_F_INDIRECT_DESC.
const FEATURES: u64 = 1 << 32 | 1 << 28;
/// Time limit of a call to the server.
const PATIENCE: Duration = Duration::from_secs(6);

/// Descriptor flags.
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// Types of virtio-blk requests: read, write, flush, discard and write zeroes.
const REQUESTS: [u32; 5] = [0, 1, 4, 11, 13];

/// Encodes the header of a virtio-blk request: type and sector.
pub fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}

/// Encodes a descriptor.
pub fn descriptor(address: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    bytes
}

/// A frontend with one virtqueue that is set up and running.
#[derive(Debug)]
pub struct VirtioGuest {
    stream: UnixStream,
    pub memory: SharedBytes,
    _file: OwnedFd,
    kick: OwnedFd,
    _call: OwnedFd,
    available: u16,
}

impl VirtioGuest {
    /// Connects, shares memory and sets up the first virtqueue.
    pub fn attach(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)
            .with_context(|| format!("connecting to {}", path.display()))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let file = memfd(MEMORY)?;
        let memory = Mapping::from_fd(&file, 0, MEMORY, Protection::ReadWrite)?.bytes();
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let (kick, call) = (eventfd(0, flags)?, eventfd(0, flags)?);
        let guest = Self { stream, memory, _file: file, kick, _call: call, available: 0 };
        let (kick, call) = (guest.kick.as_fd(), guest._call.as_fd());
        // SET_OWNER, SET_FEATURES, SET_MEM_TABLE
        guest.send_request(3, &[], &[])?;
        guest.send_request(2, FEATURES.as_bytes(), &[])?;
        let table = [1u64, 0, MEMORY, USER, 0];
        guest.send_request(5, table.as_bytes(), &[guest._file.as_fd()])?;
        // SET_VRING_NUM, BASE, ADDR, CALL, KICK
        guest.send_request(8, [0u32, u32::from(ENTRIES)].as_bytes(), &[])?;
        guest.send_request(10, [0u32, 0].as_bytes(), &[])?;
        let rings = [0, USER, USER + USED as u64, USER + AVAIL as u64, 0];
        guest.send_request(9, rings.as_bytes(), &[])?;
        guest.send_request(13, 0u64.as_bytes(), &[call])?;
        guest.send_request(12, 0u64.as_bytes(), &[kick])?;
        Ok(guest)
    }

    fn send_request(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let header = [request, 1, payload.len() as u32];
        let bytes = [header.as_bytes(), payload].concat();
        send_fds(self.stream.as_fd(), &bytes, fds).context("sending to the server")?;
        Ok(())
    }

    /// True if the server has closed the connection.
    pub fn is_closed(&self) -> bool {
        use rustix::io::Errno;
        use rustix::net::{RecvFlags, recv};
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        !matches!(recv(&self.stream, &mut [0u8; 1][..], flags), Ok((1, _)) | Err(Errno::AGAIN))
    }

    /// Writes bytes into the guest's memory.
    pub fn put(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.memory.write_from(address as usize, bytes).context("the guest's memory")
    }

    /// Writes descriptors into the descriptor table, from index `first`.
    pub fn describe(&self, first: u16, descriptors: &[[u8; 16]]) -> Result<()> {
        self.put(u64::from(first) * 16, descriptors.as_flattened())
    }

    /// The used index.
    pub fn used(&self) -> u16 {
        self.memory.load_u32_acquire(USED).map_or(0, |word| (word >> 16) as u16)
    }

    /// Number of chains that were made available and that the device has not yet returned as used.
    pub fn outstanding(&self) -> u16 {
        self.available.wrapping_sub(self.used())
    }

    /// Makes these chains available, and kicks the device.
    pub fn offer(&mut self, heads: &[u16]) -> Result<()> {
        for head in heads {
            let slot = self.available % ENTRIES;
            self.put((AVAIL + 4) as u64 + u64::from(slot) * 2, &head.to_le_bytes())?;
            self.available = self.available.wrapping_add(1);
        }
        // The guest must write the chains before the available index.
        fence(Ordering::Release);
        self.put(AVAIL as u64 + 2, &self.available.to_le_bytes())?;
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
        Ok(())
    }

    /// Stores a request for `len` bytes in descriptors 0 to 2, and makes this chain available. The
    /// data are at [`ROOM`] plus one page.
    pub fn submit(&mut self, kind: u32, sector: u64, len: u32) -> Result<()> {
        let data = if kind == 0 { NEXT | WRITE } else { NEXT };
        self.put(ROOM, &header(kind, sector))?;
        let chain = [
            descriptor(ROOM, 16, NEXT, 1),
            descriptor(ROOM + 4096, len, data, 2),
            descriptor(ROOM + 16, 1, WRITE, 0),
        ];
        self.describe(0, &chain)?;
        self.offer(&[0])
    }

    /// Makes random chains available, and kicks the device. Most chains are requests whose first
    /// sector is one of `sectors`; some of these have a wrong descriptor. Some heads, and some
    /// values of the available index, are invalid.
    pub fn offer_random(&mut self, random: &mut Random, sectors: &Range<u64>) -> Result<u64> {
        for first in (0..ENTRIES - 2).step_by(3) {
            let at = ROOM + u64::from(first) * 32;
            let kind = REQUESTS[random.below(REQUESTS.len() as u64) as usize];
            let sector = sectors.start + random.below(sectors.end - sectors.start);
            self.put(at, &header(kind, sector))?;
            let flags = if kind == 0 { NEXT | WRITE } else { NEXT };
            let data = (1 << 20) + random.below(MEMORY - (2 << 20)) / 512 * 512;
            let len = 512 * (1 + random.below(32)) as u32;
            let mut chain = [
                descriptor(at, 16, NEXT, first + 1),
                descriptor(data, len, flags, first + 2),
                descriptor(at + 16, 1, WRITE, 0),
            ];
            if random.below(8) == 0 {
                let wrong = random.below(3) as usize;
                let next = random.below(u64::from(ENTRIES) + 2) as u16;
                let address = random.below(MEMORY * 2);
                let flags = random.below(8) as u16;
                chain[wrong] = descriptor(address, random.below(1 << 20) as u32, flags, next);
            }
            self.describe(first, &chain)?;
        }
        let count = match random.below(16) {
            0 => ENTRIES + 1 + random.below(64) as u16,
            _ => random.below(u64::from(ENTRIES.saturating_sub(self.outstanding())) + 1) as u16,
        };
        let heads: Vec<u16> = (0..count)
            .map(|_| match random.below(64) {
                0 => random.below(1 << 16) as u16,
                _ => 3 * random.below(u64::from(ENTRIES) / 3) as u16,
            })
            .collect();
        self.offer(&heads)?;
        Ok(heads.len() as u64)
    }
}
