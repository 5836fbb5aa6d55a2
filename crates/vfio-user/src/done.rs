//! Completion callback of an asynchronous request.

use std::fmt;

use crate::Errno;

/// Completion callback of an asynchronous request. Can be completed on any thread, once.
///
/// The reply is sent on completion; until then no other message of this client is handled.
/// Dropping the callback completes it with [`Errno::IO`], so no request remains without a reply.
#[must_use = "dropping it fails the request with EIO"]
pub struct Done(Option<Then>);

type Then = Box<dyn FnOnce(Result<(), Errno>) + Send>;

impl Done {
    /// Creates a callback that runs `then` with the result on the completing thread. The server
    /// creates callbacks itself; tests and in-process users of a [`Device`](crate::Device) create
    /// their own.
    pub fn new(then: impl FnOnce(Result<(), Errno>) + Send + 'static) -> Self {
        Self(Some(Box::new(then)))
    }

    /// Completes the request with `outcome`.
    pub fn complete(mut self, outcome: Result<(), Errno>) {
        if let Some(then) = self.0.take() {
            then(outcome);
        }
    }

    /// Completes the request successfully.
    pub fn ok(self) {
        self.complete(Ok(()));
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then(Err(Errno::IO));
        }
    }
}

impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Done")
    }
}
