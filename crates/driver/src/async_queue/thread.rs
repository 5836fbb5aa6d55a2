//! Queue thread: drives the queue while no other thread does.

use super::parking::WorkerParking;
use super::shared::{ASKED, AsyncShared};
use super::worker::Worker;
use shadowbell_memory::AbortOnPanic;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Pause of the queue thread after it has stopped driving on request. In this time, the requesting
/// thread can start to drive the queue.
const HANDOVER: Duration = Duration::from_millis(1);

pub(super) fn spawn(parking: Arc<WorkerParking>) -> io::Result<JoinHandle<()>> {
    let name = format!("shadowbell-q{}", parking.shared.qid);
    let thread = std::thread::Builder::new().name(name).spawn({
        let parking = Arc::clone(&parking);
        move || {
            let _guard = AbortOnPanic::new();
            run(&parking);
        }
    })?;
    parking.shared.set_thread(thread.thread().clone());
    Ok(thread)
}

fn run(parking: &WorkerParking) {
    loop {
        let Some(mut worker) = parking.unpark() else {
            std::thread::park();
            continue;
        };
        match drive(&mut worker, &parking.shared) {
            Turn::Over => return worker.end(&parking.shared),
            Turn::Idle => {
                parking.park(worker);
                std::thread::park();
            }
            Turn::Requested => {
                let _ = parking.park_silently(worker);
                std::thread::park_timeout(HANDOVER);
            }
        }
    }
}

/// Reason for the queue thread to stop driving.
enum Turn {
    /// The queue is closed or has failed.
    Over,
    /// No commands are outstanding, and no futures wait.
    Idle,
    /// Another thread has asked to drive the queue.
    Requested,
}

fn drive(worker: &mut Worker, shared: &AsyncShared) -> Turn {
    worker.count_wait();
    loop {
        let busy = worker.step(shared);
        if worker.is_over(shared) {
            return Turn::Over;
        }
        if shared.take_request(ASKED) {
            return Turn::Requested;
        }
        if busy || worker.spin(shared, || false) {
            continue;
        }
        if !worker.has_work() {
            return Turn::Idle;
        }
        worker.sleep(shared, None, || false);
    }
}
