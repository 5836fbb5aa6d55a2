//! Doorbell channel in memory, for tests: the host sends doorbell writes, and an I/O thread polls
//! for them.

use rustix::event::epoll::{self, EventData, EventFlags};
use shadowbell_controller::{DoorbellSource, PolledDoorbells};
use shadowbell_memory::EventFd;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Doorbell writes that no thread has received yet.
pub struct DoorbellChannel {
    event: EventFd,
    writes: Mutex<VecDeque<(u64, u32)>>,
    /// True while an I/O thread polls the source.
    pub watched: AtomicBool,
}

/// Receiving end of a [`DoorbellChannel`], for the I/O thread, which polls it.
pub struct ChannelReceiver(Arc<DoorbellChannel>);

impl DoorbellChannel {
    pub fn new() -> (Arc<Self>, Box<ChannelReceiver>) {
        let event = EventFd::new().unwrap();
        let wire = Arc::new(Self { event, writes: Mutex::default(), watched: false.into() });
        (Arc::clone(&wire), Box::new(ChannelReceiver(wire)))
    }

    /// Sends a doorbell write.
    pub fn write(&self, offset: u64, value: u32) {
        self.writes.lock().unwrap().push_back((offset, value));
        self.event.signal();
    }

    /// Takes all writes that the I/O thread has not taken.
    pub fn take(&self) -> Vec<(u64, u32)> {
        self.writes.lock().unwrap().drain(..).collect()
    }

    pub fn is_watched(&self) -> bool {
        self.watched.load(Ordering::SeqCst)
    }
}

impl DoorbellSource for ChannelReceiver {
    fn watch(&mut self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::ET;
        epoll::add(epoll, &self.0.event, EventData::new_u64(token), flags)?;
        self.0.watched.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn poll_doorbells(&mut self, ring: &mut dyn FnMut(u64, u32) -> bool) -> PolledDoorbells {
        self.0.event.drain();
        let mut waiting = self.0.writes.lock().unwrap();
        let mut writes = 0;
        while let Some((offset, value)) = waiting.front().copied() {
            if !ring(offset, value) {
                return PolledDoorbells { writes, all: false };
            }
            waiting.pop_front();
            writes += 1;
        }
        PolledDoorbells { writes, all: true }
    }
}

impl Drop for ChannelReceiver {
    fn drop(&mut self) {
        self.0.watched.store(false, Ordering::SeqCst);
    }
}
