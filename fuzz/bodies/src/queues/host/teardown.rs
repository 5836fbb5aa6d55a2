//! Unmapped memory, resets, and the end of outstanding commands.

use super::{BASE, BYTES, Host, Kind, MAX_TURNS, QUEUE_PAGES, QUEUES};
use crate::command::PAGE;
use shadowbell_spec::regs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

impl Host {
    fn run_until(&mut self, done: &AtomicBool, what: &str) {
        for _ in 0..4 {
            self.run_until_idle();
            if done.load(Ordering::SeqCst) {
                return;
            }
            self.test_disk.state().complete_all();
        }
        panic!("{what}");
    }

    fn unmap(&mut self, at: u64, len: u64) {
        let done = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&done);
        let then = move || flag.store(true, Ordering::SeqCst);
        self.controller.unmap_dma(BASE + at, len, then).expect("memory that was mapped");
        self.run_until(&done, "memory is not given back");
    }

    /// Unmaps the guest's memory for data for a while, and maps it again.
    pub(in crate::queues) fn unmap_data(&mut self) {
        let (at, len) = (QUEUE_PAGES * PAGE, BYTES as u64 - QUEUE_PAGES * PAGE);
        self.trouble = true;
        self.unmap(at, len);
        let before = self.image[at as usize..].to_vec();
        self.test_disk.state().complete_all();
        self.run_until_idle();
        assert!(self.image[at as usize..] == before, "memory is written that was given back");
        self.map(at, len);
    }

    /// Unmaps the memory of the queues for a while, and maps it again, as VMMs do while a guest
    /// boots.
    pub(in crate::queues) fn unmap_queues(&mut self) {
        let len = QUEUE_PAGES * PAGE;
        self.unmap(0, len);
        let before = self.image[..len as usize].to_vec();
        self.test_disk.state().complete_all();
        self.run_until_idle();
        assert!(self.image[..len as usize] == before, "memory is written that was given back");
        self.map(0, len);
    }

    /// Completes all commands.
    pub(in crate::queues) fn quiesce(&mut self) {
        self.test_disk.state().defer = false;
        for _ in 0..MAX_TURNS {
            self.test_disk.state().complete_all();
            self.run_until_idle();
            for qid in 0..=QUEUES {
                self.ring_sq(qid);
                self.consume(qid, usize::MAX);
            }
            self.run_until_idle();
            let all = self.sqs.values().flat_map(|sq| sq.commands.values());
            let outstanding = all.filter(|command| !matches!(command.kind, Kind::Event)).count();
            let consumed = self.cqs.values().all(|cq| cq.head == cq.next);
            if outstanding == 0 && consumed {
                return;
            }
        }
        panic!("commands do not come to their end");
    }

    /// Executes a reset of the given kind.
    pub(in crate::queues) fn reset(&mut self, kind: usize) {
        let done = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&done);
        if kind == 0 {
            let cc = self.read32(regs::CC);
            self.write32(regs::CC, cc & !1);
            for _ in 0..4 {
                self.run_until_idle();
                if self.read32(regs::CSTS) & 1 == 0 {
                    flag.store(true, Ordering::SeqCst);
                    break;
                }
                self.test_disk.state().complete_all();
            }
        } else {
            self.controller.reset(move || flag.store(true, Ordering::SeqCst));
        }
        self.run_until(&done, "a reset does not end");
        // After the reset, the controller must not write to the guest's memory.
        self.sqs.clear();
        self.cqs.clear();
        (self.shadow, self.trouble) = (false, false);
        self.run_until_idle();
        let mut state = self.test_disk.state();
        assert_eq!(state.deferred(), 0, "the disk has requests without a command");
        state.fail.clear();
        drop(state);
        self.enable();
    }
}
