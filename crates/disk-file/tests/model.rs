//! Test of every operation on every disk type, in batches, against a model in memory.

mod common;

use common::{Host, Undo, as_root, directory, image, open, run};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use shadowbell_disk::{Disk, DiskError, Op, Request};
use shadowbell_testing::outside;
use shadowbell_testing::programs::skipped;
use std::sync::Arc;

/// Size of the disk in bytes. It is larger than two bounce buffers.
const SIZE: usize = 1 << 20;
/// Number of requests in a batch. Each has its own part of the disk and of the host's memory, a
/// lane.
const LANES: usize = 8;
/// Size of the host's memory in bytes, twice that of the disk, so that buffers can be scattered.
const MEMORY: usize = 2 * SIZE;

/// Layout of a request's buffer in memory.
#[derive(Clone, Debug)]
struct Layout {
    /// Alignment of every address and length, except for the length of the last piece.
    unit: usize,
    /// For each piece: its length and the gap before it, in units.
    pieces: Vec<(usize, usize)>,
}

#[derive(Clone, Debug)]
struct Action {
    op: Op,
    /// Start and length of the range, as fractions of the lane.
    start: u16,
    len: u16,
    layout: Layout,
    seed: u64,
    /// For a compare: position of a byte that differs, as a fraction of the length.
    differs: Option<u16>,
}

#[derive(Clone, Debug)]
enum Step {
    Batch(Vec<Option<Action>>),
    /// Single request, which may cover the whole disk.
    Whole(Action),
    Flush,
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => Just(Op::Read),
        4 => Just(Op::Write { fua: false }),
        1 => Just(Op::Write { fua: true }),
        1 => any::<(bool, bool)>().prop_map(|(deallocate, fua)| Op::WriteZeroes { deallocate, fua }),
        1 => Just(Op::Discard),
        2 => Just(Op::Compare),
        1 => Just(Op::Verify),
    ]
}

fn layout() -> impl Strategy<Value = Layout> {
    let units = prop_oneof![Just(1usize), Just(4), Just(512), Just(4096)];
    (units, vec((1..64usize, 0..3usize), 0..40)).prop_map(|(unit, pieces)| Layout { unit, pieces })
}

fn action() -> impl Strategy<Value = Action> {
    let differs = proptest::option::of(any::<u16>());
    (op(), any::<u16>(), any::<u16>(), layout(), any::<u64>(), differs).prop_map(
        |(op, start, len, layout, seed, differs)| Action { op, start, len, layout, seed, differs },
    )
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => vec(proptest::option::of(action()), LANES).prop_map(Step::Batch),
        3 => action().prop_map(Step::Whole),
        1 => Just(Step::Flush),
        1 => Just(Step::Reopen),
    ]
}

/// Scatters `len` bytes in pieces inside `[base, base + room)`.
fn scatter(layout: &Layout, base: usize, room: usize, len: usize) -> Vec<(usize, usize)> {
    let mut spare = room - len;
    let (mut at, mut left, mut pieces) = (base, len, Vec::new());
    for (units, gap) in &layout.pieces {
        let (piece, gap) = (units * layout.unit, gap * layout.unit);
        if piece >= left || gap > spare {
            break;
        }
        at += gap;
        spare -= gap;
        pieces.push((at, piece));
        at += piece;
        left -= piece;
    }
    if left > 0 {
        pieces.push((at, left));
    }
    pieces
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Model of the disk, and of the contents of the host's memory.
struct Model {
    block: usize,
    blocks: Vec<u8>,
    memory: Vec<u8>,
}

impl Model {
    /// Returns the request for an action in lane `lane` of `lanes`, and the pieces of its buffer.
    fn request(
        &self,
        action: &Action,
        lane: usize,
        lanes: usize,
    ) -> (Request, Vec<(usize, usize)>) {
        let blocks = SIZE / self.block / lanes;
        let start = (usize::from(action.start) * blocks) >> 16;
        let len = 1 + ((usize::from(action.len) * (blocks - start)) >> 16);
        let offset = (lane * blocks + start) * self.block;
        let len = len.min(blocks - start) * self.block;
        let request = Request { op: action.op, offset: offset as u64, len: len as u64 };
        let room = MEMORY / lanes;
        let pieces = match action.op {
            Op::Read | Op::Write { .. } | Op::Compare => {
                scatter(&action.layout, lane * room, room, len)
            }
            _ => Vec::new(),
        };
        (request, pieces)
    }

    /// Writes the data of the action to the host's memory.
    fn prepare(&mut self, action: &Action, request: &Request, pieces: &[(usize, usize)]) {
        let range = request.offset as usize..(request.offset + request.len) as usize;
        let data = match action.op {
            Op::Write { .. } => noise(action.seed, range.len()),
            Op::Compare => {
                let mut data = self.blocks[range].to_vec();
                if let Some(differs) = action.differs {
                    let at = (usize::from(differs) * data.len()) >> 16;
                    data[at] ^= 1 << (action.seed & 7);
                }
                data
            }
            _ => return,
        };
        let mut done = 0;
        for (at, len) in pieces {
            self.memory[*at..at + len].copy_from_slice(&data[done..done + len]);
            done += len;
        }
    }

    /// Applies the expected effect of the request to the model.
    fn apply(
        &mut self,
        action: &Action,
        request: &Request,
        pieces: &[(usize, usize)],
    ) -> Result<(), DiskError> {
        let range = request.offset as usize..(request.offset + request.len) as usize;
        let mut at = range.start;
        match action.op {
            Op::Read => {
                for (to, len) in pieces {
                    self.memory[*to..to + len].copy_from_slice(&self.blocks[at..at + len]);
                    at += len;
                }
            }
            Op::Write { .. } => {
                for (from, len) in pieces {
                    self.blocks[at..at + len].copy_from_slice(&self.memory[*from..from + len]);
                    at += len;
                }
            }
            Op::WriteZeroes { .. } | Op::Discard => self.blocks[range].fill(0),
            Op::Compare if action.differs.is_some() => return Err(DiskError::CompareFailed),
            _ => {}
        }
        Ok(())
    }
}

fn check(steps: &[Step], open: &dyn Fn(bool) -> Arc<dyn Disk>) {
    let mut disk = open(true);
    let info = disk.info();
    assert_eq!(info.bytes(), SIZE as u64);
    let mut queue = disk.queue().unwrap();
    let host = Host::new(MEMORY as u64);
    let mut model =
        Model { block: info.block_size as usize, blocks: vec![0; SIZE], memory: vec![0; MEMORY] };
    for step in steps {
        let actions: Vec<(usize, &Action)> = match step {
            Step::Batch(lanes) => {
                lanes.iter().enumerate().filter_map(|(l, a)| Some((l, a.as_ref()?))).collect()
            }
            Step::Whole(action) => vec![(0, action)],
            Step::Flush => {
                let flush = Request { op: Op::Flush, offset: 0, len: 0 };
                assert_eq!(
                    run(&mut *queue, vec![(flush, shadowbell_memory::Segments::new())]),
                    [Ok(())]
                );
                continue;
            }
            Step::Reopen => {
                drop(queue);
                drop(disk);
                disk = open(false);
                queue = disk.queue().unwrap();
                if disk.name().starts_with("mem:") {
                    model.blocks.fill(0);
                }
                continue;
            }
        };
        let lanes = if matches!(step, Step::Whole(_)) { 1 } else { LANES };
        let planned: Vec<_> = actions
            .iter()
            .map(|(lane, action)| (*action, model.request(action, *lane, lanes)))
            .collect();
        for (action, (request, pieces)) in &planned {
            model.prepare(action, request, pieces);
        }
        host.bytes.write_from(0, &model.memory).unwrap();
        let requests = planned
            .iter()
            .map(|(action, (request, pieces))| {
                (*request, host.buffer(pieces, action.op == Op::Read))
            })
            .collect();
        let results = run(&mut *queue, requests);
        for ((action, (request, pieces)), result) in planned.iter().zip(results) {
            let expected = model.apply(action, request, pieces);
            assert_eq!(result, expected, "{request:?} into {pieces:?}");
        }
        // The whole memory is compared, so that writes outside of the buffers are detected.
        let same = host.content() == model.memory;
        assert!(same, "the host's memory differs after {planned:?}");
    }
    let everything = Request { op: Op::Read, offset: 0, len: SIZE as u64 };
    assert_eq!(run(&mut *queue, vec![(everything, host.buffer(&[(0, SIZE)], true))]), [Ok(())]);
    assert!(host.content()[..SIZE] == model.blocks[..], "the disk differs at the end");
}

fn cases(cases: u32, open: impl Fn(bool) -> Arc<dyn Disk>) {
    let config =
        Config { cases, max_shrink_iters: 200, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&vec(step(), 1..10), |steps| {
            check(&steps, &open);
            Ok(())
        })
        .unwrap();
}

fn on_files(count: u32, options: &str) {
    let directory = directory();
    let path = directory.path().join("disk.img");
    if shadowbell_disk_file::open(&format!(
        "{}{options}",
        image(directory.path(), SIZE as u64).display()
    ))
    .is_err_and(|e| matches!(e, shadowbell_disk::OpenError::NotDirect { .. }))
    {
        skipped("no direct I/O on the file system of the build directory");
        return;
    }
    cases(count, |fresh| {
        if fresh {
            std::fs::remove_file(&path).unwrap();
            image(directory.path(), SIZE as u64);
        }
        open(&path, options)
    });
}

#[test]
fn mem_512() {
    cases(128, |_| shadowbell_disk_file::open("mem:1MiB").unwrap());
}

#[test]
fn mem_4096() {
    cases(128, |_| shadowbell_disk_file::open("mem:1MiB?block-size=4096").unwrap());
}

#[test]
fn file_direct_512() {
    on_files(40, "?direct=on");
}

#[test]
fn file_direct_4096() {
    on_files(40, "?direct=on&block-size=4096");
}

#[test]
fn file_buffered_512() {
    on_files(40, "?direct=off");
}

#[test]
fn file_buffered_4096() {
    on_files(40, "?direct=off&block-size=4096");
}

#[test]
fn file_direct_by_threads() {
    on_files(40, "?direct=on&aio=threads");
}

#[test]
fn file_buffered_by_threads() {
    on_files(40, "?direct=off&aio=threads");
}

/// A tmpfs supports no ZERO_RANGE, and has no device below.
#[test]
fn file_on_tmpfs() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        skipped("no /dev/shm");
        return;
    };
    let path = image(directory.path(), SIZE as u64);
    cases(40, |fresh| {
        if fresh {
            std::fs::remove_file(&path).unwrap();
            image(directory.path(), SIZE as u64);
        }
        open(&path, "")
    });
}

#[test]
fn block_device() {
    for (sector, options) in [("512", ""), ("512", "?direct=off&block-size=4096"), ("4096", "")] {
        let directory = directory();
        let path = image(directory.path(), SIZE as u64);
        let name = path.to_str().unwrap();
        let Some(device) = as_root("losetup", &["-f", "--show", "-b", sector, name]) else {
            return;
        };
        let _detach = Undo("losetup", vec!["-d".into(), device.clone()]);
        let opened = shadowbell_disk_file::open(&device).unwrap();
        assert_eq!(opened.info().block_size.to_string(), sector, "its own, unless told otherwise");
        assert!(opened.info().discard);
        drop(opened);
        cases(12, |fresh| {
            if fresh {
                std::fs::write(&device, vec![0; SIZE]).unwrap();
            }
            open(device.as_ref(), options)
        });
    }
}

/// Namespaces behind character devices, of 1 MiB each.
#[test]
fn namespaces() {
    for device in outside::namespaces() {
        for options in ["", "?aio=threads"] {
            let opened = shadowbell_disk_file::open(&device).unwrap();
            assert!(opened.info().discard, "{device}");
            drop(opened);
            let block = device.replace("/dev/ng", "/dev/nvme");
            cases(12, |fresh| {
                if fresh {
                    std::fs::write(&block, vec![0; SIZE]).unwrap();
                }
                open(device.as_ref(), options)
            });
        }
    }
}
