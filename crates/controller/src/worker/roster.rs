//! Who is to be looked at: the tenants of a worker, the busy apart from the quiet.
//!
//! A host with hundreds of virtual machines has mostly quiet ones. If each of them were looked at in
//! every pass, armed before every sleep and disarmed after it, all would pay for the few that do
//! something. So a worker does that for its *active* tenants only. The others are
//!
//! * *parked*, where a bell says that they have something to do. A tenant is parked as a worker goes
//!   to sleep: it is declared asleep in a state cell of its own, its doorbells are armed, a full
//!   fence is passed, and everything is looked at once more; only with no news it stays there, and
//!   is then left out of passes and of the worker's own sleep. Whoever delivers a doorbell write
//!   stores the register, passes a fence and reads that cell. So one of the two sees the other: the
//!   last look sees the write, or the write sees the tenant parked, and leaves a message that names
//!   it. From there on it is a message as all others, which a worker never sleeps through. Only the
//!   first who sees it parked leaves one; who sees that somebody is about to relies on that one's,
//!   which is still to come and has the tenant looked at as a whole. (The crate `doorbell` has all
//!   this as a model: `tests/loom/park.rs`.) An eventfd that a host signals instead stays signalled
//!   until the worker has heard it, in its sleep or now and then while it is awake.
//! * *dormant*, where there is no such bell: the doorbells are mapped, or the worker is one that
//!   polls for ever, whose hosts have been promised that they never ring. These are visited in turn,
//!   a few of them in each pass and all of them before a sleep.
//!
//! Only a tenant that is at rest is either: nothing in flight, no interrupt held back, nobody who
//! waits for it. Any message for it makes it active first.

use super::SleepCell;
use super::io::Space;
use super::mailbox::Mailbox;
use super::tenant::Tenant;
use crate::trace::TraceRing;
use rustix::event::epoll;
use shadowbell_doorbell::Sleeper;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Sleeps in a row for which a tenant was armed in vain until it is parked. Armed or parked, it
/// rings at its next command; but parked it also rings while the worker is awake for others.
const LULLS: u32 = 8;
/// Under a worker that does not sleep: how long there was nothing to do for it. Its host then rings
/// at most so often.
const LULL: Duration = Duration::from_millis(10);
/// Passes between two looks at the clock for that.
const REVIEW: u32 = 1024;
/// Commands in the time of which a dormant tenant is visited: some percent of a worker's time.
const VISIT: u32 = 32;
/// What a pass counts for in this, and how many in a row that found nothing make it a whole visit:
/// the worker then has nothing better to do.
const VISIT_PER_PASS: u32 = 2;
const STILL: u32 = 64;
/// Passes that found nothing, or half as many commands, after which a worker that is awake hears
/// descriptors: some tens of microseconds.
const HEAR: u32 = 512;

/// A tenant with its bell.
pub(super) struct Seat {
    pub(super) tenant: Tenant,
    bell: Sleeper<SleepCell>,
    /// What had been done for it in the last sleep, and in how many sleeps since when.
    done: u64,
    lulls: u32,
    /// What had been done for it at the last review.
    reviewed: u64,
}

impl Seat {
    /// Whether the worker is about to sleep once more without anything having been done for it.
    fn is_lulled(&mut self) -> bool {
        let done = self.tenant.progress();
        self.lulls = if done == self.done { self.lulls.saturating_add(1) } else { 0 };
        self.done = done;
        self.lulls > LULLS
    }

    /// The same of the time since the last review.
    fn is_lulled_since_review(&mut self) -> bool {
        let done = self.tenant.progress();
        std::mem::replace(&mut self.reviewed, done) == done
    }

    /// Falls asleep, if there is nothing to do for it.
    fn park(&mut self, trace: &mut Option<TraceRing>) -> bool {
        if !self.tenant.is_at_rest() {
            return false;
        }
        let mut arming = self.bell.prepare();
        self.tenant.arm(&mut arming, trace);
        let mut fenced = arming.fence();
        // At rest, there are no interrupts to be paid.
        let due = self.tenant.recheck(&mut fenced, trace);
        fenced.note(due.is_some());
        if let Some(asleep) = fenced.try_sleep() {
            asleep.stay();
            return true;
        }
        self.tenant.awake(&self.bell);
        false
    }

    fn rise(&mut self) {
        self.bell.rise();
        self.tenant.awake(&self.bell);
        self.lulls = 0;
    }

    fn has_kicks(&self) -> bool {
        !self.tenant.kicks().is_empty()
    }
}

/// The tenants of a worker.
pub(super) struct Roster {
    #[allow(clippy::vec_box, reason = "they move from here to there")]
    pub(super) active: Vec<Box<Seat>>,
    /// By controller: one that is parked is not on its way out, so there are no two.
    parked: HashMap<u32, Box<Seat>>,
    dormant: VecDeque<Box<Seat>>,
    /// Whether the worker never sleeps.
    always: bool,
    /// Of the parked, how many ring by a descriptor.
    ringing_by_kick: usize,
    /// How much was done since descriptors were heard, in the measure of [`HEAR`].
    unheard: u32,
    /// The same for visits, and passes in a row that found nothing.
    unvisited: u32,
    still: u32,
    /// Passes since the last look at the clock, and the last review.
    passes: u32,
    reviewed: Instant,
    /// `shadowbell_memory::sigbus::faults` when it was last looked at.
    faults: u64,
}

impl Roster {
    pub(super) fn new(always: bool) -> Self {
        Self {
            active: Vec::new(),
            parked: HashMap::new(),
            dormant: VecDeque::new(),
            always,
            ringing_by_kick: 0,
            unheard: 0,
            unvisited: 0,
            still: 0,
            passes: 0,
            reviewed: Instant::now(),
            faults: shadowbell_memory::sigbus::faults(),
        }
    }

    /// Takes in a new one.
    pub(super) fn add(&mut self, tenant: Tenant, bell: SleepCell) {
        let bell = Sleeper::new(bell);
        self.active.push(Box::new(Seat { tenant, bell, done: 0, lulls: 0, reviewed: 0 }));
    }

    /// The tenant that serves a controller, which is active from here on. Not an old one of the same
    /// controller that is still on its way out.
    pub(super) fn activate(&mut self, id: u32) -> Option<&mut Tenant> {
        self.rung(id);
        if let Some(at) = self.dormant.iter().position(|seat| seat.tenant.id() == id) {
            self.active.extend(self.dormant.remove(at));
        }
        let mut tenants = self.active.iter_mut().map(|seat| &mut seat.tenant);
        tenants.find(|t| t.id() == id && !t.is_leaving())
    }

    /// The same as it is.
    pub(super) fn find(&self, id: u32) -> Option<&Tenant> {
        let seats = self.active.iter().chain(&self.dormant).chain(self.parked.get(&id));
        seats.map(|seat| &seat.tenant).find(|t| t.id() == id && !t.is_leaving())
    }

    /// Whether it is parked or dormant.
    pub(super) fn is_left_out(&self, id: u32) -> bool {
        let mut dormant = self.dormant.iter();
        self.parked.contains_key(&id) || dormant.any(|seat| seat.tenant.id() == id)
    }

    /// Whether any disk has something in hand.
    pub(super) fn is_pending(&self) -> bool {
        self.active.iter().any(|seat| seat.tenant.is_pending())
    }

    /// How many requests have ended at the disks of those that are active.
    pub(super) fn ended(&self) -> u64 {
        self.active.iter().map(|seat| seat.tenant.ended()).fold(0, u64::wrapping_add)
    }

    /// Somebody has rung for a controller.
    pub(super) fn rung(&mut self, id: u32) {
        if let Some(mut seat) = self.parked.remove(&id) {
            self.ringing_by_kick -= usize::from(seat.has_kicks());
            seat.rise();
            self.active.push(seat);
        }
    }

    /// Before a sleep, in which all but the parked are armed: parks those that have been armed in
    /// vain for a while. One stays active, so that a worker's only tenant takes no detour.
    pub(super) fn retire_to_bed(&mut self, trace: &mut Option<TraceRing>) {
        self.active.extend(self.dormant.drain(..));
        let mut index = 0;
        while self.active.len() > 1
            && let Some(seat) = self.active.get_mut(index)
        {
            if seat.is_lulled() && !seat.tenant.is_mapped() && !self.always && seat.park(trace) {
                self.keep_parked(index);
            } else {
                index += 1;
            }
        }
    }

    fn keep_parked(&mut self, index: usize) {
        let seat = self.active.swap_remove(index);
        self.ringing_by_kick += usize::from(seat.has_kicks());
        self.parked.insert(seat.tenant.id(), seat);
    }

    /// After a pass in which there was so much to do: looks after those that were not in it. How much
    /// there was to do for them.
    #[inline]
    pub(super) fn tend(
        &mut self,
        work: u32,
        mailbox: &Mailbox,
        trace: &mut Option<TraceRing>,
    ) -> u32 {
        if shadowbell_memory::sigbus::faults() != self.faults {
            self.check_memory();
        }
        if self.active.len() <= 1 && self.ringing_by_kick == 0 && self.dormant.is_empty() {
            return 0;
        }
        self.tend_several(work, mailbox, trace)
    }

    #[inline(never)]
    fn tend_several(&mut self, work: u32, mailbox: &Mailbox, trace: &mut Option<TraceRing>) -> u32 {
        if self.active.len() > 1 {
            self.passes += 1;
            if self.passes >= REVIEW {
                self.review(trace);
            }
        }
        if self.ringing_by_kick != 0 {
            self.unheard = self.unheard.saturating_add(1 + 2 * work);
        }
        if self.dormant.is_empty() { 0 } else { self.visit(work, mailbox, trace) }
    }

    /// Whether descriptors are to be heard although the worker is awake.
    #[inline]
    pub(super) fn is_hard_of_hearing(&self) -> bool {
        self.unheard >= HEAR
    }

    /// Descriptors were heard: whether all of them.
    pub(super) fn heard(&mut self, all: bool) {
        self.unheard = if all { 0 } else { HEAR };
    }

    #[cold]
    fn check_memory(&mut self) {
        self.faults = shadowbell_memory::sigbus::faults();
        let left_out = self.dormant.iter_mut().chain(self.parked.values_mut());
        let seats = self.active.iter_mut().chain(left_out);
        seats.for_each(|seat| seat.tenant.check_memory());
    }

    #[cold]
    fn review(&mut self, trace: &mut Option<TraceRing>) {
        self.passes = 0;
        let now = Instant::now();
        if now.duration_since(self.reviewed) < LULL {
            return;
        }
        self.reviewed = now;
        let mut index = 0;
        while self.active.len() > 1
            && let Some(seat) = self.active.get_mut(index)
        {
            if !seat.is_lulled_since_review() {
                index += 1;
            } else if self.always || seat.tenant.is_mapped() {
                if seat.tenant.is_at_rest() {
                    self.dormant.push_back(self.active.swap_remove(index));
                } else {
                    index += 1;
                }
            } else if seat.park(trace) {
                self.keep_parked(index);
            } else {
                index += 1;
            }
        }
    }

    fn visit(&mut self, work: u32, mailbox: &Mailbox, trace: &mut Option<TraceRing>) -> u32 {
        self.still = if work == 0 { self.still.saturating_add(1) } else { 0 };
        self.unvisited += if self.still > STILL { VISIT } else { VISIT_PER_PASS + work };
        let mut found = 0;
        for _ in 0..(self.unvisited / VISIT).min(self.dormant.len() as u32) {
            let Some(mut seat) = self.dormant.pop_front() else { break };
            let work = seat.tenant.pass(mailbox, trace);
            if work == 0 {
                self.dormant.push_back(seat);
            } else {
                found += work;
                self.active.push(seat);
            }
        }
        self.unvisited %= VISIT;
        found
    }

    /// Lets those go whose detach has come to its end.
    pub(super) fn remove_detached(&mut self, epoll: &OwnedFd) {
        for index in (0..self.active.len()).rev() {
            if self.active[index].tenant.is_detached() {
                let mut seat = self.active.swap_remove(index);
                for fd in seat.tenant.spaces().iter().filter_map(Space::wake_fd) {
                    let _ = epoll::delete(epoll, fd);
                }
                // The host has a duplicate of it, so closing ours would not take it out.
                for kick in seat.tenant.kicks() {
                    let _ = epoll::delete(epoll, kick);
                }
                seat.tenant.retire();
                // Dropping it lets its latch go: from here on nothing touches the host's memory.
                drop(seat);
            }
        }
    }
}
