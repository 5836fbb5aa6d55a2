//! Namespace Management and Attachment, Format NVM, Sanitize.

use super::handle::Admin;
use super::log::LogRequest;
use super::queue::AdminData;
use crate::error::CommandError;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{FormatNvm, NamespaceAttachment, NamespaceManagement, Sanitize};
use shadowbell_spec::identify::{ControllerList, Flbas, NamespaceToCreate};
use shadowbell_spec::log::{SanitizeLog, lid};
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// Timeout of commands that erase namespaces.
const ERASE: Duration = Duration::from_secs(600);

impl Admin {
    /// Namespace Management (Create): creates a namespace of `blocks` logical blocks with LBA
    /// format index `format`, attached to no controller. Returns its NSID. Base 2.1, 5.1.21.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn create_namespace(&self, blocks: u64, format: u8) -> Result<u32, CommandError> {
        let flbas = Flbas::new().with_low(format & 0xf).with_high(format >> 4 & 0b11);
        let wanted =
            NamespaceToCreate { nsze: blocks, ncap: blocks, flbas, ..NamespaceToCreate::default() };
        let fields = NamespaceManagement { sel: NamespaceManagement::CREATE, csi: 0 };
        let sqe = Sqe::namespace_management(0, fields, 0);
        let data = AdminData::ToController(wanted.as_bytes());
        Ok(self.commands().succeed(sqe, data)?.dw0)
    }

    /// Namespace Management (Delete): deletes a namespace and its data, or all namespaces
    /// (FFFFFFFFh). Base 2.1, 5.1.21.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn delete_namespace(&self, nsid: u32) -> Result<(), CommandError> {
        let fields = NamespaceManagement { sel: NamespaceManagement::DELETE, csi: 0 };
        self.erase(Sqe::namespace_management(nsid, fields, 0))
    }

    /// Namespace Attachment: attaches a namespace to the controllers `cntlids`, or detaches it if
    /// `attached` is false. Base 2.1, 5.1.20.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn attach_namespace(
        &self,
        nsid: u32,
        cntlids: &[u16],
        attached: bool,
    ) -> Result<(), CommandError> {
        let (attach, detach) = (NamespaceAttachment::ATTACH, NamespaceAttachment::DETACH);
        let fields = NamespaceAttachment { sel: if attached { attach } else { detach } };
        let list = ControllerList::from(0, cntlids.iter().copied());
        let sqe = Sqe::namespace_attachment(nsid, fields, 0);
        self.commands().succeed(sqe, AdminData::ToController(list.as_bytes())).map(drop)
    }

    /// Format NVM: erases a namespace, or all namespaces (FFFFFFFFh). Base 2.1, 5.1.10.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn format(&self, nsid: u32, fields: FormatNvm) -> Result<(), CommandError> {
        self.erase(Sqe::format_nvm(nsid, fields, 0))
    }

    /// Sanitize: starts an operation, or exits failure mode. Base 2.1, 5.1.22.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn sanitize(&self, fields: Sanitize) -> Result<(), CommandError> {
        self.erase(Sqe::sanitize(fields, 0))
    }

    /// Sanitize Status, log page 81h.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn sanitize_log(&self) -> Result<SanitizeLog, CommandError> {
        let len = size_of::<SanitizeLog>();
        let data = self.log_page(LogRequest::new(lid::SANITIZE_STATUS, len))?;
        SanitizeLog::read_from_bytes(&data).map_err(|_| self.too_short())
    }

    /// Executes a command that may take long, with the timeout `ERASE`.
    fn erase(&self, sqe: Sqe) -> Result<(), CommandError> {
        self.commands().succeed_in(sqe, AdminData::None, ERASE).map(drop)
    }
}
