//! Shadow doorbells with all kinds of hosts, and with an I/O thread that sleeps.

use crate::common;
use common::{Host, LIMIT, Queue};
use shadowbell_controller::{Carrier, Config, Controller, Polling};
use shadowbell_spec::admin::{DeleteIoQueue, DoorbellBufferConfig, GetLogPage};
use shadowbell_spec::log::{ErrorLogEntry, lid};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::regs::{self, Cc};
use shadowbell_spec::{Sqe, Status};
use shadowbell_testing::wait;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

const SLEEPY: Polling = Polling::Never;

/// Keeps `depth` reads in flight until `total` have completed.
fn stream(host: &mut Host, queue: &mut Queue, depth: u32, total: u64) {
    let buffer = host.alloc(4096);
    let (mut submitted, mut completed) = (0u64, 0u64);
    let mut progress = Instant::now();
    while completed < total {
        let old = queue.tail;
        while submitted < total && submitted - completed < u64::from(depth) {
            host.put(
                queue,
                &Sqe::read(1, submitted % 64, 7, submitted as u16).with_prps(buffer, 0),
            );
            submitted += 1;
        }
        if queue.tail != old {
            host.ring(queue, old);
        }
        while let Some((_, status, _)) = host.reap(queue) {
            assert!(status.is_success(), "{status}");
            completed += 1;
            progress = Instant::now();
        }
        // The I/O thread may need this CPU.
        std::thread::yield_now();
        assert!(
            progress.elapsed() < LIMIT,
            "stuck: {submitted} submitted, {completed} completed, shadow {:?}, {:#?}",
            host.shadow.map(|(s, e)| [s + 8, s + 12, e + 8, e + 12].map(|at| host.peek32(at))),
            host.controller.stats(),
        );
    }
}

#[test]
fn no_wakeup_is_lost_at_any_depth_and_polling_mode() {
    for polling in [SLEEPY, Polling::Adaptive(Duration::from_micros(20)), Polling::Always] {
        for (entries, depth) in [(2, 1), (3, 2), (16, 1), (16, 15), (64, 8), (1024, 32)] {
            let mut host = Host::new(&["null:1GiB"], polling);
            assert!(host.configure_shadow(|_, _| 0).is_success());
            let mut queue = host.create(1, entries, false);
            stream(&mut host, &mut queue, depth, 2_000);
        }
    }
}

#[test]
fn a_polling_controller_is_not_rung_ring_wraps_included() {
    let mut host = Host::new(&["null:1GiB"], Polling::Always);
    assert!(host.configure_shadow(|_, _| 0).is_success());
    let mut queue = host.create(1, 256, false);
    // With a polling controller, EventIdx is not in the range of an update if the update is at most
    // an eighth of the ring (here 16 of 256 entries). So the host writes no register. The first
    // update of each doorbell is an exception: until the shadow entry has changed once, EventIdx is
    // the last position that the controller has seen. So the check begins after 256 reads.
    stream(&mut host, &mut queue, 16, 256);
    let before = host.rings;
    stream(&mut host, &mut queue, 16, 256 * 500);
    assert_eq!(host.rings - before, 0, "five hundred wraps");
    let (sq, cq) = host.controller.stats().io_queues();
    assert_eq!(sq.commands, 256 * 501);
    assert_eq!(sq.doorbell.mmio_writes + cq.doorbell.mmio_writes, host.rings - admin_rings(&host));
}

fn admin_rings(host: &Host) -> u64 {
    let stats = host.controller.stats();
    stats.submission_queues[0].doorbell.mmio_writes
        + stats.completion_queues[0].doorbell.mmio_writes
}

#[test]
fn an_eventfd_wakes_like_a_doorbell_write() {
    for polling in [SLEEPY, Polling::Adaptive(Duration::from_micros(20))] {
        let mut host = Host::new(&["null:1GiB"], polling);
        let none = |host: &Host| host.controller.doorbell_eventfds().unwrap().doorbells.is_empty();
        let plain = host.create(1, 16, false);
        assert!(none(&host), "the value of a plain doorbell matters");
        assert!(host.configure_shadow(|_, _| 0).is_success());
        let mut queue = host.create(2, 16, false);
        host.doorbell_eventfds = host.controller.doorbell_eventfds().unwrap();
        assert_eq!(
            (host.doorbell_eventfds.events.len(), host.doorbell_eventfds.doorbells.len()),
            (1, 4)
        );
        for depth in [1, 4, 15] {
            stream(&mut host, &mut queue, depth, 2_000);
        }
        assert!(host.rings > 20, "some of that slept");
        let (sq, cq) = host.controller.stats().io_queues();
        assert_eq!((sq.commands, sq.doorbell.mmio_writes + cq.doorbell.mmio_writes), (6_000, 0));
        let rings = host.rings - admin_rings(&host);
        assert_eq!(host.controller.stats().doorbell_events, rings);
        // A process that shares the eventfd can make it blocking. Even then, no thread of the
        // controller may wait for it.
        let event = &host.doorbell_eventfds.events[0];
        event.drain();
        let flags = rustix::fs::fcntl_getfl(event).unwrap();
        rustix::fs::fcntl_setfl(event, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
        assert_eq!(host.controller.stats().submission_queues.len(), 3);
        stream(&mut host, &mut queue, 4, 1_000);
        drop((queue, plain));

        // After a reset, a signal of the old eventfds has no effect.
        let old = std::mem::take(&mut host.doorbell_eventfds);
        host.disable();
        assert!(none(&host));
        host.enable();
        host.shadow = None;
        assert!(none(&host));
        assert!(host.configure_shadow(|_, _| 0).is_success());
        let mut queue = host.create(1, 16, false);
        host.doorbell_eventfds = host.controller.doorbell_eventfds().unwrap();
        old.events[0].signal();
        stream(&mut host, &mut queue, 4, 1_000);
        old.events[0].signal();
    }
}

#[test]
fn events_are_in_the_trace() {
    use shadowbell_controller::trace::{Kind, TraceFile, read_trace};
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace");
    let pool = common::pool(SLEEPY);
    let file = TraceFile::create(&path, 1, 1 << 12).unwrap();
    pool.trace(&file);
    let config = common::config(&["null:1GiB"]);
    let controller = Controller::new(config, pool, Carrier::default()).unwrap();
    let mut host = Host::attach(controller);
    host.enable();
    assert!(host.configure_shadow(|_, _| 0).is_success());
    let mut queue = host.create(1, 16, false);
    host.doorbell_eventfds = host.controller.doorbell_eventfds().unwrap();
    stream(&mut host, &mut queue, 1, 50);
    let rings = host.controller.stats().doorbell_events;
    let records = read_trace(&path).unwrap();
    let of_events: Vec<_> = records.filter(|record| record.kind == Kind::DoorbellEvent).collect();
    // Several signals while the I/O thread was awake count as one.
    assert!((1..=rings).contains(&(of_events.len() as u64)), "{} of {rings}", of_events.len());
    assert!(of_events.iter().all(|record| (record.worker, record.qid) == (Some(0), 0)));
    assert!(of_events.iter().all(|record| record.controller != 0));
}

#[test]
fn plain_doorbells_work_after_the_configuration() {
    let mut host = Host::new(&["null:1GiB"], SLEEPY);
    let mut queue = host.create(1, 16, false);
    stream(&mut host, &mut queue, 8, 1000);
    // After Doorbell Buffer Config, a host may still write registers, and not use the queue's
    // shadow entries.
    assert!(host.configure_shadow(|_, _| 0).is_success());
    stream(&mut host, &mut queue, 8, 1000);
}

#[test]
fn the_admin_queue_may_be_shadowed_or_not() {
    for shadowed in [false, true] {
        let mut host = Host::new(&["null:1GiB"], SLEEPY);
        // The specification requires that the entries contain the doorbells' current values. Linux
        // leaves zeroes in them, and never reads them again.
        let status = host.configure_shadow(|host, entry| match (shadowed, entry) {
            // The Doorbell Buffer Config command itself advances the tail by one.
            (true, 0) => host.admin.tail + 1,
            (true, 4) => host.admin.head,
            _ => 0,
        });
        assert!(status.is_success());
        host.admin.shadowed = shadowed;
        for _ in 0..100 {
            let (status, _) = host.admin(Sqe::new(0x06, 0, 0));
            assert!(
                !status.is_success(),
                "the command without a data pointer was executed, and failed"
            );
        }
    }
}

#[test]
fn enabling_shadow_doorbells_loses_no_command_in_flight() {
    for initialised in [false, true] {
        let (mut host, gate) = common::slow_host(SLEEPY);
        let mut queue = host.create(1, 16, false);
        let buffer = host.alloc(4096);
        let read = |cid: u16| Sqe::read(1, 0, 0, cid).with_prps(buffer, 0);
        for cid in 0..5 {
            host.submit(&mut queue, &read(cid));
        }
        host.until("five requests", || gate.waiting() == 5);
        let (tail, head) = (queue.tail, queue.head);
        let status = host.configure_shadow(|_, entry| match entry {
            8 if initialised => tail,
            12 if initialised => head,
            _ => 0,
        });
        assert!(status.is_success());
        // Directly after the command, a host may still write the register and not the shadow entry.
        host.submit(&mut queue, &read(5));
        queue.shadowed = true;
        for cid in 6..9 {
            host.submit(&mut queue, &read(cid));
        }
        host.until("nine requests", || gate.waiting() == 9);
        for cid in 0..9 {
            gate.end(Ok(()));
            assert_eq!(host.wait(&mut queue).0, cid);
        }
        assert_eq!(host.peek(buffer, 1), [0xee]);
    }
}

#[test]
fn a_full_completion_queue_blocks_and_its_head_wakes() {
    for shadowed in [false, true] {
        let mut host = Host::new(&["null:1GiB"], SLEEPY);
        if shadowed {
            assert!(host.configure_shadow(|_, _| 0).is_success());
        }
        // The completion queue has 4 entries and room for 3 completions. The submission queue has
        // 16 entries.
        let (cq, sq) = (host.alloc(4096), host.alloc(4096));
        host.must(common::create_cq(1, 3, None, cq));
        host.must(common::create_sq(1, 15, 1, sq));
        let buffer = host.alloc(4096);
        let mut queue = Queue { qid: 1, entries: 16, sq, cq, shadowed, ..Queue::none() };
        let old = queue.tail;
        for cid in 0..10 {
            host.put(&mut queue, &Sqe::read(1, 0, 0, cid).with_prps(buffer, 0));
        }
        host.ring(&queue, old);
        queue.entries = 4; // From here, `queue` wraps like the completion queue.
        let blocked = || host.controller.stats().submission_queues[1].blocked;
        host.until("a full completion queue", || blocked() > 0);
        let mut seen = Vec::new();
        for _ in 0..10 {
            // In this time, the I/O thread usually goes to sleep, and waits for room in the
            // completion queue.
            wait::pause();
            seen.push(host.wait(&mut queue).0);
        }
        assert_eq!(seen, (0..10).collect::<Vec<_>>());
    }
}

/// Newest entry of the Error Information log page.
fn newest_error(host: &mut Host) -> ErrorLogEntry {
    let fields = GetLogPage { lid: lid::ERROR_INFORMATION, numd0: 15, ..GetLogPage::default() };
    let page = host.page(Sqe::get_log_page(0, fields, 0)).unwrap();
    ErrorLogEntry::read_from_bytes(&page[..64]).unwrap()
}

#[test]
fn values_outside_the_ring_are_refused_with_the_event() {
    for shadowed in [false, true] {
        let mut host = Host::new(&["null:1GiB"], SLEEPY);
        if shadowed {
            assert!(host.configure_shadow(|_, _| 0).is_success());
        }
        host.create(1, 16, false);
        let mut admin = std::mem::replace(&mut host.admin, Queue::none());
        host.submit(&mut admin, &Sqe::async_event_request(99));
        for value in [16, 17, 0xffff, 0x1_0001, u32::MAX] {
            host.doorbell(shadowed, shadowbell_spec::regs::sq_doorbell_offset(1, 0), 0, value);
            host.controller.write_doorbell(shadowbell_spec::regs::sq_doorbell_offset(1, 0), value);
        }
        let (cid, status, dw0) = host.wait(&mut admin);
        assert_eq!((cid, status), (99, Status::SUCCESS));
        assert_eq!(dw0 & 0xffff, 0x0100, "error, invalid doorbell write value");
        host.admin = admin;
        let entry = newest_error(&mut host);
        assert_eq!((entry.sqid, entry.cid), (0xffff, 0xffff), "of no command");
        assert_eq!(entry.status >> 1, Status::INVALID_FIELD.bits());
    }
}

/// Way by which doorbell values arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Doorbells {
    Trapped,
    Mapped,
    Shadow,
}

/// After an invalid tail, host and controller do not agree on the position. So the controller
/// fetches no command until the queue is created again.
#[test]
fn no_command_is_taken_after_an_invalid_tail() {
    let tail = regs::sq_doorbell_offset(1, 0);
    for polling in [SLEEPY, Polling::Always] {
        for doorbells in [Doorbells::Trapped, Doorbells::Mapped, Doorbells::Shadow] {
            let what = format!("{polling:?}, {doorbells:?}");
            let carrier =
                Carrier { mapped_doorbells: doorbells == Doorbells::Mapped, listener: None };
            let config = common::config(&["null:1GiB"]);
            let controller = Controller::new(config, common::pool(polling), carrier).unwrap();
            let mut host = Host::attach(controller);
            host.enable();
            let shadowed = doorbells == Doorbells::Shadow;
            if shadowed {
                assert!(host.configure_shadow(|_, _| 0).is_success());
            }
            let mut queue = host.create(1, 16, false);
            let mut witness = host.create(2, 16, false);
            stream(&mut host, &mut queue, 8, 20);
            let mut admin = std::mem::replace(&mut host.admin, Queue::none());
            host.submit(&mut admin, &Sqe::async_event_request(99));
            // The commands before and after the invalid value are valid.
            let old = queue.tail;
            let buffer = host.alloc(4096);
            host.put(&mut queue, &Sqe::read(1, 0, 7, 1).with_prps(buffer, 0));
            host.doorbell(shadowed, tail, old, 16);
            if doorbells == Doorbells::Trapped {
                // If the host overwrites the invalid value before the controller polls, the value
                // is detected only if its write was trapped.
                host.ring(&queue, old);
            }
            if shadowed {
                host.controller.write_doorbell(tail, 16);
            }
            expect_invalid_doorbell(&mut host, &mut admin, &what);
            host.admin = admin;
            for at in [queue.tail, (queue.tail + 1) % 16] {
                host.doorbell(shadowed, tail, old, at);
                host.controller.write_doorbell(tail, at);
            }
            stream(&mut host, &mut witness, 8, 50);
            assert_eq!(host.reap(&mut queue), None, "{what}: a command was taken");
            let stats = host.controller.stats();
            let taken = stats.submission_queues.iter().find(|sq| sq.qid == 1).unwrap().commands;
            assert_eq!(taken, 20, "{what}");
            assert_eq!(newest_error(&mut host).error_count, 1, "{what}: one event");
            // A new queue with the same identifier works.
            host.must(DeleteIoQueue { qid: 1 }.encode(Sqe::new(0x00, 0, 0)));
            if let Some((shadow, _)) = host.shadow {
                host.poke32(shadow + 8, 0);
            }
            host.must(common::create_sq(1, 15, 1, queue.sq));
            queue.tail = 0;
            stream(&mut host, &mut queue, 8, 100);
        }
    }
}

/// A trapped head is validated when it arrives.
#[test]
fn a_trapped_invalid_head_counts_although_a_valid_one_follows_at_once() {
    let head = regs::cq_doorbell_offset(1, 0);
    for polling in [SLEEPY, Polling::Always] {
        let mut host = Host::new(&["null:1GiB"], polling);
        let mut queue = host.create(1, 16, false);
        stream(&mut host, &mut queue, 8, 20);
        let mut admin = std::mem::replace(&mut host.admin, Queue::none());
        let mut events = 0;
        for value in [queue.head + 1, 15, 16, 0xffff, u32::MAX] {
            if value == queue.head {
                continue;
            }
            host.submit(&mut admin, &Sqe::async_event_request(99));
            host.controller.write_doorbell(head, value);
            host.controller.write_doorbell(head, queue.head);
            expect_invalid_doorbell(&mut host, &mut admin, &format!("{polling:?}: {value}"));
            events += 1;
            std::mem::swap(&mut host.admin, &mut admin);
            assert_eq!(newest_error(&mut host).error_count, events, "one event");
            std::mem::swap(&mut host.admin, &mut admin);
        }
        host.admin = admin;
        let stats = host.controller.stats();
        let refused = stats.completion_queues.iter().find(|cq| cq.qid == 1).unwrap();
        assert_eq!(refused.doorbell.invalid, events, "counted");
        stream(&mut host, &mut queue, 8, 100);
    }
}

/// Waits for the completion of the Asynchronous Event Request, which must report an invalid
/// doorbell value.
fn expect_invalid_doorbell(host: &mut Host, admin: &mut Queue, what: &str) {
    let (cid, status, dw0) = host.wait(admin);
    assert_eq!((cid, status), (99, Status::SUCCESS), "{what}");
    assert_eq!(dw0 & 0xffff, 0x0100, "error, invalid doorbell write value: {what}");
}

/// The controller checks heads even while there is room for completions. Otherwise it would find an
/// invalid head only when a queue waits for room.
#[test]
fn invalid_heads_are_reported_however_they_arrive() {
    let head = shadowbell_spec::regs::cq_doorbell_offset(1, 0);
    for polling in [SLEEPY, Polling::Always] {
        for mapped_doorbells in [false, true] {
            for used in [0, 20] {
                let carrier = Carrier { mapped_doorbells, listener: None };
                let config = common::config(&["null:1GiB"]);
                let controller = Controller::new(config, common::pool(polling), carrier).unwrap();
                let mut host = Host::attach(controller);
                host.enable();
                let mut queue = host.create(1, 16, false);
                stream(&mut host, &mut queue, 8, used);
                let mut admin = std::mem::replace(&mut host.admin, Queue::none());
                // Invalid heads: an entry that was not posted, and values outside of the ring. Each
                // is followed by a valid value.
                for value in [queue.head + 1, 16, u32::MAX] {
                    let what = format!("{polling:?}, mapped {mapped_doorbells}: {value}");
                    host.submit(&mut admin, &Sqe::async_event_request(99));
                    host.doorbell(false, head, 0, value);
                    expect_invalid_doorbell(&mut host, &mut admin, &what);
                    host.doorbell(false, head, 0, queue.head);
                    // The event is not sent again until the host has read the log page (Error
                    // Information) of the last event.
                    std::mem::swap(&mut host.admin, &mut admin);
                    newest_error(&mut host);
                    std::mem::swap(&mut host.admin, &mut admin);
                }
                stream(&mut host, &mut queue, 8, 100);
            }
        }
    }
}

/// A value in a shadow page is validated when the controller reads it. A trapped register write is
/// then only a wakeup, and its value is ignored.
#[test]
fn invalid_shadow_heads_are_reported() {
    let head = shadowbell_spec::regs::cq_doorbell_offset(1, 0);
    for polling in [SLEEPY, Polling::Always] {
        let mut host = Host::new(&["null:1GiB"], polling);
        assert!(host.configure_shadow(|_, _| 0).is_success());
        let mut queue = host.create(1, 16, false);
        stream(&mut host, &mut queue, 8, 20);
        let mut admin = std::mem::replace(&mut host.admin, Queue::none());
        host.submit(&mut admin, &Sqe::async_event_request(99));
        host.controller.write_doorbell(head, 16);
        let (shadow, _) = host.shadow.unwrap();
        host.poke32(shadow + 12, queue.head + 1);
        // The read of the tail wakes a sleeping thread.
        host.controller.write_doorbell(shadowbell_spec::regs::sq_doorbell_offset(1, 0), queue.tail);
        expect_invalid_doorbell(&mut host, &mut admin, &format!("{polling:?}"));
        host.poke32(shadow + 12, queue.head);
        host.admin = admin;
        assert_eq!(newest_error(&mut host).error_count, 1, "the trapped value does not count");
        stream(&mut host, &mut queue, 8, 100);
    }
}

#[test]
fn a_doorbell_that_no_queue_has_is_reported() {
    let mut host = Host::new(&["null:1GiB"], SLEEPY);
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    host.submit(&mut admin, &Sqe::async_event_request(7));
    host.controller.write_doorbell(shadowbell_spec::regs::sq_doorbell_offset(3, 0), 1);
    let (cid, _, dw0) = host.wait(&mut admin);
    assert_eq!((cid, dw0 & 0xffff), (7, 0x0000), "error, write to invalid doorbell register");
    host.admin = admin;
    let entry = newest_error(&mut host);
    assert_eq!((entry.error_count, entry.sqid, entry.cid), (1, 0xffff, 0xffff));
    assert_eq!(entry.status >> 1, Status::INVALID_QID.bits());
    for offset in [0x1000 + 65 * 8, 0x1ffc, 0x1003, u64::MAX] {
        host.controller.write_doorbell(offset, 1);
    }
}

#[test]
fn a_reset_releases_the_shadow_pages() {
    let mut host = Host::new(&["null:1GiB"], SLEEPY);
    assert!(host.configure_shadow(|_, _| 0).is_success());
    let (shadow, event_idx) = host.shadow.unwrap();
    let mut queue = host.create(1, 16, false);
    stream(&mut host, &mut queue, 4, 100);
    host.disable();
    // The host reuses the pages now: the controller must not change them.
    let pattern = vec![0x5a; 4096];
    host.poke(shadow, &pattern);
    host.poke(event_idx, &pattern);
    host.enable();
    let mut queue = host.create(1, 16, false);
    stream(&mut host, &mut queue, 4, 1000);
    assert_eq!(host.peek(shadow, 4096), pattern);
    assert_eq!(host.peek(event_idx, 4096), pattern);
}

#[test]
fn shadow_doorbells_need_valid_buffers_and_support() {
    let mut host = Host::new(&["null:1GiB"], SLEEPY);
    let good = host.alloc(4096);
    let config = |shadow, event_idx| {
        Sqe::dbbuf_config(shadowbell_spec::admin::DoorbellBufferConfig { shadow, event_idx }, 0)
    };
    for (a, b) in [(good + 4, good), (good, good + 8), (0, good), (good, !4095)] {
        assert_eq!(host.admin(config(a, b)).0.code(), Status::INVALID_FIELD, "{a:#x} {b:#x}");
    }
    let without = Config { shadow_doorbells: false, ..common::config(&["null:1GiB"]) };
    let mut host = Host::with(without, SLEEPY);
    assert_eq!(host.configure_shadow(|_, _| 0).code(), Status::INVALID_OPCODE);
    let mut queue = host.create(1, 16, false);
    stream(&mut host, &mut queue, 8, 200);
}

#[test]
fn configured_twice_the_second_pages_count() {
    let mut host = Host::new(&["null:1GiB"], SLEEPY);
    assert!(host.configure_shadow(|_, _| 0).is_success());
    let mut queue = host.create(1, 16, false);
    stream(&mut host, &mut queue, 4, 101);
    let (tail, head) = (queue.tail, queue.head);
    let status = host.configure_shadow(|_, entry| match entry {
        8 => tail,
        12 => head,
        _ => 0,
    });
    assert!(status.is_success());
    stream(&mut host, &mut queue, 4, 1000);
}

/// Pages that the host passes with another Doorbell Buffer Config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pages {
    /// The pages in use.
    Same,
    /// Other pages, with the current values.
    Current,
    /// Other pages, with zeroes.
    Zeroed,
}

/// Submits `depths` commands to the queues, one number per queue, and directly afterwards a
/// Doorbell Buffer Config. Waits until all commands have completed. `spare` contains the pages that
/// are not in use.
fn reconfigure(
    host: &mut Host,
    queues: &mut [Queue],
    depths: &[u16],
    pages: Pages,
    spare: &mut (u64, u64),
) {
    let submit = |host: &mut Host, queue: &mut Queue, cids: std::ops::Range<u16>| {
        let old = queue.tail;
        cids.for_each(|cid| host.put(queue, &Sqe::new(NvmOpcode::Flush as u8, cid, 1)));
        if queue.tail != old {
            host.ring(queue, old);
        }
    };
    // If the pages stay the same, the host also updates their entries while the command is in
    // flight.
    let before = |depth: u16| if pages == Pages::Same { depth / 2 } else { depth };
    for (queue, depth) in queues.iter_mut().zip(depths) {
        submit(host, queue, 0..before(*depth));
    }
    let mut used = host.shadow.unwrap();
    if pages != Pages::Same {
        std::mem::swap(&mut used, spare);
        host.poke(used.0, &[0; 4096]);
        host.poke(used.1, &[0; 4096]);
    }
    if pages == Pages::Current {
        for queue in &*queues {
            let entry = used.0 + u64::from(queue.qid) * 8;
            host.poke32(entry, queue.tail);
            host.poke32(entry + 4, queue.head);
        }
    }
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    let config = DoorbellBufferConfig { shadow: used.0, event_idx: used.1 };
    host.submit(&mut admin, &Sqe::dbbuf_config(config, 0));
    for (queue, depth) in queues.iter_mut().zip(depths) {
        submit(host, queue, before(*depth)..*depth);
    }
    assert!(host.wait(&mut admin).1.is_success());
    host.admin = admin;
    host.shadow = Some(used);
    for (queue, depth) in queues.iter_mut().zip(depths) {
        (0..*depth).for_each(|_| assert!(host.wait(queue).1.is_success()));
    }
}

#[test]
fn configured_ten_thousand_times_under_load_no_doorbell_is_lost() {
    for polling in [SLEEPY, Polling::Always] {
        let mut host = Host::new(&["null:1GiB"], polling);
        assert!(host.configure_shadow(|_, _| 0).is_success());
        let mut queues: Vec<_> = (1..=4).map(|qid| host.create(qid, 256, false)).collect();
        let mut spare = (host.alloc(4096), host.alloc(4096));
        for round in 0..5_000 {
            // A round with zeroed pages violates the specification. After it, two updates could
            // return an entry to zero, which the controller would not notice. So the next round
            // makes only one update per queue.
            let pages = [Pages::Same, Pages::Zeroed, Pages::Current][usize::from(round % 3)];
            // Most batches are short, and some have the full depth.
            let deep = if round % 16 == 0 { 128 } else { 8 };
            let depths = [1, 2, 3, 4].map(|qid: u16| 1 + (round * 7 + qid * 37) % deep);
            reconfigure(&mut host, &mut queues, &depths, pages, &mut spare);
        }
    }
}

#[test]
fn remapped_shadow_pages_continue_to_work() {
    let mut host = Host::new(&["null:1GiB"], SLEEPY);
    assert!(host.configure_shadow(|_, _| 0).is_success());
    let mut queue = host.create(1, 16, false);
    stream(&mut host, &mut queue, 4, 101);
    for _ in 0..20 {
        let (sent, unmapped) = std::sync::mpsc::channel();
        let done = move || sent.send(()).unwrap();
        host.controller.unmap_dma(common::BASE, common::MEMORY, done).unwrap();
        unmapped.recv_timeout(LIMIT).unwrap();
        // The host writes a doorbell while its memory is unmapped. The controller finds the command
        // when the memory is mapped again.
        let old = queue.tail;
        let at = common::BASE + common::MEMORY - 4096;
        host.put(&mut queue, &Sqe::read(1, 0, 0, 500).with_prps(at, 0));
        host.ring(&queue, old);
        wait::short_pause();
        assert_eq!(host.reap(&mut queue), None);
        let memory = host.memory.clone();
        host.controller.map_dma(common::BASE, common::MEMORY, &memory).unwrap();
        assert_eq!(host.wait(&mut queue).0, 500);
        stream(&mut host, &mut queue, 4, 50);
    }
}

/// Linux shuts the controller down, and frees the shadow pages. The pages may get another use, for
/// example as page tables. Later, Linux enables bus mastering before it resets the controller.
/// Until the reset, the controller must not access the pages.
#[test]
fn shadow_pages_are_not_accessed_after_a_shutdown() {
    for polling in [SLEEPY, Polling::Always] {
        let mut host = Host::new(&["null:1GiB"], polling);
        assert!(host.configure_shadow(|_, _| 0).is_success());
        let mut queue = host.create(1, 16, false);
        stream(&mut host, &mut queue, 4, 100);
        let cc = Cc::from_bits(host.read32(regs::CC));
        host.write32(regs::CC, cc.with_shn(regs::SHN_NORMAL).into_bits());
        host.until("the shutdown", || host.csts().shst() == regs::SHST_COMPLETE);
        let commands = host.controller.stats().io_queues().0.commands;
        let (shadow, event_idx) = host.shadow.unwrap();
        // Each entry would be a valid tail.
        let fill = |page: u64| (0..4096).step_by(4).for_each(|at| host.poke32(page + at, 7));
        fill(shadow);
        fill(event_idx);
        // The second round uses the DMA map that the first round has restored.
        for _ in 0..2 {
            let (gone, is_gone) = channel();
            host.controller.disable_dma(move || gone.send(()).unwrap());
            is_gone.recv_timeout(LIMIT).unwrap();
            host.controller.enable_dma();
        }
        for page in [shadow, event_idx] {
            assert!((0..4096).step_by(4).all(|at| host.peek32(page + at) == 7), "{polling:?}");
        }
        assert_eq!(host.controller.stats().io_queues().0.commands, commands);
        host.disable();
        host.shadow = None;
        host.enable();
        assert!(host.configure_shadow(|_, _| 0).is_success());
        let mut queue = host.create(1, 16, false);
        stream(&mut host, &mut queue, 4, 100);
    }
}
