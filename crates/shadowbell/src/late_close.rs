//! Descriptors that a client has sent are closed by a thread of their own, in a process that must
//! not be held up.
//!
//! Who closes the last descriptor of a memory file gives back all of its pages, which takes a
//! second for some GiB, and other files may take as long as somebody else likes. In a keeper that
//! would be time in which it hears none of its workers, whichever guest they serve.

use rustix::process::Signal;
use shadowbell_memory::process::{block_signals, unblock_signals};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// So many may wait to be closed. Memory takes longer to fill than to give back, so nobody gets
/// there in earnest; beyond it they are closed at once, as descriptors are scarce as well.
const MOST: usize = 1024;

/// Signals are the main thread's.
const SIGNALS: [Signal; 6] =
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1, Signal::USR2, Signal::CHILD];

/// That of this process, if it has one.
static CLOSER: OnceLock<Closer> = OnceLock::new();

/// The way to a thread that closes.
#[derive(Default)]
struct Closer {
    /// How many wait, or are being closed.
    waiting: Arc<AtomicUsize>,
    /// The thread is started when there is something to close.
    thread: OnceLock<Option<Mutex<Sender<OwnedFd>>>>,
}

/// From now on this process closes what it has of clients by another thread.
pub(crate) fn enable() {
    CLOSER.get_or_init(Closer::default);
}

/// Closes them, in a process that has [asked for it](enable) by another thread.
pub(crate) fn close(fds: impl IntoIterator<Item = OwnedFd>) {
    match CLOSER.get() {
        Some(closer) => fds.into_iter().for_each(|fd| closer.close(fd)),
        None => fds.into_iter().for_each(drop),
    }
}

impl Closer {
    fn close(&self, fd: OwnedFd) {
        if self.waiting.load(Ordering::Relaxed) >= MOST {
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

    /// A descriptor that takes five seconds to close: nobody reads what was written to it.
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
    fn who_closes_does_not_wait() {
        let closer = Closer::default();
        let (slow, reader) = slow();
        closer.close(slow);
        assert_eq!(closer.waiting.load(Ordering::Acquire), 1, "it was closed here");
        // It is closed by then, or soon.
        drop(reader);
        until("the close", || closer.waiting.load(Ordering::Acquire) == 0);
    }
}
