//! Identity of an eventfd, independent of its descriptor number: descriptor numbers are reused.

use std::sync::{Arc, Weak};

/// Identity of an eventfd that is unique in the lifetime of this process.
#[derive(Debug)]
pub(crate) struct Id(Arc<()>);

/// Weak reference to the identity of an eventfd that may have been dropped.
#[derive(Debug)]
pub(super) struct WeakId(Weak<()>);

impl Id {
    /// Creates a unique identity.
    pub(crate) fn new() -> Self {
        Self(Arc::new(()))
    }

    pub(super) fn downgrade(&self) -> WeakId {
        WeakId(Arc::downgrade(&self.0))
    }
}

impl WeakId {
    /// True if `id` is the same identity. The weak reference prevents a reuse of the address that
    /// is compared.
    pub(super) fn is(&self, id: &Id) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&id.0))
    }

    pub(super) fn is_dropped(&self) -> bool {
        self.0.strong_count() == 0
    }
}
