//! Machine primitives of the protocol: a shared 32-bit cell and a full memory fence.
//!
//! All other code of this crate is generic over the cell and the fence. So the loom models explore
//! exactly the code that is shipped.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU32, Ordering};

/// Shared 32-bit cell that the peer may read or write at any moment: a doorbell register, an entry
/// of the Shadow Doorbell or the EventIdx buffer, or the state of a sleeper.
///
/// Values are in the CPU's byte order. An implementation for memory that is shared with a peer
/// converts from and to little-endian, the byte order of NVMe and PCI.
pub trait Cell {
    /// Reads the cell without an ordering guarantee.
    fn load_relaxed(&self) -> u32;

    /// Reads the cell with acquire ordering: if the value comes from a
    /// [`store_release`](Self::store_release), this thread also sees everything that the other
    /// thread wrote before that store.
    fn load_acquire(&self) -> u32;

    /// Writes the cell with release ordering: a thread that reads the value by
    /// [`load_acquire`](Self::load_acquire) also sees everything that this thread wrote before.
    fn store_release(&self, value: u32);
}

/// An atomic is a cell in memory that may be shared with a peer, so its value is stored as
/// little-endian.
impl Cell for AtomicU32 {
    #[inline]
    fn load_relaxed(&self) -> u32 {
        u32::from_le(self.load(Ordering::Relaxed))
    }

    #[inline]
    fn load_acquire(&self) -> u32 {
        u32::from_le(self.load(Ordering::Acquire))
    }

    #[inline]
    fn store_release(&self, value: u32) {
        self.store(value.to_le(), Ordering::Release);
    }
}

#[cfg(loom)]
impl Cell for loom::sync::atomic::AtomicU32 {
    fn load_relaxed(&self) -> u32 {
        self.load(Ordering::Relaxed)
    }

    fn load_acquire(&self) -> u32 {
        self.load(Ordering::Acquire)
    }

    fn store_release(&self, value: u32) {
        // After loom has detected a deadlock, it unwinds the threads and can no longer execute
        // stores.
        if !std::thread::panicking() {
            self.store(value, Ordering::Release);
        }
    }
}

macro_rules! cell_by_pointer {
    ($($pointer:ty),*) => {$(
        impl<T: Cell + ?Sized> Cell for $pointer {
            #[inline]
            fn load_relaxed(&self) -> u32 {
                (**self).load_relaxed()
            }

            #[inline]
            fn load_acquire(&self) -> u32 {
                (**self).load_acquire()
            }

            #[inline]
            fn store_release(&self, value: u32) {
                (**self).store_release(value);
            }
        }
    )*};
}

cell_by_pointer!(&T, Arc<T>);

/// Full memory fence. It orders an earlier store before a later load (StoreLoad). This is the only
/// order that x86 does not guarantee, and acquire and release cannot express it.
///
/// The fence is a type parameter, so that a model can replace it by a fence without effect. This
/// proves that the model checker detects a missing fence.
pub trait Fence: 'static {
    /// Executes the fence.
    fn full();
}

/// Sequentially consistent fence, which shipped code uses.
#[derive(Clone, Copy, Debug, Default)]
pub struct FullFence;

impl Fence for FullFence {
    #[inline]
    fn full() {
        #[cfg(not(loom))]
        core::sync::atomic::fence(Ordering::SeqCst);
        #[cfg(loom)]
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}
