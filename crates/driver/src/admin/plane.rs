//! The registers and the admin queue: all that there is of a controller before Identify.

use super::data::{AdminData, AdminResult};
use super::queue::AdminQueue;
use crate::completion::Completion;
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

/// Entries of the admin queues.
const ADMIN_ENTRIES: u32 = 64;
/// The most that an admin command moves, where the controller takes more.
const ADMIN_TRANSFER: u64 = 128 * 1024;
/// Pages beside the admin queues: the Shadow Doorbell buffer and the EventIdx buffer.
const SHADOW_PAGES: u64 = 2;

/// Who runs admin commands: the [`AdminPlane`] at once, an attached controller after the reset that
/// may be under way.
pub(crate) trait AdminCommands {
    fn plane(&self) -> &AdminPlane;

    /// Runs any admin command: see [`Admin::execute`](super::Admin::execute).
    fn execute(
        &self,
        sqe: Sqe,
        data: AdminData<'_>,
        limit: Duration,
    ) -> Result<AdminResult, CommandError>;

    /// Runs a command with the usual deadline; a bad status is an error.
    fn succeed(&self, sqe: Sqe, data: AdminData<'_>) -> Result<AdminResult, CommandError> {
        self.succeed_in(sqe, data, self.plane().device.timeouts.admin)
    }

    /// The same, with another deadline.
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

    /// Set Features with the value in dword 11: dword 0 of the completion.
    fn set_feature(&self, fid: u8, nsid: u32, value: u32) -> Result<u32, CommandError> {
        let fields = SetFeatures { fid, cdw11: value, ..SetFeatures::default() };
        Ok(self.succeed(Sqe::set_features(nsid, fields, 0), AdminData::None)?.dw0)
    }
}

/// A controller's registers, its admin queue and the memory of both ends of it.
pub(crate) struct AdminPlane {
    pub(crate) device: Device,
    pub(crate) queue: AdminQueue,
    /// Small buffers for the data of admin commands.
    scratch: BufferPool,
    /// The admin queues, and the two pages of the shadow doorbells.
    memory: QueueMemory,
}

impl AdminPlane {
    /// Admin queues for `device`, which is disabled and is to be enabled with the layout.
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

    /// New admin queues in the old memory: the controller is disabled, and is to be enabled with
    /// the layout.
    pub(crate) fn restart(&self) -> Option<QueueLayout> {
        let (core, layout) = queue_pair(&self.device, &self.memory)?;
        self.queue.restart(core);
        Some(layout)
    }

    pub(crate) fn name(&self) -> &str {
        self.device.name()
    }

    /// Memory for the Shadow Doorbell buffer and the EventIdx buffer, zeroed, with its addresses.
    pub(crate) fn shadow_memory(&self) -> Option<[(SharedBytes, u64); 2]> {
        Some([self.memory.page(0)?, self.memory.page(1)?])
    }

    /// Keeps the admin queues' memory until the process ends, because the controller may still use
    /// it. How many bytes.
    pub(crate) fn keep_memory(&self) -> u64 {
        std::mem::forget(self.queue.take_buffers());
        self.memory.keep()
    }

    fn buffer(&self, len: usize) -> Result<Buffer, DmaError> {
        if len <= self.scratch.buffer_size()
            && let Some(buffer) = self.scratch.take()
        {
            return Ok(buffer);
        }
        let page = self.device.page as usize;
        let pool = BufferPool::new(&self.device.transport, 1, len, page)?;
        // A pool that was just made has all of its one buffer.
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
                    // The buffer has at least as many bytes.
                    let _ = buffer.copy_from(0, bytes);
                }
                // What the controller does not write reads as zeroes.
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

/// Admin queues in `memory`, zeroed.
fn queue_pair(device: &Device, memory: &QueueMemory) -> Option<(Core, QueueLayout)> {
    let dstrd = device.cap.dstrd();
    // The admin queue is control: it takes the way that can wake a controller, mapped or not.
    let offsets = [regs::sq_doorbell_offset(0, dstrd), regs::cq_doorbell_offset(0, dstrd)];
    let doorbells = offsets.map(|offset| {
        let transport = Arc::clone(&device.transport);
        Doorbell::new(Register::Trapped { transport, offset, event: None })
    });
    memory.pair(0, 0, RingSize::new(ADMIN_ENTRIES)?, doorbells)
}
