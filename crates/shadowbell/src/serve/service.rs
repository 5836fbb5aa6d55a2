//! What runs: workers, a reactor and controllers, from start to stop.

use super::ServerPlan;
use super::options::Served;
use crate::exit::bad_input;
use crate::plan::Doorbells;
use anyhow::{Context, anyhow};
use bytesize::ByteSize;
use shadowbell_backend::{Disk, Op, Request, Submitted};
use shadowbell_controller::trace::TraceFile;
use shadowbell_controller::{Carrier, Config, Controller, Event, Pool};
use shadowbell_frontend::vfio_user::{ClientEvent, ClientEventHandler, ControllerDevice};
use shadowbell_memory::Segments;
use shadowbell_vfio_user::server::{BindError, Handle, Limits, Listener, Reactor};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use tracing::{error, info};

/// Things that may have happened and not be told yet, before one is lost.
const NEWS: usize = 1024;

/// What happened to a controller.
#[derive(Clone, Debug)]
pub(super) enum News {
    /// To the device around it.
    Client(ClientEvent),
    /// To itself.
    Event(Event),
    /// Something that could not be kept.
    Lost,
    /// There will be no more.
    End,
}

/// Takes what happened, and to which controller.
pub(super) type NewsSender = SyncSender<(usize, News)>;
/// Gives it.
pub(super) type NewsReceiver = Receiver<(usize, News)>;

/// A controller that is served.
pub(super) struct ServedController {
    /// Its socket, as it was written.
    pub(super) name: String,
    pub(super) controller: Controller,
}

/// All that runs.
pub(super) struct Service {
    controllers: Vec<ServedController>,
    news: Option<(NewsSender, NewsReceiver)>,
    reactor: Option<(Handle, JoinHandle<io::Result<()>>)>,
    /// Keeps the workers.
    _pool: Pool,
}

/// Where a controller's news go.
#[derive(Clone)]
struct Reporter {
    index: usize,
    sender: NewsSender,
    lost: Arc<AtomicBool>,
}

impl Reporter {
    /// Never waits: who tells it serves guests.
    fn tell(&self, news: News) {
        if self.lost.load(Ordering::Relaxed)
            && self.sender.try_send((self.index, News::Lost)).is_ok()
        {
            self.lost.store(false, Ordering::Relaxed);
        }
        if self.sender.try_send((self.index, news)).is_err() {
            self.lost.store(true, Ordering::Relaxed);
        }
    }
}

impl Service {
    /// Starts to serve `plan`; all of it, or nothing. `ended` runs when the service came to its end,
    /// on a thread of its own.
    ///
    /// # Errors
    /// The first thing that can not be done, with the place where it was asked for.
    pub(super) fn start(
        plan: &ServerPlan,
        ended: impl FnOnce() + Send + 'static,
    ) -> anyhow::Result<Self> {
        let configs = open(plan)?;
        let pool = Pool::start(&plan.pool).context("the workers can not be started")?;
        let (sender, news) = sync_channel(NEWS);
        let mut controllers = Vec::with_capacity(configs.len());
        let mut devices = Vec::with_capacity(configs.len());
        for (index, (served, config)) in plan.controllers.iter().zip(configs).enumerate() {
            let reporter = Reporter { index, sender: sender.clone(), lost: Arc::default() };
            let events = reporter.clone();
            let carrier = Carrier {
                mapped_doorbells: served.controller.doorbells == Doorbells::Mapped,
                listener: Some(Box::new(move |event| events.tell(News::Event(*event)))),
            };
            let controller = Controller::new(config, pool.clone(), carrier)?;
            let handler: ClientEventHandler =
                Arc::new(move |event| reporter.tell(News::Client(event)));
            devices.push(ControllerDevice::new(controller.clone(), handler)?);
            let name = served.socket.display().to_string();
            controllers.push(ServedController { name, controller });
        }
        let listeners = bind(&plan.controllers)?;
        if let Some((path, records)) = &plan.trace {
            let workers = u16::try_from(pool.len()).unwrap_or(u16::MAX);
            let trace = TraceFile::create(path, workers, *records).map_err(|error| {
                let known = matches!(
                    error.kind(),
                    io::ErrorKind::AlreadyExists | io::ErrorKind::InvalidInput
                );
                let error = anyhow!(error).context(format!("--trace {}", path.display()));
                if known { bad_input(error) } else { error }
            })?;
            pool.trace(&trace);
        }
        for served in &controllers {
            info!("{}", summary(served));
        }
        let mut reactor = Reactor::new(Limits::default())?;
        for (listener, device) in listeners.into_iter().zip(devices) {
            reactor.add(listener, Box::new(device))?;
        }
        let handle = reactor.handle();
        let thread = std::thread::Builder::new().name("sb-reactor".into()).spawn(move || {
            let outcome = reactor.run();
            drop(reactor);
            ended();
            outcome
        })?;
        Ok(Self {
            controllers,
            news: Some((sender, news)),
            reactor: Some((handle, thread)),
            _pool: pool,
        })
    }

    /// The controllers, in the order of the plan.
    pub(super) fn controllers(&self) -> &[ServedController] {
        &self.controllers
    }

    /// What happens, for the one who tells it.
    pub(super) fn take_news(&mut self) -> Option<(NewsSender, NewsReceiver)> {
        self.news.take()
    }

    /// Lets all clients go and removes the sockets. Returns when no client's memory is touched any
    /// more.
    ///
    /// # Errors
    /// The reactor had come to its end by itself.
    pub(super) fn stop(&mut self) -> anyhow::Result<()> {
        let Some((handle, thread)) = self.reactor.take() else { return Ok(()) };
        handle.stop();
        match thread.join() {
            Ok(outcome) => outcome.context("the sockets can not be served any more"),
            Err(_) => Err(anyhow!("the thread that serves the sockets has panicked")),
        }
    }

    /// Has the disks keep what they were given. Whether all of them do.
    #[must_use]
    pub(super) fn flush(&self) -> bool {
        let namespaces = self.controllers.iter().flat_map(|s| &s.controller.config().namespaces);
        let mut all = true;
        for namespace in namespaces {
            if let Err(error) = flush(&*namespace.disk) {
                error!("{} can not be flushed: {error}", namespace.disk.name());
                all = false;
            }
        }
        all
    }
}

/// Opens what the controllers need. Creates nothing.
fn open(plan: &ServerPlan) -> anyhow::Result<Vec<Config>> {
    let mut configs = Vec::with_capacity(plan.controllers.len());
    for served in &plan.controllers {
        let config = served.controller.open(&served.place().to_string_lossy());
        configs.push(located(served, config.map_err(crate::plan::PlanError::into_error))?);
    }
    Ok(configs)
}

/// Listens at all sockets, or at none.
fn bind(controllers: &[Served]) -> anyhow::Result<Vec<Listener>> {
    let mut listeners = Vec::with_capacity(controllers.len());
    for served in controllers {
        let listener = Listener::bind(&served.socket).map_err(|error| match error {
            BindError::System { .. } => error.into(),
            _ => bad_input(error),
        });
        listeners.push(located(served, listener)?);
    }
    Ok(listeners)
}

fn located<T>(served: &Served, outcome: anyhow::Result<T>) -> anyhow::Result<T> {
    match &served.origin {
        None => outcome,
        Some(origin) => outcome.with_context(|| origin.clone()),
    }
}

fn summary(served: &ServedController) -> String {
    let namespaces = &served.controller.config().namespaces;
    let disks: Vec<_> = namespaces
        .iter()
        .map(|namespace| {
            let info = namespace.disk.info();
            let read_only = if info.read_only { ", read-only" } else { "" };
            format!(
                "{} ({}{read_only})",
                namespace.disk.name(),
                ByteSize(info.bytes()).display().iec()
            )
        })
        .collect();
    format!("{}: serving {}", served.name, disks.join(", "))
}

/// Waits until everything that was written to `disk` is on stable storage.
fn flush(disk: &dyn Disk) -> anyhow::Result<()> {
    if !disk.info().volatile_cache {
        return Ok(());
    }
    let mut queue = disk.queue()?;
    let request = Request { op: Op::Flush, offset: 0, len: 0 };
    if let Submitted::Done(outcome) = queue.submit(0, &request, &mut Segments::default()) {
        return Ok(outcome?);
    }
    queue.commit();
    let mut outcome = None;
    loop {
        queue.reap(&mut |_, result, _| outcome = Some(result));
        if let Some(outcome) = outcome {
            return Ok(outcome?);
        }
        let Some(fd) = queue.wake_fd() else { return Err(anyhow!("the flush does not end")) };
        let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        match rustix::event::poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
