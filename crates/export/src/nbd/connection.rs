//! Connection of one client: its handshake, and then its requests, many of them in flight.
//!
//! A single thread reads requests, submits them, takes completions and writes replies. It sleeps
//! until any of these is possible ([`IoThread`]). Requests that one read receives are submitted
//! together, and completions that arrive together are answered by one write. Requests are answered
//! in the order of their completion.
//!
//! If a client does not receive its replies, the server stops reading its requests: a request keeps
//! its slot and data buffer until its reply is sent. To limit these buffers, a long read is
//! executed in pieces, each after the previous piece was sent. In a structured reply, each piece is
//! a chunk. A reply that must not be split (a simple reply, or one with the flag DF) cannot be
//! interleaved with another reply. A long read with an unsplittable reply waits until no other
//! request is in flight, and later requests wait for the read.

use super::admission::NewClient;
use super::handshake::{ALLOCATION_CONTEXT, Agreed};
use super::negotiate::negotiate;
use super::replies::{Replies, Reply, Sent};
use super::reply_coalescing::ReplyCoalescing;
use super::request::{Action, Checked, Completed, EXTENTS, Job, check, execute, number};
use super::shared::{Offer, Registered, ServerShared};
use super::socket::{ClientSocket, ConnectionError, DRAIN_TIMEOUT, INPUT};
use crate::data::{Data, DataMemory};
use crate::io_thread::IoThread;
use rustix::io::Errno;
use shadowbell_block::{BlockError, BlockQueue};
use shadowbell_memory::EventFd;
use shadowbell_nbd::reply::Head;
use shadowbell_nbd::wire::{MAX_PAYLOAD, NbdError, Request, command, flag};
use std::future::Future;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// Largest number of requests of a client that are in flight or not yet answered.
const SLOTS: usize = 128;
/// Largest number of data bytes of the requests of a client that are in flight or not yet answered.
/// A single request may exceed it.
const MAX_HELD: usize = 8 << 20;
/// Size of the pieces of a long read, in bytes. Larger pieces delay other clients and do not make
/// long reads faster.
const PIECE: u32 = 256 << 10;
/// Largest size in bytes at which a read whose reply must not be split is executed in one piece.
const WHOLE: u32 = 1 << 20;
/// Minimum size in bytes of a long write. After the data of a long write, only the header of the
/// next request is received: if that is another long write, its data is received directly into its
/// buffer. After a short write, as many requests as possible are received, at the cost of a copy of
/// their data.
const LONG_WRITE: u32 = 16 << 10;

/// Write whose data is not yet complete.
struct PartialWrite {
    slot: usize,
    request: Request,
    data: Data,
    got: usize,
}

/// State of the request in a slot.
#[derive(Clone, Copy, Default)]
struct Pending {
    cookie: u64,
    checked: Option<Checked>,
    held: usize,
    /// Number of bytes of a read that were answered.
    done: u32,
    /// True if the reply must not be split into chunks.
    is_whole: bool,
}

/// Longest piece of a read of `len` bytes.
fn longest_piece(len: u32, is_whole: bool) -> u32 {
    if is_whole && len <= WHOLE { WHOLE } else { PIECE }
}

impl Pending {
    /// Next piece of a read. For other requests, the whole request.
    fn piece(&self) -> Option<Checked> {
        let whole = self.checked?;
        if whole.action != Action::Read {
            return Some(whole);
        }
        let (offset, len) = (whole.offset + u64::from(self.done), whole.len - self.done);
        let longest = longest_piece(whole.len, self.is_whole);
        Some(Checked { offset, len: len.min(longest), ..whole })
    }

    /// True if more pieces of a read follow the current one.
    fn has_more(&self) -> bool {
        let read = self.checked.filter(|checked| checked.action == Action::Read);
        read.is_some_and(|read| read.len - self.done > longest_piece(read.len, self.is_whole))
    }
}

struct Connection<F> {
    socket: ClientSocket,
    disk: BlockQueue,
    shared: Arc<ServerShared>,
    agreed: Agreed,
    io: IoThread<F>,
    pending: Vec<Pending>,
    /// Write whose data is not completely received.
    arriving: Option<PartialWrite>,
    /// Request that waits for a slot or for memory.
    stalled: Option<Request>,
    replies: Replies,
    held: usize,
    memory: DataMemory,
    coalescing: ReplyCoalescing,
    /// True if the last request was a long write.
    writes_long: bool,
    /// True while a read whose reply must not be interleaved is executed in pieces. No other
    /// request is started in this time.
    runs_alone: bool,
    /// True if a reply that must not be interleaved cannot be completed, because the disk failed
    /// after a part was sent.
    broken: bool,
    /// True if no more requests are taken, because the client has sent a disconnect, or the server
    /// ends.
    last: bool,
    /// True if the client has closed the connection.
    hung_up: bool,
    /// Must be the last field, because fields are dropped in order: the queue of the disk has to be
    /// closed before the thread counts as ended.
    registered: Registered,
}

/// Serves the client of `socket` until it disconnects or [`Registered::is_ending`].
pub(super) fn serve(
    socket: OwnedFd,
    new: NewClient,
    shared: &Arc<ServerShared>,
) -> Result<(), ConnectionError> {
    let event = EventFd::new()?;
    let (registered, Offer { disk, export, .. }) = shared.register_client(event.try_clone()?);
    let mut io = IoThread::new(SLOTS, event)?;
    let mut socket = ClientSocket::new(socket, &io)?;
    let outcome = negotiate(&mut socket, &mut io, export, &registered, new.peer)?;
    let Some((agreed, _admission)) = outcome else { return Ok(()) };
    drop(new);
    // The queue of the disk is opened after the admission, so that a refused client uses none.
    let disk = io.open(&disk).map_err(ConnectionError::Queue)?;
    let mut connection = Connection {
        socket,
        disk,
        shared: Arc::clone(shared),
        agreed,
        io,
        pending: vec![Pending::default(); SLOTS],
        arriving: None,
        stalled: None,
        replies: Replies::with_capacity(SLOTS),
        held: 0,
        memory: DataMemory::new(SLOTS),
        coalescing: ReplyCoalescing::default(),
        writes_long: false,
        runs_alone: false,
        broken: false,
        last: false,
        hung_up: false,
        registered,
    };
    connection.run(&execute)
}

impl<F: Future<Output = Completed>> Connection<F> {
    fn run(&mut self, make: &impl Fn(BlockQueue, Job) -> F) -> Result<(), ConnectionError> {
        let outcome = self.run_on(make);
        self.socket.close();
        outcome
    }

    fn run_on(&mut self, make: &impl Fn(BlockQueue, Job) -> F) -> Result<(), ConnectionError> {
        let mut drain_deadline = None;
        loop {
            self.take_requests(make)?;
            let busy = self.collect();
            if self.holds_replies() {
                // While the thread polls, it does not call epoll_wait. So only a read of the socket
                // tells whether the client has sent something.
                self.socket.readable = true;
                self.receive()?;
                continue;
            }
            let freed = self.send(make)?;
            let is_sent = self.replies.is_empty() && !self.socket.has_pending();
            if self.broken && is_sent {
                return Err(ConnectionError::Broken);
            }
            let is_ending = self.registered.is_ending();
            if is_ending && !self.last {
                self.last = true;
            }
            if is_ending && drain_deadline.is_none() {
                drain_deadline = Some(Instant::now() + DRAIN_TIMEOUT);
            }
            if self.hung_up {
                self.io.cancel_held();
            }
            // The client connects again and repeats its requests, because it got no replies.
            if is_ending && is_sent && self.io.holds_requests() {
                return Err(ConnectionError::Stopped);
            }
            let in_flight = self.io.tasks().reserved();
            if self.last || self.hung_up {
                // A partially received write has a slot but was never started. The end of the
                // connection drops it, so it is not waited for.
                let arriving = usize::from(self.arriving.is_some());
                if in_flight <= arriving && (is_sent || self.hung_up && self.replies.is_empty()) {
                    return Ok(());
                }
            }
            if drain_deadline.is_some_and(|at| at <= Instant::now()) {
                return Err(ConnectionError::Stuck);
            }
            // The input may contain requests that waited for the end of a read that must not be
            // interleaved. No event wakes the thread to take them.
            let waits = self.stalled.is_some() || self.socket.input.rest().len() >= Request::SIZE;
            if waits && freed && !self.runs_alone {
                continue;
            }
            // A client with several requests in flight sends new ones when it receives replies, so
            // the thread tries to receive. A client with a single request cannot have sent another
            // one yet.
            let perhaps = self.socket.readable || freed && in_flight > 0;
            let takes = !self.last && !self.hung_up && !self.runs_alone && self.stalled.is_none();
            if perhaps && takes && self.receive()? {
                continue;
            }
            if busy {
                continue;
            }
            let again = self.io.polls_again_by_call();
            if again {
                // While the thread polls, it does not call epoll_wait. So only an attempt tells
                // whether the socket is readable or writable.
                self.socket.readable = true;
                self.socket.blocked = false;
            }
            if !again && self.io.prepare_sleep() {
                self.socket.wait(&mut self.io, drain_deadline)?;
            }
        }
    }

    /// True if pending replies are held back, to be sent together with the replies to the client's
    /// next requests.
    fn holds_replies(&mut self) -> bool {
        let takes = !self.last && !self.hung_up && !self.runs_alone && self.stalled.is_none();
        // Replies to reads are not held back, because the transfer of their data takes most of the
        // time.
        takes
            && !self.socket.blocked
            && !self.registered.is_ending()
            && self.replies.have_no_data()
            && self.coalescing.holds(self.replies.len())
    }

    /// Receives available bytes: first the rest of a write's data, then further requests. Returns
    /// true if bytes were received.
    fn receive(&mut self) -> Result<bool, ConnectionError> {
        let rest = self.arriving.as_mut();
        let rest = rest.map(|write| (&mut write.data, write.got, write.request.len as usize));
        let most = if self.writes_long { Request::SIZE } else { INPUT };
        let (outcome, wanted, space) = self.socket.receive_after(rest, most);
        match outcome {
            Ok(0) if wanted + space == 0 => return Ok(false),
            Ok(0) => self.hung_up = true,
            Ok(count) => {
                let data = count.min(wanted);
                if let Some(write) = &mut self.arriving {
                    write.got += data;
                }
                self.socket.input.to += count - data;
                // If fewer bytes were received than requested, the socket is empty until epoll
                // reports more.
                self.socket.readable =
                    count == wanted + space || self.socket.closing || self.socket.has_more();
            }
            Err(Errno::AGAIN) => {
                self.socket.readable = false;
                return Ok(false);
            }
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET | Errno::PIPE) => self.hung_up = true,
            Err(errno) => return Err(self.socket.error(errno)),
        }
        Ok(true)
    }

    /// Starts all completely received requests, as long as there are free slots.
    fn take_requests(
        &mut self,
        make: &impl Fn(BlockQueue, Job) -> F,
    ) -> Result<(), ConnectionError> {
        while !self.last && !self.runs_alone {
            if let Some(mut write) = self.arriving.take() {
                let rest = self.socket.input.rest();
                let len = write.request.len as usize;
                let here = rest.len().min(len - write.got);
                write.data.put(write.got, rest.get(..here).unwrap_or_default());
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
                            "the client sent an invalid request (wrong magic number)".into(),
                        )
                    })?;
                    self.socket.input.consume(Request::SIZE);
                    self.writes_long = request.payload() >= LONG_WRITE;
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
            let is_whole = !self.agreed.structured || request.flags & flag::DF != 0;
            let needs = match request.command {
                command::READ => request.len.min(longest_piece(request.len, is_whole)) as usize,
                command::BLOCK_STATUS => EXTENTS,
                _ => request.payload() as usize,
            };
            let is_long = request.command == command::READ && request.len > WHOLE;
            if is_whole && is_long && self.io.tasks().reserved() > 0 {
                self.stalled = Some(request);
                return Ok(());
            }
            if self.held > 0 && self.held + needs > MAX_HELD {
                self.stalled = Some(request);
                return Ok(());
            }
            let Some(slot) = self.io.tasks().reserve() else {
                self.stalled = Some(request);
                return Ok(());
            };
            self.held += needs;
            let data = self.room(&request, needs);
            if let Some(pending) = self.pending.get_mut(slot) {
                let cookie = request.cookie;
                *pending = Pending { cookie, checked: None, held: needs, done: 0, is_whole };
            }
            if request.payload() > 0 {
                self.arriving = Some(PartialWrite { slot, request, data, got: 0 });
            } else {
                self.begin(slot, request, data, make);
            }
        }
        Ok(())
    }

    /// Allocates a buffer of `needs` bytes for the request's data.
    fn room(&mut self, request: &Request, needs: usize) -> Data {
        let moves = matches!(request.command, command::READ | command::WRITE);
        let is_direct = moves
            && !self.socket.has_tls()
            // For a long read, `needs` is the size of a piece, so the whole length is checked
            // separately.
            && self.disk.is_direct(request.offset, needs)
            && request.len.is_multiple_of(self.disk.geometry().block_size);
        let shared = is_direct.then(|| self.memory.shared(&self.disk, needs)).flatten();
        shared.unwrap_or_else(|| self.memory.own(needs))
    }

    fn begin(
        &mut self,
        slot: usize,
        request: Request,
        data: Data,
        make: &impl Fn(BlockQueue, Job) -> F,
    ) {
        match check(&request, self.disk.geometry(), self.agreed) {
            Ok(checked) => {
                let Some(pending) = self.pending.get_mut(slot) else { return };
                pending.checked = Some(checked);
                self.runs_alone = pending.is_whole && pending.has_more();
                let request = pending.piece().unwrap_or(checked);
                self.io.tasks().start(slot, make(self.disk.clone(), Job { request, data }));
            }
            Err((error, text)) => {
                let head = self.refusal(request.cookie, error, text);
                self.replies.push(Reply { slot, head, data, len: 0, more: false });
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

    /// Submits the started requests and takes completions. Returns true if there was any work.
    fn collect(&mut self) -> bool {
        let Self { io, pending, replies, agreed, shared, broken, .. } = self;
        io.run_once(|slot, Completed { outcome, data, extents }| {
            let pending = pending.get(slot).copied().unwrap_or_default();
            if let Err(error) = &outcome {
                shared.failed(error);
            }
            let more = outcome.is_ok() && pending.has_more();
            if pending.is_whole && pending.done > 0 {
                // Once the first piece of a reply was sent, the reply cannot report an error: it is
                // continued, or the connection ends.
                *broken |= outcome.is_err();
                let len = pending.piece().filter(|_| outcome.is_ok()).map_or(0, |piece| piece.len);
                replies.push(Reply { slot, head: Head::none(), data, len: len as usize, more });
                return;
            }
            let (head, len) = reply(&pending, *agreed, &outcome, extents);
            replies.push(Reply { slot, head, data, len, more });
        })
    }

    /// Sends as many replies as the socket accepts, and starts the next pieces of long reads.
    /// Returns true if a slot was freed.
    fn send(&mut self, make: &impl Fn(BlockQueue, Job) -> F) -> Result<bool, ConnectionError> {
        if self.socket.blocked {
            return Ok(false);
        }
        let Self { socket, io, replies, pending, held, memory, runs_alone, disk, .. } = self;
        let mut freed = false;
        let sent = replies.send(socket, |reply, is_sent| {
            if reply.more
                && is_sent
                && let Some(pending) = pending.get_mut(reply.slot)
            {
                pending.done += PIECE;
                if let Some(request) = pending.piece() {
                    let job = Job { request, data: reply.data };
                    io.tasks().start(reply.slot, make(disk.clone(), job));
                    return;
                }
            }
            *runs_alone = false;
            let pending = pending.get_mut(reply.slot).map(std::mem::take).unwrap_or_default();
            *held = held.saturating_sub(pending.held);
            io.tasks().release(reply.slot);
            memory.give_back(reply.data);
            freed = true;
        });
        match sent.map_err(|errno| socket.error(errno))? {
            Sent::All => {}
            Sent::Blocked => socket.block(io)?,
            // Requests in flight still complete, although the client has disconnected.
            Sent::Gone => self.hung_up = true,
        }
        Ok(freed)
    }
}

/// Creates the reply to a completed request, or to the completed piece of a read. Returns it with
/// the length of its data.
fn reply(
    pending: &Pending,
    agreed: Agreed,
    outcome: &Result<(), BlockError>,
    extents: u32,
) -> (Head, usize) {
    let Pending { cookie, checked, is_whole, .. } = *pending;
    let piece = pending.piece().filter(|piece| piece.action == Action::Read);
    let len = piece.map_or(0, |piece| piece.len);
    match (outcome, agreed.structured) {
        (Err(error), true) => (Head::error(cookie, number(error), &error.to_string()), 0),
        (Err(error), false) => (Head::simple(cookie, Err(number(error))), 0),
        (Ok(()), false) => (Head::simple(cookie, Ok(())), len as usize),
        (Ok(()), true) => match (piece, checked) {
            // A data chunk must not be empty.
            (Some(piece), Some(whole)) if piece.len > 0 => {
                let is_last = is_whole || !pending.has_more();
                let announced = if is_whole { whole.len } else { piece.len };
                (Head::data(cookie, piece.offset, announced, is_last), len as usize)
            }
            (_, Some(Checked { action: Action::BlockStatus { .. }, .. })) => {
                (Head::extents(cookie, ALLOCATION_CONTEXT, extents), 8 * extents as usize)
            }
            _ => (Head::done(cookie), 0),
        },
    }
}
