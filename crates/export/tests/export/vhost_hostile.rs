//! Hostile frontends, which must not disturb later frontends or frontends of other devices.

use crate::vhost::{
    EVENT_IDX, Guest, LONG_QUEUE, MEMORY, QUEUE, READ, Rig, WRITE, each_block_size, short_blocks,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use shadowbell_testing::stalled::{self, Mount};
use shadowbell_testing::wait::{self, LIMIT};
use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use vhost::VhostBackend;
use vhost::vhost_user::Frontend;
use vmm_sys_util::eventfd::EventFd;

const SET_MEM_TABLE: u32 = 5;
const SET_VRING_CALL: u32 = 13;
const SET_LOG_FD: u32 = 7;
const REM_MEM_REG: u32 = 38;

#[test]
fn the_daemon() {
    stalled::run_daemon_if_requested();
}

/// Runs `work` on a thread. Panics if it does not return within the limit.
fn soon<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    is_done.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("stalled: {what}"))
}

/// Runs `work` on a thread of `scope`. Returns true if it returns within the limit.
fn soon_in<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    what: &str,
    work: impl FnOnce() + Send + 'scope,
) -> bool {
    let (done, is_done) = std::sync::mpsc::channel();
    scope.spawn(move || {
        work();
        let _ = done.send(());
    });
    let outcome = is_done.recv_timeout(LIMIT);
    if outcome.is_err() {
        println!("stalled: {what}");
    }
    outcome.is_ok()
}

/// Checks that the device serves the next frontend and can be stopped.
fn assert_served(rig: Rig) {
    soon("the next frontend", move || {
        let mut guest = Guest::connect(&rig, 2, 0);
        for ring in &mut guest.rings {
            assert_eq!(ring.run(WRITE, 1, &[3; 512], 0), 0);
            assert_eq!(ring.run(READ, 1, b"", 512), 0);
        }
        drop(guest);
        rig.end(0);
    });
}

/// Sends a vhost-user message with descriptors.
fn send(socket: &UnixStream, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut bytes = Vec::new();
    for field in [request, 1, payload.len() as u32] {
        bytes.extend(field.to_ne_bytes());
    }
    bytes.extend(payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// The payload of a memory table with one region.
fn table(len: u64) -> Vec<u8> {
    let mut payload = 1u32.to_ne_bytes().to_vec();
    payload.extend(0u32.to_ne_bytes());
    // The fields are guest physical address, length, virtual address of the frontend, and offset in
    // the file.
    for field in [0, len, 0x1000_0000, 0] {
        payload.extend(field.to_ne_bytes());
    }
    payload
}

fn assert_sent_away(mut socket: UnixStream) {
    soon("a frontend that is to be sent away", move || {
        assert!(matches!(socket.read(&mut [0; 64]), Ok(0) | Err(_)));
    });
}

/// A file of a FUSE file system whose daemon never replies. Every access to the file blocks.
#[test]
fn a_hung_file_of_a_frontend_stalls_no_other_client() {
    each_block_size(|| {
        let rig = Rig::new(false);
        // If an access to the file blocks the device nevertheless, the unmount ends it. So the
        // mount must be dropped before the rig, whose drop waits for the device.
        let Some(mount) = Mount::new("vhost_hostile::the_daemon") else { return };
        // The descriptor is leaked, because closing it would block this test as well.
        let file: &'static OwnedFd = Box::leak(Box::new(mount.open()));
        let connect = || UnixStream::connect(rig.socket()).unwrap();
        for (request, payload) in [
            (SET_MEM_TABLE, table(0x10000)),
            (SET_VRING_CALL, 0u64.to_ne_bytes().to_vec()),
            (SET_LOG_FD, Vec::new()),
            (4711, vec![7; 100]),
        ] {
            let socket = connect();
            send(&socket, request, &payload, &[file.as_fd()]);
            assert_sent_away(socket);
        }
        // Two more clients. The first one sends REM_MEM_REG with a descriptor, which the device
        // must ignore, and does not wait for a reply. The second one sends a descriptor in the
        // middle of a message.
        let socket = connect();
        send(&socket, REM_MEM_REG, &table(0x10000)[8..], &[file.as_fd()]);
        drop(socket);
        let socket = connect();
        let (header, rest) = ([SET_MEM_TABLE, 1, 40].map(u32::to_ne_bytes).concat(), [0; 5]);
        std::io::Write::write_all(&mut &socket, &header).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [file.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&socket, &[IoSlice::new(&rest)], &mut control, SendFlags::NOSIGNAL).unwrap();
        assert_sent_away(socket);
        assert_served(rig);
    });
}

/// Memory in MiB that this process uses for page tables.
fn page_tables() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

/// The guest reads into buffers that are spread over a large sparse memory, so that each access
/// allocates a page table in the server. The memory for page tables is limited.
#[test]
fn page_tables_of_a_frontend_are_limited() {
    each_block_size(|| {
        const SPAN: u64 = 2 << 20;
        const SIZE: u64 = 64 << 30;
        let rig = Rig::new(false);
        let file = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, SIZE).unwrap();
        let mut guest = Guest::connect_with(&rig, 1, 0, file.into(), QUEUE);
        let before = page_tables();
        let mut most = 0;
        let places: Vec<u64> = (1..SIZE / SPAN).map(|n| n * SPAN).collect();
        for some in places.chunks(usize::from(QUEUE) - 2) {
            guest.rings[0].read_to(some.iter().copied());
            assert_eq!(guest.rings[0].take().2, 0);
            most = most.max(page_tables().saturating_sub(before));
        }
        // Without a quota, the page tables would need 128 MiB. The quota is 16 MiB, but more may be
        // allocated between two checks of the quota.
        assert!(most <= 48, "{most} MiB");
        drop(guest);
        rig.end(0);
    });
}

/// The frontend truncates the file of its guest memory. An access beyond the new end raises SIGBUS.
/// It must end the connection and not the process.
#[test]
fn memory_that_is_taken_away_costs_a_frontend_its_connection() {
    short_blocks(|| {
        let (rig, other) = (Rig::new(false), Rig::new(false));
        let mut neighbour = Guest::connect(&other, 1, 0);
        // The truncation removes a request's data, the rings, or all of guest memory.
        for left in [1 << 20, 4096, 0] {
            let file = memfd_create("cut", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, MEMORY).unwrap();
            let theirs = File::from(file.try_clone().unwrap());
            let mut guest = Guest::connect_with(&rig, 1, 0, theirs, 64);
            assert_eq!(guest.rings[0].run(WRITE, 0, &[1; 512], 0), 0);
            if left == 1 << 20 {
                // The request's descriptors remain, but its data is lost.
                rig.backing.instruct(|instructions| instructions.hold = true);
                guest.rings[0].submit(1, READ, 0, b"", 512);
                rig.backing.expect(2);
            }
            ftruncate(&file, left).unwrap();
            rig.backing.instruct(|instructions| instructions.hold = false);
            if left != 1 << 20 {
                guest.rings[0].kick.write(1).unwrap();
            }
            rig.backing.instruct(|instructions| instructions.seen.clear());
            let frontend = guest.frontend.clone();
            soon(&format!("a frontend with {left} bytes of memory"), move || {
                while frontend.get_features().is_ok() {
                    wait::pause();
                }
            });
            assert_eq!(neighbour.rings[0].run(WRITE, 1, &[3; 512], 0), 0);
        }
        drop(neighbour);
        other.end(0);
        assert_served(rig);
    });
}

/// Guest memory in huge pages that the machine does not have. The file can be mapped, but an access
/// raises SIGBUS. It must end only the connection.
#[test]
fn missing_huge_pages_disconnect_the_frontend() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let file = memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB).unwrap();
        ftruncate(&file, 1 << 40).unwrap();
        let socket = UnixStream::connect(rig.socket()).unwrap();
        let payload = table(1 << 40);
        send(&socket, SET_MEM_TABLE, &payload, &[file.as_fd()]);
        // SET_VRING_ADDR places the first queue's rings in the file, so that the device accesses
        // the file.
        let mut rings = vec![0; 8];
        for address in [0x1000_0000u64, 0x1000_3000, 0x1000_2000, 0] {
            rings.extend(address.to_ne_bytes());
        }
        const SET_VRING_ADDR: u32 = 9;
        send_plain(&socket, SET_VRING_ADDR, &rings);
        drop(socket);
        assert_served(rig);
    });
}

fn send_plain(socket: &UnixStream, request: u32, payload: &[u8]) {
    let mut bytes: Vec<u8> = [request, 1, payload.len() as u32].map(u32::to_ne_bytes).concat();
    bytes.extend(payload);
    let _ = std::io::Write::write_all(&mut &*socket, &bytes);
}

/// The frontend's eventfds are blocking: a write to one with a full count would wait, and so would
/// a read from one with a count of zero. The device must not wait.
#[test]
fn a_full_or_empty_eventfd_stalls_no_thread() {
    each_block_size(|| {
        let rig = Rig::new(false);
        // EVENT_IDX is not negotiated, so the device signals every completion, and would block at
        // an eventfd whose count is full.
        let mut guest = Guest::connect(&rig, 1, EVENT_IDX);
        assert_eq!(guest.rings[0].run(WRITE, 0, &[1; 512], 0), 0);
        for event in [&guest.rings[0].call, &guest.rings[0].kick] {
            rustix::io::ioctl_fionbio(event_fd(event), false).unwrap();
        }
        guest.rings[0].call.write(u64::MAX - 1).unwrap();
        for slot in 0..8 {
            guest.rings[0].submit(slot, READ, 0, b"", 512);
        }
        rig.backing.expect(9);
        drop(guest);
        assert_served(rig);
    });
}

/// The available index announces more chains than the queue has entries. The guest can write this
/// index without the help of its VMM.
#[test]
fn an_invalid_available_index_keeps_no_thread_busy() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let mut guest = Guest::connect(&rig, 1, 0);
        assert_eq!(guest.rings[0].run(WRITE, 0, &[1; 512], 0), 0);
        guest.rings[0].promise(20_000);
        drop(guest);
        assert_served(rig);
        // After the guest has corrected the index, the device serves the guest again.
        let rig = Rig::new(false);
        let mut guest = Guest::connect(&rig, 1, 0);
        guest.rings[0].promise(20_000);
        wait::short_pause();
        guest.rings[0].promise(0);
        assert_eq!(guest.rings[0].run(WRITE, 0, &[1; 512], 0), 0);
        drop(guest);
        assert_served(rig);
    });
}

/// The guest submits requests endlessly. Since it shares memory with the device, it can do so even
/// after its frontend has disconnected. The next frontend must be served nevertheless.
#[test]
fn a_guest_that_submits_endlessly_blocks_no_other_frontend() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let file = memfd_create("endless", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, MEMORY).unwrap();
        let guest = Guest::connect_with(&rig, 1, 0, file.into(), LONG_QUEUE);
        let Guest { frontend, mut rings, .. } = guest;
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (ring, enough) = (&mut rings[0], &enough);
            let (begin, began) = std::sync::mpsc::channel();
            scope.spawn(move || ring.never_stop(|| begin.send(()).unwrap(), enough));
            began.recv().unwrap();
            let served = soon_in(scope, "queues that are stopped", move || {
                // GET_VRING_BASE stops the queue.
                frontend.get_vring_base(0).unwrap();
                drop(frontend);
            });
            let served = served && soon_in(scope, "the next one", || assert_served(rig));
            enough.store(true, Ordering::Relaxed);
            assert!(served);
        });
    });
}

/// Disconnected frontends leave no descriptors open. A guest that restarts every hour connects
/// about 10,000 times in a year.
#[test]
fn disconnected_frontends_leak_no_descriptors() {
    each_block_size(|| {
        let rig = Rig::new(false);
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = open();
        for _ in 0..300 {
            let frontend = Frontend::from_stream(UnixStream::connect(rig.socket()).unwrap(), 2);
            frontend.get_features().unwrap();
        }
        // The limit has a margin, because other tests of this process also open descriptors.
        let after = open();
        assert!(after < before + 300, "{before} descriptors, and then {after}");
        assert_served(rig);
    });
}

/// Duplicates the descriptor of an eventfd.
fn event_fd(event: &EventFd) -> OwnedFd {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let this = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    pidfd_getfd(this, event.as_raw_fd(), PidfdGetfdFlags::empty()).unwrap()
}
