//! Changes of namespaces while the controller is reset or disabled.

use crate::common::{Host, config};
use crate::host::{INACTIVE, active, add, ends, host, pool, remove, write_and_read};
use crate::late::Late;
use shadowbell_controller::{Carrier, Controller};
use shadowbell_spec::Sqe;
use shadowbell_spec::regs::{self, Cc};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_testing::wait;
use std::sync::mpsc::TryRecvError;

#[test]
fn namespace_changes_during_a_reset_take_effect() {
    let first = Late::memory(64);
    let mut host = host(&first);
    let mut queue = host.create(1, 16, true);
    let page = host.alloc(4096);
    first.hold(true);
    host.submit(&mut queue, &Sqe::write(1, 1, 0, 1).with_prps(page, 0));
    host.until("the write", || first.seen().len() == 1);
    let cc = Cc::from_bits(host.read32(regs::CC));
    host.write32(regs::CC, cc.with_en(false).into_bits());
    // The reset waits for the disk. A removal that is requested during the reset waits for the disk
    // as well.
    let outcome = remove(&host, 1, &first);
    let added = add(&host, None, &Late::memory(9), "other").1;
    wait::short_pause();
    assert_eq!(outcome.try_recv().unwrap_err(), TryRecvError::Empty);
    assert!(host.csts().rdy());
    first.hold(false);
    ends(&outcome).unwrap();
    ends(&added).unwrap();
    host.until("the reset", || !host.csts().rdy());
    // Removal of the last namespace, while the controller is disabled.
    ends(&remove(&host, 2, &Late::memory(1))).unwrap();
    host.enable();
    assert_eq!(active(&mut host), [0; 0]);
    let mut queue = host.create(1, 16, true);
    assert_eq!(write_and_read(&mut host, &mut queue, 1, 0, 1), INACTIVE);
    assert!(host.run(&mut queue, Sqe::flush(NSID_ALL, 0)).0.is_success());
    ends(&add(&host, None, &Late::memory(9), "another").1).unwrap();
    assert!(write_and_read(&mut host, &mut queue, 1, 0, 1).is_success());
    assert!(!first.was_used_after());
    // Removal of a namespace of a controller that was never enabled.
    let controller = Controller::new(config(&["mem:1MiB"]), pool(1), Carrier::default()).unwrap();
    let mut host = Host::attach(controller);
    ends(&add(&host, Some(7), &Late::memory(9), "another").1).unwrap();
    host.enable();
    assert_eq!(active(&mut host), [1, 7]);
}
