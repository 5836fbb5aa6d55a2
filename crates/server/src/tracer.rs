//! Doorbell trace of a server: into the file of `--trace`, or into memory by `ctl trace on`.

use super::path_broker;
use anyhow::anyhow;
use parking_lot::Mutex;
use shadowbell_config::server_config::TRACE_RECORDS;
use shadowbell_controller::trace::TraceFile;
use shadowbell_controller::{CLAIMABLE, Pool};
use shadowbell_process::exit::bad_input;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Controls the doorbell trace and the latency measurement.
pub(super) struct Tracer {
    pool: Pool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    on: bool,
    /// The current or the last trace.
    recording: Option<Recording>,
}

struct Recording {
    file: Arc<TraceFile>,
    records: u32,
    in_memory: bool,
}

/// State of the trace.
pub(super) struct TraceStatus {
    pub(super) on: bool,
    /// Number of records per I/O thread and size in bytes of the current or last trace.
    pub(super) recording: Option<(u32, u64)>,
}

impl Tracer {
    pub(super) fn new(pool: Pool) -> Self {
        Self { pool, state: Mutex::default() }
    }

    /// Starts a trace into a new file at `path`. If this process `is_next` after another one, the
    /// previous process's file is not overwritten.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(super) fn start_in(&self, path: &Path, records: u32, is_next: bool) -> anyhow::Result<()> {
        let make = || path_broker::new_trace(path, is_next);
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

    /// Starts a trace in memory, and drops the previous trace. Returns false if a trace is on.
    ///
    /// # Errors
    /// The memory cannot be allocated.
    pub(super) fn start(&self, records: Option<u32>) -> io::Result<bool> {
        let mut state = self.state.lock();
        if state.on {
            return Ok(false);
        }
        // The last trace is freed before the new one is allocated.
        state.recording = None;
        let records = records.unwrap_or(TRACE_RECORDS);
        let file = TraceFile::in_memory(self.workers(), CLAIMABLE as u16, records)?;
        self.pool.trace(&file);
        *state = State { on: true, recording: Some(Recording { file, records, in_memory: true }) };
        Ok(true)
    }

    /// Stops the trace and keeps its records. Returns false if no trace is on.
    pub(super) fn stop(&self) -> bool {
        let mut state = self.state.lock();
        if state.on {
            self.pool.end_trace();
        }
        std::mem::take(&mut state.on)
    }

    /// Turns latency measurement on or off. Returns false if it has that state already.
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
        let recording =
            state.recording.as_ref().map(|recording| (recording.records, recording.file.len()));
        TraceStatus { on: state.on, recording }
    }

    /// File of the current or the last trace.
    pub(super) fn file(&self) -> Option<Arc<TraceFile>> {
        self.state.lock().recording.as_ref().map(|recording| Arc::clone(&recording.file))
    }

    /// Number of records per I/O thread of a running in-memory trace. The next process starts a
    /// trace with the same number.
    pub(super) fn in_memory(&self) -> Option<u32> {
        let state = self.state.lock();
        let recording =
            state.recording.as_ref().filter(|recording| state.on && recording.in_memory);
        recording.map(|recording| recording.records)
    }

    fn begin(&self, file: Arc<TraceFile>, records: u32, in_memory: bool) {
        self.pool.trace(&file);
        *self.state.lock() =
            State { on: true, recording: Some(Recording { file, records, in_memory }) };
    }

    fn workers(&self) -> u16 {
        u16::try_from(self.pool.len()).unwrap_or(u16::MAX)
    }
}
