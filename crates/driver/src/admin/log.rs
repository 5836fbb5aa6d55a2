//! Get Log Page. Base 2.1, 5.1.12.

use super::{Admin, AdminData};
use crate::error::CommandError;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::GetLogPage;
use shadowbell_spec::log::{ErrorLogEntry, SmartHealth, lid};
use shadowbell_spec::sqe::NSID_ALL;
use zerocopy::FromBytes;

/// What to read of a log page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRequest {
    /// Log Page Identifier.
    pub lid: u8,
    /// The namespace, or [`NSID_ALL`] for the controller.
    pub nsid: u32,
    /// Log Specific Parameter.
    pub lsp: u8,
    /// Log Specific Identifier.
    pub lsi: u16,
    /// Retain Asynchronous Event: leave the event that points here masked.
    pub rae: bool,
    /// Where to begin, in bytes, a multiple of 4.
    pub offset: u64,
    /// How many bytes, rounded up to a multiple of 4.
    pub len: usize,
}

impl LogRequest {
    /// The first `len` bytes of a log page of the controller.
    #[must_use]
    pub const fn new(lid: u8, len: usize) -> Self {
        Self { lid, nsid: NSID_ALL, lsp: 0, lsi: 0, rae: false, offset: 0, len }
    }
}

impl Admin {
    /// Reads (part of) a log page, in as many commands as it takes. Those but the last retain the
    /// asynchronous event, so that it is cleared with the last.
    ///
    /// # Errors
    /// [`CommandError`]; a page that is longer than a command moves needs a controller with
    /// extended data (LPA).
    pub fn log_page(&self, request: LogRequest) -> Result<Vec<u8>, CommandError> {
        let wanted = request.len.max(1).next_multiple_of(4);
        // A command may move less than the controller's pages: 4096 bytes always are in it.
        let chunk = usize::try_from(self.max_transfer_bytes()).unwrap_or(usize::MAX).max(4096);
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
            out.extend(self.succeed(sqe, AdminData::FromController(now))?.data);
        }
        out.truncate(request.len);
        Ok(out)
    }

    /// SMART / Health Information, log page 02h.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn smart_log(&self) -> Result<SmartHealth, CommandError> {
        let request = LogRequest::new(lid::SMART_HEALTH, size_of::<SmartHealth>());
        let data = self.log_page(request)?;
        SmartHealth::read_from_bytes(&data).map_err(|_| CommandError::Nonsense {
            device: self.device_name().to_owned(),
            command: "Get Log Page".into(),
            what: "its data are too short".into(),
        })
    }

    /// The `count` newest entries of the Error Information log page, 01h, at most as many as there
    /// were errors and as the controller keeps.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn error_log(&self, count: u16) -> Result<Vec<ErrorLogEntry>, CommandError> {
        let kept = self.shared.late.get().map_or(0, |late| u16::from(late.identity.elpe));
        let count = usize::from(count.min(kept.saturating_add(1)));
        if count == 0 {
            return Ok(Vec::new());
        }
        let size = size_of::<ErrorLogEntry>();
        let data = self.log_page(LogRequest::new(lid::ERROR_INFORMATION, count * size))?;
        let entries =
            data.chunks_exact(size).filter_map(|e| ErrorLogEntry::read_from_bytes(e).ok());
        Ok(entries.take_while(|entry| entry.error_count != 0).collect())
    }
}
