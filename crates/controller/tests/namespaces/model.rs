//! Model test: changes of all kinds in any order, compared with the expected state.

use crate::common::{self, Host, Queue};
use crate::host::{
    INACTIVE, INVALID, OUTSIDE, Outcome, active, add, change, ends, host, remove, replace, size,
};
use crate::late::Late;
use proptest::prelude::*;
use shadowbell_memory::EventFd;
use shadowbell_spec::{Sqe, Status};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// Expected state of a namespace.
struct ExpectedNamespace {
    disk: Late,
    blocks: u64,
    /// Written blocks, with the byte that fills them. All other blocks contain zeroes.
    written: BTreeMap<u64, u8>,
}

/// A command in flight.
struct Command {
    nsid: u32,
    lba: u64,
    write: Option<u8>,
    /// Number of changes of the namespace when the command was submitted. `None` if a change was in
    /// progress at that time.
    age: Option<u64>,
    page: u64,
}

#[derive(Clone, Debug)]
enum Step {
    Submit { queue: usize, nsid: u32, count: u8 },
    Reap { queue: usize, count: u8 },
    Add(u32, u64),
    Remove(u32),
    Resize(u32, u64),
    Hold(u32),
    Poll,
    Replace,
    Reset,
    Isolate,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (queue, nsid) = (0usize..2, 1u32..5);
    let step = prop_oneof![
        8 => (queue.clone(), nsid.clone(), 1u8..6)
            .prop_map(|(queue, nsid, count)| Step::Submit { queue, nsid, count }),
        4 => (queue, 1u8..12).prop_map(|(queue, count)| Step::Reap { queue, count }),
        3 => (nsid.clone(), 1u64..40).prop_map(|(nsid, blocks)| Step::Add(nsid, blocks)),
        2 => nsid.clone().prop_map(Step::Remove),
        3 => (nsid.clone(), 1u64..60).prop_map(|(nsid, blocks)| Step::Resize(nsid, blocks)),
        2 => nsid.prop_map(Step::Hold),
        2 => Just(Step::Poll),
        1 => Just(Step::Replace),
        1 => Just(Step::Reset),
        1 => Just(Step::Isolate),
    ];
    prop::collection::vec(step, 1..60)
}

struct ModelTest {
    host: Host,
    queues: Vec<Queue>,
    interrupts: BTreeMap<usize, EventFd>,
    expected: BTreeMap<u32, ExpectedNamespace>,
    /// Number of changes of each namespace so far.
    ages: BTreeMap<u32, u64>,
    in_flight: BTreeMap<(usize, u16), Command>,
    /// Changes in progress, each with the disk that it releases at its end.
    changing: Vec<(u32, Outcome, Option<Late>)>,
    removed: Vec<Late>,
    next: u16,
    names: u32,
    data: u64,
}

impl ModelTest {
    fn new() -> Self {
        let first = Late::memory(20);
        let mut host = host(&first);
        let data = host.alloc(256 * 4096);
        let mut world = Self {
            host,
            queues: Vec::new(),
            interrupts: BTreeMap::new(),
            expected: [(
                1,
                ExpectedNamespace { disk: first, blocks: 20, written: BTreeMap::new() },
            )]
            .into(),
            ages: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            changing: Vec::new(),
            removed: Vec::new(),
            next: 0,
            names: 0,
            data,
        };
        world.create_queues();
        world
    }

    fn create_queues(&mut self) {
        self.queues = vec![self.host.create(1, 64, true), self.host.create(2, 64, false)];
        let event = self.queues[0].irq.as_ref().unwrap().try_clone().unwrap();
        self.interrupts.insert(1, event);
    }

    fn age(&self, nsid: u32) -> u64 {
        self.ages.get(&nsid).copied().unwrap_or(0)
    }

    fn is_changing(&self, nsid: u32) -> bool {
        self.changing.iter().any(|(of, ..)| *of == nsid)
    }

    fn submit(&mut self, queue: usize, nsid: u32) {
        if self.in_flight.keys().filter(|(of, _)| *of == queue).count() >= 60 {
            return;
        }
        self.next = (self.next + 1) % 0x4000;
        let (cid, n) = (self.next, u64::from(self.next));
        let lba = n * 7 % 64;
        let busy = |command: &Command| (command.nsid, command.lba) == (nsid, lba);
        if self.in_flight.values().any(busy) {
            return;
        }
        let page = self.data + n % 256 * 4096;
        let write = (n % 3 != 0).then_some(n as u8 | 1);
        self.host.poke(page, &[write.unwrap_or(0xaa); 512]);
        let sqe = match write {
            Some(_) => Sqe::write(nsid, lba, 0, cid),
            None => Sqe::read(nsid, lba, 0, cid),
        };
        let age = (!self.is_changing(nsid)).then_some(self.age(nsid));
        let command = Command { nsid, lba, write, age, page };
        self.in_flight.insert((queue, cid), command);
        let Self { host, queues, .. } = self;
        host.submit(&mut queues[queue], &sqe.with_prps(page, 0));
    }

    fn reap(&mut self, queue: usize) -> bool {
        let Self { host, queues, .. } = self;
        let Some((cid, status, _)) = host.reap(&mut queues[queue]) else { return false };
        let command = self.in_flight.remove(&(queue, cid)).expect("each command completes once");
        let Command { nsid, lba, write, age, page } = command;
        let is_settled = age == Some(self.age(nsid)) && !self.is_changing(nsid);
        let expected = self.expected.get_mut(&nsid);
        if is_settled {
            match &expected {
                Some(expected) if lba < expected.blocks => assert!(status.is_success(), "{status}"),
                Some(_) => assert_eq!(status, OUTSIDE, "namespace {nsid}, block {lba}"),
                // Both statuses are valid, because the test does not know which other namespaces
                // exist at this moment.
                None => assert!([INACTIVE, INVALID].contains(&status), "{status}"),
            }
        } else {
            let possible = [Status::SUCCESS, OUTSIDE, INACTIVE, INVALID];
            assert!(possible.contains(&status), "{status}");
        }
        let Some(expected) = expected else { return true };
        match write {
            Some(value) if status.is_success() && is_settled => {
                expected.written.insert(lba, value);
            }
            // The namespace was changed while the write was in flight, so the old disk may have
            // executed it.
            Some(_) => drop(expected.written.remove(&lba)),
            None if status.is_success() && is_settled => {
                if let Some(value) = expected.written.get(&lba) {
                    let found = self.host.peek(page, 512);
                    assert_eq!(found, [*value; 512], "namespace {nsid}, block {lba}");
                }
            }
            None => {}
        }
        true
    }

    /// Records changes that have ended. If `all` is true, waits for every change.
    fn record_ended_changes(&mut self, all: bool) {
        if all {
            // A change may wait for a queue that moves to another I/O thread, and this move waits
            // for requests of all disks. So all disks complete their requests.
            let expected = self.expected.values().map(|expected| &expected.disk);
            let leaving = self.changing.iter().filter_map(|(.., removed)| removed.as_ref());
            expected.chain(leaving).for_each(|disk| disk.hold(false));
        }
        for (nsid, outcome, removed) in std::mem::take(&mut self.changing) {
            let end = if all { Ok(ends(&outcome)) } else { outcome.try_recv() };
            match end {
                Ok(end) => {
                    end.unwrap();
                    self.removed.extend(removed);
                }
                Err(_) => self.changing.push((nsid, outcome, removed)),
            }
        }
    }

    fn changes(&mut self, nsid: u32) {
        *self.ages.entry(nsid).or_insert(0) += 1;
    }

    fn step(&mut self, step: &Step) {
        self.record_ended_changes(false);
        match *step {
            Step::Submit { queue, nsid, count } => {
                (0..count).for_each(|_| self.submit(queue, nsid));
            }
            Step::Reap { queue, count } => {
                for _ in 0..count {
                    self.reap(queue);
                }
            }
            Step::Add(nsid, blocks) => {
                if self.expected.contains_key(&nsid) || self.is_changing(nsid) {
                    return;
                }
                let disk = Late::memory(blocks);
                self.names += 1;
                self.changes(nsid);
                let outcome = add(&self.host, Some(nsid), &disk, &self.names.to_string()).1;
                self.changing.push((nsid, outcome, None));
                self.expected
                    .insert(nsid, ExpectedNamespace { disk, blocks, written: BTreeMap::new() });
            }
            Step::Remove(nsid) => {
                if self.is_changing(nsid) {
                    return;
                }
                let Some(expected) = self.expected.remove(&nsid) else { return };
                self.changes(nsid);
                let outcome = remove(&self.host, nsid, &expected.disk);
                self.changing.push((nsid, outcome, Some(expected.disk)));
            }
            Step::Resize(nsid, blocks) => {
                if self.is_changing(nsid) || !self.expected.contains_key(&nsid) {
                    return;
                }
                self.changes(nsid);
                let expected = self.expected.get_mut(&nsid).unwrap();
                let disk = expected.disk.of_blocks(blocks);
                let outcome = change(&self.host, nsid, &disk);
                expected.blocks = blocks;
                let before = std::mem::replace(&mut expected.disk, disk);
                self.changing.push((nsid, outcome, Some(before)));
            }
            Step::Hold(nsid) => {
                if let Some(expected) = self.expected.get(&nsid) {
                    let hold = !expected.disk.instructions.hold.load(Ordering::SeqCst);
                    expected.disk.hold(hold);
                }
            }
            Step::Poll => {
                self.record_ended_changes(true);
                let there: Vec<_> = self.expected.keys().copied().collect();
                assert_eq!(active(&mut self.host), there);
                for nsid in 1..5 {
                    let highest = self.ages.keys().max().copied().unwrap_or(0).max(1);
                    if nsid <= highest {
                        let blocks = self.expected.get(&nsid).map_or(0, |expected| expected.blocks);
                        assert_eq!(size(&mut self.host, nsid), blocks);
                    }
                }
            }
            Step::Replace => {
                self.record_ended_changes(true);
                replace(&mut self.host, &self.interrupts);
            }
            Step::Reset => {
                self.expected.values().for_each(|expected| expected.disk.hold(false));
                self.record_ended_changes(true);
                self.host.disable();
                self.in_flight.clear();
                // A reset may abort writes, so the contents of written blocks are unknown.
                self.expected.values_mut().for_each(|expected| expected.written.clear());
                self.host.enable();
                self.create_queues();
            }
            Step::Isolate => drop(self.host.controller.isolate()),
        }
    }

    fn end(mut self) {
        self.record_ended_changes(true);
        for queue in 0..2 {
            let began = std::time::Instant::now();
            while self.in_flight.keys().any(|(of, _)| *of == queue) {
                assert!(began.elapsed() < common::LIMIT, "{:#?}", self.host.controller.stats());
                if !self.reap(queue) {
                    std::thread::yield_now();
                }
            }
        }
        for disk in &self.removed {
            assert!(!disk.was_used_after(), "the disk was used after its release");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 32,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_order_of_changes(steps in steps()) {
        let mut world = ModelTest::new();
        steps.iter().for_each(|step| world.step(step));
        world.end();
    }
}
