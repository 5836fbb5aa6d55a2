//! Future of one request to the disk, with retries.

use crate::engine::{Begun, Data, Ended, Engine};
use crate::error::BlockError;
use crate::locks::RangeGuard;
use shadowbell_disk::{DiskError, Request};
use shadowbell_spec::Status;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Maximum number of retries of a request that failed with a transient error.
const RETRIES: u8 = 3;

/// True if a retry may succeed after a request failed with this NVMe status. The device must not
/// have set Do Not Retry, and the status must not mean that the command itself is invalid (Base
/// 2.1, 4.2.3).
fn may_succeed(status: Status) -> bool {
    const PATH: u8 = 3;
    // If the ANA state makes the namespace inaccessible through this controller, a retry fails as
    // well. Only another controller may succeed.
    let is_no_way = matches!(status.code(), Status::ANA_INACCESSIBLE | Status::ANA_PERSISTENT_LOSS);
    !status.dnr()
        && !is_no_way
        && (status.sct() == PATH
            || matches!(
                status.code(),
                Status::DATA_XFER_ERROR
                    | Status::INTERNAL
                    | Status::COMMAND_INTERRUPTED
                    | Status::TRANSIENT_TRANSPORT_ERROR
                    | Status::NAMESPACE_NOT_READY
                    | Status::INSUFFICIENT_RESOURCES
                    | Status::WRITE_FAULT
                    | Status::UNRECOVERED_READ
            ))
}

fn is_transient(error: DiskError) -> bool {
    matches!(error, DiskError::Device(status) if may_succeed(Status::from_bits(status)))
}

enum State {
    Unsubmitted(Data, Option<Arc<RangeGuard>>),
    InFlight(u32),
    /// The result was already available after the submission.
    Early(Result<Data, BlockError>),
    Over,
}

/// A request with its data and with the lock of the range that it writes.
///
/// After a transient failure of a device, the request is submitted again immediately. Because the
/// range remains locked, a second execution of a write has the same effect as one execution.
///
/// If the future is dropped while the disk has the request, the disk still executes the request.
/// When the disk has completed it, the range is unlocked and the buffer returns to its pool.
#[must_use = "nothing is submitted until the future is polled"]
pub(crate) struct InFlight<'a> {
    engine: &'a Engine,
    request: Request,
    retries: u8,
    state: State,
}

impl<'a> InFlight<'a> {
    pub(crate) fn new(
        engine: &'a Engine,
        request: Request,
        data: Data,
        guard: Option<Arc<RangeGuard>>,
    ) -> Self {
        Self { engine, request, retries: RETRIES, state: State::Unsubmitted(data, guard) }
    }

    /// Submits the request without waiting for its completion.
    pub(crate) async fn submit(&mut self) {
        poll_fn(|context| {
            if let Poll::Ready(outcome) = Pin::new(&mut *self).poll(context) {
                self.state = State::Early(outcome);
            }
            Poll::Ready(())
        })
        .await;
    }
}

impl Future for InFlight<'_> {
    type Output = Result<Data, BlockError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            let ended = match std::mem::replace(&mut this.state, State::Over) {
                State::Early(outcome) => return Poll::Ready(outcome),
                State::Over => return Poll::Ready(Err(BlockError::Buffer)),
                State::Unsubmitted(data, guard) => {
                    match this.engine.submit(&this.request, data, guard, context.waker()) {
                        Begun::Done(ended) => ended,
                        Begun::Slot(tag) => {
                            this.state = State::InFlight(tag);
                            return Poll::Pending;
                        }
                    }
                }
                State::InFlight(tag) => match this.engine.poll(tag, context.waker()) {
                    Some(ended) => ended,
                    None => {
                        this.state = State::InFlight(tag);
                        return Poll::Pending;
                    }
                },
            };
            match ended {
                Ended { outcome: Ok(()), data: Some(data), .. } => return Poll::Ready(Ok(data)),
                Ended { outcome: Err(error), data: Some(data), guard }
                    if this.retries > 0 && is_transient(error) =>
                {
                    this.retries -= 1;
                    this.state = State::Unsubmitted(data, guard);
                }
                Ended { outcome: Err(error), data: Some(_), .. } => {
                    return Poll::Ready(Err(BlockError::Disk(error)));
                }
                Ended { data: None, .. } => return Poll::Ready(Err(BlockError::TimedOut)),
            }
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if let State::InFlight(tag) = self.state {
            self.engine.abandon(tag);
        }
    }
}
