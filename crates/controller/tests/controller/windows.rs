//! Known requirements of the Windows driver (stornvme): see "Windows" in `docs/internals/nvme.md`.
//! These tests do not run Windows.

use crate::common;
use common::{Host, Queue};
use shadowbell_controller::Polling;
use shadowbell_spec::admin::{GetFeatures, GetLogPage, Identify};
use shadowbell_spec::identify::IdentifyController;
use shadowbell_spec::regs::{self, Aqa};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::{Sqe, Status};
use std::time::Duration;
use zerocopy::FromBytes;

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));

/// Windows' driver (stornvme) reads ASQ again after its first command. If the value differs from
/// the written value, the driver does not use the controller.
#[test]
fn the_registers_of_the_admin_queue_can_be_read_while_it_is_used() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    host.page(Identify { cns: 1, ..Identify::default() }.encode(Sqe::new(0x06, 0, 0))).unwrap();
    let aqa = Aqa::new().with_asqs(31).with_acqs(31);
    assert_eq!(host.read32(regs::AQA), aqa.into_bits());
    assert_eq!(host.read64(regs::ASQ), host.admin.sq);
    assert_eq!(host.read64(regs::ACQ), host.admin.cq);
    // The registers can also be read as two halves.
    assert_eq!(host.read32(regs::ASQ), host.admin.sq as u32);
    assert_eq!(u64::from(host.read32(regs::ASQ + 4)), host.admin.sq >> 32);
}

/// stornvme repeats an event request at once if it completes with an error.
#[test]
fn an_event_request_waits_for_an_event() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    let page = host.page(Identify { cns: 1, ..Identify::default() }.encode(Sqe::new(0x06, 0, 0)));
    let limit = IdentifyController::read_from_bytes(&page.unwrap()).unwrap().aerl + 1;
    assert!(limit >= 4, "{limit}");
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    for event in 0..limit {
        host.submit(&mut admin, &Sqe::new(0x0c, 1000 + u16::from(event), 0));
    }
    // Later commands complete while the Asynchronous Event Requests wait.
    let (status, _) = host.run(&mut admin, Sqe { cdw10: 7, ..Sqe::new(0x0a, 0, 0) });
    assert!(status.is_success(), "{status}");
    assert_eq!(host.reap(&mut admin), None);
}

/// Windows' driver (stornvme) did not start a controller with 512 vectors, but started controllers
/// with 64 and 128 vectors.
#[test]
fn a_controller_has_at_most_128_vectors() {
    let host = Host::new(&["mem:1MiB"], ADAPTIVE);
    assert!(host.controller.vectors() <= 128, "{}", host.controller.vectors());
}

/// stornvme examines each namespace up to NN, and some releases show missing namespaces as disks.
#[test]
fn nn_is_the_highest_nsid_in_use() {
    let mut host = Host::new(&["mem:1MiB", "mem:1MiB"], ADAPTIVE);
    let page = host.page(Identify { cns: 1, ..Identify::default() }.encode(Sqe::new(0x06, 0, 0)));
    assert_eq!(IdentifyController::read_from_bytes(&page.unwrap()).unwrap().nn, 2);
}

/// stornvme requests vendor-specific features and log pages, and continues without them.
#[test]
fn vendor_specific_commands_are_refused_and_the_next_one_served() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    for fid in [0x0c, 0x0d, 0x10, 0x11, 0xd0] {
        let fields = GetFeatures { fid, ..GetFeatures::default() };
        assert_eq!(host.admin(fields.encode(Sqe::new(0x0a, 0, 0))).0.code(), Status::INVALID_FIELD);
    }
    let fields = GetLogPage { lid: 0xc1, numd0: 0x7f, ..GetLogPage::default() };
    let refused = host.page(fields.encode(Sqe::new(2, 0, NSID_ALL))).unwrap_err();
    assert_eq!(refused.code(), Status::INVALID_LOG_PAGE);
    let fields = GetLogPage { lid: 2, numd0: 0x7f, ..GetLogPage::default() };
    host.page(fields.encode(Sqe::new(2, 0, NSID_ALL))).unwrap();
}
