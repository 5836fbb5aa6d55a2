//! Serves a client on a thread of its own, and on one that serves the queue too, whichever suits
//! it better.

use crate::depth::Depth;
use crate::queue_server::{QueueServer, QueueServerJob, QueueThreads};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

/// Why a client is not served on, where it was.
pub(crate) enum Stop {
    Over,
    /// Another kind of thread suits the client better: one that serves the queue too, or its own.
    Move,
}

/// What serves a client.
pub(crate) trait Serving: Send + 'static {
    type Error: Send;

    /// Serves it on this thread, which serves the queue too if there is a `server`.
    fn run(&mut self, server: Option<&mut (dyn QueueServer + '_)>) -> Result<Stop, Self::Error>;

    fn depth(&mut self) -> &mut Depth;

    /// The number of its submission queue.
    fn qid(&self) -> u16;
}

/// Serves a client to its end, here and on a thread that serves the queue.
pub(crate) fn serve<S: Serving>(
    mut serving: Box<S>,
    lender: Option<&Arc<dyn QueueThreads>>,
) -> Result<(), S::Error> {
    loop {
        // What the client shares with the controller is taken back when it is dropped, by whoever
        // serves the queue. So that happens on this thread, with whatever outcome.
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
        // If it does not come back, the controller is gone, and the client with it.
        (serving, outcome) = match back.recv() {
            Ok(back) => back,
            Err(_) => return Ok(()),
        };
        if let Stop::Over = outcome? {
            return Ok(());
        }
    }
}
