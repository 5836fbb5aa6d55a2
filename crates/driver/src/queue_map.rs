//! Mapping of processors to I/O queue pairs.

use rustix::thread::{CpuSet, sched_getaffinity};
use std::fmt;

/// Mapping of processors to queue pairs: one queue pair for each processor if there are enough,
/// otherwise adjacent processors share a queue pair.
///
/// Queue pairs are numbered from 1, as queue identifiers are. The driver uses the same number for
/// the interrupt vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueMap {
    /// Mapped processors in ascending order.
    processors: Vec<usize>,
    queues: u16,
}

impl QueueMap {
    /// Maps these processors to `queues` queue pairs; 0 counts as 1.
    #[must_use]
    pub fn new(processors: impl IntoIterator<Item = usize>, queues: u16) -> Self {
        let mut processors: Vec<_> = processors.into_iter().collect();
        processors.sort_unstable();
        processors.dedup();
        Self { processors, queues: queues.max(1) }
    }

    /// Maps the processors of this thread's affinity mask.
    #[must_use]
    pub fn of_this_machine(queues: u16) -> Self {
        let allowed = sched_getaffinity(None).unwrap_or_default();
        Self::new((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)), queues)
    }

    /// The queue pair of a processor; `None` if the map does not contain the processor.
    #[must_use]
    pub fn queue_of(&self, processor: usize) -> Option<u16> {
        let index = self.processors.binary_search(&processor).ok()?;
        let queues = usize::from(self.queues).min(self.processors.len());
        u16::try_from(index * queues / self.processors.len() + 1).ok()
    }

    /// The processors of a queue pair. Empty for a spare queue pair, if there are more queue pairs
    /// than processors.
    #[must_use]
    pub fn processors_of(&self, queue: u16) -> Vec<usize> {
        let of = |cpu: &usize| self.queue_of(*cpu) == Some(queue);
        self.processors.iter().copied().filter(of).collect()
    }

    /// The number of queue pairs.
    #[must_use]
    pub fn queues(&self) -> u16 {
        self.queues
    }
}

/// Formats the map as `1 (processors 0-1), 2 (processor 2), 3 (spare)`. A one-to-one mapping of
/// consecutive processors is abbreviated with `each its own`.
impl fmt::Display for QueueMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (queues, processors) = (usize::from(self.queues), self.processors.len());
        if queues >= processors && processors > 1 {
            let first = self.processors.first().copied().unwrap_or_default();
            let last = self.processors.last().copied().unwrap_or_default();
            if last - first + 1 == processors {
                write!(f, "1 to {processors} (processors {first} to {last}, each its own)")?;
                return if queues > processors {
                    write!(f, ", {} to {queues} (spare)", processors + 1)
                } else {
                    Ok(())
                };
            }
        }
        for queue in 1..=self.queues {
            let of = self.processors_of(queue);
            let comma = if queue == 1 { "" } else { ", " };
            match of.as_slice() {
                [] if queue == self.queues => write!(f, "{comma}{queue} (spare)")?,
                [] => {
                    return write!(f, "{comma}{queue} to {queues} (spare)");
                }
                [one] => write!(f, "{comma}{queue} (processor {one})")?,
                of => write!(f, "{comma}{queue} (processors {})", list(of))?,
            }
        }
        Ok(())
    }
}

/// Formats processors as a kernel CPU list: `0-3,8`.
pub(crate) fn list(processors: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &processor in processors {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == processor => *last = processor,
            _ => runs.push((processor, processor)),
        }
    }
    let run = |&(first, last): &(usize, usize)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    runs.iter().map(run).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_processor_has_a_queue_and_every_queue_its_share() {
        for processors in 1..20 {
            for queues in 1..24u16 {
                let map = QueueMap::new(0..processors, queues);
                let shares: Vec<_> = (1..=queues).map(|q| map.processors_of(q).len()).collect();
                assert_eq!(shares.iter().sum::<usize>(), processors);
                let used = shares.iter().filter(|share| **share > 0);
                let (least, most) = (used.clone().min().unwrap(), used.clone().max().unwrap());
                assert!(most - least <= 1, "{processors} on {queues}: {shares:?}");
                assert_eq!(used.count(), processors.min(queues.into()));
            }
        }
        assert_eq!(QueueMap::new([0, 2], 1).queue_of(1), None);
        assert_eq!(QueueMap::new([], 3).queue_of(0), None);
    }

    #[test]
    fn a_map_is_printed_as_text() {
        for (processors, queues, want) in [
            (vec![0], 1, "1 (processor 0)"),
            (vec![0, 1], 1, "1 (processors 0-1)"),
            (vec![0, 1, 2, 3], 4, "1 to 4 (processors 0 to 3, each its own)"),
            (vec![0, 1], 4, "1 to 2 (processors 0 to 1, each its own), 3 to 4 (spare)"),
            (vec![0, 1, 2, 3], 2, "1 (processors 0-1), 2 (processors 2-3)"),
            (vec![0, 2, 3, 7], 2, "1 (processors 0,2), 2 (processors 3,7)"),
            (vec![1, 3], 3, "1 (processor 1), 2 (processor 3), 3 (spare)"),
            (vec![0], 3, "1 (processor 0), 2 to 3 (spare)"),
        ] {
            assert_eq!(QueueMap::new(processors, queues).to_string(), want);
        }
    }
}
