//! NBD block status: holes are reported, and data is never reported as a hole.

use crate::client::serve;
use crate::nbd::Rig;
use crate::tools::{noise, run, uri};
use shadowbell_block::BlockOptions;
use shadowbell_disk::{Disk, DiskError, DiskInfo, Op, Queue, Request, Submitted};
use shadowbell_export::nbd::wire::{command, flag};
use shadowbell_export::nbd::{Options, Server};
use shadowbell_memory::Segments;
use shadowbell_testing::programs::{can_run, skipped};
use shadowbell_testing::test_disk::TestDisk;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const MIB: u32 = 1 << 20;
const DATA: u32 = 0;
const HOLE: u32 = 3;

fn sparse(mebibytes: u64) -> Rig {
    let disk = TestDisk::sparse(mebibytes << 11, 512);
    Rig::over(disk, &BlockOptions::default(), &Options::default())
}

#[test]
fn written_blocks_are_data_and_others_are_holes() {
    let rig = sparse(64);
    let mut client = rig.client();
    let mut status = |flags, offset, len| {
        let reply = client.run(command::BLOCK_STATUS, flags, offset, len, b"");
        assert_eq!(reply.error, 0);
        assert!(flags == 0 || reply.extents.len() == 1);
        reply.extents
    };
    assert_eq!(status(0, 0, 64 * MIB), [(64 * MIB, HOLE)]);
    assert_eq!(status(0, 777, 1), [(1, HOLE)]);
    assert_eq!(status(0, 63 << 20, MIB), [(MIB, HOLE)]);
    let mut writer = rig.client();
    // After a write into a hole, there is a data extent. With huge pages, the extent is larger than
    // the write.
    assert_eq!(writer.run(command::WRITE, 0, (33 << 20) + 5, 3, b"abc").error, 0);
    let extents = status(0, 0, 64 * MIB);
    let [(before, HOLE), (data, DATA), (after, HOLE)] = extents[..] else { panic!("{extents:?}") };
    assert!(before <= 33 * MIB && data <= 2 * MIB && before + data > 33 * MIB + 8);
    assert_eq!(before + data + after, 64 * MIB);
    // Queries of block status that start inside the extent, and queries with REQ_ONE, which return
    // one extent.
    assert_eq!(status(0, (33 << 20) + 6, 2), [(2, DATA)]);
    assert_eq!(status(flag::REQ_ONE, 0, 64 * MIB), [(before, HOLE)]);
    assert_eq!(status(flag::REQ_ONE, before.into(), 64 * MIB - before), [(data, DATA)]);
    // After a trim, the range is a hole again.
    assert_eq!(writer.run(command::TRIM, 0, 32 << 20, 4 * MIB, b"").error, 0);
    assert_eq!(status(0, 0, 64 * MIB), [(64 * MIB, HOLE)]);
    rig.end();
}

#[test]
fn block_status_replies_have_a_limited_number_of_extents() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let size: u64 = 64 << 20;
    file.as_file().set_len(size).unwrap();
    // Each 64 KiB have one block of data.
    for at in (0..size).step_by(64 << 10) {
        file.as_file().write_all_at(&[7; 4096], at + 8192).unwrap();
    }
    let served = Served::new(file.path());
    let mut client = crate::client::Client::connect(&served.socket, true);
    let (mut at, mut answers, mut data) = (0, 0, 0);
    while at < size {
        let len = u32::try_from(size - at).unwrap();
        let reply = client.run(command::BLOCK_STATUS, 0, at, len, b"");
        assert!(reply.error == 0 && (1..=128).contains(&reply.extents.len()));
        for (len, state) in reply.extents {
            // The file system may allocate more data than was written, so the test checks a range.
            data += u64::from(len) * u64::from(state == DATA);
            at += u64::from(len);
        }
        answers += 1;
    }
    assert_eq!(at, size);
    assert!(data >= 4 << 20, "{data}");
    assert!(answers <= 17, "{answers}");
    served.end();
}

#[test]
fn a_disk_that_does_not_say_has_data_everywhere() {
    let (disk, options) = (TestDisk::new(8192, 512), BlockOptions::default());
    let rig = Rig::over(disk, &options, &Options::default());
    let mut client = rig.client();
    for _ in 0..3 {
        let reply = client.run(command::BLOCK_STATUS, 0, 512, 4 * MIB - 512, b"");
        assert_eq!((reply.error, reply.extents), (0, vec![(4 * MIB - 512, DATA)]));
    }
    rig.end();
}

#[test]
fn slow_extent_queries_delay_no_other_request() {
    let rig = sparse(4);
    rig.backing.instruct(|instructions| instructions.hold_extents = true);
    let mut client = rig.client();
    let cookie = client.ask(command::BLOCK_STATUS, 0, 0, 4 * MIB, b"");
    for n in 0..50u8 {
        assert_eq!(client.run(command::WRITE, 0, n.into(), 1, &[n]).error, 0);
        assert_eq!(client.run(command::READ, 0, n.into(), 1, b"").data, [n]);
    }
    rig.backing.instruct(|instructions| instructions.hold_extents = false);
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.error), (cookie, 0));
    // The block status shows data, because the server queries the disk's extents only after the
    // earlier writes have completed.
    assert_eq!(reply.extents[0].1, DATA);
    // The client disconnects while its block status request is in flight.
    rig.backing.instruct(|instructions| instructions.hold_extents = true);
    client.ask(command::BLOCK_STATUS, 0, 0, 4 * MIB, b"");
    drop(client);
    rig.backing.instruct(|instructions| instructions.hold_extents = false);
    let mut client = rig.client();
    assert_eq!(client.run(command::BLOCK_STATUS, 0, 0, MIB, b"").error, 0);
    drop(client);
    rig.end();
}

/// Disk wrapper that counts the bytes that are read.
#[derive(Clone, Debug)]
struct Counted {
    disk: Arc<dyn Disk>,
    read: Arc<AtomicU64>,
}

struct CountedQueue {
    queue: Box<dyn Queue>,
    read: Arc<AtomicU64>,
}

impl Disk for Counted {
    fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(CountedQueue { queue: self.disk.queue()?, read: Arc::clone(&self.read) }))
    }

    fn name(&self) -> String {
        self.disk.name()
    }

    fn inner(&self) -> Option<&Arc<dyn Disk>> {
        Some(&self.disk)
    }
}

impl Queue for CountedQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        if request.op == Op::Read {
            self.read.fetch_add(request.len, Ordering::Relaxed);
        }
        self.queue.submit(tag, request, data)
    }

    fn commit(&mut self) {
        self.queue.commit();
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        self.queue.reap(done);
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.wake_fd()
    }

    fn wakes_by_edges(&self) -> bool {
        self.queue.wakes_by_edges()
    }
}

/// A raw image exported by NBD.
struct Served {
    read: Arc<AtomicU64>,
    server: Server,
    socket: std::path::PathBuf,
    _directory: tempfile::TempDir,
}

impl Served {
    fn new(image: &Path) -> Self {
        let disk = shadowbell_disk_file::open(&image.display().to_string()).unwrap();
        let disk = Counted { disk, read: Arc::default() };
        let read = Arc::clone(&disk.read);
        let options = BlockOptions::default();
        let disk = shadowbell_block::BlockDevice::new(Arc::new(disk), &options).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("nbd");
        let server = serve(disk, &socket, &Options::default());
        Self { read, server, socket, _directory: directory }
    }

    fn end(self) {
        let _ = self.server.stop();
    }
}

/// Returns true if the file system of `path` supports sparse files.
fn keeps_holes(path: &Path) -> bool {
    let blocks = std::fs::metadata(path).unwrap().blocks();
    if blocks * 512 > 8 << 20 {
        skipped(format_args!("the file system of {} keeps no holes", path.display()));
    }
    blocks * 512 <= 8 << 20
}

/// `nbdinfo --map`, `nbdcopy`, `qemu-img map` and `qemu-img convert`, on a sparse image of 1 GiB
/// with 2 MiB of data.
#[test]
fn nbd_tools_of_other_projects_detect_holes() {
    if !can_run("nbdinfo") || !can_run("nbdcopy") || !can_run("qemu-img") || !can_run("qemu-io") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let image = path("image");
    let data = noise(1 << 20);
    let file = std::fs::File::create(&image).unwrap();
    file.set_len(1 << 30).unwrap();
    file.write_all_at(&data, 64 << 20).unwrap();
    file.write_all_at(&data, 700 << 20).unwrap();
    drop(file);
    if !keeps_holes(&image) {
        return;
    }
    let served = Served::new(&image);
    let uri = uri(&served.socket);
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let expected = [
        ("0", "67108864", "3", "hole,zero"),
        ("67108864", "1048576", "0", "data"),
        ("68157440", "665845760", "3", "hole,zero"),
        ("734003200", "1048576", "0", "data"),
        ("735051776", "338690048", "3", "hole,zero"),
    ];
    let expected: Vec<_> = expected.iter().flat_map(|row| [row.0, row.1, row.2, row.3]).collect();
    assert_eq!(words(&run("nbdinfo", &["--map", &uri])), expected);
    let map = run("qemu-img", &["map", "-f", "raw", "--output=json", &uri]);
    assert_eq!(map.matches("\"data\": true").count(), 2, "{map}");
    assert_eq!(map.matches("\"zero\": true").count(), 3, "{map}");

    // The copies have the same content, and as many holes, as the original. The programs read only
    // the data: far less than 1 GiB.
    for (program, copy) in [("nbdcopy", path("copied")), ("qemu-img", path("converted"))] {
        let target = copy.to_str().unwrap().to_owned();
        let before = served.read.load(Ordering::Relaxed);
        match program {
            "nbdcopy" => run(program, &[&uri, &target]),
            _ => run(program, &["convert", "-f", "raw", "-O", "raw", &uri, &target]),
        };
        let read = served.read.load(Ordering::Relaxed) - before;
        assert!((1 << 20..=8 << 20).contains(&read), "{program} has read {read} bytes");
        assert!(keeps_holes(&copy), "{program}");
        run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &target, &uri]);
    }

    // A write into a hole adds a data extent.
    run("qemu-io", &["-f", "raw", "-c", "write -P 7 300M 64k", "-c", "flush", &uri]);
    let map = run("nbdinfo", &["--map", &uri]);
    let rows: Vec<_> = map.lines().map(words).collect();
    assert_eq!(rows.len(), 7, "{map}");
    assert_eq!(rows[3], ["314572800", "65536", "0", "data"], "{map}");
    served.end();
    let bytes = |at: u64| {
        let mut bytes = vec![0; 65536];
        std::fs::File::open(&image).unwrap().read_exact_at(&mut bytes, at).unwrap();
        bytes
    };
    assert!(bytes(300 << 20) == vec![7; 65536] && bytes(64 << 20) == data[..65536]);
}
