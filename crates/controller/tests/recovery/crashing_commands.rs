//! Commands that crash the process that executes them.

use crate::host::Host;
use crate::process::{BLOCKS, Instructions};
use crate::{SERIAL, memory};
use shadowbell_disk::Disk;
use shadowbell_state::AbortPoint;
use shadowbell_testing::wait;
use std::sync::Arc;
use std::time::Instant;

/// Bits of `random` in `submit_io` that select a write.
const WRITES: u64 = BLOCKS << 50 | 1 << 40;

/// Fills both queues. The commands for the blocks in `deadly` crash the process.
fn run_with_deadly_commands(
    disk: Result<String, Arc<dyn Disk>>,
    instructions: &'static str,
    deadly: &[u64],
) {
    let _alone = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let instructions = Instructions { deadly: Some(instructions), ..Instructions::default() };
    let mut host = Host::with_instructions(disk, false, false, instructions);
    host.deadly = deadly.iter().copied().collect();
    host.begin();
    host.until_taken();
    // The commands fill both queues: the first one has room for 15, the other for 4.
    for lba in 100..115 {
        assert!(host.submit_io(0, lba | WRITES));
    }
    for lba in 200..204 {
        assert!(host.submit_io(1, lba | WRITES));
    }
    host.drain();
    assert_eq!(host.abandoned, host.deadly);
    let crashes = host.crashes;
    // One crash may count for two commands that were in flight together, so the number of crashes
    // may be less than three per command.
    assert!((3..=3 * deadly.len() as u32).contains(&crashes), "{crashes} processes have died");
    // Later commands succeed, also if the process is killed.
    for round in 0..100 {
        for lba in [0, 1, 2, 3, 4, 5, 6, 7] {
            assert!(host.submit_io((lba % 2) as usize, (lba + 300) | WRITES));
        }
        if round % 40 == 39 {
            host.kill();
        }
        host.drain();
    }
    host.verify();
    assert_eq!(host.crashes, crashes);
}

fn file(directory: &tempfile::TempDir) -> Result<String, Arc<dyn Disk>> {
    let path = directory.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
    Ok(path.display().to_string())
}

#[test]
fn a_deadly_command_on_memory_fails_after_three_crashes() {
    run_with_deadly_commands(memory(), "start:107", &[107]);
    run_with_deadly_commands(memory(), "start:100", &[100]);
}

#[test]
fn a_deadly_command_on_a_file_fails_after_three_crashes() {
    let directory = tempfile::tempdir().unwrap();
    run_with_deadly_commands(file(&directory), "end:107", &[107]);
    run_with_deadly_commands(file(&directory), "start:107", &[107]);
}

/// Crashes are attributed to the commands that cause them, not to others of the same or another
/// queue.
#[test]
fn several_deadly_commands_are_distinguished() {
    let directory = tempfile::tempdir().unwrap();
    run_with_deadly_commands(file(&directory), "end:103,end:109,end:202", &[103, 109, 202]);
    run_with_deadly_commands(memory(), "start:103,start:109,start:202", &[103, 109, 202]);
}

/// A kill from outside is not the fault of a command in flight, so any number of kills does not
/// make the command fail.
#[test]
fn a_process_that_is_killed_from_outside_blames_no_command() {
    let _alone = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let steps = [
        (file(&directory), [AbortPoint::SqStored, AbortPoint::ReplayStarted]),
        (memory(), [AbortPoint::Fetched, AbortPoint::Fetched]),
    ];
    for (disk, [first, then]) in steps {
        let mut host = Host::new(disk, false, false);
        host.begin();
        host.until_taken();
        host.instructions.abort_at = Some((first, 1));
        host.kill();
        host.until_taken();
        assert!(host.submit_io(0, 7 | WRITES));
        for step in [Some(then), Some(then), Some(then), Some(then), None] {
            let began = Instant::now();
            while !host.has_died() {
                assert!(began.elapsed() < host.timeout, "crash point {step:?} is not reached");
                wait::pause();
            }
            host.instructions.abort_at = step.map(|step| (step, 1));
            host.kill();
        }
        // `drain` panics if a completion has an error.
        host.drain();
        assert_eq!(host.crashes, 5);
        host.verify();
    }
}
