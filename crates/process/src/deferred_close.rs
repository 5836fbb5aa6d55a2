//! Deferred close: a separate thread closes the descriptors that a client has sent. For processes
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

/// Maximum number of descriptors that wait to be closed. Beyond it, the caller closes descriptors
/// itself, because they are a limited resource. The limit is not reached in practice: memory is
/// freed faster than clients can fill it.
const MAX_WAITING: usize = 1024;

/// Signals that only the main thread handles.
const SIGNALS: [Signal; 6] =
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1, Signal::USR2, Signal::CHILD];

/// Closing thread of this process, if enabled.
static CLOSER: OnceLock<Closer> = OnceLock::new();

/// Handle of the closing thread.
#[derive(Default)]
struct Closer {
    /// Number of descriptors that wait or are being closed.
    waiting: Arc<AtomicUsize>,
    /// Queue of the thread, which is started with the first descriptor.
    thread: OnceLock<Option<Mutex<Sender<OwnedFd>>>>,
}

/// Enables deferred close in this process.
pub fn enable() {
    CLOSER.get_or_init(Closer::default);
}

/// Closes descriptors. The closing thread closes them if it was [enabled](enable); otherwise this
/// thread does, at once.
pub fn close(fds: impl IntoIterator<Item = OwnedFd>) {
    match CLOSER.get() {
        Some(closer) => fds.into_iter().for_each(|fd| closer.close(fd)),
        None => fds.into_iter().for_each(drop),
    }
}

impl Closer {
    fn close(&self, fd: OwnedFd) {
        if self.waiting.load(Ordering::Relaxed) >= MAX_WAITING {
            return;
        }
        let start = || {
            let (sender, fds) = channel();
            self.start(fds).ok().map(|()| Mutex::new(sender))
        };
        let Some(thread) = self.thread.get_or_init(start) else { return };
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if thread.lock().unwrap_or_else(PoisonError::into_inner).send(fd).is_err() {
            self.waiting.fetch_sub(1, Ordering::Release);
        }
    }

    fn start(&self, fds: Receiver<OwnedFd>) -> io::Result<()> {
        let waiting = Arc::clone(&self.waiting);
        let signals = SIGNALS.map(Signal::as_raw);
        let _ = block_signals(&signals);
        let thread = std::thread::Builder::new().name("sb-close".into()).stack_size(64 << 10);
        let started = thread.spawn(move || {
            for fd in fds {
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
        // Dropping the reader lets the pending close finish.
        drop(reader);
        until("the close", || closer.waiting.load(Ordering::Acquire) == 0);
    }
}
