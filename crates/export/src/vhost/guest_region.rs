//! Guest memory region that keeps a guarded mapping alive.

use ::shadowbell_memory::Mapping;
use std::sync::Arc;
use vhost_user_backend::bitmap::BitmapReplace;
use vm_memory::bitmap::{Bitmap, WithBitmapSlice};
use vm_memory::mmap::NewBitmap;

/// Stand-in for the dirty bitmap that rust-vmm stores with a region. Migration is not offered, so
/// this type records no dirty pages. It keeps the guarded mapping of the region alive.
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
