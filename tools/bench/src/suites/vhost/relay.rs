//! Relay between SPDK's client and QEMU's device, which use different lengths of the device
//! configuration.
//!
//! SPDK requests 256 bytes and accepts no other length. QEMU 7.2 refuses to return more bytes than
//! it has. The relay changes the length in this message and its reply, and forwards all other
//! messages unchanged. I/O requests are in memory that client and device share, so the relay does
//! not affect their speed.

use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Size of the header: request, flags, length.
const HEADER: usize = 12;
const GET_CONFIG: u32 = 24;
/// Size of the configuration header: offset, length, flags.
const CONFIG_HEADER: usize = 12;
/// Length of the configuration in bytes: in SPDK's request, and in QEMU's device.
const SPDK_CONFIG_LEN: usize = 256;
const QEMU_CONFIG_LEN: usize = 60;
/// Maximum number of descriptors, and of bytes, of one message.
const MAX_FDS: usize = 16;
const MAX_MESSAGE: u32 = 1 << 16;

/// Name of the relay's socket, in the server's directory.
pub(crate) const RELAY: &str = "relay.sock";

/// Accepts clients at `path` until the server ends.
pub(crate) fn start(path: PathBuf, server: PathBuf) -> io::Result<()> {
    let listener = UnixListener::bind(path)?;
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let Ok(server) = UnixStream::connect(&server) else { return };
            let _ = join(&client, &server);
        }
    });
    Ok(())
}

fn join(client: &UnixStream, server: &UnixStream) -> io::Result<()> {
    let back = (server.try_clone()?, client.try_clone()?);
    thread::spawn(move || {
        forward(&back.0, &back.1, |message| resize(message, QEMU_CONFIG_LEN, SPDK_CONFIG_LEN))
    });
    let there = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || {
        forward(&there.0, &there.1, |message| resize(message, SPDK_CONFIG_LEN, QEMU_CONFIG_LEN))
    });
    Ok(())
}

/// A message and its descriptors.
struct Message {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

fn forward(from: &UnixStream, to: &UnixStream, change: impl Fn(&mut Vec<u8>)) {
    while let Ok(Some(mut message)) = receive(from) {
        change(&mut message.bytes);
        if send(to, &message).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

/// Changes the length of the configuration in a request or reply from `from` to `to` bytes. Other
/// messages are not changed.
fn resize(message: &mut Vec<u8>, from: usize, to: usize) {
    let is_one = word(message, 0) == GET_CONFIG && message.len() == HEADER + CONFIG_HEADER + from;
    if !is_one {
        return;
    }
    message.resize(HEADER + CONFIG_HEADER + to, 0);
    message[8..12].copy_from_slice(&((CONFIG_HEADER + to) as u32).to_ne_bytes());
    message[16..20].copy_from_slice(&(to as u32).to_ne_bytes());
}

/// Receives a message; `None` at the end.
fn receive(from: &UnixStream) -> io::Result<Option<Message>> {
    let mut bytes = vec![0; HEADER];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(from, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    if got == 0 {
        return Ok(None);
    }
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let mut from = from;
    from.read_exact(&mut bytes[got..])?;
    let len = word(&bytes, 8);
    if len > MAX_MESSAGE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    bytes.resize(HEADER + len as usize, 0);
    from.read_exact(&mut bytes[HEADER..])?;
    Ok(Some(Message { bytes, fds }))
}

fn send(to: &UnixStream, message: &Message) -> io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = message.fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let sent = sendmsg(to, &[IoSlice::new(&message.bytes)], &mut control, SendFlags::empty())?;
    let mut to = to;
    to.write_all(&message.bytes[sent..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(request: u32, payload: usize) -> Vec<u8> {
        let words = [request, 1, payload as u32, 0, 256, 0];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.resize(HEADER + payload, 7);
        bytes
    }

    #[test]
    fn messages_are_relayed_and_the_configuration_is_resized() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let server = UnixListener::bind(at("server")).unwrap();
        start(at("relay"), at("server")).unwrap();
        let client = UnixStream::connect(at("relay")).unwrap();
        let (server, _) = server.accept().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let fds = vec![file.into()];
        send(&client, &Message { bytes: message(5, 16), fds }).unwrap();
        let got = receive(&server).unwrap().unwrap();
        assert_eq!((got.bytes, got.fds.len()), (message(5, 16), 1));
        send(&client, &Message { bytes: message(GET_CONFIG, 268), fds: Vec::new() }).unwrap();
        let got = receive(&server).unwrap().unwrap();
        assert_eq!((got.bytes.len(), word(&got.bytes, 8), word(&got.bytes, 16)), (84, 72, 60));
        send(&server, &got).unwrap();
        let got = receive(&client).unwrap().unwrap();
        assert_eq!((got.bytes.len(), word(&got.bytes, 8), word(&got.bytes, 16)), (280, 268, 256));
        drop(server);
        assert!(receive(&client).unwrap().is_none());
    }
}
