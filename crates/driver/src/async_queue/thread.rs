//! Queue thread: drives the queue until it is closed or fails.

use super::shared::AsyncShared;
use super::worker::Worker;
use shadowbell_memory::AbortOnPanic;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

pub(super) fn spawn(worker: Worker, shared: Arc<AsyncShared>) -> io::Result<JoinHandle<()>> {
    let name = format!("shadowbell-q{}", shared.qid);
    std::thread::Builder::new().name(name).spawn(move || {
        let _guard = AbortOnPanic::new();
        run(worker, &shared);
    })
}

fn run(mut worker: Worker, shared: &AsyncShared) {
    loop {
        let busy = worker.step(shared);
        if worker.is_over(shared) {
            return worker.shut_down(shared);
        }
        if !busy && !worker.spin(shared) {
            worker.sleep(shared);
        }
    }
}
