//! io_uring for NVMe passthrough (Linux 5.19). Its entries have 128 bytes and contain a command;
//! its completions have 32 bytes and contain the result of the command.

use super::call::{Kind, Prepared, Stuck, WAKE};
use super::passthrough::{Command, NVME_URING_CMD_IO, NVME_URING_CMD_IO_VEC, Namespace};
use super::uring::{OfThread, Shape, Uring, build};
use super::waker::Alarm;
use io_uring::squeue::Entry128;
use io_uring::{cqueue, opcode};
use shadowbell_spec::nvm::DsmRange;
use shadowbell_uring::Reserve;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread::LocalKey;
use zerocopy::IntoBytes;

impl Shape for Entry128 {
    type Completion = cqueue::Entry32;

    fn reserve() -> &'static Reserve<Self, Self::Completion> {
        static RESERVE: Reserve<Entry128, cqueue::Entry32> = Reserve::new("NVMe commands", || {
            const OPCODES: &[u8] =
                &[opcode::Nop::CODE, opcode::AsyncCancel::CODE, opcode::UringCmd80::CODE];
            build(OPCODES)
        });
        &RESERVE
    }

    fn of_thread() -> &'static LocalKey<OfThread<Self>> {
        thread_local! {
            static RING: OfThread<Entry128> = const { OfThread::none() };
        }
        &RING
    }
}

/// Ring for commands to a namespace.
pub(super) struct NamespaceRing {
    uring: Uring<Entry128>,
    namespace: Namespace,
    /// Ranges of Dataset Management commands, by slot. The device reads a range until its command
    /// ends, so the address of the range must not change.
    ranges: Vec<Option<Box<DsmRange>>>,
    /// Calls that failed before they were submitted.
    refused: Vec<(u64, i32)>,
}

impl NamespaceRing {
    /// Creates the ring. See [`Uring::new`].
    pub(super) fn new(file: Arc<File>, namespace: Namespace) -> io::Result<Self> {
        let uring = Uring::new(file)?;
        Ok(Self { uring, namespace, ranges: Vec::new(), refused: Vec::new() })
    }

    /// Queues a call. The result in its completion is 0, an NVMe status or a negative error number.
    ///
    /// # Safety
    /// As for [`Uring::push_entry`]. The memory that must stay valid consists of the call's data
    /// buffers and their `iovecs`.
    pub(super) unsafe fn push(&mut self, call: &Prepared<'_>) -> bool {
        let namespace = self.namespace;
        let (command, is_list) = match namespace.with_data(call, self.range(call)) {
            Ok(made) => made,
            Err(error) => {
                self.refused.push((call.id, error));
                self.uring.wake();
                return true;
            }
        };
        let mut bytes = [0; 80];
        if let Some(place) = bytes.get_mut(..size_of::<Command>()) {
            place.copy_from_slice(command.as_bytes());
        }
        let code = if is_list { NVME_URING_CMD_IO_VEC } else { NVME_URING_CMD_IO };
        let entry = match self.uring.target() {
            Ok(fixed) => opcode::UringCmd80::new(fixed, code).cmd(bytes).build(),
            Err(fd) => opcode::UringCmd80::new(fd, code).cmd(bytes).build(),
        };
        // SAFETY: the caller guarantees that the pieces stay valid. A range stays valid until its
        // slot has another call, and outlives the ring.
        unsafe { self.uring.push_entry(&entry.user_data(self.uring.user_data(call.id))) }
    }

    /// Stores the range of a Dataset Management call in `ranges`, at the index of the call's slot,
    /// and returns the range. For other calls, returns an empty range.
    fn range(&mut self, call: &Prepared<'_>) -> &DsmRange {
        const NONE: &DsmRange = &DsmRange { attributes: 0, blocks: 0, slba: 0 };
        if call.kind != Kind::Deallocate {
            return NONE;
        }
        let at = (call.id & WAKE) as usize;
        if at >= self.ranges.len() {
            self.ranges.resize_with(at + 1, || None);
        }
        let Some(place) = self.ranges.get_mut(at) else { return NONE };
        let range = place.get_or_insert_default();
        **range = self.namespace.range(call.offset, call.len);
        range
    }

    pub(super) fn cancel(&mut self, id: u64) {
        self.uring.cancel(id);
    }

    pub(super) fn wake(&mut self) {
        self.uring.wake();
    }

    pub(super) fn prepared(&mut self) -> usize {
        self.uring.prepared()
    }

    pub(super) fn enter(&mut self) {
        self.uring.enter();
    }

    pub(super) fn alarm(&self) -> &Arc<Alarm> {
        self.uring.alarm()
    }

    pub(super) fn wait(&mut self) -> Result<(), Stuck> {
        self.uring.wait().inspect_err(|_| {
            // The device may still read the ranges, so they are leaked instead of freed.
            std::mem::forget(std::mem::take(&mut self.ranges));
        })
    }

    pub(super) fn collect(&mut self, mut each: impl FnMut(u64, i32)) {
        self.refused.drain(..).for_each(|(id, error)| each(id, error));
        self.uring.collect(each);
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.uring.fd()
    }
}
