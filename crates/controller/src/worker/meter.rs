//! How long commands take, measured behind the path that serves them, as the trace records them:
//! entries are read again from the queues, and the clock is read once for a batch.

use crate::config::MAX_NAMESPACES;
use crate::latency_stats::{CommandKind, LatencyCounters};
use crate::shared::ControllerShared;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::{Cqe, Sqe};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Commands whose place in the table is the same, of which none is forgotten.
const WAYS: usize = 4;
/// Places: for more commands than are under way, so that hardly five ever have the same.
const SETS: usize = 8192;
/// Namespaces whose counters are at hand. With more, they are looked up anew.
const AT_HAND: usize = 4096;

/// What measures the commands of one worker.
pub(super) struct Meter {
    /// Those that were seen and have not ended, by what names them.
    seen: Box<[[Seen; WAYS]]>,
    /// Where to count, by controller and namespace.
    counters: HashMap<(u32, u32), Arc<LatencyCounters>>,
    began: Instant,
}

/// A command that was seen.
#[derive(Clone, Copy)]
struct Seen {
    /// Controller, submission queue and command identifier.
    key: u64,
    /// When, in nanoseconds since the meter began; 0 for none.
    at: u64,
    nsid: u32,
    blocks: u32,
    kind: CommandKind,
}

const NONE: Seen = Seen { key: 0, at: 0, nsid: 0, blocks: 0, kind: CommandKind::Other };

fn key_of(controller: u32, sqid: u16, cid: u16) -> u64 {
    u64::from(controller) << 32 | u64::from(sqid) << 16 | u64::from(cid)
}

/// What the command does, and to how many blocks.
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

    /// The time, which is not 0.
    pub(super) fn now(&self) -> u64 {
        (self.began.elapsed().as_nanos() as u64).max(1)
    }

    fn set(&mut self, key: u64) -> Option<&mut [Seen; WAYS]> {
        // Multiplied by a number without a pattern, whose upper bits depend on all of the key.
        let at = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % SETS;
        self.seen.get_mut(at)
    }

    /// A command is in its queue since `now`.
    pub(super) fn sees(&mut self, controller: u32, sqid: u16, sqe: &Sqe, now: u64) {
        // Other numbers are none, or all: a guest can not have counters made with them.
        if sqe.nsid == 0 || sqe.nsid > MAX_NAMESPACES as u32 {
            return;
        }
        let key = key_of(controller, sqid, sqe.cid);
        let (kind, blocks) = kind_of(sqe);
        let Some(set) = self.set(key) else { return };
        // What has the same name has ended without a word; otherwise the oldest gives way, which
        // most likely has, too.
        let same = set.iter().position(|seen| seen.at != 0 && seen.key == key);
        let oldest = || (0..WAYS).min_by_key(|way| set[*way].at).unwrap_or(0);
        let way = same.unwrap_or_else(oldest);
        set[way] = Seen { key, at: now, nsid: sqe.nsid, blocks, kind };
    }

    /// A completion is posted at `now`.
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
