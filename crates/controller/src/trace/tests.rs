use super::*;
use crate::trace::record::{HEADER_BYTES, Layout, MAX_RINGS, RECORD_BYTES};
use proptest::prelude::*;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Path in a temporary directory, which is removed on drop.
struct Scratch(tempfile::TempDir);

impl Scratch {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("trace")
    }
}

fn read(path: &Path) -> Vec<Record> {
    read_trace(path).unwrap().collect()
}

fn error(path: &Path) -> TraceError {
    read_trace(path).map(drop).unwrap_err()
}

#[test]
fn layout() {
    assert_eq!((HEADER_BYTES, RECORD_BYTES), (64, 32));
    let layout = Layout::new(3, 1024).unwrap();
    assert_eq!(Layout::count(2), 192);
    assert_eq!([0, 1, 2].map(|n| layout.records(n)), [4096, 4096 + 32768, 4096 + 2 * 32768]);
    assert_eq!(layout.bytes(), 4096 + 3 * 32768);
    assert_eq!(Layout::new(64, 2).unwrap().records(0), 8192, "header and counts take two pages");
    assert!(Layout::new(0, 1024).is_none());
    assert!(Layout::new(MAX_RINGS + 1, 1024).is_none());
    assert!(Layout::new(1, 1000).is_none());
    assert!(Layout::new(1, 0).is_none());
    assert!(Layout::new(MAX_RINGS, 1 << 31).is_none());
    assert!(Kind::ALL.iter().all(|kind| Kind::from_byte(*kind as u8) == Some(*kind)));
    assert_eq!(Kind::from_byte(0), None);
    assert_eq!((0..=255).filter_map(Kind::from_byte).count(), Kind::ALL.len());
}

#[test]
fn rings_are_merged_by_time() {
    let scratch = Scratch::new();
    let trace = TraceFile::create(&scratch.path(), 2, 100).unwrap();
    let mut control = trace.control().unwrap();
    let mut workers = trace.workers();
    assert_eq!(workers.len(), 2);
    control.record(Kind::QueueCreated, 1, 3, 256, 3);
    workers[1].record(Kind::MmioWrite, 1, 3, 17, 0);
    workers[0].record(Kind::Sleep, 0, 0, 0, 0);
    workers[1].record(Kind::Batch, 1, 3, 17, 16);
    control.record(Kind::Reset, 1, 0, 0, 0);
    let records = read(&scratch.path());
    let seen: Vec<_> =
        records.iter().map(|r| (r.kind, r.worker, r.controller, r.qid, r.value, r.extra)).collect();
    assert_eq!(
        seen,
        [
            (Kind::QueueCreated, None, 1, 3, 256, 3),
            (Kind::MmioWrite, Some(1), 1, 3, 17, 0),
            (Kind::Sleep, Some(0), 0, 0, 0, 0),
            (Kind::Batch, Some(1), 1, 3, 17, 16),
            (Kind::Reset, None, 1, 0, 0, 0),
        ]
    );
    assert!(records.is_sorted_by_key(|record| record.time_ns));
    // The trace stays readable after its owner and all writers were dropped.
    drop(trace);
    workers[0].record(Kind::Wake, 0, 0, 5, 0);
    drop((workers, control));
    assert_eq!(read(&scratch.path()).len(), 6);
}

#[test]
fn a_spare_trace_ring_is_allocated_on_first_use() {
    use std::os::unix::fs::MetadataExt;
    let scratch = Scratch::new();
    let trace = TraceFile::create_with_spare(&scratch.path(), 2, 8, 1 << 15).unwrap();
    let space = || std::fs::metadata(scratch.path()).unwrap().blocks() * 512;
    let (ring, before) = (32 << 15, space());
    assert!((3 * ring..4 * ring).contains(&before), "{before}");
    assert_eq!(trace.workers().len(), 2);
    let mut spare = trace.worker(5).unwrap();
    assert!((ring..2 * ring).contains(&(space() - before)));
    spare.record(Kind::Sleep, 0, 0, 0, 0);
    trace.control().unwrap().record(Kind::Reset, 1, 0, 0, 0);
    let seen: Vec<_> = read(&scratch.path()).iter().map(|r| (r.kind, r.worker)).collect();
    assert_eq!(seen, [(Kind::Sleep, Some(5)), (Kind::Reset, None)]);
    // The file contains as many spare rings as fit. Rings of regular threads have priority.
    let trace = TraceFile::create_with_spare(&scratch.path(), 2, 64, 1 << 19).unwrap();
    assert!(trace.workers().len() == 2 && trace.worker(61).is_some() && trace.worker(62).is_none());
}

#[test]
fn a_ring_has_one_owner() {
    let scratch = Scratch::new();
    let trace = TraceFile::create(&scratch.path(), 2, 1).unwrap();
    assert!(trace.worker(1).is_some());
    assert!(trace.worker(1).is_none());
    assert!(trace.worker(2).is_none(), "the last ring is the control plane's");
    assert!(trace.worker(u16::MAX).is_none());
    assert_eq!(trace.workers().len(), 1);
    assert!(trace.control().is_some());
    assert!(trace.control().is_none());
}

#[test]
fn the_oldest_trace_records_are_overwritten() {
    let scratch = Scratch::new();
    let trace = TraceFile::create(&scratch.path(), 1, 1000).unwrap();
    let mut ring = trace.worker(0).unwrap();
    let mut control = trace.control().unwrap();
    control.record(Kind::Reset, 1, 0, 0, 0);
    for value in 0..1023 {
        ring.record(Kind::MmioWrite, 1, 1, value, 0);
    }
    let values = || -> Vec<_> {
        read(&scratch.path()).iter().filter(|r| r.worker.is_some()).map(|r| r.value).collect()
    };
    assert_eq!(values(), (0..1023).collect::<Vec<_>>());
    for value in 1023..5000 {
        ring.record(Kind::MmioWrite, 1, 1, value, 0);
    }
    // The reader omits the oldest of the 1024 records in the ring, because it may be about to be
    // overwritten.
    assert_eq!(values(), (5000 - 1023..5000).collect::<Vec<_>>());
    assert!(read(&scratch.path()).iter().any(|record| record.kind == Kind::Reset));
}

#[test]
fn a_trace_read_during_writes_has_no_torn_record() {
    let scratch = Scratch::new();
    let trace = TraceFile::create(&scratch.path(), 1, 1024).unwrap();
    let mut ring = trace.worker(0).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                // All fields of a record derive from one value, so that a mixed record is detected.
                ring.record(Kind::MmioWrite, value as u16, !value as u16, value, !value);
                value = value.wrapping_add(1);
            }
        });
        for _ in 0..50 {
            let records = read(&scratch.path());
            for r in &records {
                assert_eq!((r.extra, r.controller), (!r.value, r.value as u16));
                assert_eq!(r.qid, !r.value as u16);
            }
            assert!(records.windows(2).all(|pair| pair[0].value < pair[1].value));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_copy_of_a_trace_in_use_has_no_torn_record() {
    let scratch = Scratch::new();
    let trace = TraceFile::in_memory(1, 1, 1024).unwrap();
    let mut ring = trace.worker(0).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                ring.record(Kind::MmioWrite, value as u16, !value as u16, value, !value);
                value = value.wrapping_add(1);
            }
        });
        let mut seen = 0;
        for round in 0..50 {
            let mut copy = Vec::new();
            while copy.len() < trace.len() as usize {
                // The first call returns only the header and the counts, even if `piece` has room
                // for more.
                let mut piece = vec![0; 4096 << (round % 4)];
                let got = trace.copy_at(copy.len() as u64, &mut piece).unwrap();
                copy.extend_from_slice(&piece[..got]);
            }
            assert_eq!(copy.len() as u64, trace.len());
            std::fs::write(scratch.path(), copy).unwrap();
            let records = read(&scratch.path());
            for r in &records {
                assert_eq!((r.extra, r.controller), (!r.value, r.value as u16));
                assert_eq!(r.qid, !r.value as u16);
            }
            assert!(records.windows(2).all(|pair| pair[0].value < pair[1].value));
            seen += records.len();
        }
        stop.store(true, Ordering::Relaxed);
        assert!(seen > 0);
    });
    assert!(trace.copy_at(1, &mut [0; 4096]).is_err());
    assert!(trace.copy_at(0, &mut [0; 100]).is_err());
    let too_large = TraceFile::in_memory(8, 0, 1 << 20).unwrap_err();
    assert_eq!(too_large.kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn lines_for_people() {
    let line = |kind, worker, qid, value, extra| {
        let controller = if worker == Some(7) { 0 } else { 2 };
        Record { time_ns: 12_000_345_678, kind, worker, controller, qid, value, extra }.to_string()
    };
    let cq = COMPLETION_QUEUE | 3;
    for (text, expected) in [
        (
            line(Kind::MmioWrite, Some(0), 3, 17, 0),
            "worker 0    controller 2    SQ 3   MMIO write: 17",
        ),
        (
            line(Kind::MmioWrite, Some(0), cq, 4, 0),
            "worker 0    controller 2    CQ 3   MMIO write: 4",
        ),
        (line(Kind::ShadowNew, Some(0), 3, 18, 17), "SQ 3   shadow doorbell moved: 17 -> 18"),
        (line(Kind::EventIdxMoved, Some(0), 3, 9, 0), "SQ 3   EventIdx moved: 9"),
        (line(Kind::EventIdxArmed, Some(0), 3, 9, 0), "SQ 3   EventIdx armed: 9"),
        (line(Kind::Sleep, Some(7), 0, 0, 0), "worker 7                           sleep"),
        (line(Kind::Wake, Some(7), 0, 55, 0), "wake after 55 us"),
        (line(Kind::SpuriousWake, Some(7), 0, 0, 0), "spurious wake"),
        (
            line(Kind::InterruptRaised, Some(0), 3, 5, 0),
            "CQ 3   interrupt raised: tail 5, vector 0",
        ),
        (line(Kind::InterruptSuppressed, Some(0), cq, 5, 0), "CQ 3   interrupt suppressed: tail 5"),
        (line(Kind::Batch, Some(0), 3, 17, 8), "SQ 3   batch fetched: 8, tail 17"),
        (line(Kind::CqFull, Some(0), 3, 1, 0), "CQ 3   completion queue full: tail 1"),
        (line(Kind::Invalid, Some(0), cq, 99, 0), "CQ 3   invalid doorbell value: 99"),
        (line(Kind::Reset, None, 0, 0, 0), "control     controller 2           controller reset"),
        (line(Kind::ShadowConfigured, None, 0, 0, 0), "shadow doorbells configured"),
        (line(Kind::QueueCreated, None, 3, 64, 1), "SQ 3   queue created: 64 entries, CQ 1"),
        (line(Kind::QueueCreated, None, cq, 64, 1), "CQ 3   queue created: 64 entries, vector 1"),
        (line(Kind::QueueDeleted, None, cq, 0, 0), "CQ 3   queue deleted"),
        (
            line(Kind::CommandSeen, Some(0), 3, 17, 2),
            "worker 0    controller 2    SQ 3   command seen: 17, opcode 0x02",
        ),
        (
            line(Kind::CompletionPosted, Some(0), 3, 0x4_0011, 0x281),
            "CQ 3   completion posted: 17 of SQ 4, status 0x281",
        ),
        (
            line(Kind::DoorbellEvent, Some(0), 0, 0, 0),
            "controller 2           doorbell eventfd signalled",
        ),
    ] {
        assert!(text.starts_with("    12.000345678  "), "{text}");
        assert!(text.ends_with(expected), "{text:?} does not end with {expected:?}");
    }
}

#[test]
fn only_an_older_trace_or_an_empty_file_is_replaced() {
    let scratch = Scratch::new();
    let path = scratch.path();
    let first = TraceFile::create(&path, 1, 1).unwrap();
    let mut ring = first.worker(0).unwrap();
    let second = TraceFile::create(&path, 1, 1).unwrap();
    ring.record(Kind::Sleep, 0, 0, 0, 0);
    assert_eq!(read(&path), [], "the first trace is another file");
    drop(second);

    std::fs::write(&path, b"").unwrap();
    TraceFile::create(&path, 1, 1).unwrap();

    let image = vec![0xeb; 8192];
    std::fs::write(&path, &image).unwrap();
    let refused = |path: &Path| TraceFile::create(path, 1, 1).unwrap_err().kind();
    assert_eq!(refused(&path), ErrorKind::AlreadyExists);
    assert_eq!(std::fs::read(&path).unwrap(), image, "left alone");
    let link = scratch.0.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert_eq!(refused(&link), ErrorKind::AlreadyExists);
    assert_eq!(refused(scratch.0.path()), ErrorKind::AlreadyExists);
    assert_eq!(refused(Path::new("/dev/null")), ErrorKind::AlreadyExists);
    assert_eq!(refused(&path.join("below")), ErrorKind::NotADirectory);
    assert_eq!(refused(&scratch.0.path().join("no/such")), ErrorKind::NotFound);
}

#[test]
fn a_trace_that_is_too_large_is_refused() {
    let scratch = Scratch::new();
    for (workers, records) in [(1, u32::MAX), (1, 1 << 25), (64, 1 << 20), (u16::MAX, 1)] {
        let error = TraceFile::create(&scratch.path(), workers, records).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(!scratch.path().exists());
    }
}

#[test]
fn other_files_are_refused_with_the_reason() {
    let scratch = Scratch::new();
    let path = scratch.path();
    assert!(matches!(error(&path), TraceError::Io(_)), "no such file");
    assert!(matches!(error(scratch.0.path()), TraceError::NotATrace));
    assert!(matches!(error(Path::new("/dev/zero")), TraceError::NotATrace));
    for bytes in [&b""[..], b"SBTRACE\x01", &[0; 64], &[0xff; 100_000]] {
        std::fs::write(&path, bytes).unwrap();
        assert!(matches!(error(&path), TraceError::NotATrace));
    }
    std::fs::remove_file(&path).unwrap();
    drop(TraceFile::create(&path, 1, 1).unwrap());
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let patched = |at: u64, value: u32| {
        let good = std::fs::read(&path).unwrap();
        file.write_all_at(&value.to_le_bytes(), at).unwrap();
        let error = error(&path);
        file.write_all_at(&good, 0).unwrap();
        error
    };
    assert!(matches!(patched(8, 2), TraceError::Version(2)));
    assert!(matches!(patched(12, 24), TraceError::Damaged(_)));
    assert!(matches!(patched(16, 0), TraceError::Damaged(_)));
    assert!(matches!(patched(16, u32::MAX), TraceError::Damaged(_)));
    assert!(matches!(patched(20, 1023), TraceError::Damaged(_)));
    assert!(matches!(patched(20, 1 << 31), TraceError::Damaged(_)));
    assert!(matches!(patched(20, 1 << 20), TraceError::CutOff { .. }));
    assert_eq!(read(&path), []);
    let len = std::fs::metadata(&path).unwrap().len();
    file.set_len(len - 1).unwrap();
    let cut = error(&path);
    assert!(
        matches!(cut, TraceError::CutOff { actual, expected } if (actual, expected) == (len - 1, len))
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For arbitrary rings and counts, the reader terminates and returns only plausible records.
    #[test]
    fn damaged_rings_are_read(
        counts: [u64; 2],
        near in prop::option::of(0..3000_u64),
        patches in prop::collection::vec((0..2048_u64, any::<[u8; 32]>(), any::<bool>()), 0..60),
    ) {
        let scratch = Scratch::new();
        let path = scratch.path();
        drop(TraceFile::create(&path, 1, 1024).unwrap());
        let layout = Layout::new(2, 1024).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        let counts = near.map_or(counts, |near| [near; 2]);
        for (index, count) in (0..).zip(counts) {
            file.write_all_at(&count.to_le_bytes(), Layout::count(index)).unwrap();
        }
        for (slot, mut bytes, plausible) in patches {
            if plausible {
                let sequence = counts[usize::from(slot >= 1024)].saturating_sub(1024);
                let sequence = sequence / 1024 * 1024 + slot % 1024;
                bytes[8..16].copy_from_slice(&sequence.to_le_bytes());
            }
            file.write_all_at(&bytes, layout.records(0) + slot * RECORD_BYTES as u64).unwrap();
        }
        let records = read(&path);
        prop_assert!(records.len() <= 2048);
        prop_assert!(records.iter().all(|record| !record.to_string().is_empty()));
        prop_assert!(records.is_sorted_by_key(|record| record.time_ns));
    }
}
