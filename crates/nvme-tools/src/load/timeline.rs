//! Time line of a run: results of each job in each interval.

use super::io_source::IoSource;
use super::job::Job;
use crate::latency::{Latency, histogram};
use anyhow::Context;
use hdrhistogram::Histogram;
use shadowbell_driver::QueueStats;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Shortest interval; shorter ones would have too few latency samples.
const SHORTEST: Duration = Duration::from_millis(10);
/// Largest number of intervals of all jobs together, and smallest number per job.
const MAX_INTERVALS: u64 = 1600;
const MIN_INTERVALS: u64 = 20;

/// Returns the length of a run's intervals, for at most a hundred intervals per run.
#[must_use]
pub(crate) fn interval(runtime: Duration, jobs: u16) -> Duration {
    let count = (MAX_INTERVALS / u64::from(jobs.max(1))).clamp(MIN_INTERVALS, 100);
    (runtime / count as u32).max(SHORTEST)
}

/// Results of a job in one interval.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// Number of the interval in the run.
    number: u32,
    /// Beginning of the interval for this job; `time` is its length.
    at: Instant,
    time: Duration,
    commands: u64,
    doorbells: Doorbells,
    interrupts: u64,
    /// Histogram: latencies in nanoseconds, and their counts.
    latencies: Vec<(u64, u64)>,
}

/// Doorbell statistics of a driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Doorbells {
    /// Doorbell register writes.
    pub rung: u64,
    /// Doorbell updates for which writing the shadow entry was sufficient.
    pub saved: u64,
}

impl Doorbells {
    fn of(stats: &QueueStats) -> Self {
        Self { rung: stats.doorbell_mmio_writes(), saved: stats.mmio_saved }
    }

    fn since(self, before: Self) -> Self {
        Self { rung: self.rung - before.rung, saved: self.saved - before.saved }
    }

    /// Adds the statistics of another queue.
    pub(crate) fn add(&mut self, other: Self) {
        self.rung += other.rung;
        self.saved += other.saved;
    }

    /// Percentage of saved doorbell writes; `None` without any doorbell updates.
    #[must_use]
    pub fn percent_saved(self) -> Option<f64> {
        let all = self.rung + self.saved;
        (all != 0).then(|| self.saved as f64 / all as f64 * 100.0)
    }
}

/// Counters of a job at the beginning of an interval.
struct StartCounters {
    at: Instant,
    commands: u64,
    doorbells: Doorbells,
    interrupts: u64,
}

impl StartCounters {
    fn of<L: IoSource>(job: &Job<L>, at: Instant) -> Self {
        let stats = job.stats();
        let (doorbells, interrupts) = (Doorbells::of(&stats), stats.interrupts_waited());
        Self { at, commands: job.commands(), doorbells, interrupts }
    }
}

/// Recorder of the time lines of a thread's jobs.
pub(super) struct Recorder {
    marks: Vec<StartCounters>,
    /// Latencies of all intervals; each job holds only those of its current interval.
    latencies: Histogram<u64>,
    samples: Vec<(u16, Vec<Sample>)>,
}

impl Recorder {
    /// Recorder whose first interval begins now.
    pub(super) fn new<L: IoSource>(jobs: &[Job<L>]) -> anyhow::Result<Self> {
        let samples = jobs.iter().map(|job| (job.qid(), Vec::new())).collect();
        let mut new = Self { marks: Vec::new(), latencies: histogram()?, samples };
        new.restart(jobs);
        Ok(new)
    }

    /// Discards all samples and begins the first interval.
    pub(super) fn restart<L: IoSource>(&mut self, jobs: &[Job<L>]) {
        let now = Instant::now();
        self.marks = jobs.iter().map(|job| StartCounters::of(job, now)).collect();
        self.latencies.reset();
        self.samples.iter_mut().for_each(|(_, samples)| samples.clear());
    }

    /// Records the interval `number`, which has ended.
    pub(super) fn end_interval<L: IoSource>(
        &mut self,
        number: u32,
        jobs: &mut [Job<L>],
    ) -> anyhow::Result<()> {
        let now = Instant::now();
        let samples = self.samples.iter_mut().map(|(_, samples)| samples);
        for ((job, before), samples) in jobs.iter_mut().zip(&mut self.marks).zip(samples) {
            let after = StartCounters::of(job, now);
            let latencies = job.latencies();
            samples.push(Sample {
                number,
                at: before.at,
                time: now - before.at,
                commands: after.commands - before.commands,
                doorbells: after.doorbells.since(before.doorbells),
                interrupts: after.interrupts - before.interrupts,
                latencies: latencies
                    .iter_recorded()
                    .map(|step| (step.value_iterated_to(), step.count_since_last_iteration()))
                    .collect(),
            });
            self.latencies.add(latencies).context("adding up the latencies")?;
            job.discard_latencies();
            *before = after;
        }
        Ok(())
    }

    /// Latencies of all intervals, and the samples of each queue.
    pub(super) fn finish(self) -> (Histogram<u64>, Vec<(u16, Vec<Sample>)>) {
        (self.latencies, self.samples)
    }
}

/// Results of all jobs in one interval.
#[derive(Clone, Debug)]
pub struct Interval {
    /// Beginning, in seconds since the measurement began.
    pub start: f64,
    /// Length in seconds.
    pub seconds: f64,
    /// I/Os per second.
    pub iops: f64,
    /// Doorbell statistics.
    pub doorbells: Doorbells,
    /// Latency summary, if there were samples.
    pub latency: Option<Latency>,
    /// Histogram: latencies in nanoseconds, ascending, and their counts.
    pub latencies: Vec<(u64, u64)>,
}

/// Results of a queue over the whole run.
#[derive(Clone, Debug)]
pub struct QueueSum {
    /// Queue identifier.
    pub qid: u16,
    /// I/Os per second.
    pub iops: f64,
    /// Number of I/Os.
    pub commands: u64,
    /// Doorbell statistics.
    pub doorbells: Doorbells,
    /// Interrupts that woke the job.
    pub interrupts: u64,
    /// Latency summary, if there were samples.
    pub latency: Option<Latency>,
}

/// Time line of a run.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// Intervals, in chronological order.
    pub intervals: Vec<Interval>,
    /// Queues, by identifier.
    pub queues: Vec<QueueSum>,
}

impl Timeline {
    /// Sums up the samples of all queues.
    pub(super) fn of(mut queues: Vec<(u16, Vec<Sample>)>) -> anyhow::Result<Self> {
        queues.sort_by_key(|(qid, _)| *qid);
        let all = || queues.iter().flat_map(|(_, samples)| samples);
        let Some(began) = all().map(|sample| sample.at).min() else { return Ok(Self::default()) };
        let mut numbers: BTreeMap<u32, Vec<&Sample>> = BTreeMap::new();
        for sample in all() {
            numbers.entry(sample.number).or_default().push(sample);
        }
        let longest = all().map(|sample| sample.time).max().unwrap_or_default();
        let mut intervals = Vec::new();
        for samples in numbers.values() {
            let times = || samples.iter().map(|sample| sample.time);
            // A short last interval is left out, because its rates would be noise.
            if times().max().is_none_or(|time| time < longest / 4) {
                continue;
            }
            let sum = Sum::of(samples.iter().copied())?;
            let start = samples.iter().map(|sample| sample.at - began).min().unwrap_or_default();
            intervals.push(Interval {
                start: start.as_secs_f64(),
                seconds: times().max().unwrap_or_default().as_secs_f64(),
                iops: samples.iter().map(|s| rate(s.commands, s.time)).sum(),
                doorbells: sum.doorbells,
                latency: Latency::of(&sum.latencies),
                latencies: sum
                    .latencies
                    .iter_recorded()
                    .map(|step| (step.value_iterated_to(), step.count_since_last_iteration()))
                    .collect(),
            });
        }
        let of_queue = |(qid, samples): &(u16, Vec<Sample>)| {
            let sum = Sum::of(samples)?;
            Ok(QueueSum {
                qid: *qid,
                iops: rate(sum.commands, sum.time),
                commands: sum.commands,
                doorbells: sum.doorbells,
                interrupts: sum.interrupts,
                latency: Latency::of(&sum.latencies),
            })
        };
        let queues = queues.iter().map(of_queue).collect::<anyhow::Result<_>>()?;
        Ok(Self { intervals, queues })
    }
}

fn rate(commands: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { commands as f64 / time.as_secs_f64() }
}

/// Sum of samples.
struct Sum {
    time: Duration,
    commands: u64,
    doorbells: Doorbells,
    interrupts: u64,
    latencies: Histogram<u64>,
}

impl Sum {
    fn of<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> anyhow::Result<Self> {
        let mut sum = Self {
            time: Duration::ZERO,
            commands: 0,
            doorbells: Doorbells::default(),
            interrupts: 0,
            latencies: histogram()?,
        };
        for sample in samples {
            sum.time += sample.time;
            sum.commands += sample.commands;
            sum.doorbells.add(sample.doorbells);
            sum.interrupts += sample.interrupts;
            for (value, count) in &sample.latencies {
                sum.latencies.saturating_record_n(*value, *count);
            }
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_and_intervals_add_up() {
        let began = Instant::now();
        let sample = |number: u32, ms: u64, commands, latency| Sample {
            number,
            at: began + Duration::from_millis(u64::from(number) * 100),
            time: Duration::from_millis(ms),
            commands,
            doorbells: Doorbells { rung: 1, saved: commands },
            interrupts: 2,
            latencies: vec![(latency, commands)],
        };
        let queues = vec![
            (2, vec![sample(0, 100, 10, 5_000), sample(1, 100, 30, 7_000)]),
            (1, vec![sample(0, 100, 20, 1_000), sample(1, 100, 20, 1_000), sample(2, 1, 1, 9)]),
        ];
        let Timeline { intervals, queues } = Timeline::of(queues).unwrap();
        assert_eq!(intervals.len(), 2, "a short last interval is left out");
        let [first, second] = &intervals[..] else { panic!() };
        assert_eq!((first.start, second.start), (0.0, 0.1));
        assert_eq!((first.iops.round(), second.iops.round()), (300.0, 500.0));
        assert_eq!(first.doorbells, Doorbells { rung: 2, saved: 30 });
        assert_eq!((first.latency.unwrap().samples, first.latency.unwrap().p50), (30, 1_000));
        assert_eq!(first.latencies.iter().map(|(_, count)| count).sum::<u64>(), 30);
        assert_eq!(queues.iter().map(|queue| queue.qid).collect::<Vec<_>>(), [1, 2]);
        assert_eq!((queues[1].commands, queues[1].iops.round()), (40, 200.0));
        assert_eq!((queues[1].interrupts, queues[1].doorbells.rung), (4, 2));
        assert_eq!(queues[1].doorbells.percent_saved().unwrap().round(), 95.0);
        assert!(Timeline::of(Vec::new()).unwrap().intervals.is_empty());
    }

    #[test]
    fn the_number_of_intervals_is_bounded() {
        assert_eq!(interval(Duration::from_secs(10), 1), Duration::from_millis(100));
        assert_eq!(interval(Duration::from_secs(10), 64), Duration::from_millis(400));
        assert_eq!(interval(Duration::from_millis(10), 1), Duration::from_millis(10));
    }
}
