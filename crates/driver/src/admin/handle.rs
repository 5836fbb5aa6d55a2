//! Public handle for the admin commands of an attached controller.

use super::identify;
use super::lba_status::{self, AllocatedBlocks};
use super::log::{LogRequest, read_log_page};
use super::plane::AdminCommands;
use super::queue::{AdminData, AdminResult};
use crate::attached_controller::AttachedController;
use crate::device::Registers;
use crate::error::CommandError;
use crate::queue::QueueStats;
use crate::transport::TransportError;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{Abort, GetFeatures, Identify, SetFeatures};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::feature::Select;
use shadowbell_spec::identify::{IdentifyController, IdentifyNamespace, NamespaceIds};
use shadowbell_spec::log::{
    AnaGroupDescriptor, AnaLog, AnaLogHeader, ErrorLogEntry, SmartHealth, lid,
};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::FromBytes;

/// A handle for admin commands, usable on any thread. Every command has a deadline:
/// [`Timeouts::admin`](crate::Timeouts::admin), unless the method takes one.
#[derive(Clone)]
pub struct Admin {
    controller: Arc<AttachedController>,
}

impl Admin {
    pub(crate) fn new(controller: Arc<AttachedController>) -> Self {
        Self { controller }
    }

    pub(super) fn commands(&self) -> &dyn AdminCommands {
        &*self.controller
    }

    pub(super) fn name(&self) -> &str {
        self.controller.name()
    }

    /// Reads the registers CC and CSTS, and returns them with CAP and VS.
    ///
    /// # Errors
    /// [`TransportError`], if the device is unreachable.
    pub fn registers(&self) -> Result<Registers, TransportError> {
        self.controller.plane().device.registers()
    }

    /// Statistics of the admin queue.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.controller.plane().queue.stats()
    }

    /// The maximum number of data bytes of one admin command.
    #[must_use]
    pub fn max_transfer_bytes(&self) -> u64 {
        self.controller.plane().queue.max_transfer()
    }

    /// Executes any admin command. The driver sets its data pointer and command identifier.
    ///
    /// The controller transfers as many bytes as the dwords of the command describe, whatever the
    /// length of `data`. If the dwords describe more bytes than `data` has, the controller accesses
    /// memory beyond the shared buffer.
    ///
    /// # Errors
    /// [`CommandError`], if no completion arrives within `limit`. A completion with an error status
    /// is `Ok`.
    pub fn execute(
        &self,
        sqe: Sqe,
        data: AdminData<'_>,
        limit: Duration,
    ) -> Result<AdminResult, CommandError> {
        self.controller.execute(sqe, data, limit)
    }

    /// Identify with any CNS: returns the 4096 bytes of the data structure.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn identify(&self, nsid: u32, fields: Identify) -> Result<Vec<u8>, CommandError> {
        identify::identify(&*self.controller, nsid, fields)
    }

    /// Identify Controller, CNS 01h.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn identify_controller(&self) -> Result<IdentifyController, CommandError> {
        identify::identify_controller(&*self.controller)
    }

    /// Identify Namespace, CNS 00h. All zeroes for an inactive namespace.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn identify_namespace(&self, nsid: u32) -> Result<IdentifyNamespace, CommandError> {
        identify::identify_namespace(&*self.controller, nsid)
    }

    /// Namespace Identification Descriptors, CNS 03h (since version 1.3).
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn identify_namespace_ids(&self, nsid: u32) -> Result<NamespaceIds, CommandError> {
        identify::identify_namespace_ids(&*self.controller, nsid)
    }

    /// Active namespace identifiers in ascending order (CNS 02h, in as many commands as needed).
    ///
    /// # Errors
    /// [`CommandError`], also for a list that is out of order.
    pub fn active_namespaces(&self) -> Result<Vec<u32>, CommandError> {
        identify::active_namespaces(&*self.controller)
    }

    /// Reads a log page or a part of it, in as many commands as needed. Only the last command
    /// clears the asynchronous event of the page; the earlier commands retain the event. Base 2.1,
    /// 5.1.12.
    ///
    /// # Errors
    /// [`CommandError`], also if a page exceeds the transfer limit and the controller does not
    /// support extended data (LPA), and so no offsets.
    pub fn log_page(&self, request: LogRequest) -> Result<Vec<u8>, CommandError> {
        read_log_page(&*self.controller, request)
    }

    /// SMART / Health Information, log page 02h.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn smart_log(&self) -> Result<SmartHealth, CommandError> {
        let request = LogRequest::new(lid::SMART_HEALTH, size_of::<SmartHealth>());
        let data = self.log_page(request)?;
        SmartHealth::read_from_bytes(&data).map_err(|_| {
            CommandError::invalid_data(
                self.controller.name(),
                "Get Log Page",
                "its data are too short",
            )
        })
    }

    /// Error Information, log page 01h: the newest `count` entries, or fewer if the log has fewer.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn error_log(&self, count: u16) -> Result<Vec<ErrorLogEntry>, CommandError> {
        let kept = u16::from(self.controller.info.identity.elpe).saturating_add(1);
        let count = usize::from(count.min(kept));
        if count == 0 {
            return Ok(Vec::new());
        }
        let size = size_of::<ErrorLogEntry>();
        let data = self.log_page(LogRequest::new(lid::ERROR_INFORMATION, count * size))?;
        let entries =
            data.chunks_exact(size).filter_map(|e| ErrorLogEntry::read_from_bytes(e).ok());
        Ok(entries.take_while(|entry| entry.error_count != 0).collect())
    }

    /// Get Features: returns dword 0 of the completion, the value of most features. Base 2.1,
    /// 5.1.11.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn get_feature(&self, fid: u8, nsid: u32, select: Select) -> Result<u32, CommandError> {
        let fields = GetFeatures { fid, sel: select as u8, ..GetFeatures::default() };
        Ok(self.controller.succeed(Sqe::get_features(nsid, fields, 0), AdminData::None)?.dw0)
    }

    /// Get Features for a feature with `len` bytes of data or a parameter in dword 11. Returns
    /// dword 0 of the completion and the data.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn get_feature_data(
        &self,
        fid: u8,
        nsid: u32,
        select: Select,
        cdw11: u32,
        len: usize,
    ) -> Result<(u32, Vec<u8>), CommandError> {
        let fields = GetFeatures { fid, sel: select as u8, cdw11, ..GetFeatures::default() };
        let sqe = Sqe::get_features(nsid, fields, 0);
        let result = self.controller.succeed(sqe, AdminData::FromController(len))?;
        Ok((result.dw0, result.data))
    }

    /// Set Features with the value in dword 11. Returns dword 0 of the completion. Base 2.1,
    /// 5.1.25.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn set_feature(&self, fid: u8, nsid: u32, value: u32) -> Result<u32, CommandError> {
        self.controller.set_feature(fid, nsid, value)
    }

    /// Set Features for a feature whose value is data. Returns dword 0 of the completion.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn set_feature_data(
        &self,
        fid: u8,
        nsid: u32,
        cdw11: u32,
        data: &[u8],
    ) -> Result<u32, CommandError> {
        let fields = SetFeatures { fid, cdw11, ..SetFeatures::default() };
        let sqe = Sqe::set_features(nsid, fields, 0);
        Ok(self.controller.succeed(sqe, AdminData::ToController(data))?.dw0)
    }

    /// True if the controller reports allocated blocks, so that
    /// [`allocated_blocks`](Self::allocated_blocks) is supported.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn reports_allocated(&self) -> Result<bool, CommandError> {
        let has_command = self.controller.info.identity.oacs.get_lba_status();
        lba_status::reports_allocated(&*self.controller, has_command)
    }

    /// Get LBA Status: the allocated blocks of `range`, as at most `max_ranges` ranges (and at most
    /// 255); empty for an empty range. The controller may have to query its storage before it
    /// completes the command. NVM 1.1, 4.2.1.
    ///
    /// Blocks that were written before the submission of the command are reported as allocated,
    /// unless they were deallocated since. Unallocated blocks read as the namespace specifies for
    /// deallocated blocks (DLFEAT).
    ///
    /// # Errors
    /// [`CommandError`], also for an inconsistent list.
    pub fn allocated_blocks(
        &self,
        nsid: u32,
        range: Range<u64>,
        max_ranges: usize,
    ) -> Result<AllocatedBlocks, CommandError> {
        if range.is_empty() {
            return Ok(AllocatedBlocks { ranges: Vec::new(), until: range.end });
        }
        lba_status::allocated_blocks(&*self.controller, nsid, range, max_ranges)
    }

    /// Abort: requests the early end of command `cid` of submission queue `sqid`. Returns true if
    /// the controller aborted the command; the command completes in either case. Base 2.1, 5.1.1.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn abort(&self, sqid: u16, cid: u16) -> Result<bool, CommandError> {
        let result =
            self.controller.succeed(Sqe::abort(Abort { sqid, cid }, 0), AdminData::None)?;
        Ok(result.dw0 & Abort::NOT_ABORTED == 0)
    }

    /// Takes the asynchronous events since the last call. An event type stays masked until the log
    /// page of the event is read ([`log_page`](Self::log_page)). Base 2.1, 5.1.2.
    #[must_use]
    pub fn take_events(&self) -> Vec<AsyncEvent> {
        let (events, lost) = self.controller.plane().queue.take_events();
        if lost != 0 {
            tracing::warn!("{lost} asynchronous events were lost, taken too late");
        }
        events
    }
}

impl Drop for Admin {
    fn drop(&mut self) {
        AttachedController::shut_down_if_last(&self.controller);
    }
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin").field("device", &self.controller.name()).finish_non_exhaustive()
    }
}

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
