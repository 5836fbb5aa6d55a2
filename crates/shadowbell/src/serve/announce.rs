//! Tells a person what guests do, a line each.
//!
//! What happens is told by the reactor's thread and by workers, and neither may wait for a terminal
//! or a log that takes no more. So they leave it in a short queue, and a thread of its own writes.

use super::service::{News, NewsReceiver, NewsSender, Service};
use shadowbell_controller::{Controller, Event};
use shadowbell_frontend::vfio_user::Visit;
use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::RecvTimeoutError;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{debug, error, info, warn};

/// A guest creates its queues one after the other: how long after one of them it is told how many
/// there are.
const QUEUES_SETTLE: Duration = Duration::from_millis(100);

/// The thread; dropping this waits until all that happened before is told.
pub(super) struct Announcer(Option<(NewsSender, JoinHandle<()>)>);

impl Announcer {
    /// Starts to tell what happens in `service`; there is one for each.
    ///
    /// # Errors
    /// The system has no more threads.
    pub(super) fn start(service: &mut Service) -> io::Result<Self> {
        let Some((sender, news)) = service.take_news() else { return Ok(Self(None)) };
        let names = service.controllers().iter().map(|served| served.name.clone());
        let guests = names.map(Guest::new).collect();
        let controllers = service.controllers().iter().map(|s| s.controller.clone()).collect();
        let teller = Teller { guests, controllers, settling: BTreeMap::new() };
        let thread = std::thread::Builder::new().name("sb-announcer".into());
        Ok(Self(Some((sender, thread.spawn(move || teller.run(&news))?))))
    }
}

impl Drop for Announcer {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.0.take() {
            // The controllers have senders too, and the thread has the controllers: that none is
            // left would never come to pass.
            let _ = sender.send((0, News::End));
            let _ = thread.join();
        }
    }
}

/// What was told of a guest.
struct Guest {
    name: String,
    /// Counters when the one before it left. (When it came is heard of late, perhaps after its first
    /// commands; and without a client nothing is counted.)
    before: Counts,
    /// Queues of which it was told.
    queues: usize,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    commands: u64,
    doorbells: u64,
}

impl Guest {
    fn new(name: String) -> Self {
        Self { name, before: Counts::default(), queues: 0 }
    }
}

struct Teller {
    guests: Vec<Guest>,
    controllers: Vec<Controller>,
    /// Guests that are creating queues: how many they have, and when to say so.
    settling: BTreeMap<usize, (usize, Instant)>,
}

impl Teller {
    fn run(mut self, news: &NewsReceiver) {
        loop {
            let next = match self.settling.values().map(|(_, until)| *until).min() {
                None => news.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(until) => news.recv_timeout(until.saturating_duration_since(Instant::now())),
            };
            match next {
                Ok((_, News::End)) | Err(RecvTimeoutError::Disconnected) => {
                    return self.settle(|_, _| true);
                }
                Ok((index, what)) => self.hear(index, what),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = Instant::now();
            self.settle(|_, until| until <= now);
        }
    }

    /// Says how many queues a guest has, for those that `are` done with creating them.
    fn settle(&mut self, are: impl Fn(usize, Instant) -> bool) {
        let (guests, settling) = (&mut self.guests, &mut self.settling);
        settling.retain(|index, (queues, until)| {
            let done = are(*index, *until);
            if done
                && let Some(guest) = guests.get_mut(*index)
                && guest.queues != *queues
            {
                guest.queues = *queues;
                let s = if *queues == 1 { "" } else { "s" };
                info!("{}: the guest has {queues} I/O queue{s}", guest.name);
            }
            !done
        });
    }

    /// What a namespace is on.
    fn disk(&self, index: usize, nsid: u32) -> Option<String> {
        let at = usize::try_from(nsid.checked_sub(1)?).ok()?;
        let config = self.controllers.get(index)?.config();
        config.namespaces.get(at).map(|namespace| namespace.disk.name())
    }

    fn hear(&mut self, index: usize, news: News) {
        if let News::Event(Event::QueueCreated(queues)) = news {
            self.settling.insert(index, (queues, Instant::now() + QUEUES_SETTLE));
            return;
        }
        self.settle(|other, _| other == index);
        let counts = matches!(news, News::Visit(Visit::Left))
            .then(|| self.controllers.get(index).map(counts))
            .flatten()
            .unwrap_or_default();
        let disk = match news {
            News::Event(Event::Full(nsid) | Event::Lost(nsid)) => self.disk(index, nsid),
            _ => None,
        };
        let Some(guest) = self.guests.get_mut(index) else { return };
        let name = &guest.name;
        match news {
            News::Visit(Visit::Attached) => {
                guest.queues = 0;
                info!("{name}: a client is attached");
            }
            News::Visit(Visit::Left) => {
                let commands = counts.commands.saturating_sub(guest.before.commands);
                let doorbells = counts.doorbells.saturating_sub(guest.before.doorbells);
                info!(
                    "{name}: the client has left, after {commands} I/O commands with {doorbells} \
                     doorbell writes"
                );
                guest.before = counts;
            }
            News::Visit(Visit::NoSharedMemory) => warn!(
                "{name}: the guest's memory is not shared, so no command can be read: give QEMU \
                 `-object memory-backend-memfd,id=mem,size=SIZE,share=on -machine \
                 memory-backend=mem`, or Cloud Hypervisor `--memory size=SIZE,shared=on`"
            ),
            News::Visit(Visit::MemoryNotShared) => warn!(
                "{name}: the guest has rung its admin queue, which is empty here: its memory backend \
                 keeps the guest's writes to itself; `share=on` is missing in QEMU's `-object \
                 memory-backend-...,id=mem,size=SIZE,share=on`"
            ),
            News::Event(Event::Enabled) => info!("{name}: the guest has enabled the controller"),
            News::Event(Event::ShadowDoorbells) => {
                info!("{name}: the guest has set up shadow doorbells");
            }
            News::Event(Event::Full(nsid)) => warn!(
                "{name}: there is no room left for namespace {nsid}, {}: the guest's writes that need \
                 more of it fail (Capacity Exceeded). Make room on its file system, or raise the quota \
                 or the limit on the size of files that stands against it; nothing has to be started again",
                disk.unwrap_or_default()
            ),
            News::Event(Event::Lost(nsid)) => error!(
                "{name}: the system could not bring to {} what the guest has written to namespace {nsid}, \
                 and some of it may be lost: its flushes fail (Write Fault) until the disk is served \
                 anew. Look after its storage, and at the system's log, first",
                disk.unwrap_or_default()
            ),
            News::Event(Event::Shutdown) => info!("{name}: the guest has shut the controller down"),
            News::Event(Event::Disabled) => {
                guest.queues = 0;
                debug!("{name}: the controller is reset");
            }
            News::Event(Event::Fatal(why)) => {
                error!("{name}: the controller can not go on until the guest resets it: {why}");
            }
            News::Event(Event::QueueCreated(_)) | News::End => {}
            News::Lost => warn!("{name}: more has happened than could be told"),
            // A kind that came with a later controller is worth a line of its own.
            News::Event(event) => info!("{name}: {event:?}"),
        }
    }
}

fn counts(controller: &Controller) -> Counts {
    let stats = controller.stats();
    let (sq, cq) = stats.io_queues();
    let trapped = sq.doorbell.mmio_writes.saturating_add(cq.doorbell.mmio_writes);
    Counts { commands: sq.commands, doorbells: trapped.saturating_add(stats.doorbell_events) }
}
