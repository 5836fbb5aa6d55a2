//! Where data go that a host does not want: the bit bucket of its SGLs.

use crate::mapping::Mapping;
use crate::shared::SharedBytes;
use std::sync::OnceLock;

/// Bytes of it. A long descriptor is so many pieces of the same memory.
const LEN: u64 = 64 << 10;

/// Memory that is written by whoever has something to throw away, and read by nobody: what one host
/// does not want is not shown to another one. Nothing, if the system has none.
pub(crate) fn bucket() -> Option<&'static SharedBytes> {
    static BUCKET: OnceLock<Option<SharedBytes>> = OnceLock::new();
    let make = || Mapping::anonymous(LEN).ok().map(|mapping| mapping.bytes());
    BUCKET.get_or_init(make).as_ref()
}
