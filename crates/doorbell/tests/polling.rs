//! Cost of a busy queue with a polling controller, checked by counts: MMIO writes of the host and
//! stores of EventIdx, over millions of entries and many wraps of the ring.
#![cfg(not(loom))]

use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;
use shadowbell_doorbell::{CqHead, HostDoorbell, Predicate, RingSize, SqTail};

/// Deterministic random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % u64::from(bound.max(1))) as u32
    }
}

#[derive(Debug)]
struct Cost {
    /// Number of MMIO writes of the host. The first update is not counted, because it always needs
    /// one.
    mmio: u64,
    event_idx_stores: u64,
    entries: u64,
    turns: u64,
}

/// Runs a submission queue with at most `depth` outstanding commands. In each round, the host
/// submits all commands for which there is room, or some of them, or none, with at most `batch`
/// commands per doorbell update. The controller polls, and completes some of the fetched commands.
fn busy(entries: u32, predicate: Predicate, depth: u32, batch: u32, total: u64) -> Cost {
    let size = RingSize::new(entries).unwrap();
    let (register, shadow, event_idx) = <(AtomicU32, AtomicU32, AtomicU32)>::default();
    let mut host: HostDoorbell<&AtomicU32> = HostDoorbell::new(0);
    host.attach_shadow(&shadow, &event_idx);
    host.enable_shadow();
    let mut tail = SqTail::new(size, &register);
    tail.enable(&shadow, &event_idx).unwrap();

    let mut random = Random(u64::from(entries) << 8 | u64::from(depth));
    let (mut submitted, mut completed, mut seen) = (0u64, 0u64, 0u64);
    while submitted < total {
        let free = depth - (submitted - completed) as u32;
        let mut count = if random.below(4) == 0 { free } else { random.below(free + 1) };
        while count > 0 {
            let update = count.min(1 + random.below(batch));
            count -= update;
            submitted += u64::from(update);
            let new = (submitted % u64::from(entries)) as u16;
            if host.publish_with(predicate, new) {
                register.store(u32::from(new), Ordering::Relaxed);
            }
        }
        if random.below(3) > 0 {
            assert_eq!(tail.poll(), Ok((submitted % u64::from(entries)) as u16));
            seen = submitted;
        }
        completed += u64::from(random.below((seen - completed) as u32 + 1));
    }
    let stats = host.stats();
    assert_eq!(stats.published, stats.mmio_needed + stats.mmio_saved);
    Cost {
        mmio: stats.mmio_needed - 1,
        event_idx_stores: tail.stats().event_idx_moved,
        entries: submitted,
        turns: submitted / u64::from(entries),
    }
}

const SIZES: [u32; 14] = [2, 3, 4, 5, 7, 8, 31, 64, 100, 1000, 1024, 4096, 65535, 65536];

fn quiet_depth(predicate: Predicate, entries: u32) -> u32 {
    let quarter = (entries / 4).max(1);
    entries - quarter - u32::from(predicate == Predicate::SpdkInclusive)
}

#[test]
fn a_busy_queue_rings_never() {
    for entries in SIZES {
        for predicate in [Predicate::Linux, Predicate::SpdkInclusive] {
            let full = quiet_depth(predicate, entries).min(entries - 1);
            for depth in [1, entries / 2, full] {
                if depth == 0 || depth > full {
                    continue;
                }
                for batch in [1, depth] {
                    let total = 100_000.max(u64::from(entries) * 5);
                    let cost = busy(entries, predicate, depth, batch, total);
                    assert!(cost.turns >= 5);
                    assert_eq!(cost.mmio, 0, "{entries} {predicate:?} {depth}: {cost:?}");
                }
            }
        }
    }
}

/// EventIdx is stored at most once per eighth of the ring, because the host reads EventIdx, and
/// each store takes the cache line from the host.
#[test]
fn event_idx_is_stored_rarely() {
    for entries in SIZES {
        let depth = quiet_depth(Predicate::Linux, entries).min(entries - 1);
        for batch in [1, depth] {
            let cost = busy(entries, Predicate::Linux, depth, batch, 100_000);
            let eighth = u64::from((entries / 4).max(1) - entries / 8);
            let most = cost.entries / eighth + 2;
            assert!(cost.event_idx_stores <= most, "{entries} {batch}: {cost:?}");
        }
    }
}

/// If the queue is always full, the host writes the register a few times per wrap of the ring. The
/// limits are those of the exhaustive model.
#[test]
fn a_full_queue_rings_few_times_per_turn() {
    for entries in SIZES {
        for (predicate, worst) in [(Predicate::Linux, 3), (Predicate::SpdkInclusive, 5)] {
            // In the smallest rings, a wrap consists of a few updates only, and each of them may
            // need a register write.
            if entries < 8 {
                continue;
            }
            let depth = entries - 1;
            let cost = busy(entries, predicate, depth, depth, u64::from(entries) * 20);
            assert!(cost.mmio <= cost.turns * worst, "{entries} {predicate:?}: {cost:?}");
        }
    }
}

/// Completion queue doorbell: the host consumes completions in batches, and the controller polls
/// once per batch that it posts. No update of the head needs an MMIO write.
#[test]
fn acknowledging_completions_rings_never() {
    for entries in SIZES {
        for predicate in [Predicate::Linux, Predicate::SpdkInclusive] {
            let depth = quiet_depth(predicate, entries).min(entries - 1);
            if depth == 0 {
                continue;
            }
            let size = RingSize::new(entries).unwrap();
            let (register, shadow, event_idx) = <(AtomicU32, AtomicU32, AtomicU32)>::default();
            let mut host: HostDoorbell<&AtomicU32> = HostDoorbell::new(0);
            host.attach_shadow(&shadow, &event_idx);
            host.enable_shadow();
            let mut head = CqHead::new(size, &register);
            head.enable(&shadow, &event_idx, 0).unwrap();
            let mut random = Random(u64::from(entries));
            let (mut posted, mut acknowledged) = (0u64, 0u64);
            let at = |count: u64| (count % u64::from(entries)) as u16;
            while posted < u64::from(entries) * 20 {
                // The controller posts at most as many completions as there are free entries.
                assert_eq!(head.poll(at(posted)), Ok(at(acknowledged)));
                let free = depth - (posted - acknowledged) as u32;
                posted += u64::from(1 + random.below(free)).min(u64::from(free));
                let fresh = (posted - acknowledged) as u32;
                acknowledged += u64::from(1 + random.below(fresh)).min(u64::from(fresh));
                if host.publish_with(predicate, at(acknowledged)) {
                    register.store(u32::from(at(acknowledged)), Ordering::Relaxed);
                }
            }
            assert_eq!(host.stats().mmio_needed, 1, "{entries} {predicate:?}");
            assert_eq!(head.stats().invalid, 0);
        }
    }
}

proptest! {
    #[test]
    fn a_busy_queue_of_any_size_rings_never(
        entries in 2u32..=3000,
        inclusive: bool,
        depth in 0.0..1.0,
        batch in 0.0..1.0,
    ) {
        let predicate = if inclusive { Predicate::SpdkInclusive } else { Predicate::Linux };
        let most = quiet_depth(predicate, entries).min(entries - 1);
        prop_assume!(most > 0);
        let part = |of: u32, share: f64| 1 + (f64::from(of - 1) * share) as u32;
        let depth = part(most, depth);
        let cost = busy(entries, predicate, depth, part(depth, batch), 30_000);
        prop_assert_eq!(cost.mmio, 0, "{:?}", cost);
    }
}
