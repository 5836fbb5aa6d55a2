//! What a disk of every kind passes: `verify` of everything at once, and resets in mid-I/O.

use crate::control::SetOnDrop;
use crate::disk_kinds::{Export, is_consistent, keeper};
use crate::harness::{Server, complete, finish, image, program, run};
use shadowbell_backend_qcow2::create;
use shadowbell_driver::{AttachOptions, Buffer, Completion, Recovery, Token};
use shadowbell_spec::Status;
use shadowbell_testing::outside;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const BYTES: u64 = 16 << 20;
pub(crate) const PAGE: usize = 4096;
/// Requests under way, each to a page of its own.
const DEPTH: u64 = 64;
/// How often a reset comes, and at most if none of these has come in mid-I/O.
const RESETS: u64 = 12;
const MOST_RESETS: u64 = 1000;

/// Serves the disk, and has it pass.
pub(crate) fn passes(disk: &str) {
    let mut server = keeper(disk);
    everything_at_once(&server);
    resets(&server);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// Reads, writes, flushes, zeroes, deallocations and compares, each byte checked.
fn everything_at_once(server: &Server) {
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

/// What a page is filled with.
fn page(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(PAGE / 8)
}

pub(crate) fn fill(buffer: &mut Buffer, number: u64) {
    assert!(buffer.copy_from(0, &page(number)));
}

/// A page, and what is under way to it.
#[derive(Default)]
pub(crate) struct Page {
    /// What it may hold.
    pub(crate) may: Vec<u64>,
    /// The number that is being written, or none if it is being read.
    pub(crate) under_way: Option<(Token, Option<u64>)>,
}

/// Resets while many requests are under way. A write that a reset ends is there as a whole or not
/// at all, and does not get to the disk after it: neither over what is written then, nor with what
/// is put into its buffer then.
fn resets(server: &Server) {
    // What a reset ends is not submitted again.
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
            // A disk in memory has answered all that it has before most of them.
            let in_vain = |n| n < MOST_RESETS && ended_by_reset.load(Ordering::Relaxed) == 0;
            for n in (0..).take_while(|n| *n < RESETS || in_vain(*n)) {
                let pause = if n < RESETS { 10_000 + n * 7_000 % 23_000 } else { 500 + n * 7 % 97 };
                // Random moment: any is good.
                std::thread::sleep(Duration::from_micros(pause));
                controller.reset().unwrap();
                resets.fetch_add(1, Ordering::Relaxed);
            }
        });
        loop {
            let ends = is_over.load(Ordering::Relaxed);
            for (at, page) in pages.iter_mut().enumerate() {
                if ends || page.under_way.is_some() {
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
                page.under_way = Some((token, number));
            }
            queue.ring().unwrap();
            if pages.iter().all(|page| page.under_way.is_none()) {
                break;
            }
            let Completion { token, status, buffer, .. } = complete(&mut queue);
            let is = |page: &Page| page.under_way.as_ref().is_some_and(|(it, _)| *it == token);
            let at = pages.iter().position(is).expect("it ends once");
            let page = &mut pages[at];
            let (_, number) = page.under_way.take().unwrap();
            match (status, number) {
                (Status::SUCCESS, Some(number)) => page.may = vec![number],
                (Status::SUCCESS, None) => holds(page, &buffer.unwrap()),
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
        holds(page, &read.buffer.unwrap());
    }
    assert!(ended_by_reset.into_inner() > 0, "no reset came in mid-I/O");
    assert_eq!(controller.recovery_stats().resets, resets.into_inner());
    drop((queue, pool));
    controller.detach().unwrap();
}

/// What was read is what the page may hold, and what it holds from then on.
pub(crate) fn holds(page: &mut Page, buffer: &Buffer) {
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
        passes(&format!("{}{options}", path.display()));
    }
}

#[test]
fn a_qcow2_image_passes() {
    for options in ["", "?aio=threads"] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("disk.qcow2");
        create(&path, BYTES).unwrap();
        passes(&format!("{}{options}", path.display()));
        is_consistent(&path);
    }
}

#[test]
fn memory_passes() {
    passes("mem:16MiB");
}

#[test]
fn an_export_passes() {
    let below = Export::start("mem:16MiB");
    passes(&below.uri("&settle=50ms"));
}

#[test]
fn a_namespace_of_another_controller_passes() {
    for options in ["", "?zero-copy=off"] {
        let below = Server::start(&["mem:16MiB"], &[]);
        passes(&format!("vfio-user:{}/1{options}", below.socket().display()));
    }
}

#[test]
fn namespaces_by_their_character_devices_pass() {
    for device in outside::namespaces() {
        for options in ["", "?aio=threads"] {
            passes(&format!("{device}{options}"));
        }
    }
}
