//! Fair shares of an I/O thread: limits of a controller's requests in flight, and of the work for
//! one controller in one turn of the thread.

mod common;
#[path = "common/held.rs"]
mod held;

use common::{Host, Queue, run_beside};
use held::Held;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Polling, Pool, Turns};
use shadowbell_disk::Disk;
use shadowbell_memory::{Mapping, Protection};
use shadowbell_spec::nvm::DatasetManagement;
use shadowbell_spec::{Sqe, Status};
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of disk requests in flight that a command of many ranges may have.
const PARTS: usize = 32;

fn host_with_held_disk(blocks: u64) -> (Host, Held) {
    let held = Held::new(blocks);
    let disk: Arc<dyn Disk> = Arc::new(held.clone());
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    (Host::with(Config { namespaces, ..Config::default() }, Polling::Never), held)
}

/// Builds a deallocation of the even blocks from 0 to 510, with one range per block. `page` is for
/// the list of ranges.
fn dsm(host: &Host, page: u64, cid: u16) -> Sqe {
    dsm_of(host, page, cid, |n| n * 2)
}

/// Builds a deallocation of 256 ranges of one block each.
fn dsm_of(host: &Host, page: u64, cid: u16, slba: impl Fn(u64) -> u64) -> Sqe {
    for n in 0..256u64 {
        host.poke(page + n * 16 + 4, &1u32.to_le_bytes());
        host.poke(page + n * 16 + 8, &slba(n).to_le_bytes());
    }
    let fields = DatasetManagement { nr0: 255, ad: true, ..DatasetManagement::default() };
    Sqe::dsm(1, fields, cid).with_prps(page, 0)
}

#[test]
fn ranges_are_submitted_in_batches_and_a_reset_drops_the_rest() {
    let (mut host, held) = host_with_held_disk(1024);
    let mut queue = host.create(1, 512, false);
    let page = host.alloc(4096);
    held.instruct(|instructions| instructions.hold = true);
    let sqe = dsm(&host, page, 0);
    for cid in 0..400 {
        host.put(&mut queue, &sqe.with_cid(cid));
    }
    host.ring(&queue, 0);
    host.until("the first ranges", || held.seen().len() == PARTS);
    // The deletion of a queue, or a reset, cancels each request in flight once. The remaining
    // ranges of the command are not submitted.
    let cancelled = held.clone();
    let release = std::thread::spawn(move || {
        while cancelled.cancelled() < PARTS {
            std::thread::yield_now();
        }
        cancelled.instruct(|instructions| instructions.hold = false);
    });
    host.disable();
    release.join().unwrap();
    assert_eq!((held.seen().len(), held.cancelled()), (PARTS, PARTS));
}

#[test]
fn all_ranges_of_all_commands_are_executed() {
    let (mut host, held) = host_with_held_disk(1024);
    held.mark();
    let mut queue = host.create(1, 512, false);
    let page = host.alloc(4096);
    let sqe = dsm(&host, page, 0);
    // More commands are submitted than may be in flight.
    for cid in 0..100 {
        host.put(&mut queue, &sqe.with_cid(cid));
    }
    host.ring(&queue, 0);
    let mut done: Vec<u16> = (0..100)
        .map(|_| {
            let (cid, status, _) = host.wait(&mut queue);
            assert!(status.is_success());
            cid
        })
        .collect();
    done.sort_unstable();
    assert!(done.into_iter().eq(0..100));
    assert_eq!(held.seen().len(), 100 * 256);
    let left = (0..513).map(|block| if block < 512 && block % 2 == 0 { 0 } else { block });
    assert!(held.marks(0, 513).into_iter().eq(left));
}

/// Adjacent ranges are deallocated by one request. A file system frees only whole blocks, and its
/// blocks are larger than a range of 512 bytes.
#[test]
fn adjacent_ranges_are_deallocated_together() {
    let (mut host, held) = host_with_held_disk(1024);
    held.mark();
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    let (forward, backward) = (|n| n, |n| 255 - n);
    for slba in [forward, backward] as [fn(u64) -> u64; 2] {
        let before = held.seen().len();
        let sqe = dsm_of(&host, page, 0, slba);
        assert!(host.run(&mut queue, sqe).0.is_success());
        assert_eq!(held.seen().len() - before, 1);
    }
    // Each range occurs twice, and the ranges form two contiguous runs.
    let before = held.seen().len();
    let sqe = dsm_of(&host, page, 0, |n| 300 + n / 4 * 2 + n / 128 * 100 + n % 2);
    assert!(host.run(&mut queue, sqe).0.is_success());
    assert_eq!(held.seen().len() - before, 2);
    assert_eq!(held.marks(0, 256), vec![0; 256]);
    assert_eq!(held.marks(256, 1), [256]);
}

#[test]
fn an_abort_stops_a_command_of_many_ranges() {
    let (mut host, held) = host_with_held_disk(1024);
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    held.instruct(|instructions| instructions.hold = true);
    let sqe = dsm(&host, page, 0);
    for cid in 0..2 {
        host.submit(&mut queue, &sqe.with_cid(cid));
    }
    host.until("the first ranges", || held.seen().len() == PARTS);
    // A command can be aborted only after it was fetched.
    host.until("both to be fetched", || {
        host.controller.stats().submission_queues.iter().any(|sq| (sq.qid, sq.commands) == (1, 2))
    });
    let abort = |cid| Sqe::abort(shadowbell_spec::admin::Abort { sqid: 1, cid }, 0);
    // The second command has no request in flight, so it ends at once.
    assert_eq!(host.must(abort(1)) & 1, 0, "aborted");
    let (cid, status, _) = host.wait(&mut queue);
    assert_eq!((cid, status.code()), (1, Status::ABORT_REQUESTED));
    held.instruct(|instructions| instructions.hold = false);
    let (cid, status, _) = host.wait(&mut queue);
    assert_eq!((cid, status), (0, Status::SUCCESS));
    assert_eq!(held.seen().len(), 256);
}

#[test]
fn requests_in_flight_are_limited_by_the_quota() {
    let (mut host, held) = host_with_held_disk(8192);
    let most = host.controller.config().quota.requests;
    let mut queues = [host.create(1, 2048, false), host.create(2, 2048, false)];
    let page = host.alloc(4096);
    held.instruct(|instructions| instructions.hold = true);
    for queue in &mut queues {
        for cid in 0..2000 {
            host.put(queue, &Sqe::read(1, u64::from(cid), 0, cid).with_prps(page, 0));
        }
        host.ring(queue, 0);
    }
    host.until("the quota to be met", || held.seen().len() == most);
    // An I/O thread sleeps if it can only wait for the disk.
    host.until("a sleep", || is_asleep(&host));
    assert_eq!(held.seen().len(), most);
    held.instruct(|instructions| instructions.hold = false);
    for queue in &mut queues {
        for _ in 0..2000 {
            assert!(host.wait(queue).1.is_success());
        }
    }
    assert_eq!(held.seen().len(), 4000);
}

/// Returns true if the controller's only I/O thread sleeps: its awake time does not grow.
fn is_asleep(host: &Host) -> bool {
    let awake = || host.controller.stats().workers[0].awake_ns;
    let before = awake();
    // If the awake time does not grow during this time, the I/O thread is asleep.
    std::thread::sleep(Duration::from_millis(1));
    awake() == before
}

#[test]
fn pieces_of_memory_and_bytes_have_a_quota_as_well() {
    let held = Held::new(1 << 16);
    let disk: Arc<dyn Disk> = Arc::new(held.clone());
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    for (pieces, bytes) in [(1024, 1 << 30), (1 << 20, 4 << 20)] {
        let mut config = Config { namespaces: namespaces.clone(), ..Config::default() };
        config.quota.pieces = pieces;
        config.quota.bytes = bytes;
        let mut host = Host::with(config, Polling::Never);
        let mut queue = host.create(1, 64, false);
        // 1 MiB in 256 pages that are not contiguous.
        let (pages, list) = (host.alloc(4096 * 512), host.alloc(4096));
        for n in 0..255 {
            host.poke(list + n * 8, &(pages + 8192 * (n + 1)).to_le_bytes());
        }
        let before = held.seen().len();
        held.instruct(|instructions| instructions.hold = true);
        for cid in 0..32 {
            host.put(&mut queue, &Sqe::read(1, 0, 2047, cid).with_prps(pages, list));
        }
        host.ring(&queue, 0);
        host.until("four of them", || held.seen().len() - before == 4);
        host.until("a sleep", || is_asleep(&host));
        assert_eq!(held.seen().len() - before, 4);
        held.instruct(|instructions| instructions.hold = false);
        for _ in 0..32 {
            assert!(host.wait(&mut queue).1.is_success());
        }
    }
}

/// Creates two controllers on one I/O thread: the first with `queues` queues, the second with one.
fn neighbours(turns: &mut Turns, pool: &Pool, queues: u16) -> (Host, Vec<Queue>, Host, Queue) {
    let controller = || {
        let config = common::config(&["mem:512MiB?block-size=4096"]);
        Controller::new(config, pool.clone(), Carrier::default()).unwrap()
    };
    let (busy, victim) = (controller(), controller());
    let (busy, all) = run_beside(turns, move || {
        let mut host = Host::attach(busy);
        host.enable();
        let all = (1..=queues).map(|qid| host.create(qid, 256, false)).collect();
        (host, all)
    });
    let (victim, queue) = run_beside(turns, move || {
        let mut host = Host::attach(victim);
        host.enable();
        let queue = host.create(1, 16, false);
        (host, queue)
    });
    (busy, all, victim, queue)
}

/// Runs turns of the I/O thread while the busy controller has commands left. In each turn, the
/// victim reads a block. Returns the maximum number of the busy controller's commands that
/// completed in one turn, and the number of turns.
fn run_beside_victim(
    turns: &mut Turns,
    (busy, queues): (&mut Host, &mut [Queue]),
    (victim, queue): (&mut Host, &mut Queue),
    mut left: usize,
) -> (usize, usize) {
    let page = victim.alloc(4096);
    let (mut most, mut all) = (0, 0);
    while left > 0 {
        let cid = victim.next_cid();
        victim.submit(queue, &Sqe::read(1, 0, 0, cid).with_prps(page, 0));
        let mut waited = 0;
        loop {
            turns.turn();
            let done: usize = queues
                .iter_mut()
                .map(|queue| std::iter::from_fn(|| busy.reap(queue)).count())
                .sum();
            // While the victim waits for a CPU, more commands complete, so `done` may exceed
            // `left`.
            left = left.saturating_sub(done);
            most = most.max(done);
            all += 1;
            if let Some((of, status, _)) = victim.reap(queue) {
                assert!(status.is_success());
                assert_eq!(of, cid);
                break;
            }
            waited += 1;
            // The controller's share is measured in time. If the thread is preempted during a pass,
            // this time counts as well, and the victim may have to wait for up to 40 turns.
            assert!(waited < 10_000, "the victim is starved");
        }
    }
    (most, all)
}

#[test]
fn long_reads_of_many_queues_share_a_turn() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (mut busy, mut queues, mut victim, mut queue) = neighbours(&mut turns, &pool, 64);
    let (data, list) = (busy.alloc(1 << 20), busy.alloc(4096));
    for n in 0..255 {
        busy.poke(list + n * 8, &(data + 4096 * (n + 1)).to_le_bytes());
    }
    for queue in &mut queues {
        for cid in 0..16 {
            busy.put(queue, &Sqe::read(1, 0, 255, cid).with_prps(data, list));
        }
        busy.ring(queue, 0);
    }
    let others = (&mut busy, &mut queues[..]);
    let (most, all) = run_beside_victim(&mut turns, others, (&mut victim, &mut queue), 64 * 8);
    // One read takes longer than the share of the busy controller, so one read per turn is
    // executed.
    assert_eq!(most, 1);
    assert!(all >= 64 * 8, "{all}");
    // Each turn begins with the queue after the last one of the previous turn.
    let heads: Vec<_> = queues.iter().map(|queue| queue.head).collect();
    assert!(heads.iter().all(|head| (7..=9).contains(head)), "{heads:?}");
}

#[test]
fn short_reads_of_many_queues_share_a_turn() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (mut busy, mut queues, mut victim, mut queue) = neighbours(&mut turns, &pool, 16);
    let page = busy.alloc(4096);
    for queue in &mut queues {
        for cid in 0..200 {
            busy.put(queue, &Sqe::read(1, u64::from(cid), 0, cid).with_prps(page, 0));
        }
        busy.ring(queue, 0);
    }
    let others = (&mut busy, &mut queues[..]);
    let (most, _) = run_beside_victim(&mut turns, others, (&mut victim, &mut queue), 16 * 200);
    assert!(most <= 32, "{most} commands of 4 KiB in a turn");
}

#[test]
fn write_zeroes_is_executed_in_strides() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (mut busy, mut queues, mut victim, mut queue) = neighbours(&mut turns, &pool, 1);
    let disk = &busy.controller.namespaces()[0].1.disk;
    assert!(disk.queue().unwrap().longest_inline() <= 1 << 20);
    // The command zeroes 256 MiB.
    busy.put(&mut queues[0], &Sqe::write_zeroes(1, 0, u16::MAX, true, 1));
    busy.ring(&queues[0], 0);
    let others = (&mut busy, &mut queues[..]);
    let (_, all) = run_beside_victim(&mut turns, others, (&mut victim, &mut queue), 1);
    assert!(all >= 256, "{all} turns for 256 MiB");
}

#[test]
fn a_message_flood_does_not_starve_other_controllers() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (busy, _, mut victim, mut queue) = neighbours(&mut turns, &pool, 1);
    let page = victim.alloc(4096);
    // Each round sends a map of the other controller, so that a message of that controller is
    // always pending.
    let memory = shadowbell_memory::Mapping::anonymous(4096).unwrap().bytes();
    for round in 0..1000u64 {
        let cid = victim.next_cid();
        busy.controller.map_dma((1 << 40) + round * 4096, 4096, &memory).unwrap();
        victim.submit(&mut queue, &Sqe::read(1, 0, 0, cid).with_prps(page, 0));
        let mut turns_taken = 0;
        while victim.reap(&mut queue).is_none() {
            turns.turn();
            turns_taken += 1;
            assert!(turns_taken < 50, "the victim is starved");
        }
    }
}

/// Size of this process's page tables, in MiB.
fn page_tables() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

/// The queues are full of large reads into a large memory, much of which is in use. The limit of
/// page tables must not delay any of them.
#[test]
fn much_guest_memory_does_not_limit_requests_in_flight() {
    const SIZE: u64 = 64 << 30;
    // Size of the memory that the reads use: 4 GiB, in pages that are in random order.
    const USED: u64 = 4 << 30;
    const QUEUES: u16 = 16;
    const DEPTH: u64 = 32;
    const PAGES: u64 = 32;
    let (mut host, held) = host_with_held_disk(1 << 16);
    let mut queues: Vec<_> = (1..=QUEUES).map(|qid| host.create(qid, 64, false)).collect();
    let memory = Mapping::shared("large", SIZE).unwrap();
    shadowbell_memory::page_tables::watch(&memory);
    let base = 1u64 << 40;
    host.controller.map_dma(base, SIZE, &memory.bytes()).unwrap();
    let page = |n: u64| base + n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (USED / 4096) * 4096;
    let mut commands = 0;
    let mut submit_all = |host: &mut Host, queues: &mut [Queue]| {
        for queue in queues {
            for _ in 0..DEPTH {
                // Each round uses the same addresses.
                let number = commands % (u64::from(QUEUES) * DEPTH);
                commands += 1;
                let list = host.alloc(4096);
                let pages = (1..PAGES).map(|n| page(number * PAGES + n));
                (0..).zip(pages).for_each(|(n, at)| host.poke(list + n * 8, &at.to_le_bytes()));
                let sqe = Sqe::read(1, number, (PAGES * 8 - 1) as u16, (number % DEPTH) as u16);
                host.put(queue, &sqe.with_prps(page(number * PAGES), list));
            }
            host.ring(queue, 0);
        }
    };
    submit_all(&mut host, &mut queues);
    for queue in &mut queues {
        for _ in 0..DEPTH {
            assert!(host.wait(queue).1.is_success());
        }
    }
    held.instruct(|instructions| {
        instructions.hold = true;
        instructions.seen.clear();
    });
    submit_all(&mut host, &mut queues);
    let all = usize::from(QUEUES) * DEPTH as usize;
    host.until("all of them are at the disk", || held.seen().len() == all);
    held.instruct(|instructions| instructions.hold = false);
    drop(memory);
}

/// The reads use single bytes that are scattered over a terabyte, so that each needs its own page
/// table.
#[test]
fn page_tables_are_reclaimed_as_fast_as_they_grow() {
    const SPAN: u64 = 2 << 20;
    // Only the first part of each map is used, because scanning four terabytes would take long.
    const SIZE: u64 = 64 << 30;
    const PART: u64 = 8 << 30;
    const COUNT: u64 = 64;
    let mut host = Host::new(&["mem:16MiB"], Polling::default());
    let mut queue = host.create(1, 64, false);
    let file = Mapping::shared("sparse", SIZE).unwrap();
    let base = 1u64 << 40;
    let maps: Vec<_> = (0..COUNT)
        .map(|n| {
            let file = file.fd().unwrap();
            let map = Mapping::from_fd(file, 0, SIZE, Protection::ReadWrite).unwrap();
            shadowbell_memory::page_tables::watch(&map);
            host.controller.map_dma(base + n * SIZE, SIZE, &map.bytes()).unwrap();
            map
        })
        .collect();
    let before = page_tables();
    // Reads of 1 MiB into pages that are 2 MiB apart: 512 MiB of page tables in all.
    let lists: Vec<_> = (0..32).map(|_| host.alloc(4096)).collect();
    let (mut most, mut submitted, mut done) = (0, 0u64, 0);
    while done < 512 {
        while submitted < 512 && submitted - done < 32 {
            let list = lists[submitted as usize % lists.len()];
            let page = |n: u64| {
                let at = (submitted * 256 + n) * SPAN;
                base + at / PART % COUNT * SIZE + at % PART
            };
            (1..256).for_each(|n| host.poke(list + (n - 1) * 8, &page(n).to_le_bytes()));
            let sqe = Sqe::read(1, 0, 2047, submitted as u16 % 32);
            host.submit(&mut queue, &sqe.with_prps(page(0), list));
            submitted += 1;
        }
        // The reads complete in order.
        assert!(host.wait(&mut queue).1.is_success());
        done += 1;
        most = most.max(page_tables().saturating_sub(before));
    }
    // The process reclaims page tables when they exceed 16 MiB. More may be allocated between two
    // checks.
    assert!(most <= 40, "{most} MiB");
    drop(maps);
}
