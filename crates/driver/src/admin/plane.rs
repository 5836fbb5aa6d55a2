//! Registers and admin queue: execution of admin commands, usable before Identify.

use super::queue::{AdminData, AdminQueue, AdminResult};
use crate::command::Completion;
use crate::device::Device;
use crate::dma::{Buffer, BufferPool, DmaError};
use crate::error::{AttachError, CommandError, QueueError, admin_name};
use crate::queue::{Core, Doorbell, PairShape, QueueLayout, QueueMemory, Register};
use shadowbell_doorbell::RingSize;
use shadowbell_memory::{MapError, SharedBytes};
use shadowbell_spec::admin::SetFeatures;
use shadowbell_spec::identify::IDENTIFY_SIZE;
use shadowbell_spec::{Sqe, regs};
use std::sync::Arc;
use std::time::Duration;

/// Number of entries of the admin queues.
const ADMIN_ENTRIES: u32 = 64;
/// Upper limit of the data bytes of one admin command.
const ADMIN_TRANSFER: u64 = 128 * 1024;
/// Number of additional pages in the memory of the admin queues: the Shadow Doorbell and EventIdx
/// buffers.
const SHADOW_PAGES: u64 = 2;

/// Execution of admin commands. [`AdminPlane`] executes a command immediately; an attached
/// controller first waits for the end of a reset that is in progress.
pub(crate) trait AdminCommands {
    fn plane(&self) -> &AdminPlane;

    /// Executes any admin command: see [`Admin::execute`](super::Admin::execute).
    fn execute(
        &self,
        sqe: Sqe,
        data: AdminData<'_>,
        limit: Duration,
    ) -> Result<AdminResult, CommandError>;

    /// Executes a command with the default timeout. A completion with an error status is an error.
    fn succeed(&self, sqe: Sqe, data: AdminData<'_>) -> Result<AdminResult, CommandError> {
        self.succeed_in(sqe, data, self.plane().device.timeouts.admin)
    }

    /// Executes a command with timeout `limit`. A completion with an error status is an error.
    fn succeed_in(
        &self,
        sqe: Sqe,
        data: AdminData<'_>,
        limit: Duration,
    ) -> Result<AdminResult, CommandError> {
        let device = &self.plane().device;
        let result = self.execute(sqe, data, limit)?;
        match result.status.into_result() {
            Ok(()) => Ok(result),
            Err(status) => Err(CommandError::Status {
                device: device.name().to_owned(),
                command: admin_name(sqe.opcode),
                status,
            }),
        }
    }

    /// Set Features with the value in dword 11. Returns dword 0 of the completion.
    fn set_feature(&self, fid: u8, nsid: u32, value: u32) -> Result<u32, CommandError> {
        let fields = SetFeatures { fid, cdw11: value, ..SetFeatures::default() };
        Ok(self.succeed(Sqe::set_features(nsid, fields, 0), AdminData::None)?.dw0)
    }
}

/// Registers, admin queue and DMA memory of a controller.
pub(crate) struct AdminPlane {
    pub(crate) device: Device,
    pub(crate) queue: AdminQueue,
    /// Small buffers for the data of admin commands.
    scratch: BufferPool,
    /// Memory of the admin queues and of the two shadow doorbell pages.
    memory: QueueMemory,
}

impl AdminPlane {
    /// Creates admin queues for a disabled `device`. The caller enables the device with the
    /// returned layout.
    pub(crate) fn new(device: Device) -> Result<(Self, QueueLayout), AttachError> {
        let impossible = || AttachError::Unsupported {
            device: device.name().to_owned(),
            what: format!("has a doorbell stride or page size ({} bytes)", device.page),
        };
        let size = RingSize::new(ADMIN_ENTRIES).ok_or_else(impossible)?;
        let page = device.page;
        let shape = PairShape { sq: size, cq: size, max_transfer: ADMIN_TRANSFER, page };
        let memory = QueueMemory::new(&device.transport, shape, 1, SHADOW_PAGES)?;
        let (core, layout) = queue_pair(&device, &memory).ok_or_else(impossible)?;
        let count = ADMIN_ENTRIES as usize;
        let scratch = BufferPool::new(&device.transport, count, IDENTIFY_SIZE, page as usize)?;
        Ok((Self { device, queue: AdminQueue::new(core), scratch, memory }, layout))
    }

    /// Creates new admin queues in the existing memory. The caller has disabled the controller
    /// before, and enables it with the returned layout.
    pub(crate) fn restart(&self) -> Option<QueueLayout> {
        let (core, layout) = queue_pair(&self.device, &self.memory)?;
        self.queue.restart(core);
        Some(layout)
    }

    pub(crate) fn name(&self) -> &str {
        self.device.name()
    }

    /// Zeroed pages for the Shadow Doorbell and EventIdx buffers, with their IOVAs.
    pub(crate) fn shadow_memory(&self) -> Option<[(SharedBytes, u64); 2]> {
        Some([self.memory.page(0)?, self.memory.page(1)?])
    }

    /// Leaks the memory of the admin queues, because the controller may still use it. Returns its
    /// size in bytes.
    pub(crate) fn leak_memory(&self) -> u64 {
        std::mem::forget(self.queue.take_buffers());
        self.memory.leak()
    }

    fn buffer(&self, len: usize) -> Result<Buffer, DmaError> {
        if len <= self.scratch.buffer_size()
            && let Some(buffer) = self.scratch.take()
        {
            return Ok(buffer);
        }
        let page = self.device.page as usize;
        let pool = BufferPool::new(&self.device.transport, 1, len, page)?;
        // `take` cannot fail: the new pool has one free buffer.
        pool.take().ok_or(DmaError::Map(MapError::Shape {
            len: len as u64,
            offset: 0,
            why: "the pool has no buffer",
        }))
    }
}

impl AdminCommands for AdminPlane {
    fn plane(&self) -> &AdminPlane {
        self
    }

    fn execute(
        &self,
        sqe: Sqe,
        data: AdminData<'_>,
        limit: Duration,
    ) -> Result<AdminResult, CommandError> {
        let len = match data {
            AdminData::None => 0,
            AdminData::ToController(bytes) => bytes.len(),
            AdminData::FromController(len) => len,
        };
        let max = self.queue.max_transfer();
        let transfer =
            u32::try_from(len).ok().filter(|len| u64::from(*len) <= max).ok_or_else(|| {
                let source = QueueError::TooLong { bytes: len as u64, max };
                CommandError::not_submitted(sqe.opcode, source)
            })?;
        let buffer = if len == 0 {
            None
        } else {
            let no_memory = |source| CommandError::Dma { command: admin_name(sqe.opcode), source };
            let mut buffer = self.buffer(len).map_err(no_memory)?;
            match data {
                AdminData::ToController(bytes) => {
                    // `copy_from` cannot fail: the buffer has at least `len` bytes.
                    let _ = buffer.copy_from(0, bytes);
                }
                // Bytes that the controller does not write read as zeroes, not as stale data.
                _ => buffer.fill(0),
            }
            Some(buffer)
        };
        let completion = self.queue.execute(&self.device, sqe, buffer, transfer, limit)?;
        let data = match (data, &completion.buffer) {
            (AdminData::FromController(len), Some(buffer)) => buffer.to_vec(len),
            _ => Vec::new(),
        };
        let Completion { status, dw0, dw1, .. } = completion;
        Ok(AdminResult { status, dw0, dw1, data })
    }
}

/// Creates zeroed admin queues in `memory`.
fn queue_pair(device: &Device, memory: &QueueMemory) -> Option<(Core, QueueLayout)> {
    let dstrd = device.cap.dstrd();
    // Admin doorbells always use trapped register writes, even if the transport can map doorbells:
    // only a trapped write wakes a controller that does not poll.
    let offsets = [regs::sq_doorbell_offset(0, dstrd), regs::cq_doorbell_offset(0, dstrd)];
    let doorbells = offsets.map(|offset| {
        let transport = Arc::clone(&device.transport);
        Doorbell::new(Register::Trapped { transport, offset, event: None })
    });
    memory.pair(0, 0, RingSize::new(ADMIN_ENTRIES)?, doorbells)
}
