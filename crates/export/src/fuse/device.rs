//! Requests of the kernel, many of them at once.
//!
//! One thread reads them, submits them, takes completions and writes answers, and sleeps on all of
//! that at once ([`IoThread`]). Requests are carried out and answered in whatever order they
//! complete: none waits for another. What came together goes to the controller with one doorbell;
//! and if the controller is in this process, the thread of its worker does all of it, so that no
//! thread wakes another.
//!
//! There are more threads where there are processors for them. Each of the others sleeps until one
//! that is awake finds that it does not get to the end of what there is ([`Crew`]), so that a
//! request wakes one thread, and none if one is awake.

use super::file::{Action, DiskFile, Step};
use super::sys;
use super::wire::{Answer, Extent, MAX_REQUEST, Request, WRITE_HEAD};
use crate::data::{Data, DataMemory};
use crate::depth::Depth;
use crate::failures::FailureCount;
use crate::io_thread::{FIRST, IoThread};
use crate::lent::{Serving, Stop};
use crate::queue_server::QueueServer;
use crate::vectors::Room;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use shadowbell_block::{BlockDevice, BlockError};
use shadowbell_driver::AsyncQueue;
use shadowbell_memory::EventFd;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Requests of one thread that are in flight.
const SLOTS: usize = 128;
/// Bytes of their data from which on no more are taken.
const MAX_HELD: usize = 16 << 20;
/// Requests that are taken before those that have completed are answered.
const BATCH: usize = 32;
/// Requests that are taken one after the other, without an end, until another thread is called.
const TOO_MANY: usize = 64;
/// Room for what is no data: names, at most.
const LANDING: usize = MAX_REQUEST as usize + 4096;
/// A request without data; nothing that is asked for has more than its fields.
const HEAD: usize = WRITE_HEAD + 48;
/// The device's number in the thread's epoll set.
const DEVICE: u64 = FIRST;

/// What threads of one mount share.
pub(super) struct Shared {
    pub(super) device: OwnedFd,
    pub(super) file: DiskFile,
    pub(super) failures: Arc<FailureCount>,
    pub(super) crew: Crew,
}

/// The threads that help when they are called.
#[derive(Default)]
pub(super) struct Crew {
    helpers: Vec<Helper>,
    /// Nothing is mounted any more.
    over: AtomicBool,
}

struct Helper {
    is_called: AtomicBool,
    waker: EventFd,
}

impl Crew {
    pub(super) fn add(&mut self, waker: EventFd) -> usize {
        self.helpers.push(Helper { is_called: AtomicBool::new(false), waker });
        self.helpers.len() - 1
    }

    /// Calls one that is not helping.
    fn call(&self) {
        let idle = self.helpers.iter().find(|one| !one.is_called.swap(true, Ordering::AcqRel));
        if let Some(idle) = idle {
            idle.waker.signal();
        }
    }

    fn is_called(&self, helper: usize) -> bool {
        self.helpers.get(helper).is_some_and(|one| one.is_called.load(Ordering::Acquire))
    }

    fn dismiss(&self, helper: usize) {
        if let Some(one) = self.helpers.get(helper) {
            one.is_called.store(false, Ordering::Release);
        }
    }

    /// Ends them all.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.helpers.iter().for_each(|one| one.waker.signal());
    }
}

/// What is to be done, with the data or room for them.
pub(super) struct Job {
    action: Action,
    data: Data,
}

/// What came of it. The data come back.
pub(super) struct Completed {
    outcome: Result<(), BlockError>,
    /// Nothing, if they were lost with a failure.
    data: Data,
}

/// Does what is asked for.
pub(super) async fn carry_out(disk: BlockDevice, Job { action, data }: Job) -> Completed {
    match (action, data) {
        (Action::Read(Extent { offset, len }), Data::Shared(buffer)) => {
            moved(disk.read_direct(offset, len as usize, buffer).await.map(Data::Shared))
        }
        (Action::Write(Extent { offset, len }), Data::Shared(buffer)) => {
            let written = disk.write_direct(offset, len as usize, buffer, false);
            moved(written.await.map(Data::Shared))
        }
        (Action::Read(Extent { offset, len }), Data::Own(mut data)) => {
            let into = data.get_mut(..len as usize).unwrap_or_default();
            let outcome = disk.read(offset, into).await;
            Completed { outcome, data: Data::Own(data) }
        }
        (Action::Write(Extent { offset, len }), Data::Own(data)) => {
            let from = data.get(..len as usize).unwrap_or_default();
            let outcome = disk.write(offset, from, false).await;
            Completed { outcome, data: Data::Own(data) }
        }
        (Action::Flush, data) => Completed { outcome: disk.flush().await, data },
        (Action::WriteZeroes { offset, len, how }, data) => {
            Completed { outcome: disk.write_zeroes(offset, len, how).await, data }
        }
        (Action::Copy { from, to, len }, data) => {
            Completed { outcome: disk.copy(from, to, len.into()).await, data }
        }
    }
}

fn moved(moved: Result<Data, BlockError>) -> Completed {
    match moved {
        Ok(data) => Completed { outcome: Ok(()), data },
        Err(error) => Completed { outcome: Err(error), data: Data::default() },
    }
}

/// What is known of the request in a slot.
#[derive(Clone, Copy)]
struct Pending {
    unique: u64,
    action: Action,
    held: usize,
}

/// One thread's end of the device.
pub(super) struct Device<F> {
    shared: Arc<Shared>,
    /// Which of the helpers it is; the one that is none waits for requests.
    helper: Option<usize>,
    disk: BlockDevice,
    io: IoThread<F>,
    pending: Vec<Option<Pending>>,
    held: usize,
    memory: DataMemory,
    depth: Depth,
    /// There may be a request.
    readable: bool,
    /// Requests that were taken since there was none the last time.
    taken: usize,
    head: [u8; HEAD],
    landing: Vec<u8>,
    done: Vec<(usize, Completed)>,
}

impl<F: Future<Output = Completed>> Device<F> {
    /// An end that uses one of the disk's queues, on a thread that `io` belongs to.
    pub(super) fn new(
        shared: Arc<Shared>,
        helper: Option<usize>,
        disk: BlockDevice,
        io: IoThread<F>,
    ) -> io::Result<Self> {
        if helper.is_none() {
            io.add_fd(shared.device.as_fd(), DEVICE, EventFlags::IN)?;
        }
        Ok(Self {
            shared,
            helper,
            disk,
            io,
            pending: vec![None; SLOTS],
            held: 0,
            memory: DataMemory::new(SLOTS),
            depth: Depth::default(),
            readable: helper.is_none(),
            taken: 0,
            head: [0; HEAD],
            landing: vec![0; LANDING],
            done: Vec::with_capacity(SLOTS),
        })
    }

    /// For the requests of one thread.
    pub(super) fn io_thread(disk: &BlockDevice) -> io::Result<IoThread<F>> {
        IoThread::new(disk, SLOTS)
    }

    fn run_on(
        &mut self,
        mut server: Option<&mut (dyn QueueServer + '_)>,
        make: &impl Fn(BlockDevice, Job) -> F,
    ) -> io::Result<Stop> {
        loop {
            let any = match self.take(make) {
                Ok(any) => any,
                // Nothing is mounted any more. What is in flight has nobody who waits for it, but
                // it comes to its end.
                Err(Errno::NODEV) => {
                    self.readable = false;
                    self.shared.crew.end();
                    false
                }
                Err(errno) => return Err(errno.into()),
            };
            let is_over = self.shared.crew.over.load(Ordering::Acquire);
            if is_over && self.io.tasks().reserved() == 0 {
                return Ok(Stop::Over);
            }
            if self.depth.wants_to_move(|| true) {
                return Ok(Stop::Move);
            }
            let busy = self.collect(server.as_deref_mut());
            if any || busy {
                continue;
            }
            let again = match &mut server {
                Some(server) => {
                    let again = server.looks_again();
                    // Nothing but an attempt says that there is a request.
                    self.readable |= again && self.listens() && !is_over;
                    again
                }
                None => self.io.spin(),
            };
            if !again && self.io.prepare_sleep() {
                let readable = &mut self.readable;
                let ready = |_| *readable = true;
                match server.as_deref_mut() {
                    Some(server) => self.io.wait_serving(server, None, ready),
                    None => self.io.wait(None, ready),
                }
                self.readable |= self.helper.is_some() && self.listens();
            }
        }
    }

    /// Whether this thread is one that looks for requests at the moment.
    fn listens(&self) -> bool {
        self.helper.is_none_or(|helper| self.shared.crew.is_called(helper))
    }

    /// Takes what requests there are, and begins with them. Whether there was any.
    fn take(&mut self, make: &impl Fn(BlockDevice, Job) -> F) -> Result<bool, Errno> {
        let mut count = 0;
        while self.readable && count < BATCH && self.held < MAX_HELD {
            let Some(slot) = self.io.tasks().reserve() else { break };
            let Self { shared, head, landing, .. } = self;
            let head = head.get_mut(..WRITE_HEAD).unwrap_or_default();
            let (mut head, mut rest) = (Room::of(head), Room::of(landing));
            match sys::read(shared.device.as_fd(), &mut head, &mut rest) {
                Ok(len) => {
                    count += 1;
                    self.begin(slot, len, make);
                    continue;
                }
                // A request that was taken back.
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(Errno::AGAIN) => {
                    self.readable = false;
                    self.taken = 0;
                    if let Some(helper) = self.helper {
                        shared.crew.dismiss(helper);
                    }
                }
                Err(errno) => {
                    self.io.tasks().release(slot);
                    return Err(errno);
                }
            }
            self.io.tasks().release(slot);
        }
        self.taken += count;
        if self.taken >= TOO_MANY {
            self.taken = 0;
            self.shared.crew.call();
        }
        Ok(count > 0)
    }

    /// Begins with a request of so many bytes.
    fn begin(&mut self, slot: usize, len: usize, make: &impl Fn(BlockDevice, Job) -> F) {
        let Self { shared, disk, memory, head, landing, .. } = self;
        // Only of a write does the rest begin with the data.
        if let (Some(end), Some(rest)) =
            (head.get_mut(WRITE_HEAD..), landing.get(..HEAD - WRITE_HEAD))
        {
            end.copy_from_slice(rest);
        }
        let head = head.get(..len).unwrap_or(head);
        let data = landing.get(..len.saturating_sub(WRITE_HEAD)).unwrap_or(landing);
        let step = match Request::decode(head) {
            Some(request) => (request.unique, shared.file.ask(&request, data.len())),
            // It has no number that could be answered.
            None => (0, Step::Nothing),
        };
        let (unique, action) = match step {
            (unique, Step::Do(action)) => (unique, action),
            (_, Step::Answer(answer)) => {
                self.io.tasks().release(slot);
                return self.answer(&answer, &Data::default(), 0);
            }
            (_, Step::Nothing) => return self.io.tasks().release(slot),
        };
        let (held, data) = match action {
            Action::Read(Extent { offset, len }) => {
                (len as usize, room(memory, disk, offset, len as usize))
            }
            Action::Write(Extent { offset, len }) => {
                let mut room = room(memory, disk, offset, len as usize);
                room.put(0, data.get(..len as usize).unwrap_or_default());
                (len as usize, room)
            }
            Action::Flush | Action::WriteZeroes { .. } | Action::Copy { .. } => {
                (0, Data::default())
            }
        };
        self.held += held;
        if let Some(pending) = self.pending.get_mut(slot) {
            *pending = Some(Pending { unique, action, held });
        }
        self.depth.begun(self.io.tasks().reserved(), false);
        self.io.tasks().start(slot, make(disk.clone(), Job { action, data }));
    }

    /// Submits what was begun with, and answers what has completed. Whether there was anything.
    fn collect(&mut self, server: Option<&mut (dyn QueueServer + '_)>) -> bool {
        let Self { io, done, .. } = self;
        let busy = io.run_once(server, |slot, completed| done.push((slot, completed)));
        let mut done = std::mem::take(&mut self.done);
        for (slot, Completed { outcome, data }) in done.drain(..) {
            self.io.tasks().release(slot);
            let pending = self.pending.get_mut(slot).and_then(Option::take);
            if let Some(Pending { unique, action, held }) = pending {
                self.held -= held;
                let (answer, len) = match outcome {
                    Ok(()) => answer(unique, action),
                    Err(error) => (Answer::error(unique, self.errno(&error)), 0),
                };
                self.answer(&answer, &data, len);
            }
            self.memory.give_back(data);
        }
        self.done = done;
        busy
    }

    /// The kernel's number for what went wrong.
    fn errno(&self, error: &BlockError) -> Errno {
        let errno = error.errno();
        if errno == Errno::IO {
            self.shared.failures.record(error);
        }
        if matches!(error, BlockError::ReadOnly) { Errno::ROFS } else { errno }
    }

    /// Answers, with so many bytes of data.
    fn answer(&self, answer: &Answer, data: &Data, len: usize) {
        let device = self.shared.device.as_fd();
        match sys::write(device, answer.bytes(), data.part(0, len)) {
            // Nobody waits for it any more.
            Ok(()) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(errno) => tracing::warn!("a request could not be answered: {errno}"),
        }
    }
}

/// Room for the data of a read or a write: where the controller can reach it, if that saves a copy.
fn room(memory: &mut DataMemory, disk: &BlockDevice, offset: u64, len: usize) -> Data {
    let shared = disk.is_direct(offset, len).then(|| memory.shared(disk, len)).flatten();
    shared.unwrap_or_else(|| memory.own(len))
}

/// The answer to what is done, and how many bytes of data go with it.
fn answer(unique: u64, action: Action) -> (Answer, usize) {
    match action {
        Action::Read(Extent { len, .. }) => {
            let len = len as usize;
            (Answer::done(unique).with_data(len), len)
        }
        Action::Write(Extent { len, .. }) | Action::Copy { len, .. } => {
            (Answer::written(unique, len), 0)
        }
        Action::Flush | Action::WriteZeroes { .. } => (Answer::done(unique), 0),
    }
}

impl<F, M> Serving for (Device<F>, M)
where
    F: Future<Output = Completed> + Send + 'static,
    M: Fn(BlockDevice, Job) -> F + Send + 'static,
{
    type Error = io::Error;

    fn run(&mut self, mut server: Option<&mut (dyn QueueServer + '_)>) -> io::Result<Stop> {
        let (device, make) = self;
        if let Some(server) = &server {
            device.io.serves(&**server)?;
        }
        let outcome = device.run_on(server.as_deref_mut(), make);
        if let (Ok(Stop::Move), Some(server)) = (&outcome, server) {
            device.io.serves_no_more(server);
        }
        outcome
    }

    fn depth(&mut self) -> &mut Depth {
        &mut self.0.depth
    }

    fn qid(&self) -> u16 {
        self.0.disk.queue().map_or(0, AsyncQueue::qid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn who_helps_is_called_once_and_again_when_there_was_nothing_left() {
        let mut crew = Crew::default();
        let events = [EventFd::new().unwrap(), EventFd::new().unwrap()];
        let helpers = events.each_ref().map(|event| crew.add(event.try_clone().unwrap()));
        let woken = || {
            events.each_ref().map(|event| {
                let woken = event.wait(Some(Duration::ZERO)).unwrap();
                event.drain();
                woken
            })
        };
        assert_eq!(helpers.map(|helper| crew.is_called(helper)), [false, false]);
        crew.call();
        assert_eq!(woken(), [true, false]);
        crew.call();
        assert_eq!(woken(), [false, true]);
        crew.call();
        assert_eq!(woken(), [false, false], "all of them help");
        assert_eq!(helpers.map(|helper| crew.is_called(helper)), [true, true]);
        crew.dismiss(helpers[1]);
        crew.call();
        assert_eq!(woken(), [false, true]);
        crew.end();
        assert_eq!(woken(), [true, true]);
    }
}
