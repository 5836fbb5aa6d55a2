//! Delivery of asynchronous events on a sleeping thread.

use crate::admin::AdminCommands;
use crate::attached_controller::AttachedController;
use shadowbell_memory::EventFd;
use shadowbell_spec::event::AsyncEvent;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

/// Delivers asynchronous events to a callback until it is dropped. Created by
/// [`Controller::on_event`](crate::Controller::on_event).
pub struct EventListener {
    stop: Arc<AtomicBool>,
    event: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl EventListener {
    pub(crate) fn spawn(
        controller: &Arc<AttachedController>,
        event: &EventFd,
        mut deliver: impl FnMut(AsyncEvent) + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let waits_on = event.try_clone()?;
        let event = event.try_clone()?;
        // The thread holds a weak reference, so that it does not keep the controller attached.
        let controller: Weak<AttachedController> = Arc::downgrade(controller);
        let stopped = Arc::clone(&stop);
        let thread =
            std::thread::Builder::new().name("shadowbell-events".into()).spawn(move || {
                while !stopped.load(Ordering::Acquire) {
                    let Some(controller) = controller.upgrade() else { return };
                    waits_on.drain();
                    let queue = &controller.plane().queue;
                    let (events, lost) = queue.take_events();
                    queue.ring_cq_doorbell();
                    // The controller interrupts only for completions after the published head. The
                    // second call finds the events that arrived before the head was published.
                    let (more, lost_too) = queue.take_events();
                    drop(controller);
                    if lost + lost_too != 0 {
                        tracing::warn!("{} asynchronous events were lost", lost + lost_too);
                    }
                    events.into_iter().chain(more).for_each(&mut deliver);
                    if let Err(error) = waits_on.wait(None) {
                        tracing::warn!("no more asynchronous events: {error}");
                        return;
                    }
                }
            })?;
        Ok(Self { stop, event, thread: Some(thread) })
    }
}

impl Drop for EventListener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.event.signal();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // An error of `join` means that the callback has panicked.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for EventListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventListener").finish_non_exhaustive()
    }
}
