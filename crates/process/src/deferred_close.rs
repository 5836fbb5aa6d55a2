//! Deferred close: separate threads close the descriptors that a client has sent, because some
//! threads must not block.
//!
//! Closing the last descriptor of a memfd frees all of its pages. For some GiB, that takes a
//! second. Closing other files may take even longer. During that time, a supervisor would not
//! respond to its server processes.

use crate::signals::start_thread;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of waiting descriptors at which no more should be [received](is_behind).
const MANY: usize = 1024;
/// Maximum number of closing threads that are not blocked. More than one runs only if many
/// descriptors wait.
const THREADS: usize = 4;
/// Maximum number of closing threads: a descriptor may block its thread for ever.
const MOST_THREADS: usize = 32;
/// Time without a close after which all closing threads count as blocked.
const BLOCKED: Duration = Duration::from_secs(1);

/// Closing threads of this process.
static CLOSER: LazyLock<Closer> = LazyLock::new(Closer::default);
/// True if [`close`] uses the closing threads.
static IS_ENABLED: AtomicBool = AtomicBool::new(false);

/// Handle of the closing threads.
struct Closer {
    /// Number of descriptors that wait or are being closed.
    waiting: Arc<AtomicUsize>,
    /// Number of closing threads. A thread is started when it is needed.
    threads: AtomicUsize,
    began: Instant,
    /// Milliseconds from `began` to the last close, or to the arrival of the first waiting
    /// descriptor.
    progress: Arc<AtomicU64>,
    sender: Sender<OwnedFd>,
    fds: Arc<Mutex<Receiver<OwnedFd>>>,
}

impl Default for Closer {
    fn default() -> Self {
        let (sender, fds) = channel();
        let fds = Arc::new(Mutex::new(fds));
        let (waiting, progress) = (Arc::default(), Arc::default());
        let (threads, began) = (AtomicUsize::new(0), Instant::now());
        Self { waiting, threads, began, progress, sender, fds }
    }
}

/// Makes [`close`] defer in this process.
pub fn enable() {
    IS_ENABLED.store(true, Ordering::Relaxed);
}

/// Closes descriptors. Closing threads close them if they were [enabled](enable); otherwise this
/// thread does, at once.
pub fn close(fds: impl IntoIterator<Item = OwnedFd>) {
    if IS_ENABLED.load(Ordering::Relaxed) {
        defer(fds);
    } else {
        fds.into_iter().for_each(drop);
    }
}

/// Closes descriptors on closing threads, even if [`enable`] was not called. Descriptors that wait
/// to be closed count towards the limit of open files.
pub fn defer(fds: impl IntoIterator<Item = OwnedFd>) {
    fds.into_iter().for_each(|fd| CLOSER.close(fd));
}

/// True if so many descriptors wait to be closed that no more should be received. False if all
/// closing threads are blocked: the client whose descriptors block them must not delay other
/// clients for ever.
pub fn is_behind() -> bool {
    CLOSER.is_behind()
}

/// True if a descriptor waits to be closed or is being closed.
pub fn is_waiting() -> bool {
    CLOSER.waiting.load(Ordering::Acquire) != 0
}

impl Closer {
    fn close(&self, fd: OwnedFd) {
        let waiting = self.waiting.fetch_add(1, Ordering::Relaxed);
        if waiting == 0 {
            self.progress.store(now(self.began), Ordering::Relaxed);
        }
        let threads = self.threads.load(Ordering::Relaxed);
        let is_wanted = threads < (1 + waiting * THREADS / MANY).min(THREADS)
            || threads < MOST_THREADS && threads <= waiting && self.is_blocked();
        if is_wanted && self.start().is_ok() {
            self.threads.fetch_add(1, Ordering::Relaxed);
        }
        // The receiver exists as long as this handle, so this cannot fail.
        let _ = self.sender.send(fd);
    }

    fn is_blocked(&self) -> bool {
        let last = Duration::from_millis(self.progress.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(last) > BLOCKED
    }

    fn is_behind(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) >= MANY && !self.is_blocked()
    }

    fn start(&self) -> io::Result<()> {
        let (waiting, fds) = (Arc::clone(&self.waiting), Arc::clone(&self.fds));
        let (progress, began) = (Arc::clone(&self.progress), self.began);
        start_thread("sb-close", 64 << 10, move || {
            let next = || fds.lock().unwrap_or_else(PoisonError::into_inner).recv();
            while let Ok(fd) = next() {
                drop(fd);
                progress.store(now(began), Ordering::Relaxed);
                waiting.fetch_sub(1, Ordering::Release);
            }
        })
    }
}

/// Milliseconds since `began`.
fn now(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::{
        set_socket_linger, set_socket_recv_buffer_size, set_socket_send_buffer_size,
    };
    use shadowbell_testing::wait::{LIMIT, until};
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    /// Socket whose close does not end (SO_LINGER) until the peer, which does not read, is dropped.
    fn slow() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        set_socket_recv_buffer_size(&listener, 4096).unwrap();
        let mut writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
        set_socket_send_buffer_size(&writer, 4096).unwrap();
        writer.set_nonblocking(true).unwrap();
        while writer.write(&[0; 65536]).is_ok() {}
        writer.set_nonblocking(false).unwrap();
        set_socket_linger(&writer, Some(LIMIT)).unwrap();
        (writer.into(), reader)
    }

    #[test]
    fn a_slow_close_does_not_block_the_caller() {
        let closer = Closer::default();
        let (slow, reader) = slow();
        closer.close(slow);
        assert_eq!(closer.waiting.load(Ordering::Acquire), 1, "it was closed here");
        // The first closing thread is blocked, so another one closes the next descriptors.
        let (mut read, write) = io::pipe().unwrap();
        (0..MANY / THREADS).for_each(|_| closer.close(write.try_clone().unwrap().into()));
        closer.close(write.into());
        assert_eq!(std::io::Read::read(&mut read, &mut [0]).unwrap(), 0);
        // Dropping the reader lets the pending close finish.
        drop(reader);
        until("the close", || closer.waiting.load(Ordering::Acquire) == 0);
    }

    /// Descriptors that cannot be closed do not delay later messages and closes for ever.
    #[test]
    fn blocked_threads_are_replaced_and_do_not_count() {
        let closer = Closer::default();
        let (blocked, readers): (Vec<_>, Vec<_>) = (0..MOST_THREADS).map(|_| slow()).unzip();
        let mut blocked = blocked.into_iter();
        let (mut read, write) = io::pipe().unwrap();
        let waiting = || closer.waiting.load(Ordering::Acquire);
        let give = || closer.close(write.try_clone().unwrap().into());
        blocked.by_ref().take(MOST_THREADS - 1).for_each(|fd| closer.close(fd));
        until("the closes of the last thread", || {
            give();
            waiting() == MOST_THREADS - 1
        });
        blocked.for_each(|fd| closer.close(fd));
        (0..MANY).for_each(|_| give());
        until("the end of the delay", || !closer.is_behind());
        assert!(waiting() >= MANY);
        drop((write, readers));
        assert_eq!(std::io::Read::read(&mut read, &mut [0]).unwrap(), 0);
    }
}
