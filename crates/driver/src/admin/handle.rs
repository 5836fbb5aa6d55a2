//! The program's handle on the admin commands of an attached controller.

use super::data::{AdminData, AdminResult};
use super::identify;
use super::lba_status::{self, AllocatedBlocks};
use super::log::{LogRequest, read_log_page};
use super::plane::AdminCommands;
use crate::attached::AttachedController;
use crate::device::Registers;
use crate::error::CommandError;
use crate::queue::QueueStats;
use crate::transport::TransportError;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{Abort, GetFeatures, Identify, SetFeatures};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::feature::Select;
use shadowbell_spec::identify::{IdentifyController, IdentifyNamespace, NamespaceIds};
use shadowbell_spec::log::{ErrorLogEntry, SmartHealth, lid};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::FromBytes;

/// A handle on the control plane of an attached controller, for any thread. Every command has a
/// deadline, [`Timeouts::admin`](crate::Timeouts::admin) unless it is given one.
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

    /// Reads the registers that say what the controller is and how it does.
    ///
    /// # Errors
    /// [`TransportError`], when the device can not be reached.
    pub fn registers(&self) -> Result<Registers, TransportError> {
        self.controller.plane().device.registers()
    }

    /// What the admin queue did so far.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.controller.plane().queue.stats()
    }

    /// The most bytes of data that an admin command of this driver moves.
    #[must_use]
    pub fn max_transfer_bytes(&self) -> u64 {
        self.controller.plane().queue.max_transfer()
    }

    /// Runs any admin command, with its data pointer and its command identifier set here.
    ///
    /// The controller believes the command's dwords and not `data`: one that makes it move more
    /// than that reaches past the data, into other memory that was shared with it.
    ///
    /// # Errors
    /// [`CommandError`], when there is no completion before `limit` has passed. A completion with a
    /// bad status is none.
    pub fn execute(
        &self,
        sqe: Sqe,
        data: AdminData<'_>,
        limit: Duration,
    ) -> Result<AdminResult, CommandError> {
        self.controller.execute(sqe, data, limit)
    }

    /// Identify, any of its structures: 4096 bytes.
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

    /// Identify Namespace, CNS 00h: all zeroes for one that is not active.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn identify_namespace(&self, nsid: u32) -> Result<IdentifyNamespace, CommandError> {
        identify::identify_namespace(&*self.controller, nsid)
    }

    /// The namespace identification descriptors, CNS 03h (from version 1.3 on).
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn identify_namespace_ids(&self, nsid: u32) -> Result<NamespaceIds, CommandError> {
        identify::identify_namespace_ids(&*self.controller, nsid)
    }

    /// The identifiers of the active namespaces, ascending: CNS 02h, as often as it takes.
    ///
    /// # Errors
    /// [`CommandError`], also for a list that is out of order.
    pub fn active_namespaces(&self) -> Result<Vec<u32>, CommandError> {
        identify::active_namespaces(&*self.controller)
    }

    /// Reads (part of) a log page, in as many commands as it takes. Those but the last retain the
    /// asynchronous event, so that it is cleared with the last. Base 2.1, 5.1.12.
    ///
    /// # Errors
    /// [`CommandError`]; a page that is longer than a command moves needs a controller with
    /// extended data (LPA).
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
            CommandError::nonsense(self.controller.name(), "Get Log Page", "its data are too short")
        })
    }

    /// The `count` newest entries of the Error Information log page, 01h, at most as many as there
    /// were errors and as the controller keeps.
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

    /// Get Features: dword 0 of the completion, which is the value of most. Base 2.1, 5.1.11.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn get_feature(&self, fid: u8, nsid: u32, select: Select) -> Result<u32, CommandError> {
        let fields = GetFeatures { fid, sel: select as u8, ..GetFeatures::default() };
        Ok(self.controller.succeed(Sqe::get_features(nsid, fields, 0), AdminData::None)?.dw0)
    }

    /// Get Features of one whose value is `len` bytes of data, or that is asked about with dword
    /// 11: dword 0 of the completion, and the data.
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

    /// Set Features with the value in dword 11: dword 0 of the completion. Base 2.1, 5.1.25.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn set_feature(&self, fid: u8, nsid: u32, value: u32) -> Result<u32, CommandError> {
        self.controller.set_feature(fid, nsid, value)
    }

    /// Set Features of one whose value is data.
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

    /// Whether the controller tells which blocks are allocated: whether
    /// [`allocated_blocks`](Self::allocated_blocks) can be had.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn reports_allocated(&self) -> Result<bool, CommandError> {
        let has_command = self.controller.info.identity.oacs.get_lba_status();
        lba_status::reports_allocated(&*self.controller, has_command)
    }

    /// Get LBA Status: which blocks of `range` of a namespace are allocated, at most `most` ranges
    /// of them (255 if there are more); nothing of an empty range. The command completes when the
    /// controller has found out, which may take as long as its storage takes. NVM 1.1, 4.2.1.
    ///
    /// Blocks that were written before the command was given are allocated, unless they were
    /// deallocated since. The others read as the namespace says that deallocated blocks do
    /// (DLFEAT).
    ///
    /// # Errors
    /// [`CommandError`], also for a list that contradicts itself.
    pub fn allocated_blocks(
        &self,
        nsid: u32,
        range: Range<u64>,
        most: usize,
    ) -> Result<AllocatedBlocks, CommandError> {
        if range.is_empty() {
            return Ok(AllocatedBlocks { ranges: Vec::new(), until: range.end });
        }
        lba_status::allocated_blocks(&*self.controller, nsid, range, most)
    }

    /// Abort: asks the controller to end command `cid` of submission queue `sqid` early. Whether it
    /// did; the command completes in either case. Base 2.1, 5.1.1.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn abort(&self, sqid: u16, cid: u16) -> Result<bool, CommandError> {
        let result =
            self.controller.succeed(Sqe::abort(Abort { sqid, cid }, 0), AdminData::None)?;
        Ok(result.dw0 & Abort::NOT_ABORTED == 0)
    }

    /// The asynchronous events that came since the last call. Each stays masked until the log page
    /// that it names is read ([`log_page`](Self::log_page)). Base 2.1, 5.1.2.
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
