//! NBD client for the victim and for attackers.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Option codes of the handshake.
pub const LIST: u32 = 3;
const GO: u32 = 7;
/// Command codes.
pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const FLUSH: u16 = 3;
/// Time limit of a call to the server.
const PATIENCE: Duration = Duration::from_secs(6);

/// Connection to an export.
#[derive(Debug)]
pub struct NbdClient {
    pub stream: UnixStream,
    cookie: u64,
}

/// Encodes an option.
pub fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Encodes a request, without the data of a write.
pub fn request(command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend(0u16.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes
}

impl NbdClient {
    /// Connects and negotiates fixed newstyle.
    pub fn greet(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)
            .with_context(|| format!("connecting to {}", path.display()))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut client = Self { stream, cookie: 0 };
        let greeting: [u8; 18] = client.take()?;
        if !greeting.starts_with(b"NBDMAGICIHAVEOPT") {
            bail!("this is no NBD server: {greeting:?}");
        }
        client.stream.write_all(&3u32.to_be_bytes())?;
        Ok(client)
    }

    /// Connects to the default export.
    pub fn attach(path: &Path) -> Result<Self> {
        let mut client = Self::greet(path)?;
        // Empty export name, and no information requests.
        client.stream.write_all(&option(GO, &[0; 6]))?;
        loop {
            let header: [u8; 20] = client.take()?;
            let word = |at: usize| {
                let bytes = header.get(at..at + 4).unwrap_or_default();
                u32::from_be_bytes(bytes.try_into().unwrap_or_default())
            };
            let (kind, len) = (word(12), word(16));
            client.stream.read_exact(&mut vec![0; len.min(1 << 16) as usize])?;
            match kind {
                1 => return Ok(client),
                kind if kind >> 31 != 0 => bail!("the export is refused: {kind:08x}h"),
                _ => {}
            }
        }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).context("receiving from the server")?;
        Ok(bytes)
    }

    /// Sends a request, followed by `data`.
    pub fn send(&mut self, command: u16, offset: u64, length: u32, data: &[u8]) -> Result<()> {
        self.cookie += 1;
        let bytes = [&request(command, self.cookie, offset, length), data].concat();
        self.stream.write_all(&bytes).context("sending to the server")
    }

    /// Receives the reply to the only request in flight. The data of a read are stored in `data`.
    pub fn receive(&mut self, data: &mut [u8]) -> Result<()> {
        let reply: [u8; 16] = self.take()?;
        let (magic, rest) = reply.split_at(4);
        let (error, cookie) = rest.split_at(4);
        if magic != SIMPLE_REPLY_MAGIC.to_be_bytes() || cookie != self.cookie.to_be_bytes() {
            bail!("a reply to something else: {reply:?}");
        }
        if error != [0; 4] {
            bail!("the request failed: {error:?}");
        }
        self.stream.read_exact(data).context("receiving from the server")
    }

    /// Reads a range.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<()> {
        self.send(READ, offset, data.len() as u32, &[])?;
        self.receive(data)
    }

    /// Writes a range.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.send(WRITE, offset, data.len() as u32, data)?;
        self.receive(&mut [])
    }
}
