//! The end of something that takes time.

use std::fmt;

use crate::Errno;

/// Says that something which took time is over. Usable from any thread, once.
///
/// The reply to the request goes out then, and the next message of that client is looked at then
/// and not before. Dropping it without a word counts as [`Errno::IO`]: a request is never left
/// without an answer.
#[must_use = "dropping it fails the request with EIO"]
pub struct Done(Option<Then>);

type Then = Box<dyn FnOnce(Result<(), Errno>) + Send>;

impl Done {
    /// A handle that runs `then` with the outcome, on the thread that completes it. The server
    /// makes these; a test or an in-process user of a [`Device`](crate::Device) makes its own.
    pub fn new(then: impl FnOnce(Result<(), Errno>) + Send + 'static) -> Self {
        Self(Some(Box::new(then)))
    }

    /// It is over, with this outcome.
    pub fn complete(mut self, outcome: Result<(), Errno>) {
        if let Some(then) = self.0.take() {
            then(outcome);
        }
    }

    /// It is over, and all went well.
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
