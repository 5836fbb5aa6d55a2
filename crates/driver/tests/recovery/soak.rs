//! Thousands of faults under full load, over vfio-user, with every byte checked.

use crate::disk::CachedDisk;
use crate::model::Program;
use crate::served::Server;
use crate::{emulated, inject, options};
use shadowbell_controller::faults::Fault;
use shadowbell_driver::{AttachOptions, Controller, Recovery, Timeouts, Transport};
use shadowbell_testing::wait::LIMIT;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// All recoverable faults, each of which is injected many times. Faults during a reset are rare, so
/// that one of the driver's few attempts succeeds.
const FAULTS: &str = "seed=2604,\
    fatal:every=20000,subsystem-reset:every=51000,wrong-phase:every=3000,\
    drop-before:rate=1/150,drop-after:rate=1/150,hang:rate=1/150,wrong-cid:rate=1/300,\
    duplicate:rate=1/200,corrupt:rate=1/200,delay=1ms:rate=1/300,delay=30ms:rate=1/500,stall=25ms:rate=1/300,\
    wrong-head:rate=1/400,wrong-sq-id:rate=1/400,status=0x006:rate=1/400,\
    refuse=0x00:every=9,refuse=0x04:every=17,refuse=0x05:every=23,refuse=0x01:every=29,\
    ignore=0x08:every=5,refuse=0x08:every=7,ignore=0x00:every=31,refuse=0x06:every=7,\
    refuse=0x7c:every=8,never-ready:every=9,never-disabled:every=11";

/// Number of blocks of each program.
const BLOCKS: u64 = 8192;
/// Number of commands in flight of each program.
const DEPTH: u32 = 128;

/// Minimum number of queues that the driver must create again, and minimum number of its controller
/// resets.
const TAKEN: u64 = 12;

/// Runs until `faults` faults were injected.
fn soak(faults: u64) {
    let disk = CachedDisk::new(2 * BLOCKS);
    let emulated = emulated(Arc::new(disk.clone()));
    let server = Server::start(&emulated);
    let transport: Arc<dyn Transport> = Arc::new(server.connect());
    let options = AttachOptions {
        queue_pairs: 2,
        queue_depth: DEPTH + 1,
        timeouts: Timeouts {
            // A reset has only a few attempts, so it gets more time than a command.
            ready: Some(Duration::from_secs(1)),
            admin: Duration::from_millis(500),
            // The limit is so short that slow commands may be aborted as well.
            io: Duration::from_millis(16),
            ..Timeouts::default()
        },
        recovery: Recovery { repeats: 40, ..options().recovery },
        ..AttachOptions::default()
    };
    let mut controller = Controller::attach(transport, &options).unwrap();
    let namespace = controller.namespace(1).unwrap().clone();
    let injected = inject(&emulated, FAULTS);
    let began = Instant::now();
    let (commands, failures) = (AtomicU64::new(0), AtomicU64::new(0));
    let queues = [(); 2].map(|()| controller.take_queue_pair().unwrap());
    let controller = controller;
    std::thread::scope(|scope| {
        for (first, mut queue) in [0, BLOCKS].into_iter().zip(queues) {
            assert_eq!(queue.capacity(), DEPTH as usize);
            let pool = controller.buffers(DEPTH as usize, 8192).unwrap();
            let mut program = Program::new(&queue, (&namespace, &disk), (first, BLOCKS));
            let (injected, emulated) = (&injected, &emulated);
            let (commands, failures, controller) = (&commands, &failures, &controller);
            scope.spawn(move || {
                program.run(&mut queue, &pool, |_| {
                    let stats = controller.recovery_stats();
                    let taken = stats.queues_recreated >= TAKEN && stats.resets >= TAKEN;
                    if (injected.total() < faults || !taken) && began.elapsed() < LIMIT {
                        return false;
                    }
                    // No further faults are injected, so that the commands in flight end.
                    emulated.inject(shadowbell_controller::faults::Faults::default());
                    true
                });
                program.check_all_stable();
                program.read_all(&mut queue, &pool);
                commands.fetch_add(program.completed, Ordering::Relaxed);
                failures.fetch_add(program.failures, Ordering::Relaxed);
                println!(
                    "queue {}: slowest {:?}, {:?}",
                    queue.qid(),
                    program.slowest,
                    queue.stats()
                );
            });
        }
    });
    let stats = controller.recovery_stats();
    let (commands, failures) = (commands.into_inner(), failures.into_inner());
    println!(
        "{} faults, {commands} commands, {failures} repeated by the program, {:?}: {stats:?}",
        injected.total(),
        began.elapsed()
    );
    injected.by_rule().iter().for_each(|(rule, n)| println!("{n:6} {:?}", rule.fault));
    assert!(injected.total() >= faults);
    let of_commands = |fault| {
        !matches!(
            fault,
            Fault::Refuse(_) | Fault::Ignore(_) | Fault::NeverReady | Fault::NeverDisabled
        )
    };
    for (rule, count) in injected.by_rule() {
        assert!(count > 0 || !of_commands(rule.fault), "there was no {:?}", rule.fault);
    }
    assert_eq!((stats.failed, stats.removed), (0, 0), "{stats:?}");
    let taken = [stats.aborts, stats.queues_recreated, stats.resets, stats.queues_restored];
    assert!(taken.iter().all(|n| *n >= TAKEN), "not every step was taken: {stats:?}");
    assert!(stats.ended > 0 && stats.repeated > 0, "{stats:?}");
    controller.detach().unwrap();
}

#[test]
fn ten_thousand_faults_lose_no_data() {
    soak(10_000);
}
