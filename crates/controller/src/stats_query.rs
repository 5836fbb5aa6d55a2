//! Asks the workers for their counters.

use crate::context::Context;
use crate::worker::message::{Message, WorkerStats};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

/// How long the answers are waited for.
const ANSWERS: Duration = Duration::from_secs(1);

/// Asks the workers for their counters. However many ask, and however long a worker takes, it has
/// one question of a controller at most.
#[derive(Debug, Default)]
pub(crate) struct StatsQuery(Mutex<BTreeMap<usize, Receiver<WorkerStats>>>);

impl StatsQuery {
    /// The answers of `workers` that come in time. Those that ask at the same time wait.
    pub(crate) fn ask(&self, cx: &Context, workers: Vec<usize>) -> Vec<WorkerStats> {
        let mut asked = self.0.lock();
        // An answer that came too late for whoever asked is out of date.
        asked.retain(|_, answers| matches!(answers.try_recv(), Err(TryRecvError::Empty)));
        for worker in workers {
            asked.entry(worker).or_insert_with(|| {
                let (answer, answers) = channel();
                cx.send(worker, Message::Query { controller: cx.shared.id, answer });
                answers
            });
        }
        let deadline = Instant::now() + ANSWERS;
        let mut all = Vec::new();
        asked.retain(|_, answers| {
            let left = deadline.saturating_duration_since(Instant::now());
            match answers.recv_timeout(left) {
                Ok(stats) => all.push(stats),
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => {}
            }
            false
        });
        all
    }
}
