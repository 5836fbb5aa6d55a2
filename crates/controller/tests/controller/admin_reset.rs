//! Resets at random moments of a flood of admin commands. Each command completes at most once, and
//! the controller does not access the host's memory after CSTS.RDY is 0.

use crate::common;
use common::{BASE, Host, LIMIT, create_cq, create_sq};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use shadowbell_controller::Polling;
use shadowbell_spec::admin::{Abort, DoorbellBufferConfig};
use shadowbell_spec::regs::{self, Cc};
use shadowbell_spec::{Cqe, Sqe};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// One round: commands, the number of completions before the host resets the controller, and a
/// delay before the reset.
#[derive(Clone, Debug)]
struct Round {
    commands: Vec<u8>,
    wait_for: usize,
    spin: u32,
    function_level: bool,
}

fn round() -> impl Strategy<Value = Round> {
    let commands = proptest::collection::vec(0..12u8, 1..31);
    (commands, 0..31usize, 0..3000u32, any::<bool>()).prop_map(
        |(commands, wait_for, spin, function_level)| Round {
            commands,
            wait_for,
            spin,
            function_level,
        },
    )
}

/// Addresses in the host's memory.
struct QueueAddresses {
    page: u64,
    shadow: u64,
    event_idx: u64,
    sq: u64,
    cq: u64,
}

fn command(kind: u8, addresses: &QueueAddresses) -> Sqe {
    let &QueueAddresses { page, shadow, event_idx, sq, cq } = addresses;
    match kind {
        0 => Sqe { cdw10: 127 << 16 | 2, ..Sqe::new(0x02, 0, 0) }.with_prps(page, 0),
        1 => Sqe::dbbuf_config(DoorbellBufferConfig { shadow, event_idx }, 0),
        2 => Sqe::new(0x0c, 0, 0),
        3 => create_cq(1, 15, None, cq),
        4 => create_sq(1, 15, 1, sq),
        5 => Sqe::delete_io_sq(1, 0),
        6 => Sqe::delete_io_cq(1, 0),
        7 => Sqe::abort(Abort { sqid: 0, cid: 3 }, 0),
        8 => Sqe::abort(Abort { sqid: 1, cid: 3 }, 0),
        _ => Sqe { cdw10: 1, ..Sqe::new(0x06, 0, 0) }.with_prps(page, 0),
    }
}

/// Command identifiers in the admin completion queue, up to the first free entry.
fn completions(host: &Host) -> Vec<u16> {
    let entries =
        (0..32).map(|n| host.memory.read::<Cqe>((host.admin.cq - BASE) as usize + n * 16));
    entries.map_while(|cqe| cqe.filter(Cqe::phase).map(|cqe| cqe.cid)).collect()
}

fn run(host: &mut Host, addresses: &QueueAddresses, round: &Round) {
    let mut admin = std::mem::replace(&mut host.admin, common::Queue::none());
    for (cid, kind) in (0..).zip(&round.commands) {
        host.put(&mut admin, &command(*kind, addresses).with_cid(cid));
    }
    host.ring(&admin, 0);
    host.admin = admin;
    // Asynchronous Event Requests may remain outstanding until the reset, so the test does not wait
    // for their completions.
    let stay = round.commands.iter().filter(|kind| **kind == 2).count();
    let wait_for = round.wait_for.min(round.commands.len() - stay);
    let until = Instant::now() + LIMIT;
    while completions(host).len() < wait_for {
        assert!(Instant::now() < until, "{:?} of {round:?}", completions(host));
        std::thread::yield_now();
    }
    (0..round.spin).for_each(|_| std::hint::spin_loop());
    if round.function_level {
        let (sent, reset) = std::sync::mpsc::channel();
        host.controller.reset(move || sent.send(()).unwrap());
        reset.recv_timeout(LIMIT).unwrap();
    } else {
        let cc = Cc::from_bits(host.read32(regs::CC));
        host.write32(regs::CC, cc.with_en(false).into_bits());
        host.until("CSTS.RDY to clear", || !host.csts().rdy());
    }
    // The reset has ended, so the controller must not write to the host's memory any more. The
    // caller checks that this pattern remains unchanged.
    let all = completions(host);
    let once: BTreeSet<_> = all.iter().copied().collect();
    assert_eq!(once.len(), all.len(), "{all:?} of {round:?}");
    assert!(all.iter().all(|cid| usize::from(*cid) < round.commands.len()), "{all:?}");
    host.memory.fill(0, 64 << 10, 0xa5).unwrap();
}

#[test]
fn each_command_completes_once_at_most_whenever_the_host_resets() {
    for polling in [Polling::Always, Polling::Adaptive(Duration::from_micros(50))] {
        let mut host = Host::new(&["mem:1MiB"], polling);
        let page = host.alloc(4096);
        let (shadow, event_idx) = (host.alloc(4096), host.alloc(4096));
        let (sq, cq) = (host.alloc(4096), host.alloc(4096));
        let addresses = QueueAddresses { page, shadow, event_idx, sq, cq };
        let host = std::cell::RefCell::new(host);
        let mut runner = TestRunner::new(Config { cases: 400, ..Config::default() });
        let outcome = runner.run(&round(), |round| {
            let mut host = host.borrow_mut();
            run(&mut host, &addresses, &round);
            // The controller must not write anything during this time.
            let until = Instant::now() + Duration::from_micros(200);
            while Instant::now() < until {}
            let untouched = host.peek(BASE, 64 << 10).iter().all(|byte| *byte == 0xa5);
            assert!(untouched, "written to after the reset");
            host.memory.fill(0, 64 << 10, 0).unwrap();
            host.enable();
            Ok(())
        });
        outcome.unwrap();
    }
}
