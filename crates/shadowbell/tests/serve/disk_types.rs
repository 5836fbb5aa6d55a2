//! Test for every disk type: `verify` with all commands, and resets during I/O.

use crate::control::SetOnDrop;
use crate::disk_recovery::{Export, is_consistent, supervisor};
use crate::harness::{Server, complete, finish, image, program, run};
use shadowbell_disk_qcow2::create;
use shadowbell_driver::{AttachOptions, Buffer, Completion, Recovery, Token};
use shadowbell_spec::Status;
use shadowbell_testing::outside;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const BYTES: u64 = 16 << 20;
pub(crate) const PAGE: usize = 4096;
/// Number of requests in flight, each to a page of its own.
const DEPTH: u64 = 64;
/// Number of resets. If no reset has ended a request, more resets follow, up to the maximum.
const RESETS: u64 = 12;
const MOST_RESETS: u64 = 1000;

/// Serves `disk`, verifies every byte under mixed I/O, resets the controller during I/O, and
/// checks that the server stops without an error.
pub(crate) fn check_disk_type(disk: &str) {
    let mut server = supervisor(disk);
    verify_mixed_io(&server);
    resets(&server);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// Runs `verify` with reads, writes, flushes, zeroes, deallocations and compares. `verify` checks
/// every byte.
fn verify_mixed_io(server: &Server) {
    let target = format!("vfio-user:{}/1", server.socket().display());
    let mut command = program();
    command.args(["verify", &target, "--number-ios", "4000", "--iodepth", "32", "--force"]);
    command.args(["--size", "8MiB", "--json"]);
    let (status, output, errors) = finish(command);
    assert_eq!(status, Some(0), "{output}{errors}");
    let report: serde_json::Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    let row = &report["rows"][0];
    assert!(row["commands"].as_u64() >= Some(4000), "{row}");
    for key in ["verify_errors", "failed", "retried"] {
        assert_eq!(row[key], 0, "{key}: {row}");
    }
}

/// Content of a page that holds a number.
fn page(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(PAGE / 8)
}

pub(crate) fn fill(buffer: &mut Buffer, number: u64) {
    assert!(buffer.copy_from(0, &page(number)));
}

/// A page of the disk, and the request in flight for this page, if any.
#[derive(Default)]
pub(crate) struct Page {
    /// Possible contents of the page: the number of the last acknowledged write, and the numbers of
    /// later writes that failed.
    pub(crate) may: Vec<u64>,
    /// Token of the request in flight, and the number that it writes. `None` for a read.
    pub(crate) in_flight: Option<(Token, Option<u64>)>,
}

/// Resets the controller with many requests in flight. A write that a reset ends is on the disk as
/// a whole or not at all. After the reset, it must not reach the disk any more: it could overwrite
/// later data, or store what its buffer contains by then.
fn resets(server: &Server) {
    // Without repeats, the driver does not resubmit requests that a reset has ended.
    let recovery = Recovery { repeats: 0, ..Recovery::default() };
    let options = AttachOptions { recovery, queue_depth: 256, ..AttachOptions::default() };
    let mut controller = server.attach_with(&options);
    let mut queue = controller.take_queue_pair().unwrap();
    let namespace = controller.namespace(1).unwrap().clone();
    let blocks = PAGE as u32 / namespace.block_size();
    let lba = |page: usize| page as u64 * u64::from(blocks);
    let pool = controller.buffers(DEPTH as usize, PAGE).unwrap();
    let mut pages: Vec<Page> = (0..DEPTH).map(|_| Page::default()).collect();
    for (at, page) in pages.iter_mut().enumerate() {
        let mut buffer = pool.take().unwrap();
        fill(&mut buffer, at as u64);
        let write = namespace.write(lba(at), blocks).unwrap();
        assert_eq!(run(&mut queue, write, Some(buffer)).status, Status::SUCCESS);
        page.may.push(at as u64);
    }
    let mut last = DEPTH;
    let (ended_by_reset, resets) = (AtomicU64::new(0), AtomicU64::new(0));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _over = SetOnDrop(&is_over);
            // Resets are repeated until a reset has ended a request. On a memory disk, usually all
            // requests have completed before the reset.
            let in_vain = |n| n < MOST_RESETS && ended_by_reset.load(Ordering::Relaxed) == 0;
            for n in (0..).take_while(|n| *n < RESETS || in_vain(*n)) {
                let pause = if n < RESETS { 10_000 + n * 7_000 % 23_000 } else { 500 + n * 7 % 97 };
                // The reset comes at an arbitrary moment.
                std::thread::sleep(Duration::from_micros(pause));
                controller.reset().unwrap();
                resets.fetch_add(1, Ordering::Relaxed);
            }
        });
        loop {
            let ends = is_over.load(Ordering::Relaxed);
            for (at, page) in pages.iter_mut().enumerate() {
                if ends || page.in_flight.is_some() {
                    continue;
                }
                let mut buffer = pool.take().unwrap();
                last += 1;
                fill(&mut buffer, last);
                let (command, number) = match last % 3 {
                    0 => (namespace.read(lba(at), blocks), None),
                    _ => (namespace.write(lba(at), blocks), Some(last)),
                };
                let token = queue.submit(command.unwrap(), Some(buffer)).unwrap();
                page.in_flight = Some((token, number));
            }
            queue.ring().unwrap();
            if pages.iter().all(|page| page.in_flight.is_none()) {
                break;
            }
            let Completion { token, status, buffer, .. } = complete(&mut queue);
            let is = |page: &Page| page.in_flight.as_ref().is_some_and(|(it, _)| *it == token);
            let at = pages.iter().position(is).expect("a completion of a request in flight");
            let page = &mut pages[at];
            let (_, number) = page.in_flight.take().unwrap();
            match (status, number) {
                (Status::SUCCESS, Some(number)) => page.may = vec![number],
                (Status::SUCCESS, None) => check_content(page, &buffer.unwrap()),
                (status, number) => {
                    assert_eq!(status, Status::ABORTED_BY_HOST);
                    page.may.extend(number);
                    ended_by_reset.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    });
    for (at, page) in pages.iter_mut().enumerate() {
        let read = run(&mut queue, namespace.read(lba(at), blocks).unwrap(), pool.take());
        assert_eq!(read.status, Status::SUCCESS);
        check_content(page, &read.buffer.unwrap());
    }
    assert!(ended_by_reset.into_inner() > 0, "no reset came in mid-I/O");
    assert_eq!(controller.recovery_stats().resets, resets.into_inner());
    drop((queue, pool));
    controller.detach().unwrap();
}

/// Checks that the page holds one of the numbers that it may hold. Later reads must find the same
/// number.
pub(crate) fn check_content(page: &mut Page, buffer: &Buffer) {
    let bytes = buffer.to_vec(PAGE);
    let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes == self::page(number), "a page is in parts: {number} and others");
    assert!(page.may.contains(&number), "a page has {number}, not of {:?}", page.may);
    page.may = vec![number];
}

#[test]
fn a_raw_image_passes() {
    for options in ["", "?direct=off", "?direct=off&aio=threads"] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = image(directory.path(), "disk.img", BYTES);
        check_disk_type(&format!("{}{options}", path.display()));
    }
}

#[test]
fn a_qcow2_image_passes() {
    for options in ["", "?aio=threads"] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("disk.qcow2");
        create(&path, BYTES).unwrap();
        check_disk_type(&format!("{}{options}", path.display()));
        is_consistent(&path);
    }
}

#[test]
fn a_memory_disk_passes() {
    check_disk_type("mem:16MiB");
}

#[test]
fn an_nbd_disk_passes() {
    let below = Export::start("mem:16MiB");
    check_disk_type(&below.uri("&settle=50ms"));
}

#[test]
fn a_namespace_of_another_controller_passes() {
    for options in ["", "?zero-copy=off"] {
        let below = Server::start(&["mem:16MiB"], &[]);
        check_disk_type(&format!("vfio-user:{}/1{options}", below.socket().display()));
    }
}

#[test]
fn character_device_namespaces_pass() {
    for device in outside::namespaces() {
        for options in ["", "?aio=threads"] {
            check_disk_type(&format!("{device}{options}"));
        }
    }
}
