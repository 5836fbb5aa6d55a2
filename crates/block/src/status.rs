//! Queries of the allocation status, on a separate thread.
//!
//! The query is an admin command, which blocks. A thread that drives a queue must not block, so a
//! separate thread executes the queries. The thread exists only while there are queries.

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

/// Time after which the idle thread ends.
const IDLE_TIMEOUT: Duration = Duration::from_millis(200);

/// Query: the allocated blocks of a range, as at most `most` ranges.
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
    /// Result; `Some(None)` if the status is unknown.
    found: Option<Option<AllocatedBlocks>>,
    waker: Option<Waker>,
}

#[derive(Default)]
struct Work {
    questions: VecDeque<Question>,
    has_thread: bool,
}

/// Queue of the queries, and its thread.
#[derive(Default)]
struct Questions {
    work: Mutex<Work>,
    came: Condvar,
}

/// Support of the query by the controller.
struct Support {
    /// True if the controller was asked for its support.
    is_known: AtomicBool,
    /// True unless the controller lacks or has refused the command.
    is_possible: AtomicBool,
}

/// Access to the allocation status of a disk.
pub(crate) struct BlockStatus {
    questions: Arc<Questions>,
    support: Arc<Support>,
}

impl BlockStatus {
    /// `reads_zeroes`: true if deallocated blocks read as zeroes. Otherwise no query is made.
    pub(crate) fn new(reads_zeroes: bool) -> Self {
        let support = Support {
            is_known: AtomicBool::new(false),
            is_possible: AtomicBool::new(reads_zeroes),
        };
        Self { questions: Arc::default(), support: Arc::new(support) }
    }

    /// True if a query may return a result.
    pub(crate) fn is_possible(&self) -> bool {
        self.support.is_possible.load(Ordering::Relaxed)
    }

    /// Queries the allocated blocks of a namespace, as at most `most` ranges; `None` if the status
    /// is unknown.
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

    /// Like [`find`](Self::find); a failure means that the status is unknown.
    fn find_or_not(&self, question: &Question) -> Option<AllocatedBlocks> {
        let Question { admin, nsid, blocks, most, .. } = question;
        match self.find(admin, *nsid, blocks.clone(), *most) {
            Ok(found) => found,
            Err(error) => {
                let refused = [Status::INVALID_OPCODE, Status::INVALID_FIELD];
                if error.status().is_some_and(|status| refused.contains(&status.code())) {
                    self.is_possible.store(false, Ordering::Relaxed);
                }
                tracing::debug!("the allocation status is unknown: {error}");
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
        // Dropped before the wakeup: the woken caller may drop all other handles, and the shutdown of
        // the controller must then run on its thread and not on this one.
        drop(admin);
        let mut answer = answer.lock();
        answer.found = Some(found);
        let waker = answer.waker.take();
        drop(answer);
        waker.into_iter().for_each(Waker::wake);
    }
}
