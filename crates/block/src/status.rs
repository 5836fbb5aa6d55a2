//! Which bytes of a disk are allocated.
//!
//! The controller is asked by an admin command, for whose end somebody has to wait. Whoever drives a
//! queue must not. So a thread of its own does, which is there while there are questions.

use parking_lot::{Condvar, Mutex};
use shadowbell_driver::{Admin, AllocatedBlocks, CommandError};
use shadowbell_spec::Status;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;

/// How long the thread stays without a question.
const IDLE_TIMEOUT: Duration = Duration::from_millis(200);

/// Which blocks of a range are allocated, and how many ranges of them are to be told.
struct Question {
    support: Arc<Support>,
    admin: Admin,
    nsid: u32,
    blocks: Range<u64>,
    most: usize,
    answer: Arc<Mutex<Answer>>,
}

#[derive(Default)]
struct Answer {
    /// Nothing in it: nothing is known.
    found: Option<Option<AllocatedBlocks>>,
    waker: Option<Waker>,
}

#[derive(Default)]
struct Work {
    questions: VecDeque<Question>,
    has_thread: bool,
}

/// The thread, and what it has to do.
#[derive(Default)]
struct Questions {
    work: Mutex<Work>,
    came: Condvar,
}

/// What is known of the controller.
struct Support {
    /// It was found out whether it has the command.
    is_known: AtomicBool,
    /// It may have it, and has not refused it.
    is_possible: AtomicBool,
}

/// The way to find out which blocks of a disk are allocated.
pub(crate) struct BlockStatus {
    questions: Arc<Questions>,
    support: Arc<Support>,
}

impl BlockStatus {
    /// `reads_zeroes`: blocks that are not allocated do.
    pub(crate) fn new(reads_zeroes: bool) -> Self {
        let support = Support {
            is_known: AtomicBool::new(false),
            is_possible: AtomicBool::new(reads_zeroes),
        };
        Self { questions: Arc::default(), support: Arc::new(support) }
    }

    /// Whether there may be something to find out.
    pub(crate) fn is_possible(&self) -> bool {
        self.support.is_possible.load(Ordering::Relaxed)
    }

    /// Which of these blocks of a namespace are allocated, at most `most` ranges of them; nothing
    /// if that is not known.
    pub(crate) async fn ask(
        &self,
        (admin, nsid): (Admin, u32),
        blocks: Range<u64>,
        most: usize,
    ) -> Option<AllocatedBlocks> {
        let answer = Arc::<Mutex<Answer>>::default();
        self.questions.ask(Question {
            support: Arc::clone(&self.support),
            admin,
            nsid,
            blocks,
            most,
            answer: Arc::clone(&answer),
        });
        poll_fn(|context| {
            let mut answer = answer.lock();
            match answer.found.take() {
                Some(found) => Poll::Ready(found),
                None => {
                    answer.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Support {
    fn find(
        &self,
        admin: &Admin,
        nsid: u32,
        blocks: Range<u64>,
        most: usize,
    ) -> Result<Option<AllocatedBlocks>, CommandError> {
        if !self.is_known.load(Ordering::Relaxed) {
            let is_there = admin.reports_allocated()?;
            self.is_possible.fetch_and(is_there, Ordering::Relaxed);
            self.is_known.store(true, Ordering::Relaxed);
        }
        if !self.is_possible.load(Ordering::Relaxed) {
            return Ok(None);
        }
        admin.allocated_blocks(nsid, blocks, most).map(Some)
    }

    /// As [`find`](Self::find). What can not be found out is not known.
    fn find_or_not(&self, question: &Question) -> Option<AllocatedBlocks> {
        let Question { admin, nsid, blocks, most, .. } = question;
        match self.find(admin, *nsid, blocks.clone(), *most) {
            Ok(found) => found,
            Err(error) => {
                let refused = [Status::INVALID_OPCODE, Status::INVALID_FIELD];
                if error.status().is_some_and(|status| refused.contains(&status.code())) {
                    self.is_possible.store(false, Ordering::Relaxed);
                }
                tracing::debug!("which blocks are allocated is not known: {error}");
                None
            }
        }
    }
}

impl Questions {
    fn ask(self: &Arc<Self>, question: Question) {
        let mut work = self.work.lock();
        work.questions.push_back(question);
        if work.has_thread {
            self.came.notify_one();
            return;
        }
        let ours = Arc::clone(self);
        let thread = std::thread::Builder::new().name("sb-extents".into());
        work.has_thread = thread.spawn(move || ours.run()).is_ok();
        if !work.has_thread {
            let questions = std::mem::take(&mut work.questions);
            drop(work);
            questions.into_iter().for_each(|question| question.end(None));
        }
    }

    fn run(&self) {
        let mut work = self.work.lock();
        loop {
            if let Some(question) = work.questions.pop_front() {
                drop(work);
                let found = question.support.find_or_not(&question);
                question.end(found);
                work = self.work.lock();
            } else if self.came.wait_for(&mut work, IDLE_TIMEOUT).timed_out()
                && work.questions.is_empty()
            {
                work.has_thread = false;
                return;
            }
        }
    }
}

impl Question {
    fn end(self, found: Option<AllocatedBlocks>) {
        let Self { admin, answer, .. } = self;
        // Whoever waits has the controller, and may let go of it at once.
        drop(admin);
        let mut answer = answer.lock();
        answer.found = Some(found);
        let waker = answer.waker.take();
        drop(answer);
        waker.into_iter().for_each(Waker::wake);
    }
}
