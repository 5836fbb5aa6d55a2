//! The system calls that have no safe form: ublk's commands, which go through io_uring.
//!
//! The kernel reads and writes memory behind the compiler's back from the moment that a command is
//! handed over until its completion is collected. So the type that hands it over owns that memory
//! for as long: [`Control`] waits for each of its commands, and a [`Queue`] keeps the buffer of a
//! tag while the kernel has the tag. What may still be in use when either is dropped is leaked.

use super::wire::{
    ABORTED, ControlCommand, Descriptor, DeviceInfo, IoCommand, control, descriptors, io as command,
};
use io_uring::squeue::Entry128;
use io_uring::{EnterFlags, IoUring, cqueue, opcode, types};
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// The completion of what is no request: the event that is slept on.
const EVENT: u64 = u64::MAX;

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
}

/// What happened on a queue.
#[derive(Debug)]
pub(super) enum Event {
    /// A request. Its data, if there are any to be written, are in the buffer.
    Request { tag: u16, descriptor: Descriptor, buffer: Vec<u8> },
    /// There are no more requests with this tag: the device is stopped, or something went wrong.
    TagDone { tag: u16, error: Option<io::Error> },
    /// The descriptor that is slept on became readable.
    Readable,
}

/// One of a device's queues. The thread that makes it is the one that has to use it.
pub(super) struct Queue {
    ring: IoUring,
    device: Arc<Device>,
    queue: u16,
    descriptors: SharedBytes,
    /// The buffers of the tags that the kernel has.
    held: Vec<Option<Vec<u8>>>,
    /// The event is waited for.
    armed: bool,
}

impl Queue {
    /// Opens queue number `queue` of a device. Its tags, each with a buffer, are the kernel's with
    /// the next [`enter`](Self::enter).
    pub(super) fn open(device: Arc<Device>, queue: u16) -> io::Result<Self> {
        let page = rustix::param::page_size() as u64;
        let depth = device.info.depth;
        let (offset, len) = descriptors(queue, depth, page);
        let mapping = Mapping::from_fd(&device.file, offset, len, Protection::Read);
        let mapping = mapping.map_err(|error| match error {
            shadowbell_memory::MapError::System { source, .. } => source,
            error => io::Error::other(error),
        })?;
        let ring = build(u32::from(depth) + 2)?;
        let descriptors = mapping.bytes();
        let held = (0..depth).map(|_| None).collect();
        let mut this = Self { ring, device, queue, descriptors, held, armed: false };
        for tag in 0..depth {
            let buffer = vec![0; this.device.info.max_io_bytes as usize];
            this.hand_over(command::FETCH_REQ, tag, 0, buffer)?;
        }
        Ok(this)
    }

    /// Answers the request with this tag, and takes the next one. `result` is how many bytes were
    /// moved, or a negative error number.
    ///
    /// # Errors
    /// The tag is not ours, its buffer is too short, or there is no room: defects of this program.
    pub(super) fn commit(&mut self, tag: u16, result: i32, buffer: Vec<u8>) -> io::Result<()> {
        self.hand_over(command::COMMIT_AND_FETCH_REQ, tag, result, buffer)
    }

    fn hand_over(&mut self, op: u32, tag: u16, result: i32, buffer: Vec<u8>) -> io::Result<()> {
        let Some(place @ None) = self.held.get_mut(usize::from(tag)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if buffer.len() < self.device.info.max_io_bytes as usize {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let addr = place.insert(buffer).as_mut_ptr().expose_provenance() as u64;
        let io = IoCommand { queue: self.queue, tag, result, addr };
        let mut cmd = [0; 16];
        cmd.copy_from_slice(io.as_bytes());
        let entry = opcode::UringCmd16::new(types::Fd(self.device.file.as_raw_fd()), op).cmd(cmd);
        // SAFETY: the command points to the buffer, which is kept in `held`, neither moved nor
        // looked at, until the command's completion is collected. The driver moves at most
        // `max_io_bytes` of the device, which is how long every buffer is. The file is open as long
        // as the ring is.
        let pushed =
            unsafe { self.ring.submission().push(&entry.build().user_data(u64::from(tag))) };
        if pushed.is_err() {
            *place = None;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(())
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
            if completion.user_data() == EVENT {
                self.armed = false;
                each(Event::Readable);
                continue;
            }
            let tag = completion.user_data() as u16;
            let Some(buffer) = self.held.get_mut(usize::from(tag)).and_then(Option::take) else {
                continue;
            };
            let at = usize::from(tag) * size_of::<Descriptor>();
            each(match (completion.result(), self.descriptors.read(at)) {
                (0, Some(descriptor)) => Event::Request { tag, descriptor, buffer },
                (ABORTED, _) => Event::TagDone { tag, error: None },
                (result, _) => {
                    let error = Some(io::Error::from_raw_os_error(-result.min(-1)));
                    Event::TagDone { tag, error }
                }
            });
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.held.iter().any(Option::is_some) {
            // The kernel takes its commands back some time after the ring is closed.
            std::mem::forget(std::mem::take(&mut self.held));
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
