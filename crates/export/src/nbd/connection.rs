//! One client: its handshake, and then its requests, many of them at once.
//!
//! One thread, which reads requests, submits them, takes completions and writes answers, and sleeps
//! on all of that at once ([`Seat`]). What came with one read goes to the controller with one
//! doorbell, and what has completed meanwhile is answered with one write. Requests are carried out
//! and answered in whatever order they complete. A client that does not take its answers is not read
//! from: its requests keep their places, and the memory of their data, until the answer is sent.

use super::handshake::{ALLOCATION_CONTEXT, Agreed, Export, Handshake, Step};
use super::reply::Head;
use super::request::{Action, Checked, Ended, Job, carry_out, check, number};
use super::server::Shared;
use super::wire::{MAX_PAYLOAD, NbdError, Request, command};
use crate::seat::{FIRST, Seat};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use shadowbell_block::{BlockDevice, BlockError};
use std::collections::VecDeque;
use std::future::Future;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests of one client that are under way or not answered yet.
const PLACES: usize = 128;
/// Bytes of their data; one request is always taken.
const MAX_HELD: usize = 64 << 20;
/// Bytes that are received at once, apart from the data of writes.
const INPUT: usize = 128 << 10;
/// Memory for data that is kept from one request to the next, per place.
const KEEP: usize = 256 << 10;
/// Answers that are sent at once.
const BATCH: usize = 64;
/// How long a client may take to say what it wants.
const HANDSHAKE: Duration = Duration::from_secs(30);
/// How long a client may take to take its last answers, when the server ends.
const FAREWELL: Duration = Duration::from_secs(5);

/// Not every program ignores SIGPIPE.
const NO_SIGNAL: SendFlags = SendFlags::NOSIGNAL;

/// The socket, among what a seat watches.
const SOCKET: u64 = FIRST;
const HANG_UP: EventFlags = EventFlags::RDHUP.union(EventFlags::HUP).union(EventFlags::ERR);
const RECEIVE: EventFlags = EventFlags::IN.union(EventFlags::RDHUP);

/// Why a connection ended otherwise than by the client's wish.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("{0}")]
    Protocol(String),
    #[error("the connection broke: {0}")]
    Socket(Errno),
    #[error("the client did not say what it wants within {} s", HANDSHAKE.as_secs())]
    Slow,
    #[error("the client did not take its answers within {} s", FAREWELL.as_secs())]
    Stuck,
    #[error("the system has no event descriptor left: {0}")]
    Event(std::io::Error),
}

/// Bytes that were received and not used.
struct Input {
    bytes: Box<[u8]>,
    from: usize,
    to: usize,
}

impl Input {
    fn rest(&self) -> &[u8] {
        self.bytes.get(self.from..self.to).unwrap_or_default()
    }

    fn consume(&mut self, count: usize) {
        self.from = (self.from + count).min(self.to);
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        }
    }

    /// Room for more.
    fn room(&mut self) -> &mut [u8] {
        if self.from > 0 {
            self.bytes.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        self.bytes.get_mut(self.to..).unwrap_or_default()
    }
}

/// An answer, on its way.
struct Answer {
    place: usize,
    head: Head,
    data: Vec<u8>,
    /// How much of the data is sent.
    len: usize,
}

impl Answer {
    fn total(&self) -> usize {
        self.head.bytes().len() + self.len
    }
}

/// A write whose data are not all here.
struct Arriving {
    place: usize,
    request: Request,
    data: Vec<u8>,
    got: usize,
}

/// What is known of the request in a place.
#[derive(Clone, Copy, Default)]
struct Pending {
    cookie: u64,
    checked: Option<Checked>,
    held: usize,
}

struct Connection<F> {
    socket: OwnedFd,
    disk: BlockDevice,
    shared: Arc<Shared>,
    agreed: Agreed,
    input: Input,
    seat: Seat<F>,
    /// There may be something to receive.
    readable: bool,
    /// The client has said that it sends no more; what it sent before may still be there.
    closing: bool,
    /// The socket takes no more at the moment.
    blocked: bool,
    pending: Vec<Pending>,
    arriving: Option<Arriving>,
    /// A request for which there is no place or no memory at the moment.
    stalled: Option<Request>,
    answers: VecDeque<Answer>,
    /// How much of the first answer was sent.
    sent: usize,
    held: usize,
    spare: Vec<Vec<u8>>,
    /// No more requests are taken: the client said farewell, or the server ends.
    last: bool,
    /// The client sends no more.
    hung_up: bool,
}

/// Serves the client at the other end of `socket`, until it leaves or [`Shared::is_ending`].
pub(super) fn serve(
    socket: OwnedFd,
    disk: BlockDevice,
    shared: &Arc<Shared>,
) -> Result<(), Broken> {
    let seat = Seat::new(&disk, PLACES).map_err(Broken::Event)?;
    seat.watch(socket.as_fd(), SOCKET, RECEIVE).map_err(Broken::Event)?;
    let _alarm = shared.register(seat.alarm().map_err(Broken::Event)?);
    let mut connection = Connection {
        socket,
        disk,
        shared: Arc::clone(shared),
        agreed: Agreed::default(),
        input: Input { bytes: vec![0; INPUT].into(), from: 0, to: 0 },
        seat,
        readable: true,
        closing: false,
        blocked: false,
        pending: vec![Pending::default(); PLACES],
        arriving: None,
        stalled: None,
        answers: VecDeque::with_capacity(PLACES),
        sent: 0,
        held: 0,
        spare: Vec::with_capacity(PLACES),
        last: false,
        hung_up: false,
    };
    match connection.handshake(&shared.export)? {
        Some(agreed) => connection.agreed = agreed,
        None => return Ok(()),
    }
    connection.run(carry_out)
}

impl<F: Future<Output = Ended>> Connection<F> {
    /// What was agreed on; nothing if the client left.
    fn handshake(&mut self, export: &Arc<Export>) -> Result<Option<Agreed>, Broken> {
        let deadline = Instant::now() + HANDSHAKE;
        let mut handshake = Handshake::new(Arc::clone(export));
        let mut out = Handshake::greeting();
        let mut over: Option<Step> = None;
        loop {
            let sent = match rustix::net::send(&self.socket, &out, NO_SIGNAL) {
                Ok(sent) => sent,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {
                    self.block()?;
                    0
                }
                // Who only wanted to see whether somebody is here does not wait for the answer.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(None),
                Err(errno) => return Err(Broken::Socket(errno)),
            };
            out.drain(..sent.min(out.len()));
            if !out.is_empty() && !self.blocked {
                continue;
            }
            if out.is_empty() {
                match over {
                    Some(Step::Transmission(agreed)) => return Ok(Some(agreed)),
                    Some(Step::Over(None)) => return Ok(None),
                    Some(Step::Over(Some(why))) => return Err(Broken::Protocol(why)),
                    _ => {}
                }
                let (used, step) = handshake.advance(self.input.rest(), &mut out);
                self.input.consume(used);
                match step {
                    Step::More if used > 0 => continue,
                    Step::More => {}
                    step => {
                        over = Some(step);
                        continue;
                    }
                }
            }
            if self.shared.is_ending() {
                return Ok(None);
            }
            if Instant::now() >= deadline {
                return Err(Broken::Slow);
            }
            if out.is_empty() && self.readable {
                match rustix::io::read(&self.socket, self.input.room()) {
                    Ok(0) => return Ok(None),
                    Ok(count) => self.input.to += count,
                    Err(Errno::AGAIN) => self.readable = false,
                    Err(Errno::INTR) => {}
                    Err(Errno::CONNRESET) => return Ok(None),
                    Err(errno) => return Err(Broken::Socket(errno)),
                }
                continue;
            }
            if self.seat.prepare_sleep() {
                self.wait(Some(deadline))?;
            }
        }
    }

    /// Waits until there is something to do.
    fn wait(&mut self, until: Option<Instant>) -> Result<(), Broken> {
        let Self { seat, readable, closing, blocked, .. } = self;
        let was_blocked = *blocked;
        seat.wait(until, |(_, flags)| {
            *readable |= flags.intersects(EventFlags::IN | HANG_UP);
            *closing |= flags.intersects(HANG_UP);
            *blocked &= !flags.intersects(EventFlags::OUT | HANG_UP);
        });
        if was_blocked && !self.blocked {
            let fd = self.socket.as_fd();
            self.seat.rewatch(fd, SOCKET, RECEIVE).map_err(Broken::Event)?;
        }
        Ok(())
    }

    /// The socket takes no more: waits for it to do so again.
    fn block(&mut self) -> Result<(), Broken> {
        self.blocked = true;
        let fd = self.socket.as_fd();
        self.seat.rewatch(fd, SOCKET, RECEIVE | EventFlags::OUT).map_err(Broken::Event)
    }

    fn run(&mut self, make: impl Fn(BlockDevice, Job) -> F) -> Result<(), Broken> {
        let mut farewell = None;
        loop {
            self.take_requests(&make)?;
            let busy = self.collect();
            let freed = self.send()?;
            if self.shared.is_ending() && !self.last {
                self.last = true;
            }
            if self.shared.is_ending() && farewell.is_none() {
                farewell = Some(Instant::now() + FAREWELL);
            }
            let under_way = self.seat.tasks().reserved();
            if self.last || self.hung_up {
                // What a client has sent in part only, it never asked for.
                let arriving = usize::from(self.arriving.is_some());
                if under_way <= arriving && self.answers.is_empty() {
                    return Ok(());
                }
            }
            if farewell.is_some_and(|at| at <= Instant::now()) {
                return Err(Broken::Stuck);
            }
            if self.stalled.is_some() && freed {
                continue;
            }
            // Who has several requests under way sends the next ones as the answers come in; who
            // waits for each has not had the time to.
            let perhaps = self.readable || freed && under_way > 0;
            let takes = !self.last && !self.hung_up && self.stalled.is_none();
            if perhaps && takes && self.receive()? {
                continue;
            }
            if !busy && !self.seat.spin() && self.seat.prepare_sleep() {
                self.wait(farewell)?;
            }
        }
    }

    /// Receives what is there: first the rest of the data that are arriving, then what follows.
    /// Whether there was anything.
    fn receive(&mut self) -> Result<bool, Broken> {
        let room = self.input.room();
        let space = room.len();
        let (outcome, wanted) = match &mut self.arriving {
            Some(write) => {
                let rest = write.data.get_mut(write.got..write.request.len as usize);
                let rest = rest.unwrap_or_default();
                let wanted = rest.len();
                let mut parts = [IoSliceMut::new(rest), IoSliceMut::new(room)];
                (rustix::io::readv(&self.socket, &mut parts), wanted)
            }
            None => (rustix::io::read(&self.socket, room), 0),
        };
        match outcome {
            Ok(0) => self.hung_up = true,
            Ok(count) => {
                let data = count.min(wanted);
                if let Some(write) = &mut self.arriving {
                    write.got += data;
                }
                self.input.to += count - data;
                // Less than there was room for is all that there is, until we are woken for more.
                self.readable = count == wanted + space || self.closing;
            }
            Err(Errno::AGAIN) => {
                self.readable = false;
                return Ok(false);
            }
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET | Errno::PIPE) => self.hung_up = true,
            Err(errno) => return Err(Broken::Socket(errno)),
        }
        Ok(true)
    }

    /// Begins with every request that is here, for which there is a place.
    fn take_requests(&mut self, make: &impl Fn(BlockDevice, Job) -> F) -> Result<(), Broken> {
        while !self.last {
            if let Some(mut write) = self.arriving.take() {
                let rest = self.input.rest();
                let len = write.request.len as usize;
                let here = rest.len().min(len - write.got);
                if let (Some(to), Some(from)) =
                    (write.data.get_mut(write.got..write.got + here), rest.get(..here))
                {
                    to.copy_from_slice(from);
                }
                self.input.consume(here);
                write.got += here;
                if write.got < len {
                    self.arriving = Some(write);
                    return Ok(());
                }
                self.begin(write.place, write.request, write.data, make);
                continue;
            }
            let request = match self.stalled.take() {
                Some(request) => request,
                None => {
                    let Some((head, _)) = self.input.rest().split_first_chunk() else {
                        return Ok(());
                    };
                    let request = Request::decode(head).ok_or_else(|| {
                        Broken::Protocol("the client sent something that is no request".into())
                    })?;
                    self.input.consume(Request::SIZE);
                    request
                }
            };
            if request.command == command::DISC {
                self.last = true;
                return Ok(());
            }
            if request.payload() > MAX_PAYLOAD {
                let len = request.len;
                return Err(Broken::Protocol(format!("the client sent a write of {len} bytes")));
            }
            let needs = match request.command {
                command::READ if request.len <= MAX_PAYLOAD => request.len as usize,
                _ => request.payload() as usize,
            };
            if self.held > 0 && self.held + needs > MAX_HELD {
                self.stalled = Some(request);
                return Ok(());
            }
            let Some(place) = self.seat.tasks().reserve() else {
                self.stalled = Some(request);
                return Ok(());
            };
            self.held += needs;
            let mut data = self.spare.pop().unwrap_or_default();
            if data.len() < needs {
                data.resize(needs, 0);
            }
            if let Some(pending) = self.pending.get_mut(place) {
                *pending = Pending { cookie: request.cookie, checked: None, held: needs };
            }
            if request.payload() > 0 {
                self.arriving = Some(Arriving { place, request, data, got: 0 });
            } else {
                self.begin(place, request, data, make);
            }
        }
        Ok(())
    }

    fn begin(
        &mut self,
        place: usize,
        request: Request,
        data: Vec<u8>,
        make: &impl Fn(BlockDevice, Job) -> F,
    ) {
        match check(&request, self.disk.geometry(), self.agreed) {
            Ok(request) => {
                if let Some(pending) = self.pending.get_mut(place) {
                    pending.checked = Some(request);
                }
                self.seat.tasks().start(place, make(self.disk.clone(), Job { request, data }));
            }
            Err((error, text)) => {
                let head = self.refusal(request.cookie, error, text);
                self.answers.push_back(Answer { place, head, data, len: 0 });
            }
        }
    }

    fn refusal(&self, cookie: u64, error: NbdError, text: &str) -> Head {
        if self.agreed.structured {
            Head::error(cookie, error, text)
        } else {
            Head::simple(cookie, Err(error))
        }
    }

    /// Submits what was begun with, and takes what has completed. Whether there was anything.
    fn collect(&mut self) -> bool {
        let Self { seat, pending, answers, agreed, shared, .. } = self;
        seat.turn(|place, Ended { outcome, data }| {
            let pending = pending.get(place).copied().unwrap_or_default();
            let (head, len) = answer(&pending, *agreed, &outcome);
            if let Err(error) = &outcome {
                shared.failed(error);
            }
            answers.push_back(Answer { place, head, data, len });
        })
    }

    /// Sends answers, as many as the socket takes. Whether a place has become free.
    fn send(&mut self) -> Result<bool, Broken> {
        let mut freed = false;
        while !self.answers.is_empty() && !self.blocked {
            let mut skip = self.sent;
            let mut parts = [IoSlice::new(&[]); 2 * BATCH];
            let mut used = 0;
            for answer in self.answers.iter().take(BATCH) {
                for part in [answer.head.bytes(), answer.data.get(..answer.len).unwrap_or_default()]
                {
                    let left = part.get(skip.min(part.len())..).unwrap_or_default();
                    skip -= part.len() - left.len();
                    if !left.is_empty()
                        && let Some(slot) = parts.get_mut(used)
                    {
                        *slot = IoSlice::new(left);
                        used += 1;
                    }
                }
            }
            let parts = parts.get(..used).unwrap_or_default();
            match sendmsg(&self.socket, parts, &mut SendAncillaryBuffer::default(), NO_SIGNAL) {
                Ok(count) => self.sent += count,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {
                    self.block()?;
                    return Ok(freed);
                }
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    // Nobody is there to take them. What is under way comes to its end.
                    self.hung_up = true;
                    while let Some(answer) = self.answers.pop_front() {
                        self.settle(answer);
                    }
                    self.sent = 0;
                    return Ok(true);
                }
                Err(errno) => return Err(Broken::Socket(errno)),
            }
            while let Some(first) = self.answers.front()
                && self.sent >= first.total()
                && let Some(answer) = self.answers.pop_front()
            {
                self.sent -= answer.total();
                self.settle(answer);
                freed = true;
            }
        }
        Ok(freed)
    }

    /// An answer was sent: its place and its memory are free.
    fn settle(&mut self, answer: Answer) {
        let held = self.pending.get_mut(answer.place).map(std::mem::take);
        self.held = self.held.saturating_sub(held.map_or(0, |pending| pending.held));
        self.seat.tasks().release(answer.place);
        if answer.data.capacity() <= KEEP && answer.data.capacity() > 0 {
            self.spare.push(answer.data);
        }
    }
}

/// The answer to a request that was carried out, and how many bytes of its data go with it.
fn answer(pending: &Pending, agreed: Agreed, outcome: &Result<(), BlockError>) -> (Head, usize) {
    let Pending { cookie, checked, .. } = *pending;
    let read = checked.filter(|checked| checked.action == Action::Read);
    let len = read.map_or(0, |read| read.len);
    match (outcome, agreed.structured) {
        (Err(error), true) => (Head::error(cookie, number(error), &error.to_string()), 0),
        (Err(error), false) => (Head::simple(cookie, Err(number(error))), 0),
        (Ok(()), false) => (Head::simple(cookie, Ok(())), len as usize),
        (Ok(()), true) => match checked {
            // A chunk of data has some.
            Some(Checked { action: Action::Read, offset, len, .. }) if len > 0 => {
                (Head::data(cookie, offset, len), len as usize)
            }
            // The controller tells nobody which blocks are allocated, so all of them count as such.
            Some(Checked { action: Action::BlockStatus, len, .. }) => {
                (Head::extent(cookie, ALLOCATION_CONTEXT, len, 0), 0)
            }
            _ => (Head::done(cookie), 0),
        },
    }
}
