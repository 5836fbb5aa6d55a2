//! Get LBA Status: logical blocks of a namespace that are allocated or marked as uncorrectable.
//! NVM 1.1, 4.2.1.
//!
//! Only the disk knows its allocated blocks, and a query of the disk may wait for storage. So the
//! command is not executed under the control plane's lock, as other admin commands are. It is not
//! executed on an I/O thread either. The command has its own turns on the control thread, where a
//! blocked turn delays no other controller (`control_thread`). Extents per turn, extents per
//! command and commands per controller are limited.

use crate::control_thread::{RunState, Turn, TurnTask};
use crate::notice::{ControlHandle, Latch, Notice, Operation};
use crate::uncorrectable::Uncorrectable;
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use shadowbell_disk::{Disk, Extent};
use shadowbell_spec::Sqe;
use shadowbell_spec::lba_status::{LbaStatusDescriptor, LbaStatusList};
use shadowbell_spec::status::Status;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Maximum number of Get LBA Status commands in flight per controller. If the host submits one
/// more, it and all later admin commands wait.
const MAX_IN_FLIGHT: usize = 8;
/// Maximum number of descriptors per command: the number that fits into a page.
const MAX_DESCRIPTORS: usize =
    (4096 - size_of::<LbaStatusList>()) / size_of::<LbaStatusDescriptor>();
/// Maximum number of disk extents per command. It is more than twice the number of descriptors,
/// because allocated and unallocated extents alternate and some disks report an extent in pieces.
const COMMAND_EXTENTS: u32 = 1024;
/// Maximum number of extents per turn.
const TURN_EXTENTS: u32 = 32;
/// Maximum number of blocks per descriptor: NLB has 32 bits, 0's based.
const DESCRIPTOR_BLOCKS: u64 = 1 << 32;

/// Parameters of a Get LBA Status command.
#[derive(Clone, Debug)]
pub(crate) struct Question {
    /// Submission queue entry.
    pub(crate) sqe: Sqe,
    /// Number of controller resets before the command.
    pub(crate) generation: u64,
    pub(crate) disk: Arc<dyn Disk>,
    /// Size of a logical block as a power of two.
    pub(crate) block_shift: u32,
    /// First block.
    pub(crate) slba: u64,
    /// Block after the last block.
    pub(crate) end: u64,
    /// Number of descriptors that fit into the host's buffer.
    pub(crate) room: usize,
}

/// LBA Status Descriptor List of the blocks in `[slba, end)` that are marked as uncorrectable, up
/// to the number of descriptors that fit.
pub(crate) fn uncorrectable(marks: &Uncorrectable, nsid: u32, question: &Question) -> Vec<u8> {
    let all: Vec<_> = marks.of(nsid, question.slba, question.end).collect();
    let reported = &all[..all.len().min(question.room).min(MAX_DESCRIPTORS)];
    let is_cut = reported.len() < all.len();
    list(reported, is_cut, LbaStatusDescriptor::WRITE_UNCORRECTABLE)
}

/// LBA Status Descriptor List of the block ranges in `found`, all with the given status.
fn list(found: &[(u64, u64)], is_cut: bool, status: u8) -> Vec<u8> {
    let cmpc = if is_cut { LbaStatusList::INCOMPLETE } else { LbaStatusList::COMPLETE };
    let nlsd = found.len() as u32;
    let mut bytes = LbaStatusList { nlsd, cmpc, ..LbaStatusList::default() }.as_bytes().to_vec();
    for (first, after) in found {
        let nlb0 = (after - first - 1) as u32;
        let entry = LbaStatusDescriptor { dslba: *first, nlb0, status, ..Default::default() };
        bytes.extend_from_slice(entry.as_bytes());
    }
    bytes
}

/// Get LBA Status command in flight.
#[derive(Debug)]
struct Search {
    question: Question,
    /// Allocated blocks in ascending order, as first block and block after the last.
    found: Vec<(u64, u64)>,
    /// Offset in bytes of the next extent.
    at: u64,
    /// Number of extents that were read so far.
    seen: u32,
    /// True if the list is incomplete.
    is_cut: bool,
    is_finished: bool,
    /// Latches that are dropped when the command no longer uses the disk.
    latches: Vec<Latch>,
}

impl Search {
    fn new(question: Question) -> Self {
        let at = question.slba << question.block_shift;
        let is_finished = question.slba >= question.end;
        let (found, latches) = (Vec::new(), Vec::new());
        Self { question, found, at, seen: 0, is_cut: false, is_finished, latches }
    }

    /// Reads the next extents of the disk.
    fn step(&mut self) {
        let disk = Arc::clone(&self.question.disk);
        let end = self.question.end << self.question.block_shift;
        let mut left = TURN_EXTENTS;
        disk.extents(self.at, end.saturating_sub(self.at), &mut |extent| {
            if self.is_finished || left == 0 {
                return false;
            }
            left -= 1;
            self.take(extent, end);
            !self.is_finished && left != 0
        });
        if left == TURN_EXTENTS {
            // A disk that reports no extents counts as fully allocated.
            self.take(Extent::data(end.saturating_sub(self.at)), end);
        }
    }

    /// Adds the next extent to the list.
    fn take(&mut self, extent: Extent, end: u64) {
        let until = self.at.saturating_add(extent.len).min(end);
        if extent.allocated && !self.add(self.at, until) {
            (self.is_cut, self.is_finished) = (true, true);
            return;
        }
        self.at = until;
        self.seen += 1;
        if self.at >= end {
            self.is_finished = true;
        } else if self.seen >= COMMAND_EXTENTS {
            (self.is_cut, self.is_finished) = (true, true);
            if self.found.is_empty() {
                // For an incomplete list, the host continues behind the last descriptor. After an
                // empty list it would start again at the same block. So one block is reported even
                // if it is not allocated.
                self.add(self.at, self.at + 1);
            }
        }
    }

    /// Adds all blocks that overlap the allocated bytes `[from, to)`. Returns false if they do
    /// not fit into the list.
    fn add(&mut self, from: u64, to: u64) -> bool {
        let shift = self.question.block_shift;
        let (mut first, after) = (from >> shift, to.div_ceil(1 << shift));
        let room = self.question.room.min(MAX_DESCRIPTORS);
        // If two extents meet in the middle of a block, the block is listed once.
        first = first.max(self.found.last().map_or(0, |last| last.1));
        while first < after {
            let count = self.found.len();
            if let Some(last) = self.found.last_mut()
                && first <= last.1
                && last.1 - last.0 < DESCRIPTOR_BLOCKS
            {
                last.1 = after.min(last.0 + DESCRIPTOR_BLOCKS).max(last.1);
                first = last.1;
            } else if count < room {
                let until = after.min(first + DESCRIPTOR_BLOCKS);
                self.found.push((first, until));
                first = until;
            } else {
                return false;
            }
        }
        true
    }

    /// LBA Status Descriptor List of the blocks found.
    fn list(&self) -> Vec<u8> {
        list(&self.found, self.is_cut, 0)
    }
}

/// Submission queue entry of an ended command, and the data for its host.
pub(crate) type Ended = (Sqe, Vec<u8>);

#[derive(Default)]
struct State {
    waiting: VecDeque<Search>,
    /// NSID of the command whose turn is running, and latches that are dropped at the end of that
    /// command. During its turn, the command is not in `waiting`.
    running: Option<(u32, Vec<Latch>)>,
    ended: Vec<Ended>,
    /// Number of calls of [`LbaStatusServer::drop_all`]. If the number has changed at the end of a
    /// turn, a reset has begun during the turn.
    resets: u64,
}

/// Get LBA Status commands of a controller that are in flight.
pub(crate) struct LbaStatusServer {
    control: ControlHandle,
    run_state: RunState,
    state: Mutex<State>,
    /// CPU time in nanoseconds that is not yet charged to the controller's budget.
    taken: AtomicU64,
}

impl LbaStatusServer {
    pub(crate) fn new(control: ControlHandle) -> Self {
        Self {
            control,
            run_state: RunState::default(),
            state: Mutex::default(),
            taken: AtomicU64::new(0),
        }
    }

    /// Starts a command. The caller must have checked [`has_room`](Self::has_room). Returns true if
    /// the caller has to schedule a turn.
    pub(crate) fn begin(&self, question: Question) -> bool {
        self.state.lock().waiting.push_back(Search::new(question));
        self.run_state.request()
    }

    /// True if another command may be started.
    pub(crate) fn has_room(&self) -> bool {
        let state = self.state.lock();
        let running = usize::from(state.running.is_some());
        state.waiting.len() + running + state.ended.len() < MAX_IN_FLIGHT
    }

    /// True if no command is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.waiting.is_empty() && state.running.is_none() && state.ended.is_empty()
    }

    /// Takes the result of a command.
    pub(crate) fn take(&self, cid: u16) -> Option<Ended> {
        let mut state = self.state.lock();
        let at = state.ended.iter().position(|(sqe, _)| sqe.cid == cid)?;
        Some(state.ended.swap_remove(at))
    }

    /// Returns and resets the CPU time that is not yet charged.
    pub(crate) fn take_used(&self) -> Duration {
        Duration::from_nanos(self.taken.swap(0, Relaxed))
    }

    /// Ends all commands on namespace `nsid`, because its disk was replaced or removed. `latch` is
    /// dropped when no command uses the old disk.
    pub(crate) fn wait_for(&self, nsid: u32, latch: &Latch) {
        let mut state = self.state.lock();
        for search in state.waiting.iter_mut().filter(|search| search.question.sqe.nsid == nsid) {
            search.latches.push(latch.clone());
            // The command ends with an incomplete list, because further extents would describe the
            // old disk.
            (search.is_cut, search.is_finished) = (true, true);
        }
        if let Some((_, latches)) = state.running.as_mut().filter(|running| running.0 == nsid) {
            latches.push(latch.clone());
        }
    }

    /// Drops all commands, for a reset. The caller must hold no lock when it drops the returned
    /// latches.
    pub(crate) fn drop_all(&self) -> Vec<Latch> {
        let mut state = self.state.lock();
        state.resets += 1;
        state.ended.clear();
        let waiting = std::mem::take(&mut state.waiting);
        waiting.into_iter().flat_map(|search| search.latches).collect()
    }
}

impl TurnTask for LbaStatusServer {
    fn run_state(&self) -> &RunState {
        &self.run_state
    }

    fn turn(&self) -> Turn {
        let mut state = self.state.lock();
        let Some(mut search) = state.waiting.pop_front() else { return Turn::Idle };
        let resets = state.resets;
        state.running = Some((search.question.sqe.nsid, Vec::new()));
        drop(state);
        if !search.is_finished {
            let began = processor_time();
            search.step();
            let used = processor_time().saturating_sub(began);
            self.taken.fetch_add(used.as_nanos() as u64, Relaxed);
        }
        let mut state = self.state.lock();
        let waits = state.running.take().map(|(_, latches)| latches).unwrap_or_default();
        if !waits.is_empty() {
            (search.is_cut, search.is_finished) = (true, true);
        }
        search.latches.extend(waits);
        let is_wanted = state.resets == resets;
        if is_wanted && !search.is_finished {
            state.waiting.push_back(search);
            return Turn::Requeue;
        }
        if is_wanted {
            state.ended.push((search.question.sqe, search.list()));
        }
        let turn = if state.waiting.is_empty() { Turn::Idle } else { Turn::Requeue };
        drop(state);
        let (generation, cid) = (search.question.generation, search.question.sqe.cid);
        // The disk is dropped before the latches, because their drop reports that the disk is
        // unused.
        let latches = std::mem::take(&mut search.latches);
        drop(search);
        drop(latches);
        if is_wanted {
            let operation = Operation::LbaStatus { cid };
            self.control.notify(Notice::Ended { generation, operation, status: Status::SUCCESS });
        }
        turn
    }
}

fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}
