//! Explanation of a slow or hung guest: shares of time by cause, figures, and three sentences.

use crate::api::{ControllerState, LimitSpec};
use crate::live_stats::Waits;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Cause for which commands wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// The storage of a disk.
    Disk,
    /// The rate limits of a disk.
    Limit,
    /// The completion queue of the guest is full, or an in-flight quota of the controller is
    /// reached.
    QueueFull,
    /// The I/O thread is busy, or gets no CPU.
    Processor,
    /// The I/O thread waits for a page of guest memory.
    Memory,
}

impl Cause {
    /// Short name for tables.
    #[must_use]
    pub fn short_name(self) -> &'static str {
        match self {
            Self::QueueFull => "queue",
            Self::Processor => "CPU",
            Self::Memory => "mem",
            _ => self.name(),
        }
    }

    /// Name in sentences.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Limit => "limit",
            Self::QueueFull => "queue full",
            Self::Processor => "processor",
            Self::Memory => "memory",
        }
    }
}

/// Shares of a time by the cause for which commands waited, each from 0 to 1. Their sum is 1, or 0
/// if the time was not sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Shares {
    /// The storage of a disk.
    pub disk: f64,
    /// The rate limits of a disk.
    pub limit: f64,
    /// A full completion queue, or an in-flight quota of the controller.
    pub queue_full: f64,
    /// A busy I/O thread, or one without a CPU.
    pub processor: f64,
    /// A page of guest memory.
    pub memory: f64,
    /// No command was outstanding.
    pub nothing: f64,
}

impl Shares {
    /// Shares of the time between two counts.
    #[must_use]
    pub fn between(before: &Waits, now: &Waits) -> Self {
        let grown = |of: fn(&Waits) -> u64| of(now).saturating_sub(of(before)) as f64;
        let all: [fn(&Waits) -> u64; 6] = [
            |waits| waits.disk_ns,
            |waits| waits.limit_ns,
            |waits| waits.queue_full_ns,
            |waits| waits.processor_ns,
            |waits| waits.memory_ns,
            |waits| waits.nothing_ns,
        ];
        let all = all.map(grown);
        let sum: f64 = all.iter().sum();
        let [disk, limit, queue_full, processor, memory, nothing] =
            all.map(|part| if sum > 0.0 { part / sum } else { 0.0 });
        Self { disk, limit, queue_full, processor, memory, nothing }
    }

    /// Causes with their shares.
    #[must_use]
    pub fn causes(&self) -> [(Cause, f64); 5] {
        [
            (Cause::Disk, self.disk),
            (Cause::Limit, self.limit),
            (Cause::QueueFull, self.queue_full),
            (Cause::Processor, self.processor),
            (Cause::Memory, self.memory),
        ]
    }

    /// Cause with the largest share. `None` if no cause reaches one percent.
    #[must_use]
    pub fn main_cause(&self) -> Option<(Cause, f64)> {
        let most = self.causes().into_iter().max_by(|(_, a), (_, b)| a.total_cmp(b));
        most.filter(|(_, share)| *share >= 0.01)
    }

    /// Text with all shares: `disk 6 %, limit 94 %, ...`.
    fn text(&self) -> String {
        let causes = self.causes();
        let causes =
            causes.iter().map(|(cause, share)| format!("{} {}", cause.name(), percent(*share)));
        causes.collect::<Vec<_>>().join(", ")
    }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// State of a disk in an explanation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExplainedDisk {
    /// `id` of the disk.
    pub id: String,
    /// File, device or URI.
    pub source: String,
    /// True if the storage has not answered a request for the time `--stalled-after`.
    pub stalled: bool,
    /// Error of the storage that stopped the disk, if the disk is stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
    /// Requests that are held because the disk is stopped.
    pub held: u64,
    /// Requests that wait for the rate limits of the disk.
    pub limited: u64,
    /// Requests that the storage has not answered, up to one second ago.
    pub in_flight: u64,
    /// Age of the oldest of these requests in milliseconds, right to a second.
    pub oldest_ms: u64,
    /// Rate limits, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitSpec>,
}

/// I/O thread of a controller in an explanation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ExplainedThread {
    /// Number of the I/O thread.
    pub worker: usize,
    /// Share of the time in which the thread was awake, from 0 to 1.
    pub awake: f64,
    /// Number of controllers with queues on this thread.
    pub controllers: usize,
}

/// Explanation of what the commands of a controller wait for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// `id` of the controller.
    pub controller: String,
    /// Time in seconds that the figures are about.
    pub seconds: f64,
    /// State of the controller registers.
    pub state: ControllerState,
    /// True if a client is connected.
    pub client: bool,
    /// Reason why a controller in the state `waiting` waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Shares of the time by cause.
    pub shares: Shares,
    /// Commands completed.
    pub commands: u64,
    /// Commands in submission queues at the end of the time, not fetched.
    pub queued: u64,
    /// Commands that were fetched and not completed at the end of the time.
    pub in_flight: u64,
    /// Maximum number of commands that the submission queues can hold.
    pub capacity: u64,
    /// Disks of the controller.
    pub disks: Vec<ExplainedDisk>,
    /// I/O threads of the controller.
    pub io_threads: Vec<ExplainedThread>,
    /// The explanation in three sentences: cause, figures, advice.
    pub sentences: Vec<String>,
}

impl Explanation {
    /// Writes the sentences.
    #[must_use]
    pub fn explained(self) -> Self {
        let sentences = vec![self.cause(), self.figures(), self.advice()];
        Self { sentences, ..self }
    }

    fn stopped(&self) -> Option<(&ExplainedDisk, &str)> {
        let mut disks = self.disks.iter();
        disks.find_map(|disk| Some((disk, disk.stopped.as_deref()?)))
    }

    fn stalled(&self) -> Option<&ExplainedDisk> {
        self.disks.iter().find(|disk| disk.stalled)
    }

    /// Cause with the largest share, if commands waited for at least a hundredth of the time.
    fn main(&self) -> Option<Cause> {
        self.shares.main_cause().map(|(cause, _)| cause)
    }

    /// First sentence: the cause.
    fn cause(&self) -> String {
        let id = &self.controller;
        if let Some(why) = &self.waits_for {
            return format!(
                "{id} is not served yet: after a restart of the server process it waits for its \
                 disks ({why})."
            );
        }
        match self.state {
            _ if !self.client => {
                return format!("{id} has no client: no VMM is connected to its socket.");
            }
            ControllerState::Failed => {
                return format!("{id} has a fatal error (CSTS.CFS) and executes no commands.");
            }
            ControllerState::Disabled => {
                return format!(
                    "{id} is not enabled: its guest has no driver for it, or is resetting it."
                );
            }
            ControllerState::ShutDown => return format!("{id} was shut down by its guest."),
            ControllerState::Ready | ControllerState::Waiting => {}
        }
        if let Some((disk, why)) = self.stopped() {
            return format!(
                "{id} waits for its disk {}, which is stopped by an error of its storage: {why}.",
                disk.id
            );
        }
        if let Some(disk) = self.stalled() {
            return format!(
                "{id} waits for its disk {}, which is stalled: the oldest request has had no \
                 answer for {} s.",
                disk.id,
                disk.oldest_ms / 1000
            );
        }
        let cause = match self.main() {
            None => {
                return format!(
                    "{id} waits for nothing: for {} of the last second, the guest had no command \
                     outstanding.",
                    percent(self.shares.nothing)
                );
            }
            Some(Cause::Disk) => "the storage of its disk",
            Some(Cause::Limit) => "the rate limits of its disk",
            Some(Cause::QueueFull) => "room in a full queue",
            Some(Cause::Processor) => "its I/O thread",
            Some(Cause::Memory) => "pages of guest memory",
        };
        format!(
            "{id} waits for {cause}: {} of the last second; for {}, no command was outstanding.",
            self.shares.text(),
            percent(self.shares.nothing)
        )
    }

    /// Second sentence: the figures.
    fn figures(&self) -> String {
        let limited: u64 = self.disks.iter().map(|disk| disk.limited).sum();
        let held: u64 = self.disks.iter().map(|disk| disk.held).sum();
        let limited = match limited {
            0 => String::new(),
            count => format!(", {count} of them at the rate limits"),
        };
        let held = match held {
            0 => String::new(),
            count => format!(", {count} of them held"),
        };
        format!(
            "It completed {:.0} commands per second, and {} of at most {} are outstanding: {} not \
             fetched, {} in flight{limited}{held}.",
            if self.seconds > 0.0 { self.commands as f64 / self.seconds } else { 0.0 },
            self.queued + self.in_flight,
            self.capacity,
            self.queued,
            self.in_flight
        )
    }

    /// Third sentence: what to do.
    fn advice(&self) -> String {
        if self.waits_for.is_some() {
            return "Make the storage available: the server tries again by itself, and the guest \
                    waits without an error."
                .to_owned();
        }
        match self.state {
            _ if !self.client => {
                return "Start the guest with this controller, or look in the log of its VMM: no \
                        VMM connects again by itself."
                    .to_owned();
            }
            ControllerState::Failed => {
                return "Look for the reason in the log of the server, and restart the guest."
                    .to_owned();
            }
            ControllerState::Disabled | ControllerState::ShutDown => {
                return "Look at the guest: its console shows if the nvme driver has a problem."
                    .to_owned();
            }
            ControllerState::Ready | ControllerState::Waiting => {}
        }
        if let Some((disk, _)) = self.stopped() {
            return format!(
                "Repair the storage ({}), then continue with `shadowbell ctl disk resume {}`.",
                disk.source, disk.id
            );
        }
        if let Some(disk) = self.stalled() {
            return format!(
                "Test the storage ({}); the {} requests continue when it answers again.",
                disk.source, disk.in_flight
            );
        }
        match self.main() {
            None => "Look for the cause in the guest: its vCPUs, its file system, and its queue \
                     depth (`iostat -x 1`)."
                .to_owned(),
            Some(Cause::Disk) => {
                let sources: Vec<_> = self.disks.iter().map(|disk| &disk.source[..]).collect();
                format!(
                    "Measure the storage without the server ({}): the limit is there, unless the \
                     guest has only one command in flight at a time.",
                    sources.join(", ")
                )
            }
            Some(Cause::Limit) => match self.disks.iter().max_by_key(|disk| disk.limited) {
                Some(ExplainedDisk { id, limits: Some(limits), .. }) => format!(
                    "The limits are {}: change them with `shadowbell ctl limit {id} ...`.",
                    limits.parse().unwrap_or_default()
                ),
                _ => {
                    "Show the limits with `shadowbell ctl limit`, and change them there.".to_owned()
                }
            },
            Some(Cause::QueueFull) => "Look at the guest's vCPUs, which do not take the \
                                       completions, and in the log for `in-flight limit`."
                .to_owned(),
            Some(Cause::Processor) => {
                let busy = self.io_threads.iter().max_by(|a, b| a.awake.total_cmp(&b.awake));
                let busy = busy.cloned().unwrap_or_default();
                format!(
                    "I/O thread {} was awake for {} of the second and serves {} controller{}: give \
                     the server more `workers` or CPUs.",
                    busy.worker,
                    percent(busy.awake),
                    busy.controllers,
                    if busy.controllers == 1 { "" } else { "s" }
                )
            }
            Some(Cause::Memory) => "Look if the host swaps (`vmstat 1`), and if the VMM's memory \
                                    is on slow storage."
                .to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explanation() -> Explanation {
        Explanation {
            controller: "vm0".to_owned(),
            seconds: 2.0,
            state: ControllerState::Ready,
            client: true,
            waits_for: None,
            shares: Shares { nothing: 1.0, ..Shares::default() },
            commands: 990,
            queued: 1,
            in_flight: 31,
            capacity: 1023,
            disks: vec![ExplainedDisk {
                id: "vm0/1".to_owned(),
                source: "/srv/vm0.img".to_owned(),
                in_flight: 31,
                oldest_ms: 7100,
                ..ExplainedDisk::default()
            }],
            io_threads: vec![ExplainedThread { worker: 1, awake: 0.971, controllers: 2 }],
            sentences: Vec::new(),
        }
    }

    /// Sentences of an explanation that `change` has changed.
    fn sentences(change: impl FnOnce(&mut Explanation)) -> [String; 3] {
        let mut explanation = explanation();
        change(&mut explanation);
        let sentences = explanation.explained().sentences;
        for sentence in &sentences {
            assert!(sentence.ends_with('.') && !sentence.contains(". "), "{sentence}");
        }
        sentences.try_into().unwrap()
    }

    #[test]
    fn shares_are_parts_of_the_sampled_time() {
        let before = Waits { disk_ns: 5, ..Waits::default() };
        let now = Waits { disk_ns: 35, limit_ns: 60, nothing_ns: 10, ..Waits::default() };
        let shares = Shares::between(&before, &now);
        assert_eq!((shares.disk, shares.limit, shares.nothing), (0.3, 0.6, 0.1));
        assert_eq!(shares.main_cause(), Some((Cause::Limit, 0.6)));
        assert_eq!(Shares::between(&now, &now), Shares::default());
        assert_eq!(Shares::default().main_cause(), None);
    }

    #[test]
    fn the_sentences_name_cause_figures_and_advice() {
        let [cause, figures, advice] = sentences(|_| ());
        assert_eq!(
            cause,
            "vm0 waits for nothing: for 100 % of the last second, the guest had no command \
             outstanding."
        );
        assert_eq!(
            figures,
            "It completed 495 commands per second, and 32 of at most 1023 are outstanding: 1 not \
             fetched, 31 in flight."
        );
        assert!(advice.contains("in the guest"), "{advice}");
        let [cause, figures, advice] = sentences(|one| {
            one.shares = Shares { limit: 0.9, disk: 0.08, nothing: 0.02, ..Shares::default() };
            one.disks[0].limited = 28;
            one.disks[0].limits =
                Some(LimitSpec { iops: Some("500".to_owned()), ..LimitSpec::default() });
        });
        assert!(
            cause.starts_with("vm0 waits for the rate limits of its disk: disk 8 %, limit 90 %")
        );
        assert!(figures.ends_with("31 in flight, 28 of them at the rate limits."), "{figures}");
        assert_eq!(
            advice,
            "The limits are iops=500: change them with `shadowbell ctl limit vm0/1 ...`."
        );
        for (shares, word, hint) in [
            (Shares { disk: 1.0, ..Shares::default() }, "storage", "/srv/vm0.img"),
            (Shares { queue_full: 1.0, ..Shares::default() }, "full queue", "vCPUs"),
            (Shares { memory: 1.0, ..Shares::default() }, "guest memory", "swaps"),
            (
                Shares { processor: 1.0, ..Shares::default() },
                "I/O thread",
                "I/O thread 1 was awake for 97 %",
            ),
        ] {
            let [cause, _, advice] = sentences(|one| one.shares = shares);
            assert!(cause.contains(word) && advice.contains(hint), "{cause} {advice}");
        }
    }

    #[test]
    fn a_hang_has_its_reason() {
        let [cause, _, advice] = sentences(|one| one.disks[0].stalled = true);
        assert!(cause.contains("stalled") && cause.contains(" 7 s"), "{cause}");
        assert!(advice.contains("the 31 requests"), "{advice}");
        let [cause, figures, advice] = sentences(|one| {
            one.disks[0].stopped = Some("no space left".to_owned());
            one.disks[0].held = 4;
        });
        assert!(cause.ends_with("error of its storage: no space left."), "{cause}");
        assert!(figures.ends_with("4 of them held.") && advice.contains("ctl disk resume vm0/1"));
        let [cause, ..] = sentences(|one| one.client = false);
        assert!(cause.contains("no client"), "{cause}");
        let [cause, ..] = sentences(|one| {
            (one.state, one.waits_for) = (ControllerState::Waiting, Some("refused".to_owned()));
        });
        assert!(cause.contains("(refused)"), "{cause}");
        for state in [ControllerState::Failed, ControllerState::Disabled, ControllerState::ShutDown]
        {
            let [cause, ..] = sentences(|one| one.state = state);
            assert!(!cause.contains("waits"), "{cause}");
        }
    }
}
