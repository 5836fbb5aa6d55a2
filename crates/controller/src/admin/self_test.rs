//! Device Self-test: tests of controller and namespaces, progress and results. Base 2.1, 5.1.5,
//! 5.1.12.1.7 and 8.1.7.
//!
//! An operation has three segments: memory, health and media. The media segment verifies pieces of
//! each namespace, spread evenly: few short pieces in a short operation, many long pieces in an
//! extended one. The control plane sends one piece at a time to an I/O thread, and pauses between
//! pieces.

use super::EXTENDED_MINUTES;
use crate::saved::{SavedSelfTest, SavedSelfTestRun};
use shadowbell_spec::log::self_test_result as result;
use shadowbell_spec::log::{SelfTestLog, SelfTestResult, ValidDiagnostics, stc};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Time limit of an extended operation. It is below EDSTT, the time after which the host expects a
/// result.
const EXTENDED_TIME: Duration = Duration::from_secs(60 * (EXTENDED_MINUTES as u64 - 2));
/// Time limit of a short operation. According to the specification, it should take at most two
/// minutes.
const SHORT_TIME: Duration = Duration::from_secs(90);

/// Short operation: number of verified pieces per namespace, and bytes per piece.
const SHORT_PIECES: (u64, u64) = (32, 64 << 10);
const EXTENDED_PIECES: (u64, u64) = (8192, 1 << 20);
/// Pause after a piece, as a multiple of the time that the piece took.
const PAUSE_FACTOR: u32 = 3;

/// Numbers of the segments of a self-test operation.
mod segment {
    pub(super) const MEMORY: u8 = 1;
    pub(super) const HEALTH: u8 = 2;
    pub(super) const MEDIA: u8 = 3;
}

/// Namespace to test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Medium {
    pub(crate) nsid: u32,
    pub(crate) blocks: u64,
    pub(crate) block_shift: u32,
}

/// Range of a namespace to verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) nsid: u32,
    /// Offset in bytes.
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// Failure: segment, NSID and block (if known), and status.
type Failure = (u8, Option<(u32, u64)>, Status);

/// Self-test operation in progress.
#[derive(Clone, Debug)]
struct Run {
    code: u8,
    /// NSIDs of the remaining namespaces; the first one is being verified.
    nsids: VecDeque<u32>,
    /// Number of all namespaces.
    count: usize,
    /// Index of the next piece in the namespace that is being verified.
    piece: u64,
    /// First failure of the operation, if any.
    failure: Option<Failure>,
    began: Instant,
    /// Piece that an I/O thread is verifying, and start time.
    in_progress: Option<(Piece, Instant)>,
    next_at: Instant,
}

/// Self-test operation in progress, and earlier results.
#[derive(Debug, Default)]
pub(crate) struct SelfTest {
    run: Option<Run>,
    /// Number of operations so far, which identifies the current one. The result of a piece of an
    /// earlier operation is ignored.
    runs: u32,
    /// Results of earlier operations, newest first.
    results: VecDeque<SelfTestResult>,
}

impl SelfTest {
    /// Executes a Device Self-test command. `media` are the existing namespaces, `warns` is true if
    /// a critical warning is set, and `hours` is the power-on time.
    ///
    /// # Errors
    /// The completion status of the command.
    pub(crate) fn command(
        &mut self,
        code: u8,
        nsid: u32,
        media: &[Medium],
        (warns, hours): (bool, u64),
    ) -> Result<(), Status> {
        match code {
            stc::ABORT => {
                self.finish(result::ABORTED_BY_COMMAND, hours);
                return Ok(());
            }
            stc::SHORT | stc::EXTENDED => {}
            _ => return Err(Status::INVALID_FIELD.with_dnr()),
        }
        let wanted = |medium: &&Medium| nsid == NSID_ALL || nsid == medium.nsid;
        let nsids: VecDeque<u32> = media.iter().filter(wanted).map(|medium| medium.nsid).collect();
        if nsid != 0 && nsid != NSID_ALL && nsids.is_empty() {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if self.run.is_some() {
            return Err(Status::SELF_TEST_IN_PROGRESS);
        }
        let now = Instant::now();
        let failure = if !memory_works() {
            Some((segment::MEMORY, None, Status::INTERNAL))
        } else if warns {
            Some((segment::HEALTH, None, Status::INTERNAL))
        } else {
            None
        };
        self.runs = self.runs.wrapping_add(1);
        self.run = Some(Run {
            code,
            count: nsids.len(),
            nsids,
            piece: 0,
            failure,
            began: now,
            in_progress: None,
            next_at: now,
        });
        Ok(())
    }

    /// Number of the current operation. Results of pieces contain the number of their operation.
    pub(crate) fn run(&self) -> u32 {
        self.runs
    }

    /// True if no I/O thread is verifying a piece.
    pub(crate) fn is_idle(&self) -> bool {
        self.run.as_ref().is_none_or(|run| run.in_progress.is_none())
    }

    /// Time of the next piece; `None` while a piece is being verified or without an operation.
    pub(crate) fn next_at(&self) -> Option<Instant> {
        self.run.as_ref().filter(|run| run.in_progress.is_none()).map(|run| run.next_at)
    }

    /// Starts the next piece, if it is due. Ends the operation if no piece is left.
    pub(crate) fn next(&mut self, media: &[Medium], now: Instant, hours: u64) -> Option<Piece> {
        loop {
            let run = self.run.as_mut()?;
            if run.in_progress.is_some() || now < run.next_at {
                return None;
            }
            let most = if run.code == stc::SHORT { SHORT_TIME } else { EXTENDED_TIME };
            let is_late = now.saturating_duration_since(run.began) >= most;
            let Some(nsid) = run.nsids.front().copied().filter(|_| !is_late) else {
                let failed = run.failure.is_some();
                let outcome = if failed { result::SEGMENT_FAILED } else { result::PASSED };
                self.finish(outcome, hours);
                return None;
            };
            let medium = media.iter().find(|medium| medium.nsid == nsid);
            match medium.and_then(|medium| piece(run.code, medium, run.piece)) {
                Some(piece) => {
                    run.in_progress = Some((piece, now));
                    return Some(piece);
                }
                None => {
                    run.nsids.pop_front();
                    run.piece = 0;
                }
            }
        }
    }

    /// Stores the result of the piece in flight, if it belongs to operation `run`.
    pub(crate) fn verified(&mut self, run: u32, status: Status, shift: u32, now: Instant) {
        if run != self.runs {
            return;
        }
        let Some(run) = &mut self.run else { return };
        let Some((piece, since)) = run.in_progress.take() else { return };
        run.piece += 1;
        run.next_at = now + now.saturating_duration_since(since) * PAUSE_FACTOR;
        // Invalid Field means that the namespace was removed, which is no failure.
        let is_failure = !status.is_success() && status.code() != Status::INVALID_FIELD;
        if is_failure && run.failure.is_none() {
            let at = Some((piece.nsid, piece.offset >> shift));
            run.failure = Some((segment::MEDIA, at, status));
        }
    }

    /// Handles a Controller Level Reset: a short operation is aborted, an extended one continues
    /// after the reset.
    pub(crate) fn reset(&mut self, hours: u64) {
        if self.run.as_ref().is_some_and(|run| run.code == stc::SHORT) {
            self.finish(result::ABORTED_BY_RESET, hours);
        } else if let Some(run) = &mut self.run {
            run.in_progress = None;
        }
    }

    /// Aborts an operation that tests only namespace `nsid`, because the namespace was removed.
    pub(crate) fn namespace_removed(&mut self, nsid: u32, hours: u64) {
        let is_of_it = |run: &Run| run.count == 1 && run.nsids.front() == Some(&nsid);
        if self.run.as_ref().is_some_and(is_of_it) {
            self.finish(result::ABORTED_BY_REMOVAL, hours);
        }
    }

    /// Ends the operation in progress, if any.
    fn finish(&mut self, outcome: u8, hours: u64) {
        let Some(run) = self.run.take() else { return };
        // The operation number changes, so that the result of a piece in flight is ignored.
        self.runs = self.runs.wrapping_add(1);
        let mut ended = SelfTestResult {
            dsts: run.code << 4 | outcome,
            poh: hours.into(),
            ..SelfTestResult::UNUSED
        };
        if let Some((segment, at, status)) =
            run.failure.filter(|_| outcome == result::SEGMENT_FAILED)
        {
            ended.segment = segment;
            if let Some((nsid, lba)) = at {
                (ended.nsid, ended.flba) = (nsid.into(), lba.into());
                (ended.sct, ended.sc) = (status.sct(), status.sc());
                ended.valid = ValidDiagnostics::new()
                    .with_nsid(true)
                    .with_flba(true)
                    .with_sct(true)
                    .with_sc(true);
            }
        }
        self.results.truncate(SelfTestLog::RESULTS - 1);
        self.results.push_front(ended);
    }

    /// Device Self-test log page.
    pub(crate) fn page(&self, media: &[Medium]) -> SelfTestLog {
        let mut page = SelfTestLog {
            operation: stc::NONE,
            completion: 0,
            reserved2: [0; 2],
            results: [SelfTestResult::UNUSED; SelfTestLog::RESULTS],
        };
        for (place, ended) in page.results.iter_mut().zip(&self.results) {
            *place = *ended;
        }
        if let Some(run) = &self.run {
            page.operation = run.code;
            page.completion = run.percent(media);
        }
        page
    }

    pub(crate) fn save(&self) -> SavedSelfTest {
        let now = Instant::now();
        let run = self.run.as_ref().map(|run| SavedSelfTestRun {
            code: run.code,
            nsids: run.nsids.iter().copied().collect(),
            count: run.count,
            piece: run.piece,
            failure: run.failure.map(|(segment, at, status)| (segment, at, status.bits())),
            for_ms: now.saturating_duration_since(run.began).as_millis() as u64,
        });
        let results = self.results.iter().map(|ended| ended.as_bytes().to_vec()).collect();
        SavedSelfTest { run, results }
    }

    pub(crate) fn restore(saved: &SavedSelfTest) -> Self {
        let now = Instant::now();
        let run = saved.run.as_ref().map(|run| Run {
            code: run.code,
            nsids: run.nsids.iter().copied().collect(),
            count: run.count,
            piece: run.piece,
            failure: run
                .failure
                .map(|(segment, at, status)| (segment, at, Status::from_bits(status))),
            began: now.checked_sub(Duration::from_millis(run.for_ms)).unwrap_or(now),
            in_progress: None,
            next_at: now,
        });
        let ended = |bytes: &Vec<u8>| SelfTestResult::read_from_bytes(bytes).ok();
        let results = saved.results.iter().filter_map(ended).take(SelfTestLog::RESULTS).collect();
        Self { run, runs: 0, results }
    }
}

impl Run {
    /// Progress in percent, at most 99 while the operation runs.
    fn percent(&self, media: &[Medium]) -> u8 {
        let pieces = |nsid: &u32| {
            let medium = media.iter().find(|medium| medium.nsid == *nsid);
            medium.map_or(0, |medium| pieces(self.code, medium))
        };
        let left: u64 = self.nsids.iter().map(pieces).sum::<u64>().saturating_sub(self.piece);
        // The sizes of finished namespaces are not stored, so each is counted with the number of
        // pieces of the current namespace.
        let each = self.nsids.front().map_or(0, pieces);
        let done = (self.count - self.nsids.len()) as u64 * each + self.piece;
        (done * 100 / (done + left).max(1)).min(99) as u8
    }
}

/// Number of pieces of a namespace, and bytes per piece.
fn plan(code: u8, medium: &Medium) -> (u64, u64) {
    let (most, len) = if code == stc::SHORT { SHORT_PIECES } else { EXTENDED_PIECES };
    let bytes = medium.blocks << medium.block_shift;
    (bytes.div_ceil(len).min(most), len.min(bytes))
}

fn pieces(code: u8, medium: &Medium) -> u64 {
    plan(code, medium).0
}

/// Piece number `nth` of a namespace, if it exists.
fn piece(code: u8, medium: &Medium, nth: u64) -> Option<Piece> {
    let (count, len) = plan(code, medium);
    if nth >= count {
        return None;
    }
    let last = (medium.blocks << medium.block_shift) - len;
    // The first piece starts at the first block, and the last one ends at the last block.
    let offset = (u128::from(last) * u128::from(nth) / u128::from((count - 1).max(1))) as u64;
    let offset = offset >> medium.block_shift << medium.block_shift;
    Some(Piece { nsid: medium.nsid, offset, len })
}

/// Writes patterns to memory and verifies them.
fn memory_works() -> bool {
    [0x00, 0xff, 0x55, 0xaa].into_iter().all(|pattern: u8| {
        let memory = std::hint::black_box(vec![pattern; 64 << 10]);
        memory.iter().all(|byte| *byte == pattern)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEDIA: [Medium; 2] = [
        Medium { nsid: 1, blocks: 1 << 20, block_shift: 9 },
        Medium { nsid: 4, blocks: 3, block_shift: 12 },
    ];

    /// Verifies all remaining pieces; each ends with the status of `outcome`.
    fn run_all(test: &mut SelfTest, outcome: impl Fn(Piece) -> Status) -> Vec<Piece> {
        let mut all = Vec::new();
        while let Some(at) = test.next_at() {
            let Some(piece) = test.next(&MEDIA, at, 7) else { break };
            assert!(!test.is_idle() && test.next(&MEDIA, at, 7).is_none());
            let run = test.run();
            test.verified(run, outcome(piece), 9, at);
            all.push(piece);
        }
        all
    }

    #[test]
    fn pieces_lie_from_the_first_block_to_the_last() {
        for (code, (most, len)) in [(stc::SHORT, SHORT_PIECES), (stc::EXTENDED, EXTENDED_PIECES)] {
            let all: Vec<Piece> = (0..).map_while(|nth| piece(code, &MEDIA[0], nth)).collect();
            assert_eq!(all.len() as u64, most.min((512 << 20) / len));
            assert!(all.windows(2).all(|pair| pair[0].offset + len <= pair[1].offset));
            let last = all.last().unwrap();
            assert_eq!((all[0].offset, last.offset + last.len), (0, 512 << 20));
            assert!(all.iter().all(|piece| piece.offset % 512 == 0 && piece.len == len));
        }
        let small = piece(stc::SHORT, &MEDIA[1], 0).unwrap();
        assert_eq!((small.offset, small.len), (0, 3 << 12));
        assert_eq!(piece(stc::SHORT, &MEDIA[1], 1), None);
        // In the computation of the piece, the product of offset and index exceeds 64 bits.
        let huge = Medium { nsid: 1, blocks: u64::MAX >> 9, block_shift: 9 };
        assert!(piece(stc::EXTENDED, &huge, 8191).is_some());
    }

    #[test]
    fn self_tests_end_with_their_result() {
        let mut test = SelfTest::default();
        assert_eq!(test.page(&MEDIA).results, [SelfTestResult::UNUSED; 20]);
        test.command(stc::SHORT, NSID_ALL, &MEDIA, (false, 0)).unwrap();
        let again = test.command(stc::EXTENDED, 0, &MEDIA, (false, 0)).unwrap_err();
        assert_eq!(again.code(), Status::SELF_TEST_IN_PROGRESS);
        assert_eq!(test.page(&MEDIA).operation, stc::SHORT);
        assert_eq!(run_all(&mut test, |_| Status::SUCCESS).len(), 33);
        let page = test.page(&MEDIA);
        assert_eq!((page.operation, page.completion), (stc::NONE, 0));
        assert_eq!((page.results[0].dsts, page.results[0].poh.get()), (0x10, 7));
        // A failure is reported, and the remaining pieces are verified as well.
        test.command(stc::EXTENDED, 1, &MEDIA, (false, 0)).unwrap();
        let fails = |piece: Piece| match piece.offset {
            0 => Status::SUCCESS,
            _ => Status::UNRECOVERED_READ,
        };
        assert_eq!(run_all(&mut test, fails).len(), 512);
        let ended = test.page(&MEDIA).results[0];
        assert_eq!((ended.dsts, ended.segment, ended.nsid.get()), (0x27, 3, 1));
        assert_eq!((ended.flba.get(), ended.sct, ended.sc), (2048, 2, 0x81));
        assert_eq!(ended.valid.into_bits(), 0xf);
        // The operation tests only the controller, which has a critical warning.
        test.command(stc::SHORT, 0, &MEDIA, (true, 0)).unwrap();
        assert!(run_all(&mut test, |_| Status::SUCCESS).is_empty());
        let ended = test.page(&MEDIA).results[0];
        assert_eq!((ended.dsts, ended.segment, ended.valid.into_bits()), (0x17, 2, 0));
        for code in [0, 3, stc::VENDOR] {
            assert!(test.command(code, 0, &MEDIA, (false, 0)).is_err());
        }
        assert!(test.command(stc::SHORT, 2, &MEDIA, (false, 0)).is_err());
        (0..30).for_each(|_| {
            test.command(stc::SHORT, 0, &MEDIA, (false, 0)).unwrap();
            run_all(&mut test, |_| Status::SUCCESS);
        });
        assert!(test.page(&MEDIA).results.iter().all(|ended| ended.dsts == 0x10));
    }

    #[test]
    fn a_reset_aborts_a_short_self_test_and_resumes_an_extended_one() {
        let mut test = SelfTest::default();
        test.command(stc::SHORT, 1, &MEDIA, (false, 0)).unwrap();
        test.reset(1);
        assert_eq!(test.page(&MEDIA).results[0].dsts, 0x12);
        test.command(stc::EXTENDED, 1, &MEDIA, (false, 0)).unwrap();
        let run = test.run();
        for _ in 0..100 {
            let at = test.next_at().unwrap();
            test.next(&MEDIA, at, 0).unwrap();
            test.verified(run, Status::SUCCESS, 9, at);
        }
        let at = test.next_at().unwrap();
        let piece = test.next(&MEDIA, at, 0);
        test.reset(1);
        assert_eq!((test.page(&MEDIA).operation, test.page(&MEDIA).completion), (2, 19));
        // A piece in flight is verified again, also by the next process after a crash recovery.
        let mut test = SelfTest::restore(&test.save());
        assert_eq!(test.next(&MEDIA, test.next_at().unwrap(), 0), piece);
        test.command(stc::ABORT, 0, &MEDIA, (false, 5)).unwrap();
        let page = test.page(&MEDIA);
        assert_eq!((page.results[0].dsts, page.results[1].dsts), (0x21, 0x12));
        assert!(test.is_idle() && test.next_at().is_none());
        // Abort without an operation in progress has no effect.
        test.command(stc::ABORT, 0, &MEDIA, (false, 5)).unwrap();
        assert_eq!(test.page(&MEDIA), page);
        test.command(stc::EXTENDED, 4, &MEDIA, (false, 0)).unwrap();
        test.namespace_removed(1, 0);
        assert!(test.next_at().is_some());
        test.namespace_removed(4, 0);
        assert_eq!(test.page(&MEDIA).results[0].dsts, 0x23);
    }

    #[test]
    fn an_operation_ends_in_time() {
        let mut test = SelfTest::default();
        test.command(stc::EXTENDED, 1, &MEDIA, (false, 0)).unwrap();
        // The argument is a time after the time limit, so the test does not have to wait.
        let late = Instant::now() + EXTENDED_TIME + Duration::from_secs(1);
        assert_eq!(test.next(&MEDIA, late, 0), None);
        assert_eq!(test.page(&MEDIA).results[0].dsts, 0x20);
    }
}
