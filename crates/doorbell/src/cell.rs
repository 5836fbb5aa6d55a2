//! Machine primitives of the protocol: a shared 32-bit cell and a full memory fence.
//!
//! All other code of this crate is generic over these two, so the shipped code is, line for line,
//! the code that the loom models explore.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU32, Ordering};

/// Shared 32-bit cell that the peer may read or write at any moment: a doorbell register, an entry
/// of the Shadow Doorbell or the EventIdx buffer, or the state of a sleeper.
///
/// Values are in the CPU's byte order. An implementation for memory that is shared with a peer
/// converts from and to little-endian, the byte order of NVMe and PCI.
pub trait Cell {
    /// Reads the cell without any ordering.
    fn load_relaxed(&self) -> u32;

    /// Reads the cell; earlier writes of the thread that stored the value are visible afterwards.
    fn load_acquire(&self) -> u32;

    /// Writes the cell; earlier writes become visible no later than the value.
    fn store_release(&self, value: u32);
}

/// A plain atomic is a cell in shared memory, so its value is stored as little-endian.
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
        // After a detected deadlock, loom unwinds and has no thread left for the store.
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

/// Full memory fence. It orders an earlier store before a later load (StoreLoad), the one order
/// that x86 does not guarantee and that acquire and release cannot express.
///
/// The fence is a type parameter and not a function, so that a model can replace it with a broken
/// one and show that the model checker detects that.
pub trait Fence: 'static {
    /// Executes the fence.
    fn full();
}

/// Sequentially consistent fence: the one that ships.
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
