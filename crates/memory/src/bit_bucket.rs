//! Bit bucket memory for SGL bit bucket descriptors: a sink for data that the host discards.

use crate::mapping::Mapping;
use crate::shared::SharedBytes;
use std::sync::OnceLock;

/// Length of the memory in bytes. A longer descriptor resolves to several pieces of this memory.
const LEN: u64 = 64 << 10;

/// Returns the bit bucket, or `None` if the memory could not be allocated.
///
/// The memory is only written, never read, so the discarded data of one host is not exposed to
/// another.
pub(crate) fn bucket() -> Option<&'static SharedBytes> {
    static BUCKET: OnceLock<Option<SharedBytes>> = OnceLock::new();
    let make = || Mapping::anonymous(LEN).ok().map(|mapping| mapping.bytes());
    BUCKET.get_or_init(make).as_ref()
}
