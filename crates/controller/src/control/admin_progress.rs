//! How far the admin queue is, as what the control plane has done says: what is recorded of the two
//! belongs together. The queue itself is with whoever serves it, who may be further.

use crate::queue::admin::AdminCompletion;
use crate::saved::{SavedAdminQueue, SavedCq, SavedDoorbell, SavedSq, SavedTruth};
use shadowbell_spec::regs::Aqa;
use shadowbell_spec::{Cqe, Sqe};
use shadowbell_state::Bytes;
use zerocopy::{IntoBytes, transmute};

/// How far the admin queue is.
#[derive(Debug)]
pub(super) struct AdminProgress {
    /// Where the command after the last that was begun is.
    head: u16,
    /// Begun, and not complete; and not kept elsewhere, as Asynchronous Event Requests are.
    under_way: Vec<Sqe>,
    /// Complete, and not known to be posted.
    ended: Vec<AdminCompletion>,
    /// Where the completion queue was when something was posted last.
    tail: u16,
    phase: bool,
    /// Commands of a process before that are begun again: they are in the queue no more.
    replays: usize,
}

impl Default for AdminProgress {
    fn default() -> Self {
        let (under_way, ended) = (Vec::new(), Vec::new());
        Self { head: 0, under_way, ended, tail: 0, phase: true, replays: 0 }
    }
}

impl AdminProgress {
    /// A command was begun, of a queue of `entries`. `stays`: it is under way until it
    /// [ends](Self::end).
    pub(super) fn begin(&mut self, sqe: &Sqe, entries: u32, stays: bool) {
        if self.replays != 0 {
            // It is among those under way already.
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

    /// Whether the command that is about to be begun was begun by a process before.
    pub(super) fn is_replayed(&self) -> bool {
        self.replays != 0
    }

    pub(super) fn end(&mut self, completion: AdminCompletion) {
        if let Some(at) = self.under_way.iter().position(|sqe| sqe.cid == completion.cid) {
            self.under_way.remove(at);
        }
        self.ended.push(completion);
    }

    /// The completions of these commands are posted, and the queue is there.
    pub(super) fn posted(&mut self, (tail, phase): (u16, bool), cids: &[u16]) {
        (self.tail, self.phase) = (tail, phase);
        for cid in cids {
            if let Some(at) = self.ended.iter().position(|ended| ended.cid == *cid) {
                self.ended.remove(at);
            }
        }
    }

    pub(super) fn save(&self, (aqa, asq, acq): (Aqa, u64, u64), used: bool) -> SavedAdminQueue {
        // What is known of the doorbells is in the journal.
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

    /// As it was in another process. That may have posted more than it had written down: what is
    /// `to_post` still, and where, is what the queue says.
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
        // Posted in their order: these are the last.
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
