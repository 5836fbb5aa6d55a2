//! Reservations: two controllers share a namespace, and commands that conflict with a reservation.

use crate::{common, held, shared};
use common::{Host, Queue};
use held::Held;
use shadowbell_controller::{Carrier, Controller, Subsystem};
use shadowbell_spec::admin::{GetFeatures, GetLogPage, Identify, SetFeatures};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::feature::fid;
use shadowbell_spec::identify::{IdentifyController, IdentifyNamespace, cns};
use shadowbell_spec::log::lid;
use shadowbell_spec::log::persistent_event::{
    PersistentEvent, PersistentEventLog, ResetInformation, action, event_type,
};
use shadowbell_spec::reservation::ReservationNotification;
use shadowbell_spec::{Sqe, Status};
use shadowbell_state::Descriptors;
use shadowbell_testing::wait;
use shared::{ADAPTIVE, SharingHost, config, hosts, mem, pool};
use std::fs::File;
use std::sync::Arc;
use zerocopy::FromBytes;

#[test]
fn each_reservation_type_excludes_the_right_hosts() {
    let [mut holder, mut registrant, mut nobody] = mem();
    holder.may(true, true, "before");
    for kind in 1..=6 {
        assert_eq!(holder.register(1), Status::SUCCESS);
        assert_eq!(registrant.register(2), Status::SUCCESS);
        assert_eq!(holder.acquire(1, kind), Status::SUCCESS);
        let exclusive = kind % 2 == 0;
        holder.may(true, true, &format!("holder of {kind}"));
        registrant.may(kind > 2 || !exclusive, kind > 2, &format!("registrant, {kind}"));
        nobody.may(!exclusive, false, &format!("nobody, {kind}"));
        assert_eq!(holder.release(1, kind), Status::SUCCESS);
        nobody.may(true, true, &format!("released, {kind}"));
        assert_eq!(holder.clear(1), Status::SUCCESS);
    }
}

#[test]
fn identify_reports_several_controllers() {
    let [mut one, mut other] = mem();
    for (n, one) in [(1, &mut one), (2, &mut other)] {
        let fields = Identify { cns: cns::CONTROLLER, ..Identify::default() };
        let page = one.host.page(Sqe::identify(0, fields, 0)).unwrap();
        let controller = IdentifyController::read_from_bytes(&page).unwrap();
        assert_eq!(controller.cntlid, n);
        assert!(controller.cmic.mctrs() && controller.cmic.mports());
        assert!(controller.oncs.reservations() && controller.ctratt.hids());
        assert!(controller.cmic.anars() && controller.oaes.anacn());
        assert_eq!((controller.anacap, controller.mnan), (0x5f, controller.nn));
        let page = one.host.page(Sqe::identify(1, Identify::default(), 0)).unwrap();
        let namespace = IdentifyNamespace::read_from_bytes(&page).unwrap();
        // Without a file, reservations do not persist.
        assert_eq!((namespace.nmic.shrns(), namespace.rescap), (true, 0xfe));
        assert_eq!(namespace.anagrpid, 1);
        for cns in [cns::CONTROLLERS, cns::NAMESPACE_CONTROLLERS] {
            let page = one.host.page(Sqe::identify(1, Identify { cns, ..Identify::default() }, 0));
            assert_eq!(page.unwrap()[..8], [2, 0, 1, 0, 2, 0, 0, 0]);
        }
    }
    let mut alone = SharingHost::new(Host::new(&["mem:1MiB"], ADAPTIVE));
    let page = alone.host.page(Sqe::identify(1, Identify::default(), 0)).unwrap();
    let namespace = IdentifyNamespace::read_from_bytes(&page).unwrap();
    assert_eq!((namespace.nmic.shrns(), namespace.rescap), (false, 0));
    assert_eq!(alone.register(1).code(), Status::INVALID_OPCODE);
    assert_eq!(alone.identify_as(1).unwrap_err().code(), Status::INVALID_FIELD);
}

/// Base 2.1, 5.1.12.1.14: each event contains the identifier of its controller.
#[test]
fn events_name_the_controller_that_they_are_of() {
    let [_, mut two] = mem();
    let (lid, lsp) = (lid::PERSISTENT_EVENTS, action::ESTABLISH);
    let establish = GetLogPage { lid, lsp, numd0: 1023, ..GetLogPage::default() };
    let page = two.host.page(Sqe::get_log_page(0, establish, 0)).unwrap();
    let (head, rest) = PersistentEventLog::read_from_prefix(&page).unwrap();
    assert!(head.tnev.get() >= 1);
    let mut rest = &rest[..head.tll.get() as usize - 512];
    let mut enabled = 0;
    while let Ok((event, data)) = PersistentEvent::read_from_prefix(rest) {
        assert_eq!(event.cntlid.get(), 2);
        if event.event == event_type::POWER_ON_OR_RESET {
            let information = ResetInformation::read_from_prefix(&data[8..]).unwrap().0;
            assert_eq!(information.cntlid.get(), 2);
            enabled += 1;
        }
        rest = &data[event.el.get().into()..];
    }
    assert_eq!(enabled, 1);
}

#[test]
fn reservations_need_a_host_identifier_and_valid_fields() {
    let [mut one, mut other] = mem();
    one.identify_as(0).unwrap();
    assert_eq!(one.register(1).code(), Status::HOST_ID_NOT_INITIALIZED);
    one.identify_as(9).unwrap();
    assert_eq!(one.register(1), Status::SUCCESS);
    let codes = [
        (one.entry(0x0d, 3, (1, 1)), Status::INVALID_FIELD),
        (one.entry(0x0d, 1 << 30, (1, 1)), Status::INVALID_FIELD),
        // Persistence through power loss needs a file.
        (one.entry(0x0d, 3 << 30, (1, 1)), Status::INVALID_FIELD),
        (one.entry(0x0d, 0, (0, 0)), Status::INVALID_FIELD),
        (one.entry(0x11, 1 << 8 | 3, (1, 1)), Status::INVALID_FIELD),
        (one.entry(0x11, 1 << 8 | 1 << 3, (1, 1)), Status::INVALID_FIELD),
        (one.entry(0x11, 7 << 8, (1, 1)), Status::INVALID_FIELD),
        (one.entry(0x11, 0, (1, 1)), Status::INVALID_FIELD),
        (one.entry(0x15, 2, (1, 1)), Status::INVALID_FIELD),
        (one.entry(0x15, 1 << 3, (1, 1)), Status::INVALID_FIELD),
        (Sqe { nsid: 2, ..one.entry(0x0d, 0, (0, 1)) }, Status::INVALID_NAMESPACE_OR_FORMAT),
        (one.entry(0x0d, 0, (0, 1)).with_prps(1 << 60, 0), Status::DATA_XFER_ERROR),
        (Sqe { cdw10: u32::MAX, ..one.entry(0x0e, 0, (0, 0)) }, Status::INVALID_FIELD),
        (Sqe { cdw11: 1, ..one.entry(0x0e, 0, (0, 0)) }, Status::HOST_ID_INCONSISTENT_FORMAT),
    ];
    for (sqe, expected) in codes {
        // The current key is 1, which is valid. The new key is 0 for a registration (0Dh with CDW10
        // 0), where this is invalid, and otherwise 1.
        one.host.poke(one.keys, &1u64.to_le_bytes());
        let zero = u64::from(sqe.opcode != 0x0d || sqe.cdw10 != 0);
        one.host.poke(one.keys + 8, &zero.to_le_bytes());
        assert_eq!(one.run(sqe).code(), expected, "{sqe:?}");
    }
    // Host identifiers of 64 and of 128 bits cannot be used in the same subsystem.
    let fields = SetFeatures { fid: fid::HOST_IDENTIFIER, cdw11: 1, ..SetFeatures::default() };
    other.host.poke(other.keys, &[5; 16]);
    let (status, _) = other.host.admin(Sqe::set_features(0, fields, 0).with_prps(other.keys, 0));
    assert_eq!(status.code(), Status::HOST_ID_INCONSISTENT_FORMAT);
}

#[test]
fn a_reservation_report_lists_registrants_and_a_reset_clears_hosts() {
    let [mut one, mut other] = mem();
    assert_eq!(one.register(0xa), Status::SUCCESS);
    assert_eq!(other.register(0xb), Status::SUCCESS);
    assert_eq!(other.acquire(0xb, 1), Status::SUCCESS);
    let (head, all) = one.report();
    assert_eq!((u32::from_le_bytes(head.generation), head.rtype, head.ptpls), (2, 1, 0));
    let listed: Vec<_> = all.iter().map(|c| (c.cntlid, c.rcsts, c.hostid, c.rkey)).collect();
    assert_eq!(listed, [(1, 0, 1, 0xa), (2, 1, 2, 0xb)]);
    // After a reset, the holder has no host identifier, so it may not write any more.
    other.host.disable();
    other.host.enable();
    other = SharingHost::new(other.host);
    let (_, all) = one.report();
    assert_eq!(all.iter().map(|c| c.cntlid).collect::<Vec<_>>(), [1, 0xffff]);
    other.may(true, false, "after a reset");
    other.identify_as(2).unwrap();
    other.may(true, true, "known again");
}

#[test]
fn preempt_waits_for_or_aborts_commands_in_flight() {
    for aborts in [false, true] {
        let held = Held::new(2048);
        let [mut one, mut other] = hosts(Arc::new(held.clone()), None);
        assert_eq!(one.register(1), Status::SUCCESS);
        assert_eq!(other.register(2), Status::SUCCESS);
        assert_eq!(other.acquire(2, 1), Status::SUCCESS);
        held.instruct(|instructions| instructions.hold = true);
        let write = Sqe::write(1, 3, 0, 5).with_prps(other.data, 0);
        other.host.submit(&mut other.queue, &write);
        other.host.until("the write at the disk", || !held.seen().is_empty());
        let action = if aborts { 2 } else { 1 };
        let preempt = one.entry(0x11, 1 << 8 | action, (1, 2));
        one.host.submit(&mut one.queue, &preempt.with_cid(9));
        // The preemption waits for commands in flight, and new commands are refused. The new
        // commands of this loop address blocks outside of the namespace. So they end at once even
        // before the refusals begin, and the queue is never full.
        let late = loop {
            let sqe = Sqe::write(1, 1 << 40, 0, 6).with_prps(other.data, 0);
            other.host.submit(&mut other.queue, &sqe);
            let end = other.host.wait(&mut other.queue);
            if end.1.code() != Status::LBA_OUT_OF_RANGE {
                break end;
            }
        };
        assert_eq!(late.1.code(), Status::RESERVATION_CONFLICT);
        assert!(
            one.host.reap(&mut one.queue).is_none(),
            "the preemption waits for the write in flight"
        );
        assert_eq!(held.cancelled() != 0, aborts);
        held.instruct(|instructions| instructions.hold = false);
        assert_eq!(one.host.wait(&mut one.queue).1, Status::SUCCESS);
        let (head, all) = one.report();
        assert_eq!((head.rtype, all.len(), all[0].cntlid), (1, 1, 1));
        one.may(true, true, "who has preempted");
    }
}

#[test]
fn one_of_two_mutual_preempts_succeeds() {
    let held = Held::new(2048);
    let [mut one, mut other, mut third] = hosts(Arc::new(held.clone()), None);
    for _ in 0..20 {
        assert_eq!(one.register(1), Status::SUCCESS);
        assert_eq!(other.register(2), Status::SUCCESS);
        assert_eq!(third.register(3), Status::SUCCESS);
        assert_eq!(third.acquire(3, 2), Status::SUCCESS);
        let (a, b) = (one.entry(0x11, 2 << 8 | 2, (1, 2)), other.entry(0x11, 2 << 8 | 2, (2, 1)));
        one.host.submit(&mut one.queue, &a.with_cid(1));
        other.host.submit(&mut other.queue, &b.with_cid(1));
        let ends = [one.host.wait(&mut one.queue).1, other.host.wait(&mut other.queue).1];
        let won = ends.iter().filter(|status| status.is_success()).count();
        assert_eq!(won, 1, "{ends:?}");
        assert_eq!(third.clear(3), Status::SUCCESS);
    }
}

#[test]
fn reservation_changes_raise_events_and_fill_the_log_page() {
    let [mut one, mut other] = mem();
    assert_eq!(one.register(1), Status::SUCCESS);
    assert_eq!(other.register(2), Status::SUCCESS);
    let page = |one: &mut SharingHost| {
        let fields =
            GetLogPage { lid: lid::RESERVATION_NOTIFICATION, numd0: 15, ..GetLogPage::default() };
        let page = one.host.page(Sqe::get_log_page(0, fields, 0)).unwrap();
        let (page, _) = ReservationNotification::read_from_prefix(&page).unwrap();
        (page.lpcount, page.kind, page.available, page.nsid)
    };
    assert_eq!(page(&mut one), (0, 0, 0, 0));
    let mut admin = std::mem::replace(&mut one.host.admin, Queue::none());
    one.host.submit(&mut admin, &Sqe::async_event_request(77));
    assert_eq!(other.acquire(2, 3), Status::SUCCESS);
    assert_eq!(other.release(2, 3), Status::SUCCESS);
    let (cid, status, dw0) = one.host.wait(&mut admin);
    one.host.admin = admin;
    assert_eq!((cid, status), (77, Status::SUCCESS));
    assert_eq!(AsyncEvent::from_dw0(dw0), AsyncEvent::RESERVATION_LOG_PAGE);
    assert_eq!(page(&mut one), (1, ReservationNotification::RESERVATION_RELEASED, 0, 1));
    // The host masks this type of reservation notification, so it gets none. Another type stays
    // enabled.
    let mask = |fields| Sqe::set_features(1, fields, 0);
    one.host.must(mask(SetFeatures {
        fid: fid::RESERVATION_NOTIFICATION_MASK,
        cdw11: 1 << 2,
        ..SetFeatures::default()
    }));
    let get = GetFeatures { fid: fid::RESERVATION_NOTIFICATION_MASK, ..GetFeatures::default() };
    assert_eq!(one.host.must(Sqe::get_features(1, get, 0)), 1 << 2);
    assert_eq!(other.acquire(2, 4), Status::SUCCESS);
    assert_eq!(other.release(2, 4), Status::SUCCESS);
    assert_eq!(other.preempt(2, 1, 1), Status::SUCCESS);
    let told = loop {
        let told = page(&mut one);
        if told.0 != 0 {
            break told;
        }
    };
    assert_eq!(told, (2, ReservationNotification::REGISTRATION_PREEMPTED, 0, 1));
    // The host that preempted the registration is not notified.
    assert_eq!(page(&mut other), (0, 0, 0, 0));
}

#[test]
fn persistent_reservations_survive_a_restart_and_all_a_handover() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("reservations");
    let state = || {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).open(&path).unwrap()
    };
    let disk = shadowbell_disk_file::open("mem:1MiB").unwrap();
    let [mut one, mut other] = hosts(Arc::clone(&disk), Some(state()));
    let get = GetFeatures { fid: fid::RESERVATION_PERSISTENCE, ..GetFeatures::default() };
    assert_eq!(one.register(1), Status::SUCCESS);
    assert_eq!(other.register(2), Status::SUCCESS);
    assert_eq!(one.host.must(Sqe::get_features(1, get, 0)), 0);
    assert_eq!(one.acquire(1, 2), Status::SUCCESS);
    // The other controller moves to a new process. There it first has no host identifier, and then
    // its previous one.
    let controller = other.host.controller.clone();
    let (rested, rests) = std::sync::mpsc::channel();
    controller.freeze(move || rested.send(()).unwrap());
    rests.recv_timeout(wait::LIMIT).unwrap();
    let mut fds = Descriptors::default();
    let saved = controller.save(&mut fds).unwrap();
    let subsystem = Subsystem::new(Some(state())).unwrap();
    let _first = subsystem.join(None).unwrap();
    let config = config(&disk, &subsystem);
    let successor =
        Controller::successor(config, pool(), Carrier::default(), &saved, &mut fds).unwrap();
    successor.map_dma(common::BASE, common::MEMORY, &other.host.memory).unwrap();
    successor.restore(&saved, &mut fds).unwrap();
    other.host.controller = successor;
    other.may(false, false, "in another process");
    let (head, all) = other.report();
    assert_eq!((head.rtype, all.len(), all[1].cntlid), (2, 2, 2));
    assert_eq!(other.preempt(2, 1, 2), Status::SUCCESS);
    other.may(true, true, "holder there");
    let set = SetFeatures { fid: fid::RESERVATION_PERSISTENCE, cdw11: 1, ..SetFeatures::default() };
    other.host.must(Sqe::set_features(1, set, 0));
    assert_eq!(other.host.must(Sqe::get_features(1, get, 0)), 1);
    drop((one, other, controller, subsystem));
    // After a restart, host 2 still holds the reservation.
    let [mut one, mut other] = hosts(disk, Some(state()));
    one.may(false, false, "after a start");
    other.may(true, true, "the holder after a start");
    assert_eq!(other.report().0.ptpls, 1);
}
