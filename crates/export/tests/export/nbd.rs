//! NBD server with valid, slow, silent and hostile clients.

use crate::client::{Client, serve};
use proptest::prelude::*;
use shadowbell_disk::{Disk, DiskError, Op};
use shadowbell_disk_layers::{ErrorPolicy, HoldingDisk};
use shadowbell_export::nbd::wire::{
    NbdError, Request, command, flag, option, put_option, transmission,
};
use shadowbell_export::nbd::{Address, Listener, Options, Server};
use shadowbell_testing::test_disk::TestDisk;
use shadowbell_testing::wait;
use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) struct Rig {
    pub(crate) backing: TestDisk,
    server: Option<Server>,
    directory: TempDir,
}

impl Rig {
    pub(crate) fn new(blocks: u64, options: &shadowbell_block::BlockOptions) -> Self {
        Self::with(blocks, options, &Options::default())
    }

    pub(crate) fn with(
        blocks: u64,
        options: &shadowbell_block::BlockOptions,
        served: &Options,
    ) -> Self {
        Self::over(TestDisk::new(blocks, 512), options, served)
    }

    /// Starts a server of this disk.
    pub(crate) fn over(
        backing: TestDisk,
        options: &shadowbell_block::BlockOptions,
        served: &Options,
    ) -> Self {
        let disk = Arc::new(backing.clone());
        Self::around(backing, disk, options, served)
    }

    /// Starts a server of `disk`, whose storage is `backing`.
    fn around(
        backing: TestDisk,
        disk: Arc<dyn Disk>,
        options: &shadowbell_block::BlockOptions,
        served: &Options,
    ) -> Self {
        let disk = shadowbell_block::BlockDevice::new(disk, options).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let server = Some(serve(disk, &directory.path().join("nbd"), served));
        Self { backing, server, directory }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("nbd")
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.socket(), true)
    }

    /// Stops the server.
    pub(crate) fn end(mut self) {
        let _ = self.server.take().unwrap().stop();
        assert!(!self.socket().exists(), "the socket's file is gone");
    }

    /// Checks that the server still serves a new client.
    fn continues(&self) {
        let mut client = self.client();
        assert_eq!(client.run(command::READ, 0, 0, 512, b"").error, 0);
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // A failed test may leave requests held by the disk. They are released here, because the
        // server cannot stop before they complete.
        self.backing.instruct(|instructions| {
            (instructions.hold, instructions.hold_at, instructions.hold_extents) =
                (false, None, false);
        });
    }
}

fn rig() -> Rig {
    Rig::new(4096, &shadowbell_block::BlockOptions::default())
}

const EINVAL: u32 = NbdError::Inval as u32;
const EIO: u32 = NbdError::Io as u32;
const EPERM: u32 = NbdError::Perm as u32;
const ENOSPC: u32 = NbdError::NoSpc as u32;

#[test]
fn every_request_in_both_kinds_of_reply() {
    let rig = rig();
    for structured in [true, false] {
        let mut client = Client::connect(&rig.socket(), structured);
        assert_eq!(client.size, 4096 * 512);
        let expected = transmission::HAS_FLAGS
            | transmission::SEND_FLUSH
            | transmission::SEND_FUA
            | transmission::SEND_TRIM
            | transmission::SEND_WRITE_ZEROES
            | transmission::CAN_MULTI_CONN
            | transmission::SEND_CACHE
            | transmission::SEND_FAST_ZERO;
        let df = if structured { transmission::SEND_DF } else { 0 };
        assert_eq!(client.flags, expected | df);
        assert_eq!(client.run(command::WRITE, flag::FUA, 1000, 5, b"hello").error, 0);
        assert_eq!(client.run(command::READ, 0, 999, 7, b"").data, b"\0hello\0");
        assert_eq!(client.run(command::WRITE_ZEROES, flag::NO_HOLE, 1001, 2, b"").error, 0);
        assert_eq!(client.run(command::READ, 0, 999, 7, b"").data, b"\0h\0\0lo\0");
        assert_eq!(client.run(command::WRITE_ZEROES, flag::FAST_ZERO, 0, 4096, b"").error, 0);
        assert_eq!(client.run(command::READ, 0, 999, 7, b"").data, [0; 7]);
        assert_eq!(client.run(command::TRIM, flag::FUA, 0, 4096, b"").error, 0);
        assert_eq!(client.run(command::CACHE, 0, 0, 4096, b"").error, 0);
        assert_eq!(client.run(command::FLUSH, 0, 0, 0, b"").error, 0);
        assert_eq!(client.run(command::READ, 0, 4096 * 512, 0, b"").error, 0);
        assert_eq!(client.run(command::WRITE, 0, 4096 * 512, 0, b"").error, 0);
        let status = client.run(command::BLOCK_STATUS, 0, 512, 1 << 20, b"");
        if structured {
            assert_eq!((status.error, status.extents), (0, vec![(1 << 20, 0)]));
        } else {
            assert_eq!(status.error, EINVAL);
        }
        let flushes = rig.backing.seen().iter().filter(|seen| seen.op == Op::Flush).count();
        assert!(flushes >= 2, "of FLUSH, and of TRIM with FUA");
        client.ask(command::DISC, 0, 0, 0, b"");
        assert!(client.is_over());
    }
    rig.end();
}

#[test]
fn invalid_requests_are_refused_and_the_session_continues() {
    let rig = rig();
    let size = 4096 * 512;
    for structured in [true, false] {
        let mut client = Client::connect(&rig.socket(), structured);
        for (command, flags, offset, len, error) in [
            (command::READ, 0, size, 1, EINVAL),
            (command::READ, 0, u64::MAX, 2, EINVAL),
            (command::READ, 0, 0, u32::MAX, EINVAL),
            (command::READ, 1 << 14, 0, 512, EINVAL),
            (command::TRIM, 0, size - 1, 2, EINVAL),
            (command::WRITE_ZEROES, 0, size - 1, 2, ENOSPC),
            (command::WRITE_ZEROES, 0, 0, u32::MAX, ENOSPC),
            (8, 0, 0, 0, EINVAL),
            (u16::MAX, 0, 0, 0, EINVAL),
        ] {
            assert_eq!(client.run(command, flags, offset, len, b"").error, error);
        }
        // The server discards the data of the refused write, and decodes the next request
        // correctly.
        assert_eq!(client.run(command::WRITE, 0, size - 1, 4, b"data").error, ENOSPC);
        assert_eq!(client.run(command::READ, 0, size - 4, 4, b"").data, [0; 4]);
    }
    rig.end();
}

#[test]
fn replies_are_sent_in_order_of_completion() {
    let rig = rig();
    let mut client = rig.client();
    rig.backing.instruct(|instructions| instructions.hold_at = Some(8192));
    let slow = client.ask(command::READ, 0, 8192, 512, b"");
    let fast: Vec<_> = (0..50).map(|i| client.ask(command::READ, 0, i * 100, 100, b"")).collect();
    let mut answered: Vec<_> = fast.iter().map(|_| client.reply().cookie).collect();
    answered.sort_unstable();
    assert_eq!(answered, fast);
    rig.backing.instruct(|instructions| instructions.hold_at = None);
    assert_eq!(client.reply().cookie, slow);
    rig.end();
}

/// Concurrent clients. Each has many requests in flight, on its own bytes of the disk.
#[test]
fn clients_do_not_disturb_each_other() {
    const CLIENTS: u64 = 4;
    const SLICE: u64 = 1000;
    const ROUNDS: u64 = 300;
    let rig = rig();
    std::thread::scope(|scope| {
        for me in 0..CLIENTS {
            let path = rig.socket();
            scope.spawn(move || {
                let mut client = Client::connect(&path, me % 2 == 0);
                let mut random = 0x1234_5678_9abc_def1u64 ^ me;
                let mut model: BTreeMap<u64, u8> = BTreeMap::new();
                let mut under_way: BTreeMap<u64, (u64, u32, Option<u8>)> = BTreeMap::new();
                for round in 0..ROUNDS {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let at = (random >> 8) % (2048 / CLIENTS) * CLIENTS * SLICE + me * SLICE;
                    let len = (random >> 40) % SLICE + 1;
                    if under_way.values().any(|(other, ..)| *other == at)
                        || at + SLICE > client.size
                    {
                        continue;
                    }
                    let cookie = match random % 3 {
                        0 => {
                            let byte = round as u8 | 1;
                            (at..at + len).for_each(|at| _ = model.insert(at, byte));
                            client.ask(command::WRITE, 0, at, len as u32, &vec![byte; len as usize])
                        }
                        1 => {
                            (at..at + len).for_each(|at| _ = model.remove(&at));
                            client.ask(command::WRITE_ZEROES, 0, at, len as u32, b"")
                        }
                        _ => client.ask(command::READ, 0, at, len as u32, b""),
                    };
                    let read = (random % 3 == 2).then_some(0);
                    under_way.insert(cookie, (at, len as u32, read));
                    while under_way.len() > 20 || (round + 1 == ROUNDS && !under_way.is_empty()) {
                        take(&mut client, &mut under_way, &model);
                    }
                }
                while !under_way.is_empty() {
                    take(&mut client, &mut under_way, &model);
                }
                let written = model.iter().map(|(at, byte)| {
                    assert_eq!(client.run(command::READ, 0, *at, 1, b"").data, [*byte]);
                });
                written.step_by(97).count();
            });
        }
    });
    rig.end();
}

fn take(
    client: &mut Client,
    under_way: &mut BTreeMap<u64, (u64, u32, Option<u8>)>,
    model: &BTreeMap<u64, u8>,
) {
    let reply = client.reply();
    let (at, len, read) = under_way.remove(&reply.cookie).expect("a reply to no request");
    assert_eq!(reply.error, 0);
    if read.is_some() {
        let expected: Vec<_> =
            (at..at + u64::from(len)).map(|at| model.get(&at).copied().unwrap_or(0)).collect();
        assert!(reply.data == expected, "{len} bytes at {at}");
    }
}

#[test]
fn a_client_that_reads_no_replies_is_not_read_from() {
    let rig = Rig::new(1 << 17, &shadowbell_block::BlockOptions::default());
    let mut client = rig.client();
    const REQUESTS: u64 = 300;
    const LEN: u32 = 256 << 10;
    for _ in 0..REQUESTS {
        client.ask(command::READ, 0, 0, LEN, b"");
    }
    // Waits until the server submits no more requests to the disk.
    let mut seen = 0;
    loop {
        // If the disk gets no request in this time, the server has stopped reading ahead.
        std::thread::sleep(Duration::from_millis(200));
        let now = rig.backing.seen().len();
        if now == seen && now > 0 {
            break;
        }
        seen = now;
    }
    let bytes: u64 = rig.backing.seen().iter().map(|seen| seen.len).sum();
    // The client reads no reply. So the server reads data from the disk only until the socket's
    // buffer and its own buffer for this client are full.
    assert!(bytes <= 10 << 20, "{} MiB are held for one client", bytes >> 20);
    rig.continues();
    for _ in 0..REQUESTS {
        assert_eq!(client.reply().data.len(), LEN as usize);
    }
    rig.end();
}

/// Test data: the block number in the first 8 bytes of each block.
fn numbered(bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    for (n, block) in data.chunks_exact_mut(512).enumerate() {
        block[..8].copy_from_slice(&(n as u64).to_le_bytes());
    }
    data
}

#[test]
fn a_long_read_proceeds_as_the_client_receives_the_reply() {
    const LEN: u32 = 20 << 20;
    let rig = Rig::new(1 << 16, &shadowbell_block::BlockOptions::default());
    let mut writer = rig.client();
    let data = numbered(LEN as usize + 8 * 512);
    assert_eq!(writer.run(command::WRITE, 0, 0, data.len() as u32, &data).error, 0);
    let read = || -> u64 {
        let seen = rig.backing.seen();
        seen.iter().filter(|seen| seen.op == Op::Read).map(|seen| seen.len).sum()
    };
    // Three kinds of reply: structured in several chunks, structured in one chunk, and simple.
    for (structured, flags) in [(true, 0), (true, flag::DF), (false, 0)] {
        let before = read();
        let mut client = Client::connect(&rig.socket(), structured);
        client.ask(command::READ, flags, 512, LEN, b"");
        let mut seen = 0;
        loop {
            // If the disk reads nothing in this time, the server has stopped reading ahead.
            std::thread::sleep(Duration::from_millis(100));
            let now = read();
            if now == seen && now > before {
                break;
            }
            seen = now;
        }
        assert!(seen - before <= 6 << 20, "{} MiB are held", (seen - before) >> 20);
        let reply = client.reply();
        assert!(
            reply.error == 0 && reply.data == data[512..512 + LEN as usize],
            "structured: {structured}"
        );
        // Short and long reads are in flight together, so their replies may be reordered.
        let mut asked: Vec<u64> = Vec::new();
        for n in 0..8u64 {
            asked.push(client.ask(command::READ, flags, n * 512, 512, b""));
            if n % 3 == 0 && (!structured || flags != 0) {
                asked.push(client.ask(command::READ, flags, n * 512, LEN, b""));
            }
        }
        while !asked.is_empty() {
            let reply = client.reply();
            let at = asked.iter().position(|cookie| *cookie == reply.cookie).unwrap();
            asked.swap_remove(at);
            let first = u64::from_le_bytes(reply.data[..8].try_into().unwrap()) as usize * 512;
            assert!(reply.data == data[first..first + reply.data.len()]);
        }
    }
    rig.end();
}

#[test]
fn a_long_read_that_fails_in_its_middle_is_no_success() {
    const LEN: u32 = 8 << 20;
    let rig = Rig::new(1 << 16, &shadowbell_block::BlockOptions::default());
    rig.backing.instruct(|instructions| instructions.fail_beyond = Some(4 << 20));
    for (structured, flags) in [(true, 0), (true, flag::DF), (false, 0)] {
        let mut client = Client::connect(&rig.socket(), structured);
        client.ask(command::READ, flags, 0, LEN, b"");
        if structured && flags == 0 {
            let reply = client.reply();
            assert_eq!((reply.error, reply.data.len()), (EIO, 4 << 20));
            // An error chunk leaves the connection usable.
            assert_eq!(client.run(command::READ, 0, 0, 512, b"").error, 0);
        } else {
            // The header of the reply has already announced success before the read failed. So the
            // server cannot report the error, and closes the connection.
            let head = if structured { 20 + 8 } else { 16 };
            client.bytes(head + (4 << 20));
            assert!(client.is_over());
        }
    }
    rig.continues();
    rig.end();
}

#[test]
fn more_requests_than_places_wait_and_are_all_answered() {
    let rig = rig();
    let mut client = rig.client();
    rig.backing.instruct(|instructions| instructions.hold = true);
    // A separate thread sends the requests: the server stops reading at its limit of requests in
    // flight, and then the sender blocks.
    let mut cookies: Vec<_> = (1..=1000).collect();
    let mut writer = client.socket.try_clone().unwrap();
    let writing = std::thread::spawn(move || {
        for cookie in 1..=1000 {
            let (offset, len) = (cookie * 512, 512);
            let request = Request { flags: 0, command: command::WRITE, cookie, offset, len };
            writer.write_all(&request.encode()).unwrap();
            writer.write_all(&[1; 512]).unwrap();
        }
    });
    rig.backing.expect(100);
    rig.backing.instruct(|instructions| instructions.hold = false);
    let mut answered: Vec<_> = cookies
        .iter()
        .map(|_| {
            let reply = client.reply();
            assert_eq!(reply.error, 0);
            reply.cookie
        })
        .collect();
    answered.sort_unstable();
    cookies.sort_unstable();
    assert_eq!(answered, cookies);
    writing.join().unwrap();
    rig.end();
}

#[test]
fn a_read_only_export_announces_and_enforces_it() {
    let mut options = shadowbell_block::BlockOptions::default();
    options.read_only = true;
    let rig = Rig::new(4096, &options);
    let mut client = rig.client();
    assert_ne!(client.flags & transmission::READ_ONLY, 0);
    assert_eq!(client.flags & (transmission::SEND_TRIM | transmission::SEND_WRITE_ZEROES), 0);
    assert_eq!(client.run(command::WRITE, 0, 0, 4, b"data").error, EPERM);
    assert_eq!(client.run(command::WRITE_ZEROES, 0, 0, 512, b"").error, EPERM);
    assert_eq!(client.run(command::TRIM, 0, 0, 512, b"").error, EPERM);
    assert_eq!(client.run(command::READ, 0, 0, 4, b"").data, [0; 4]);
    assert_eq!(client.run(command::FLUSH, 0, 0, 0, b"").error, 0);
    rig.end();
}

#[test]
fn a_disk_that_fails_is_an_error_to_the_client_and_no_end() {
    let rig = rig();
    let mut client = rig.client();
    for (failure, error) in [(DiskError::Io(5), EIO), (DiskError::NoSpace, ENOSPC)] {
        rig.backing.instruct(|instructions| instructions.fail = Some(failure));
        assert_eq!(client.run(command::WRITE, 0, 0, 512, &[1; 512]).error, error);
        assert_eq!(client.run(command::WRITE, 0, 1, 100_000, &[1; 100_000]).error, error);
        rig.backing.instruct(|instructions| instructions.fail = None);
        assert_eq!(client.run(command::WRITE, 0, 1, 100_000, &[1; 100_000]).error, 0);
    }
    assert_eq!(rig.server.as_ref().unwrap().failures(), 4);
    rig.end();
}

#[test]
fn a_disk_that_is_removed_is_an_error_and_the_server_ends_all_the_same() {
    let mut rig = rig();
    let mut client = rig.client();
    rig.backing.instruct(|instructions| instructions.unavailable = true);
    for _ in 0..300 {
        assert_eq!(client.run(command::READ, 0, 0, 100_000, b"").error, EIO);
        assert_eq!(client.run(command::WRITE, 0, 3, 4, b"data").error, EIO);
        assert_eq!(client.run(command::FLUSH, 0, 0, 0, b"").error, EIO);
    }
    let _ = rig.server.take().unwrap().stop();
    assert!(client.is_over());
}

#[test]
fn a_stop_completes_received_requests() {
    let mut rig = rig();
    let mut client = rig.client();
    rig.backing.instruct(|instructions| instructions.hold = true);
    let cookies: Vec<_> =
        (0..10).map(|i| client.ask(command::WRITE, 0, i * 512, 512, &[7; 512])).collect();
    rig.backing.expect(10);
    // When the server stops, it does not wait for the rest of this partial request.
    client.socket.write_all(&[0x25, 0x60, 0x95]).unwrap();
    let server = rig.server.take().unwrap();
    let stopping = std::thread::spawn(move || server.stop());
    wait::short_pause();
    assert!(!stopping.is_finished(), "it waits for the disk");
    rig.backing.instruct(|instructions| instructions.hold = false);
    for cookie in cookies {
        let reply = client.reply();
        assert_eq!((reply.cookie, reply.error), (cookie, 0));
    }
    assert!(client.is_over());
    stopping.join().unwrap();
    let mut bytes = [0; 5120];
    rig.backing.mem.bytes().read_into(0, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 5120]);
}

/// Held requests end only when the operator resumes the disk. The client connects again, and
/// repeats its requests that have no reply.
#[test]
fn a_stop_does_not_wait_for_requests_of_a_stopped_disk() {
    // A single stop may take long on a busy machine, so the test is repeated until one stop is
    // quick.
    wait::until("a stop that does not wait", || {
        let backing = TestDisk::new(4096, 512);
        let disk = HoldingDisk::wrap(Arc::new(backing.clone()), ErrorPolicy::Stop);
        let (held, options) = (Arc::clone(&disk), shadowbell_block::BlockOptions::default());
        let rig = Rig::around(backing, disk, &options, &Options::default());
        let mut client = rig.client();
        rig.backing.instruct(|instructions| instructions.fail = Some(DiskError::NoSpace));
        client.ask(command::WRITE, 0, 0, 512, &[1; 512]);
        wait::until("a held write", || held.stopped().is_some());
        // The write of another client fails only after the end has begun.
        rig.backing.instruct(|instructions| instructions.hold_at = Some(8192));
        let mut other = rig.client();
        other.ask(command::WRITE, 0, 8192, 512, &[1; 512]);
        rig.backing.expect(2);
        let (backing, began) = (rig.backing.clone(), Instant::now());
        let stopping = std::thread::spawn(move || rig.end());
        assert!(client.is_over());
        backing.instruct(|instructions| instructions.hold_at = None);
        assert!(other.is_over());
        stopping.join().unwrap();
        assert_eq!(held.stopped(), None);
        // The limit is that of the next test.
        began.elapsed() < Duration::from_secs(4)
    });
}

#[test]
fn a_stop_does_not_wait_for_silent_clients() {
    // A single stop may take long on a busy machine, so the test is repeated until one stop is
    // quick.
    wait::until("a stop that does not wait", || {
        let mut rig = rig();
        let silent = UnixStream::connect(rig.socket()).unwrap();
        let mut greeted = Client::greeted(&rig.socket());
        let mut idle = rig.client();
        let began = Instant::now();
        let _ = rig.server.take().unwrap().stop();
        // Limit for a quick stop. It is shorter than the time that a stopping server grants to a
        // client that does not read its replies.
        let is_quick = began.elapsed() < Duration::from_secs(4);
        assert!(greeted.is_over() && idle.is_over());
        drop(silent);
        is_quick
    });
}

#[test]
fn clients_that_disconnect_in_a_message_leak_nothing() {
    let rig = rig();
    for round in 0..40 {
        let mut client = rig.client();
        for i in 0..round {
            client.ask(command::READ, 0, i * 1000, 50_000, b"");
        }
        if round % 2 == 0 {
            let mut write = client.socket.try_clone().unwrap();
            client.ask(command::READ, 0, 0, 512, b"");
            // The first bytes of a write request.
            write.write_all(&[0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1]).unwrap();
        }
        drop(client);
    }
    rig.continues();
    rig.end();
}

/// Clients that stay silent in the handshake are evicted. Clients that have completed the handshake
/// are not.
#[test]
fn silent_clients_make_room() {
    let rig = rig();
    let mut first = rig.client();
    let silent: Vec<_> = (0..150).map(|_| Client::greeted(&rig.socket())).collect();
    let mut last = rig.client();
    for client in [&mut first, &mut last] {
        assert_eq!(client.run(command::READ, 0, 0, 512, b"").error, 0);
    }
    drop(silent);
    drop((first, last));
    rig.end();
}

#[test]
fn clients_beyond_the_limit_are_disconnected() {
    let mut options = Options::default();
    options.max_clients = 2;
    let rig = Rig::with(64, &shadowbell_block::BlockOptions::default(), &options);
    let clients = [rig.client(), rig.client()];
    let mut third = UnixStream::connect(rig.socket()).unwrap();
    assert_eq!(std::io::Read::read(&mut third, &mut [0; 10]).unwrap(), 0);
    drop(clients);
    wait::until("another client", || {
        let mut one = UnixStream::connect(rig.socket()).unwrap();
        matches!(std::io::Read::read(&mut one, &mut [0; 10]), Ok(n) if n > 0)
    });
    rig.end();
}

#[test]
fn clients_that_violate_the_protocol_are_disconnected() {
    let rig = rig();
    let mut client = rig.client();
    client.socket.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    assert!(client.is_over());
    let mut client = rig.client();
    client.ask(command::WRITE, 0, 0, (32 << 20) + 1, b"");
    assert!(client.is_over());
    let mut client = Client::greeted(&rig.socket());
    let mut option = Vec::new();
    put_option(&mut option, option::EXPORT_NAME, b"another");
    client.socket.write_all(&option).unwrap();
    assert!(client.is_over());
    rig.continues();
    rig.end();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn no_client_input_ends_the_server(
        frames in prop::collection::vec(
            (0u16..12, any::<u16>(), prop_oneof![0u64..3_000_000, any::<u64>()],
             prop_oneof![0u32..200_000, any::<u32>()]), 0..30),
        garbage in prop::collection::vec(any::<u8>(), 0..300),
        cut in 0usize..4000,
    ) {
        let rig = rig();
        let mut client = rig.client();
        let mut bytes = Vec::new();
        for (command, flags, offset, len) in frames {
            let request = Request {
                flags: flags & 0x1f, command, cookie: 7, offset, len: len % 100_000,
            };
            bytes.extend(request.encode());
            bytes.extend(vec![3; request.payload() as usize]);
        }
        bytes.extend(&garbage);
        bytes.truncate(bytes.len().saturating_sub(cut));
        // The server may close the connection at any byte.
        let _ = client.socket.write_all(&bytes);
        drop(client);
        rig.continues();
        rig.end();
    }
}

#[test]
fn a_client_connects_by_tcp() {
    let rig = rig();
    let disk = Arc::new(rig.backing.clone());
    let disk = shadowbell_block::BlockDevice::new(disk, &shadowbell_block::BlockOptions::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let (listener, options) = (Listener::Tcp(listener), Options::default());
    let server = Server::start(disk.unwrap(), listener, Address::Tcp(address), &options).unwrap();
    let mut client = std::net::TcpStream::connect(address).unwrap();
    let mut greeting = [0; 18];
    std::io::Read::read_exact(&mut client, &mut greeting).unwrap();
    assert_eq!(server.stop(), 0);
    rig.end();
}
