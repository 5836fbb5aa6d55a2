//! Tests of an NBD export as a disk: its properties, its requests, and a server that violates the
//! protocol, hangs, dies or restarts.

mod common;

use common::{ALL, Fake};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_disk::{Disk, DiskError, Op, Queue, Request, ResizeError, Submitted};
use shadowbell_memory::{DmaSpace, Segments, View};
use shadowbell_nbd::reply::Head;
use shadowbell_nbd::wire::{NbdError, Request as NbdRequest, command, transmission};
use shadowbell_testing::disks::{
    Random, batch, content, flush, memory, read, run, run_one, segments, wait, write,
};
use shadowbell_testing::wait::until as wait_until;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn write_durably(queue: &mut dyn Queue, offset: u64, data: &[u8]) -> Result<(), DiskError> {
    let bytes = memory(data.len());
    bytes.write_from(0, data).unwrap();
    let segments = Segments::from_bytes(&bytes);
    run_one(queue, Op::Write { fua: true }, offset, data.len() as u64, segments)
}

/// Submits a request. It must not complete inline.
fn submit(queue: &mut dyn Queue, tag: u32, op: Op, offset: u64, len: u64, data: Segments) {
    let mut data = data;
    let submitted = queue.submit(tag, &Request { op, offset, len }, &mut data);
    assert_eq!(submitted, Submitted::Pending);
    queue.commit();
}

/// Waits until all requests have completed, and returns their results.
fn wait_completed(queue: &mut dyn Queue) -> Vec<(u32, Result<(), DiskError>)> {
    let mut ended = Vec::new();
    while queue.pending() > 0 {
        queue.reap(&mut |tag, result, _| ended.push((tag, result)));
        if queue.pending() > 0 {
            wait(queue);
        }
    }
    ended
}

#[test]
fn an_export_has_the_servers_properties() {
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("");
    let info = disk.info();
    assert_eq!((info.bytes(), info.block_size, info.granularity), (MIB as u64, 512, 8));
    assert!(info.discard && info.volatile_cache && !info.read_only);
    let says = "NBD with 4 connections, flushes, FUA, write zeroes";
    assert_eq!(disk.describe(), says);
    assert_eq!(disk.name(), format!("nbd+unix:///x?socket={}", fake.socket().display()));
    drop(disk);
    let info = fake.open("block-size=4096&read-only=on&connections=1").info();
    assert!(info.read_only && !info.volatile_cache && info.block_size == 4096);
    fake.change(|manner| manner.flags = transmission::HAS_FLAGS | transmission::READ_ONLY);
    let disk = fake.open("");
    assert!(disk.info().read_only && disk.describe() == "NBD with one connection");
    let mut queue = disk.queue().unwrap();
    assert_eq!(write(&mut *queue, 0, &[1; 512]), Err(DiskError::ReadOnly));
    assert_eq!(flush(&mut *queue), Ok(()));
}

#[test]
fn invalid_exports_are_refused_with_the_reason() {
    let mut fake = Fake::new(1000, ALL);
    let refused = |fake: &Fake, words: &str| {
        let error = fake.try_open("").unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused(&fake, "the size of the export, 1000 bytes, is not valid");
    fake.resize(0);
    refused(&fake, "the size of the export, 0 bytes");
    fake.resize(8192);
    fake.change(|manner| manner.sizes = Some((4096, 1 << 20)));
    refused(&fake, "use `block-size=4096`");
    assert_eq!(fake.open("block-size=4096").info().blocks, 2);
    fake.change(|manner| manner.sizes = Some((8192, 1 << 20)));
    refused(&fake, "a disk supports at most 4096");
    fake.kill();
    refused(&fake, "is unreachable");
}

/// Compares random batches of requests with a model. The parameters define the behaviour of the
/// server.
fn cases(flags: u16, structured: bool, options: &str, most: Option<u32>) {
    let config = Config { cases: 4, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&any::<u64>(), |seed| {
            let fake = Fake::new(2 * MIB, flags);
            fake.change(|manner| {
                manner.structured = structured;
                manner.sizes = most.map(|most| (1, most));
            });
            let mut model = vec![0; 2 * MIB];
            let mut random = Random(seed | 1);
            let disk = fake.open(options);
            let mut queues = [disk.queue().unwrap(), disk.queue().unwrap()];
            for _ in 0..8 {
                let queue = &mut queues[random.below(2) as usize];
                batch(&disk, &mut **queue, &mut model, &mut random);
            }
            assert!(content(&disk) == model, "the disk differs at the end");
            assert_eq!(flush(&mut *queues[0]), Ok(()));
            if flags & transmission::SEND_FLUSH != 0 {
                assert!(fake.durable() == model, "what was flushed is not durable");
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn model_of_a_server_with_all_features() {
    cases(ALL, true, "", None);
}

#[test]
fn model_of_a_server_without_features() {
    cases(transmission::HAS_FLAGS, false, "", None);
}

#[test]
fn model_with_one_connection_and_simple_replies() {
    let flags = ALL & !(transmission::CAN_MULTI_CONN | transmission::SEND_FUA);
    cases(flags, false, "block-size=4096", Some(8192));
}

#[test]
fn model_with_a_small_journal() {
    cases(ALL, true, "replay=64KiB", None);
}

#[test]
fn fua_is_a_flush_on_a_server_without_fua() {
    let fake = Fake::new(MIB, ALL & !transmission::SEND_FUA);
    let disk = fake.open("");
    let mut queue = disk.queue().unwrap();
    assert_eq!(write_durably(&mut *queue, 0, &[7; 512]), Ok(()));
    assert_eq!((fake.count(command::FLUSH), fake.durable()[0]), (1, 7));
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("");
    let mut queue = disk.queue().unwrap();
    assert_eq!(write_durably(&mut *queue, 0, &[7; 512]), Ok(()));
    assert_eq!((fake.count(command::FLUSH), fake.durable()[0]), (0, 7));
}

#[test]
fn an_error_affects_its_request_only() {
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("");
    let mut queue = disk.queue().unwrap();
    for (error, expected) in [
        (1, DiskError::ReadOnly),
        (5, DiskError::Io(5)),
        (28, DiskError::NoSpace),
        (95, DiskError::Unsupported),
        (u32::MAX, DiskError::Io(5)),
    ] {
        for structured in [true, false] {
            fake.change(|manner| {
                manner.structured = structured;
                manner.errors = [(command::WRITE, error)].into();
            });
            assert_eq!(write(&mut *queue, 0, &[1; 512]), Err(expected));
            // The disk counts as full from a write error for lack of space until a write succeeds.
            assert_eq!(disk.is_full(), [28, 95, u32::MAX].contains(&error));
            assert_eq!(read(&mut *queue, 0, 512), Ok(vec![0; 512]));
        }
    }
    fake.change(|manner| manner.errors.clear());
    assert_eq!(write(&mut *queue, 0, &[1; 512]), Ok(()));
    assert!(!disk.is_full());
    assert_eq!(disk.counters()[1], ("connections_lost", 0));
}

#[test]
fn unflushed_writes_survive_a_kill_of_the_server() {
    for connections in [1, 4] {
        let mut fake = Fake::new(MIB, ALL);
        let disk = fake.open(&format!("connections={connections}"));
        let mut queue = disk.queue().unwrap();
        write(&mut *queue, 0, &[1; 4096]).unwrap();
        write(&mut *queue, 4096, &[2; 4096]).unwrap();
        flush(&mut *queue).unwrap();
        // The writes overlap, and each is submitted after the previous one has completed. The third
        // write has FUA.
        write(&mut *queue, 0, &[3; 4096]).unwrap();
        write(&mut *queue, 512, &[4; 512]).unwrap();
        write_durably(&mut *queue, 1024, &[5; 512]).unwrap();
        let zeroes = Op::WriteZeroes { deallocate: true, fua: false };
        run_one(&mut *queue, zeroes, 0, 512, Segments::new()).unwrap();
        fake.kill();
        assert_eq!(fake.cache()[..512], [1; 512], "the server has lost something");
        fake.start();
        // The flush of the host must succeed and make the data durable.
        assert_eq!(flush(&mut *queue), Ok(()));
        let durable = fake.durable();
        for (at, byte) in [(0, 0), (512, 4), (1024, 5), (1536, 3), (4096, 2)] {
            assert_eq!(durable[at..at + 512], [byte; 512], "{at}");
        }
        assert!(!disk.has_lost_writes());
        assert_eq!(disk.counters()[3], ("requests_replayed", 4));
        // Flushed data are not replayed.
        fake.kill();
        fake.start();
        assert_eq!(read(&mut *queue, 512, 512), Ok(vec![4; 512]));
        assert_eq!(disk.counters()[3], ("requests_replayed", 4));
    }
}

#[test]
fn a_flush_fails_after_a_loss_without_replay() {
    let mut fake = Fake::new(MIB, ALL);
    let disk = fake.open("replay=off");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &[1; 512]).unwrap();
    flush(&mut *queue).unwrap();
    fake.kill();
    fake.start();
    assert_eq!(flush(&mut *queue), Ok(()), "all was flushed before");
    write(&mut *queue, 0, &[2; 512]).unwrap();
    fake.kill();
    fake.start();
    assert_eq!(read(&mut *queue, 0, 512), Ok(vec![1; 512]));
    assert!(disk.has_lost_writes());
    assert_eq!(flush(&mut *queue), Err(DiskError::Io(5)));
    assert_eq!(write_durably(&mut *queue, 0, &[1; 512]), Err(DiskError::Io(5)));
    assert_eq!(write(&mut *queue, 0, &[1; 512]), Ok(()));
    drop((queue, disk));
    let disk = fake.open("");
    assert_eq!(flush(&mut *disk.queue().unwrap()), Ok(()));
}

#[test]
fn a_refused_replay_is_a_loss() {
    let mut fake = Fake::new(MIB, ALL);
    let disk = fake.open("");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &[1; 512]).unwrap();
    fake.kill();
    fake.change(|manner| manner.errors = [(command::WRITE, 28)].into());
    fake.start();
    assert_eq!(read(&mut *queue, 0, 512), Ok(vec![0; 512]));
    assert!(disk.has_lost_writes());
    assert_eq!(flush(&mut *queue), Err(DiskError::Io(5)));
}

/// True for a flush.
fn is_flush(request: &NbdRequest) -> bool {
    request.command == command::FLUSH
}

/// The server dies with unflushed writes that are not replayed, before it answers a flush. The next
/// server answers that flush without an error.
#[test]
fn a_flush_in_flight_fails_after_a_loss_without_replay() {
    let mut fake = Fake::new(MIB, ALL);
    let disk = fake.open("replay=off&connections=1");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &[1; 512]).unwrap();
    fake.change(|manner| manner.holds = Some(is_flush));
    let received = fake.received();
    submit(&mut *queue, 1, Op::Flush, 0, 0, Segments::new());
    wait_until("the flush at the server", || fake.received() > received);
    fake.kill();
    fake.change(|manner| manner.holds = None);
    fake.start();
    assert_eq!(wait_completed(&mut *queue), [(1, Err(DiskError::Io(5)))]);
    assert_eq!((fake.count(command::FLUSH), fake.cache()[0]), (1, 0));
    assert!(disk.has_lost_writes());
}

/// The storage of a server reports a lost write once. The automatic flush gets the error, and a
/// flush of the host, which was in flight at the same time, succeeds.
#[test]
fn a_flush_in_flight_fails_with_an_automatic_one() {
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("replay=64KiB&connections=1");
    let mut queue = disk.queue().unwrap();
    fake.change(|manner| {
        manner.holds = Some(is_flush);
        manner.refused_once = Some((command::FLUSH, NbdError::Io));
    });
    // The last write exceeds half of the limit. A further one could wait behind the held flush.
    for block in 0..8 {
        write(&mut *queue, block * 4096, &[1; 4096]).unwrap();
    }
    wait_until("the automatic flush at the server", || fake.received() == 9);
    submit(&mut *queue, 1, Op::Flush, 0, 0, Segments::new());
    fake.change(|manner| manner.holds = None);
    assert_eq!(wait_completed(&mut *queue), [(1, Err(DiskError::Io(5)))]);
    assert_eq!(fake.count(command::FLUSH), 2);
    assert!(disk.has_lost_writes());
}

/// The server may still execute a write of a lost connection. So it is sent again only after the
/// time of `settle`. A read is sent again at once.
#[test]
fn a_write_in_flight_settles_before_it_is_sent_again() {
    let bytes = memory(512);
    for (op, settle) in [(Op::Write { fua: false }, "200ms"), (Op::Read, "3600s")] {
        let fake = Fake::new(MIB, ALL);
        let disk = fake.open(&format!("settle={settle}&connections=1"));
        let mut queue = disk.queue().unwrap();
        fake.change(|manner| manner.holds = Some(|_| true));
        submit(&mut *queue, 1, op, 0, 512, segments(&bytes, 0, 512));
        wait_until("the request at the server", || fake.received() == 1);
        let since = Instant::now();
        fake.disconnect(0);
        wait_until("the next connection", || fake.connections() == 2);
        // This is only a lower bound.
        assert!(op == Op::Read || since.elapsed() >= Duration::from_millis(200));
        fake.change(|manner| manner.holds = None);
        assert_eq!(wait_completed(&mut *queue), [(1, Ok(()))]);
    }
}

/// A flush that waits only for an orphan ends during `commit`, after the orphan has ended. No reply
/// wakes the I/O thread then.
#[test]
fn a_request_that_ends_during_its_commit_signals_the_wake_descriptor() {
    let fake = Fake::new(MIB, ALL & !transmission::SEND_FLUSH);
    let disk = fake.open("connections=1");
    let mut queue = disk.queue().unwrap();
    let bytes = memory(512);
    fake.change(|manner| manner.holds = Some(|_| true));
    submit(&mut *queue, 1, Op::Write { fua: false }, 0, 512, segments(&bytes, 0, 512));
    wait_until("the write at the server", || fake.received() == 1);
    queue.cancel(1);
    assert_eq!(wait_completed(&mut *queue), [(1, Err(DiskError::Cancelled))]);
    let request = Request { op: Op::Flush, offset: 0, len: 0 };
    assert_eq!(queue.submit(2, &request, &mut Segments::new()), Submitted::Pending);
    fake.change(|manner| manner.holds = None);
    wait_until("the end of the orphan", || disk.orphans() == 0);
    queue.commit();
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut fds = [PollFd::from_borrowed_fd(queue.wake_fd().unwrap(), PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&at_once)), Ok(1));
    assert_eq!(wait_completed(&mut *queue), [(2, Ok(()))]);
}

#[test]
fn a_full_replay_buffer_is_flushed() {
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("replay=64KiB");
    let mut queue = disk.queue().unwrap();
    for round in 0..200_u64 {
        write(&mut *queue, round % 16 * 4096, &[round as u8; 4096]).unwrap();
    }
    // The test has written 800 KiB with a replay limit of 64 KiB, so there were automatic flushes.
    assert!(fake.count(command::FLUSH) >= 10);
    // If an automatic flush fails, all later flushes of the host fail until the disk is closed.
    fake.change(|manner| manner.errors = [(command::FLUSH, 5)].into());
    let flushes = fake.count(command::FLUSH);
    for round in 0..32 {
        write(&mut *queue, round * 4096, &[1; 4096]).unwrap();
    }
    fake.wait(|counts| counts[&command::FLUSH] > flushes);
    write(&mut *queue, 0, &[1; 4096]).unwrap();
    fake.change(|manner| manner.errors.clear());
    assert!(disk.has_lost_writes());
    assert_eq!(flush(&mut *queue), Err(DiskError::Io(5)));
}

/// Several writers, each on its own blocks, run while the server is killed and restarted
/// repeatedly. No request fails, and at the end each block durably contains the last data.
#[test]
fn a_load_survives_repeated_kills_of_the_server() {
    for flags in [ALL, ALL & !transmission::CAN_MULTI_CONN] {
        let mut fake = Fake::new(4 * MIB, flags);
        let disk = fake.open("replay=1MiB");
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut writers = Vec::new();
            for part in 0..3_u64 {
                let (disk, over) = (&disk, &over);
                writers.push(scope.spawn(move || {
                    let mut queue = disk.queue().unwrap();
                    let mut random = Random(part * 77 + 1);
                    let mut model = vec![0_u8; MIB];
                    let base = part * MIB as u64;
                    let mut rounds = 0_u64;
                    while !over.load(Ordering::Relaxed) {
                        rounds += 1;
                        let bytes = memory(8 * 4096);
                        let mut requests = Vec::new();
                        for lane in 0..8_usize {
                            let block = lane * 32 + random.below(32) as usize;
                            let fresh = random.bytes(4096);
                            bytes.write_from(lane * 4096, &fresh).unwrap();
                            model[block * 4096..][..4096].copy_from_slice(&fresh);
                            let op = Op::Write { fua: random.below(8) == 0 };
                            let offset = base + block as u64 * 4096;
                            let data = segments(&bytes, lane * 4096, 4096);
                            requests.push((Request { op, offset, len: 4096 }, data));
                        }
                        assert!(run(&mut *queue, requests).iter().all(Result::is_ok));
                        if random.below(16) == 0 {
                            assert_eq!(flush(&mut *queue), Ok(()));
                        }
                        let block = random.below(256);
                        let there = read(&mut *queue, base + block * 4096, 4096).unwrap();
                        assert!(there == model[block as usize * 4096..][..4096], "{rounds}");
                    }
                    assert_eq!(flush(&mut *queue), Ok(()));
                    assert!(read(&mut *queue, base, MIB).unwrap() == model);
                    (rounds, model)
                }));
            }
            for _ in 0..8 {
                // Reads are never replayed, so the number of reads shows the progress of the
                // writers.
                let rounds = fake.count(command::READ) + 20;
                fake.wait(|counts| counts.get(&command::READ).is_some_and(|r| *r > rounds));
                fake.kill();
                fake.start();
            }
            over.store(true, Ordering::Relaxed);
            for (part, writer) in writers.into_iter().enumerate() {
                let (rounds, model) = writer.join().unwrap();
                assert!(rounds > 10);
                assert!(fake.durable()[part * MIB..][..MIB] == model, "part {part}");
            }
        });
        assert!(!disk.has_lost_writes());
        assert!(disk.counters()[3].1 > 0, "nothing was ever to be written again");
    }
}

/// One of several connections is lost, while the server holds requests of the other connections.
#[test]
fn requests_of_a_lost_connection_are_replayed() {
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("connections=2");
    let (mut one, mut two) = (disk.queue().unwrap(), disk.queue().unwrap());
    write(&mut *one, 0, &[1; 512]).unwrap();
    write(&mut *two, 512, &[2; 512]).unwrap();
    fake.change(|manner| manner.condition = true);
    let bytes = memory(1024);
    bytes.write_from(0, &[3; 1024]).unwrap();
    let fua = false;
    submit(&mut *one, 1, Op::Write { fua }, 0, 512, segments(&bytes, 0, 512));
    submit(&mut *two, 2, Op::Write { fua }, 512, 512, segments(&bytes, 512, 512));
    fake.disconnect(0);
    fake.change(|manner| manner.condition = false);
    assert_eq!(wait_completed(&mut *one), [(1, Ok(()))]);
    assert_eq!(wait_completed(&mut *two), [(2, Ok(()))]);
    assert_eq!(fake.cache()[..1024], [3; 1024]);
    assert_eq!(disk.counters()[1..3], [("connections_lost", 1), ("reconnections", 1)]);
}

/// A server that is about to end refuses requests, and waits until all clients have disconnected.
/// So the disk must close all its connections: before that, the next server cannot listen.
#[test]
fn a_server_that_ends_is_disconnected_and_requests_go_to_the_next_one() {
    // The disk notices that the server is about to end by a refused request, or by the end of one
    // connection.
    for is_announced in [true, false] {
        let mut fake = Fake::new(MIB, ALL);
        let disk = fake.open("connections=4");
        let mut queues: Vec<_> = (0..4).map(|_| disk.queue().unwrap()).collect();
        for (nth, queue) in queues.iter_mut().enumerate() {
            write(&mut **queue, nth as u64 * 512, &[1; 512]).unwrap();
        }
        assert_eq!(fake.connections(), 4);
        fake.end_in_order();
        let bytes = memory(512);
        bytes.write_from(0, &[2; 512]).unwrap();
        let op = Op::Write { fua: false };
        if !is_announced {
            fake.disconnect(0);
        }
        submit(&mut *queues[0], 1, op, 0, 512, segments(&bytes, 0, 512));
        wait_until("the end of all connections", || {
            // The reap receives the refusal. The request must not complete.
            queues[0].reap(&mut |_, result, _| panic!("{result:?}"));
            fake.open_connections() == 0
        });
        assert_eq!(fake.count(command::DISC), if is_announced { 4 } else { 3 });
        fake.change(|manner| manner.is_ending = false);
        fake.start();
        assert_eq!(wait_completed(&mut *queues[0]), [(1, Ok(()))]);
        for (nth, queue) in queues.iter_mut().enumerate() {
            let at = nth as u64 * 512;
            assert_eq!(read(&mut **queue, at, 512), Ok(vec![if nth == 0 { 2 } else { 1 }; 512]));
        }
        assert!(!disk.has_lost_writes());
    }
}

/// The unflushed writes exceed the limit of the option `replay`. So the disk sends flushes
/// automatically, and further writes wait for them. If a server that is about to end refuses an
/// automatic flush, the disk sends the flush to the next server.
#[test]
fn an_automatic_flush_that_an_ending_server_refuses_is_sent_again() {
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("replay=64KiB&connections=1");
    let mut queue = disk.queue().unwrap();
    fake.change(|manner| manner.refused_once = Some((command::FLUSH, NbdError::Shutdown)));
    for nth in 0..100 {
        write(&mut *queue, nth * 4096, &[nth as u8; 4096]).unwrap();
    }
    assert!(fake.count(command::FLUSH) > 1);
    flush(&mut *queue).unwrap();
    assert_eq!(fake.durable()[99 * 4096], 99);
}

#[test]
fn requests_survive_frequent_disconnects() {
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("");
    let mut queue = disk.queue().unwrap();
    fake.change(|manner| manner.hangs_up_after = Some(9));
    let mut model = vec![0; MIB];
    let mut random = Random(9);
    for round in 0..100 {
        let at = random.below(255) as usize * 4096;
        let fresh = random.bytes(4096);
        model[at..at + 4096].copy_from_slice(&fresh);
        write(&mut *queue, at as u64, &fresh).unwrap();
        // Each connection ends after 9 requests, and a new one first replays the unflushed writes.
        // With 9 or more of them, no replay would ever finish, so the test flushes in time.
        if round % 4 == 0 {
            flush(&mut *queue).unwrap();
        }
    }
    fake.change(|manner| manner.hangs_up_after = None);
    flush(&mut *queue).unwrap();
    assert!(fake.durable() == model);
}

/// While there is no server, a cancelled request ends. It is not executed later, except for a write
/// that the server had already received.
#[test]
fn requests_are_cancelled_without_a_server() {
    let mut fake = Fake::new(MIB, ALL);
    let disk = fake.open("connections=1");
    let mut queue = disk.queue().unwrap();
    fake.change(|manner| manner.condition = true);
    let bytes = memory(MIB);
    bytes.write_from(0, &[9; MIB]).unwrap();
    let write_op = Op::Write { fua: false };
    submit(&mut *queue, 1, write_op, 0, 512, segments(&bytes, 0, 512));
    submit(&mut *queue, 2, Op::Read, 512, 512, segments(&bytes, 512, 512));
    // The server has received both requests. Both end at once. The write becomes an orphan, because
    // the server may still execute it.
    queue.cancel(1);
    queue.cancel(2);
    let mut ended = Vec::new();
    wait(&*queue);
    queue.reap(&mut |tag, result, data| {
        assert_eq!(data.len(), 512);
        ended.push((tag, result));
    });
    let cancelled = Err(DiskError::Cancelled);
    assert_eq!((&ended[..], queue.pending()), (&[(1, cancelled), (2, cancelled)][..], 0));
    assert_eq!(disk.orphans(), 1);
    fake.kill();
    // The connection is lost, so the requests that follow are not sent.
    wait_until("the end of the connection", || disk.counters()[1] == ("connections_lost", 1));
    submit(&mut *queue, 3, write_op, 1024, MIB as u64 / 2, segments(&bytes, 0, MIB / 2));
    submit(&mut *queue, 4, Op::Flush, 0, 0, Segments::new());
    while queue.pending() > 0 {
        for tag in [3, 4] {
            queue.cancel(tag);
        }
        queue.reap(&mut |_, result, _| assert_eq!(result, Err(DiskError::Cancelled)));
    }
    fake.change(|manner| manner.condition = false);
    fake.start();
    // The orphan (the cancelled write) is sent again, because only a reply shows that the server
    // has executed it.
    assert_eq!(flush(&mut *queue), Ok(()));
    assert_eq!((fake.count(command::WRITE), disk.orphans()), (1, 0));
    assert_eq!(read(&mut *queue, 0, MIB), Ok([vec![9; 512], vec![0; MIB - 512]].concat()));
}

/// Submits a write of `byte` and waits until the server has it.
fn submit_write(queue: &mut dyn Queue, tag: u32, offset: u64, byte: u8) {
    let bytes = memory(512);
    bytes.write_from(0, &[byte; 512]).unwrap();
    submit(queue, tag, Op::Write { fua: false }, offset, 512, segments(&bytes, 0, 512));
}

/// A queue whose writes are on a hung server can be closed at once. A later request of another
/// queue waits only if its range overlaps the range of a write on the hung server.
#[test]
fn writes_on_a_hung_server_are_cancelled_at_once_and_later_requests_wait_for_them() {
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("connections=2");
    let mut queue = disk.queue().unwrap();
    // This queue uses the other connection.
    let mut other = disk.queue().unwrap();
    fake.change(|manner| manner.holds = Some(|request| request.offset < 65536));
    submit_write(&mut *queue, 1, 0, 9);
    let zero = Op::WriteZeroes { deallocate: false, fua: false };
    submit(&mut *queue, 2, zero, 4096, 4096, Segments::new());
    submit(&mut *queue, 3, Op::Discard, 8192, 4096, Segments::new());
    submit(&mut *queue, 4, Op::Flush, 0, 0, Segments::new());
    (1..=4).for_each(|tag| queue.cancel(tag));
    let ended = wait_completed(&mut *queue);
    assert!(ended.iter().all(|(_, result)| *result == Err(DiskError::Cancelled)), "{ended:?}");
    assert_eq!((ended.len(), disk.orphans()), (4, 3));
    // A reset of the controller also drops the queue of the disk.
    drop(queue);

    submit_write(&mut *other, 1, 0, 5);
    let bytes = memory(8192);
    bytes.write_from(0, &[7; 8192]).unwrap();
    submit(&mut *other, 2, Op::Read, 0, 4096, segments(&bytes, 0, 4096));
    submit(&mut *other, 3, Op::Flush, 0, 0, Segments::new());
    submit(&mut *other, 4, Op::Read, 8192, 512, segments(&bytes, 4096, 512));
    submit(&mut *other, 5, Op::Read, 65536, 512, segments(&bytes, 4096 + 512, 512));
    let mut ended = Vec::new();
    while ended.is_empty() {
        wait(&*other);
        other.reap(&mut |tag, result, _| ended.push((tag, result)));
    }
    // A request that overlaps no orphan passes the waiting requests. A waiting request can be
    // cancelled.
    assert_eq!((&ended[..], other.pending()), (&[(5, Ok(()))][..], 4));
    other.cancel(4);
    wait(&*other);
    other.reap(&mut |tag, result, _| ended.push((tag, result)));
    assert_eq!(ended[1..], [(4, Err(DiskError::Cancelled))]);
    assert_eq!(fake.count(command::FLUSH), 0);

    fake.change(|manner| manner.holds = None);
    let mut ended = wait_completed(&mut *other);
    ended.sort_unstable_by_key(|(tag, _)| *tag);
    assert_eq!(ended, [(1, Ok(())), (2, Ok(())), (3, Ok(()))]);
    let mut first = [0; 4096];
    bytes.read_into(0, &mut first).unwrap();
    assert!(first[0] == 9 || first[0] == 5, "the read was executed before the orphan");
    assert_eq!(read(&mut *other, 0, 512), Ok(vec![5; 512]), "the orphan overwrote a later write");
    assert_eq!(disk.orphans(), 0);
}

/// A guest can unmap the memory of a write as soon as the disk has copied the data, even if the
/// server is hung.
#[test]
fn an_unmap_does_not_wait_for_writes_on_a_hung_server() {
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("");
    let mut queue = disk.queue().unwrap();
    fake.change(|manner| manner.condition = true);
    let bytes = memory(4096);
    bytes.write_from(0, &[8; 4096]).unwrap();
    let mut space = DmaSpace::default();
    space.map(0, 4096, &bytes).unwrap();
    let view = View::new(Arc::clone(space.table()));
    let mut data = Segments::new();
    view.resolve_prps(0, 0, 4096, 4096, false, &mut data).unwrap();
    submit(&mut *queue, 1, Op::Write { fua: false }, 0, 4096, data);
    let watch = view.watch();
    drop(view);
    assert!(!watch.is_idle());
    space.unmap(0, 4096).unwrap();
    queue.memory_changed(&View::new(Arc::clone(space.table())));
    assert!(watch.is_idle(), "the memory waits for the server");
    bytes.write_from(0, &[7; 4096]).unwrap();
    fake.change(|manner| manner.condition = false);
    assert_eq!(wait_completed(&mut *queue), [(1, Ok(()))]);
    assert_eq!(fake.cache()[..4096], [8; 4096]);
}

/// An unmap waits neither for reads on a hung server, nor for requests that wait for an orphan.
/// Requests whose buffers are in the unmapped memory end; others continue.
#[test]
fn an_unmap_does_not_wait_for_reads_on_a_hung_server() {
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &[8; 8192]).unwrap();
    fake.change(|manner| manner.condition = true);
    submit_write(&mut *queue, 0, 4096, 9);
    queue.cancel(0);
    assert_eq!(wait_completed(&mut *queue), [(0, Err(DiskError::Cancelled))]);
    let (stays, leaves) = (memory(4096), memory(4096));
    let mut space = DmaSpace::default();
    space.map(0, 4096, &stays).unwrap();
    space.map(8192, 4096, &leaves).unwrap();
    let view = View::new(Arc::clone(space.table()));
    let segments = |at, reads| {
        let mut data = Segments::new();
        view.resolve_prps(at, 0, 2048, 4096, reads, &mut data).unwrap();
        data
    };
    // The requests at offset 4096 overlap the orphan, so they wait for it.
    for (tag, offset) in [(1, 0), (2, 4096)] {
        submit(&mut *queue, tag, Op::Read, offset, 2048, segments(0, true));
        submit(&mut *queue, 2 + tag, Op::Read, offset, 2048, segments(8192, true));
        submit(&mut *queue, 4 + tag, Op::Compare, offset, 2048, segments(8192, false));
    }
    submit(&mut *queue, 7, Op::Write { fua: false }, 4096, 2048, segments(8192, false));
    let watch = view.watch();
    drop(view);
    space.unmap(8192, 4096).unwrap();
    queue.memory_changed(&View::new(Arc::clone(space.table())));
    let mut ended = Vec::new();
    wait(&*queue);
    queue.reap(&mut |tag, result, _| ended.push((tag, result)));
    ended.sort_unstable_by_key(|(tag, _)| *tag);
    assert_eq!(ended, [3, 4, 5, 6, 7].map(|tag| (tag, Err(DiskError::BadBuffer))));
    assert!(watch.is_idle(), "the memory waits for the server");
    fake.change(|manner| manner.condition = false);
    let mut ended = wait_completed(&mut *queue);
    ended.sort_unstable_by_key(|(tag, _)| *tag);
    assert_eq!(ended, [(1, Ok(())), (2, Ok(()))]);
    let mut read = [0; 2048];
    stays.read_into(0, &mut read).unwrap();
    assert!(read == [8; 2048] || read[..512] == [9; 512]);
    leaves.read_into(0, &mut read).unwrap();
    assert_eq!(read, [0; 2048], "a read wrote to unmapped memory");
}

/// With a server that does not support flushes, a flush of the disk waits for orphans, as with
/// other servers.
#[test]
fn a_flush_waits_for_orphans_on_a_server_without_flushes() {
    let fake = Fake::new(MIB, ALL & !transmission::SEND_FLUSH);
    let disk = fake.open("connections=1");
    let mut queue = disk.queue().unwrap();
    fake.change(|manner| manner.condition = true);
    submit_write(&mut *queue, 1, 0, 9);
    queue.cancel(1);
    assert_eq!(wait_completed(&mut *queue), [(1, Err(DiskError::Cancelled))]);
    for tag in [2, 3] {
        submit(&mut *queue, tag, Op::Flush, 0, 0, Segments::new());
    }
    queue.reap(&mut |tag, _, _| panic!("{tag}: a flush has ended before the orphan"));
    queue.cancel(2);
    wait(&*queue);
    let mut ended = Vec::new();
    queue.reap(&mut |tag, result, _| ended.push((tag, result)));
    assert_eq!(ended, [(2, Err(DiskError::Cancelled))]);
    fake.change(|manner| manner.condition = false);
    assert_eq!(wait_completed(&mut *queue), [(3, Ok(()))]);
    assert_eq!(fake.cache()[..512], [9; 512]);
}

/// The number of orphans is limited. Beyond the limit, a cancelled write does not end before the
/// server has replied.
#[test]
fn orphans_are_bounded() {
    const EACH: u32 = 200;
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("connections=6");
    let mut queues: Vec<_> = (0..6).map(|_| disk.queue().unwrap()).collect();
    fake.change(|manner| manner.condition = true);
    for (nth, queue) in (0..).zip(&mut queues) {
        for tag in 0..EACH {
            submit_write(&mut **queue, tag, u64::from(nth * EACH + tag) * 512, 3);
        }
        (0..EACH).for_each(|tag| queue.cancel(tag));
    }
    assert_eq!(disk.orphans(), 1024);
    fake.change(|manner| manner.condition = false);
    let ended: Vec<_> = queues.iter_mut().flat_map(|queue| wait_completed(&mut **queue)).collect();
    let done = ended.iter().filter(|(_, result)| result.is_ok()).count();
    assert_eq!((ended.len(), done), (6 * EACH as usize, 6 * EACH as usize - 1024));
    assert_eq!(flush(&mut *queues[0]), Ok(()));
    assert_eq!((disk.orphans(), fake.count(command::WRITE)), (0, u64::from(6 * EACH)));
    assert_eq!(fake.durable()[..6 * EACH as usize * 512], vec![3; 6 * EACH as usize * 512]);
}

/// The error of a cancelled flush has no receiver, so a later flush has to report it.
#[test]
fn the_error_of_a_cancelled_flush_is_not_lost() {
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("connections=1");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &[1; 512]).unwrap();
    fake.change(|manner| {
        manner.condition = true;
        manner.errors.insert(command::FLUSH, 5);
    });
    submit(&mut *queue, 1, Op::Flush, 0, 0, Segments::new());
    queue.cancel(1);
    assert_eq!(wait_completed(&mut *queue), [(1, Err(DiskError::Cancelled))]);
    fake.change(|manner| manner.condition = false);
    assert!(read(&mut *queue, 0, 512).is_ok());
    fake.change(|manner| manner.errors.clear());
    assert_eq!(flush(&mut *queue), Err(DiskError::Io(5)));
    assert!(disk.has_lost_writes());
}

/// Cancelling a request takes constant time. If it took time proportional to the number of
/// requests, this test would take minutes.
#[test]
fn a_hundred_thousand_requests_are_cancelled_at_once() {
    const MANY: u32 = 200_000;
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("");
    let mut queue = disk.queue().unwrap();
    fake.change(|manner| manner.condition = true);
    let bytes = memory(512);
    for tag in 0..MANY {
        let mut data = segments(&bytes, 0, 512);
        let request = Request { op: Op::Read, offset: 0, len: 512 };
        assert_eq!(queue.submit(tag, &request, &mut data), Submitted::Pending);
    }
    queue.commit();
    // The last request is cancelled first: the worst order for a search from the front.
    (0..MANY).rev().for_each(|tag| queue.cancel(tag));
    let mut ended = wait_completed(&mut *queue);
    assert!(ended.iter().all(|(_, result)| *result == Err(DiskError::Cancelled)));
    ended.sort_unstable_by_key(|(tag, _)| *tag);
    assert!(ended.iter().map(|(tag, _)| *tag).eq(0..MANY), "each ends once");
    fake.change(|manner| manner.condition = false);
    assert_eq!(read(&mut *queue, 0, 512), Ok(vec![0; 512]));
}

/// The wake descriptor is not readable while the queue is idle, even if replies were reaped inline.
#[test]
fn a_queue_without_requests_is_silent() {
    let fake = Fake::new(MIB, ALL);
    let disk = fake.open("");
    let mut queue = disk.queue().unwrap();
    assert!(queue.wakes_by_edges());
    for round in 0..10 {
        write(&mut *queue, 0, &[round; 512]).unwrap();
    }
    queue.reap(&mut |_, _, _| panic!("nothing is pending"));
    let fd = queue.wake_fd().unwrap();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(poll(&mut fds, Some(&zero)).unwrap(), 0);
}

#[test]
fn requests_fail_on_a_server_with_wrong_replies() {
    let lies: [common::Violation; 8] = [
        |_| Some(vec![0xff; 64]),
        |request| Some(Head::simple(request.cookie ^ 1 << 40, Ok(())).bytes().to_vec()),
        |request| Some(Head::done(request.cookie ^ 1).bytes().to_vec()),
        |request| Some(Head::done(request.cookie).bytes().to_vec()),
        |request| {
            let mut out = Head::data(request.cookie, 1 << 60, 512, true).bytes().to_vec();
            out.extend([1; 512]);
            Some(out)
        },
        |request| Some(Head::data(request.cookie, request.offset, 1 << 30, true).bytes().to_vec()),
        |request| {
            let part = Head::data(request.cookie, request.offset, 256, false);
            let mut out = part.bytes().to_vec();
            out.extend([1; 256]);
            out.extend(part.bytes());
            out.extend([1; 256]);
            Some(out)
        },
        |request| Some(Head::simple(request.cookie, Ok(())).bytes().to_vec()),
    ];
    for violation in lies {
        let fake = Fake::new(MIB, ALL);
        let disk = fake.open("connections=1");
        let mut queue = disk.queue().unwrap();
        fake.change(|manner| manner.violation = Some(violation));
        assert_eq!(read(&mut *queue, 0, 512), Err(DiskError::Io(5)));
        assert!(fake.connections() >= 4);
        fake.change(|manner| manner.violation = None);
        assert_eq!(read(&mut *queue, 0, 512), Ok(vec![0; 512]));
    }
}

#[test]
fn a_resized_export_is_detected() {
    let mut fake = Fake::new(MIB, ALL);
    let disk = fake.open("");
    let mut queue = disk.queue().unwrap();
    fake.resize(2 * MIB);
    let larger = disk.resized(None).unwrap();
    assert_eq!((larger.info().bytes(), disk.info().bytes()), (2 << 20, 1 << 20));
    let mut second = larger.queue().unwrap();
    assert_eq!(write(&mut *second, MIB as u64, &[1; 512]), Ok(()));
    assert_eq!(write(&mut *queue, MIB as u64, &[1; 512]), Err(DiskError::OutOfRange));
    assert!(matches!(disk.resized(Some(4 << 20)), Err(ResizeError::Short { .. })));
    assert!(matches!(disk.resized(Some(1000)), Err(ResizeError::Size { .. })));
    // The export shrinks while the server is down.
    fake.kill();
    fake.resize(MIB / 2);
    fake.start();
    let beyond = read(&mut *queue, MIB as u64 / 2, 512);
    assert_eq!(beyond, Err(DiskError::OutOfRange));
    assert_eq!(disk.resized(None).unwrap().info().bytes(), 1 << 19);
}

#[test]
fn a_restarted_server_with_fewer_features_is_not_used() {
    let mut fake = Fake::new(MIB, ALL);
    let disk = fake.open("");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &[1; 512]).unwrap();
    fake.kill();
    fake.change(|manner| manner.flags = ALL & !transmission::SEND_FLUSH);
    fake.start();
    let bytes = memory(512);
    submit(&mut *queue, 1, Op::Read, 0, 512, segments(&bytes, 0, 512));
    let before = fake.connections();
    while fake.connections() < before + 2 {
        std::thread::yield_now();
    }
    assert_eq!((queue.pending(), fake.count(command::READ)), (1, 0));
    fake.change(|manner| manner.flags = ALL);
    assert_eq!(wait_completed(&mut *queue), [(1, Ok(()))]);
    assert_eq!(fake.cache()[0], 1);
}
