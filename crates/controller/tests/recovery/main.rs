//! Crash recovery of a controller: processes are killed at random moments, and other processes
//! recover the controller.
//!
//! The test process is the host. It has the memory, the queues and the doorbells, and stores the
//! checkpoints. The controller is in a child process, which runs the same test program and is
//! killed.

mod crashing_commands;
mod exclusive;
mod host;
mod one_step;
mod process;

use host::Host;
use process::{ADMIN_DATA, BASE, BLOCKS, Instructions, LIMIT};
use shadowbell_disk::Disk;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{DeleteIoQueue, Identify};
use shadowbell_state::AbortPoint;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Number of kills in a test; `SHADOWBELL_KILLS` overrides it.
fn kills(default: u32) -> u32 {
    let asked = std::env::var("SHADOWBELL_KILLS").ok().and_then(|kills| kills.parse().ok());
    asked.unwrap_or(default)
}

/// Lock that prevents parallel tests. Recovery waits for the end of the dead process's I/O, and on
/// busy CPUs the kernel needs long for that.
static SERIAL: Mutex<()> = Mutex::new(());

/// Submits writes and reads while the process is killed repeatedly.
fn run_with_kills(disk: Result<String, Arc<dyn Disk>>, mapped: bool, polling: bool, seed: u64) {
    run_with_kills_as(Instructions::default(), disk, mapped, polling, seed);
}

fn run_with_kills_as(
    instructions: Instructions,
    disk: Result<String, Arc<dyn Disk>>,
    mapped: bool,
    polling: bool,
    seed: u64,
) {
    let _alone = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut random = Random(seed | 1);
    let mut host = Host::with_instructions(disk, mapped, polling, instructions);
    host.begin();
    for _ in 0..kills(8) {
        work(&mut host, &mut random);
        host.kill();
    }
    host.verify();
    println!("{} commands were carried out again", host.replayed);
}

/// Submits writes and reads until a random number of them has completed.
fn work(host: &mut Host, random: &mut Random) {
    host.until_taken();
    let (until, began) = (random.next() % 400, Instant::now());
    while host.completed < until {
        let at = (random.next() % 2) as usize;
        for _ in 0..random.next() % 8 {
            host.submit_io(at, random.next());
        }
        let mut reaped = false;
        for _ in 0..random.next() % 8 {
            reaped |= host.reap_io(at);
        }
        if !reaped {
            // This sleep is shorter than `wait::pause`, because it occurs once per few commands.
            std::thread::sleep(Duration::from_micros(20));
        }
        assert!(began.elapsed() < LIMIT, "no progress: {:?}", host.in_flight);
    }
}

fn memory() -> Result<String, Arc<dyn Disk>> {
    Err(shadowbell_disk_file::open_recoverable(&format!("mem:{}", BLOCKS * 512)).unwrap())
}

#[test]
fn a_memory_disk_with_mapped_doorbells_survives_kills() {
    run_with_kills(memory(), true, true, 0x1234_5678);
    run_with_kills(memory(), true, false, 0x8765_4321);
}

#[test]
fn a_memory_disk_with_shadow_doorbells_survives_kills() {
    run_with_kills(memory(), false, true, 0x1111_2222);
    run_with_kills(memory(), false, false, 0x3333_4444);
}

/// Two I/O threads serve the queues of this controller, but one thread recovers them.
#[test]
fn an_isolated_controller_survives_kills() {
    let instructions = Instructions { isolated: true, ..Instructions::default() };
    let dir = tempfile::tempdir().unwrap();
    for (mapped, polling, seed) in
        [(false, true, 0x9999_aaaa), (false, false, 0xbbbb_cccc), (true, true, 0xdddd_eeee)]
    {
        let path = dir.path().join(format!("{seed:x}"));
        std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
        run_with_kills_as(instructions, Ok(path.display().to_string()), mapped, polling, seed);
    }
}

/// A controller quiesces directly after its recovery. It fetches no new commands, but still
/// executes those that were in flight in the dead process.
#[test]
fn a_controller_that_quiesces_after_recovery_survives_kills() {
    let _alone = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    for (mapped, polling) in [(false, true), (true, false)] {
        let path = dir.path().join(format!("{mapped}"));
        std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
        let mut random = Random(0x1357_9bdf);
        let mut host = Host::new(Ok(path.display().to_string()), mapped, polling);
        host.begin();
        for _ in 0..kills(8) {
            host.instructions.quiesces = false;
            work(&mut host, &mut random);
            host.instructions.quiesces = true;
            host.kill();
            work(&mut host, &mut random);
            host.instructions.quiesces = false;
            host.kill();
        }
        host.verify();
        assert_ne!(host.replayed, 0, "no command was in flight at a kill");
    }
}

#[test]
fn a_file_with_shadow_doorbells_survives_kills() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
    run_with_kills(Ok(path.display().to_string()), false, false, 0x5555_6666);
}

#[test]
fn a_file_with_mapped_doorbells_survives_kills() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
    run_with_kills(Ok(path.display().to_string()), true, true, 0x7777_8888);
}

/// The host creates and deletes queues and submits event requests while the process is killed
/// repeatedly. Each command completes once.
#[test]
fn admin_commands_end_once_each() {
    let _alone = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut random = Random(0x9999_aaaa);
    let mut host = Host::new(memory(), true, true);
    let mut left = kills(25);
    host.until_taken();
    let mut requests = BTreeSet::new();
    for _ in 0..2 {
        requests.insert(host.submit(None, Sqe::new(0x0c, 0, 0)));
    }
    while left > 0 {
        let budget = (random.next() % 3) as u32;
        let mut to_kill = budget.min(left);
        let mut kill = || {
            let now = to_kill > 0 && random.next().is_multiple_of(400);
            to_kill -= u32::from(now);
            now
        };
        host.create(1, 8, &mut kill);
        left -= budget.min(left);
        let identify = Identify { cns: 1, ..Identify::default() }.encode(Sqe::new(6, 0, 0));
        host.admin(identify.with_prps(BASE + ADMIN_DATA, 0), &mut || false);
        for _ in 0..20 {
            host.submit_io(0, random.next());
        }
        host.drain();
        for opcode in [0, 4] {
            host.admin(DeleteIoQueue { qid: 1 }.encode(Sqe::new(opcode, 0, 0)), &mut || false);
        }
        host.queues.clear();
        host.in_flight.clear();
    }
}

/// Submits writes and reads until the process has died at its crash point. Returns false if the
/// crash point is not reached. If `admin` is true, also creates and deletes queues; in this case,
/// the next process may have been started already.
fn work_until_crash(host: &mut Host, random: &mut Random, admin: bool) -> bool {
    let (began, mut completed) = (Instant::now(), 0);
    while !host.has_died() && host.instructions.abort_at.is_some() && completed < 300 {
        assert!(began.elapsed() < host.timeout, "no progress: {:?}", host.in_flight);
        let at = (random.next() % 2) as usize;
        for _ in 0..random.next() % 8 {
            host.submit_io(at, random.next());
        }
        while host.reap_io(at) {
            completed += 1;
        }
        if admin && random.next().is_multiple_of(16) {
            host.create(3, 4, &mut || false);
            for opcode in [0, 4] {
                let command = DeleteIoQueue { qid: 3 }.encode(Sqe::new(opcode, 0, 0));
                host.admin(command, &mut || false);
            }
            host.queues.pop();
        }
    }
    host.instructions.abort_at.take().is_none()
}

/// Lets a process die at each crash point. Other processes recover the controller.
fn crash_at_each_step(host: &mut Host, random: &mut Random, points: &[AbortPoint]) {
    host.begin();
    host.until_taken();
    for (point, nth) in points.iter().flat_map(|point| [(*point, 1), (*point, 2), (*point, 5)]) {
        println!("{}, time {nth}", point.name());
        if matches!(point, AbortPoint::ReplayStarted | AbortPoint::ReplayRecorded) {
            // A crash before the crash point under test, so that the next process has commands to
            // recover.
            host.instructions.abort_at = Some((AbortPoint::SqStored, 3));
            host.kill();
            assert!(work_until_crash(host, random, false), "nothing is ever fetched");
        }
        host.instructions.abort_at = Some((point, nth));
        host.kill();
        let is_reached = work_until_crash(host, random, true);
        // If `nth` is greater than 1, the crash point may not be reached, because there are too few
        // commands to recover.
        assert!(is_reached || nth != 1, "crash point {} is not reached", point.name());
        host.kill();
        host.until_taken();
    }
    host.verify();
}

/// Crash points of a controller with a file as its disk.
const FILE_CRASH_POINTS: &[AbortPoint] = &[
    AbortPoint::Fetched,
    AbortPoint::Started,
    AbortPoint::Recorded,
    AbortPoint::Staged,
    AbortPoint::Posted,
    AbortPoint::Freed,
    AbortPoint::SqStored,
    AbortPoint::CqStored,
    AbortPoint::Notified,
    AbortPoint::ReplayStarted,
    AbortPoint::ReplayRecorded,
    AbortPoint::Changed,
    AbortPoint::ChangeRecorded,
    AbortPoint::AdminPosted,
    AbortPoint::QueuesRecovered,
];

/// Crash points of a controller with a memory disk. This disk completes requests at once, so there
/// are no crash points with a request in flight.
const MEMORY_CRASH_POINTS: &[AbortPoint] = &[
    AbortPoint::Fetched,
    AbortPoint::Staged,
    AbortPoint::Posted,
    AbortPoint::Freed,
    AbortPoint::SqStored,
    AbortPoint::CqStored,
    AbortPoint::Notified,
    AbortPoint::Changed,
    AbortPoint::ChangeRecorded,
    AbortPoint::AdminPosted,
    AbortPoint::QueuesRecovered,
];

#[test]
fn a_process_may_die_at_each_step() {
    let _alone = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    for (mapped, polling) in [(false, false), (true, true)] {
        let path = dir.path().join(format!("{mapped}.img"));
        std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
        let mut host = Host::new(Ok(path.display().to_string()), mapped, polling);
        crash_at_each_step(&mut host, &mut Random(0xaaaa_bbbb), FILE_CRASH_POINTS);
        let mut host = Host::new(memory(), mapped, polling);
        crash_at_each_step(&mut host, &mut Random(0xcccc_dddd), MEMORY_CRASH_POINTS);
    }
}

/// Shows that the crash tests detect errors: if steps are executed in a wrong order, commands are
/// lost, completed twice, or executed again over newer data.
#[test]
fn steps_in_a_wrong_order_do_not_survive() {
    let _alone = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    for (order, point) in
        [("freed-before-posted", AbortPoint::Staged), ("stored-before-freed", AbortPoint::CqStored)]
    {
        let path = dir.path().join(order);
        std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
        let disk = path.display().to_string();
        let outcome = std::panic::catch_unwind(move || {
            let mut host = Host::new(Ok(disk), false, false);
            host.instructions.wrong = Some(order);
            // This time limit is shorter than in other tests, because a timeout is a failure that
            // the test expects.
            host.timeout = Duration::from_secs(10);
            crash_at_each_step(&mut host, &mut Random(0xeeee_ffff), &[point; 4]);
        });
        assert!(outcome.is_err(), "{order} is survived");
    }
}

/// The process dies as soon as the controller is ready after a reset. Recovery must use the admin
/// doorbells that the host has written since the reset.
#[test]
fn a_process_may_die_as_soon_as_the_controller_is_ready_again() {
    let _alone = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut host = Host::new(memory(), false, false);
    for _ in 0..kills(5) {
        host.until_taken();
        host.begin();
        host.reset_and_kill();
        host.until_taken();
        let identify = Identify { cns: 1, ..Identify::default() }.encode(Sqe::new(6, 0, 0));
        host.admin(identify.with_prps(BASE + ADMIN_DATA, 0), &mut || false);
    }
}

/// A recovering process finds completions that its predecessor has posted. If it crashes as well,
/// the next process must not post them again.
#[test]
fn completions_are_not_posted_again_after_a_second_crash() {
    let _alone = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut host = Host::new(memory(), true, true);
    for _ in 0..3 {
        host.until_taken();
        for _ in 0..3 {
            let identify = Identify { cns: 1, ..Identify::default() }.encode(Sqe::new(6, 0, 0));
            host.admin(identify.with_prps(BASE + ADMIN_DATA, 0), &mut || false);
        }
        host.kill();
    }
    host.until_taken();
    let identify = Identify { cns: 1, ..Identify::default() }.encode(Sqe::new(6, 0, 0));
    host.admin(identify.with_prps(BASE + ADMIN_DATA, 0), &mut || false);
    assert!(host.reap(None).is_none());
}
