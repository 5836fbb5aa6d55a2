//! The two things that the protocol needs from the machine: a shared 32-bit cell and a full fence.
//!
//! Everything else in this crate is generic over them, so that the code which ships is, line for
//! line, the code which the loom models explore.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU32, Ordering};

/// A 32-bit cell that the other end may read or write at any moment: a doorbell register, an entry
/// of the Shadow Doorbell buffer or of the EventIdx buffer, or the state of a sleeper.
///
/// Values are in the processor's byte order. An implementation for memory that is shared with a
/// peer converts from and to little-endian, which is what NVMe and PCI use.
pub trait Cell {
    /// Reads the cell, with no order against anything else.
    fn load_relaxed(&self) -> u32;

    /// Reads the cell; what the writer of this value wrote before it is visible after.
    fn load_acquire(&self) -> u32;

    /// Writes the cell; what was written before becomes visible with it.
    fn store_release(&self, value: u32);
}

/// A plain atomic is a cell in shared memory, and is therefore little-endian.
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
        // A model that found its deadlock is unwinding; loom has no thread left to store with.
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

/// A full memory fence: above all, it keeps an earlier store before a later load (StoreLoad), the
/// one order that x86 does not give for nothing and that no acquire or release can express.
///
/// A type parameter and not a function, so that a model can put a broken one in its place and show
/// that the checker notices.
pub trait Fence: 'static {
    /// Passes the fence.
    fn full();
}

/// The fence that ships: sequentially consistent.
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
