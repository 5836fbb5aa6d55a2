//! The queue's own thread, which drives it while nobody else does.

use super::state::{ASKED, Inner};
use super::worker::Worker;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// How long somebody who wanted to drive the queue may take to do so.
const COURTESY: Duration = Duration::from_millis(1);

pub(super) fn spawn(inner: Arc<Inner>) -> io::Result<JoinHandle<()>> {
    let name = format!("shadowbell-q{}", inner.qid);
    let thread = std::thread::Builder::new().name(name).spawn({
        let inner = Arc::clone(&inner);
        move || run(&inner)
    })?;
    inner.set_thread(thread.thread().clone());
    Ok(thread)
}

fn run(inner: &Inner) {
    loop {
        let Some(mut worker) = inner.unpark() else {
            std::thread::park();
            continue;
        };
        match drive(&mut worker, inner) {
            Turn::Over => return worker.end(inner),
            Turn::Idle => {
                inner.park(worker);
                std::thread::park();
            }
            Turn::Wanted => {
                let _ = inner.lend(worker);
                std::thread::park_timeout(COURTESY);
            }
        }
    }
}

/// How a turn at the queue ended.
enum Turn {
    /// The queue is to be closed, or does not work any more.
    Over,
    /// There is nothing to do until somebody says so.
    Idle,
    /// Somebody else is about to go on.
    Wanted,
}

fn drive(worker: &mut Worker, inner: &Inner) -> Turn {
    worker.count_wait();
    loop {
        let busy = worker.step(inner);
        if worker.is_over(inner) {
            return Turn::Over;
        }
        if inner.take_wish(ASKED) {
            return Turn::Wanted;
        }
        if busy || worker.spin(inner, || false) {
            continue;
        }
        if !worker.has_work() {
            return Turn::Idle;
        }
        worker.sleep(inner, None, || false);
    }
}
