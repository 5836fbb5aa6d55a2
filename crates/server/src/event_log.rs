//! Log lines for events of guests, written by a separate thread.

use super::event::{EventQueue, EventSender, ServerEvent};
use super::registry::{Registry, ServedController};
use super::server::Server;
use shadowbell_controller::{Controller, Event};
use shadowbell_frontend::vfio_user::ClientEvent;
use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{debug, error, info, warn};

/// Delay between the creation of a queue and the log line with the number of queues. A guest
/// creates its queues one after the other, so only the last number is logged.
const QUEUES_SETTLE: Duration = Duration::from_millis(100);

/// The log thread. A drop waits until all earlier events are logged.
pub(super) struct EventLog(Option<(EventSender, JoinHandle<()>)>);

impl EventLog {
    /// Starts the log thread of a server. Each server has one.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(server: &mut Server) -> io::Result<Self> {
        let Some(events) = server.take_events() else { return Ok(Self(None)) };
        let sender = events.sender(0);
        let registry = Arc::clone(server.registry());
        let writer = LogWriter { registry, guests: BTreeMap::new(), new_queues: BTreeMap::new() };
        let thread = std::thread::Builder::new().name("sb-event-log".into());
        Ok(Self(Some((sender, thread.spawn(move || writer.run(&events))?))))
    }
}

impl Drop for EventLog {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.0.take() {
            // The end is sent as an event, because the channel never closes: the controllers hold
            // senders, and the thread holds the controllers.
            sender.end();
            let _ = thread.join();
        }
    }
}

/// State of a guest as logged so far.
struct Guest {
    name: String,
    /// The controller. The reference is weak, so that a removed controller is freed.
    served: Weak<ServedController>,
    /// Counters at the last disconnect, from which the next client's commands are counted. Counters
    /// that were read at the connect might include that client's first commands.
    before: Counts,
    /// Number of queues in the last log line.
    queues: usize,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    commands: u64,
    doorbells: u64,
}

impl Guest {
    fn new(served: &Arc<ServedController>) -> Self {
        let (name, served) = (served.name.clone(), Arc::downgrade(served));
        Self { name, served, before: Counts::default(), queues: 0 }
    }
}

struct LogWriter {
    registry: Arc<Registry>,
    guests: BTreeMap<usize, Guest>,
    /// Guests that create queues, by the controller's index: the number of queues so far, and the
    /// time at which it is logged.
    new_queues: BTreeMap<usize, (usize, Instant)>,
}

impl LogWriter {
    fn run(mut self, events: &EventQueue) {
        loop {
            let deadline = self.new_queues.values().map(|(_, until)| *until).min();
            match events.next(deadline) {
                Ok((_, ServerEvent::End)) | Err(RecvTimeoutError::Disconnected) => {
                    return self.log_new_queues(|_, _| true);
                }
                Ok((index, event)) => self.log(index, event),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = Instant::now();
            self.log_new_queues(|_, until| until <= now);
        }
    }

    /// Logs the number of queues of each guest for which `are` returns true. The arguments of `are`
    /// are the index of the guest's controller, and the time when the number is due in the log.
    fn log_new_queues(&mut self, are: impl Fn(usize, Instant) -> bool) {
        let guests = &mut self.guests;
        self.new_queues.retain(|index, (queues, until)| {
            let done = are(*index, *until);
            if done
                && let Some(guest) = guests.get_mut(index)
                && guest.queues != *queues
            {
                guest.queues = *queues;
                let s = if *queues == 1 { "" } else { "s" };
                info!("{}: the guest has {queues} I/O queue{s}", guest.name);
            }
            !done
        });
    }

    /// Adds the guest of the controller with this index, if the controller exists.
    fn add_guest(&mut self, index: usize) {
        if self.guests.contains_key(&index) {
            return;
        }
        if let Some(served) = self.registry.numbered(index) {
            // Entries of removed controllers are freed.
            self.guests.retain(|_, guest| guest.served.strong_count() != 0);
            self.guests.insert(index, Guest::new(&served));
        }
    }

    fn served(&self, index: usize) -> Option<Arc<ServedController>> {
        self.guests.get(&index)?.served.upgrade()
    }

    /// Name of a namespace's disk.
    fn disk(&self, index: usize, nsid: u32) -> Option<String> {
        let namespaces = self.served(index)?.controller.namespaces();
        let found = namespaces.iter().find(|(of, _)| *of == nsid);
        found.map(|(_, namespace)| namespace.disk.name())
    }

    fn log(&mut self, index: usize, event: ServerEvent) {
        self.add_guest(index);
        if let ServerEvent::Controller(Event::QueueCreated(queues)) = event {
            self.new_queues.insert(index, (queues, Instant::now() + QUEUES_SETTLE));
            return;
        }
        self.log_new_queues(|other, _| other == index);
        let counts = matches!(event, ServerEvent::Client(ClientEvent::Detached))
            .then(|| self.served(index).map(|served| counts(&served.controller)))
            .flatten()
            .unwrap_or_default();
        let disk = match event {
            ServerEvent::Controller(Event::Full(nsid) | Event::WritesLost(nsid)) => {
                self.disk(index, nsid)
            }
            _ => None,
        };
        let Some(guest) = self.guests.get_mut(&index) else { return };
        let name = &guest.name;
        match event {
            ServerEvent::Client(ClientEvent::Attached) => {
                guest.queues = 0;
                info!("{name}: a client is attached");
            }
            ServerEvent::Client(ClientEvent::Detached) => {
                let commands = counts.commands.saturating_sub(guest.before.commands);
                let doorbells = counts.doorbells.saturating_sub(guest.before.doorbells);
                info!(
                    "{name}: the client has left, after {commands} I/O commands with {doorbells} \
                     doorbell writes"
                );
                guest.before = counts;
            }
            ServerEvent::Client(ClientEvent::NoSharedMemory) => warn!(
                "{name}: the guest's memory is not shared, so no command can be read: give QEMU \
                 `-object memory-backend-memfd,id=mem,size=SIZE,share=on -machine \
                 memory-backend=mem`, or Cloud Hypervisor `--memory size=SIZE,shared=on`"
            ),
            ServerEvent::Client(ClientEvent::MemoryNotShared) => warn!(
                "{name}: the guest has rung its admin queue, which is empty here: its memory backend \
                 keeps the guest's writes to itself; `share=on` is missing in QEMU's `-object \
                 memory-backend-...,id=mem,size=SIZE,share=on`"
            ),
            ServerEvent::Controller(Event::Enabled) => {
                info!("{name}: the guest has enabled the controller")
            }
            ServerEvent::Controller(Event::ShadowDoorbells) => {
                info!("{name}: the guest has set up shadow doorbells");
            }
            ServerEvent::Controller(Event::Full(nsid)) => warn!(
                "{name}: there is no room left for namespace {nsid}, {}: the guest's writes that need \
                 more of it fail (Capacity Exceeded). Make room on its file system, or raise the quota \
                 or the limit on the size of files that stands against it; nothing has to be started again",
                disk.unwrap_or_default()
            ),
            ServerEvent::Controller(Event::WritesLost(nsid)) => error!(
                "{name}: the system could not write to {} what the guest has written to namespace \
                 {nsid}, and some of it may be lost: its flushes fail (Write Fault) until the disk \
                 is served again. Check its storage and the system's log first",
                disk.unwrap_or_default()
            ),
            ServerEvent::Controller(Event::Isolated(took)) => warn!(
                "{name}: serving this guest has held up others for {} ms at a time, so it has a \
                 thread of its own from now on. Check what it does; a server of its own isolates \
                 it completely",
                took.as_millis()
            ),
            ServerEvent::Controller(Event::Shutdown) => {
                info!("{name}: the guest has shut the controller down")
            }
            ServerEvent::Controller(Event::Disabled) => {
                guest.queues = 0;
                debug!("{name}: the controller is reset");
            }
            ServerEvent::Controller(Event::Fatal(why)) => {
                error!("{name}: the controller has failed until the guest resets it: {why}");
            }
            ServerEvent::Controller(Event::QueueCreated(_)) | ServerEvent::End => {}
            // Further kinds of events are logged in their debug format.
            ServerEvent::Controller(event) => info!("{name}: {event:?}"),
            ServerEvent::Lost => {
                warn!("{name}: events were lost, because the log was too slow")
            }
        }
    }
}

fn counts(controller: &Controller) -> Counts {
    let stats = controller.stats();
    let (sq, cq) = stats.io_queues();
    let trapped = sq.doorbell.mmio_writes.saturating_add(cq.doorbell.mmio_writes);
    Counts { commands: sq.commands, doorbells: trapped.saturating_add(stats.doorbell_events) }
}
