//! The trace of a server: into the file of `--trace`, or into memory when `ctl` asks for it.

use super::places;
use super::server_config::TRACE_RECORDS;
use crate::exit::bad_input;
use anyhow::anyhow;
use parking_lot::Mutex;
use shadowbell_controller::trace::TraceFile;
use shadowbell_controller::{CLAIMABLE, Pool};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// What is recorded of a server, or was.
pub(super) struct Tracer {
    pool: Pool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    on: bool,
    /// What was recorded last, or is being recorded.
    kept: Option<Kept>,
}

struct Kept {
    file: Arc<TraceFile>,
    records: u32,
    in_memory: bool,
}

/// How it is with the trace.
pub(super) struct TraceStatus {
    pub(super) on: bool,
    /// Of the trace that there is: the records of each worker, and its length in bytes.
    pub(super) kept: Option<(u32, u64)>,
}

impl Tracer {
    pub(super) fn new(pool: Pool) -> Self {
        Self { pool, state: Mutex::default() }
    }

    /// Records in a new file at `path`. If this `is_next`, the trace of the process before is kept
    /// beside it.
    ///
    /// # Errors
    /// The file can not be made.
    pub(super) fn start_in(&self, path: &Path, records: u32, is_next: bool) -> anyhow::Result<()> {
        let make = || places::new_trace(path, is_next);
        let file = TraceFile::create_in(make, self.workers(), CLAIMABLE as u16, records);
        let file = file.map_err(|error| {
            let known =
                matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::InvalidInput);
            let error = anyhow!(error).context(format!("--trace {}", path.display()));
            if known { bad_input(error) } else { error }
        })?;
        self.begin(file, records, false);
        Ok(())
    }

    /// Records in memory, if nothing is recorded yet; what was recorded before is given up. `false`:
    /// it is on already.
    ///
    /// # Errors
    /// There is not so much memory for it.
    pub(super) fn start(&self, records: Option<u32>) -> io::Result<bool> {
        let mut state = self.state.lock();
        if state.on {
            return Ok(false);
        }
        // Before there is another one.
        state.kept = None;
        let records = records.unwrap_or(TRACE_RECORDS);
        let file = TraceFile::in_memory(self.workers(), CLAIMABLE as u16, records)?;
        self.pool.trace(&file);
        *state = State { on: true, kept: Some(Kept { file, records, in_memory: true }) };
        Ok(true)
    }

    /// Records nothing more, and keeps what was recorded. `false`: it is off already.
    pub(super) fn stop(&self) -> bool {
        let mut state = self.state.lock();
        if state.on {
            self.pool.end_trace();
        }
        std::mem::take(&mut state.on)
    }

    /// Measures commands from here on, or does so no more. `false`: it is so already.
    pub(super) fn measure(&self, on: bool) -> bool {
        let changes = self.pool.measures() != on;
        self.pool.measure(on);
        changes
    }

    pub(super) fn measures(&self) -> bool {
        self.pool.measures()
    }

    pub(super) fn status(&self) -> TraceStatus {
        let state = self.state.lock();
        let kept = state.kept.as_ref().map(|kept| (kept.records, kept.file.len()));
        TraceStatus { on: state.on, kept }
    }

    /// What was recorded last, or is being recorded.
    pub(super) fn file(&self) -> Option<Arc<TraceFile>> {
        self.state.lock().kept.as_ref().map(|kept| Arc::clone(&kept.file))
    }

    /// How much of each worker is being recorded in memory: another process begins so.
    pub(super) fn in_memory(&self) -> Option<u32> {
        let state = self.state.lock();
        let kept = state.kept.as_ref().filter(|kept| state.on && kept.in_memory);
        kept.map(|kept| kept.records)
    }

    fn begin(&self, file: Arc<TraceFile>, records: u32, in_memory: bool) {
        self.pool.trace(&file);
        *self.state.lock() = State { on: true, kept: Some(Kept { file, records, in_memory }) };
    }

    fn workers(&self) -> u16 {
        u16::try_from(self.pool.len()).unwrap_or(u16::MAX)
    }
}
