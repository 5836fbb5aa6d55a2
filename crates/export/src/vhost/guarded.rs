//! A region of the guest's memory that holds a mapping of ours.

use ::shadowbell_memory::Mapping;
use std::sync::Arc;
use vhost_user_backend::bitmap::BitmapReplace;
use vm_memory::bitmap::{Bitmap, WithBitmapSlice};
use vm_memory::mmap::NewBitmap;

/// What rust-vmm keeps with a region for the sake of migration, which is not offered. It holds the
/// mapping of a region of ours.
#[derive(Clone, Debug, Default)]
pub(super) struct Guarded(Option<Arc<Mapping>>);

impl Guarded {
    pub(super) fn new(mapping: Arc<Mapping>) -> Self {
        Self(Some(mapping))
    }

    pub(super) fn mapping(&self) -> Option<&Arc<Mapping>> {
        self.0.as_ref()
    }
}

impl WithBitmapSlice<'_> for Guarded {
    type S = ();
}

impl Bitmap for Guarded {
    fn mark_dirty(&self, _: usize, _: usize) {}

    fn dirty_at(&self, _: usize) -> bool {
        false
    }

    fn slice_at(&self, _: usize) {}
}

impl NewBitmap for Guarded {
    fn with_len(_: usize) -> Self {
        Self::default()
    }
}

impl BitmapReplace for Guarded {
    type InnerBitmap = ();

    fn replace(&self, (): ()) {}
}
