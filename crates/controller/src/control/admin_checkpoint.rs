//! Admin queue positions for checkpoints, as of the control plane's last action. Positions and
//! control plane state of a checkpoint thus belong together. The queue itself is owned by the admin
//! queue server, which may be further ahead.

use crate::queue::admin::AdminCompletion;
use crate::saved::{SavedAdminQueue, SavedCq, SavedDoorbell, SavedSq, SavedTruth};
use shadowbell_spec::regs::Aqa;
use shadowbell_spec::{Cqe, Sqe};
use shadowbell_state::Bytes;
use zerocopy::{IntoBytes, transmute};

/// Admin queue positions and commands for checkpoints.
#[derive(Debug)]
pub(super) struct AdminCheckpoint {
    /// Submission queue position after the last started command.
    head: u16,
    /// Commands in flight, without Asynchronous Event Requests, which are stored elsewhere.
    under_way: Vec<Sqe>,
    /// Completed commands that are not known to be posted.
    ended: Vec<AdminCompletion>,
    /// Completion queue position after the last post.
    tail: u16,
    phase: bool,
    /// Number of commands from the previous process that have to be replayed. They are no longer
    /// in the submission queue.
    replays: usize,
}

impl Default for AdminCheckpoint {
    fn default() -> Self {
        let (under_way, ended) = (Vec::new(), Vec::new());
        Self { head: 0, under_way, ended, tail: 0, phase: true, replays: 0 }
    }
}

impl AdminCheckpoint {
    /// Adds a started command of a queue with `entries` entries. If `stays` is true, the command
    /// is in flight until it [ends](Self::end).
    pub(super) fn begin(&mut self, sqe: &Sqe, entries: u32, stays: bool) {
        if self.replays != 0 {
            // A replayed command is already in the list.
            self.replays -= 1;
            if !stays {
                self.under_way.retain(|other| other.cid != sqe.cid);
            }
            return;
        }
        self.head = ((u32::from(self.head) + 1) % entries.max(1)) as u16;
        if stays {
            self.under_way.push(*sqe);
        }
    }

    /// True if the next command to start is a replay of a command of the previous process.
    pub(super) fn is_replayed(&self) -> bool {
        self.replays != 0
    }

    pub(super) fn end(&mut self, completion: AdminCompletion) {
        if let Some(at) = self.under_way.iter().position(|sqe| sqe.cid == completion.cid) {
            self.under_way.remove(at);
        }
        self.ended.push(completion);
    }

    /// Removes posted completions and stores the completion queue position after them.
    pub(super) fn posted(&mut self, (tail, phase): (u16, bool), cids: &[u16]) {
        (self.tail, self.phase) = (tail, phase);
        for cid in cids {
            if let Some(at) = self.ended.iter().position(|ended| ended.cid == *cid) {
                self.ended.remove(at);
            }
        }
    }

    pub(super) fn save(&self, (aqa, asq, acq): (Aqa, u64, u64), used: bool) -> SavedAdminQueue {
        // Doorbell values are in the journal.
        let doorbell = SavedDoorbell { last: 0, truth: SavedTruth::Register, snapshot: None };
        let entries = |zero_based: u16| u32::from(zero_based) + 1;
        let staged = |completion: &AdminCompletion| {
            let &AdminCompletion { cid, status, dw0, .. } = completion;
            let [low, high]: [u64; 2] = transmute!(Cqe::new(cid, 0, self.head, status, dw0));
            (low, high)
        };
        SavedAdminQueue {
            sq: SavedSq {
                qid: 0,
                iova: asq,
                entries: entries(aqa.asqs()),
                cqid: 0,
                head: self.head,
                tail: doorbell,
            },
            cq: SavedCq {
                qid: 0,
                iova: acq,
                entries: entries(aqa.acqs()),
                vector: Some(0),
                tail: self.tail,
                phase: self.phase,
                head: doorbell,
                staged: self.ended.iter().map(staged).collect(),
            },
            used,
            lacks_cq: !used,
            under_way: self.under_way.iter().map(|sqe| Bytes(sqe.as_bytes().to_vec())).collect(),
        }
    }

    /// Recovers the state of another process. That process may have posted completions after its
    /// last checkpoint, so position and remaining completions (`to_post`) come from the queue.
    pub(super) fn recover(
        saved: &SavedAdminQueue,
        ((tail, phase), to_post): ((u16, bool), impl Iterator<Item = u16>),
    ) -> Self {
        use zerocopy::FromBytes;
        let under_way: Vec<_> = saved
            .under_way
            .iter()
            .filter_map(|bytes| Sqe::read_from_bytes(&bytes.0).ok())
            .collect();
        let ended = |&(low, high): &(u64, u64)| {
            let cqe: Cqe = transmute!([low, high]);
            AdminCompletion { cid: cqe.cid, status: cqe.status(), dw0: cqe.dw0, placed: false }
        };
        // Completions are posted in order, so the remaining ones are the last.
        let posted = saved.cq.staged.len().saturating_sub(to_post.count());
        Self {
            head: saved.sq.head,
            replays: under_way.len(),
            under_way,
            ended: saved.cq.staged.iter().skip(posted).map(ended).collect(),
            tail,
            phase,
        }
    }
}
