//! The control plane: Identify, features, log pages, and any other admin command.

mod identify;
mod log;
mod queue;

pub use self::log::LogRequest;
pub(crate) use self::queue::{AdminQueue, admin_name};

use crate::device::Registers;
use crate::dma::{Buffer, BufferPool};
use crate::error::{CommandError, QueueError};
use crate::queue::{Completion, QueueStats};
use crate::shared::Shared;
use crate::transport::TransportError;
use shadowbell_spec::admin::{Abort, GetFeatures, SetFeatures};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::feature::Select;
use shadowbell_spec::{Sqe, Status};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The data of an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminData<'a> {
    /// None.
    None,
    /// These bytes go to the controller.
    ToController(&'a [u8]),
    /// So many bytes come from the controller.
    FromController(usize),
}

/// What an admin command came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminResult {
    /// How it went.
    pub status: Status,
    /// Command specific result, dword 0.
    pub dw0: u32,
    /// Command specific result, dword 1.
    pub dw1: u32,
    /// With [`AdminData::FromController`], the bytes.
    pub data: Vec<u8>,
}

/// A handle on the control plane of an attached controller, for any thread. Every command has a
/// deadline, [`Timeouts::admin`](crate::Timeouts::admin) unless it is given one.
#[derive(Clone)]
pub struct Admin {
    shared: Arc<Shared>,
}

impl Admin {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Reads the registers that say what the controller is and how it does.
    ///
    /// # Errors
    /// [`TransportError`], when the device can not be reached.
    pub fn registers(&self) -> Result<Registers, TransportError> {
        self.shared.device.registers()
    }

    /// What the admin queue did so far.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.shared.admin.stats()
    }

    /// The most bytes of data that an admin command of this driver moves.
    #[must_use]
    pub fn max_transfer_bytes(&self) -> u64 {
        self.shared.admin.max_transfer()
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
        let command = || admin_name(sqe.opcode);
        if let Err(source) = self.shared.check(0) {
            return Err(CommandError::Queue { command: command(), source });
        }
        let len = match data {
            AdminData::None => 0,
            AdminData::ToController(bytes) => bytes.len(),
            AdminData::FromController(len) => len,
        };
        let max = self.max_transfer_bytes();
        let transfer =
            u32::try_from(len).ok().filter(|len| u64::from(*len) <= max).ok_or_else(|| {
                let source = QueueError::TooLong { bytes: len as u64, max };
                CommandError::Queue { command: command(), source }
            })?;
        let buffer = if len == 0 {
            None
        } else {
            let mut buffer = self
                .buffer(len)
                .map_err(|source| CommandError::Dma { command: command(), source })?;
            match data {
                AdminData::ToController(bytes) => {
                    // The buffer has at least as many bytes.
                    let _ = buffer.copy_from(0, bytes);
                }
                // What the controller does not write reads as zeroes.
                _ => buffer.fill(0),
            }
            Some(buffer)
        };
        let completion =
            self.shared.admin.execute(&self.shared.device, sqe, buffer, transfer, limit)?;
        let data = match (data, &completion.buffer) {
            (AdminData::FromController(len), Some(buffer)) => buffer.to_vec(len),
            _ => Vec::new(),
        };
        let Completion { status, dw0, dw1, .. } = completion;
        Ok(AdminResult { status, dw0, dw1, data })
    }

    fn buffer(&self, len: usize) -> Result<Buffer, crate::DmaError> {
        let small = &self.shared.scratch;
        if len <= small.buffer_size()
            && let Some(buffer) = small.take()
        {
            return Ok(buffer);
        }
        let page = self.shared.device.page as usize;
        let pool = BufferPool::new(&self.shared.device.transport, 1, len, page)?;
        // A pool that was just made has all of its one buffer.
        pool.take().ok_or(crate::DmaError::Map(shadowbell_memory::MapError::Shape {
            len: len as u64,
            offset: 0,
            why: "the pool has no buffer",
        }))
    }

    /// The same with the usual deadline, and a bad status as an error.
    fn succeed(&self, sqe: Sqe, data: AdminData<'_>) -> Result<AdminResult, CommandError> {
        let result = self.execute(sqe, data, self.shared.device.timeouts.admin)?;
        match result.status.into_result() {
            Ok(()) => Ok(result),
            Err(status) => Err(CommandError::Status {
                device: self.shared.name().to_owned(),
                command: admin_name(sqe.opcode),
                status,
            }),
        }
    }

    /// Get Features: dword 0 of the completion, which is the value of most. Base 2.1, 5.1.11.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn get_feature(&self, fid: u8, nsid: u32, select: Select) -> Result<u32, CommandError> {
        let fields = GetFeatures { fid, sel: select as u8, ..GetFeatures::default() };
        Ok(self.succeed(Sqe::get_features(nsid, fields, 0), AdminData::None)?.dw0)
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
        let result = self.succeed(sqe, AdminData::FromController(len))?;
        Ok((result.dw0, result.data))
    }

    /// Set Features with the value in dword 11: dword 0 of the completion. Base 2.1, 5.1.25.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn set_feature(&self, fid: u8, nsid: u32, value: u32) -> Result<u32, CommandError> {
        let fields = SetFeatures { fid, cdw11: value, ..SetFeatures::default() };
        Ok(self.succeed(Sqe::set_features(nsid, fields, 0), AdminData::None)?.dw0)
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
        Ok(self.succeed(sqe, AdminData::ToController(data))?.dw0)
    }

    /// Abort: asks the controller to end command `cid` of submission queue `sqid` early. Whether it
    /// did; the command completes in either case. Base 2.1, 5.1.1.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn abort(&self, sqid: u16, cid: u16) -> Result<bool, CommandError> {
        let result = self.succeed(Sqe::abort(Abort { sqid, cid }, 0), AdminData::None)?;
        Ok(result.dw0 & Abort::NOT_ABORTED == 0)
    }

    /// The asynchronous events that came since the last call. Each stays masked until the log page
    /// that it names is read ([`log_page`](Self::log_page)). Base 2.1, 5.1.2.
    #[must_use]
    pub fn take_events(&self) -> Vec<AsyncEvent> {
        let (events, lost) = self.shared.admin.take_events();
        if lost != 0 {
            tracing::warn!("{lost} asynchronous events were lost, taken too late");
        }
        events
    }

    pub(crate) fn device_name(&self) -> &str {
        self.shared.name()
    }
}

impl Drop for Admin {
    fn drop(&mut self) {
        self.shared.let_go();
    }
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin").field("device", &self.shared.name()).finish_non_exhaustive()
    }
}
