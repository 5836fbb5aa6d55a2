//! One client: its handshake, and then its requests, many of them at once.
//!
//! One thread, which reads requests, submits them, takes completions and writes answers, and sleeps
//! on all of that at once ([`IoThread`]). What came with one read goes to the controller with one
//! doorbell, and what has completed meanwhile is answered with one write. Requests are carried out
//! and answered in whatever order they complete. A client that does not take its answers is not
//! read from: its requests keep their slots, and the memory of their data, until the answer is
//! sent.

use super::answers::{Answer, Answers, Sent};
use super::clients::NewClient;
use super::handshake::{ALLOCATION_CONTEXT, Agreed};
use super::negotiate::negotiate;
use super::reply::Head;
use super::request::{Action, Checked, Completed, Job, carry_out, check, number};
use super::shared::ServerShared;
use super::socket::{ClientSocket, ConnectionError, DRAIN_TIMEOUT};
use super::wire::{MAX_PAYLOAD, NbdError, Request, command};
use crate::io_thread::IoThread;
use rustix::io::Errno;
use shadowbell_block::{BlockDevice, BlockError};
use std::future::Future;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// Requests of one client that are in flight or not answered yet.
const SLOTS: usize = 128;
/// Bytes of their data; one request is always taken.
const MAX_HELD: usize = 64 << 20;
/// Memory for data that is kept from one request to the next, per slot.
const KEEP: usize = 256 << 10;

/// A write whose data are not all here.
struct PartialWrite {
    slot: usize,
    request: Request,
    data: Vec<u8>,
    got: usize,
}

/// What is known of the request in a slot.
#[derive(Clone, Copy, Default)]
struct Pending {
    cookie: u64,
    checked: Option<Checked>,
    held: usize,
}

struct Connection<F> {
    socket: ClientSocket,
    disk: BlockDevice,
    shared: Arc<ServerShared>,
    agreed: Agreed,
    io: IoThread<F>,
    pending: Vec<Pending>,
    /// A write whose data are arriving.
    arriving: Option<PartialWrite>,
    /// A request for which there is no slot or no memory at the moment.
    stalled: Option<Request>,
    answers: Answers,
    held: usize,
    spare: Vec<Vec<u8>>,
    /// No more requests are taken: the client has disconnected in order, or the server ends.
    last: bool,
    /// The client sends no more.
    hung_up: bool,
}

/// Serves the client at the other end of `socket`, until it leaves or [`ServerShared::is_ending`].
pub(super) fn serve(
    socket: OwnedFd,
    new: NewClient,
    disk: BlockDevice,
    shared: &Arc<ServerShared>,
) -> Result<(), ConnectionError> {
    let mut io = IoThread::new(&disk, SLOTS).map_err(ConnectionError::Event)?;
    let mut socket = ClientSocket::new(socket, &io)?;
    let _registered = shared.register(io.waker().map_err(ConnectionError::Event)?);
    let outcome = negotiate(&mut socket, &mut io, shared, new.peer)?;
    let Some((agreed, _place)) = outcome else { return Ok(()) };
    drop(new);
    let mut connection = Connection {
        socket,
        disk,
        shared: Arc::clone(shared),
        agreed,
        io,
        pending: vec![Pending::default(); SLOTS],
        arriving: None,
        stalled: None,
        answers: Answers::with_capacity(SLOTS),
        held: 0,
        spare: Vec::with_capacity(SLOTS),
        last: false,
        hung_up: false,
    };
    connection.run(carry_out)
}

impl<F: Future<Output = Completed>> Connection<F> {
    fn run(&mut self, make: impl Fn(BlockDevice, Job) -> F) -> Result<(), ConnectionError> {
        let mut drain_deadline = None;
        loop {
            self.take_requests(&make)?;
            let busy = self.collect();
            let freed = self.send()?;
            if self.shared.is_ending() && !self.last {
                self.last = true;
            }
            if self.shared.is_ending() && drain_deadline.is_none() {
                drain_deadline = Some(Instant::now() + DRAIN_TIMEOUT);
            }
            let in_flight = self.io.tasks().reserved();
            if self.last || self.hung_up {
                // What a client has sent in part only, it never asked for.
                let arriving = usize::from(self.arriving.is_some());
                if in_flight <= arriving && self.answers.is_empty() {
                    return Ok(());
                }
            }
            if drain_deadline.is_some_and(|at| at <= Instant::now()) {
                return Err(ConnectionError::Stuck);
            }
            if self.stalled.is_some() && freed {
                continue;
            }
            // A client with several requests in flight sends the next ones as the answers come in;
            // one that waits for each has not had the time to.
            let perhaps = self.socket.readable || freed && in_flight > 0;
            let takes = !self.last && !self.hung_up && self.stalled.is_none();
            if perhaps && takes && self.receive()? {
                continue;
            }
            if !busy && !self.io.spin() && self.io.prepare_sleep() {
                self.socket.wait(&mut self.io, drain_deadline)?;
            }
        }
    }

    /// Receives what is there: first the rest of the data that are arriving, then what follows.
    /// Whether there was anything.
    fn receive(&mut self) -> Result<bool, ConnectionError> {
        let (outcome, wanted, space) = match &mut self.arriving {
            Some(write) => {
                let rest = write.data.get_mut(write.got..write.request.len as usize);
                self.socket.receive_after(rest.unwrap_or_default())
            }
            None => self.socket.receive_after(&mut []),
        };
        match outcome {
            Ok(0) => self.hung_up = true,
            Ok(count) => {
                let data = count.min(wanted);
                if let Some(write) = &mut self.arriving {
                    write.got += data;
                }
                self.socket.input.to += count - data;
                // Less than there was room for is all that there is, until we are woken for more.
                self.socket.readable = count == wanted + space || self.socket.closing;
            }
            Err(Errno::AGAIN) => {
                self.socket.readable = false;
                return Ok(false);
            }
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET | Errno::PIPE) => self.hung_up = true,
            Err(errno) => return Err(ConnectionError::Socket(errno)),
        }
        Ok(true)
    }

    /// Begins with every request that is here, for which there is a slot.
    fn take_requests(
        &mut self,
        make: &impl Fn(BlockDevice, Job) -> F,
    ) -> Result<(), ConnectionError> {
        while !self.last {
            if let Some(mut write) = self.arriving.take() {
                let rest = self.socket.input.rest();
                let len = write.request.len as usize;
                let here = rest.len().min(len - write.got);
                if let (Some(to), Some(from)) =
                    (write.data.get_mut(write.got..write.got + here), rest.get(..here))
                {
                    to.copy_from_slice(from);
                }
                self.socket.input.consume(here);
                write.got += here;
                if write.got < len {
                    self.arriving = Some(write);
                    return Ok(());
                }
                self.begin(write.slot, write.request, write.data, make);
                continue;
            }
            let request = match self.stalled.take() {
                Some(request) => request,
                None => {
                    let Some((head, _)) = self.socket.input.rest().split_first_chunk() else {
                        return Ok(());
                    };
                    let request = Request::decode(head).ok_or_else(|| {
                        ConnectionError::Protocol(
                            "the client sent something that is no request".into(),
                        )
                    })?;
                    self.socket.input.consume(Request::SIZE);
                    request
                }
            };
            if request.command == command::DISC {
                self.last = true;
                return Ok(());
            }
            if request.payload() > MAX_PAYLOAD {
                let len = request.len;
                return Err(ConnectionError::Protocol(format!(
                    "the client sent a write of {len} bytes"
                )));
            }
            let needs = match request.command {
                command::READ if request.len <= MAX_PAYLOAD => request.len as usize,
                _ => request.payload() as usize,
            };
            if self.held > 0 && self.held + needs > MAX_HELD {
                self.stalled = Some(request);
                return Ok(());
            }
            let Some(slot) = self.io.tasks().reserve() else {
                self.stalled = Some(request);
                return Ok(());
            };
            self.held += needs;
            let mut data = self.spare.pop().unwrap_or_default();
            if data.len() < needs {
                data.resize(needs, 0);
            }
            if let Some(pending) = self.pending.get_mut(slot) {
                *pending = Pending { cookie: request.cookie, checked: None, held: needs };
            }
            if request.payload() > 0 {
                self.arriving = Some(PartialWrite { slot, request, data, got: 0 });
            } else {
                self.begin(slot, request, data, make);
            }
        }
        Ok(())
    }

    fn begin(
        &mut self,
        slot: usize,
        request: Request,
        data: Vec<u8>,
        make: &impl Fn(BlockDevice, Job) -> F,
    ) {
        match check(&request, self.disk.geometry(), self.agreed) {
            Ok(request) => {
                if let Some(pending) = self.pending.get_mut(slot) {
                    pending.checked = Some(request);
                }
                self.io.tasks().start(slot, make(self.disk.clone(), Job { request, data }));
            }
            Err((error, text)) => {
                let head = self.refusal(request.cookie, error, text);
                self.answers.push(Answer { slot, head, data, len: 0 });
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
        let Self { io, pending, answers, agreed, shared, .. } = self;
        io.run_once(|slot, Completed { outcome, data }| {
            let pending = pending.get(slot).copied().unwrap_or_default();
            let (head, len) = answer(&pending, *agreed, &outcome);
            if let Err(error) = &outcome {
                shared.failed(error);
            }
            answers.push(Answer { slot, head, data, len });
        })
    }

    /// Sends answers, as many as the socket takes. Whether a slot has become free.
    fn send(&mut self) -> Result<bool, ConnectionError> {
        if self.socket.blocked {
            return Ok(false);
        }
        let Self { socket, io, answers, pending, held, spare, .. } = self;
        let mut freed = false;
        let sent = answers.send(&*socket, |answer| {
            let pending = pending.get_mut(answer.slot).map(std::mem::take).unwrap_or_default();
            *held = held.saturating_sub(pending.held);
            io.tasks().release(answer.slot);
            if answer.data.capacity() <= KEEP && answer.data.capacity() > 0 {
                spare.push(answer.data);
            }
            freed = true;
        });
        match sent.map_err(ConnectionError::Socket)? {
            Sent::All => {}
            Sent::Blocked => socket.block(io)?,
            // What is in flight comes to its end.
            Sent::Gone => self.hung_up = true,
        }
        Ok(freed)
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
            // Which blocks are allocated is not known, so all of them count as such.
            Some(Checked { action: Action::BlockStatus, len, .. }) => {
                (Head::extent(cookie, ALLOCATION_CONTEXT, len, 0), 0)
            }
            _ => (Head::done(cookie), 0),
        },
    }
}
