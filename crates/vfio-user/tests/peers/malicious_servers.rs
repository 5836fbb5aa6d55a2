//! Tests of the client with malicious servers.

use crate::common;
use shadowbell_testing::wait::{LIMIT, pause};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use common::*;
use proptest::prelude::*;
use shadowbell_vfio_user::Errno;
use shadowbell_vfio_user::client::{Client, ClientError, Options, ShortWrite};
use shadowbell_vfio_user::device::DmaUnmap;
use shadowbell_vfio_user::wire::{self, Header, command, header_flags, region_flags};
use zerocopy::IntoBytes;

/// Connects a client to a server that replies correctly to VERSION. To every other message, it
/// sends the bytes that `answer` returns.
fn fake_server(
    answer: impl FnMut(&Header, &[u8]) -> Vec<u8> + Send + 'static,
) -> (Result<Client, ClientError>, JoinHandle<()>) {
    fake_server_with_timeout(LIMIT, answer)
}

/// Connects a client as [`fake_server`] does, with this timeout for replies.
fn fake_server_with_timeout(
    timeout: Duration,
    mut answer: impl FnMut(&Header, &[u8]) -> Vec<u8> + Send + 'static,
) -> (Result<Client, ClientError>, JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        let mut header = [0; 16];
        while theirs.read_exact(&mut header).is_ok() {
            let header: Header = zerocopy::transmute!(header);
            let mut payload = vec![0; header.size as usize - 16];
            theirs.read_exact(&mut payload).unwrap();
            let bytes = match header.command {
                command::VERSION => reply(&header, 0, &[0, 0, 1, 0]),
                _ => answer(&header, &payload),
            };
            if bytes.is_empty() || theirs.write_all(&bytes).is_err() {
                break;
            }
        }
    });
    let options = Options { timeout: Some(timeout) };
    (Client::from_stream(ours.into(), options), server)
}

fn reply(to: &Header, error: u32, payload: &[u8]) -> Vec<u8> {
    let flags = header_flags::REPLY | if error != 0 { header_flags::ERROR } else { 0 };
    let size = 16 + payload.len() as u32;
    let header = Header { id: to.id, command: to.command, size, flags, error };
    [header.as_bytes(), payload].concat()
}

/// Runs `request` with a server that replies with `answer`. Returns the error, and checks that the
/// error has ended the connection.
fn fails<T: std::fmt::Debug>(
    answer: impl FnMut(&Header, &[u8]) -> Vec<u8> + Send + 'static,
    request: impl Fn(&Client) -> Result<T, ClientError>,
) -> ClientError {
    let (client, server) = fake_server(answer);
    let client = client.unwrap();
    let error = request(&client).unwrap_err();
    assert!(matches!(client.reset(), Err(ClientError::Broken)), "after {error}");
    drop(client);
    server.join().unwrap();
    error
}

#[test]
fn invalid_replies_are_errors() {
    let bad = |error: ClientError| {
        assert!(matches!(error, ClientError::BadReply { .. }), "{error}");
        error.to_string()
    };
    let info = |client: &Client| client.device_info();
    let read = |client: &Client| client.region_read(0, 0, &mut [0; 4]);
    // The payload is valid, but the message identifier is that of another request.
    let good = wire::DeviceInfo { argsz: 16, flags: 3, num_regions: 9, num_irqs: 5 };
    let other_id =
        move |to: &Header, _: &[u8]| reply(&Header { id: to.id + 1, ..*to }, 0, good.as_bytes());
    bad(fails(other_id, info));
    let other_command =
        move |to: &Header, _: &[u8]| reply(&Header { command: 9, ..*to }, 0, good.as_bytes());
    bad(fails(other_command, info));
    bad(fails(|to, _| reply(to, 0, &[0; 15]), info));
    // The reply describes a device that is not a PCI device.
    bad(fails(|to, _| reply(to, 0, &[0; 16]), info));
    // Replies with too little data, with too much data, and with a wrong count.
    let short = bad(fails(|to, _| reply(to, 0, &[0; 19]), read));
    assert_eq!(short, "the server's reply to REGION_READ is invalid: 3 bytes instead of 4");
    bad(fails(|to, _| reply(to, 0, &[0; 21]), read));
    bad(fails(|to, _| reply(to, 0, &[0; 20]), read));
    bad(fails(|to, _| reply(to, 0, &[0; 16]), |client| client.region_write(0, 0, &[1])));
    // The bytes are not a message.
    bad(fails(|_, _| vec![0; 16], info));
    bad(fails(|_, _| vec![0xff; 64], info));
    // The reply describes another interrupt index than the requested one.
    bad(fails(|to, _| reply(to, 0, &[9; 16]), |client| client.irq_info(2)));
}

#[test]
fn a_silent_slow_or_dead_server_is_an_error() {
    let info = |client: &Client| client.device_info();
    assert!(matches!(fails(|_, _| Vec::new(), info), ClientError::Socket(_)));
    let (ours, theirs) = UnixStream::pair().unwrap();
    // The limit is short, because the test waits for its expiry.
    let options = Options { timeout: Some(Duration::from_millis(100)) };
    let error = Client::from_stream(ours.into(), options).unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    drop(theirs);

    // The server sends its reply byte by byte, without end.
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let drip = std::thread::spawn(move || {
        let header = Header { id: 0, command: 1, size: 1 << 20, flags: 1, error: 0 };
        for byte in header.as_bytes().iter().chain(std::iter::repeat(&0)) {
            if theirs.write_all(&[*byte]).is_err() {
                break;
            }
            pause();
        }
    });
    // This limit must expire although further bytes of the reply continue to arrive. It is short,
    // because the test waits for it.
    let options = Options { timeout: Some(Duration::from_millis(100)) };
    let error = Client::from_stream(ours.into(), options).unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    drip.join().unwrap();
}

#[test]
fn an_error_without_a_number_is_an_error() {
    let (client, server) = fake_server(|to, _| {
        let mut bytes = reply(to, 1, &[]);
        bytes[12..16].fill(if to.id == 1 { 0 } else { 0xff });
        bytes
    });
    let client = client.unwrap();
    for _ in 0..2 {
        let error = client.reset().unwrap_err();
        assert!(matches!(error, ClientError::Refused { errno: Errno::IO, .. }), "{error}");
    }
    drop(client);
    server.join().unwrap();
}

#[test]
fn commands_of_the_server_are_refused() {
    // The server sends a command before each reply, and reads the client's reply to that command.
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut server = Raw::new(theirs);
    let server = std::thread::spawn(move || {
        let hello = server.reply();
        server.send(&reply(&hello.header, 0, &[0, 0, 1, 0]));
        let asked = server.reply();
        let dma = server.message(command::DMA_READ, 0, &[&[0; 16]]);
        server.send(&dma);
        server.send(&dma);
        server.send(&reply(&asked.header, 0, &[]));
        for _ in 0..2 {
            assert_eq!(server.reply().errno(), Errno::OPNOTSUPP);
        }
    });
    let client = Client::from_stream(ours.into(), Options::default()).unwrap();
    client.reset().unwrap();
    server.join().unwrap();
}

#[test]
fn a_server_of_another_version_is_refused() {
    for version in [[1, 0, 0, 0], [0, 0, 2, 0]] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut server = Raw::new(theirs);
        let server = std::thread::spawn(move || {
            let hello = server.reply();
            assert_eq!(hello.payload[..4], [0, 0, 1, 0]);
            server.send(&reply(&hello.header, 0, &version));
        });
        let error = Client::from_stream(ours.into(), Options::default()).unwrap_err();
        assert!(matches!(error, ClientError::BadReply { .. }), "{error}");
        server.join().unwrap();
    }
}

#[test]
fn a_server_that_cannot_write_several_gets_them_one_by_one() {
    let writes = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = Arc::clone(&writes);
    let (client, server) = fake_server(move |to, payload| {
        seen.lock().unwrap().push((to.command, to.no_reply(), payload.len()));
        if to.no_reply() { vec![] } else { reply(to, 0, &payload[..16]) }
    });
    let client = client.unwrap();
    assert!(!client.server().write_multiple);
    let two = [
        ShortWrite { region: 0, offset: 0, data: &[1; 4] },
        ShortWrite { region: 0, offset: 8, data: &[1; 8] },
    ];
    client.region_write_multi(&two, false).unwrap();
    client.region_write_multi(&two[..1], true).unwrap();
    drop(client);
    server.join().unwrap();
    let write = command::REGION_WRITE;
    assert_eq!(
        *writes.lock().unwrap(),
        [(write, false, 20), (write, false, 24), (write, true, 20)]
    );
}

/// Reply that describes region 2, with these capabilities.
fn described(
    argsz: u32,
    flags: u32,
    cap_offset: u32,
    capabilities: &[u8],
) -> impl FnMut(&Header, &[u8]) -> Vec<u8> + Send + 'static {
    let info = wire::RegionInfo { argsz, flags, index: 2, cap_offset, size: 0x4000, offset: 0 };
    let payload = [info.as_bytes(), capabilities].concat();
    move |to, _| reply(to, 0, &payload)
}

#[test]
fn invalid_region_capabilities_are_refused() {
    let flags = region_flags::MMAP | region_flags::CAPS;
    let capability = |id: u16, next: u32| {
        let header = wire::CapabilityHeader { id, version: 1, next };
        [header.as_bytes(), &[0; 8]].concat()
    };
    let cases: Vec<(u32, u32, Vec<u8>)> = vec![
        // Invalid offsets of capabilities: a loop, a step back, an offset beyond the reply, and one
        // inside of the structure before the capabilities. In the last case, the capability is
        // truncated.
        (48, 32, capability(9, 32)),
        (64, 48, [capability(9, 0), capability(9, 32)].concat()),
        (48, 32, capability(9, 4711)),
        (48, 8, capability(1, 0)),
        (48, u32::MAX, capability(1, 0)),
        (40, 32, capability(1, 0)[..7].to_vec()),
        (44, 32, capability(1, 0)[..12].to_vec()),
        // The reply announces more areas than it contains.
        (48, 32, [&capability(1, 0)[..8], &u32::MAX.to_ne_bytes(), &[0; 4]].concat()),
        // The area refers to a descriptor, but the reply has none. The reply after it has no area.
        (64, 32, [&capability(1, 0)[..8], &[1, 0, 0, 0, 0, 0, 0, 0], &[0; 16]].concat()),
        (48, 32, capability(1, 0)),
        // The reply announces a longer description than the client accepts.
        (1 << 20, 32, vec![]),
    ];
    for (argsz, cap_offset, capabilities) in cases {
        let answer = described(argsz, flags, cap_offset, &capabilities);
        let error = fails(answer, |client| client.region_info(2));
        assert!(matches!(error, ClientError::BadReply { .. }), "{error}");
    }
    // The reply describes another region than the requested one.
    let error = fails(described(32, 0, 0, &[]), |client| client.region_info(3));
    assert!(matches!(error, ClientError::BadReply { .. }), "{error}");
    // If the reply announces a longer description than the client's buffer, the client repeats the
    // query with a larger buffer.
    let mut asked = Vec::new();
    let (client, server) = fake_server(move |to, payload| {
        let argsz = u32::from_ne_bytes(payload[..4].try_into().unwrap());
        asked.push(argsz);
        assert!(asked == [4096] || asked == [4096, 9000]);
        let info =
            wire::RegionInfo { argsz: 9000, flags: 3, index: 2, cap_offset: 0, size: 5, offset: 0 };
        reply(to, 0, info.as_bytes())
    });
    let client = client.unwrap();
    assert_eq!(client.region_info(2).unwrap().size, 5);
    drop(client);
    server.join().unwrap();
}

#[test]
fn areas_with_a_descriptor_each_or_one_for_all_are_inside_of_the_region() {
    let areas = |areas: &[(u64, u64)]| {
        let mut bytes = wire::CapabilityHeader { id: 1, version: 1, next: 0 }.as_bytes().to_vec();
        bytes.extend((areas.len() as u64).to_ne_bytes());
        for (offset, size) in areas {
            bytes.extend(wire::SparseArea { offset: *offset, size: *size }.as_bytes());
        }
        bytes
    };
    type Areas<'a> = &'a [(u64, u64)];
    let two = [(0x1000, 0x1000), (0x3000, 0x1000)];
    let cases: [(Areas<'_>, usize, u64, bool); 9] = [
        (&two, 2, 0, true),
        (&two, 1, 0x7000, true),
        (&two, 3, 0, false),
        (&two, 0, 0, false),
        (&two, 1, u64::MAX - 0x3000, false),
        (&[(0, 0)], 1, 0, false),
        (&[(0, 0x4001)], 1, 0, false),
        (&[(0x4000, 1)], 1, 0, false),
        (&[(u64::MAX, 2)], 1, 0, false),
    ];
    for (list, fds, offset, good) in cases {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut server = Raw::new(theirs);
        let capabilities = areas(list);
        let server = std::thread::spawn(move || {
            let hello = server.reply();
            server.send(&reply(&hello.header, 0, &[0, 0, 1, 0]));
            let asked = server.reply();
            let info = wire::RegionInfo {
                argsz: 32 + capabilities.len() as u32,
                flags: region_flags::MMAP | region_flags::CAPS,
                index: 2,
                cap_offset: 32,
                size: 0x4000,
                offset,
            };
            let bytes = reply(&asked.header, 0, &[info.as_bytes(), &capabilities].concat());
            let fds: Vec<_> = (0..fds).map(|_| memfd(0x10000)).collect();
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            if fds.is_empty() { server.send(&bytes) } else { server.send_with_fds(&bytes, &fds) }
        });
        let client = Client::from_stream(ours.into(), Options::default()).unwrap();
        let region = client.region_info(2);
        server.join().unwrap();
        match region {
            Ok(region) => {
                assert!(good, "{list:?} {fds} {offset}");
                let found: Vec<_> =
                    region.areas.iter().map(|area| (area.offset, area.len)).collect();
                assert_eq!(found, list);
                assert_eq!(region.areas[1].fd_offset, offset + 0x3000);
            }
            Err(error) => {
                assert!(!good && matches!(error, ClientError::BadReply { .. }), "{error}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// For any reply of a server, the client returns success or an error, and does not panic.
    #[test]
    fn any_reply_is_survived(
        bytes in prop::collection::vec(any::<u8>(), 0..200), proper: bool, which in 0..5
    ) {
        // If the reply is incomplete, the client waits for the rest until its timeout, and then
        // returns an error.
        let (client, server) = fake_server_with_timeout(Duration::from_millis(200), move |to, _| {
            if proper { reply(to, 0, &bytes) } else { [&bytes[..], &[0; 16]].concat() }
        });
        let Ok(client) = client else { return Ok(()) };
        let _ = match which {
            0 => client.device_info().map(drop),
            1 => client.region_info(2).map(drop),
            2 => client.irq_info(2).map(drop),
            3 => client.region_read(0, 0, &mut [0; 8]),
            _ => client.dma_unmap(DmaUnmap::All),
        };
        drop(client);
        server.join().unwrap();
    }
}

#[test]
fn invalid_ioeventfd_lists_are_errors() {
    let entry = |fd_index| wire::IoFd {
        offset: 0,
        size: 4,
        fd_index,
        kind: wire::IO_FD_EVENT,
        flags: 0,
        padding: 0,
        datamatch: 0,
    };
    let list = |argsz, index, count, entries: &[wire::IoFd]| {
        let info = wire::RegionIoFds { argsz, flags: 0, index, count };
        [info.as_bytes(), entries.as_bytes()].concat()
    };
    for payload in [
        // The replies describe another region, or their entries are too short, too many or
        // incomplete.
        list(56, 1, 1, &[entry(0)]),
        list(56, 0, 2, &[entry(0)]),
        list(96, 0, u32::MAX, &[entry(0), entry(0)]),
        list(96, 0, 2, &[entry(0)]),
        // A reply with an entry but without a descriptor, and one that announces too long a list.
        list(56, 0, 1, &[entry(0)]),
        list(u32::MAX, 0, 1, &[entry(0)]),
        vec![0; 15],
    ] {
        let error = fails(move |to, _| reply(to, 0, &payload), |client| client.region_io_fds(0));
        assert!(matches!(error, ClientError::BadReply { .. }), "{error}");
    }
}

#[test]
fn a_region_without_descriptors_may_have_an_empty_list() {
    // libvfio-user sends an empty list; other servers refuse the query.
    let none = wire::RegionIoFds { argsz: 16, flags: 0, index: 0, count: 0 };
    let (client, server) = fake_server(move |to, _| reply(to, 0, none.as_bytes()));
    let client = client.unwrap();
    let found = client.region_io_fds(0).unwrap();
    assert!(found.events.is_empty() && found.areas.is_empty());
    client.reset().expect("the connection still works");
    drop(client);
    server.join().unwrap();
}

#[test]
fn a_server_that_only_sends_commands_times_out() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let talk = std::thread::spawn(move || {
        let command = Header { id: 7, command: command::DMA_READ, size: 16, flags: 0, error: 0 };
        let mut sent = 0;
        while theirs.write_all(command.as_bytes()).is_ok() {
            sent += 1;
            // With these pauses, the server sends far fewer commands until the client's timeout
            // than the client would treat as a flood. So the timeout has to end the wait.
            std::thread::sleep(Duration::from_millis(20));
        }
        sent
    });
    // The limit is short, because the test waits for its expiry.
    let options = Options { timeout: Some(Duration::from_millis(100)) };
    let error = Client::from_stream(ours.into(), options).unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    let sent = talk.join().unwrap();
    assert!(sent < 500, "{sent} commands, which is nearly a flood");
}

#[test]
fn a_growing_reply_is_requested_twice_at_most() {
    for io_fds in [false, true] {
        let asked = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let count = Arc::clone(&asked);
        let grows = move |to: &Header, payload: &[u8]| {
            count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let mut info = payload.to_vec();
            let argsz = u32::from_ne_bytes(payload[..4].try_into().unwrap());
            info[..4].copy_from_slice(&(argsz + 1).to_ne_bytes());
            reply(to, 0, &info)
        };
        let error = fails(grows, |client| match io_fds {
            false => client.region_info(2).map(drop),
            true => client.region_io_fds(2).map(drop),
        });
        assert!(matches!(error, ClientError::BadReply { .. }), "{error}");
        assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 2);
    }
}
