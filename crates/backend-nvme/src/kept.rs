//! The disk of a process that has died, in the next one.
//!
//! # The fence
//!
//! What the dead process had given to the SSD is the SSD's. The next process attaches anew, which
//! begins with a reset: CC.EN is cleared, and nothing else is done before CSTS.RDY is 0. A
//! controller has given up all commands by then (NVM Express Base 2.1, 3.7.2), those of which the
//! data are not moved yet included: neither its storage nor any memory sees anything of them
//! later. Before that:
//!
//! * *a device behind VFIO* is opened by one process at a time. The kernel closes it with the dead
//!   process: bus mastering is switched off, the function is reset where it can be, and what its
//!   IOMMU has mapped is unmapped. Until then it is busy for the next one;
//! * *a vfio-user server* has one client at a time, and lets in the next one when it has reset the
//!   device of the one before. Until then it does not answer.
//!
//! The guest's memory, which the SSD may have been given, is the next process's to share.

use serde_json::{Value, json};
use shadowbell_backend::DiskInfo;
use shadowbell_driver::Namespace;

/// What says that a disk was kept as one of an SSD.
const KEY: &str = "nvme";

pub(crate) fn keep(info: &DiskInfo, namespace: &Namespace) -> Value {
    json!({ KEY: state(info, namespace) })
}

pub(crate) fn is_kept_by(kept: &Value) -> bool {
    kept.get(KEY).is_some()
}

/// Whether this is the namespace that was kept: as large, and called the same by all the names
/// that it has.
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
