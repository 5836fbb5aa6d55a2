//! What the queues of a device share.

use super::config::feature;
use super::inflight::Kept;
use super::memory::{Current, is_poisoned};
use super::request::Rules;
use super::touches::Touches;
use crate::failures::FailureCount;
use crate::local_disk::LocalDisk;
use parking_lot::RwLock;
use shadowbell_block::Geometry;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub(super) struct DeviceShared {
    pub(super) geometry: Geometry,
    /// The device's identifier, as a request for it reads it.
    pub(super) id: Vec<u8>,
    pub(super) memory: RwLock<Option<Current>>,
    pub(super) touches: Touches,
    /// The features that the guest's driver has accepted.
    pub(super) acked: AtomicU64,
    /// Where the queues write down what is in flight.
    pub(super) inflight: Arc<Kept>,
    pub(super) failures: Arc<FailureCount>,
    /// The frontend's, to hang up.
    pub(super) socket: UnixStream,
    /// The frontend has gone, and the threads of the queues are to end.
    pub(super) over: AtomicBool,
    /// The server ends.
    pub(super) ending: Arc<AtomicBool>,
    /// How often the memory or the features have changed.
    pub(super) changes: AtomicU64,
    /// What the queues are served from, if that is possible.
    pub(super) local: Option<LocalDisk>,
}

impl DeviceShared {
    /// An error, which ends a queue's thread, if it is to end. rust-vmm has a descriptor for that,
    /// and does not close it.
    pub(super) fn check_over(&self) -> io::Result<()> {
        if self.is_over() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }

    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// A number that changes when the memory or the features do.
    #[inline]
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    pub(super) fn rules(&self) -> Rules {
        let acked = self.acked.load(Ordering::Relaxed);
        let write_through = self.geometry.volatile_cache && acked & feature::FLUSH == 0;
        Rules { geometry: self.geometry, write_through }
    }

    /// Whether the guest's memory is not there any more: what is in its place is not the guest's.
    /// Then its frontend is hung up on.
    pub(super) fn has_lost_memory(&self) -> bool {
        let lost = self.memory.read().as_ref().is_some_and(is_poisoned)
            || self.inflight.get().is_some_and(|region| region.is_poisoned());
        if lost {
            tracing::error!(
                "memory of the guest is gone (its file was truncated, or there are no huge pages for \
                 it), so its frontend is sent away"
            );
            self.hang_up();
        }
        lost
    }

    /// Sends the frontend away.
    pub(super) fn hang_up(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}
