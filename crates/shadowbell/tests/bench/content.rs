//! `bench --verify` against disks that lose, tear, misplace and zero written data.

use shadowbell::testing::{LoadConfig, Outcome, Session, Workload, connect, measure};
use shadowbell_disk::{Disk, DiskError, DiskInfo, Op, Queue, Request, Submitted};
use shadowbell_disk_file::MemDisk;
use shadowbell_memory::Segments;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BS: u32 = 4096;
const BLOCKS: u64 = 64;

/// Injected defect of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    /// The write is dropped.
    Lost,
    /// The write goes to the next block.
    Misplaced,
    /// Only the first half of the data is written.
    Torn,
    /// Part of the written block is zeroed afterwards.
    Zeroed,
}

/// Memory disk with a defect in its `at`th write.
#[derive(Debug)]
pub(crate) struct BadDisk {
    pub(crate) memory: MemDisk,
    pub(crate) defect: Defect,
    pub(crate) at: u64,
    pub(crate) writes: Arc<AtomicU64>,
}

struct BadQueue {
    memory: Box<dyn Queue>,
    defect: Defect,
    at: u64,
    writes: Arc<AtomicU64>,
}

impl Disk for BadDisk {
    fn info(&self) -> DiskInfo {
        self.memory.info()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        let (defect, at, writes) = (self.defect, self.at, Arc::clone(&self.writes));
        Ok(Box::new(BadQueue { memory: self.memory.queue()?, defect, at, writes }))
    }

    fn name(&self) -> String {
        format!("{:?}", self.defect)
    }
}

impl Queue for BadQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        let is_write = matches!(request.op, Op::Write { .. });
        if !is_write || self.writes.fetch_add(1, Ordering::Relaxed) != self.at {
            return self.memory.submit(tag, request, data);
        }
        let Request { op, offset, len } = *request;
        match self.defect {
            Defect::None => self.memory.submit(tag, request, data),
            Defect::Lost => Submitted::Done(Ok(())),
            Defect::Misplaced => {
                self.memory.submit(tag, &Request { op, offset: offset + len, len }, data)
            }
            Defect::Torn => self.memory.submit(tag, &Request { op, offset, len: len / 2 }, data),
            Defect::Zeroed => {
                let written = self.memory.submit(tag, request, data);
                let op = Op::WriteZeroes { deallocate: false, fua: false };
                let zero = Request { op, offset: offset + 1024, len: 512 };
                assert_eq!(
                    self.memory.submit(tag, &zero, &mut Segments::default()),
                    Submitted::Done(Ok::<(), DiskError>(()))
                );
                written
            }
        }
    }
}

/// Writes every block `passes` times in order, with `defect` in write number `at`, and reads all
/// blocks.
fn run(defect: Defect, at: u64, passes: u64) -> Outcome {
    let config = LoadConfig {
        rw: Workload::Write,
        bs: BS,
        // Depth 1, so that the order of the writes is known.
        iodepth: 1,
        number_ios: Some(BLOCKS * passes),
        verify: true,
        ..LoadConfig::default()
    };
    let memory = MemDisk::new(BLOCKS * u64::from(BS) / 512, 512).unwrap();
    let disk = Arc::new(BadDisk { memory, defect, at, writes: Arc::default() });
    let transport = connect(disk, false).unwrap();
    let target = "local:bad".parse().unwrap();
    let mut session = Session::over(target, transport, &config.attach_options()).unwrap();
    let outcome = measure(&mut session, &config, &mut |_| ControlFlow::Continue(())).unwrap();
    session.detach().unwrap();
    assert_eq!(outcome.row.verified_blocks, Some(BLOCKS), "{defect:?}");
    outcome
}

#[track_caller]
fn assert_finds(defect: Defect, at: u64, passes: u64, errors: u64, words: &[&str]) {
    let outcome = run(defect, at, passes);
    assert_eq!(outcome.row.verify_errors, Some(errors), "{:?}", outcome.bad_blocks);
    let all = outcome.bad_blocks.join("; ");
    assert!(words.iter().all(|word| all.contains(word)), "{all}");
}

#[test]
fn a_disk_without_defect_passes_verification() {
    assert_finds(Defect::None, 0, 2, 0, &[]);
}

#[test]
fn a_lost_write_is_found() {
    // First write of the block: the block has no pattern of `--verify`.
    assert_finds(Defect::Lost, 5, 1, 1, &["byte 20480", "not written with --verify"]);
    // Second write of the block: the block still holds the first pattern.
    assert_finds(Defect::Lost, BLOCKS + 5, 2, 1, &["byte 20480", "holds write 1", "write is 2"]);
}

#[test]
fn a_misplaced_write_is_found() {
    // The write of block 62 in the second pass goes to block 63. The following write of block 63
    // overwrites it. So only block 62 is wrong: it is stale.
    assert_finds(
        Defect::Misplaced,
        2 * BLOCKS - 2,
        2,
        1,
        &["byte 253952", "holds write 1, but the last completed write is 2"],
    );
    // A write goes to a block that is not written again, so both blocks are bad.
    let outcome = run_misplaced_over_a_finished_block();
    assert_eq!(outcome.row.verify_errors, Some(2), "{:?}", outcome.bad_blocks);
    assert!(
        outcome.bad_blocks.iter().any(|bad| bad.contains("misplaced")),
        "{:?}",
        outcome.bad_blocks
    );
}

/// One and a half passes. The last write of block 31 goes to block 32, and block 32 is not written
/// again.
fn run_misplaced_over_a_finished_block() -> Outcome {
    let config = LoadConfig {
        rw: Workload::Write,
        bs: BS,
        iodepth: 1,
        number_ios: Some(BLOCKS + BLOCKS / 2),
        verify: true,
        ..LoadConfig::default()
    };
    let memory = MemDisk::new(BLOCKS * u64::from(BS) / 512, 512).unwrap();
    // Number of the last write of the run.
    let at = BLOCKS + BLOCKS / 2 - 1;
    let disk = Arc::new(BadDisk { memory, defect: Defect::Misplaced, at, writes: Arc::default() });
    let transport = connect(disk, false).unwrap();
    let target = "local:bad".parse().unwrap();
    let mut session = Session::over(target, transport, &config.attach_options()).unwrap();
    let outcome = measure(&mut session, &config, &mut |_| ControlFlow::Continue(())).unwrap();
    session.detach().unwrap();
    outcome
}

#[test]
fn a_torn_write_is_found() {
    assert_finds(Defect::Torn, BLOCKS + 5, 2, 1, &["byte 22528", "torn", "write 1", "write 2"]);
}

#[test]
fn a_zeroed_part_of_a_block_is_found() {
    assert_finds(Defect::Zeroed, 5, 1, 1, &["byte 21504", "not written with --verify"]);
}
