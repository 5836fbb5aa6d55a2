//! Controller state in a VM live migration. The state comes from another machine and is untrusted,
//! so all of it is validated before any part is used.
//!
//! The format is that of [`saved`](crate::saved), without descriptors and counters.

use crate::admin::features::Features;
use crate::config::MAX_NAMESPACES;
use crate::context::Context;
use crate::restore_error::RestoreError;
use crate::saved::{
    SavedAdminQueue, SavedControl, SavedController, SavedCounters, SavedCq, SavedDoorbell, SavedSq,
    SavedTruth,
};
use crate::shared::{DOORBELL_BYTES, MAX_QUEUES};
use crate::stats::{CqStats, IoStats, SqStats};
use crate::uncorrectable::MAX_BLOCKS;
use serde::{Deserialize, Serialize};
use shadowbell_doorbell::RingSize;
use shadowbell_spec::regs::{Aqa, Cc, Csts, SHST_NORMAL, SHST_OCCURRING};
use shadowbell_state::Bytes;
use std::collections::BTreeSet;

/// Maximum number of events per list. A controller never stores more.
const MAX_EVENTS: usize = 64;

/// State of a quiesced controller for VM migration to an equal controller on another machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MigrationState {
    controller: SavedController,
    /// Contents of the doorbell page.
    doorbells: Bytes,
}

impl MigrationState {
    pub(crate) fn new(mut controller: SavedController, doorbells: Vec<u8>) -> Self {
        // Descriptors and state that concerns only this process are not migrated.
        controller.parts.iter_mut().for_each(|part| part.doorbell_eventfds.clear());
        controller.journal = None;
        controller.isolated = false;
        controller.counters = SavedCounters {
            io: IoStats::default(),
            sq: SqStats::default(),
            cq: CqStats::default(),
            eventfd_doorbells: 0,
            recoveries: 0,
        };
        Features::detach_clock(&mut controller.control.features);
        Self { controller, doorbells: Bytes(doorbells) }
    }

    /// Validates the state against the target's configuration. Returns the state and the contents
    /// of the doorbell page.
    pub(crate) fn check(self, cx: &Context) -> Result<(SavedController, Vec<u8>), RestoreError> {
        let Self { controller: mut saved, doorbells: Bytes(doorbells) } = self;
        let ours = cx.shape();
        if let Some(what) = saved.shape.difference(&ours) {
            return Err(RestoreError::Shape(what));
        }
        if saved.shape.guarantees.is_some() && saved.shape.guarantees != ours.guarantees {
            return Err(RestoreError::Shape("volatile write cache or Write Zeroes limit"));
        }
        if doorbells.len() as u64 != DOORBELL_BYTES {
            return Err(RestoreError::Invalid("the doorbell page"));
        }
        check(&saved, cx).map_err(RestoreError::Invalid)?;
        Features::join_clock(&mut saved.control.features);
        Ok((saved, doorbells))
    }
}

/// Validates the state of a quiesced controller.
fn check(saved: &SavedController, cx: &Context) -> Result<(), &'static str> {
    let SavedController { control, admin, parts, pending_vectors, .. } = saved;
    check_control(control, cx)?;
    let vectors = cx.shared.irqs.len();
    let are_valid = pending_vectors.iter().all(|vector| usize::from(*vector) < vectors);
    if !are_valid || pending_vectors.len() > vectors {
        return Err("an interrupt vector");
    }
    match (admin, control.enabled) {
        (Some(admin), true) => check_admin(admin, control)?,
        (None, false) if parts.is_empty() && control.shadow.is_none() => {}
        _ => return Err("the admin queue"),
    }
    if parts.len() > MAX_QUEUES {
        return Err("the number of I/O threads");
    }
    let (mut sqs, mut cqs) = (BTreeSet::new(), BTreeSet::new());
    for part in parts {
        if !part.doorbell_eventfds.is_empty() {
            return Err("a descriptor");
        }
        for cq in &part.cqs {
            let vector = cq.vector.is_none_or(|vector| usize::from(vector) < vectors);
            let limit = control.granted.1;
            let is_new = cqs.insert(cq.qid);
            if !is_new || !vector || !is_valid_queue(cq.qid, limit, cq.iova, cq.entries, cx) {
                return Err("a completion queue");
            }
            check_cq(cq, control)?;
        }
        for sq in &part.sqs {
            let limit = control.granted.0;
            let has_cq = part.cqs.iter().any(|cq| cq.qid == sq.cqid);
            let is_new = sqs.insert(sq.qid);
            if !is_new || !has_cq || !is_valid_queue(sq.qid, limit, sq.iova, sq.entries, cx) {
                return Err("a submission queue");
            }
            check_sq(sq, control)?;
        }
    }
    Ok(())
}

fn check_control(control: &SavedControl, cx: &Context) -> Result<(), &'static str> {
    let SavedControl { registers, features, events, granted, changed, shadow, .. } = control;
    let csts = Csts::from_bits(registers.csts);
    if csts.shst() == SHST_OCCURRING {
        return Err("a shutdown in progress");
    }
    // A controller that is shut down has no queues, so it does not count as enabled.
    let is_ready = csts.rdy() && csts.shst() == SHST_NORMAL;
    let is_enabled = Cc::from_bits(registers.cc).en();
    if control.resetting.is_some() || control.enabled != is_ready || control.enabled && !is_enabled
    {
        return Err("the registers");
    }
    let queues = cx.config.io_queues;
    if granted.0 > queues || granted.1 > queues {
        return Err("the number of I/O queues");
    }
    if shadow.is_some() && !cx.config.shadow_doorbells {
        return Err("the shadow doorbell pages");
    }
    if changed.len() > MAX_NAMESPACES || features.error_recovery.len() > MAX_NAMESPACES {
        return Err("the number of namespaces");
    }
    if control.uncorrectable.len() as u64 > MAX_BLOCKS {
        return Err("the uncorrectable blocks");
    }
    let lists = [events.outstanding.len(), events.pending.len(), events.unread.len()];
    if lists.into_iter().any(|len| len > MAX_EVENTS) {
        return Err("the asynchronous events");
    }
    let vectors = cx.shared.irqs.len();
    let disabled = &features.coalescing_disabled;
    if disabled.len() > vectors || disabled.iter().any(|vector| usize::from(*vector) >= vectors) {
        return Err("an interrupt vector");
    }
    Ok(())
}

fn check_admin(admin: &SavedAdminQueue, control: &SavedControl) -> Result<(), &'static str> {
    let SavedAdminQueue { sq, cq, in_flight, .. } = admin;
    let aqa = Aqa::from_bits(control.registers.aqa);
    let is_there = (sq.qid, cq.qid) == (0, 0)
        && (sq.iova, cq.iova) == (control.registers.asq, control.registers.acq)
        && sq.entries == u32::from(aqa.asqs()) + 1
        && cq.entries == u32::from(aqa.acqs()) + 1;
    if !is_there || !in_flight.is_empty() {
        return Err("the admin queue");
    }
    // The admin queue may have more staged completions than its completion queue has free entries,
    // so the list is limited separately.
    let waits = SavedCq { staged: Vec::new(), ..cq.clone() };
    if cq.staged.len() > MAX_EVENTS {
        return Err("the completions of the admin queue");
    }
    check_sq(sq, control)?;
    check_cq(&waits, control)
}

/// True if an I/O queue's identifier, size and address are valid.
fn is_valid_queue(qid: u16, limit: u16, iova: u64, entries: u32, cx: &Context) -> bool {
    let is_long = entries > cx.config.max_queue_entries;
    qid != 0 && qid <= limit && !is_long && iova.is_multiple_of(4096)
}

fn check_sq(sq: &SavedSq, control: &SavedControl) -> Result<(), &'static str> {
    let size = RingSize::new(sq.entries);
    let is_sound = size.is_some_and(|size| size.position(sq.head.into()).is_some());
    if is_sound && is_doorbell(&sq.tail, size, control) {
        Ok(())
    } else {
        Err("a submission queue")
    }
}

fn check_cq(cq: &SavedCq, control: &SavedControl) -> Result<(), &'static str> {
    let size = RingSize::new(cq.entries);
    let is_sound = size.is_some_and(|size| {
        let positions = (size.position(cq.tail.into()), size.position(cq.head.last.into()));
        let (Some(tail), Some(head)) = positions else { return false };
        let free = size.entries() - 1 - size.distance(head, tail);
        cq.staged.len() as u64 <= u64::from(free)
    });
    // Staged entries have no phase tag, because it is set when they are posted.
    let has_tag = cq.staged.iter().any(|(_, high)| high >> 48 & 1 != 0);
    if is_sound && !has_tag && is_doorbell(&cq.head, size, control) {
        Ok(())
    } else {
        Err("a completion queue")
    }
}

fn is_doorbell(doorbell: &SavedDoorbell, size: Option<RingSize>, control: &SavedControl) -> bool {
    let is_place = size.is_some_and(|size| size.position(doorbell.last.into()).is_some());
    is_place && (control.shadow.is_some() || !matches!(doorbell.truth, SavedTruth::Shadow))
}
