//! Sampler of what commands wait for, for `shadowbell top` and `ctl explain`.
//!
//! While a reader is there, a thread samples the outstanding commands of all controllers every
//! [`PERIOD`]: in the submission queues, at the rate limits, at the storage. By Little's
//! law, the number of commands at a place is proportional to the time that commands spend there. So
//! the time since the last sample is divided among the causes in proportion to these numbers.
//!
//! An I/O thread that answers late has not served its controllers meanwhile. Its resource usage
//! shows why: it was computing or had no CPU (`processor`), or it waited for a page of guest memory
//! (`memory`). Without a reader, there is neither a thread nor a sample.

use super::reconfigure::Changes;
use parking_lot::Mutex;
use shadowbell_control_api::explain::Cause;
use shadowbell_control_api::live_stats::Waits;
use shadowbell_controller::{Outstanding, ThreadSample};
use shadowbell_disk_layers::LimitedDisk;
use shadowbell_memory::ThreadUsage;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tracing::warn;

/// Time between two samples.
const PERIOD: Duration = Duration::from_millis(50);
/// Time for which the sampler runs after the last read.
const LINGER: Duration = Duration::from_secs(3);
/// Time to answer beyond which an I/O thread is late.
const LATE: Duration = Duration::from_millis(2);

/// Sampled values of a controller.
#[derive(Clone, Debug, Default)]
pub(super) struct Sampled {
    /// Times by cause.
    pub(super) waits: Waits,
    /// Outstanding commands at the last sample, on all I/O threads.
    pub(super) outstanding: Outstanding,
    /// Time for which I/O threads have not answered, so that the cause is not known yet.
    undecided: Duration,
}

/// Sampler and its results.
#[derive(Clone, Default)]
pub(super) struct WaitSampler(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Sampled values by the number of the controller.
    controllers: HashMap<u32, Sampled>,
    /// Time of the last read, while the thread runs.
    read: Option<Instant>,
}

impl WaitSampler {
    /// Sampled values by the number of the controller. Starts the thread if it does not run.
    pub(super) fn read(&self, changes: &Arc<Changes>) -> HashMap<u32, Sampled> {
        let mut state = self.0.lock();
        if state.read.replace(Instant::now()).is_none()
            && let Err(error) = self.start(changes)
        {
            state.read = None;
            warn!("cannot sample what commands wait for: {error}");
        }
        let mut controllers = state.controllers.clone();
        for sampled in controllers.values_mut() {
            // A thread that does not answer for long is most likely in a page fault.
            sampled.waits.memory_ns += nanoseconds(sampled.undecided);
        }
        controllers
    }

    fn start(&self, changes: &Arc<Changes>) -> io::Result<()> {
        let (ours, changes) = (self.clone(), Arc::downgrade(changes));
        let thread = std::thread::Builder::new().name("sb-waits".into());
        thread.spawn(move || ours.run(&changes)).map(drop)
    }

    fn run(&self, changes: &Weak<Changes>) {
        let (answer, answers) = channel();
        let mut threads = Threads::default();
        let mut last = Instant::now();
        // While the thread waits, it holds only a weak reference, so that disks can be closed.
        while let Some(strong) = changes.upgrade() {
            threads.request(&strong, &answer);
            drop(strong);
            let samples = threads.collect(&answers, last + PERIOD);
            let Some(strong) = changes.upgrade() else { return };
            let numbers = strong.registry().all().into_iter();
            let numbers: BTreeSet<_> = numbers.map(|served| served.controller.number()).collect();
            let limited = limited(&strong);
            drop(strong);
            let now = Instant::now();
            let mut state = self.0.lock();
            state.controllers.retain(|number, _| numbers.contains(number));
            state.add(&threads.round(samples), &limited, now.saturating_duration_since(last));
            last = now;
            if state.read.is_none_or(|read| read.elapsed() > LINGER) {
                state.read = None;
                return;
            }
        }
    }
}

/// Requests at the rate limits by controller number and NSID. Disks without limits are left out.
fn limited(changes: &Changes) -> HashMap<(u32, u32), u64> {
    let mut limited = HashMap::new();
    for served in changes.registry().all() {
        for (nsid, namespace) in served.controller.namespaces() {
            if let Some(disk) = LimitedDisk::of(&*namespace.disk) {
                limited.insert((served.controller.number(), nsid), disk.waiting());
            }
        }
    }
    limited
}

/// Answers of the I/O threads so far.
#[derive(Default)]
struct Threads {
    /// Threads that have not answered the last request.
    waiting: BTreeSet<usize>,
    /// Resource usage of each thread at its last answer.
    usage: HashMap<usize, ThreadUsage>,
    /// Controllers of each thread at its last answer.
    controllers: HashMap<usize, Vec<u32>>,
}

/// Samples of one period.
#[derive(Default)]
struct Round {
    /// Outstanding commands by the number of the controller.
    outstanding: HashMap<u32, Outstanding>,
    /// Longest delay of an I/O thread of the controller, and its cause. `None` as long as the
    /// thread has not answered.
    late: HashMap<u32, (Duration, Option<Cause>)>,
}

impl Threads {
    fn request(&mut self, changes: &Changes, answer: &Sender<ThreadSample>) {
        let requested = changes.pool().sample(|worker| !self.waiting.contains(&worker), answer);
        self.waiting.extend(requested);
    }

    /// Receives answers until `until`.
    fn collect(&mut self, answers: &Receiver<ThreadSample>, until: Instant) -> Vec<ThreadSample> {
        let mut samples = Vec::new();
        loop {
            match answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(sample) => {
                    self.waiting.remove(&sample.worker);
                    samples.push(sample);
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return samples,
            }
        }
    }

    /// Combines the samples of a period.
    fn round(&mut self, samples: Vec<ThreadSample>) -> Round {
        let mut round = Round::default();
        for sample in samples {
            let ThreadSample { worker, requested, answered, usage, controllers } = sample;
            let delay = answered.saturating_duration_since(requested);
            let before = self.usage.insert(worker, usage).unwrap_or_default();
            let numbers = controllers.iter().map(|one| one.controller).collect();
            let of = self.controllers.insert(worker, numbers).unwrap_or_default();
            if delay >= LATE {
                let cause = Some(cause_of(delay, &before, &usage));
                of.into_iter().for_each(|controller| round.is_late(controller, delay, cause));
            }
            for one in controllers {
                let sum = round.outstanding.entry(one.controller).or_default();
                sum.controller = one.controller;
                sum.queued += one.queued;
                sum.held_back += one.held_back;
                sum.in_flight += one.in_flight;
                sum.capacity += one.capacity;
                sum.requests.extend(one.requests);
            }
        }
        for worker in &self.waiting {
            for controller in self.controllers.get(worker).into_iter().flatten() {
                round.is_late(*controller, Duration::MAX, None);
            }
        }
        round
    }
}

impl Round {
    fn is_late(&mut self, controller: u32, delay: Duration, cause: Option<Cause>) {
        let late = self.late.entry(controller).or_insert((delay, cause));
        if late.0 < delay {
            *late = (delay, cause);
        }
    }
}

/// Cause of a late answer, from the resource usage at the previous answer and now.
fn cause_of(delay: Duration, before: &ThreadUsage, now: &ThreadUsage) -> Cause {
    let computed = now.processor.saturating_sub(before.processor);
    let preempted = (now.switches - now.waits).saturating_sub(before.switches - before.waits);
    if now.major_faults > before.major_faults {
        Cause::Memory
    } else if computed >= delay / 2 || preempted != 0 {
        Cause::Processor
    } else {
        Cause::Memory
    }
}

impl State {
    /// Adds the samples of a period that has lasted `time`.
    fn add(&mut self, round: &Round, limited: &HashMap<(u32, u32), u64>, time: Duration) {
        let late = round.late.keys().copied();
        let sampled = round.outstanding.keys().copied();
        let known = self.controllers.keys().copied();
        let mut numbers: Vec<u32> = known.chain(sampled).chain(late).collect();
        numbers.sort_unstable();
        numbers.dedup();
        for number in numbers {
            let sampled = self.controllers.entry(number).or_default();
            let mut rest = time;
            if let Some((delay, cause)) = round.late.get(&number) {
                let delay = (*delay).min(time);
                rest -= delay;
                match cause {
                    None => sampled.undecided += delay,
                    Some(cause) => {
                        let delay = delay + std::mem::take(&mut sampled.undecided);
                        *part_of(&mut sampled.waits, *cause) += nanoseconds(delay);
                    }
                }
            }
            // A controller without a sample is parked, and so has no command outstanding; or its
            // thread has not answered, and then no time is left.
            let outstanding = round.outstanding.get(&number).cloned().unwrap_or_default();
            divide(&mut sampled.waits, &outstanding, limited, rest);
            if rest != Duration::ZERO {
                sampled.outstanding = outstanding;
            }
        }
    }
}

/// Divides `time` among the causes for which the outstanding commands wait.
fn divide(
    waits: &mut Waits,
    outstanding: &Outstanding,
    limited: &HashMap<(u32, u32), u64>,
    time: Duration,
) {
    let Outstanding { controller, queued, held_back, in_flight, requests, .. } = outstanding;
    let all = u64::from(*queued) + u64::from(*in_flight);
    let time = nanoseconds(time);
    if all == 0 {
        waits.nothing_ns += time;
        return;
    }
    let part = |count: u64, of: u64, time: u64| {
        (u128::from(time) * u128::from(count) / u128::from(of.max(1))) as u64
    };
    let queue_full = part((*held_back).into(), all, time);
    let processor = part(u64::from(queued - held_back), all, time);
    let at_disks = time - queue_full - processor;
    let mut by_namespace: BTreeMap<u32, u64> = BTreeMap::new();
    requests.iter().for_each(|(nsid, count)| *by_namespace.entry(*nsid).or_default() += count);
    let sum: u64 = by_namespace.values().sum();
    let at_limits = by_namespace.iter().map(|(nsid, count)| {
        limited.get(&(*controller, *nsid)).map_or(0, |limited| *limited.min(count))
    });
    let limit = part(at_limits.sum(), sum, at_disks);
    waits.queue_full_ns += queue_full;
    waits.processor_ns += processor;
    waits.limit_ns += limit;
    waits.disk_ns += at_disks - limit;
}

fn part_of(waits: &mut Waits, cause: Cause) -> &mut u64 {
    match cause {
        Cause::Disk => &mut waits.disk_ns,
        Cause::Limit => &mut waits.limit_ns,
        Cause::QueueFull => &mut waits.queue_full_ns,
        Cause::Processor => &mut waits.processor_ns,
        Cause::Memory => &mut waits.memory_ns,
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn outstanding(queued: u32, held_back: u32, in_flight: u32, requests: u64) -> Outstanding {
        let mut one = Outstanding::default();
        (one.controller, one.queued, one.held_back) = (1, queued, held_back);
        (one.in_flight, one.capacity) = (in_flight, 1023);
        one.requests = vec![(1, requests)];
        one
    }

    fn divided(outstanding: &Outstanding, limited: u64) -> Waits {
        let mut waits = Waits::default();
        let limited = HashMap::from([((1, 1), limited)]);
        // The time that the sample stands for.
        divide(&mut waits, outstanding, &limited, Duration::from_secs(1));
        waits
    }

    #[test]
    fn time_is_divided_by_the_places_of_the_commands() {
        let waits = divided(&outstanding(0, 0, 0, 0), 0);
        assert_eq!(waits, Waits { nothing_ns: SECOND, ..Waits::default() });
        let waits = divided(&outstanding(0, 0, 10, 20), 15);
        let expected = Waits { limit_ns: SECOND / 4 * 3, disk_ns: SECOND / 4, ..Waits::default() };
        assert_eq!(waits, expected);
        let waits = divided(&outstanding(8, 3, 2, 2), 0);
        let expected = Waits {
            queue_full_ns: SECOND / 10 * 3,
            processor_ns: SECOND / 2,
            disk_ns: SECOND / 5,
            ..Waits::default()
        };
        assert_eq!(waits, expected);
        // More requests at the limits than requests of this controller: another controller shares
        // the disk.
        assert_eq!(divided(&outstanding(0, 0, 1, 1), 7).limit_ns, SECOND);
        // A command between two of its requests.
        assert_eq!(divided(&outstanding(0, 0, 1, 0), 7).disk_ns, SECOND);
    }

    fn usage(processor: Duration, switches: u64, major_faults: u64) -> ThreadUsage {
        let mut usage = ThreadUsage::default();
        (usage.processor, usage.switches, usage.major_faults) = (processor, switches, major_faults);
        usage
    }

    #[test]
    fn the_usage_of_a_late_thread_shows_the_cause() {
        let ms = Duration::from_millis;
        let before = usage(ms(100), 5, 1);
        for (now, cause) in [
            (usage(ms(130), 5, 1), Cause::Processor),
            (usage(ms(101), 6, 1), Cause::Processor),
            (usage(ms(101), 6, 2), Cause::Memory),
            (usage(ms(101), 5, 1), Cause::Memory),
        ] {
            assert_eq!(cause_of(ms(40), &before, &now), cause, "{now:?}");
        }
    }

    /// Answer of I/O thread 0 after `delay`.
    fn answer(delay: Duration, usage: ThreadUsage) -> ThreadSample {
        let requested = Instant::now();
        let controllers = vec![outstanding(0, 0, 4, 4)];
        ThreadSample { worker: 0, requested, answered: requested + delay, usage, controllers }
    }

    #[test]
    fn a_thread_without_an_answer_is_counted_when_it_answers() {
        let (mut threads, mut state) = (Threads::default(), State::default());
        let mut add = |threads: &mut Threads, samples: Vec<ThreadSample>| {
            threads.waiting = if samples.is_empty() { [0].into() } else { [].into() };
            state.add(&threads.round(samples), &HashMap::new(), Duration::from_secs(1));
            state.controllers[&1].clone()
        };
        let sampled = add(&mut threads, vec![answer(Duration::ZERO, usage(Duration::ZERO, 0, 0))]);
        assert_eq!((sampled.waits.disk_ns, sampled.outstanding.in_flight), (SECOND, 4));
        let sampled = add(&mut threads, Vec::new());
        assert_eq!((sampled.undecided, sampled.waits.memory_ns), (Duration::from_secs(1), 0));
        assert_eq!(sampled.outstanding.in_flight, 4);
        // It has had no CPU for a second and a half.
        let late = answer(Duration::from_millis(500), usage(Duration::ZERO, 9, 0));
        let sampled = add(&mut threads, vec![late]);
        assert_eq!(sampled.undecided, Duration::ZERO);
        let Waits { disk_ns, processor_ns, memory_ns, .. } = sampled.waits;
        assert_eq!((disk_ns, processor_ns, memory_ns), (SECOND / 2 * 3, SECOND / 2 * 3, 0));
    }
}
