//! Prefetch hints: a disk that requests them gets two hints for each command of a burst except the
//! first, before the command is submitted.

use crate::common;
use common::Host;
use shadowbell_controller::{Config, NamespaceConfig, Polling};
use shadowbell_disk::{Disk, DiskInfo, Op, Queue, Request, Submitted};
use shadowbell_memory::{Segments, SharedBytes};
use shadowbell_spec::regs::{self, sq_doorbell_offset};
use shadowbell_spec::{Sqe, Status};
use std::sync::{Arc, Mutex};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    /// Prefetch hint: first block, length in bytes, and number of commands until the command is
    /// submitted.
    Hinted(u64, usize, u32),
    Started(u64),
}
use Seen::{Hinted, Started};

#[derive(Debug, Default)]
struct Log {
    seen: Vec<Seen>,
    /// Store that the disk makes for the host while it executes the first command: memory, offset
    /// of the shadow entry, and new tail.
    during_request: Option<(SharedBytes, usize, u32)>,
}

#[derive(Clone, Debug, Default)]
struct RecordingDisk(Arc<Mutex<Log>>);

impl Disk for RecordingDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo::new(512, 1 << 10)
    }

    fn queue(&self) -> std::io::Result<Box<dyn Queue>> {
        Ok(Box::new(self.clone()))
    }

    fn name(&self) -> String {
        "curious".into()
    }
}

impl Queue for RecordingDisk {
    fn uses_prefetch_hints(&self) -> bool {
        true
    }

    fn prefetch_hint(&self, op: Op, offset: u64, len: usize, ahead: u32) {
        assert_eq!(op, Op::Read);
        self.0.lock().unwrap().seen.push(Hinted(offset / 512, len, ahead));
    }

    fn submit(&mut self, _: u32, request: &Request, _: &mut Segments) -> Submitted {
        let mut log = self.0.lock().unwrap();
        log.seen.push(Started(request.offset / 512));
        if let Some((memory, at, tail)) = log.during_request.take() {
            memory.write(at, &tail).unwrap();
        }
        Submitted::Done(Ok(()))
    }
}

/// Runs six reads, of blocks 10 to 15. Returns the disk's log. The host first submits `at_once`
/// reads together. With shadow doorbells, it submits the remaining reads while the disk executes
/// the first one.
fn reads(at_once: u32, shadow: bool) -> Vec<Seen> {
    let curious = RecordingDisk::default();
    let disk: Arc<dyn Disk> = Arc::new(curious.clone());
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    // The I/O thread always polls the shadow entries of its queues. The two reads below advance the
    // queue's shadow entry, so the thread already reads the tail from this entry when the six reads
    // are submitted.
    let config = Config { namespaces, ..Config::default() };
    let mut host = Host::with(config, Polling::Always);
    if shadow {
        assert!(host.configure_shadow(|_, _| 0).is_success());
    }
    let mut queue = host.create(1, 16, false);
    let at = host.alloc(4096);
    for _ in 0..2 {
        let done = host.run(&mut queue, Sqe::read(1, 1, 0, 0).with_prps(at, 0));
        assert_eq!(done.0, Status::SUCCESS);
    }
    let old = queue.tail;
    for block in 10..16 {
        let cid = host.next_cid();
        let sqe = Sqe::read(1, block, 3, 0).with_prps(at, 0);
        host.put(&mut queue, &sqe.with_cid(cid));
    }
    let all = queue.tail;
    {
        let mut log = curious.0.lock().unwrap();
        log.seen.clear();
        if let Some((pages, _)) = host.shadow {
            let entry = sq_doorbell_offset(1, 0) - regs::DOORBELLS;
            let offset = (pages + entry - common::BASE) as usize;
            log.during_request = Some((host.memory.clone(), offset, all));
        }
    }
    queue.tail = old + at_once;
    host.ring(&queue, old);
    queue.tail = all;
    (0..6).for_each(|_| assert_eq!(host.wait(&mut queue).1, Status::SUCCESS));
    curious.0.lock().unwrap().seen.clone()
}

#[test]
fn every_command_but_the_first_gets_two_hints() {
    let mut expected = vec![Hinted(11, 2048, 2)];
    for block in 10..16 {
        expected.extend((block + 2 < 16).then_some(Hinted(block + 2, 2048, 2)));
        expected.extend((block + 1 < 16).then_some(Hinted(block + 1, 2048, 1)));
        expected.push(Started(block));
    }
    assert_eq!(reads(6, false), expected);
}

#[test]
fn commands_submitted_meanwhile_get_hints_in_the_same_burst() {
    for at_once in [2, 3, 4] {
        let seen = reads(at_once, true);
        let place = |what| {
            let mut places = (0..seen.len()).filter(|i| seen[*i] == what);
            (places.next(), places.next())
        };
        for block in 11..16 {
            let (first, again) = place(Hinted(block, 2048, 2));
            let (second, twice) = place(Hinted(block, 2048, 1));
            let started = place(Started(block)).0;
            assert!(
                first.is_some() && first < second && second < started,
                "block {block} of {at_once}: {seen:?}"
            );
            assert_eq!((again, twice), (None, None), "block {block} of {at_once}: {seen:?}");
        }
    }
}

#[test]
fn a_single_command_gets_no_hint() {
    let seen = reads(1, true);
    assert_eq!(seen[..1], [Started(10)], "{seen:?}");
    assert_eq!(seen.iter().filter(|s| matches!(s, Started(_))).count(), 6);
}
