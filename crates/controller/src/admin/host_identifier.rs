//! Host Identifier feature. Base 2.1, 5.1.25, "Host Identifier".

/// Dword 11: the identifier has 128 bits.
const EXHID: u32 = 1;

/// Number of bytes that a command for the feature transfers.
pub(crate) fn host_identifier_bytes(cdw11: u32) -> usize {
    if cdw11 & EXHID != 0 { 16 } else { 8 }
}
