//! Asynchronous log output: a bounded queue of lines and the thread that writes them.
//!
//! The reader of the log may block: a stopped terminal, or a pipe that is not read. Threads that
//! serve guests must not wait for a blocked reader. So lines are queued in memory, and one thread
//! writes them. If the queue is full, lines are dropped and counted. The count is logged as soon as
//! the queue has room.
//!
//! The thread also limits the rate. A guest can cause log lines at any rate, so the number of bytes
//! written per second is limited. Lines beyond the limit stay in the queue, and are dropped when it
//! is full.
//!
//! `tracing-appender` has no rate limit, bounds the number of lines instead of their bytes, and
//! does not log the number of dropped lines.

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;
use std::thread::{ThreadId, current};
use std::time::{Duration, Instant};

/// Size of the queue and rate limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Size of the queue in bytes.
    pub(crate) waiting: usize,
    /// Rate limit. With `None`, lines are written as fast as the reader takes them.
    pub(crate) rate_limit: Option<RateLimit>,
}

/// Rate limit (token bucket): at most `burst` plus `per_second` bytes in a second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateLimit {
    pub(crate) per_second: usize,
    pub(crate) burst: usize,
}

/// Memory overhead of a line in bytes.
const OVERHEAD: usize = 64;
/// Maximum number of bytes per write. A longer line is written as a whole.
const BATCH: usize = 4096;

/// Handle of the log thread; clones share it.
#[derive(Clone)]
pub(crate) struct LogThread {
    shared: Arc<Shared>,
    rate_limit: Option<RateLimit>,
}

struct Shared {
    /// Thread that created the log. Its lines may use a reserve of the queue, because guests cannot
    /// cause them.
    starter: ThreadId,
    lines: Mutex<Lines>,
    /// Wakes the log thread when a line was added, or when the log ends.
    line_added: Condvar,
    /// Wakes [`LogThread::finish`] when all lines are written.
    written: Condvar,
}

struct Lines {
    waiting: VecDeque<Vec<u8>>,
    bytes: usize,
    limit: usize,
    dropped: u64,
    /// True while the log thread is writing lines that it has taken.
    writing: bool,
    /// True while a thread waits in `finish`. The rate limit is then suspended.
    is_unlimited: bool,
}

impl Lines {
    fn push(&mut self, line: Vec<u8>) {
        self.bytes += line.len() + OVERHEAD;
        self.waiting.push_back(line);
    }

    /// Queues a line if there is room. Otherwise counts it as dropped. After a drop, half of the
    /// queue must become free before lines are queued again; otherwise lines with counts could fill
    /// the log.
    fn try_push(&mut self, line: &[u8], reserve: bool) -> bool {
        let room = match (reserve, self.dropped) {
            (true, _) => self.limit * 2,
            (false, 0) => self.limit,
            (false, _) => self.limit / 2,
        };
        if self.bytes + line.len() + OVERHEAD > room {
            self.dropped = self.dropped.saturating_add(1);
            return false;
        }
        self.push_count();
        self.push(line.to_vec());
        true
    }

    /// If lines were dropped, queues a line with their number.
    fn push_count(&mut self) {
        let dropped = std::mem::take(&mut self.dropped);
        if dropped != 0 {
            let s = if dropped == 1 { "" } else { "s" };
            self.push(
                format!(
                    "warning: {dropped} line{s} dropped: the log exceeds its rate limit, or is not \
                     read\n"
                )
                .into_bytes(),
            );
        }
    }

    /// Takes the next lines: up to `allowed` bytes, but at least one line.
    fn take(&mut self, allowed: usize) -> Vec<u8> {
        let mut batch = Vec::new();
        while let Some(line) = self.waiting.front() {
            if !batch.is_empty() && batch.len() + line.len() > allowed.min(BATCH) {
                break;
            }
            self.bytes -= line.len() + OVERHEAD;
            batch.extend(self.waiting.pop_front().unwrap_or_default());
        }
        batch
    }
}

impl LogThread {
    /// Creates a log. It only queues lines until its thread is [started](Self::start).
    pub(crate) fn new(limits: Limits) -> Self {
        let lines = Lines {
            waiting: VecDeque::new(),
            bytes: 0,
            limit: limits.waiting,
            dropped: 0,
            writing: false,
            is_unlimited: false,
        };
        let shared = Arc::new(Shared {
            starter: current().id(),
            lines: Mutex::new(lines),
            line_added: Condvar::new(),
            written: Condvar::new(),
        });
        Self { shared, rate_limit: limits.rate_limit }
    }

    /// Starts the thread, which writes to `sink`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(&self, sink: impl Write + Send + 'static) -> io::Result<()> {
        let thread = std::thread::Builder::new().name("sb-log".into());
        let (ours, rate_limit) = (Arc::clone(&self.shared), self.rate_limit);
        thread.spawn(move || ours.write_all(sink, rate_limit))?;
        Ok(())
    }

    /// Queues a line, or counts it as dropped. Never waits for the reader of the log. Lines of the
    /// thread that created the log may fill the queue to twice its size, so its messages about the
    /// end of the program are not lost.
    pub(crate) fn line(&self, line: &[u8]) {
        let reserve = current().id() == self.shared.starter;
        if self.shared.lines.lock().try_push(line, reserve) {
            self.shared.line_added.notify_one();
        }
    }

    /// Queues a line even if the queue is full. Only for the last few lines of the program.
    pub(crate) fn final_message(&self, line: &[u8]) {
        let mut lines = self.shared.lines.lock();
        lines.push_count();
        lines.push(line.to_vec());
        drop(lines);
        self.shared.line_added.notify_one();
    }

    /// Waits until all queued lines are written, but at most for `timeout`. Returns false on
    /// timeout.
    pub(crate) fn finish(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut lines = self.shared.lines.lock();
        lines.is_unlimited = true;
        self.shared.line_added.notify_one();
        let mut is_late = false;
        while !is_late && (lines.writing || !lines.waiting.is_empty() || lines.dropped != 0) {
            is_late = self.shared.written.wait_until(&mut lines, until).timed_out();
        }
        // The process continues if this was for an exec that fails.
        lines.is_unlimited = false;
        !is_late
    }
}

/// Queues the output of a formatter. Each call of `write` has to contain one whole line.
impl Write for LogThread {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.line(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    /// Main loop of the log thread. Never returns.
    fn write_all(&self, mut sink: impl Write, rate_limit: Option<RateLimit>) {
        let mut allowance = rate_limit.map(Allowance::new);
        let mut lines = self.lines.lock();
        loop {
            if lines.waiting.is_empty() {
                lines.push_count();
            }
            let Some(next) = lines.waiting.front().map(Vec::len) else {
                lines.writing = false;
                self.written.notify_all();
                self.line_added.wait(&mut lines);
                continue;
            };
            let mut allowed = BATCH;
            if let Some(allowance) = allowance.as_mut().filter(|_| !lines.is_unlimited) {
                match allowance.of(next, Instant::now()) {
                    Ok(bytes) => allowed = bytes,
                    Err(until) => {
                        self.line_added.wait_until(&mut lines, until);
                        continue;
                    }
                }
            }
            let batch = lines.take(allowed);
            lines.writing = true;
            drop(lines);
            // Errors are ignored, because there is no other place to report them.
            let _ = sink.write_all(&batch).and_then(|()| sink.flush());
            if let Some(allowance) = &mut allowance {
                allowance.spend(batch.len());
            }
            lines = self.lines.lock();
        }
    }
}

/// Token bucket: bytes that may be written now.
struct Allowance {
    rate_limit: RateLimit,
    bytes: f64,
    since: Instant,
}

impl Allowance {
    fn new(rate_limit: RateLimit) -> Self {
        Self { rate_limit, bytes: rate_limit.burst as f64, since: Instant::now() }
    }

    /// Returns the number of bytes that may be written now. If the number is smaller than
    /// `requested`, the length of the next line, returns the time at which the line may be written.
    /// A line longer than the burst uses a whole burst, and its excess is charged to the following
    /// lines.
    fn of(&mut self, requested: usize, now: Instant) -> Result<usize, Instant> {
        let passed = now.saturating_duration_since(self.since);
        self.since = now;
        let (rate, burst) = (self.rate_limit.per_second as f64, self.rate_limit.burst as f64);
        self.bytes = (self.bytes + passed.as_secs_f64() * rate).min(burst);
        let requested = (requested as f64).min(burst);
        if self.bytes >= requested {
            return Ok(self.bytes as usize);
        }
        // The wait is 10 ms at least, so that not every line causes a wake-up.
        let missing = (requested - self.bytes).max(rate / 100.0);
        Err(now + Duration::from_secs_f64(missing / rate))
    }

    fn spend(&mut self, bytes: usize) {
        self.bytes -= bytes as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_testing::wait::LIMIT;
    use std::io::{BufRead, BufReader, Read};

    fn free(waiting: usize) -> Limits {
        Limits { waiting, rate_limit: None }
    }

    #[test]
    fn a_stalled_reader_blocks_no_thread_and_drops_are_counted() {
        let (reader, writer) = io::pipe().unwrap();
        let log = LogThread::new(free(256 * 1024));
        log.start(writer).unwrap();
        // These lines are much longer than the pipe and the queue together. If a line waited for
        // the reader, the test would hang.
        let line = [b'x'; 1023];
        let lines = 4096;
        for _ in 0..lines {
            log.line(&[line.as_slice(), b"\n"].concat());
        }
        // The pipe is full, so nothing is written in this time.
        assert!(!log.finish(Duration::from_millis(10)), "the pipe was read");
        log.final_message(b"the end\n");
        let mut read = 0;
        let mut missing = 0;
        for text in BufReader::new(reader).lines().map(Result::unwrap) {
            if text == "the end" {
                break;
            }
            match text.strip_prefix("warning: ") {
                Some(count) => {
                    missing += count.split(' ').next().unwrap().parse::<u64>().unwrap();
                }
                None => read += 1,
            }
        }
        assert!(missing > 3000, "{missing}");
        assert_eq!(read + missing, lines, "each line is written or counted");
        assert!(log.finish(LIMIT));
    }

    #[test]
    fn the_drop_count_is_in_place_of_the_dropped_lines() {
        let (reader, writer) = io::pipe().unwrap();
        let log = LogThread::new(free(1000));
        log.start(writer).unwrap();
        // The log thread cannot take lines while the lock is held.
        let mut lines = log.shared.lines.lock();
        assert!(lines.try_push(&[b'a'; 500], false));
        assert!(!lines.try_push(&[b'b'; 500], false));
        assert!(!lines.try_push(b"b", false), "a half-full queue accepts no line after a drop");
        assert!(lines.try_push(b"c", true), "the starter's reserve has room");
        drop(lines);
        assert!(log.finish(LIMIT));
        drop(log);
        let mut text = [0; 600];
        let mut reader = reader;
        let len = reader.read(&mut text).unwrap();
        let text = String::from_utf8_lossy(&text[500..len]).into_owned();
        assert!(text.starts_with("warning: 2 lines dropped"), "{text}");
    }

    #[test]
    fn the_rate_limit_holds_in_every_second() {
        let mut allowance = Allowance::new(RateLimit { per_second: 1000, burst: 500 });
        let mut now = allowance.since;
        let end = now + Duration::from_secs(10);
        let mut spent = 0;
        while now < end {
            match allowance.of(100, now) {
                Ok(bytes) => {
                    assert!(bytes >= 100);
                    allowance.spend(100);
                    spent += 100;
                }
                Err(until) => {
                    assert!(until > now);
                    now = until;
                }
            }
        }
        assert!((9_900..=10_500).contains(&spent), "{spent}");
        // A line longer than the burst is written, and its full length counts.
        let later = end + Duration::from_secs(1);
        assert!(allowance.of(5000, later).is_ok());
        allowance.spend(5000);
        let until = allowance.of(1, later).unwrap_err();
        // The next line has to wait for the time that the long line has cost.
        assert!(until - later > Duration::from_secs(4));
    }

    #[test]
    fn finish_suspends_the_rate_limit() {
        let (reader, writer) = io::pipe().unwrap();
        let rate_limit = RateLimit { per_second: 1, burst: 10 };
        let log = LogThread::new(Limits { waiting: 4096, rate_limit: Some(rate_limit) });
        log.start(writer).unwrap();
        for _ in 0..20 {
            log.line(b"0123456789\n");
        }
        assert!(log.finish(LIMIT));
        let mut text = [0; 220];
        let mut reader = reader;
        reader.read_exact(&mut text).unwrap();
    }
}
