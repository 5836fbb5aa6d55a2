//! Get Log Page command. Base 2.1, 5.1.12.

use super::plane::AdminCommands;
use super::queue::AdminData;
use crate::error::CommandError;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::GetLogPage;
use shadowbell_spec::sqe::NSID_ALL;

/// Part of a log page to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRequest {
    /// Log Page Identifier.
    pub lid: u8,
    /// Namespace identifier, or [`NSID_ALL`] for the controller.
    pub nsid: u32,
    /// Log Specific Parameter.
    pub lsp: u8,
    /// Log Specific Identifier.
    pub lsi: u16,
    /// Retain Asynchronous Event: keeps the event of this page masked.
    pub rae: bool,
    /// Offset in bytes, a multiple of 4.
    pub offset: u64,
    /// Number of bytes; the command rounds up to a multiple of 4.
    pub len: usize,
}

impl LogRequest {
    /// Requests the first `len` bytes of a log page of the controller.
    #[must_use]
    pub const fn new(lid: u8, len: usize) -> Self {
        Self { lid, nsid: NSID_ALL, lsp: 0, lsi: 0, rae: false, offset: 0, len }
    }
}

/// Reads a log page or a part of it, in as many commands as needed. Only the last command clears
/// the asynchronous event of the page; the earlier commands retain the event.
pub(crate) fn read_log_page(
    admin: &dyn AdminCommands,
    request: LogRequest,
) -> Result<Vec<u8>, CommandError> {
    let wanted = request.len.max(1).next_multiple_of(4);
    // The transfer limit is at least 4096 bytes: neither MDTS nor the option can be smaller.
    let max = admin.plane().queue.max_transfer();
    let chunk = usize::try_from(max).unwrap_or(usize::MAX).max(4096);
    let mut out = Vec::with_capacity(wanted.min(1 << 20));
    while out.len() < wanted {
        let now = (wanted - out.len()).min(chunk);
        let fields = GetLogPage {
            lid: request.lid,
            lsp: request.lsp,
            rae: request.rae || out.len() + now < wanted,
            numd0: u32::try_from(now / 4 - 1).unwrap_or(u32::MAX),
            lsi: request.lsi,
            lpo: request.offset + out.len() as u64,
            ..GetLogPage::default()
        };
        let sqe = Sqe::get_log_page(request.nsid, fields, 0);
        out.extend(admin.succeed(sqe, AdminData::FromController(now))?.data);
    }
    out.truncate(request.len);
    Ok(out)
}
