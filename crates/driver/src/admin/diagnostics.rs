//! Diagnostics: self-test, telemetry, persistent event log.

use super::handle::Admin;
use super::log::LogRequest;
use super::queue::AdminData;
use crate::error::CommandError;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::DeviceSelfTest;
use shadowbell_spec::log::persistent_event::{PersistentEventLog, action};
use shadowbell_spec::log::{SelfTestLog, TELEMETRY_BLOCK, TelemetryHeader, lid};
use zerocopy::FromBytes;

/// Largest size of a log page in bytes. A larger size from the controller is not trusted.
const MAX_BYTES: usize = 64 << 20;

/// Telemetry log page to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Telemetry {
    /// Host-initiated telemetry: the controller captures new data for this read.
    New,
    /// Host-initiated telemetry: the data of an earlier capture.
    Previous,
    /// Controller-initiated telemetry. The read clears the asynchronous event of the page.
    OfController,
}

impl Admin {
    /// Device Self-test with a self-test code of [`stc`](shadowbell_spec::log::stc). `nsid` selects
    /// the tested namespace: 0 for none (only the controller is tested), FFFFFFFFh for all. Base
    /// 2.1, 5.1.5.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn device_self_test(&self, nsid: u32, code: u8) -> Result<(), CommandError> {
        let sqe = DeviceSelfTest { stc: code }.encode(Sqe::new(0x14, 0, nsid));
        self.run(sqe)
    }

    /// Device Self-test, log page 06h.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn self_test_log(&self) -> Result<SelfTestLog, CommandError> {
        let data = self.log_page(LogRequest::new(lid::SELF_TEST, size_of::<SelfTestLog>()))?;
        SelfTestLog::read_from_bytes(&data).map_err(|_| self.too_short())
    }

    /// Telemetry, log page 07h or 08h: the header and all blocks up to the end of data area `area`,
    /// 1 to 3.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn telemetry(&self, which: Telemetry, area: u8) -> Result<Vec<u8>, CommandError> {
        let lid = match which {
            Telemetry::New | Telemetry::Previous => lid::TELEMETRY_HOST,
            Telemetry::OfController => lid::TELEMETRY_CONTROLLER,
        };
        let request = |offset, len| LogRequest { offset, ..LogRequest::new(lid, len) };
        let first = LogRequest {
            lsp: u8::from(which == Telemetry::New),
            rae: true,
            ..request(0, TELEMETRY_BLOCK)
        };
        let mut page = self.log_page(first)?;
        let header = TelemetryHeader::read_from_bytes(&page).map_err(|_| self.too_short())?;
        let last = header.last_blocks[usize::from(area.clamp(1, 3)) - 1].get();
        let bytes = usize::from(last) * TELEMETRY_BLOCK;
        if bytes == 0 {
            // The header is read again without Retain Asynchronous Event, so that the read clears
            // the event.
            return self.log_page(request(0, TELEMETRY_BLOCK));
        }
        page.extend(self.log_page(request(TELEMETRY_BLOCK as u64, bytes))?);
        Ok(page)
    }

    /// Persistent Event, log page 0Dh: the whole page, read in a reporting context that this method
    /// establishes and releases. If a context exists already, this method uses and releases it.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn persistent_events(&self) -> Result<Vec<u8>, CommandError> {
        let request = |lsp, len| LogRequest { lsp, ..LogRequest::new(lid::PERSISTENT_EVENTS, len) };
        let size = size_of::<PersistentEventLog>();
        let head = self.log_page(request(action::ESTABLISH_AND_HEADER, size))?;
        let head = PersistentEventLog::read_from_bytes(&head).map_err(|_| self.too_short())?;
        let len = usize::try_from(head.tll.get()).unwrap_or(usize::MAX).clamp(size, MAX_BYTES);
        let page = self.log_page(request(action::READ, len));
        self.log_page(request(action::RELEASE, 4))?;
        page
    }

    fn run(&self, sqe: Sqe) -> Result<(), CommandError> {
        self.commands().succeed(sqe, AdminData::None).map(drop)
    }

    pub(super) fn too_short(&self) -> CommandError {
        CommandError::invalid_data(self.name(), "Get Log Page", "its data are too short")
    }
}
