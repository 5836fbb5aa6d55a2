//! vhost-user-blk export: the disk as a virtio-blk device for a VMM (QEMU, Cloud Hypervisor).
//!
//! The socket serves one frontend at a time; when it disconnects, the next one may connect (a
//! restarted guest). One thread handles the frontend's messages (`protocol`). Each virtio queue has
//! another thread, which opens one of the disk's queues (`serve`). The disk transfers the data
//! directly from and to the guest's memory.
//!
//! The crates of rust-vmm are not used: `virtio-queue` looks each ring access up in the guest's
//! memory, and publishes each answer alone. That takes 130 ns more per request, and a request of
//! 4 KiB takes 220 to 320 ns.
//!
//! # Trust
//!
//! The frontend and its guest are untrusted. The `protocol` accepts only descriptors of memory and
//! eventfds. The guest's `memory` may be truncated at any moment, and the eventfds of a `ring` may
//! be full or empty, without ending or blocking a thread of this process.
//!
//! # When this process dies
//!
//! The requests in flight are recorded in memory that the frontend keeps (`inflight`). The frontend
//! reconnects to the next process at the same socket path, and the guest continues.
//!
//! # Not implemented
//!
//! Migration (dirty logging), and zoned disks.

mod chain;
mod config;
mod device;
mod inflight;
mod memory;
mod page_table_quota;
mod protocol;
mod queue;
mod request;
mod ring;
mod serve;
mod shared;
mod split_ring;
#[doc(hidden)]
pub mod testing;

use crate::failures::FailureCount;
use ::shadowbell_memory::EventFd;
use device::Device;
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use shadowbell_block::{BlockDevice, QueueThread};
use shadowbell_vfio_user::descriptor::{Channel, Closer};
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Pause after a frontend could not be accepted. Either descriptors, memory or threads are
/// exhausted, or files of an earlier frontend are still being closed.
const RETRY: Duration = Duration::from_secs(1);

struct ServerShared {
    ending: Arc<AtomicBool>,
    event: EventFd,
    state: Mutex<State>,
    /// Notified when a session has ended.
    left: Condvar,
    failures: Arc<FailureCount>,
}

/// Disk for the next frontend, and the connected one.
struct State {
    disk: BlockDevice,
    /// Socket of the connected frontend.
    frontend: Option<UnixStream>,
    /// Number of the sessions that have ended.
    sessions: u64,
}

impl ServerShared {
    fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.event.signal();
        if let Some(socket) = &self.state.lock().frontend {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Offers another `disk` to the next frontend. If `disconnects` is true, the requests in flight
    /// of the connected frontend are completed, and then the frontend is disconnected.
    fn replace_disk(&self, disk: BlockDevice, disconnects: bool) {
        let mut state = self.state.lock();
        state.disk = disk;
        let Some(socket) = state.frontend.as_ref().filter(|_| disconnects) else { return };
        let _ = socket.shutdown(Shutdown::Both);
        let session = state.sessions;
        while state.sessions == session {
            self.left.wait(&mut state);
        }
    }
}

/// Frontend that counts as connected until its session has ended.
struct Connected<'a>(&'a ServerShared);

impl<'a> Connected<'a> {
    /// Registers the frontend at the other end of `socket`. Also returns its disk.
    fn new(shared: &'a ServerShared, socket: UnixStream) -> (Self, BlockDevice) {
        let mut state = shared.state.lock();
        state.frontend = Some(socket);
        (Self(shared), state.disk.clone())
    }
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.frontend = None;
        state.sessions += 1;
        self.0.left.notify_all();
    }
}

/// virtio-blk device behind a vhost-user socket. A drop has the same effect as
/// [`stop`](Self::stop).
pub struct VhostUserBlk {
    shared: Arc<ServerShared>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
}

impl VhostUserBlk {
    /// Serves `disk` on the UNIX socket `listener`. The first 20 bytes of `id` are the serial
    /// number for the guest.
    ///
    /// # Errors
    ///
    /// The thread or its event cannot be created.
    pub fn start(
        disk: BlockDevice,
        listener: shadowbell_vfio_user::Listener,
        id: &str,
    ) -> io::Result<Self> {
        let path = listener.path().to_owned();
        let shared = Arc::new(ServerShared {
            ending: Arc::default(),
            event: EventFd::new()?,
            state: Mutex::new(State { disk, frontend: None, sessions: 0 }),
            left: Condvar::new(),
            failures: Arc::default(),
        });
        let (ours, id) = (Arc::clone(&shared), id.to_owned());
        let thread = std::thread::Builder::new()
            .name("vhost-user-blk".into())
            .spawn(move || accept(&listener, &id, &ours))?;
        Ok(Self { shared, thread: Some(thread), path })
    }

    /// Path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Offers another disk, or another size of the disk, to the next frontend. A connected frontend
    /// keeps the disk that it has. If `disconnects` is true, the requests in flight of the
    /// connected frontend are completed, and then the frontend is disconnected.
    pub fn replace_disk(&self, disk: BlockDevice, disconnects: bool) {
        self.shared.replace_disk(disk, disconnects);
    }

    /// Number of requests that failed because of the disk.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.shared.failures.count()
    }

    /// Disconnects the frontend, and completes the requests in flight. Returns the number of
    /// requests that failed because of the disk.
    #[must_use]
    pub fn stop(self) -> u64 {
        let failures = Arc::clone(&self.shared.failures);
        drop(self);
        failures.count()
    }
}

impl Drop for VhostUserBlk {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves frontends one after the other. `id` is the serial number of the disk.
fn accept(listener: &shadowbell_vfio_user::Listener, id: &str, shared: &ServerShared) {
    let closer = Arc::default();
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(shared.event.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
        ];
        let _ = poll(&mut fds, None);
        if shared.ending.load(Ordering::SeqCst) {
            return;
        }
        if fds.last().is_none_or(|fd| fd.revents().is_empty()) {
            continue;
        }
        let outcome = if Closer::is_overloaded(&closer) {
            Err("files that an earlier one sent are still being closed".into())
        } else {
            accept_one(listener, id, shared, &closer)
        };
        let (connected, session) = match outcome {
            Ok(None) => continue,
            Ok(Some(accepted)) => accepted,
            Err(error) => {
                tracing::warn!("a frontend cannot be accepted, trying again: {error}");
                let _ = shared.event.wait(Some(RETRY));
                continue;
            }
        };
        match session.serve() {
            Ok(()) => tracing::debug!("the frontend has disconnected"),
            Err(error) => tracing::warn!("a frontend was disconnected: {error}"),
        }
        drop(connected);
    }
}

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Session of a connected frontend, with a thread per queue. Dropping it ends the threads.
struct Session {
    device: Arc<Device>,
    threads: Vec<QueueThread>,
    frontend: Channel,
    /// Duplicate of the frontend's socket.
    socket: UnixStream,
}

/// Accepts the next frontend, if there is one.
fn accept_one<'a>(
    listener: &shadowbell_vfio_user::Listener,
    id: &str,
    shared: &'a ServerShared,
    closer: &Arc<Closer>,
) -> Result<Option<(Connected<'a>, Session)>, Failed> {
    let socket = match accept_with(listener, SocketFlags::CLOEXEC) {
        Ok(socket) => socket,
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    let frontend = Channel::new(socket, Arc::clone(closer));
    let socket = UnixStream::from(frontend.as_fd().try_clone_to_owned()?);
    let failures = Arc::clone(&shared.failures);
    let ends = (socket.try_clone()?, Arc::clone(&shared.ending));
    let (connected, disk) = Connected::new(shared, socket.try_clone()?);
    if shared.ending.load(Ordering::SeqCst) {
        shared.end();
    }
    let device = Arc::new(Device::new(&disk, id, failures, ends)?);
    let mut session = Session { device, threads: Vec::new(), frontend, socket };
    for queue in 0..session.device.queues() {
        let device = Arc::clone(&session.device);
        let run = move || device.run_queue(queue);
        session.threads.push(QueueThread::spawn(format!("vhost-queue{queue}"), run)?);
    }
    Ok(Some((connected, session)))
}

impl Session {
    fn serve(mut self) -> Result<(), Failed> {
        Ok(protocol::serve(&mut self.frontend, &self.socket, &self.device)?)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        self.device.shut_down();
        // Requests in flight are completed, even if the guest does not wait for them. If the
        // frontend tracks them, the next session would otherwise execute them a second time
        // concurrently.
        self.threads.drain(..).for_each(QueueThread::join);
    }
}
