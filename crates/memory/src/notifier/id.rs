//! What an eventfd is told from others by: its descriptor may be given away again.

use std::sync::{Arc, Weak};

/// Which eventfd it is, in all of this process's life.
#[derive(Debug)]
pub(crate) struct Id(Arc<()>);

/// Of an eventfd that may be gone.
#[derive(Debug)]
pub(super) struct Known(Weak<()>);

impl Id {
    /// Another one than all that there are.
    pub(crate) fn new() -> Self {
        Self(Arc::new(()))
    }

    pub(super) fn known(&self) -> Known {
        Known(Arc::downgrade(&self.0))
    }
}

impl Known {
    /// No other one has its address while this is there.
    pub(super) fn is(&self, id: &Id) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&id.0))
    }

    pub(super) fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}
