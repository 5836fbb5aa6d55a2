//! Crash recovery of an NBD disk.
//!
//! # No fence
//!
//! Requests that the dead process has sent remain at the server. NBD can neither cancel them nor
//! wait for them: a server may execute a received write long after the end of its connection, and a
//! flush on a new connection does not cover it. (`qemu-nbd` and `nbdkit` finish the requests that
//! they have received. A server that retried hung writes for seconds was seen to overwrite a newer
//! write: github.com/ydb-platform/nbs, issue 7070.) So the operator has to configure
//! `settle=SECONDS`: the maximum time for which this server and its storage may still execute a
//! received request. After a crash, nothing is sent to the server for that time. Without the
//! option, the disk cannot be recovered after a crash. The same time applies in a running process
//! after the loss of a connection with writes in flight.
//!
//! No delay is needed for a read-only disk, because late replies to reads change nothing, or after
//! an upgrade, because the process had received all replies when it quiesced.
//!
//! # Durability
//!
//! The dead process stored its unflushed writes for a replay; the next process does not have them.
//! Therefore the next process first sends a flush. After this flush, no replay is needed. If the
//! server restarts between the crash and this flush, it may lose writes that it had answered but
//! not flushed. The disk does not detect this loss.

use crate::error::OpenError;
use crate::uri::NbdSpec;
use serde::{Deserialize, Serialize};
use shadowbell_disk::{DiskInfo, Wait, WaitReason};
use shadowbell_state::{WrongOrder, is_wrong};
use std::time::{Duration, Instant};

/// Key of an NBD disk in a checkpoint.
pub(crate) const KEY: &str = "nbd";
/// Reason why a disk without `settle` cannot be recovered after a crash.
pub(crate) const NO_SETTLE_TIME: &str = "an NBD server may still execute writes of the dead process; \
                                    add `settle=SECONDS`, or serve it read-only (`read-only=on`)";
/// Delay between two attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Serialize, Deserialize)]
pub(crate) struct SavedExport {
    pub(crate) block_size: u32,
    pub(crate) blocks: u64,
    pub(crate) read_only: bool,
    volatile_cache: bool,
    discard: bool,
    granularity: u32,
    pub(crate) has_lost_writes: bool,
}

impl SavedExport {
    pub(crate) fn new(info: &DiskInfo, has_lost_writes: bool) -> Self {
        Self {
            block_size: info.block_size,
            blocks: info.blocks,
            read_only: info.read_only,
            volatile_cache: info.volatile_cache,
            discard: info.discard,
            granularity: info.granularity,
            has_lost_writes,
        }
    }

    /// Returns the disk properties that the guest has seen, or an error if the disk `now` cannot
    /// provide them.
    pub(crate) fn with_previous_properties(
        &self,
        now: &DiskInfo,
    ) -> Result<DiskInfo, &'static str> {
        if now.read_only && !self.read_only {
            return Err("it is no longer writable");
        }
        if now.block_size != self.block_size || now.blocks < self.blocks {
            return Err("it is smaller than it was");
        }
        if self.volatile_cache && !now.volatile_cache {
            return Err("its server no longer supports flushes");
        }
        if self.discard && !now.discard {
            return Err("its server no longer supports write zeroes");
        }
        let mut info = now.clone();
        info.blocks = self.blocks;
        (info.read_only, info.granularity) = (self.read_only, self.granularity);
        (info.volatile_cache, info.discard) = (self.volatile_cache, self.discard);
        Ok(info)
    }
}

/// Waits until the server can no longer execute a request of the dead process.
///
/// # Errors
/// `wait` has given up.
pub(crate) fn wait_for_server(
    spec: &NbdSpec,
    saved: &SavedExport,
    wait: Wait<'_>,
) -> Result<(), OpenError> {
    if saved.read_only || is_wrong(WrongOrder::NoFence) {
        return Ok(());
    }
    let Some(time) = spec.settle else { return Err(refused(spec, NO_SETTLE_TIME.to_owned())) };
    sleep(spec, time, wait, WaitReason::InFlight)
}

/// Repeats `open` until the server is reachable, and returns the result.
pub(crate) fn reach<T>(
    spec: &NbdSpec,
    wait: Wait<'_>,
    open: impl Fn() -> Result<T, OpenError>,
) -> Result<T, OpenError> {
    loop {
        match open() {
            Err(error @ OpenError::Connect { .. }) => {
                let why = error.to_string();
                sleep(spec, RETRY_INTERVAL, wait, WaitReason::Unavailable(&why))?;
            }
            outcome => return outcome,
        }
    }
}

fn sleep(
    spec: &NbdSpec,
    time: Duration,
    wait: Wait<'_>,
    reason: WaitReason<'_>,
) -> Result<(), OpenError> {
    let since = Instant::now();
    while since.elapsed() < time {
        if !wait(reason) {
            return Err(refused(spec, "the wait was given up".to_owned()));
        }
    }
    Ok(())
}

/// Creates the error for a disk that cannot be recovered.
pub(crate) fn refused(spec: &NbdSpec, why: String) -> OpenError {
    OpenError::NotThatDisk { disk: spec.to_string(), why }
}
