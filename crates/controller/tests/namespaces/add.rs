//! Addition of namespaces.

use crate::host::{
    INACTIVE, INVALID, OUTSIDE, active, add, change, changed, ends, event, get_features, host,
    identify, no_event, remove, request_event, size, want_events, write_and_read,
};
use crate::late::Late;
use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{NamespaceConfig, NamespaceError};
use shadowbell_disk::{Disk, Op};
use shadowbell_disk_file::{MemDisk, NullDisk};
use shadowbell_spec::Sqe;
use shadowbell_spec::identify::{IdentifyController, cns};
use shadowbell_spec::sqe::NSID_ALL;
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[test]
fn a_namespace_is_added_and_removed() {
    let (first, other) = (Late::memory(64), Late::memory(100));
    let mut host = host(&first);
    let mut queues = [host.create(1, 16, true), host.create(2, 16, false)];
    want_events(&mut host, 500);
    let (nsid, outcome) = add(&host, Some(3), &other, "other");
    assert_eq!(nsid, 3);
    ends(&outcome).unwrap();
    event(&mut host, 500);
    request_event(&mut host, 501);
    assert_eq!(changed(&mut host), [3]);
    assert_eq!(changed(&mut host), [0; 0]);
    assert_eq!(active(&mut host), [1, 3]);
    assert_eq!((size(&mut host, 1), size(&mut host, 2), size(&mut host, 3)), (64, 0, 100));
    assert_eq!(identify::<IdentifyController>(&mut host, cns::CONTROLLER, 0).nn, 3);
    for queue in &mut queues {
        assert!(write_and_read(&mut host, queue, 3, 99, 7).is_success());
        assert_eq!(write_and_read(&mut host, queue, 3, 100, 7), OUTSIDE);
        // The status for an inactive NSID differs from the one for an invalid NSID.
        assert_eq!(write_and_read(&mut host, queue, 2, 0, 7), INACTIVE);
        assert_eq!(host.run(queue, Sqe::flush(2, 0)).0, INACTIVE);
        assert_eq!(write_and_read(&mut host, queue, 4, 0, 7), INVALID);
        assert_eq!(host.run(queue, Sqe::flush(4, 0)).0, INVALID);
        assert!(host.run(queue, Sqe::flush(NSID_ALL, 0)).0.is_success());
    }
    assert_eq!(host.admin(get_features(2)).0, INACTIVE);
    assert_eq!(host.admin(get_features(4)).0, INVALID);
    assert!(host.admin(get_features(3)).0.is_success());

    ends(&remove(&host, 1, &first)).unwrap();
    event(&mut host, 501);
    assert_eq!(changed(&mut host), [1]);
    assert_eq!(active(&mut host), [3]);
    assert_eq!((size(&mut host, 1), size(&mut host, 3)), (0, 100));
    for queue in &mut queues {
        assert_eq!(write_and_read(&mut host, queue, 1, 0, 7), INACTIVE);
        assert!(write_and_read(&mut host, queue, 3, 5, 9).is_success());
    }
    let there: Vec<_> = host.controller.namespaces().iter().map(|(nsid, _)| *nsid).collect();
    assert_eq!(there, [3]);
    // No event request is outstanding, so the controller stores the events and merges them into
    // one.
    let (nsid, outcome) = add(&host, None, &Late::memory(8), "third");
    assert_eq!(nsid, 1, "the lowest that is free");
    ends(&outcome).unwrap();
    ends(&remove(&host, 3, &other)).unwrap();
    request_event(&mut host, 502);
    event(&mut host, 502);
    assert_eq!(changed(&mut host), [1, 3]);
    request_event(&mut host, 503);
    no_event(&mut host);
    assert!(!first.was_used_after() && !other.was_used_after());
    // A host that has not enabled the event gets none.
    host.disable();
    host.enable();
    let mut queue = host.create(1, 16, true);
    let outcome = add(&host, None, &Late::memory(9), "fourth").1;
    ends(&outcome).unwrap();
    request_event(&mut host, 504);
    assert_eq!(active(&mut host), [1, 2]);
    no_event(&mut host);
    assert!(write_and_read(&mut host, &mut queue, 2, 8, 1).is_success());
}

#[test]
fn invalid_additions_are_refused() {
    let first = Late::memory(64);
    let host = host(&first);
    let controller = &host.controller;
    let add = |nsid, disk: Arc<dyn Disk>, name: &str| {
        let config = NamespaceConfig { disk, uuid: uuid_from(name) };
        let told = |_| panic!("nothing was begun");
        controller.add_namespace(nsid, &config, told).unwrap_err()
    };
    let other = || Late::memory(8).shared();
    assert!(matches!(add(Some(1), other(), "a"), NamespaceError::Present(1)));
    for nsid in [0, 257, NSID_ALL] {
        assert!(matches!(add(Some(nsid), other(), "a"), NamespaceError::NoRoom));
    }
    let error = add(Some(9), other(), "first").to_string();
    assert!(error.contains("namespaces 1 and 9 have the same UUID"), "{error}");
    let empty = add(None, Arc::new(NullDisk::new(0, 512)), "a").to_string();
    assert!(empty.contains("namespace 2: the disk") && empty.contains("empty"), "{empty}");
    let told = |_| panic!("nothing was begun");
    assert!(matches!(controller.remove_namespace(2, told), Err(NamespaceError::Missing(2))));
    let change = |nsid, disk| controller.change_disk(nsid, disk, told).unwrap_err();
    assert!(matches!(change(2, other()), NamespaceError::Missing(2)));
    let large: Arc<dyn Disk> = Arc::new(MemDisk::new(8, 4096).unwrap());
    let error = change(1, large).to_string();
    assert!(error.contains("512 bytes") && error.contains("4096"), "{error}");

    // While a namespace is being changed, another change of it is refused.
    let mut host = host;
    let mut queue = host.create(1, 16, true);
    let page = host.alloc(4096);
    first.hold(true);
    host.submit(&mut queue, &Sqe::read(1, 1, 0, 1).with_prps(page, 0));
    host.until("the read", || first.seen().len() == 1);
    let outcome = remove(&host, 1, &first);
    let again = host.controller.remove_namespace(1, told);
    assert!(matches!(again, Err(NamespaceError::Changing(1))));
    let config = NamespaceConfig { disk: other(), uuid: uuid_from("b") };
    let same = host.controller.add_namespace(Some(1), &config, told);
    assert!(matches!(same, Err(NamespaceError::Changing(1))));
    assert_eq!(host.controller.add_namespace(None, &config, |_| ()).unwrap(), 2);
    first.hold(false);
    ends(&outcome).unwrap();

    host.controller.freeze(|| ());
    let frozen = host.controller.remove_namespace(2, told);
    assert!(matches!(frozen, Err(NamespaceError::Frozen)));
}

#[test]
fn a_disk_that_cannot_be_opened_changes_nothing() {
    let first = Late::memory(64);
    let mut host = host(&first);
    let mut queues = [host.create(1, 16, true), host.create(2, 16, false)];
    for queues_left in [0, 1] {
        let broken = Late::memory(100);
        broken.instructions.queues.store(queues_left, Ordering::SeqCst);
        let (nsid, outcome) = add(&host, None, &broken, "broken");
        assert!(matches!(ends(&outcome), Err(NamespaceError::Open(of)) if of == nsid));
        assert_eq!(active(&mut host), [1]);
        broken.is_removed();
        for blocks in [100, 10] {
            let broken = first.of_blocks(blocks.min(64));
            broken.instructions.queues.store(queues_left, Ordering::SeqCst);
            assert!(matches!(ends(&change(&host, 1, &broken)), Err(NamespaceError::Open(1))));
            assert_eq!(size(&mut host, 1), 64);
        }
        for queue in &mut queues {
            assert!(write_and_read(&mut host, queue, 1, 63, 8).is_success());
            assert_eq!(write_and_read(&mut host, queue, 2, 1, 8), INACTIVE);
        }
        assert!(!broken.was_used_after());
    }
}

#[test]
fn a_cache_unknown_to_the_host_is_written_through() {
    let mut host = host(&Late::memory(64));
    let mut queue = host.create(1, 16, true);
    let cached = Late { volatile: true, ..Late::memory(64) };
    ends(&add(&host, None, &cached, "cached").1).unwrap();
    assert!(!identify::<IdentifyController>(&mut host, cns::CONTROLLER, 0).vwc.vwcp());
    assert!(write_and_read(&mut host, &mut queue, 2, 1, 8).is_success());
    assert!(host.run(&mut queue, Sqe::new(0x08, 0, 2)).0.is_success());
    let zeroes = Op::WriteZeroes { deallocate: false, fua: true };
    let seen: Vec<_> = cached.seen().iter().map(|request| request.op).collect();
    assert_eq!(seen, [Op::Write { fua: true }, Op::Read, zeroes]);
}
