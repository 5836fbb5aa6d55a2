//! Hostile NBD client against the server, and hostile server against the decoder of replies.
//!
//! This body checks that
//! * the handshake has the same result, in whatever pieces its bytes arrive;
//! * each request is answered at most once, and no reply is without a request;
//! * the server releases a client that sends a disconnect.

use crate::limits::Limits;
use crate::source::Source;
use rustix::net::SendFlags;
use shadowbell_block::{BlockDevice, BlockOptions};
use shadowbell_export::nbd::handshake::{Export, Handshake, Security, Step};
use shadowbell_export::nbd::reply::Incoming;
use shadowbell_export::nbd::wire::{self, Request};
use shadowbell_export::nbd::{Address, Listener, Options, Server};
use shadowbell_testing::wait::LIMIT;
use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

const BYTES: u64 = 1 << 20;
const REQUESTS: usize = 32;
/// Number of actions of one input.
const ACTIONS: usize = 16;

/// Decodes `input` into actions of a client or a server, and executes them.
pub fn run(input: &[u8]) {
    let mut source = Source::new(input);
    let limits = Limits::begin();
    for _ in 0..ACTIONS {
        if source.is_empty() {
            break;
        }
        match source.below(4) {
            0 => handshake(&mut source),
            1 => replies(&source.bytes(512)),
            _ => converse(&mut source),
        }
        limits.step("nbd");
    }
}

/// Decodes a server's replies.
fn replies(mut bytes: &[u8]) {
    while let Ok(Some((reply, used))) = Incoming::decode(bytes) {
        assert!(used > 0 && used <= bytes.len(), "{reply:?} of {used} bytes");
        bytes = &bytes[used..];
    }
}

/// Sends the client's bytes of a handshake at once and in pieces, and checks that the replies are
/// equal.
fn handshake(source: &mut Source<'_>) {
    let bytes = options(source);
    let whole = negotiate(&[&bytes]);
    let at = source.below(bytes.len() + 1);
    let (front, back) = bytes.split_at(at);
    let apart = negotiate(&[front, back]);
    assert_eq!(whole, apart, "the handshake depends on how the bytes arrive");
    let single: Vec<&[u8]> = bytes.chunks(1).collect();
    assert_eq!(whole, negotiate(&single), "the handshake depends on how the bytes arrive");
}

/// Result of a handshake, its output, and the number of consumed bytes.
fn negotiate(parts: &[&[u8]]) -> (Step, Vec<u8>, usize) {
    let export = Export {
        name: "disk".into(),
        description: "fuzz".into(),
        size: BYTES,
        preferred: 4096,
        flags: 0x6d,
    };
    // Half of the inputs use a server that requires TLS. The bytes after the start of TLS are
    // treated as decrypted.
    let first = parts.iter().find_map(|part| part.first());
    let wants_tls = first.is_some_and(|byte| byte & 1 != 0);
    let security = if wants_tls { Security::Required } else { Security::None };
    let mut handshake = Handshake::new(Arc::new(export), security);
    let (mut input, mut out, mut taken) = (Vec::new(), Vec::new(), 0);
    for part in parts {
        input.extend_from_slice(part);
        loop {
            let (used, step) = handshake.advance(&input, &mut out);
            assert!(used <= input.len());
            input.drain(..used);
            taken += used;
            if !matches!(step, Step::More | Step::BeginTls) {
                return (step, out, taken);
            }
            if used == 0 {
                assert!(input.len() < Handshake::LONGEST, "the handshake makes no progress");
                break;
            }
        }
    }
    (Step::More, out, taken)
}

/// Bytes that a client sends before its requests.
fn options(source: &mut Source<'_>) -> Vec<u8> {
    let flags = if source.rarely(8) { source.u32() } else { 3 };
    let mut bytes = flags.to_be_bytes().to_vec();
    for _ in 0..source.below(8) {
        let mut data = Vec::new();
        let option = source.of(&[7u32, 8, 3, 6, 10, 9, 1, 2, 5, 99]);
        match option {
            6 | 7 => {
                wire::put_string(&mut data, source.of(&["", "disk", "another"]));
                let count = source.below(4) as u16;
                let stated = if source.rarely(6) { source.u16() } else { count };
                data.extend(stated.to_be_bytes());
                data.extend((0..count).flat_map(|n| n.to_be_bytes()));
            }
            9 | 10 => {
                wire::put_string(&mut data, source.of(&["", "disk"]));
                let count = source.below(3) as u32;
                let stated = if source.rarely(6) { source.u32() } else { count };
                data.extend(stated.to_be_bytes());
                for _ in 0..count {
                    let name = source.of(&["base:allocation", "base:", "qemu:", "base:allocatio"]);
                    wire::put_string(&mut data, name);
                }
            }
            1 => data.extend(source.of(&["", "disk", "x"]).bytes()),
            99 => data = source.bytes(40),
            _ => {}
        }
        if source.rarely(8) {
            data.truncate(source.below(data.len() + 1));
        }
        let begin = bytes.len();
        wire::put_option(&mut bytes, option, &data);
        if source.rarely(10) {
            let at = begin + source.below(16);
            bytes[at] ^= source.u8();
        }
    }
    bytes
}

/// Socket of a server with a memory disk in this process. All fuzz programs use the same server.
fn server() -> &'static PathBuf {
    static SERVER: OnceLock<(Server, tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (.., path) = SERVER.get_or_init(|| {
        let disk = shadowbell_disk_file::open(&format!("mem:{BYTES}")).expect("a disk");
        let device = BlockDevice::new(disk, &BlockOptions::default()).expect("a disk");
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("nbd");
        let mut options = Options::default();
        options.name = "disk".into();
        let listener = shadowbell_vfio_user::Listener::bind(&path).expect("a socket");
        let (listener, address) = (Listener::Unix(listener), Address::Unix(path.clone()));
        let server = Server::start(device, listener, address, &options);
        (server.expect("a server"), directory, path)
    });
    path
}

/// Runs one connection from the handshake to its end.
fn converse(source: &mut Source<'_>) {
    let stream = UnixStream::connect(server()).expect("to be let in");
    let timeout = Some(LIMIT);
    stream.set_read_timeout(timeout).expect("a timeout");
    stream.set_write_timeout(timeout).expect("a timeout");
    // True if the handshake is valid, which is usual. Then the test knows which replies are
    // possible.
    let known = !source.rarely(4);
    let structured = source.bool();
    let mut bytes = Vec::new();
    if known {
        bytes.extend(3u32.to_be_bytes());
        if structured {
            wire::put_option(&mut bytes, wire::option::STRUCTURED_REPLY, &[]);
            let mut data = Vec::new();
            wire::put_string(&mut data, "disk");
            data.extend(1u32.to_be_bytes());
            wire::put_string(&mut data, "base:allocation");
            wire::put_option(&mut bytes, wire::option::SET_META_CONTEXT, &data);
        }
        let mut data = Vec::new();
        wire::put_string(&mut data, "");
        data.extend([0, 0]);
        wire::put_option(&mut bytes, wire::option::GO, &data);
    } else {
        bytes = options(source);
    }
    let mut asked = Vec::new();
    for cookie in 0..source.below(REQUESTS) as u64 {
        let len = source.near(&[4096, 512, 1, 0, 8192, 1 << 16]) as u32;
        let request = Request {
            flags: source.of(&[0, 0, 0, 1, 2, 4, 8, 16, 0xffff]),
            command: source.of(&[0, 1, 0, 1, 3, 4, 6, 7, 5, 8]),
            cookie,
            offset: source.near(&[0, 512, 4096, BYTES, BYTES - 4096, 1]),
            // Lengths are mostly small, because the server waits for the data of a long write.
            len: if source.rarely(16) { len } else { len & 0x1_ffff },
        };
        asked.push((request.command, request.len));
        bytes.extend(request.encode());
        if request.payload() as usize <= 1 << 18 {
            bytes.extend(source.pattern(request.payload() as usize));
        }
        if source.rarely(32) {
            bytes.extend(source.bytes(40));
        }
    }
    if source.rarely(4) {
        bytes.truncate(source.below(bytes.len() + 1));
    }
    // True if the client disconnects without reading the replies.
    let mut reader = stream.try_clone().expect("a descriptor");
    let hurry = source.rarely(4);
    let answers = std::thread::spawn(move || {
        let mut answers = Vec::new();
        if !hurry {
            reader.read_to_end(&mut answers).map_err(|error| error.kind()).err();
        }
        answers
    });
    let mut rest = &bytes[..];
    // A call of `write` would raise SIGPIPE when the server disconnects, which libFuzzer reports as
    // a crash.
    while let Ok(len @ 1..) = rustix::net::send(&stream, rest, SendFlags::NOSIGNAL) {
        rest = &rest[len..];
    }
    let _ = stream.shutdown(if hurry { Shutdown::Both } else { Shutdown::Write });
    let answers = answers.join().expect("the reader");
    if known && !hurry {
        check(&answers, structured, &asked);
    }
}

/// Decodes and checks the replies.
fn check(answers: &[u8], structured: bool, asked: &[(u16, u32)]) {
    // The greeting is followed by replies to options, up to the ACK of GO.
    let Some(mut rest) = answers.get(18..) else { return };
    loop {
        let mut reader = wire::Reader(rest);
        let (Some(_), Some(option), Some(answer), Some(len)) =
            (reader.u64(), reader.u32(), reader.u32(), reader.u32())
        else {
            return;
        };
        let Some(_) = reader.bytes(len as usize) else { return };
        rest = reader.0;
        if (option, answer) == (wire::option::GO, wire::answer::ACK) {
            break;
        }
    }
    let mut answered = vec![false; asked.len()];
    let mut once = |cookie: u64| {
        let answered = answered.get_mut(cookie as usize).expect("what is answered was asked");
        assert!(!std::mem::replace(answered, true), "request {cookie} is answered twice");
    };
    loop {
        let reply = Incoming::decode(rest).expect("a reply begins as one");
        let Some((reply, used)) = reply else { return };
        rest = &rest[used..];
        let payload = match reply {
            Incoming::Simple { cookie, error } => {
                once(cookie);
                let (command, len) = asked[cookie as usize];
                assert!(!structured || command != 0, "a read has a structured reply");
                if command == 0 && error == 0 { len as usize } else { 0 }
            }
            Incoming::Chunk(chunk) => {
                assert!(structured, "structured replies were not asked for");
                if chunk.flags & wire::chunk::FLAG_DONE != 0 {
                    once(chunk.cookie);
                }
                chunk.len as usize
            }
        };
        let Some(next) = rest.get(payload..) else { return };
        rest = next;
    }
}
