//! Namespaces that are made, formatted and sanitized by a controller that can do that.

use super::data::AdminData;
use super::handle::Admin;
use super::log::LogRequest;
use crate::error::CommandError;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{FormatNvm, NamespaceAttachment, NamespaceManagement, Sanitize};
use shadowbell_spec::identify::{ControllerList, Flbas, NamespaceToCreate};
use shadowbell_spec::log::{SanitizeLog, lid};
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// How long a controller may take that erases what a namespace holds.
const ERASE: Duration = Duration::from_secs(600);

impl Admin {
    /// Namespace Management (Create): a namespace of so many logical blocks, in the LBA format of
    /// this index, attached to nobody. Its NSID. Base 2.1, 5.1.21.
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

    /// Namespace Management (Delete): the namespace is gone, with what it holds, or all of them are
    /// (FFFFFFFFh). Base 2.1, 5.1.21.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn delete_namespace(&self, nsid: u32) -> Result<(), CommandError> {
        let fields = NamespaceManagement { sel: NamespaceManagement::DELETE, csi: 0 };
        self.erase(Sqe::namespace_management(nsid, fields, 0))
    }

    /// Namespace Attachment: these controllers have the namespace from here on, or, unless it is to
    /// be `attached`, have it no more. Base 2.1, 5.1.20.
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

    /// Format NVM: nothing is left of what the namespace holds, or of all of them (FFFFFFFFh). Base
    /// 2.1, 5.1.10.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn format(&self, nsid: u32, fields: FormatNvm) -> Result<(), CommandError> {
        self.erase(Sqe::format_nvm(nsid, fields, 0))
    }

    /// Sanitize: begins an operation, or leaves a failed one. Base 2.1, 5.1.22.
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

    /// A command that may take its time.
    fn erase(&self, sqe: Sqe) -> Result<(), CommandError> {
        self.commands().succeed_in(sqe, AdminData::None, ERASE).map(drop)
    }
}
