//! Recovery of disks after the death of a server process.
//!
//! Each disk type has its own fence: proof that I/O of the dead process can no longer reach the
//! disk or a guest's memory. `docs/internals/crash-recovery.md` describes all of them.

use crate::disk_kinds::{DiskKind, Recovery};
use crate::disk_open;
use serde_json::Value;
use shadowbell_config::disk_spec::{self, DiskSpecError};
use shadowbell_disk::{Disk, Wait};
use shadowbell_state::Descriptors;
use std::sync::Arc;

/// Recovers the disk of a dead process from its checkpoint. `spec` is the specification by which
/// the dead process opened the disk. Calls `wait` repeatedly while I/O of the dead process may be
/// in flight. With `has_quiesced`, no I/O is in flight: the process ended for an upgrade.
///
/// # Errors
/// [`DiskSpecError`].
pub fn recover(
    spec: &str,
    state: &Value,
    fds: &mut Descriptors,
    has_quiesced: bool,
    wait: Wait<'_>,
) -> Result<Arc<dyn Disk>, DiskSpecError> {
    let (spec, layers) = disk_spec::split(spec)?;
    let recovery = Recovery { state, fds, has_quiesced, wait };
    let disk = (DiskKind::of_state(state).recover)(&spec, recovery)?;
    disk_open::wrap_disk(&spec, (&layers, true), disk)
}

/// Opens the disk of a dead process that cannot be [recovered](recover), without its fence. `state`
/// is its checkpoint. If the disk has lost writes, flushes fail as before.
///
/// # Errors
/// [`DiskSpecError`].
pub fn reopen(spec: &str, state: &Value) -> Result<Arc<dyn Disk>, DiskSpecError> {
    let (below, layers) = disk_spec::split(spec)?;
    match DiskKind::of_state(state).reopen {
        None => disk_open::open_recoverable(spec),
        Some(reopen) => disk_open::wrap_disk(&below, (&layers, true), reopen(&below, state)?),
    }
}

/// True for the checkpoint of an image that has no exclusive lock as its fence. The image can be
/// recovered only after all I/O of the dead process has ended, including I/O of other disks.
#[must_use]
pub fn needs_process_fence(state: &Value) -> bool {
    let Value::Object(fields) = state else { return false };
    // The state of a layer contains that of the disk below.
    fields.get("locked") == Some(&Value::Bool(false)) || fields.values().any(needs_process_fence)
}

/// True if the disk of a dead process cannot be recovered, not even later: it is another disk, or
/// it has no fence.
#[must_use]
pub fn is_final(error: &DiskSpecError) -> bool {
    use shadowbell_disk::OpenError::NotThatDisk;
    matches!(
        error,
        DiskSpecError::Disk(NotThatDisk { .. }) | DiskSpecError::Kind { is_final: true, .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_a_disk_without_an_exclusive_lock_needs_the_fence_of_the_process() {
        for (state, expected) in [
            (json!({ "image": 0, "locked": true }), false),
            (json!({ "image": 0, "locked": false }), true),
            (json!({ "qcow2": { "files": [0], "locked": false } }), true),
            (json!({ "qcow2": { "files": [0], "locked": true } }), false),
            (json!({ "nbd": { "blocks": 1 } }), false),
            (json!("null"), false),
        ] {
            assert_eq!(needs_process_fence(&state), expected, "{state}");
        }
    }

    #[test]
    fn a_checkpoint_says_if_the_lock_of_the_image_is_its_fence() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        for (options, needs) in [("", false), ("?read-only=on", true)] {
            let disk =
                disk_open::open_recoverable(&format!("{}{options}", path.display())).unwrap();
            let state = disk.checkpoint(&mut Descriptors::default()).unwrap();
            assert_eq!(needs_process_fence(&state), needs, "{options}: {state}");
        }
    }
}
