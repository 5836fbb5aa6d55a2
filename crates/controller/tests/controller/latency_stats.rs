//! Latency statistics of commands.

use crate::common;
use common::{Host, LIMIT, Queue, config, run_beside};
use shadowbell_controller::latency_stats::NamespaceLatency;
use shadowbell_controller::trace::{Kind, TraceFile, read_trace};
use shadowbell_controller::{Carrier, Controller, Polling, Pool, PoolOptions, Turns};
use shadowbell_spec::Sqe;
use std::time::{Duration, Instant};

/// Creates a host with one queue, while this thread acts as the I/O thread.
fn attached(controller: Controller, turns: &mut Turns) -> (Host, Queue) {
    run_beside(turns, move || {
        let mut host = Host::attach(controller);
        host.enable();
        let queue = host.create(1, 64, true);
        (host, queue)
    })
}

/// Number of commands of each kind, and their blocks and errors.
fn counts(of: &NamespaceLatency) -> [(u64, u64, u64); 3] {
    [&of.reads, &of.writes, &of.others].map(|kind| (kind.latency.count(), kind.blocks, kind.errors))
}

#[test]
fn commands_are_measured_by_namespace_on_request() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let config = config(&["mem:1MiB", "null:1GiB"]);
    let controller = Controller::new(config, pool.clone(), Carrier::default()).unwrap();
    let (mut host, mut queue) = attached(controller, &mut turns);
    let buffer = host.alloc(4096);
    let mut run = |host: &mut Host, turns: &mut Turns, sqe: Sqe| {
        let sqe = sqe.with_prps(buffer, 0).with_cid(host.next_cid());
        host.submit(&mut queue, &sqe);
        // The command waits for 50 µs before the I/O thread runs, so its latency is at least this
        // long.
        std::thread::sleep(Duration::from_micros(50));
        while turns.turn() {}
        host.reap(&mut queue).expect("these disks are memory").1
    };
    let mut round = |host: &mut Host, turns: &mut Turns| {
        for at in 0..5 {
            assert!(run(host, turns, Sqe::read(1, at, 7, 0)).is_success());
        }
        for at in 0..3 {
            assert!(run(host, turns, Sqe::write(2, at, 0, 0)).is_success());
        }
        assert!(!run(host, turns, Sqe::read(1, 1 << 40, 7, 0)).is_success());
        assert!(run(host, turns, Sqe::new(0x00, 0, 2)).is_success(), "a Flush");
        // Commands for all namespaces and commands with an invalid NSID are not measured.
        assert!(run(host, turns, Sqe::new(0x00, 0, u32::MAX)).is_success());
        for nsid in [0, 257, 4711] {
            assert!(!run(host, turns, Sqe::read(nsid, 0, 7, 0)).is_success());
        }
    };
    round(&mut host, &mut turns);
    assert!(!pool.measures() && host.controller.stats().measured.is_empty());
    pool.measure(true);
    for rounds in 1..3_u64 {
        round(&mut host, &mut turns);
        let measured = host.controller.stats().measured;
        let nsids: Vec<_> = measured.iter().map(|namespace| namespace.nsid).collect();
        assert_eq!(nsids, [1, 2]);
        let times = |(count, blocks, errors): (u64, u64, u64)| {
            (count * rounds, blocks * rounds, errors * rounds)
        };
        assert_eq!(counts(&measured[0]), [(6, 40, 1), (0, 0, 0), (0, 0, 0)].map(times));
        assert_eq!(counts(&measured[1]), [(0, 0, 0), (3, 3, 0), (1, 0, 0)].map(times));
        let latency = &measured[0].reads.latency;
        assert!(latency.quantile(0.5).is_some_and(|ns| ns < 1_000_000_000), "{latency:?}");
    }
    pool.measure(false);
    round(&mut host, &mut turns);
    let before = host.controller.stats().measured;
    assert_eq!(counts(&before[0])[0].0, 12);
    // The counts continue when the measurement is switched on again.
    pool.measure(true);
    round(&mut host, &mut turns);
    assert_eq!(counts(&host.controller.stats().measured[0])[0].0, 18);
}

/// A trace is switched on and off while the latency is measured. Each command must be counted
/// exactly once, at any queue depth.
#[test]
fn every_command_counts_once_beside_a_trace() {
    const TOTAL: u64 = 20_000;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace");
    let options = PoolOptions { workers: 1, polling: Polling::default(), ..PoolOptions::default() };
    let pool = Pool::start(&options).unwrap();
    pool.measure(true);
    let controller =
        Controller::new(config(&["null:1GiB"]), pool.clone(), Carrier::default()).unwrap();
    let mut host = Host::attach(controller);
    host.enable();
    assert!(host.configure_shadow(|_, _| 0).is_success());
    let mut queue = host.create(1, 256, false);
    let buffer = host.alloc(4096);
    let (mut submitted, mut completed) = (0_u64, 0_u64);
    let since = Instant::now();
    while completed < TOTAL {
        match completed {
            5_000..5_200 => pool.trace(&TraceFile::create(&path, 1, 1 << 16).unwrap()),
            10_000..10_200 => pool.end_trace(),
            _ => {}
        }
        let old = queue.tail;
        while submitted < TOTAL && submitted - completed < 200 {
            // Identifiers are reused, as by a guest.
            let cid = (submitted % 256) as u16 | 0x3000;
            host.put(&mut queue, &Sqe::read(1, submitted % 64, 7, cid).with_prps(buffer, 0));
            submitted += 1;
        }
        if queue.tail != old {
            host.ring(&queue, old);
        }
        while let Some((_, status, _)) = host.reap(&mut queue) {
            assert!(status.is_success(), "{status}");
            completed += 1;
        }
        std::thread::yield_now();
        assert!(since.elapsed() < LIMIT, "{completed} of {submitted}");
    }
    host.until("all that is counted", || {
        let measured = host.controller.stats().measured;
        measured.first().is_some_and(|ns| counts(ns)[0] == (TOTAL, TOTAL * 8, 0))
    });
    assert!(read_trace(&path).unwrap().any(|record| record.kind == Kind::CompletionPosted));
}
