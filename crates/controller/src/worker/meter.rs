//! Command latency measurement, outside of the I/O path, at the events that the trace records:
//! entries are read again from the queues, and the clock is read once per batch.

use crate::config::MAX_NAMESPACES;
use crate::latency_stats::{CommandKind, LatencyCounters};
use crate::shared::ControllerShared;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::{Cqe, Sqe};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Associativity of the table: commands per set.
const WAYS: usize = 4;
/// Number of sets: the table holds more commands than are in flight, so overflows are rare.
const SETS: usize = 8192;
/// Maximum number of cached namespace counters; beyond that, the cache is cleared.
const AT_HAND: usize = 4096;

/// Command latency measurement of one I/O thread.
pub(super) struct Meter {
    /// Commands in flight, in a set-associative table by key.
    seen: Box<[[Seen; WAYS]]>,
    /// Counters by controller and namespace.
    counters: HashMap<(u32, u32), Arc<LatencyCounters>>,
    began: Instant,
}

/// Command in flight.
#[derive(Clone, Copy)]
struct Seen {
    /// Controller, submission queue and command identifier.
    key: u64,
    /// Time of the submission in nanoseconds since the meter began; 0 for an empty slot.
    at: u64,
    nsid: u32,
    blocks: u32,
    kind: CommandKind,
}

const NONE: Seen = Seen { key: 0, at: 0, nsid: 0, blocks: 0, kind: CommandKind::Other };

fn key_of(controller: u32, sqid: u16, cid: u16) -> u64 {
    u64::from(controller) << 32 | u64::from(sqid) << 16 | u64::from(cid)
}

/// Kind of a command, and its number of blocks.
fn kind_of(sqe: &Sqe) -> (CommandKind, u32) {
    let blocks = (sqe.cdw12 & 0xffff) + 1;
    match NvmOpcode::try_from(sqe.opcode) {
        Ok(NvmOpcode::Read | NvmOpcode::Compare) => (CommandKind::Read, blocks),
        Ok(NvmOpcode::Write) => (CommandKind::Write, blocks),
        _ => (CommandKind::Other, 0),
    }
}

impl Meter {
    pub(super) fn new() -> Self {
        let seen = vec![[NONE; WAYS]; SETS].into_boxed_slice();
        Self { seen, counters: HashMap::new(), began: Instant::now() }
    }

    /// Current time in nanoseconds, never 0.
    pub(super) fn now(&self) -> u64 {
        (self.began.elapsed().as_nanos() as u64).max(1)
    }

    fn set(&mut self, key: u64) -> Option<&mut [Seen; WAYS]> {
        // Multiplicative hash: the upper bits depend on the whole key.
        let at = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % SETS;
        self.seen.get_mut(at)
    }

    /// Records a command that was found in its queue at `now`.
    pub(super) fn sees(&mut self, controller: u32, sqid: u16, sqe: &Sqe, now: u64) {
        // Invalid and broadcast NSIDs are ignored, so a guest cannot create counters for them.
        if sqe.nsid == 0 || sqe.nsid > MAX_NAMESPACES as u32 {
            return;
        }
        let key = key_of(controller, sqid, sqe.cid);
        let (kind, blocks) = kind_of(sqe);
        let Some(set) = self.set(key) else { return };
        // An entry of the same key ended without a completion. Otherwise the oldest entry of the
        // set is replaced, which most likely has ended in the same way.
        let same = set.iter().position(|seen| seen.at != 0 && seen.key == key);
        let oldest = || (0..WAYS).min_by_key(|way| set[*way].at).unwrap_or(0);
        let way = same.unwrap_or_else(oldest);
        set[way] = Seen { key, at: now, nsid: sqe.nsid, blocks, kind };
    }

    /// Records a completion posted at `now`.
    pub(super) fn posted(&mut self, shared: &ControllerShared, cqe: &Cqe, now: u64) {
        let key = key_of(shared.id, cqe.sq_id, cqe.cid);
        let Some(set) = self.set(key) else { return };
        let Some(seen) = set.iter_mut().find(|seen| seen.at != 0 && seen.key == key) else {
            return;
        };
        let Seen { at, nsid, blocks, kind, .. } = std::mem::replace(seen, NONE);
        if self.counters.len() >= AT_HAND {
            self.counters.clear();
        }
        let counters = self.counters.entry((shared.id, nsid));
        let counters = counters.or_insert_with(|| shared.measured(nsid));
        counters.count(kind, blocks, !cqe.status().is_success(), now.saturating_sub(at));
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("counters", &self.counters.len()).finish_non_exhaustive()
    }
}
