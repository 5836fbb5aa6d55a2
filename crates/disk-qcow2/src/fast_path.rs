//! Fast path of a queue: requests on clusters whose position is in the [`Map`](crate::map::Map).
//! io_uring transfers their data directly between guest memory and the image's file, as for a raw
//! image.

use crate::image::Image;
use crate::map::Entered;
use shadowbell_disk::{DiskError, Op, Queue, Request, Submitted, Tasks};
use shadowbell_disk_file::BytesQueue;
use shadowbell_memory::Segments;
use std::os::fd::BorrowedFd;

pub(crate) struct FastPath {
    queue: BytesQueue,
    /// Requests in flight. Their keys are their tags in `queue`.
    in_flight: Tasks<InFlight>,
    /// True if the check that the file was not truncated was made for the current batch. Later
    /// writes of the batch skip it.
    is_checked: bool,
}

/// Request in flight on the fast path.
struct InFlight {
    /// Request. Its offset is an offset on the disk, not in the file.
    request: Request,
    entered: Entered,
}

/// Request that the fast path could not complete. It has to be repeated on the slow path.
pub(crate) struct Back {
    pub(crate) tag: u32,
    pub(crate) request: Request,
    pub(crate) data: Segments,
}

impl FastPath {
    pub(crate) fn new(queue: BytesQueue) -> Self {
        Self { queue, in_flight: Tasks::default(), is_checked: false }
    }

    /// Starts a request, whose validity was checked before. Returns `None` if it has to take the
    /// slow path.
    pub(crate) fn submit(
        &mut self,
        image: &Image,
        tag: u32,
        request: &Request,
        data: &mut Segments,
    ) -> Option<Submitted> {
        let writes = match request.op {
            Op::Read => false,
            Op::Write { fua: false } => true,
            _ => return None,
        };
        let map = image.map.as_ref()?;
        let (offset, entered) = map.enter(request.offset, request.len, writes)?;
        if !image.is_intact(writes && !self.is_checked) {
            map.leave(entered);
            return None;
        }
        self.is_checked |= writes;
        let key = self.in_flight.insert(tag, InFlight { request: *request, entered });
        match self.queue.submit(key, &Request { offset, ..*request }, data) {
            Submitted::Pending => Some(Submitted::Pending),
            Submitted::Done(result) => {
                self.in_flight.remove(key);
                map.leave(entered);
                note_room(image, request, result);
                (result != Err(DiskError::OutOfRange)).then_some(Submitted::Done(result))
            }
        }
    }

    /// Allows the thread to block briefly on the file.
    pub(crate) fn may_wait(&mut self) {
        self.queue.may_wait();
    }

    pub(crate) fn commit(&mut self) {
        self.is_checked = false;
        self.queue.commit();
    }

    /// Reports completions. Adds requests that have to take the slow path to `back`.
    pub(crate) fn reap(
        &mut self,
        image: &Image,
        back: &mut Vec<Back>,
        done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments),
    ) {
        self.is_checked = false;
        let in_flight = &mut self.in_flight;
        self.queue.reap(&mut |key, result, data| {
            let Some((tag, InFlight { request, entered })) = in_flight.remove(key) else { return };
            if let Some(map) = &image.map {
                map.leave(entered);
            }
            // The file was truncated. The request is repeated on the slow path, which reports that.
            if result == Err(DiskError::OutOfRange) {
                return back.push(Back { tag, request, data });
            }
            note_room(image, &request, result);
            done(tag, result, data);
        });
    }

    /// Cancels a request. Returns true if the request is in flight on the fast path.
    pub(crate) fn cancel(&mut self, tag: u32) -> bool {
        let key = self.in_flight.find(tag);
        if let Some(key) = key {
            self.queue.cancel(key);
        }
        key.is_some()
    }

    pub(crate) fn pending(&self) -> usize {
        self.in_flight.len()
    }

    pub(crate) fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.wake_fd()
    }

    /// Waits until no request is in flight, and releases the clusters of the requests.
    pub(crate) fn close(self, image: &Image) {
        let Self { queue, mut in_flight, .. } = self;
        drop(queue);
        let keys: Vec<u32> = in_flight.keys().collect();
        for (_, InFlight { entered, .. }) in
            keys.into_iter().filter_map(|key| in_flight.remove(key))
        {
            if let Some(map) = &image.map {
                map.leave(entered);
            }
        }
    }
}

/// Updates the out-of-space state after a request that may change it.
fn note_room(image: &Image, request: &Request, result: Result<(), DiskError>) {
    if result == Err(DiskError::NoSpace) || image.is_full() {
        image.note_room(request, result);
    }
}
