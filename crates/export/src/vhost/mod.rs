//! vhost-user-blk export: the disk as a virtio-blk device for a VMM (QEMU, Cloud Hypervisor).
//!
//! rust-vmm's crates implement the protocol and the state of the virtio queues; this module
//! implements the device. The socket serves one frontend at a time. When the frontend disconnects,
//! for example because the guest restarts, the next one may connect. Each virtio queue has a thread
//! with its own queue of the disk. The disk transfers data directly from and to the guest's memory
//! (`serve`).
//!
//! # Trust
//!
//! The frontend and its guest are untrusted. Their messages pass through the `fd_filter` first. A
//! thread of this process neither ends nor blocks if the guest's `memory` is truncated, or if the
//! eventfds of a `ring` are full or empty.
//!
//! # When this process dies
//!
//! The requests in flight are recorded in memory that the frontend keeps (`inflight`). The frontend
//! reconnects to the next process at the same socket path, and the guest continues.
//!
//! # Not implemented
//!
//! Migration (dirty logging), and zoned disks.

mod backend;
mod chain;
mod config;
mod fd_filter;
mod guest_region;
mod inflight;
mod inflight_messages;
mod memory;
mod page_table_quota;
mod queue;
mod request;
mod ring;
mod serve;
mod shared;
mod split_ring;
#[allow(unsafe_code)]
mod sys;
#[doc(hidden)]
pub mod testing;

use crate::failures::FailureCount;
use ::shadowbell_memory::EventFd;
use backend::Device;
use inflight_messages::InflightMessages;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use shadowbell_block::BlockDevice;
use shadowbell_vfio_user::descriptor::{Channel, Closer};
use shadowbell_vfio_user::server::BindError;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use vhost_user_backend::VhostUserDaemon;
use vmm_sys_util::epoll::EventSet;

/// Pause after a frontend could not be accepted. Either descriptors, memory or threads are
/// exhausted, or files of an earlier frontend are still being closed.
const RETRY: Duration = Duration::from_secs(1);

/// Reason why a device could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The socket cannot be bound.
    #[error(transparent)]
    Socket(#[from] BindError),
    /// The path is a directory.
    #[error("{} is a directory: add the name of a socket to it", .0.display())]
    Directory(PathBuf),
    /// A thread or descriptor cannot be created.
    #[error("the device cannot be served: {0}")]
    System(#[from] io::Error),
}

struct ServerShared {
    ending: Arc<AtomicBool>,
    event: EventFd,
    /// Socket of the connected frontend.
    frontend: Mutex<Option<UnixStream>>,
    failures: Arc<FailureCount>,
}

impl ServerShared {
    fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.event.signal();
        if let Some(socket) = self.frontend.lock().take() {
            let _ = socket.shutdown(Shutdown::Both);
        }
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
    /// Serves `disk` at the UNIX socket `path`. The first 20 bytes of `id` are the serial number
    /// for the guest.
    ///
    /// # Errors
    ///
    /// [`StartError`] if the socket or the thread cannot be created.
    pub fn start(disk: BlockDevice, path: &Path, id: &str) -> Result<Self, StartError> {
        if path.is_dir() {
            return Err(StartError::Directory(path.to_owned()));
        }
        let listener = shadowbell_vfio_user::Listener::bind(path)?;
        let shared = Arc::new(ServerShared {
            ending: Arc::default(),
            event: EventFd::new()?,
            frontend: Mutex::default(),
            failures: Arc::default(),
        });
        let (ours, id) = (Arc::clone(&shared), id.to_owned());
        let offered = Offered { disk, id };
        let thread = std::thread::Builder::new()
            .name("vhost-user-blk".into())
            .spawn(move || accept(&listener, &offered, &ours))?;
        Ok(Self { shared, thread: Some(thread), path: path.to_owned() })
    }

    /// Path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
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

/// Disk of the server, and its serial number.
struct Offered {
    disk: BlockDevice,
    id: String,
}

/// Serves frontends one after the other.
fn accept(listener: &shadowbell_vfio_user::Listener, offered: &Offered, shared: &ServerShared) {
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
            accept_one(listener, offered, shared, &closer)
        };
        let session = match outcome {
            Ok(None) => continue,
            Ok(Some(session)) => session,
            Err(error) => {
                tracing::warn!("a frontend cannot be accepted, trying again: {error}");
                let _ = shared.event.wait(Some(RETRY));
                continue;
            }
        };
        match session.serve(shared) {
            Ok(()) => tracing::debug!("the frontend has disconnected"),
            Err(error) => tracing::warn!("a frontend was disconnected: {error}"),
        }
    }
}

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Protocol backend of rust-vmm, with a thread per queue. Its drop ends the threads.
struct Daemon {
    device: Arc<Device>,
    daemon: VhostUserDaemon<Arc<Device>>,
}

impl Daemon {
    fn new(device: Arc<Device>) -> Result<Self, Failed> {
        let memory = memory::Current::new(memory::Memory::new());
        let daemon = VhostUserDaemon::new("vhost-user".into(), Arc::clone(&device), memory);
        Ok(Self { daemon: daemon.map_err(|error| error.to_string())?, device })
    }

    /// Registers each queue's event with the queue's thread. Completed requests signal the event.
    fn register_events(&self, shared: &ServerShared) -> Result<(), Failed> {
        let device = &self.device;
        for (queue, handler) in self.daemon.get_epoll_handlers().iter().enumerate() {
            let Some(event) = device.event(queue) else { continue };
            // The event is needed to end the thread, so a failed registration is retried.
            while let Err(error) =
                handler.register_listener(event, EventSet::IN, device.event_number())
            {
                tracing::warn!("the event of a queue cannot be registered, trying again: {error}");
                let _ = shared.event.wait(Some(RETRY));
            }
        }
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Ends the threads, because the drop of `daemon` waits for them.
        self.device.leave();
    }
}

/// Session of a connected frontend.
struct Session {
    daemon: Daemon,
    frontend: Channel,
    /// Duplicate of the frontend's socket.
    socket: UnixStream,
    /// Connection to rust-vmm's backend, for messages of the frontend.
    to_daemon: UnixStream,
}

/// Accepts the next frontend, if there is one.
fn accept_one(
    listener: &shadowbell_vfio_user::Listener,
    offered: &Offered,
    shared: &ServerShared,
    closer: &Arc<Closer>,
) -> Result<Option<Session>, Failed> {
    let socket = match accept_with(listener, SocketFlags::CLOEXEC) {
        Ok(socket) => socket,
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    let frontend = Channel::new(socket, Arc::clone(closer));
    let socket = UnixStream::from(frontend.as_fd().try_clone_to_owned()?);
    let failures = Arc::clone(&shared.failures);
    let ends = (socket.try_clone()?, Arc::clone(&shared.ending));
    let Offered { disk, id } = offered;
    let device = Arc::new(Device::new(disk, id, failures, ends)?);
    let mut daemon = Daemon::new(device)?;
    daemon.register_events(shared)?;
    let to_daemon = fd_filter::connect_daemon(listener.path(), |path| {
        daemon.daemon.start_client(path).map_err(|error| error.to_string())
    })?;
    Ok(Some(Session { daemon, frontend, socket, to_daemon }))
}

impl Session {
    fn serve(self, shared: &ServerShared) -> Result<(), Failed> {
        let Self { mut daemon, mut frontend, socket, to_daemon } = self;
        *shared.frontend.lock() = Some(socket.try_clone()?);
        if shared.ending.load(Ordering::SeqCst) {
            shared.end();
        }
        let answers = (to_daemon.try_clone()?, socket.try_clone()?);
        let answers =
            std::thread::Builder::new().name("vhost-answers".into()).spawn(move || {
                let (mut to_daemon, mut socket) = answers;
                let _ = io::copy(&mut to_daemon, &mut socket);
                // One side has disconnected. The other side is also disconnected, so that no thread
                // waits for it.
                let _ = (to_daemon.shutdown(Shutdown::Both), socket.shutdown(Shutdown::Both));
            })?;
        let device = &daemon.device;
        let queues = daemon.daemon.get_epoll_handlers().len();
        let kept = Arc::clone(device.inflight());
        let mut inflight = InflightMessages::new(kept, queues, request::QUEUE_SIZE);
        let passed = fd_filter::pass(&mut frontend, &to_daemon, &mut inflight, &socket);
        let _ = socket.shutdown(Shutdown::Both);
        // The backend reads the messages that were already passed, and then ends.
        let _ = to_daemon.shutdown(Shutdown::Write);
        daemon.device.leave();
        let handled = daemon.daemon.wait();
        let _ = to_daemon.shutdown(Shutdown::Both);
        let _ = answers.join();
        shared.frontend.lock().take();
        // Requests in flight must complete, even if the guest does not wait for them. If the
        // frontend tracks them, the next session could otherwise execute them a second time at the
        // same time.
        for queue in 0..queues {
            daemon.device.stop_queue(queue);
        }
        drop(daemon);
        passed?;
        match handled {
            Err(vhost_user_backend::Error::HandleRequest(error)) if !is_end(&error) => {
                Err(error.to_string().into())
            }
            _ => Ok(()),
        }
    }
}

/// True if the error means that the frontend has disconnected.
fn is_end(error: &vhost::vhost_user::Error) -> bool {
    use vhost::vhost_user::Error;
    matches!(
        error,
        Error::Disconnected
            | Error::PartialMessage
            | Error::SocketBroken(_)
            | Error::SocketError(_)
            | Error::SocketRetry(_)
    )
}
