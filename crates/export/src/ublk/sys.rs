//! System calls without a safe interface: the commands of ublk, sent through io_uring.
//!
//! The kernel accesses the memory of a command from its submission until its completion is
//! collected. Therefore the type that submits a command owns that memory for this time: [`Control`]
//! waits for each of its commands, and a [`Queue`] keeps the buffer of a tag while the kernel has
//! the tag. The drop of a [`Control`] or a [`Queue`] leaks memory that the kernel may still use.
//!
//! A read or write of the image's file transfers data to or from memory of the kernel. An index in
//! the ring's buffer table identifies that memory. So this process need not own memory for the
//! transfer.

use super::wire::{
    ABORTED, ControlCommand, Descriptor, DeviceInfo, IoCommand, control, data_of, descriptors,
    feature, io as command, registered_at,
};
use io_uring::squeue::{Entry, Entry128};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue, types};
use rustix::io::Errno;
use shadowbell_disk_file::RawCall;
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_uring::{Allowed, register};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// User data of the poll of the descriptor that [`Queue::arm`] got.
const EVENT: u64 = u64::MAX;
/// User data of the timer of [`Queue::tick`].
const TICK: u64 = u64::MAX - 1;
/// User data of a cancellation.
const CANCEL: u64 = u64::MAX - 2;
/// Flag in the user data of a call on the image's file. The bits below the flag are the tag.
const CALL: u64 = 1 << 16;
/// Interval of the timeout checks.
static TICKS: types::Timespec = types::Timespec::new().sec(1);
/// Index of the image's file in the ring's file table.
const IMAGE: types::Fixed = types::Fixed(0);

/// Control device of the driver.
pub(super) struct Control {
    ring: IoUring<Entry128, cqueue::Entry>,
    file: File,
}

impl Control {
    /// Creates the ring for `/dev/ublk-control`.
    ///
    /// # Errors
    /// If io_uring is not available.
    pub(super) fn new(file: File) -> io::Result<Self> {
        let allowed = Allowed { opcodes: &[opcode::UringCmd80::CODE], ..Allowed::NOTHING };
        Ok(Self { ring: allowed.build(&IoUring::builder(), 4, |_| Ok(()))?, file })
    }

    /// Executes a command and waits for its completion. `data` is the input and output of the
    /// command.
    ///
    /// # Errors
    /// Error number of the driver or of the system.
    pub(super) fn command(
        &mut self,
        op: u32,
        mut header: ControlCommand,
        data: &mut [u8],
    ) -> io::Result<()> {
        let mut memory: Box<[u8]> = (&*data).into();
        if !memory.is_empty() {
            header.addr = memory.as_mut_ptr().expose_provenance() as u64;
            header.len = u16::try_from(memory.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        }
        let mut bytes = [0; 80];
        if let Some(place) = bytes.get_mut(..size_of::<ControlCommand>()) {
            place.copy_from_slice(header.as_bytes());
        }
        let entry =
            opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), op).cmd(bytes).build();
        // SAFETY: the command points to `memory`, which lives until the completion is collected. If
        // that fails, `memory` is leaked. The file is open as long as the ring exists.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| io::ErrorKind::WouldBlock)?;
        loop {
            let completion = self.ring.completion().next();
            if let Some(completion) = completion {
                data.copy_from_slice(&memory);
                return match completion.result() {
                    result if result < 0 => Err(io::Error::from_raw_os_error(-result)),
                    _ => Ok(()),
                };
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    std::mem::forget(memory);
                    return Err(error);
                }
            }
        }
    }
}

impl Control {
    /// Current information about a device.
    ///
    /// # Errors
    /// As [`command`](Self::command).
    pub(super) fn info(&mut self, id: u32) -> io::Result<DeviceInfo> {
        let mut info = DeviceInfo::default();
        let header = ControlCommand { dev_id: id, queue_id: u16::MAX, ..Default::default() };
        self.command(control::GET_DEV_INFO, header, info.as_mut_bytes())?;
        Ok(info)
    }

    /// Features of the driver.
    ///
    /// # Errors
    /// As [`command`](Self::command). The command does not exist before Linux 6.5.
    pub(super) fn features(&mut self) -> io::Result<u64> {
        let mut features = 0u64;
        let header = ControlCommand { queue_id: u16::MAX, ..Default::default() };
        self.command(control::GET_FEATURES, header, features.as_mut_bytes())?;
        Ok(features)
    }

    /// Opens a device as its only server.
    ///
    /// # Errors
    /// As [`command`](Self::command), or the error of opening the file.
    pub(super) fn serve(&mut self, id: u32) -> io::Result<Device> {
        let info = self.info(id)?;
        let file = File::options().read(true).write(true).open(format!("/dev/ublkc{id}"))?;
        Ok(Device { file, info })
    }
}

/// Device that this process serves, until the last handle is dropped.
#[derive(Debug)]
pub(super) struct Device {
    file: File,
    info: DeviceInfo,
}

impl Device {
    /// Device information. The number of queues, their depth and the largest request never
    /// change.
    pub(super) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// True if the driver copies data from and to the buffers of the tags.
    pub(super) fn copies(&self) -> bool {
        self.info.flags & feature::ZERO_COPY == 0
    }

    /// Copies the data of a write into `to`. Used for a device with zero copy, because the ublk
    /// driver does not copy its data.
    pub(super) fn copy_from(&self, queue: u16, tag: u16, mut to: &mut [u8]) -> Result<(), Errno> {
        let mut at = data_of(queue, tag);
        while !to.is_empty() {
            match rustix::io::retry_on_intr(|| rustix::io::pread(&self.file, &mut *to, at))? {
                0 => return Err(Errno::IO),
                moved => {
                    at += moved as u64;
                    to = to.get_mut(moved..).unwrap_or_default();
                }
            }
        }
        Ok(())
    }

    /// Copies the data of a read to the request's memory. Used for a device with zero copy, because
    /// the ublk driver does not copy its data.
    pub(super) fn copy_to(&self, queue: u16, tag: u16, mut from: &[u8]) -> Result<(), Errno> {
        let mut at = data_of(queue, tag);
        while !from.is_empty() {
            match rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.file, from, at))? {
                0 => return Err(Errno::IO),
                moved => {
                    at += moved as u64;
                    from = from.get(moved..).unwrap_or_default();
                }
            }
        }
        Ok(())
    }
}

/// Event of a queue.
#[derive(Debug)]
pub(super) enum Event {
    /// New request. If the driver copies, the buffer contains the data of a write. Otherwise the
    /// buffer is empty.
    Request { tag: u16, descriptor: Descriptor, buffer: Vec<u8> },
    /// End of a read or write of the image's file, with the number of bytes or a negative error
    /// number.
    Called { tag: u16, result: i32 },
    /// Expiry of the timer for timeout checks.
    Tick,
    /// The tag gets no more requests, because the device was stopped or an error occurred.
    TagDone { tag: u16, error: Option<io::Error> },
    /// The descriptor of [`arm`](Queue::arm) became readable.
    Readable,
}

/// Owner of a tag.
#[derive(Debug)]
enum Tag {
    Ours,
    /// The driver, with the tag's buffer.
    Driver(Vec<u8>),
    /// The kernel, for a read or write of the image's file that the request consists of.
    Called,
}

/// Queue of a device. Only the thread that creates it may use it.
pub(super) struct Queue {
    ring: IoUring,
    device: Arc<Device>,
    queue: u16,
    descriptors: SharedBytes,
    tags: Vec<Tag>,
    /// Number of reads and writes of the image's file that are in flight.
    calls: usize,
    /// True if the image's file is registered with the ring.
    has_image: bool,
    /// True while the descriptor that was passed to [`arm`](Self::arm) is polled.
    armed: bool,
    /// True while the timer for timeout checks runs.
    ticking: bool,
}

impl Queue {
    /// Opens queue number `queue` of a device. The next [`enter`](Self::enter) passes the queue's
    /// tags to the kernel, each with a buffer if the driver copies. With zero copy, the queue reads
    /// and writes the file `image`.
    pub(super) fn open(
        device: Arc<Device>,
        queue: u16,
        image: Option<BorrowedFd<'_>>,
    ) -> io::Result<Self> {
        let page = rustix::param::page_size() as u64;
        let depth = device.info.depth;
        let (offset, len) = descriptors(queue, depth, page);
        let mapping = Mapping::from_fd(&device.file, offset, len, Protection::Read);
        let mapping = mapping.map_err(|error| match error {
            shadowbell_memory::MapError::System { source, .. } => source,
            error => io::Error::other(error),
        })?;
        // Each tag has at most one operation and its cancellation in flight. The timer and the poll
        // need one entry each.
        let ring = build(2 * u32::from(depth) + 2, |ring| {
            let Some(image) = image else { return Ok(()) };
            ring.submitter().register_files(&[image.as_raw_fd()])?;
            ring.submitter().register_buffers_sparse(depth.into())
        })?;
        let mut this = Self {
            ring,
            device,
            queue,
            descriptors: mapping.bytes(),
            tags: (0..depth).map(|_| Tag::Ours).collect(),
            calls: 0,
            has_image: image.is_some(),
            armed: false,
            ticking: false,
        };
        for tag in 0..depth {
            let room = if this.device.copies() { this.room() } else { 0 };
            this.pass_to_driver(command::FETCH_REQ, tag, 0, vec![0; room])?;
        }
        Ok(this)
    }

    /// Largest number of data bytes of a request.
    pub(super) fn room(&self) -> usize {
        self.device.info.max_io_bytes as usize
    }

    /// Answers the request with this tag, and passes the tag to the kernel for the next request.
    /// `result` is the number of bytes transferred, or a negative error number. `buffer` is unused
    /// if the driver does not copy.
    ///
    /// # Errors
    /// If the tag belongs to the kernel, the buffer is too short, or the ring is full: bugs of
    /// this program.
    pub(super) fn commit(&mut self, tag: u16, result: i32, buffer: Vec<u8>) -> io::Result<()> {
        self.pass_to_driver(command::COMMIT_AND_FETCH_REQ, tag, result, buffer)
    }

    fn pass_to_driver(
        &mut self,
        op: u32,
        tag: u16,
        result: i32,
        buffer: Vec<u8>,
    ) -> io::Result<()> {
        let copies = self.device.copies();
        if copies && buffer.len() < self.room() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let Some(place @ Tag::Ours) = self.tags.get_mut(usize::from(tag)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let mut buffer = if copies { buffer } else { Vec::new() };
        let addr = if copies { buffer.as_mut_ptr().expose_provenance() as u64 } else { 0 };
        let io = IoCommand { queue: self.queue, tag, result, addr };
        let mut cmd = [0; 16];
        cmd.copy_from_slice(io.as_bytes());
        let entry = opcode::UringCmd16::new(types::Fd(self.device.file.as_raw_fd()), op).cmd(cmd);
        // With zero copy, the address field of the entry specifies where in the ring's buffer table
        // the memory of the next request is registered.
        let entry = entry.addr((!copies).then(|| registered_at(tag))).build();
        *place = Tag::Driver(buffer);
        // SAFETY: the command points to the buffer, which is kept in `tags` and neither moved nor
        // accessed until the command's completion is collected. The driver transfers at most
        // `max_io_bytes` of the device, the length of every buffer. If the driver does not copy,
        // the command has no pointer. The file is open as long as the ring exists.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(u64::from(tag))) };
        if pushed.is_err() {
            if let Some(place) = self.tags.get_mut(usize::from(tag)) {
                *place = Tag::Ours;
            }
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(())
    }

    /// Submits a read or write of the image's file, to or from the memory of the request that has
    /// this tag.
    ///
    /// # Errors
    /// If the tag belongs to the kernel, no file is registered, or the ring is full: bugs of this
    /// program.
    pub(super) fn call(&mut self, tag: u16, call: &RawCall) -> io::Result<()> {
        let Some(place @ Tag::Ours) = self.tags.get_mut(usize::from(tag)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let len = u32::try_from(call.len).map_err(|_| io::ErrorKind::InvalidInput)?;
        let skip = usize::try_from(call.skip).map_err(|_| io::ErrorKind::InvalidInput)?;
        if !self.has_image {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // The buffer is registered and in the kernel's memory, so the entry contains an offset from
        // the buffer's start instead of an address.
        let at = std::ptr::without_provenance_mut::<u8>(skip);
        let entry: Entry = if call.writes {
            let flags = if call.dsync { libc::RWF_DSYNC } else { 0 };
            let write = opcode::WriteFixed::new(IMAGE, at.cast_const(), len, tag);
            write.offset(call.offset).rw_flags(flags).build()
        } else {
            opcode::ReadFixed::new(IMAGE, at, len, tag).offset(call.offset).build()
        };
        let entry = entry.user_data(CALL | u64::from(tag));
        // SAFETY: the kernel owns the buffer, keeps it while the read or write uses it, and checks
        // that the transfer does not exceed it. The ring holds the file.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| io::ErrorKind::WouldBlock)?;
        *place = Tag::Called;
        self.calls += 1;
        Ok(())
    }

    /// Requests the cancellation of the read or write of the image's file that is in flight for
    /// this tag.
    pub(super) fn cancel(&mut self, tag: u16) {
        let entry = opcode::AsyncCancel::new(CALL | u64::from(tag)).build().user_data(CANCEL);
        // SAFETY: a cancellation refers to no memory.
        let _ = unsafe { self.ring.submission().push(&entry) };
    }

    /// Number of the queue, for [`Device::copy_from`] and [`Device::copy_to`].
    pub(super) fn number(&self) -> u16 {
        self.queue
    }

    /// Device of the queue.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Number of commands that are not submitted yet.
    pub(super) fn prepared(&mut self) -> usize {
        self.ring.submission().len()
    }

    /// Polls `event` once: when the event becomes readable, the next wait ends.
    pub(super) fn arm(&mut self, event: BorrowedFd<'_>) {
        if self.armed {
            return;
        }
        let entry = opcode::PollAdd::new(types::Fd(event.as_raw_fd()), libc::POLLIN as u32);
        // SAFETY: a poll refers to no memory, and the kernel holds a reference to the file.
        let pushed = unsafe { self.ring.submission().push(&entry.build().user_data(EVENT)) };
        self.armed = pushed.is_ok();
    }

    /// Starts the timer once: after a second, the next wait ends.
    pub(super) fn tick(&mut self) {
        if self.ticking {
            return;
        }
        let entry = opcode::Timeout::new(&raw const TICKS).build().user_data(TICK);
        // SAFETY: the entry points to a static.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        self.ticking = pushed.is_ok();
    }

    /// Submits prepared commands and gets completions, by one system call. With `wait`, blocks
    /// until there is a completion.
    pub(super) fn enter(&mut self, wait: bool) -> io::Result<()> {
        let prepared = self.ring.submission().len() as u32;
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no argument structure is passed, and the memory of the commands is kept as
        // described in `pass_to_driver`.
        let entered =
            unsafe { self.ring.submitter().enter::<()>(prepared, wait.into(), flags, None) };
        match entered.map_err(|error| (error.kind(), error)) {
            // EBUSY means that the completion queue has overflowed and must be collected first.
            Ok(_) | Err((io::ErrorKind::Interrupted | io::ErrorKind::ResourceBusy, _)) => Ok(()),
            Err((io::ErrorKind::WouldBlock, _)) => {
                // EAGAIN means that the kernel has no memory for a command. The command stays
                // prepared.
                std::thread::sleep(Duration::from_millis(1));
                Ok(())
            }
            Err((_, error)) => Err(error),
        }
    }

    /// Calls `each` with every event that was available at the last [`enter`](Self::enter).
    pub(super) fn collect(&mut self, mut each: impl FnMut(Event)) {
        for completion in self.ring.completion() {
            let (whose, result) = (completion.user_data(), completion.result());
            match whose {
                EVENT => {
                    self.armed = false;
                    each(Event::Readable);
                    continue;
                }
                TICK => {
                    self.ticking = false;
                    each(Event::Tick);
                    continue;
                }
                CANCEL => continue,
                _ => {}
            }
            let tag = whose as u16;
            let Some(place) = self.tags.get_mut(usize::from(tag)) else { continue };
            match std::mem::replace(place, Tag::Ours) {
                Tag::Driver(buffer) if whose & CALL == 0 => {
                    let at = usize::from(tag) * size_of::<Descriptor>();
                    each(match (result, self.descriptors.read(at)) {
                        (0, Some(descriptor)) => Event::Request { tag, descriptor, buffer },
                        (ABORTED, _) => Event::TagDone { tag, error: None },
                        (result, _) => {
                            let error = Some(io::Error::from_raw_os_error(-result.min(-1)));
                            Event::TagDone { tag, error }
                        }
                    });
                }
                Tag::Called if whose & CALL != 0 => {
                    self.calls -= 1;
                    each(Event::Called { tag, result });
                }
                other => *place = other,
            }
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // The calls in flight on the image are cancelled and waited for, because the caller may
        // release the image after the drop.
        let called = (0..).zip(&self.tags).filter(|(_, tag)| matches!(tag, Tag::Called));
        let called: Vec<u16> = called.map(|(tag, _)| tag).collect();
        called.into_iter().for_each(|tag| self.cancel(tag));
        while self.calls > 0 && self.enter(true).is_ok() {
            self.collect(|_| {});
        }
        if self.has_image {
            // The file is unregistered explicitly: the kernel destroys the ring asynchronously, and
            // would keep the file open until then.
            let _ = self.ring.submitter().unregister_files();
        }
        if self.tags.iter().any(|tag| matches!(tag, Tag::Driver(_))) {
            // The buffers are leaked, because the kernel cancels the commands asynchronously after
            // the ring is closed.
            std::mem::forget(std::mem::take(&mut self.tags));
        }
    }
}

/// Operations of a queue's ring.
const ALLOWED: Allowed = Allowed {
    opcodes: &[
        opcode::UringCmd16::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
        opcode::AsyncCancel::CODE,
        opcode::PollAdd::CODE,
        opcode::Timeout::CODE,
    ],
    flags: squeue::Flags::FIXED_FILE,
    registers: &[register::UNREGISTER_FILES],
};

/// Creates a restricted ring with the best mode that the kernel supports. Linux 6.1: the kernel
/// processes completions only when this thread enters the kernel for them. Linux 5.19: the kernel
/// processes them at any system call of this thread, and does not interrupt it. `prepare` registers
/// files and buffers.
fn build(entries: u32, prepare: impl Fn(&IoUring) -> io::Result<()>) -> io::Result<IoUring> {
    let mut plain = IoUring::builder();
    plain.setup_submit_all().setup_coop_taskrun();
    let mut best = plain.clone();
    best.setup_single_issuer().setup_defer_taskrun();
    let entries = entries.next_power_of_two();
    match ALLOWED.build(&best, entries, &prepare) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            ALLOWED.build(&plain, entries, prepare)
        }
        outcome => outcome,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queues_ring_refuses_operations_that_the_queue_does_not_use() {
        let Ok(mut ring) = build(8, |_| Ok(())) else {
            return shadowbell_testing::programs::skipped("there is no io_uring here");
        };
        let timeout = opcode::Timeout::new(&raw const TICKS).build().user_data(1);
        let cancel = opcode::AsyncCancel::new(1).build().user_data(2);
        let socket = opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build().user_data(3);
        for entry in [&timeout, &cancel, &socket] {
            // SAFETY: the entries point to no memory except that of a static variable.
            unsafe { ring.submission().push(entry) }.unwrap();
        }
        ring.submit_and_wait(3).unwrap();
        let mut results: Vec<_> =
            ring.completion().map(|end| (end.user_data(), end.result())).collect();
        results.sort_unstable();
        assert_eq!(results, [(1, -libc::ECANCELED), (2, 0), (3, -libc::EACCES)]);
        let registered = ring.submitter().register_files(&[0]);
        assert_eq!(registered.unwrap_err().raw_os_error(), Some(libc::EACCES));
    }
}
