//! The feature Host Identifier. Base 2.1, 5.1.25, "Host Identifier".

/// Dword 11: it has 128 bits.
const EXHID: u32 = 1;

/// How many bytes a command for it transfers.
pub(crate) fn host_identifier_bytes(cdw11: u32) -> usize {
    if cdw11 & EXHID != 0 { 16 } else { 8 }
}
