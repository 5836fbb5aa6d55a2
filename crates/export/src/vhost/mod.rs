//! The disk as a virtio-blk device, for a VMM that speaks vhost-user: QEMU, Cloud Hypervisor.
//!
//! The virtio queues and the protocol are rust-vmm's; what is here is the device. A frontend has
//! the socket to itself; when it leaves, the next one may come (a guest that is started again).
//! Each virtio queue has a thread and one of the disk's queues.
//!
//! # What it does not implement
//!
//! Migration (dirty logging), in-flight tracking across a crash of this process, and zoned disks.

mod backend;
mod request;

use backend::Device;
use block::BlockDevice;
use memory::EventFd;
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use vfio_user::server::BindError;
use vhost_user_backend::{ShutdownHandle, VhostUserDaemon};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

/// Why a device could not be offered.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The socket is not to be had.
    #[error(transparent)]
    Socket(#[from] BindError),
    /// The path is that of a directory.
    #[error("{} is a directory: add the name of a socket to it", .0.display())]
    Directory(PathBuf),
    /// The system has no thread or descriptor.
    #[error("the device can not be served: {0}")]
    System(#[from] io::Error),
}

struct Shared {
    ending: AtomicBool,
    event: EventFd,
    frontend: Mutex<Option<(ShutdownHandle, Arc<Device>)>>,
    failures: Arc<AtomicU64>,
}

impl Shared {
    fn frontend(&self) -> MutexGuard<'_, Option<(ShutdownHandle, Arc<Device>)>> {
        self.frontend.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.event.signal();
        let frontend = self.frontend().take();
        if let Some((shutdown, _)) = frontend {
            shutdown.shutdown();
        }
    }
}

/// A virtio-blk device behind a socket. Dropping it is [`stop`](Self::stop).
pub struct VhostUserBlk {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
}

impl VhostUserBlk {
    /// Offers `disk` at the UNIX socket `path`; `id` is what a guest calls it (its serial number),
    /// of which 20 bytes count.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(disk: BlockDevice, path: &Path, id: &str) -> Result<Self, StartError> {
        if path.is_dir() {
            return Err(StartError::Directory(path.to_owned()));
        }
        let listener = vfio_user::Listener::bind(path)?;
        let shared = Arc::new(Shared {
            ending: AtomicBool::new(false),
            event: EventFd::new()?,
            frontend: Mutex::default(),
            failures: Arc::default(),
        });
        let (ours, id) = (Arc::clone(&shared), id.to_owned());
        let thread = std::thread::Builder::new()
            .name("vhost-user-blk".into())
            .spawn(move || accept(&listener, &disk, &id, &ours))?;
        Ok(Self { shared, thread: Some(thread), path: path.to_owned() })
    }

    /// The socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Hangs up, and finishes the requests that were taken. How many requests failed because the
    /// disk did.
    #[must_use]
    pub fn stop(self) -> u64 {
        let failures = Arc::clone(&self.shared.failures);
        drop(self);
        failures.load(Ordering::Relaxed)
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

/// Serves one frontend after the other.
fn accept(listener: &vfio_user::Listener, disk: &BlockDevice, id: &str, shared: &Shared) {
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
        match serve(listener, disk, id, shared) {
            Ok(()) => tracing::debug!("the frontend is gone"),
            Err(error) => tracing::warn!("a frontend was sent away: {error}"),
        }
    }
}

type Failed = Box<dyn std::error::Error + Send + Sync>;

fn serve(
    listener: &vfio_user::Listener,
    disk: &BlockDevice,
    id: &str,
    shared: &Shared,
) -> Result<(), Failed> {
    let device = Arc::new(Device::new(disk, id, Arc::clone(&shared.failures))?);
    let memory = GuestMemoryAtomic::new(GuestMemoryMmap::<()>::new());
    let mut daemon = VhostUserDaemon::new("vhost-user".into(), Arc::clone(&device), memory)
        .map_err(|error| error.to_string())?;
    let handlers = daemon.get_epoll_handlers();
    for (lane, handler) in handlers.iter().enumerate() {
        if let Some(event) = device.event(lane) {
            handler.register_listener(event, EventSet::IN, device.event_number())?;
        }
    }
    // The same socket; the file belongs to our listener.
    let socket = UnixListener::from(listener.as_fd().try_clone_to_owned()?);
    daemon.start(&mut socket.into()).map_err(|error| error.to_string())?;
    if let Some(handle) = daemon.shutdown_handle() {
        *shared.frontend() = Some((handle, Arc::clone(&device)));
    }
    if shared.ending.load(Ordering::SeqCst) {
        shared.end();
    }
    let outcome = daemon.wait();
    shared.frontend().take();
    // What was taken is carried out, even if nobody waits for the answer any more.
    (0..handlers.len()).for_each(|lane| device.finish(lane));
    // Ends the threads of the queues.
    drop(daemon);
    outcome.map_err(|error| error.to_string().into())
}
