//! Crash recovery of a disk on an SSD.
//!
//! # Fence
//!
//! Commands of the dead process remain at the SSD. The next process attaches anew, which starts
//! with a reset: CC.EN is cleared, and nothing else is done before CSTS.RDY is 0. By then a
//! controller has aborted all commands (NVM Express Base 2.1, 3.7.2), including those whose data
//! are not transferred yet, so neither its storage nor any memory is accessed for them later.
//! Before that:
//!
//! * A device behind VFIO is opened by one process at a time. The kernel closes it with the dead
//!   process: bus mastering is disabled, the function is reset if possible, and its IOMMU mappings
//!   are removed. Until then the next process gets `EBUSY`.
//! * A vfio-user server has one client at a time, and accepts the next one after it has reset the
//!   device of the previous one. Until then it does not respond.
//!
//! Guest memory that was shared with the SSD is shared anew by the next process.

use serde_json::{Value, json};
use shadowbell_disk::DiskInfo;
use shadowbell_driver::Namespace;

/// Key of an SSD namespace in a checkpoint.
const KEY: &str = "nvme";

pub(crate) fn keep(info: &DiskInfo, namespace: &Namespace) -> Value {
    json!({ KEY: state(info, namespace) })
}

pub(crate) fn is_kept_by(kept: &Value) -> bool {
    kept.get(KEY).is_some()
}

/// True if this is the stored namespace: same size and identifiers.
pub(crate) fn is_that(kept: &Value, info: &DiskInfo, namespace: &Namespace) -> bool {
    kept.get(KEY) == Some(&state(info, namespace))
}

fn state(info: &DiskInfo, namespace: &Namespace) -> Value {
    let identity = namespace.identity();
    json!({
        "block_size": info.block_size,
        "blocks": info.blocks,
        "read_only": info.read_only,
        "nguid": identity.nguid,
        "eui64": identity.eui64,
        "uuid": namespace.uuid(),
    })
}
