//! Doorbell trace requests: on, off, and download.

use super::state::ServerState;
use crate::tracer::TraceStatus;
use hyper::body::{Body, Bytes, Frame, SizeHint};
use shadowbell_control_api::api::{Code, Problem, Trace, TraceChange};
use shadowbell_controller::trace::TraceFile;
use shadowbell_process::exit;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{self, Poll};
use tracing::info;

/// Maximum size of a frame of the response body, in bytes.
const PIECE: usize = 256 << 10;
/// Permitted numbers of records per I/O thread, as for `serve --trace-records`.
const RECORDS: std::ops::RangeInclusive<u32> = 1024..=1 << 24;

/// State of the doorbell trace
#[utoipa::path(get, path = "/v1/trace", operation_id = "trace", tag = "server",
    responses((status = 200, description = "The state", body = Trace)))]
pub(super) fn trace(state: &ServerState) -> Trace {
    let TraceStatus { on, recording } = state.tracer.status();
    Trace {
        on,
        records: recording.map(|(records, _)| records),
        bytes: recording.map(|(_, bytes)| bytes),
    }
}

/// Turn the doorbell trace on or off
///
/// The trace is recorded in memory. A running trace continues unchanged, also that of `serve
/// --trace`. A stopped trace is kept until another one is started.
#[utoipa::path(put, path = "/v1/trace", operation_id = "set_trace", tag = "server",
    request_body = TraceChange,
    responses(
        (status = 200, description = "The new state", body = Trace),
        (status = 400, description = "Invalid number of records", body = Problem)
    ))]
pub(super) fn set_trace(state: &ServerState, wanted: &TraceChange) -> Result<Trace, Problem> {
    if !wanted.on {
        if state.tracer.stop() {
            info!("doorbell trace off");
        }
        return Ok(trace(state));
    }
    let wrong = |why: String| Problem::new(Code::BadRequest, why);
    if wanted.records.is_some_and(|records| !RECORDS.contains(&records)) {
        let (fewest, most) = RECORDS.into_inner();
        return Err(wrong(format!("`records` is {fewest} to {most}")));
    }
    match state.tracer.start(wanted.records) {
        Ok(true) => info!("doorbell trace on"),
        Ok(false) => {}
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            return Err(wrong(error.to_string()));
        }
        Err(error) => return Err(Problem::new(Code::Failed, exit::line(&error.into()))),
    }
    Ok(trace(state))
}

/// Download the doorbell trace
///
/// A file for `shadowbell trace`, of the running or of the last trace.
#[utoipa::path(get, path = "/v1/trace/records", operation_id = "trace_records", tag = "server",
    responses(
        (status = 200, description = "The file", body = Vec<u8>,
            content_type = "application/octet-stream"),
        (status = 404, description = "There is no trace", body = Problem)
    ))]
pub(super) fn trace_records(state: &ServerState) -> Result<TraceBody, Problem> {
    let file = state.tracer.file().ok_or_else(|| {
        let why = "there is no doorbell trace; `shadowbell ctl trace on` starts one";
        Problem::new(Code::NotFound, why)
    })?;
    Ok(TraceBody { file, at: 0 })
}

/// Streamed body with a trace. A trace may be too large for a second copy in memory.
#[derive(Debug)]
pub(super) struct TraceBody {
    file: Arc<TraceFile>,
    at: u64,
}

impl Body for TraceBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut task::Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.is_end_stream() {
            return Poll::Ready(None);
        }
        // The file is in memory or in the page cache, so the read does not block for long.
        let mut piece = vec![0; PIECE];
        let got = self.file.copy_at(self.at, &mut piece).and_then(|got| match got {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            got => Ok(got),
        });
        Poll::Ready(Some(got.map(|got| {
            self.at += got as u64;
            piece.truncate(got);
            Frame::data(piece.into())
        })))
    }

    fn is_end_stream(&self) -> bool {
        self.at >= self.file.len()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.file.len().saturating_sub(self.at))
    }
}
