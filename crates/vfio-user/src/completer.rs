//! Completion callback of an asynchronous request.

use std::fmt;

use crate::Errno;

/// Completion callback of an asynchronous request. Any thread may complete it, once.
///
/// The reply is sent on completion. Until then, the server handles no other message of this client.
/// If the callback is dropped, it completes with [`Errno::IO`], so every request gets a reply.
#[must_use = "dropping it fails the request with EIO"]
pub struct Completer(Option<Callback>);

type Callback = Box<dyn FnOnce(Result<(), Errno>) + Send>;

impl Completer {
    /// Creates a callback that runs `callback` with the result, on the thread that completes it.
    /// The server creates its callbacks itself; tests and in-process users of a
    /// [`Device`](crate::Device) use this function.
    pub fn new(callback: impl FnOnce(Result<(), Errno>) + Send + 'static) -> Self {
        Self(Some(Box::new(callback)))
    }

    /// Completes the request with `outcome`.
    pub fn complete(mut self, outcome: Result<(), Errno>) {
        if let Some(callback) = self.0.take() {
            callback(outcome);
        }
    }

    /// Completes the request successfully.
    pub fn ok(self) {
        self.complete(Ok(()));
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        if let Some(callback) = self.0.take() {
            callback(Err(Errno::IO));
        }
    }
}

impl fmt::Debug for Completer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Done")
    }
}
