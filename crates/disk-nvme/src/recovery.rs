//! Crash recovery of a disk on an SSD.
//!
//! # Fence
//!
//! Commands of the dead process remain at the SSD. The next process attaches to the controller,
//! which starts with a reset: it clears CC.EN and waits until CSTS.RDY is 0. Then the controller
//! has aborted all commands (NVM Express Base 2.1, 3.7.2), including commands whose data are not
//! transferred yet. For these commands, it accesses neither its storage nor any memory after that.
//! The following ensures that the dead process submits no command after the reset:
//!
//! * Only one process at a time can open a device behind VFIO. When the process dies, the kernel
//!   closes the device: bus mastering is disabled, the function is reset if possible, and its IOMMU
//!   mappings are removed. Until then the next process gets `EBUSY`.
//! * A vfio-user server has one client at a time, and accepts the next client after it has reset
//!   the device of the previous one. Until then, the server does not respond to the next process.
//!
//! The next process shares guest memory with the SSD again.

use serde_json::{Value, json};
use shadowbell_disk::DiskInfo;
use shadowbell_driver::Namespace;

/// Key of an SSD namespace in a checkpoint.
const KEY: &str = "nvme";

pub(crate) fn checkpoint(info: &DiskInfo, namespace: &Namespace) -> Value {
    json!({ KEY: state(info, namespace) })
}

pub(crate) fn is_checkpoint(saved: &Value) -> bool {
    saved.get(KEY).is_some()
}

/// True if this namespace is the stored one: its size and its identifiers are equal.
pub(crate) fn is_same_disk(saved: &Value, info: &DiskInfo, namespace: &Namespace) -> bool {
    saved.get(KEY) == Some(&state(info, namespace))
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
