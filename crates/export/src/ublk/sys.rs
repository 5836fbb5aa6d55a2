//! The system calls that have no safe form: ublk's commands, which go through io_uring.
//!
//! The kernel reads and writes memory behind the compiler's back from the moment that a command is
//! handed over until its completion is collected. So the type that hands it over owns that memory
//! for as long: [`Control`] waits for each of its commands, and a [`Queue`] keeps the buffer of a
//! tag while the kernel has the tag. What may still be in use when either is dropped is leaked.
//!
//! A call on the image's file moves data to or from memory of the kernel's, by its place in the
//! ring's table: no memory of this process has to stay for it.

use super::wire::{
    ABORTED, ControlCommand, Descriptor, DeviceInfo, IoCommand, control, data_of, descriptors,
    feature, io as command, registered_at,
};
use io_uring::squeue::{Entry, Entry128};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, types};
use rustix::io::Errno;
use shadowbell_backend::RawCall;
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// The completion of what is no request: the event that is slept on,
const EVENT: u64 = u64::MAX;
/// the time,
const TICK: u64 = u64::MAX - 1;
/// and what cancels a call.
const CANCEL: u64 = u64::MAX - 2;
/// The completion of a call on the image's file for the tag that is below this bit.
const CALL: u64 = 1 << 16;
/// How often it is looked whether a call takes too long.
static TICKS: types::Timespec = types::Timespec::new().sec(1);
/// The image's file, by its place in the ring's table.
const IMAGE: types::Fixed = types::Fixed(0);

/// The driver's control device.
pub(super) struct Control {
    ring: IoUring<Entry128, cqueue::Entry>,
    file: File,
}

impl Control {
    /// Over `/dev/ublk-control`.
    ///
    /// # Errors
    /// There is no io_uring for us.
    pub(super) fn new(file: File) -> io::Result<Self> {
        Ok(Self { ring: IoUring::builder().build(4)?, file })
    }

    /// Carries out a command and waits for its end. `data` is what it is given, and what it leaves
    /// behind.
    ///
    /// # Errors
    /// The driver's error number, or the system's.
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
        // SAFETY: the command points to `memory`, which lives until its completion is here, or for
        // good if that can not be learnt. The file is open as long as the ring is.
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
    /// What a device is at the moment.
    ///
    /// # Errors
    /// As [`command`](Self::command).
    pub(super) fn info(&mut self, id: u32) -> io::Result<DeviceInfo> {
        let mut info = DeviceInfo::default();
        let header = ControlCommand { dev_id: id, queue_id: u16::MAX, ..Default::default() };
        self.command(control::GET_DEV_INFO, header, info.as_mut_bytes())?;
        Ok(info)
    }

    /// What the driver can do.
    ///
    /// # Errors
    /// As [`command`](Self::command); before Linux 6.5 there is no such question.
    pub(super) fn features(&mut self) -> io::Result<u64> {
        let mut features = 0u64;
        let header = ControlCommand { queue_id: u16::MAX, ..Default::default() };
        self.command(control::GET_FEATURES, header, features.as_mut_bytes())?;
        Ok(features)
    }

    /// Opens a device as its server, of which there is one.
    ///
    /// # Errors
    /// As [`command`](Self::command), and what opening the file comes to.
    pub(super) fn serve(&mut self, id: u32) -> io::Result<Device> {
        let info = self.info(id)?;
        let file = File::options().read(true).write(true).open(format!("/dev/ublkc{id}"))?;
        Ok(Device { file, info })
    }
}

/// A device that we serve, until the last handle is dropped.
#[derive(Debug)]
pub(super) struct Device {
    file: File,
    info: DeviceInfo,
}

impl Device {
    /// What the device is; its queues, their depth and how long a request may be never change.
    pub(super) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Whether the driver copies data, to and from the buffers of the tags.
    pub(super) fn copies(&self) -> bool {
        self.info.flags & feature::STRAIGHT == 0
    }

    /// Copies the data of a write into `to`, where the driver has not.
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

    /// Copies what was read for a read to where it is wanted, where the driver does not.
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

/// What happened on a queue.
#[derive(Debug)]
pub(super) enum Event {
    /// A request. Its data, if there are any to be written, are in the buffer, if the driver copies
    /// them; if not, there is none.
    Request { tag: u16, descriptor: Descriptor, buffer: Vec<u8> },
    /// A call on the image's file has ended: with so many bytes, or a negative error number.
    Called { tag: u16, result: i32 },
    /// It is time to look whether a call takes too long.
    Tick,
    /// There are no more requests with this tag: the device is stopped, or something went wrong.
    TagDone { tag: u16, error: Option<io::Error> },
    /// The descriptor that is slept on became readable.
    Readable,
}

/// Who has a tag.
#[derive(Debug)]
enum Tag {
    Ours,
    /// The driver, with the tag's buffer.
    Driver(Vec<u8>),
    /// A call on the image's file is under way for its request.
    Called,
}

/// One of a device's queues. The thread that makes it is the one that has to use it.
pub(super) struct Queue {
    ring: IoUring,
    device: Arc<Device>,
    queue: u16,
    descriptors: SharedBytes,
    tags: Vec<Tag>,
    /// How many calls are under way.
    calls: usize,
    /// The ring has the image's file.
    has_image: bool,
    /// The event is waited for, and the time.
    armed: bool,
    ticking: bool,
}

impl Queue {
    /// Opens queue number `queue` of a device. Its tags, each with a buffer if the driver copies,
    /// are the kernel's with the next [`enter`](Self::enter). Calls are made on `image`.
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
        // Each tag has one thing under way, which may be cancelled; the rest is time and the event.
        let ring = build(2 * u32::from(depth) + 2)?;
        if let Some(image) = image {
            ring.submitter().register_files(&[image.as_raw_fd()])?;
            ring.submitter().register_buffers_sparse(depth.into())?;
        }
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
            this.hand_over(command::FETCH_REQ, tag, 0, vec![0; room])?;
        }
        Ok(this)
    }

    /// How many bytes a request has, at most.
    pub(super) fn room(&self) -> usize {
        self.device.info.max_io_bytes as usize
    }

    /// Answers the request with this tag, and takes the next one. `result` is how many bytes were
    /// moved, or a negative error number. Where the driver does not copy there is no buffer.
    ///
    /// # Errors
    /// The tag is not ours, its buffer is too short, or there is no room: defects of this program.
    pub(super) fn commit(&mut self, tag: u16, result: i32, buffer: Vec<u8>) -> io::Result<()> {
        self.hand_over(command::COMMIT_AND_FETCH_REQ, tag, result, buffer)
    }

    fn hand_over(&mut self, op: u32, tag: u16, result: i32, buffer: Vec<u8>) -> io::Result<()> {
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
        // Where the next request's memory goes in the ring's table.
        let entry = entry.addr((!copies).then(|| registered_at(tag))).build();
        *place = Tag::Driver(buffer);
        // SAFETY: the command points to the buffer, which is kept in `tags`, neither moved nor
        // looked at, until the command's completion is collected. The driver moves at most
        // `max_io_bytes` of the device, which is how long every buffer is. A driver that does not
        // copy is given no memory. The file is open as long as the ring is.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(u64::from(tag))) };
        if pushed.is_err() {
            if let Some(place) = self.tags.get_mut(usize::from(tag)) {
                *place = Tag::Ours;
            }
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(())
    }

    /// Makes a call on the image's file, with the memory of the request that has this tag.
    ///
    /// # Errors
    /// The tag is not ours, there is no file, or no room: defects of this program.
    pub(super) fn call(&mut self, tag: u16, call: &RawCall) -> io::Result<()> {
        let Some(place @ Tag::Ours) = self.tags.get_mut(usize::from(tag)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let len = u32::try_from(call.len).map_err(|_| io::ErrorKind::InvalidInput)?;
        let skip = usize::try_from(call.skip).map_err(|_| io::ErrorKind::InvalidInput)?;
        if !self.has_image {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // In a table of the kernel's own memory, an address is a distance from its beginning.
        let at = std::ptr::without_provenance_mut::<u8>(skip);
        let entry: Entry = if call.writes {
            let flags = if call.dsync { libc::RWF_DSYNC } else { 0 };
            let write = opcode::WriteFixed::new(IMAGE, at.cast_const(), len, tag);
            write.offset(call.offset).rw_flags(flags).build()
        } else {
            opcode::ReadFixed::new(IMAGE, at, len, tag).offset(call.offset).build()
        };
        let entry = entry.user_data(CALL | u64::from(tag));
        // SAFETY: the memory is the kernel's, which keeps it as long as a call uses it, and looks
        // whether the call stays within it. The ring has the file.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| io::ErrorKind::WouldBlock)?;
        *place = Tag::Called;
        self.calls += 1;
        Ok(())
    }

    /// Asks that the call for this tag ends early.
    pub(super) fn cancel(&mut self, tag: u16) {
        let entry = opcode::AsyncCancel::new(CALL | u64::from(tag)).build().user_data(CANCEL);
        // SAFETY: a cancellation has no memory.
        let _ = unsafe { self.ring.submission().push(&entry) };
    }

    /// Whose data these are: for [`Device::copy_from`] and [`Device::copy_to`].
    pub(super) fn number(&self) -> u16 {
        self.queue
    }

    /// The device.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// How many commands are not handed over yet.
    pub(super) fn prepared(&mut self) -> usize {
        self.ring.submission().len()
    }

    /// From now on, `event` becoming readable ends a wait, once.
    pub(super) fn arm(&mut self, event: BorrowedFd<'_>) {
        if self.armed {
            return;
        }
        let entry = opcode::PollAdd::new(types::Fd(event.as_raw_fd()), libc::POLLIN as u32);
        // SAFETY: a poll has no memory, and holds the file by itself.
        let pushed = unsafe { self.ring.submission().push(&entry.build().user_data(EVENT)) };
        self.armed = pushed.is_ok();
    }

    /// From now on, a second that has gone by ends a wait, once.
    pub(super) fn tick(&mut self) {
        if self.ticking {
            return;
        }
        let entry = opcode::Timeout::new(&raw const TICKS).build().user_data(TICK);
        // SAFETY: it points to a constant.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        self.ticking = pushed.is_ok();
    }

    /// Hands over what was prepared and takes in what has happened, in one system call; with
    /// `wait`, which lasts until something has.
    pub(super) fn enter(&mut self, wait: bool) -> io::Result<()> {
        let prepared = self.ring.submission().len() as u32;
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no argument structure is passed, and what the commands point to is kept as
        // `hand_over` says.
        let entered =
            unsafe { self.ring.submitter().enter::<()>(prepared, wait.into(), flags, None) };
        match entered.map_err(|error| (error.kind(), error)) {
            // Busy: more has completed than there is room for, and is to be collected first.
            Ok(_) | Err((io::ErrorKind::Interrupted | io::ErrorKind::ResourceBusy, _)) => Ok(()),
            Err((io::ErrorKind::WouldBlock, _)) => {
                // No memory for a command at the moment: it stays prepared.
                std::thread::sleep(Duration::from_millis(1));
                Ok(())
            }
            Err((_, error)) => Err(error),
        }
    }

    /// What has happened up to the last [`enter`](Self::enter).
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
        // The image is not given back as long as something is on its way to it.
        let called = (0..).zip(&self.tags).filter(|(_, tag)| matches!(tag, Tag::Called));
        let called: Vec<u16> = called.map(|(tag, _)| tag).collect();
        called.into_iter().for_each(|tag| self.cancel(tag));
        while self.calls > 0 && self.enter(true).is_ok() {
            self.collect(|_| {});
        }
        if self.has_image {
            // The kernel takes the ring apart some time later.
            let _ = self.ring.submitter().unregister_files();
        }
        if self.tags.iter().any(|tag| matches!(tag, Tag::Driver(_))) {
            // The kernel takes its commands back some time after the ring is closed.
            std::mem::forget(std::mem::take(&mut self.tags));
        }
    }
}

/// Makes a ring with the best that the kernel has: completions that wait until this thread comes
/// for them (6.1), or that do not interrupt it (5.19).
fn build(entries: u32) -> io::Result<IoUring> {
    let mut plain = IoUring::builder();
    plain.setup_submit_all().setup_coop_taskrun();
    let mut best = plain.clone();
    best.setup_single_issuer().setup_defer_taskrun();
    let entries = entries.next_power_of_two();
    match best.build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => plain.build(entries),
        outcome => outcome,
    }
}
