//! Removal of a namespace with commands in flight.

use crate::host::{INACTIVE, active, add, ends, host, remove};
use crate::late::{Instructions, Late};
use shadowbell_spec::nvm::{CopyFields, CopyRange};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::{Sqe, Status};
use shadowbell_testing::wait;
use std::collections::BTreeMap;
use std::sync::mpsc::TryRecvError;
use std::sync::{Arc, Weak};
use zerocopy::IntoBytes;

#[test]
fn removal_ends_commands_and_releases_the_disk() {
    let (first, other) = (Late::memory(4096), Late::memory(64));
    let mut host = host(&first);
    ends(&add(&host, None, &other, "other").1).unwrap();
    let mut queues = [host.create(1, 32, true), host.create(2, 32, false)];
    let page = host.alloc(8192);
    host.poke(page, CopyRange { slba: 4, nlb0: 3, ..CopyRange::default() }.as_bytes());
    let ranges: Vec<u8> = (0..64u64)
        .flat_map(|n| [[0, 0, 0, 0, 1, 0, 0, 0].as_slice(), &(n * 2).to_le_bytes()].concat())
        .collect();
    host.poke(page + 4096, &ranges);
    first.hold(true);
    let copy = CopyFields { sdlba: 100, nr0: 0, ..CopyFields::default() };
    for queue in &mut queues {
        let zeroes = Sqe { cdw12: 4095, ..Sqe::new(0x08, 4, 1) };
        let deallocate = Sqe { cdw10: 63, cdw11: 4, ..Sqe::new(0x09, 5, 1) };
        for sqe in [
            Sqe::read(1, 1, 0, 1).with_prps(page, 0),
            Sqe::write(1, 2, 0, 2).with_prps(page, 0),
            Sqe::copy(1, copy, 3).with_prps(page, 0),
            // Commands of many requests, some of which are not submitted yet.
            zeroes,
            deallocate.with_prps(page + 4096, 0),
            Sqe::flush(1, 6),
        ] {
            host.submit(queue, &sqe);
        }
        host.submit(queue, &Sqe::flush(NSID_ALL, 7));
    }
    host.until("the requests", || first.seen().len() > 60);
    let outcome = remove(&host, 1, &first);
    // New commands for the removed namespace are refused. The other namespace is still served.
    let mut ended: [BTreeMap<u16, Status>; 2] = Default::default();
    for (queue, ended) in queues.iter_mut().zip(&mut ended) {
        host.submit(queue, &Sqe::read(1, 1, 0, 20).with_prps(page, 0));
        host.submit(queue, &Sqe::read(2, 1, 0, 21).with_prps(page, 0));
        while !(ended.contains_key(&20) && ended.contains_key(&21)) {
            let (cid, status, _) = host.wait(queue);
            assert_eq!(ended.insert(cid, status), None);
        }
        assert_eq!((ended[&20], ended[&21]), (INACTIVE, Status::SUCCESS));
        assert!(!ended.contains_key(&1), "the command is still at the disk");
    }
    assert_eq!(active(&mut host), [2]);
    wait::short_pause();
    assert_eq!(outcome.try_recv().unwrap_err(), TryRecvError::Empty, "the disk has requests");
    let begun = first.seen().len();
    first.hold(false);
    ends(&outcome).unwrap();
    assert_eq!(first.seen().len(), begun, "nothing more was begun");
    let inner: Weak<Instructions> = Arc::downgrade(&first.instructions);
    for (queue, ended) in queues.iter_mut().zip(&mut ended) {
        while ended.len() < 9 {
            let (cid, status, _) = host.wait(queue);
            assert_eq!(ended.insert(cid, status), None);
        }
        for cid in 1..7 {
            assert_eq!(ended[&cid], INACTIVE, "command {cid}");
        }
        assert_eq!(ended[&7], Status::SUCCESS, "the others are flushed");
        assert_eq!(host.reap(queue), None);
    }
    assert!(!first.was_used_after());
    drop(first);
    host.until("the disk is let go", || inner.strong_count() == 0);
}
