//! Deferred close: separate threads close the descriptors that a client has sent. For processes
//! whose main thread must not block.
//!
//! Closing the last descriptor of a memfd frees all of its pages, which takes a second for some
//! GiB. Closing other files may take even longer. During that time, a supervisor would not respond
//! to its server processes.

use rustix::process::Signal;
use shadowbell_memory::process::{block_signals, unblock_signals};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Number of waiting descriptors from which on no more should be [received](is_behind).
const MANY: usize = 1024;
/// Maximum number of closing threads. More than one run only if many descriptors wait: a descriptor
/// may block its thread for ever.
const THREADS: usize = 4;

/// Signals that only the main thread handles.
const SIGNALS: [Signal; 6] =
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1, Signal::USR2, Signal::CHILD];

/// Closing threads of this process, if enabled.
static CLOSER: OnceLock<Closer> = OnceLock::new();

/// Handle of the closing threads.
struct Closer {
    /// Number of descriptors that wait or are being closed.
    waiting: Arc<AtomicUsize>,
    /// Number of threads, which are started when they are needed.
    threads: AtomicUsize,
    sender: Sender<OwnedFd>,
    fds: Arc<Mutex<Receiver<OwnedFd>>>,
}

impl Default for Closer {
    fn default() -> Self {
        let (sender, fds) = channel();
        let fds = Arc::new(Mutex::new(fds));
        Self { waiting: Arc::default(), threads: AtomicUsize::new(0), sender, fds }
    }
}

/// Enables deferred close in this process.
pub fn enable() {
    CLOSER.get_or_init(Closer::default);
}

/// Closes descriptors. Closing threads close them if they were [enabled](enable); otherwise this
/// thread does, at once.
pub fn close(fds: impl IntoIterator<Item = OwnedFd>) {
    match CLOSER.get() {
        Some(closer) => fds.into_iter().for_each(|fd| closer.close(fd)),
        None => fds.into_iter().for_each(drop),
    }
}

/// True if so many descriptors wait to be closed that no more should be received.
pub fn is_behind() -> bool {
    CLOSER.get().is_some_and(|closer| closer.waiting.load(Ordering::Relaxed) >= MANY)
}

impl Closer {
    fn close(&self, fd: OwnedFd) {
        let wanted = 1 + self.waiting.fetch_add(1, Ordering::Relaxed) * THREADS / MANY;
        if self.threads.load(Ordering::Relaxed) < wanted.min(THREADS) && self.start().is_ok() {
            self.threads.fetch_add(1, Ordering::Relaxed);
        }
        // The receiver exists as long as this handle, so this cannot fail.
        let _ = self.sender.send(fd);
    }

    fn start(&self) -> io::Result<()> {
        let (waiting, fds) = (Arc::clone(&self.waiting), Arc::clone(&self.fds));
        let signals = SIGNALS.map(Signal::as_raw);
        let _ = block_signals(&signals);
        let thread = std::thread::Builder::new().name("sb-close".into()).stack_size(64 << 10);
        let started = thread.spawn(move || {
            let next = || fds.lock().unwrap_or_else(PoisonError::into_inner).recv();
            while let Ok(fd) = next() {
                drop(fd);
                waiting.fetch_sub(1, Ordering::Release);
            }
        });
        let _ = unblock_signals(&signals);
        started.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::set_socket_linger;
    use shadowbell_testing::wait::{LIMIT, until};
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    /// Socket whose close takes five seconds (SO_LINGER), because the peer does not read.
    fn slow() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
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
        // Another thread closes what comes later.
        let (mut read, write) = io::pipe().unwrap();
        (0..MANY / THREADS).for_each(|_| closer.close(write.try_clone().unwrap().into()));
        closer.close(write.into());
        assert_eq!(std::io::Read::read(&mut read, &mut [0]).unwrap(), 0);
        // Dropping the reader lets the pending close finish.
        drop(reader);
        until("the close", || closer.waiting.load(Ordering::Acquire) == 0);
    }
}
