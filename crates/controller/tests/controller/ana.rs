//! Asymmetric Namespace Access: two controllers share a namespace, and one controller cannot access
//! it.

use crate::{common, held, shared};
use common::{Host, Queue};
use held::Held;
use shadowbell_controller::{Carrier, Controller, NamespaceConfig, Subsystem};
use shadowbell_spec::admin::{GetFeatures, GetLbaStatus, GetLogPage, Identify, SetFeatures};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::feature::{AsyncEventConfig, fid};
use shadowbell_spec::identify::{IdentifyController, IdentifyNamespace, cns};
use shadowbell_spec::lba_status::atype;
use shadowbell_spec::log::{AnaLog, AnaState, SupportedLogPages, lid};
use shadowbell_spec::{Sqe, Status};
use shadowbell_state::Descriptors;
use shadowbell_testing::wait::{self, LIMIT};
use shared::{ADAPTIVE, SharingHost, hosts, mem, pool};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use zerocopy::FromBytes;

/// Starts a change of an ANA state.
fn begin(host: &Host, group: u32, state: AnaState) -> Receiver<()> {
    let (ends, end) = channel();
    host.controller.set_ana_state(group, state, move || {
        let _ = ends.send(());
    });
    end
}

/// Changes an ANA state, and waits until the affected commands in flight have ended.
fn set(host: &Host, group: u32, state: AnaState) {
    begin(host, group, state).recv_timeout(LIMIT).unwrap();
}

fn get_page(bytes: u32, lpo: u64, lsp: u8) -> GetLogPage {
    GetLogPage { lid: lid::ANA, numd0: bytes / 4 - 1, lpo, lsp, ..GetLogPage::default() }
}

fn log(host: &mut Host) -> AnaLog {
    let page = host.page(Sqe::get_log_page(0, get_page(4096, 0, 0), 0)).unwrap();
    AnaLog::decode(&page).unwrap()
}

fn identify(host: &mut Host, nsid: u32) -> IdentifyNamespace {
    let page = host.page(Sqe::identify(nsid, Identify::default(), 0)).unwrap();
    IdentifyNamespace::read_from_bytes(&page).unwrap()
}

#[test]
fn an_inaccessible_path_refuses_commands_and_the_other_accepts_them() {
    let [mut one, mut other] = mem();
    for state in [AnaState::Inaccessible, AnaState::PersistentLoss, AnaState::Change] {
        set(&one.host, 1, state);
        let refused = state.refusal().unwrap();
        for (name, _, _, status) in one.run_all_commands() {
            // Do Not Retry is clear, because the same command succeeds through another controller.
            assert_eq!(status, refused, "{name} while {}", state.name());
        }
        assert_eq!(one.register(1), refused);
        let report = Sqe { cdw10: 1023, ..Sqe::new(0x0e, 0, 1) }.with_prps(one.data, 0);
        assert_eq!(one.run(report), refused);
        // Errors of the command itself have precedence over the ANA state.
        assert_eq!(one.run(Sqe::flush(2, 0)).code(), Status::INVALID_NAMESPACE_OR_FORMAT);
        assert_eq!(one.run(Sqe::new(0x7f, 0, 1)).code(), Status::INVALID_OPCODE);
        other.may(true, true, "the other way");
    }
    for state in [AnaState::NonOptimized, AnaState::Optimized] {
        set(&one.host, 1, state);
        one.may(true, true, state.name());
    }
    // Reservations apply while the ANA state permits access.
    assert_eq!(other.register(2), Status::SUCCESS);
    assert_eq!(other.acquire(2, 2), Status::SUCCESS);
    set(&one.host, 1, AnaState::NonOptimized);
    one.may(false, false, "reserved");
    set(&one.host, 1, AnaState::Inaccessible);
    let read = Sqe::read(1, 9, 0, 0).with_prps(one.data, 0);
    assert_eq!(one.run(read), Status::ANA_INACCESSIBLE);
}

#[test]
fn features_of_an_inaccessible_namespace_are_refused() {
    let [mut one, _other] = mem();
    let before = identify(&mut one.host, 1);
    assert_eq!(before.nuse, before.nsze);
    for state in [AnaState::Inaccessible, AnaState::PersistentLoss, AnaState::Change] {
        set(&one.host, 1, state);
        let refused = state.refusal().unwrap();
        for fid in [fid::RESERVATION_NOTIFICATION_MASK, fid::RESERVATION_PERSISTENCE] {
            let get = Sqe::get_features(1, GetFeatures { fid, ..GetFeatures::default() }, 0);
            assert_eq!(one.host.admin(get).0, refused);
            for nsid in [1, u32::MAX] {
                let fields = SetFeatures { fid, ..SetFeatures::default() };
                assert_eq!(one.host.admin(Sqe::set_features(nsid, fields, 0)).0, refused);
            }
        }
        let fields = GetLbaStatus { atype: atype::ALLOCATED, mndw0: 63, ..GetLbaStatus::default() };
        let sqe = Sqe::get_lba_status(1, fields, 0).with_prps(one.data, 0);
        assert_eq!(one.host.admin(sqe).0, refused);
        let now = identify(&mut one.host, 1);
        let has_use = state == AnaState::Change;
        assert_eq!((now.nsze, now.ncap), (before.nsze, before.ncap));
        assert_eq!(now.nuse, if has_use { before.nuse } else { 0 });
    }
    set(&one.host, 1, AnaState::NonOptimized);
    let mask = fid::RESERVATION_NOTIFICATION_MASK;
    let get = GetFeatures { fid: mask, ..GetFeatures::default() };
    assert_eq!(one.host.must(Sqe::get_features(1, get, 0)), 0);
}

#[test]
fn an_ana_change_waits_for_commands_in_flight() {
    let held = Held::new(2048);
    let [mut one, _other] = hosts(Arc::new(held.clone()), None);
    held.instruct(|instructions| instructions.hold = true);
    let write = |one: &SharingHost, lba, cid| Sqe::write(1, lba, 0, cid).with_prps(one.data, 0);
    let first = write(&one, 3, 5);
    one.host.submit(&mut one.queue, &first);
    one.host.until("the write at the disk", || !held.seen().is_empty());
    let end = begin(&one.host, 1, AnaState::Inaccessible);
    let late = loop {
        let sqe = write(&one, 4, 6);
        let seen = held.seen().len();
        one.host.submit(&mut one.queue, &sqe);
        let mut end = None;
        wait::until("its end, or its beginning", || {
            end = one.host.reap(&mut one.queue);
            end.is_some() || held.seen().len() > seen
        });
        if let Some(end) = end {
            break end;
        }
    };
    assert_eq!((late.0, late.1), (6, Status::ANA_INACCESSIBLE));
    assert!(end.try_recv().is_err(), "the change waits for the write in flight");
    // The log page contains the new state before the change has ended, so a host whose command was
    // refused finds the reason.
    assert_eq!(log(&mut one.host).groups[0].state, Some(AnaState::Inaccessible));
    held.instruct(|instructions| instructions.hold = false);
    loop {
        let (cid, status, _) = one.host.wait(&mut one.queue);
        // Other commands may have started before the change. Their status is not checked.
        if cid == 5 {
            assert_eq!(status, Status::SUCCESS, "begun before");
            break;
        }
    }
    end.recv_timeout(LIMIT).unwrap();
    // Setting the current state again changes nothing, and does not wait.
    let changes = log(&mut one.host).changes;
    set(&one.host, 1, AnaState::Inaccessible);
    assert_eq!(log(&mut one.host).changes, changes);
}

/// Creates two hosts of a subsystem. Namespace 2 is in group 5, which is non-optimized for the
/// second host.
fn grouped() -> [Host; 2] {
    let (pool, subsystem) = (pool(), Subsystem::new(None).unwrap());
    let disks = [0, 1].map(|_| shadowbell_disk_file::open("mem:1MiB").unwrap());
    [AnaState::Optimized, AnaState::NonOptimized].map(|state| {
        let member = subsystem.join(None).unwrap();
        // Groups 0 and 17 do not exist, so they are ignored.
        let member = member.with_ana([(2, 5), (1, 0), (3, 17)], [(5, state), (0, state)]);
        let namespaces = (1..).zip(&disks);
        let namespaces = namespaces
            .map(|(n, disk)| NamespaceConfig { disk: Arc::clone(disk), uuid: [n; 16] })
            .collect();
        let config = shadowbell_controller::Config {
            namespaces,
            member: Some(member),
            ..shadowbell_controller::Config::default()
        };
        let controller = Controller::new(config, pool.clone(), Carrier::default()).unwrap();
        let mut host = Host::attach(controller);
        host.enable();
        host
    })
}

#[test]
fn ana_groups_have_separate_states_in_the_log_page() {
    let [mut one, mut other] = grouped();
    let page =
        one.page(Sqe::identify(0, Identify { cns: cns::CONTROLLER, ..Identify::default() }, 0));
    let controller = IdentifyController::read_from_bytes(&page.unwrap()).unwrap();
    assert_eq!((controller.anagrpmax, controller.nanagrpid, controller.mnan), (16, 16, 2));
    assert_eq!((identify(&mut one, 1).anagrpid, identify(&mut one, 2).anagrpid), (1, 5));
    set(&other, 1, AnaState::Inaccessible);
    let seen = |log: AnaLog| {
        let groups = log.groups.into_iter();
        let groups =
            groups.map(|group| (group.id, group.state.unwrap(), group.changes, group.nsids));
        (log.changes, groups.collect::<Vec<_>>())
    };
    let (good, fair, bad) = (AnaState::Optimized, AnaState::NonOptimized, AnaState::Inaccessible);
    let groups =
        |first, changes, second| vec![(1, first, changes, vec![1]), (5, second, 0, vec![2])];
    assert_eq!(seen(log(&mut one)), (0, groups(good, 0, good)));
    assert_eq!(seen(log(&mut other)), (1, groups(bad, 1, fair)));
    // Namespace 2 is in another group, which is accessible.
    let mut other = SharingHost::new(other);
    let read = |one: &SharingHost, nsid| Sqe::read(nsid, 0, 0, 0).with_prps(one.data, 0);
    let reads = [read(&other, 1), read(&other, 2)];
    let ends = reads.map(|sqe| other.run(sqe));
    assert_eq!(ends, [Status::ANA_INACCESSIBLE, Status::SUCCESS]);
    assert_eq!(other.run(Sqe::flush(2, 0)), Status::SUCCESS);
    assert_eq!(other.run(Sqe::flush(u32::MAX, 0)), Status::ANA_INACCESSIBLE, "not all of them");
    // A part of the log page, read separately, equals that part of the whole page.
    let host = &mut other.host;
    let whole =
        host.page(Sqe::get_log_page(0, get_page(16 + 2 * 36, 0, 0), 0)).unwrap()[..88].to_vec();
    for at in (0..88).step_by(4) {
        let part = host.page(Sqe::get_log_page(0, get_page(4, at, 0), 0)).unwrap();
        assert_eq!(part[..4], whole[at as usize..at as usize + 4], "{at}");
    }
    let heads = host.page(Sqe::get_log_page(0, get_page(80, 0, 1), 0)).unwrap();
    let heads = AnaLog::decode(&heads).unwrap();
    assert!(heads.groups.len() == 2 && heads.groups.iter().all(|group| group.nsids.is_empty()));
    for (fields, nsid) in [(get_page(4, 92, 0), 0), (get_page(4, 2, 0), 0), (get_page(4, 0, 0), 1)]
    {
        let refused = host.page(Sqe::get_log_page(nsid, fields, 0)).unwrap_err();
        assert_eq!(refused.code(), Status::INVALID_FIELD);
    }
    // A reset clears the change count.
    host.disable();
    host.enable();
    assert_eq!(seen(log(host)), (0, groups(bad, 0, fair)));
}

#[test]
fn an_ana_change_raises_the_enabled_event() {
    let [mut one, mut other] = mem();
    let page = |host: &mut Host| {
        let fields = GetLogPage { numd0: 255, ..GetLogPage::default() };
        let page = host.page(Sqe::get_log_page(0, fields, 0)).unwrap();
        SupportedLogPages::read_from_prefix(&page).unwrap().0.lids[usize::from(lid::ANA)].lsupp()
    };
    assert!(page(&mut one.host) && !page(&mut Host::new(&["mem:1MiB"], ADAPTIVE)));
    let config = AsyncEventConfig::new().with_anacn(true).into_bits();
    let fields = SetFeatures {
        fid: fid::ASYNC_EVENT_CONFIGURATION,
        cdw11: config,
        ..SetFeatures::default()
    };
    one.host.must(Sqe::set_features(0, fields, 0));
    for host in [&mut one.host, &mut other.host] {
        let mut admin = std::mem::replace(&mut host.admin, Queue::none());
        host.submit(&mut admin, &Sqe::async_event_request(77));
        host.admin = admin;
        set(host, 1, AnaState::NonOptimized);
    }
    let mut admin = std::mem::replace(&mut one.host.admin, Queue::none());
    let (cid, _, dw0) = one.host.wait(&mut admin);
    one.host.admin = admin;
    assert_eq!((cid, AsyncEvent::from_dw0(dw0)), (77, AsyncEvent::ANA_CHANGE));
    assert_eq!(dw0, 0x000c_0302, "a notice, type 03h, log page 0Ch");
    // A host gets no event if it has not enabled the event or if the state does not change.
    let mut admin = std::mem::replace(&mut other.host.admin, Queue::none());
    assert!(other.host.reap(&mut admin).is_none());
    // The next event is sent only after the host has read the log page.
    let mut admin = std::mem::replace(&mut one.host.admin, Queue::none());
    one.host.submit(&mut admin, &Sqe::async_event_request(78));
    one.host.admin = admin;
    set(&one.host, 1, AnaState::Inaccessible);
    let mut admin = std::mem::replace(&mut one.host.admin, Queue::none());
    assert!(one.host.reap(&mut admin).is_none());
    one.host.admin = admin;
}

#[test]
fn a_single_controller_has_no_ana_log_page() {
    let mut alone = SharingHost::new(Host::new(&["mem:1MiB"], ADAPTIVE));
    let page = alone.host.page(Sqe::get_log_page(0, get_page(16, 0, 0), 0));
    assert_eq!(page.unwrap_err().code(), Status::INVALID_LOG_PAGE);
    set(&alone.host, 1, AnaState::Inaccessible);
    let read = Sqe::read(1, 0, 0, 0).with_prps(alone.data, 0);
    assert_eq!(alone.run(read), Status::SUCCESS);
    assert!(alone.host.controller.ana_groups().is_empty());
}

#[test]
fn a_successor_keeps_the_ana_count_and_reports_changes() {
    let [mut one, _other] = mem();
    let config = AsyncEventConfig::new().with_anacn(true).into_bits();
    let fields = SetFeatures {
        fid: fid::ASYNC_EVENT_CONFIGURATION,
        cdw11: config,
        ..SetFeatures::default()
    };
    one.host.must(Sqe::set_features(0, fields, 0));
    set(&one.host, 1, AnaState::NonOptimized);
    let before = log(&mut one.host);
    let mut admin = std::mem::replace(&mut one.host.admin, Queue::none());
    one.host.submit(&mut admin, &Sqe::async_event_request(77));
    one.host.admin = admin;
    let controller = one.host.controller.clone();
    let (rested, rests) = channel();
    controller.freeze(move || rested.send(()).unwrap());
    rests.recv_timeout(LIMIT).unwrap();
    let saved_fds = &mut Descriptors::default();
    let saved = controller.save(saved_fds).unwrap();
    // Simulates a change of the ANA state while no process serves the controller: the configuration
    // of the new process has another state than the checkpoint.
    let subsystem = Subsystem::new(None).unwrap();
    let disk = shadowbell_disk_file::open("mem:1MiB").unwrap();
    let mut config = shared::config(&disk, &subsystem);
    let member = config.member.take().unwrap();
    config.member = Some(member.with_ana([], [(1, AnaState::Inaccessible)]));
    let successor =
        Controller::successor(config, pool(), Carrier::default(), &saved, saved_fds).unwrap();
    successor.map_dma(common::BASE, common::MEMORY, &one.host.memory).unwrap();
    successor.restore(&saved, saved_fds).unwrap();
    one.host.controller = successor;
    let mut admin = std::mem::replace(&mut one.host.admin, Queue::none());
    let (cid, _, dw0) = one.host.wait(&mut admin);
    one.host.admin = admin;
    assert_eq!((cid, AsyncEvent::from_dw0(dw0)), (77, AsyncEvent::ANA_CHANGE));
    let after = log(&mut one.host);
    assert_eq!((before.changes, after.changes), (1, 2));
    assert_eq!(after.groups[0].state, Some(AnaState::Inaccessible));
    let read = Sqe::read(1, 0, 0, 0).with_prps(one.data, 0);
    assert_eq!(one.run(read), Status::ANA_INACCESSIBLE);
}
