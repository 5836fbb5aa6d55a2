//! Runs an export's client on its own thread or on the controller's I/O thread, whichever is
//! faster.

use crate::depth::Depth;
use crate::queue_server::{QueueServer, QueueServerJob, QueueThreads};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

/// Reason for which [`Serving::run`] returns.
pub(crate) enum Stop {
    Over,
    /// The other kind of thread suits the client better: the I/O thread, or the client's own.
    Move,
}

/// State of a client that can continue on another thread.
pub(crate) trait Serving: Send + 'static {
    type Error: Send;

    /// Serves the client on the calling thread, which serves the disk's queue too if `server` is
    /// set.
    fn run(&mut self, server: Option<&mut (dyn QueueServer + '_)>) -> Result<Stop, Self::Error>;

    fn depth(&mut self) -> &mut Depth;

    /// Number of the client's submission queue.
    fn qid(&self) -> u16;
}

/// Serves a client until it disconnects, alternating between its own thread and the I/O thread.
pub(crate) fn serve<S: Serving>(
    mut serving: Box<S>,
    lender: Option<&Arc<dyn QueueThreads>>,
) -> Result<(), S::Error> {
    loop {
        // Dropping the client releases memory that is shared with the controller, which waits for
        // the I/O thread of the queue. Therefore the drop always happens on this thread.
        if let Stop::Over = serving.run(None)? {
            return Ok(());
        }
        let Some(lender) = lender else {
            serving.depth().refused();
            continue;
        };
        let qid = serving.qid();
        let (sender, back) = sync_channel(1);
        let job: QueueServerJob = Box::new(move |server| {
            let outcome = match server {
                Some(server) => {
                    tracing::debug!("the thread that serves the queue serves a client too");
                    serving.depth().lent();
                    let outcome = serving.run(Some(server));
                    serving.depth().back();
                    tracing::debug!("a client is served by a thread of its own again");
                    outcome
                }
                None => {
                    serving.depth().refused();
                    Ok(Stop::Move)
                }
            };
            let _ = sender.send((serving, outcome));
        });
        lender.lend(qid, job).unwrap_or_else(|job| job(None));
        let outcome;
        // If the sender was dropped, the controller was removed, and the client with it.
        (serving, outcome) = match back.recv() {
            Ok(back) => back,
            Err(_) => return Ok(()),
        };
        if let Stop::Over = outcome? {
            return Ok(());
        }
    }
}
