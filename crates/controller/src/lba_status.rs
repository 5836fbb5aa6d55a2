//! Get LBA Status: which logical blocks of a namespace are allocated, or marked as uncorrectable.
//! NVM 1.1, 4.2.1.
//!
//! What is allocated only the disk knows, and a disk may wait for its storage. So the command is
//! not carried out where admin commands are executed, under a lock, nor by a worker. It has turns
//! of its own on the control thread, where whoever takes long is left alone with a thread
//! (`control_thread`). A turn looks at some extents, a command at some more, and a controller has
//! so many commands under way.

use crate::control_thread::{RunState, TakesTurns, Turn};
use crate::latch::Latch;
use crate::notice::{ControlHandle, Notice, Operation};
use crate::uncorrectable::Uncorrectable;
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use shadowbell_backend::{Disk, Extent};
use shadowbell_spec::Sqe;
use shadowbell_spec::lba_status::{LbaStatusDescriptor, LbaStatusList};
use shadowbell_spec::status::Status;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Commands of a controller that may be under way. The next one waits, and what follows it.
pub(crate) const MAX_UNDER_WAY: usize = 8;
/// Descriptors that one command returns, at most: as many as a page has room for.
pub(crate) const MAX_DESCRIPTORS: usize =
    (4096 - size_of::<LbaStatusList>()) / size_of::<LbaStatusDescriptor>();
/// Extents of the disk that one command looks at, at most: twice as many, and those that a disk
/// tells in pieces.
const COMMAND_EXTENTS: u32 = 1024;
/// Extents that one turn looks at.
const TURN_EXTENTS: u32 = 32;
/// Blocks of one descriptor: NLB has 32 bits, 0's based.
const DESCRIPTOR_BLOCKS: u64 = 1 << 32;

/// What is to be found out.
#[derive(Clone, Debug)]
pub(crate) struct Question {
    /// The command.
    pub(crate) sqe: Sqe,
    /// Resets that there have been.
    pub(crate) generation: u64,
    pub(crate) disk: Arc<dyn Disk>,
    /// The size of a logical block as a power of two.
    pub(crate) block_shift: u32,
    /// First block.
    pub(crate) slba: u64,
    /// The block after the last.
    pub(crate) end: u64,
    /// How many descriptors the host has room for.
    pub(crate) room: usize,
}

/// The list of the blocks in `[slba, end)` that are marked as uncorrectable, of which there is room
/// for so many descriptors.
pub(crate) fn uncorrectable(marks: &Uncorrectable, nsid: u32, question: &Question) -> Vec<u8> {
    let all: Vec<_> = marks.of(nsid, question.slba, question.end).collect();
    let told = &all[..all.len().min(question.room).min(MAX_DESCRIPTORS)];
    let is_cut = told.len() < all.len();
    list(told, is_cut, LbaStatusDescriptor::WRITE_UNCORRECTABLE)
}

/// An LBA Status Descriptor List of these blocks, which have this status.
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

/// A command under way.
#[derive(Debug)]
struct Search {
    question: Question,
    /// Allocated blocks, in ascending order: first, and the one after the last.
    found: Vec<(u64, u64)>,
    /// The next byte to ask about.
    at: u64,
    /// Extents that were looked at.
    seen: u32,
    /// There is something that is not told of.
    is_cut: bool,
    is_over: bool,
    /// Let go of when the disk is not used any more.
    latches: Vec<Latch>,
}

impl Search {
    fn new(question: Question) -> Self {
        let at = question.slba << question.block_shift;
        let is_over = question.slba >= question.end;
        let (found, latches) = (Vec::new(), Vec::new());
        Self { question, found, at, seen: 0, is_cut: false, is_over, latches }
    }

    /// Looks at the next extents.
    fn step(&mut self) {
        let disk = Arc::clone(&self.question.disk);
        let end = self.question.end << self.question.block_shift;
        let mut left = TURN_EXTENTS;
        disk.extents(self.at, end.saturating_sub(self.at), &mut |extent| {
            if self.is_over || left == 0 {
                return false;
            }
            left -= 1;
            self.take(extent, end);
            !self.is_over && left != 0
        });
        if left == TURN_EXTENTS {
            // A disk that tells nothing knows nothing.
            self.take(Extent::data(end.saturating_sub(self.at)), end);
        }
    }

    /// Takes what comes next.
    fn take(&mut self, extent: Extent, end: u64) {
        let until = self.at.saturating_add(extent.len).min(end);
        if extent.allocated && !self.add(self.at, until) {
            (self.is_cut, self.is_over) = (true, true);
            return;
        }
        self.at = until;
        self.seen += 1;
        if self.at >= end {
            self.is_over = true;
        } else if self.seen >= COMMAND_EXTENTS {
            (self.is_cut, self.is_over) = (true, true);
            if self.found.is_empty() {
                // A host knows how far a list goes by its last descriptor. So that it can go on
                // behind this, there is one, of a block that may hold data or not.
                self.add(self.at, self.at + 1);
            }
        }
    }

    /// Allocated bytes, and so all blocks that have some of them. Whether there is room for them.
    fn add(&mut self, from: u64, to: u64) -> bool {
        let shift = self.question.block_shift;
        let (mut first, after) = (from >> shift, to.div_ceil(1 << shift));
        let room = self.question.room.min(MAX_DESCRIPTORS);
        // Two extents may meet in the middle of a block.
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

    /// The LBA Status Descriptor List.
    fn list(&self) -> Vec<u8> {
        list(&self.found, self.is_cut, 0)
    }
}

/// The end of a command: what it was, and what its host gets.
pub(crate) type Ended = (Sqe, Vec<u8>);

#[derive(Default)]
struct State {
    waiting: VecDeque<Search>,
    /// The one that has its turn is not there: its namespace, and who waits for its end.
    running: Option<(u32, Vec<Latch>)>,
    ended: Vec<Ended>,
    /// How often all of them were forgotten.
    forgotten: u64,
}

/// The Get LBA Status commands of a controller that are under way.
pub(crate) struct LbaStatusServer {
    control: ControlHandle,
    run_state: RunState,
    state: Mutex<State>,
    /// Processor time that was taken and not accounted for, in nanoseconds.
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

    /// One more command, of which there is [room for](Self::has_room). Whether to ask for a turn.
    pub(crate) fn begin(&self, question: Question) -> bool {
        self.state.lock().waiting.push_back(Search::new(question));
        self.run_state.request()
    }

    /// Whether one more may be under way.
    pub(crate) fn has_room(&self) -> bool {
        let state = self.state.lock();
        let running = usize::from(state.running.is_some());
        state.waiting.len() + running + state.ended.len() < MAX_UNDER_WAY
    }

    /// Whether none is under way.
    pub(crate) fn is_quiet(&self) -> bool {
        let state = self.state.lock();
        state.waiting.is_empty() && state.running.is_none() && state.ended.is_empty()
    }

    /// What has come of a command.
    pub(crate) fn take(&self, cid: u16) -> Option<Ended> {
        let mut state = self.state.lock();
        let at = state.ended.iter().position(|(sqe, _)| sqe.cid == cid)?;
        Some(state.ended.swap_remove(at))
    }

    /// The processor time that was taken since this was last asked.
    pub(crate) fn take_used(&self) -> Duration {
        Duration::from_nanos(self.taken.swap(0, Relaxed))
    }

    /// Another disk is behind this NSID, or none: the latch is let go of when nothing uses the one
    /// before.
    pub(crate) fn wait_for(&self, nsid: u32, latch: &Latch) {
        let mut state = self.state.lock();
        for search in state.waiting.iter_mut().filter(|search| search.question.sqe.nsid == nsid) {
            search.latches.push(latch.clone());
            // The answer would be about what is not there any more.
            (search.is_cut, search.is_over) = (true, true);
        }
        if let Some((_, latches)) = state.running.as_mut().filter(|running| running.0 == nsid) {
            latches.push(latch.clone());
        }
    }

    /// A reset: nobody wants to know any more. What is returned is to be dropped without a lock.
    pub(crate) fn forget(&self) -> Vec<Latch> {
        let mut state = self.state.lock();
        state.forgotten += 1;
        state.ended.clear();
        let waiting = std::mem::take(&mut state.waiting);
        waiting.into_iter().flat_map(|search| search.latches).collect()
    }
}

impl TakesTurns for LbaStatusServer {
    fn run_state(&self) -> &RunState {
        &self.run_state
    }

    fn turn(&self) -> Turn {
        let mut state = self.state.lock();
        let Some(mut search) = state.waiting.pop_front() else { return Turn::Idle };
        let forgotten = state.forgotten;
        state.running = Some((search.question.sqe.nsid, Vec::new()));
        drop(state);
        if !search.is_over {
            let began = processor_time();
            search.step();
            let used = processor_time().saturating_sub(began);
            self.taken.fetch_add(used.as_nanos() as u64, Relaxed);
        }
        let mut state = self.state.lock();
        let waits = state.running.take().map(|(_, latches)| latches).unwrap_or_default();
        if !waits.is_empty() {
            (search.is_cut, search.is_over) = (true, true);
        }
        search.latches.extend(waits);
        let is_wanted = state.forgotten == forgotten;
        if is_wanted && !search.is_over {
            state.waiting.push_back(search);
            return Turn::Again;
        }
        if is_wanted {
            state.ended.push((search.question.sqe, search.list()));
        }
        let turn = if state.waiting.is_empty() { Turn::Idle } else { Turn::Again };
        drop(state);
        let (generation, cid) = (search.question.generation, search.question.sqe.cid);
        // The disk first, and then who waits for that.
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
