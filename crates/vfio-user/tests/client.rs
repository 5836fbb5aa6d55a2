//! Our client, with our server and with servers that cannot be trusted.

mod common;

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::*;
use proptest::prelude::*;
use shadowbell_vfio_user::client::{Client, ClientError, Options, Share, ShortWrite};
use shadowbell_vfio_user::device::{DmaUnmap, IrqAction, irq};
use shadowbell_vfio_user::server::Limits;
use shadowbell_vfio_user::wire::{self, Header, command, header_flags, region_flags};
use shadowbell_vfio_user::{Errno, Listener};
use zerocopy::IntoBytes;

fn served() -> (Server, Client, Arc<Shared>) {
    let (server, path, shared) = Server::with_toy(Limits::default());
    let client = Client::connect(&path, Options::default()).unwrap();
    (server, client, shared)
}

#[test]
fn a_device_is_found_as_it_is() {
    let (_server, client, shared) = served();
    assert_eq!(client.server().max_msg_fds, 16);
    assert_eq!(client.server().max_data_xfer_size, 1 << 20);
    assert!(client.server().write_multiple);
    let info = client.device_info().unwrap();
    assert_eq!((info.resettable, info.regions, info.irqs), (true, 9, 5));
    let bar0 = client.region_info(0).unwrap();
    assert_eq!((bar0.size, bar0.readable, bar0.writable), (BAR0_SIZE, true, true));
    assert!(bar0.areas.is_empty());
    assert_eq!(client.region_info(6).unwrap().size, 0);
    let error = client.region_info(99).unwrap_err();
    assert!(matches!(error, ClientError::Refused { errno: Errno::INVAL, .. }), "{error}");
    let msix = client.irq_info(irq::MSIX).unwrap();
    assert_eq!((msix.count, msix.eventfd, msix.noresize, msix.maskable), (33, true, true, false));
    assert_eq!(client.irq_info(irq::INTX).unwrap().count, 0);
    drop(client);
    shared.wait_log("disconnected");
}

#[test]
fn the_mappable_part_of_a_region_is_the_file_of_the_device() {
    let (_server, client, _shared) = served();
    let region = client.region_info(2).unwrap();
    assert_eq!(region.size, BAR2_SIZE);
    let [area] = &region.areas[..] else { panic!("{region:?}") };
    assert_eq!((area.offset, area.len), (AREA.offset, AREA.len));
    assert_eq!(area.fd_offset, BAR2_FILE_OFFSET + AREA.offset);
    assert_eq!(rustix::fs::fstat(&area.fd).unwrap().st_size as u64, BAR2_FILE_OFFSET + BAR2_SIZE);
}

#[test]
fn descriptors_that_stand_for_writes_are_those_of_the_device() {
    let (_server, client, _shared) = served();
    // More than fits into the answer at first, and more descriptors than go with it.
    let found = client.region_io_fds(0).unwrap();
    assert_eq!((found.events.len(), found.areas.len()), (16, 300));
    assert!(
        found.areas.iter().enumerate().all(|(n, (area, event))| {
            (area.offset, area.len, *event) == (n as u64 * 8, 4, n % 2)
        })
    );
    for nothing in [2, 3] {
        let error = client.region_io_fds(nothing).unwrap_err();
        assert!(matches!(error, ClientError::Refused { errno: Errno::OPNOTSUPP, .. }), "{error}");
    }
    let error = client.region_io_fds(99).unwrap_err();
    assert!(matches!(error, ClientError::Refused { errno: Errno::INVAL, .. }), "{error}");
    client.region_read(0, 0, &mut [0; 4]).unwrap();
}

#[test]
fn lists_of_descriptors_that_make_no_sense_are_not_believed() {
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
        // Another region, no entries, entries that are too short, too many, or not all there.
        list(56, 1, 1, &[entry(0)]),
        list(16, 0, 0, &[]),
        list(56, 0, 2, &[entry(0)]),
        list(96, 0, u32::MAX, &[entry(0), entry(0)]),
        list(96, 0, 2, &[entry(0)]),
        // No descriptor came along; more than anybody needs.
        list(56, 0, 1, &[entry(0)]),
        list(u32::MAX, 0, 1, &[entry(0)]),
        vec![0; 15],
    ] {
        let error = fails(move |to, _| reply(to, 0, &payload), |client| client.region_io_fds(0));
        assert!(matches!(error, ClientError::BadReply { .. }), "{error}");
    }
}

#[test]
fn registers_are_read_and_written_in_order() {
    let (_server, client, _shared) = served();
    client.region_write(0, 0x10, &[1, 2, 3, 4]).unwrap();
    for n in 0..200u8 {
        client.region_write_posted(0, 0x100 + u64::from(n), &[n]).unwrap();
    }
    let mut data = [0; 200];
    client.region_read(0, 0x100, &mut data).unwrap();
    assert_eq!(data.to_vec(), (0..200).collect::<Vec<u8>>());
    let writes = [
        ShortWrite { region: 0, offset: 0x20, data: &[5; 8] },
        ShortWrite { region: 0, offset: 0x24, data: &[6] },
    ];
    client.region_write_multi(&writes, false).unwrap();
    client.region_write_multi(&writes[1..], true).unwrap();
    let mut data = [0; 8];
    client.region_read(0, 0x20, &mut data).unwrap();
    assert_eq!(data, [5, 5, 5, 5, 6, 5, 5, 5]);
    let mut large = vec![0; BAR0_SIZE as usize];
    client.region_write(0, 0, &vec![7; BAR0_SIZE as usize]).unwrap();
    client.region_read(0, 0, &mut large).unwrap();
    assert!(large.iter().all(|byte| *byte == 7));
    // A refusal leaves the connection as it was.
    let error = client.region_read(0, BAR0_SIZE, &mut data).unwrap_err();
    assert!(matches!(error, ClientError::Refused { errno: Errno::INVAL, .. }), "{error}");
    let long = [ShortWrite { region: 0, offset: 0, data: &[0; 9] }];
    let error = client.region_write_multi(&long, false).unwrap_err();
    assert!(matches!(error, ClientError::Unsendable { .. }), "{error}");
    let error = client.region_write(0, 0, &vec![0; (1 << 20) + 1]).unwrap_err();
    assert!(matches!(error, ClientError::Unsendable { .. }), "{error}");
    client.region_read(0, 0x20, &mut data).unwrap();
}

#[test]
fn memory_interrupts_and_reset_reach_the_device() {
    let (_server, client, shared) = served();
    let memory = memfd(0x4000);
    let share = Share {
        iova: 0x7f00_0000_0000,
        len: 0x2000,
        readable: true,
        writable: false,
        fd: Some(memory.as_fd()),
        fd_offset: 0x1000,
    };
    client.dma_map(&share).unwrap();
    let error = client.dma_map(&Share { fd: None, ..share }).unwrap_err();
    assert!(matches!(error, ClientError::Refused { errno: Errno::OPNOTSUPP, .. }), "{error}");
    let range = DmaUnmap::Range { iova: share.iova, len: share.len };
    client.dma_unmap(range).unwrap();
    client.dma_unmap(DmaUnmap::All).unwrap();
    client.set_irq_eventfds(irq::MSIX, 0, &eventfds(33)).unwrap();
    client.clear_irq_eventfds(irq::MSIX, 32, 1).unwrap();
    client.act_on_irqs(irq::MSIX, 1, 2, IrqAction::Mask).unwrap();
    client.act_on_chosen_irqs(irq::MSIX, 0, &[true, false], IrqAction::Trigger).unwrap();
    client.disable_irqs(irq::MSIX).unwrap();
    client.reset().unwrap();
    assert_eq!(
        shared.log()[1..],
        [
            "map 0x7f0000000000+0x2000 r at 0x1000",
            "map 0x7f0000000000+0x2000 r at 0x1000",
            "unmap 0x7f0000000000+0x2000",
            "unmap all",
            "Trigger 0+16 with 16 eventfds",
            "Trigger 16+16 with 16 eventfds",
            "Trigger 32+1 with 1 eventfds",
            "Trigger 32+1 with 0 eventfds",
            "Mask 1+2 with nothing",
            "Trigger 0+2 with [true, false]",
            "Trigger 0+0 with nothing",
            "reset",
        ]
    );
}

#[test]
fn the_file_that_is_shared_is_the_one_that_arrives() {
    let (_server, client, shared) = served();
    let memory = memfd(0x1000);
    rustix::io::pwrite(&memory, b"hello", 0).unwrap();
    let fd = Some(memory.as_fd());
    let share = Share { iova: 0, len: 0x1000, readable: true, writable: true, fd, fd_offset: 0 };
    client.dma_map(&share).unwrap();
    let maps = shared.maps.lock().unwrap();
    let mut data = [0; 5];
    rustix::io::pread(&maps[0], &mut data, 0).unwrap();
    assert_eq!(&data, b"hello");
    drop(maps);
    // An eventfd: what the device signals is what the client waits for.
    let vectors = eventfds(2);
    client.set_irq_eventfds(irq::MSIX, 5, &vectors).unwrap();
    let at_device = shared.eventfds.lock().unwrap();
    rustix::io::write(&at_device[1], &3u64.to_ne_bytes()).unwrap();
    let mut count = [0; 8];
    rustix::io::read(&vectors[1], &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 3);
    assert_eq!(rustix::io::read(&vectors[0], &mut count), Err(Errno::AGAIN));
}

#[test]
fn many_threads_share_a_client() {
    let (_server, client, _shared) = served();
    let client = Arc::new(client);
    let threads: Vec<_> = (0..8u64)
        .map(|thread| {
            let client = Arc::clone(&client);
            std::thread::spawn(move || {
                for n in 0..200u64 {
                    let at = thread * 0x100 + n % 32 * 8;
                    client.region_write_posted(0, at, &n.to_ne_bytes()).unwrap();
                    let mut data = [0; 8];
                    client.region_read(0, at, &mut data).unwrap();
                    assert_eq!(u64::from_ne_bytes(data), n);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_deadline_ends_the_connection_and_says_so() {
    let (_server, path, shared) = Server::with_toy(Limits::default());
    let options = Options { timeout: Some(Duration::from_millis(50)) };
    let client = Client::connect(&path, options).unwrap();
    shared.hold.store(true, Ordering::SeqCst);
    let error = client.reset().unwrap_err();
    assert_eq!(error.to_string(), "no reply to DEVICE_RESET within 50ms");
    assert!(matches!(client.device_info(), Err(ClientError::Broken)));
    assert!(matches!(client.region_write_posted(0, 0, &[0]), Err(ClientError::Broken)));
    // The server knows, although the client still exists.
    shared.wait_held().ok();
    shared.wait_log("disconnected");
}

#[test]
fn a_client_behind_another_one_gives_up_in_time_or_is_served() {
    let (_server, path, _shared) = Server::with_toy(Limits::default());
    let first = Client::connect(&path, Options::default()).unwrap();
    let options = Options { timeout: Some(Duration::from_millis(50)) };
    let error = Client::connect(&path, options).unwrap_err();
    assert!(matches!(error, ClientError::Timeout { command: command::VERSION, .. }), "{error}");
    let waiting = std::thread::spawn({
        let path = path.clone();
        move || Client::connect(&path, Options::default()).unwrap().device_info().unwrap()
    });
    std::thread::sleep(Duration::from_millis(20));
    drop(first);
    waiting.join().unwrap();
}

#[test]
fn nobody_there_is_said_with_the_path() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nothing");
    let error = Client::connect(&path, Options::default()).unwrap_err();
    assert!(error.to_string().starts_with(&format!("cannot connect to {}: ", path.display())));
    // A directory means the socket in there.
    let listener = Listener::bind(directory.path()).unwrap();
    let server = Server::start(Limits::default());
    server.handle.add(listener, Toy::new().0);
    Client::connect(directory.path(), Options::default()).unwrap().device_info().unwrap();
}

#[test]
fn a_backlog_that_is_full_is_not_waited_for_forever() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let busy = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&busy, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&busy, 0).unwrap();
    let _in_the_way = UnixStream::connect(&path).unwrap();
    let options = Options { timeout: Some(Duration::from_millis(50)) };
    let started = Instant::now();
    let error = Client::connect(&path, options).unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error}");
    assert!(started.elapsed() >= Duration::from_millis(50));
}

/// A server that answers VERSION properly and everything else as `answer` says.
fn impostor(
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
    let options = Options { timeout: Some(Duration::from_millis(200)) };
    (Client::from_stream(ours.into(), options), server)
}

fn reply(to: &Header, error: u32, payload: &[u8]) -> Vec<u8> {
    let flags = header_flags::REPLY | if error != 0 { header_flags::ERROR } else { 0 };
    let size = 16 + payload.len() as u32;
    let header = Header { id: to.id, command: to.command, size, flags, error };
    [header.as_bytes(), payload].concat()
}

/// What `request` comes to with a server that answers so, and that the connection has ended.
fn fails<T: std::fmt::Debug>(
    answer: impl FnMut(&Header, &[u8]) -> Vec<u8> + Send + 'static,
    request: impl Fn(&Client) -> Result<T, ClientError>,
) -> ClientError {
    let (client, server) = impostor(answer);
    let client = client.unwrap();
    let error = request(&client).unwrap_err();
    assert!(matches!(client.reset(), Err(ClientError::Broken)), "after {error}");
    drop(client);
    server.join().unwrap();
    error
}

#[test]
fn replies_that_make_no_sense_are_not_believed() {
    let bad = |error: ClientError| {
        assert!(matches!(error, ClientError::BadReply { .. }), "{error}");
        error.to_string()
    };
    let info = |client: &Client| client.device_info();
    let read = |client: &Client| client.region_read(0, 0, &mut [0; 4]);
    // The payload is good, but the answer is that to another question.
    let good = wire::DeviceInfo { argsz: 16, flags: 3, num_regions: 9, num_irqs: 5 };
    let other_id =
        move |to: &Header, _: &[u8]| reply(&Header { id: to.id + 1, ..*to }, 0, good.as_bytes());
    bad(fails(other_id, info));
    let other_command =
        move |to: &Header, _: &[u8]| reply(&Header { command: 9, ..*to }, 0, good.as_bytes());
    bad(fails(other_command, info));
    bad(fails(|to, _| reply(to, 0, &[0; 15]), info));
    // Not a PCI device.
    bad(fails(|to, _| reply(to, 0, &[0; 16]), info));
    // Too much data, too little, and a count that says otherwise.
    let short = bad(fails(|to, _| reply(to, 0, &[0; 19]), read));
    assert_eq!(short, "the server's reply to REGION_READ makes no sense: 3 bytes instead of 4");
    bad(fails(|to, _| reply(to, 0, &[0; 21]), read));
    bad(fails(|to, _| reply(to, 0, &[0; 20]), read));
    bad(fails(|to, _| reply(to, 0, &[0; 16]), |client| client.region_write(0, 0, &[1])));
    // Not a message at all.
    bad(fails(|_, _| vec![0; 16], info));
    bad(fails(|_, _| vec![0xff; 64], info));
    // Interrupts that were not asked about.
    bad(fails(|to, _| reply(to, 0, &[9; 16]), |client| client.irq_info(2)));
}

#[test]
fn a_server_that_is_silent_slow_or_gone_is_not_waited_for() {
    let info = |client: &Client| client.device_info();
    assert!(matches!(fails(|_, _| Vec::new(), info), ClientError::Socket(_)));
    let mut stuck = None;
    let silent = move |to: &Header, _: &[u8]| {
        // The second one, which comes only if the first is answered.
        stuck.get_or_insert(to.id);
        std::thread::sleep(Duration::from_millis(400));
        Vec::new()
    };
    assert!(matches!(fails(silent, info), ClientError::Timeout { .. }));

    // Byte by byte, forever.
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let drip = std::thread::spawn(move || {
        let header = Header { id: 0, command: 1, size: 1 << 20, flags: 1, error: 0 };
        for byte in header.as_bytes().iter().chain(std::iter::repeat(&0)) {
            if theirs.write_all(&[*byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let started = Instant::now();
    let options = Options { timeout: Some(Duration::from_millis(100)) };
    let error = Client::from_stream(ours.into(), options).unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(2));
    drip.join().unwrap();
}

#[test]
fn an_error_without_a_number_is_an_error() {
    let (client, server) = impostor(|to, _| {
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
fn commands_of_the_server_are_refused_and_do_not_confuse() {
    // The server's own command in front of each reply; and what comes back to it.
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
fn a_server_of_another_version_is_not_spoken_to() {
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
    let (client, server) = impostor(move |to, payload| {
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

/// A description of region 2 with these capabilities.
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
fn descriptions_that_lead_nowhere_are_not_followed() {
    let flags = region_flags::MMAP | region_flags::CAPS;
    let capability = |id: u16, next: u32| {
        let header = wire::CapabilityHeader { id, version: 1, next };
        [header.as_bytes(), &[0; 8]].concat()
    };
    let cases: Vec<(u32, u32, Vec<u8>)> = vec![
        // A loop, a step back, a step out, one that begins in the structure, and one cut short.
        (48, 32, capability(9, 32)),
        (64, 48, [capability(9, 0), capability(9, 32)].concat()),
        (48, 32, capability(9, 4711)),
        (48, 8, capability(1, 0)),
        (48, u32::MAX, capability(1, 0)),
        (40, 32, capability(1, 0)[..7].to_vec()),
        (44, 32, capability(1, 0)[..12].to_vec()),
        // More areas than there are.
        (48, 32, [&capability(1, 0)[..8], &u32::MAX.to_ne_bytes(), &[0; 4]].concat()),
        // An area, but nothing to map it by; and no area at all.
        (64, 32, [&capability(1, 0)[..8], &[1, 0, 0, 0, 0, 0, 0, 0], &[0; 16]].concat()),
        (48, 32, capability(1, 0)),
        // An answer that never fits.
        (1 << 20, 32, vec![]),
    ];
    for (argsz, cap_offset, capabilities) in cases {
        let answer = described(argsz, flags, cap_offset, &capabilities);
        let error = fails(answer, |client| client.region_info(2));
        assert!(matches!(error, ClientError::BadReply { .. }), "{error}");
    }
    // Another region than was asked about.
    let error = fails(described(32, 0, 0, &[]), |client| client.region_info(3));
    assert!(matches!(error, ClientError::BadReply { .. }), "{error}");
    // A description that is longer than at first thought is asked for again, with room for it.
    let mut asked = Vec::new();
    let (client, server) = impostor(move |to, payload| {
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
            let fds = eventfds(fds);
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

    /// Whatever a server answers, the client says yes or no, and does not fall over.
    #[test]
    fn any_answer_is_survived(
        bytes in prop::collection::vec(any::<u8>(), 0..200), proper: bool, which in 0..5
    ) {
        let (client, server) = impostor(move |to, _| {
            if proper { reply(to, 0, &bytes) } else { [&bytes[..], &[0; 16]].concat() }
        });
        let client = client.unwrap();
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
