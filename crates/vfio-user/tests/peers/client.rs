//! Tests of the client with the server of this crate.

use crate::common;
use shadowbell_testing::wait;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::*;
use shadowbell_vfio_user::client::{Client, ClientError, DmaRange, Options, ShortWrite};
use shadowbell_vfio_user::device::{DmaUnmap, IrqAction, irq};
use shadowbell_vfio_user::server::Limits;
use shadowbell_vfio_user::wire::command;
use shadowbell_vfio_user::{Errno, Listener};

fn served() -> (Server, Client, Arc<TestDeviceState>) {
    let (server, path, shared) = Server::with_device(Limits::default());
    let client = Client::connect(&path, Options::default()).unwrap();
    (server, client, shared)
}

#[test]
fn device_region_and_irq_info_match_the_device() {
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
fn the_mappable_area_is_the_devices_file() {
    let (_server, client, _shared) = served();
    let region = client.region_info(2).unwrap();
    assert_eq!(region.size, BAR2_SIZE);
    let [area] = &region.areas[..] else { panic!("{region:?}") };
    assert_eq!((area.offset, area.len), (AREA.offset, AREA.len));
    assert_eq!(area.fd_offset, BAR2_FILE_OFFSET + AREA.offset);
    assert_eq!(rustix::fs::fstat(&area.fd).unwrap().st_size as u64, BAR2_FILE_OFFSET + BAR2_SIZE);
}

#[test]
fn ioeventfds_are_those_of_the_device() {
    let (_server, client, _shared) = served();
    // The reply is larger than the client's first buffer, so the client asks again. Of the device's
    // 100 eventfds, only 16 fit into a reply.
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
    // After a refused request, the connection remains usable.
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
    let share = DmaRange {
        iova: 0x7f00_0000_0000,
        len: 0x2000,
        readable: true,
        writable: false,
        fd: Some(memory.as_fd()),
        fd_offset: 0x1000,
    };
    client.dma_map(&share).unwrap();
    let error = client.dma_map(&DmaRange { fd: None, ..share }).unwrap_err();
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
fn the_shared_file_arrives_at_the_device() {
    let (_server, client, shared) = served();
    let memory = memfd(0x1000);
    rustix::io::pwrite(&memory, b"hello", 0).unwrap();
    let fd = Some(memory.as_fd());
    let share = DmaRange { iova: 0, len: 0x1000, readable: true, writable: true, fd, fd_offset: 0 };
    client.dma_map(&share).unwrap();
    let maps = shared.maps.lock().unwrap();
    let mut data = [0; 5];
    rustix::io::pread(&maps[0], &mut data, 0).unwrap();
    assert_eq!(&data, b"hello");
    drop(maps);
    // The device signals the client's eventfd, and the client sees the signal.
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
fn a_timeout_ends_the_connection() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    // The timeout must not expire while the connection is set up.
    let options = Options { timeout: Some(Duration::from_secs(2)) };
    let client = Client::connect(&path, options).unwrap();
    shared.hold.store(true, Ordering::SeqCst);
    let error = client.reset().unwrap_err();
    assert_eq!(error.to_string(), "no reply to DEVICE_RESET within 2s");
    assert!(matches!(client.device_info(), Err(ClientError::Broken)));
    assert!(matches!(client.region_write_posted(0, 0, &[0]), Err(ClientError::Broken)));
    // After the timeout, the client has closed the connection, which the server notices. The client
    // object still exists.
    shared.wait_held().ok();
    shared.wait_log("disconnected");
}

#[test]
fn a_waiting_client_times_out_or_is_served() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let first = Client::connect(&path, Options::default()).unwrap();
    // The limit is short, because the test waits for its expiry.
    let options = Options { timeout: Some(Duration::from_millis(50)) };
    let error = Client::connect(&path, options).unwrap_err();
    assert!(matches!(error, ClientError::Timeout { command: command::VERSION, .. }), "{error}");
    let waiting = std::thread::spawn({
        let path = path.clone();
        move || Client::connect(&path, Options::default()).unwrap().device_info().unwrap()
    });
    wait::short_pause();
    drop(first);
    waiting.join().unwrap();
}

#[test]
fn a_missing_server_is_reported_with_its_path() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nothing");
    let error = Client::connect(&path, Options::default()).unwrap_err();
    assert!(error.to_string().starts_with(&format!("cannot connect to {}: ", path.display())));
    // If the path is a directory, the client connects to the socket in it.
    let listener = Listener::bind(directory.path()).unwrap();
    let server = Server::start(Limits::default());
    server.handle.add(listener, TestDevice::new().0);
    Client::connect(directory.path(), Options::default()).unwrap().device_info().unwrap();
}

#[test]
fn a_full_backlog_times_out() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let busy = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&busy, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&busy, 0).unwrap();
    let _in_the_way = UnixStream::connect(&path).unwrap();
    // The limit is short, because the test waits for its expiry.
    let options = Options { timeout: Some(Duration::from_millis(50)) };
    let started = Instant::now();
    let error = Client::connect(&path, options).unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error}");
    // The client must not give up before the time limit.
    assert!(started.elapsed() >= Duration::from_millis(50));
}

#[test]
fn excess_dma_maps_are_refused_by_the_client() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let client = Client::connect(&path, Options::default()).unwrap();
    assert_eq!(client.server().max_dma_maps, MAX_MAPS);
    let memory = memfd(0x1000);
    let map = |iova| {
        let fd = Some(memory.as_fd());
        let (readable, writable) = (true, true);
        client.dma_map(&DmaRange { iova, len: 0x1000, readable, writable, fd, fd_offset: 0 })
    };
    for n in 0..u64::from(MAX_MAPS) {
        map(n << 12).unwrap();
    }
    let error = map(0x9000).unwrap_err();
    assert!(matches!(error, ClientError::TooManyMaps { max: MAX_MAPS }), "{error}");
    assert!(error.to_string().contains("5 ranges"), "{error}");
    assert_eq!(shared.maps.lock().unwrap().len(), MAX_MAPS as usize);
    // The maximum applies to the number of ranges that are mapped at the same time. After an unmap
    // of two ranges, two more can be mapped. After an unmap of all ranges, the maximum number can
    // be mapped again.
    client.dma_unmap(DmaUnmap::Range { iova: 0x1000, len: 0x2000 }).unwrap();
    map(0x1000).unwrap();
    map(0x2000).unwrap();
    map(0x9000).unwrap_err();
    client.dma_unmap(DmaUnmap::All).unwrap();
    for n in 0..u64::from(MAX_MAPS) {
        map(n << 12).unwrap();
    }
    map(0x9000).unwrap_err();
}
