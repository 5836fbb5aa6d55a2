//! Reactor: one thread that serves any number of devices.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use shadowbell_state::Descriptors;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use tracing::{debug, warn};

use super::attachment::Attachment;
use super::inbox::{Handle, Inbox, PortId, Request};
use super::limits::Limits;
use super::listener::Listener;
use super::recorder::PortRecorder;
use super::saved::{SavedPort, SavedSession};
use super::session::{EndReason, Session, Turn};
use super::sys::epoll_wait;
use super::turn::{Context, Slice};
use crate::Errno;
use crate::descriptor::{Closer, Inspector, Stream};
use crate::device::Device;
use crate::exchange::Exchange;
use crate::handover::{RestoreError, SaveError};
use crate::log_limit::LogLimit;

/// Delay after a client could not be accepted because descriptors or memory were exhausted.
const RETRY_ACCEPT: Duration = Duration::from_secs(1);

/// Interval for checking whether the next client can be accepted, while too many descriptors of an
/// earlier client are being closed. The close of a descriptor takes microseconds in most cases, and
/// never ends in the others.
const RETRY_CLOSED: Duration = Duration::from_millis(50);

/// Interval for checking whether the replay of a restored client can begin.
const RETRY_REPLAY: Duration = Duration::from_millis(10);

/// Rate limit of a device's clients. `CLIENTS_AT_ONCE` clients are accepted without a pause, and
/// after that one more per interval `NEXT_CLIENT`. The limit exists because each client costs a
/// reset of the device and a few log messages. A virtual machine that restarts in a loop stays
/// below the limit.
const CLIENTS_AT_ONCE: u32 = 256;
const NEXT_CLIENT: Duration = Duration::from_millis(50);

/// Maximum number of epoll events per wait.
const EVENTS: usize = 64;

/// Epoll token of the inbox's eventfd. The numbers of ports start at 1, so no port has this token.
const WAKE: u64 = 0;

/// Reason for the return of [`Reactor::run`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    /// [`Handle::stop`] was called, and all devices are dropped.
    Stopped,
    /// [`Handle::freeze`] was called, and the reactor is quiesced.
    Frozen,
}

/// Device, the source of its clients, and the current client.
struct Port {
    device: Box<dyn Device>,
    listener: Option<Listener>,
    state: State,
    /// True if a client may wait in the backlog.
    has_backlog: bool,
    /// True if the port is in the reactor's queue `ready`.
    queued: bool,
    /// True if no more clients are accepted. When the port is removed, `removed` is notified.
    closing: bool,
    removed: Vec<SyncSender<()>>,
    /// Number of completion callbacks that were created for the device.
    sequence: u64,
    /// Closer of the clients' descriptors.
    closer: Arc<Closer>,
    /// Rate limit of warnings that clients cause.
    log: Arc<LogLimit>,
    admissions: Admissions,
    /// Time of the next attempt to accept a client, or to begin the replay of the client.
    retry: Option<Instant>,
    replay: Replay,
    /// Deadline of this port in the reactor's timers.
    timer: Option<Instant>,
    /// Storage for checkpoints of the port, for crash recovery; `None` if checkpoints are off.
    recorder: Option<Box<dyn PortRecorder>>,
    /// True if a client of a dead server process has disconnected, and the device has not yet
    /// released that client.
    leaving: bool,
}

impl Port {
    fn new(device: Box<dyn Device>, limits: &Limits) -> Self {
        Self {
            device,
            listener: None,
            state: State::Free,
            has_backlog: false,
            queued: false,
            closing: false,
            removed: Vec::new(),
            sequence: 0,
            closer: Arc::new(Closer::new(limits.close_at_once)),
            log: Arc::default(),
            admissions: Admissions::new(),
            retry: None,
            replay: Replay::Done,
            timer: None,
            recorder: None,
            leaving: false,
        }
    }

    /// Stores a checkpoint of the device and its client.
    fn record(&mut self) {
        let Some(recorder) = &mut self.recorder else { return };
        let mut fds = Descriptors::default();
        let leaving = !matches!(self.state, State::Free | State::Attached(_));
        let session = match &mut self.state {
            State::Attached(attachment) => attachment.busy_session(),
            State::Free | State::Unfinished { .. } | State::Leaving { .. } => None,
        };
        let described = match session {
            Some(session) => {
                if session.start_recording() {
                    let described = session.describe(&mut *self.device, &mut fds);
                    described.map(|(session, device)| (Some(session), device))
                } else {
                    Err(SaveError::Client(
                        "a part of a message was received before this process took over".to_owned(),
                    ))
                }
            }
            None => self.device.record(&mut fds).map(|device| (None, device)),
        };
        let (listener, log) = (self.listener.as_ref(), &self.log);
        record(&mut **recorder, listener, log, leaving, described, fds);
    }

    /// True if no request of the client is partly executed.
    fn is_quiesced(&mut self) -> bool {
        match &mut self.state {
            State::Free => true,
            State::Attached(attachment) => {
                attachment.busy_session().is_some_and(|session| session.is_quiesced())
            }
            State::Unfinished { .. } | State::Leaving { .. } => false,
        }
    }

    fn connection(&self, socket: OwnedFd) -> (Stream, Inspector) {
        let closer = &self.closer;
        let inspector = Inspector::new(Arc::clone(closer), Arc::clone(&self.log));
        (Stream::new(socket, Arc::clone(closer)), inspector)
    }

    fn set_lent(&mut self, is_lent: bool) {
        if let Some(listener) = &mut self.listener {
            listener.set_lent(is_lent);
        }
        if let State::Attached(attachment) = &mut self.state
            && let Some(session) = attachment.take_session()
        {
            session.set_lent(is_lent);
        }
    }
}

/// Port of a previous server process with its new device, before a reactor serves it. If it is
/// dropped before that, clients do not notice.
pub struct RestoredPort {
    port: Box<Port>,
    session: Option<Session>,
}

impl RestoredPort {
    /// Creates a port without its client, whose state is lost. The client is disconnected when the
    /// last descriptor of its socket is closed.
    #[must_use]
    pub fn without_client(listener: Listener, device: Box<dyn Device>, limits: &Limits) -> Self {
        let mut port = Box::new(Port::new(device, limits));
        // With `leaving`, the device releases the client first.
        (port.listener, port.leaving) = (Some(listener), true);
        Self { port, session: None }
    }

    /// Restores a port: its sockets, and in `device` the state of its client. `device` maps the
    /// client's memory. Mapping much memory may take long, so this function may be called on any
    /// thread, not only on the reactor's.
    ///
    /// # Errors
    ///
    /// [`RestoreError`].
    pub fn new(
        saved: SavedPort,
        fds: &mut Descriptors,
        device: Box<dyn Device>,
        limits: &Limits,
    ) -> Result<Self, RestoreError> {
        let SavedPort { listener, session, device: saved_device, leaving } = saved;
        let mut port = Box::new(Port::new(device, limits));
        // The saved device is null in a checkpoint that was written while the state of the client
        // could not be saved.
        if !saved_device.is_null() {
            port.device.restore(saved_device, fds, &port.closer)?;
        }
        port.leaving = leaving;
        // A port without a listener accepts no further clients.
        port.closing = listener.is_none();
        port.listener = listener.map(|saved| Listener::restore(&saved, fds)).transpose()?;
        let wrap = |socket| port.connection(socket);
        let session =
            session.map(|saved| Session::restore(saved, fds, wrap, limits)).transpose()?;
        Ok(Self { port, session })
    }
}

impl Handle {
    /// Starts to serve a port of the previous server process, with checkpoints. `begin` is called
    /// on the reactor's thread when `recorder` has stored the first checkpoint, before the sockets
    /// are used.
    pub fn restore(
        &self,
        restored: RestoredPort,
        recorder: Box<dyn PortRecorder>,
        begin: impl FnOnce() + Send + 'static,
    ) -> PortId {
        let port = self.0.new_port();
        let (restored, begin) = (Box::new(restored), Box::new(begin));
        self.0.push(Request::Restore { port, restored, recorder, begin });
        port
    }
}

/// Handling of the first message of a restored client. If that message has crashed the previous
/// process, it crashes this one too, so the recorder counts such deaths for each client.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Replay {
    /// The message is not handled yet.
    Pending,
    /// The message is being handled, or waits for the device.
    Running,
    /// The message is handled, or there was none.
    Done,
}

impl Replay {
    /// Begins the replay, if it is pending. Returns false if it has to wait.
    fn begin(&mut self, recorder: &mut Option<Box<dyn PortRecorder>>) -> bool {
        if *self == Self::Pending {
            if !recorder.as_mut().is_none_or(|recorder| recorder.begin_replay()) {
                return false;
            }
            *self = Self::Running;
        }
        true
    }

    /// Ends the replay, or interrupts it.
    fn end(&mut self, recorder: &mut Option<Box<dyn PortRecorder>>, is_done: bool) {
        if *self != Self::Done {
            recorder.iter_mut().for_each(|recorder| recorder.end_replay(is_done));
            *self = if is_done { Self::Done } else { Self::Pending };
        }
    }
}

/// Stores a checkpoint of a device and its client. If the state of the client cannot be saved, the
/// checkpoint contains no client.
fn record(
    recorder: &mut dyn PortRecorder,
    listener: Option<&Listener>,
    log: &LogLimit,
    leaving: bool,
    described: Result<(Option<SavedSession>, serde_json::Value), SaveError>,
    mut fds: Descriptors,
) {
    let (session, device, leaving) = match described {
        Ok((session, device)) => (session, device, leaving),
        Err(error) => {
            log.warn(format_args!("this client will not survive a crash of this server: {error}"));
            fds = Descriptors::default();
            (None, serde_json::Value::Null, true)
        }
    };
    let listener = match listener.map(|listener| listener.save(&mut fds)).transpose() {
        Ok(listener) => listener,
        Err(error) => {
            return log.warn(format_args!("the checkpoint of a socket has failed: {error}"));
        }
    };
    recorder.record(&SavedPort { listener, session, device, leaving }, fds);
}

/// Rate limit of a device's clients.
struct Admissions {
    left: u32,
    /// Time of the last increase of `left`.
    added: Instant,
}

impl Admissions {
    fn new() -> Self {
        Self { left: CLIENTS_AT_ONCE, added: Instant::now() }
    }

    /// Time until which the next client has to wait; `None` if it can be accepted now.
    fn wait(&mut self, now: Instant) -> Option<Instant> {
        let periods =
            now.saturating_duration_since(self.added).as_millis() / NEXT_CLIENT.as_millis();
        if periods > 0 {
            let more = u32::try_from(periods).unwrap_or(CLIENTS_AT_ONCE);
            self.left = self.left.saturating_add(more).min(CLIENTS_AT_ONCE);
            self.added = now;
        }
        (self.left == 0).then(|| self.added + NEXT_CLIENT)
    }

    fn count(&mut self) {
        self.left = self.left.saturating_sub(1);
    }
}

enum State {
    /// No client.
    Free,
    /// A client is connected.
    Attached(Box<Attachment>),
    /// The client has disconnected, but the device has not yet completed a request of that client.
    /// The device is asked to release the client only after that.
    Unfinished { sequence: u64 },
    /// The client has disconnected, and the device is releasing it.
    Leaving { sequence: u64 },
}

/// Server of any number of devices, on the thread that calls [`run`](Self::run).
///
/// If the reactor is dropped, the devices are dropped without a call of [`Device::disconnected`].
/// [`Handle::stop`] avoids this.
pub struct Reactor {
    epoll: Arc<OwnedFd>,
    inbox: Arc<Inbox>,
    limits: Limits,
    ports: BTreeMap<PortId, Port>,
    /// Ports whose connection may have work.
    ready: VecDeque<PortId>,
    timers: BTreeSet<(Instant, PortId)>,
    requests: Vec<Request>,
    /// Deadline for the devices to release their clients, after a stop.
    stop: Option<Instant>,
    /// True from the start of a freeze until the reactor is quiesced.
    freezing: bool,
    /// True if the reactor is quiesced; the next run resumes it.
    frozen: bool,
    /// Ring for replies, created for the first client with checkpoints. `None` if io_uring is
    /// unavailable.
    exchange: OnceCell<Option<Exchange>>,
}

fn make_exchange() -> Option<Exchange> {
    let exchange = Exchange::new();
    if let Err(error) = &exchange {
        warn!(
            %error,
            "io_uring is unavailable: if this process is killed while it answers a client, the \
             client may wait for the reply for ever"
        );
    }
    exchange.ok()
}

impl Reactor {
    /// Creates a reactor without devices.
    ///
    /// # Errors
    ///
    /// Descriptors or memory are exhausted.
    pub fn new(limits: Limits) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(CreateFlags::CLOEXEC)?);
        let inbox = Arc::new(Inbox::new()?);
        epoll::add(&epoll, inbox.wake_fd(), EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Self {
            epoll,
            inbox,
            limits,
            ports: BTreeMap::new(),
            ready: VecDeque::new(),
            timers: BTreeSet::new(),
            requests: Vec::new(),
            stop: None,
            freezing: false,
            frozen: false,
            exchange: OnceCell::new(),
        })
    }

    /// Handle for other threads.
    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.inbox))
    }

    /// Starts to serve `device` on `listener`.
    ///
    /// # Errors
    ///
    /// The socket cannot be added to the epoll instance.
    pub fn add(&mut self, listener: Listener, device: Box<dyn Device>) -> io::Result<PortId> {
        let port = self.inbox.new_port();
        self.insert(port, listener, device)?;
        Ok(port)
    }

    /// Serves devices until [`Handle::stop`] or [`Handle::freeze`]. After a freeze, a further call
    /// resumes.
    ///
    /// # Errors
    ///
    /// Waiting for events failed. The reactor cannot continue.
    pub fn run(&mut self) -> io::Result<RunEnd> {
        while self.poll_once(None)? {}
        Ok(if self.frozen { RunEnd::Frozen } else { RunEnd::Stopped })
    }

    /// Serves a port of the previous server process. The sockets are not used before this reactor
    /// [runs](Self::run). If the reactor is dropped before that, clients do not notice.
    ///
    /// # Errors
    ///
    /// The sockets cannot be added to the epoll instance.
    pub fn serve_restored(&mut self, restored: RestoredPort) -> io::Result<PortId> {
        let id = self.inbox.new_port();
        self.insert_restored(id, restored)?;
        self.frozen = true;
        Ok(id)
    }

    fn insert_restored(&mut self, id: PortId, restored: RestoredPort) -> Result<(), Errno> {
        let RestoredPort { mut port, session } = restored;
        if let Some(listener) = &port.listener {
            self.watch_listener(id, listener)?;
        }
        if let Some(session) = session {
            port.replay = Replay::Pending;
            port.state = State::Attached(Box::new(Attachment::new(id, &self.epoll, session)?));
        }
        self.ports.insert(id, *port);
        Ok(())
    }

    /// Sets the recorder that stores checkpoints of a port, for the next server process. It must be
    /// called before the reactor [runs](Self::run).
    pub fn record_with(&mut self, port: PortId, recorder: Box<dyn PortRecorder>) {
        if let Some(port) = self.ports.get_mut(&port) {
            port.recorder = Some(recorder);
            port.device.reset_checkpoint();
            port.record();
        }
    }

    /// Drops a [frozen](RunEnd::Frozen) reactor after the next server process has restored it.
    /// Clients and devices are not notified, and the socket files stay.
    pub fn release_to_successor(mut self) {
        self.ports.values_mut().for_each(|port| port.set_lent(true));
    }

    /// Waits for work, at most for `timeout`, and does it. Returns false when a stop or a freeze is
    /// complete.
    ///
    /// # Errors
    ///
    /// Waiting for events failed.
    pub fn poll_once(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        if std::mem::take(&mut self.frozen) {
            self.resume_all();
        }
        self.wait(timeout)?;
        self.handle_requests();
        for _ in 0..self.ready.len() {
            if let Some(port) = self.ready.pop_front() {
                self.turn(port);
            }
        }
        self.expire();
        if self.freezing && self.ready.is_empty() && self.ports.values_mut().all(Port::is_quiesced)
        {
            self.freezing = false;
            self.frozen = true;
        }
        Ok(!self.stopped() && !self.frozen)
    }

    /// Starts to quiesce the reactor.
    fn freeze(&mut self) {
        if self.stop.is_some() || std::mem::replace(&mut self.freezing, true) {
            return;
        }
        // The timers are set again when the reactor resumes, with their full length.
        self.timers.clear();
        let all: Vec<_> = self.ports.keys().copied().collect();
        for id in all {
            let Some(port) = self.ports.get_mut(&id) else { continue };
            port.timer = None;
            if let State::Attached(attachment) = &mut port.state {
                attachment.take_back();
                self.queue(id);
            }
        }
    }

    /// Resumes after a freeze. Checks all sockets, because the reactor may have missed events. From
    /// then on, the sockets belong to this reactor and no longer to another process.
    fn resume_all(&mut self) {
        let all: Vec<_> = self.ports.keys().copied().collect();
        all.into_iter().for_each(|id| self.resume_port(id));
    }

    /// Begins to use the sockets of a port that was restored or frozen.
    fn resume_port(&mut self, id: PortId) {
        let Some(port) = self.ports.get_mut(&id) else { return };
        port.set_lent(false);
        if let State::Attached(attachment) = &mut port.state {
            if let Some(session) = attachment.take_session() {
                session.wake();
            }
            self.queue(id);
        } else if std::mem::take(&mut port.leaving) {
            self.notify_disconnect(id);
        } else if matches!(port.state, State::Free) && port.closing {
            self.remove_port(id);
        } else {
            port.has_backlog = true;
            self.accept(id);
        }
    }

    fn watch_listener(&self, id: PortId, listener: &Listener) -> Result<(), Errno> {
        // The watch is edge-triggered. With a level-triggered one, a client in the backlog would
        // keep the reactor awake.
        let watch = EventFlags::IN | EventFlags::ET;
        epoll::add(&self.epoll, listener, EventData::new_u64(id.0 << 1), watch)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let now_or_never = !self.ready.is_empty() || self.stopped();
        let timeout = if now_or_never { Some(Duration::ZERO) } else { self.time_left(timeout) };
        let timeout = match timeout {
            Some(Duration::ZERO) => timeout,
            _ if self.inbox.may_sleep() => timeout,
            _ => Some(Duration::ZERO),
        };
        let mut events = [MaybeUninit::<Event>::uninit(); EVENTS];
        match epoll_wait(&self.epoll, &mut events, timeout) {
            Ok(events) => {
                for event in events {
                    self.notify(event.data.u64(), event.flags);
                }
                Ok(())
            }
            Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Time until the next deadline, at most `timeout`.
    fn time_left(&self, timeout: Option<Duration>) -> Option<Duration> {
        let next = self.timers.first().map(|(until, _)| *until);
        let next = match (next, self.stop) {
            (Some(next), Some(stop)) => next.min(stop),
            (next, stop) => match next.or(stop) {
                Some(next) => next,
                None => return timeout,
            },
        };
        let left = next.saturating_duration_since(Instant::now());
        Some(timeout.map_or(left, |timeout| timeout.min(left)))
    }

    fn notify(&mut self, token: u64, flags: EventFlags) {
        if token == WAKE {
            self.inbox.woken();
            return;
        }
        let id = PortId(token >> 1);
        let Some(port) = self.ports.get_mut(&id) else { return };
        if token & 1 == 0 {
            port.has_backlog = true;
            if matches!(port.state, State::Free) {
                self.accept(id);
            } else {
                debug!(port = id.0, "a client waits until the attached client has disconnected");
            }
        } else if let State::Attached(attachment) = &mut port.state
            && let Some(session) = attachment.take_session()
        {
            session.notify(
                flags.contains(EventFlags::IN),
                flags.contains(EventFlags::OUT),
                flags.intersects(EventFlags::HUP | EventFlags::RDHUP | EventFlags::ERR),
            );
            self.queue(id);
        }
    }

    /// Executes the requests of other threads.
    fn handle_requests(&mut self) {
        let mut requests = std::mem::take(&mut self.requests);
        self.inbox.take(&mut requests);
        for request in requests.drain(..) {
            match request {
                Request::Add { port, listener, device, recorder } => {
                    if let Err(error) = self.insert(port, listener, device) {
                        warn!(port = port.0, "a device cannot be served: {error}");
                    } else if let Some(recorder) = recorder {
                        self.record_with(port, recorder);
                    }
                }
                Request::Restore { port, restored, recorder, begin } => {
                    let Ok(restored) = restored.downcast::<RestoredPort>() else { continue };
                    if let Err(error) = self.insert_restored(port, *restored) {
                        warn!(port = port.0, "a device cannot be served: {error}");
                    } else {
                        self.record_with(port, recorder);
                        begin();
                        self.resume_port(port);
                    }
                }
                Request::Remove { port, removed } => self.close(port, Some(removed)),
                Request::Stop => {
                    self.freezing = false;
                    self.stop.get_or_insert_with(|| Instant::now() + self.limits.stop);
                    let all: Vec<_> = self.ports.keys().copied().collect();
                    all.into_iter().for_each(|port| self.close(port, None));
                }
                Request::Freeze => self.freeze(),
                Request::Thaw => {
                    if std::mem::take(&mut self.freezing) {
                        self.resume_all();
                    }
                }
                Request::Completed { port, sequence, outcome } => {
                    self.completed(port, sequence, outcome);
                }
                Request::LivenessCheck(check) => check(),
                // The thread that shares the client's socket requests that the reactor reads it, as
                // after an event of the socket.
                Request::Turn { port } => self.notify(port.0 << 1 | 1, EventFlags::IN),
            }
        }
        self.requests = requests;
    }

    fn insert(
        &mut self,
        id: PortId,
        listener: Listener,
        device: Box<dyn Device>,
    ) -> Result<(), Errno> {
        if self.stop.is_some() {
            return Err(Errno::SHUTDOWN);
        }
        self.watch_listener(id, &listener)?;
        let mut port = Port::new(device, &self.limits);
        port.listener = Some(listener);
        self.ports.insert(id, port);
        Ok(())
    }

    /// Accepts the next client of a device, if possible.
    fn accept(&mut self, id: PortId) {
        if self.freezing {
            return;
        }
        loop {
            let Some(port) = self.ports.get_mut(&id) else { return };
            if !matches!(port.state, State::Free) || port.closing || !port.has_backlog {
                return;
            }
            let Some(listener) = &port.listener else { return };
            port.retry = None;
            if port.closer.is_overloaded() {
                debug!(port = id.0, "the next client waits until descriptors are closed");
                port.retry = Some(Instant::now() + RETRY_CLOSED);
                return self.set_timer(id);
            }
            if let Some(until) = port.admissions.wait(Instant::now()) {
                debug!(port = id.0, "clients connect too often, so the next one waits");
                port.retry = Some(until);
                return self.set_timer(id);
            }
            match listener.accept() {
                Ok(Some(stream)) => {
                    port.admissions.count();
                    if let Err(errno) = self.attach(id, stream) {
                        if let Some(port) = self.ports.get(&id) {
                            port.log.warn(format_args!("a client cannot be served: {errno}"));
                        }
                        continue;
                    }
                }
                Ok(None) => port.has_backlog = false,
                Err(errno) => {
                    warn!(port = id.0, "a client cannot be accepted, trying again: {errno}");
                    port.retry = Some(Instant::now() + RETRY_ACCEPT);
                }
            }
            self.set_timer(id);
            return;
        }
    }

    fn attach(&mut self, id: PortId, stream: OwnedFd) -> Result<(), Errno> {
        let Some(port) = self.ports.get_mut(&id) else { return Ok(()) };
        let (stream, inspector) = port.connection(stream);
        let limits = self.limits.of_recorded(port.recorder.is_some());
        let session = Session::new(stream, inspector, &limits);
        port.state = State::Attached(Box::new(Attachment::new(id, &self.epoll, session)?));
        debug!(port = id.0, "a client has connected");
        port.record();
        self.queue(id);
        self.set_timer(id);
        Ok(())
    }

    fn queue(&mut self, id: PortId) {
        if let Some(port) = self.ports.get_mut(&id)
            && !std::mem::replace(&mut port.queued, true)
        {
            self.ready.push_back(id);
        }
    }

    /// Handles a connection until it has to wait or its time slice has ended.
    fn turn(&mut self, id: PortId) {
        let Some(port) = self.ports.get_mut(&id) else { return };
        port.queued = false;
        let State::Attached(attachment) = &mut port.state else { return };
        let Some(session) = attachment.take_session() else { return };
        if port.replay == Replay::Pending && !session.has_input() {
            port.replay.end(&mut port.recorder, true);
        }
        // A reactor that quiesces handles no further message.
        if !self.freezing && !port.replay.begin(&mut port.recorder) {
            port.retry = Some(Instant::now() + RETRY_REPLAY);
            return self.set_timer(id);
        }
        let limits = self.limits.of_recorded(port.recorder.is_some());
        if port.recorder.is_some() {
            // The ring is created here, on the reactor's thread, because closing a ring interrupts
            // the thread that created it.
            self.exchange.get_or_init(make_exchange);
        }
        let mut context = Context {
            inbox: &self.inbox,
            port: id,
            limits: &limits,
            sequence: &mut port.sequence,
            slice: Slice::begin(),
            is_recorded: port.recorder.is_some(),
            exchange: self.exchange.get_mut().and_then(Option::as_mut),
        };
        let (recorder, listener, log) = (&mut port.recorder, port.listener.as_ref(), &port.log);
        let mut record = |described: Result<_, _>, fds| {
            if let Some(recorder) = recorder {
                let described = described.map(|(session, device)| (Some(session), device));
                record(&mut **recorder, listener, log, false, described, fds);
            }
        };
        let turn = match self.freezing {
            true => session.quiesce(&mut *port.device, &mut context, &mut record),
            false => session.turn(&mut *port.device, &mut context, &mut record),
        };
        if port.replay == Replay::Running && !session.is_waiting() {
            port.replay.end(&mut port.recorder, session.has_replayed());
        }
        let turn = match turn {
            Turn::End(why) => Turn::End(why),
            turn => attachment.watch().map_or_else(|errno| Turn::End(errno.into()), |()| turn),
        };
        match turn {
            Turn::Wait if self.freezing => {}
            Turn::Wait => {
                attachment.share_if_idle(&mut *port.device, &self.inbox);
                self.set_timer(id);
            }
            Turn::Requeue => {
                self.queue(id);
                self.set_timer(id);
            }
            Turn::End(why) => self.end(id, why),
        }
    }

    /// Handles the completion of a [`Completer`](crate::Completer).
    fn completed(&mut self, id: PortId, sequence: u64, outcome: Result<(), Errno>) {
        let Some(port) = self.ports.get_mut(&id) else { return };
        match &mut port.state {
            State::Attached(attachment) => {
                let session = attachment.busy_session();
                if session.is_some_and(|session| session.link.completed(sequence, outcome)) {
                    self.queue(id);
                }
            }
            State::Unfinished { sequence: awaited } if *awaited == sequence => {
                self.notify_disconnect(id)
            }
            State::Leaving { sequence: awaited } if *awaited == sequence => {
                if let Err(errno) = outcome {
                    warn!(port = id.0, "the device has failed to release its client: {errno}");
                }
                self.free(id);
            }
            _ => {}
        }
    }

    /// Closes the connection of a device's client.
    fn end(&mut self, id: PortId, why: EndReason) {
        let Some(port) = self.ports.get_mut(&id) else { return };
        let State::Attached(attachment) = std::mem::replace(&mut port.state, State::Free) else {
            return;
        };
        port.replay.end(&mut port.recorder, true);
        let Some(session) = attachment.close() else { return };
        match why {
            EndReason::Closed | EndReason::Dropped => {
                debug!(port = id.0, "the client has disconnected: {why}")
            }
            _ => port.log.warn(format_args!("the client of device {} is dropped: {why}", id.0)),
        }
        // An outstanding unmap is not awaited, because the device releases all of the client's
        // memory after the disconnection.
        let awaited = session.link.awaits().filter(|_| !session.link.is_unmapping());
        let agreed = session.link.is_agreed();
        drop(session);
        match awaited {
            Some(sequence) => {
                port.state = State::Unfinished { sequence };
                port.record();
                self.set_timer(id);
            }
            None if agreed => self.notify_disconnect(id),
            None => self.free(id),
        }
    }

    /// Notifies the device that the client has disconnected, so that the device releases the
    /// client.
    fn notify_disconnect(&mut self, id: PortId) {
        let Some(port) = self.ports.get_mut(&id) else { return };
        let mut context = Context {
            inbox: &self.inbox,
            port: id,
            limits: &self.limits,
            sequence: &mut port.sequence,
            slice: Slice::begin(),
            is_recorded: port.recorder.is_some(),
            exchange: None,
        };
        let (sequence, done) = context.done();
        port.state = State::Leaving { sequence };
        port.record();
        port.device.disconnected(done);
        self.set_timer(id);
    }

    /// Marks the device as free, after it has released its client.
    fn free(&mut self, id: PortId) {
        let Some(port) = self.ports.get_mut(&id) else { return };
        port.state = State::Free;
        port.record();
        if port.closing {
            self.remove_port(id);
        } else {
            self.accept(id);
            self.set_timer(id);
        }
    }

    fn remove_port(&mut self, id: PortId) {
        let Some(port) = self.ports.remove(&id) else { return };
        if let Some(timer) = port.timer {
            self.timers.remove(&(timer, id));
        }
        let Port { device, listener, removed, .. } = port;
        drop(listener);
        drop(device);
        for removed in removed {
            let _ = removed.try_send(());
        }
    }

    /// Stops serving a device.
    fn close(&mut self, id: PortId, removed: Option<SyncSender<()>>) {
        let Some(port) = self.ports.get_mut(&id) else { return };
        port.closing = true;
        // After the listener is closed, a connect fails immediately. Otherwise new clients would
        // wait in vain.
        port.listener = None;
        port.removed.extend(removed);
        match port.state {
            State::Free => self.remove_port(id),
            State::Attached(_) => self.end(id, EndReason::Dropped),
            State::Unfinished { .. } | State::Leaving { .. } => {}
        }
    }

    fn set_timer(&mut self, id: PortId) {
        if self.freezing {
            return;
        }
        let Some(port) = self.ports.get_mut(&id) else { return };
        let timer = match &mut port.state {
            State::Attached(attachment) => {
                let deadline = attachment.busy_session().and_then(|session| session.deadline());
                deadline.into_iter().chain(port.retry).min()
            }
            _ => port.retry,
        };
        if port.timer != timer {
            if let Some(old) = port.timer {
                self.timers.remove(&(old, id));
            }
            if let Some(new) = timer {
                self.timers.insert((new, id));
            }
            port.timer = timer;
        }
    }

    fn expire(&mut self) {
        if self.timers.is_empty() && self.stop.is_none() {
            return;
        }
        let now = Instant::now();
        while let Some((until, id)) = self.timers.first().copied()
            && until <= now
        {
            self.timers.pop_first();
            let Some(port) = self.ports.get_mut(&id) else { continue };
            port.timer = None;
            match &mut port.state {
                State::Attached(_) if port.retry.take_if(|retry| *retry <= now).is_some() => {
                    self.queue(id);
                }
                State::Attached(attachment) => {
                    if let Some(why) = attachment.busy_session().map(|session| session.overdue()) {
                        self.end(id, why);
                    }
                }
                _ => self.accept(id),
            }
        }
        if self.stop.is_some_and(|until| until <= now) && !self.ports.is_empty() {
            warn!(
                devices = self.ports.len(),
                "stopping although some devices have not released their clients"
            );
            self.ports.clear();
            self.timers.clear();
        }
    }

    fn stopped(&self) -> bool {
        self.stop.is_some() && self.ports.is_empty()
    }
}

impl std::fmt::Debug for Reactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reactor").field("ports", &self.ports.len()).finish_non_exhaustive()
    }
}
