//! Asymmetric Namespace Access: ANA state of namespaces that several controllers share. Base 2.1,
//! 5.1.12.1 and 8.1.1.

use super::handle::Admin;
use super::log::LogRequest;
use crate::error::CommandError;
use shadowbell_spec::log::{AnaGroupDescriptor, AnaLog, AnaLogHeader, lid};
use zerocopy::FromBytes;

/// Size limit of the ANA log page in bytes. The page has 32 bytes for each group and 4 bytes for
/// each namespace. A larger size from the controller is not trusted.
const LONGEST: usize = 1 << 20;
/// Number of attempts to read the log page, if its content changes while it is read in pieces.
const ATTEMPTS: u32 = 4;

impl Admin {
    /// Asymmetric Namespace Access, log page 0Ch: ANA groups, their namespaces and ANA states.
    /// `None` if the controller does not support ANA. If the change count changes while the page is
    /// read in pieces, the page is read again.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn ana_log(&self) -> Result<Option<AnaLog>, CommandError> {
        let identity = self.identify_controller()?;
        if !identity.cmic.anars() {
            return Ok(None);
        }
        for attempt in 1.. {
            let len = size_of::<AnaLogHeader>();
            let request = LogRequest { rae: true, ..LogRequest::new(lid::ANA, len) };
            let head = self.log_page(request)?;
            let head = AnaLogHeader::read_from_bytes(&head).map_err(|_| self.too_short())?;
            let groups = usize::from(head.nagd) * size_of::<AnaGroupDescriptor>();
            let nsids = usize::try_from(identity.nn).unwrap_or(usize::MAX).saturating_mul(4);
            let len = len.saturating_add(groups).saturating_add(nsids).min(LONGEST);
            let page = self.log_page(LogRequest::new(lid::ANA, len))?;
            // The log page is consistent if its change count is still the one of the first piece.
            let request = LogRequest { rae: true, ..LogRequest::new(lid::ANA, 8) };
            let is_same = self.log_page(request)?.get(..8) == page.get(..8);
            if is_same || attempt == ATTEMPTS {
                return AnaLog::decode(&page).map(Some).ok_or_else(|| self.too_short());
            }
        }
        Ok(None)
    }
}
