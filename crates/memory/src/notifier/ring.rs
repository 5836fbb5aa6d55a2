//! Signals by io_uring: a ring signals its registered eventfd when a request completes.

use super::id::{Id, WeakId};
use io_uring::{IoUring, Probe, opcode};
use parking_lot::Mutex;
use shadowbell_uring::{Allowed, Reserve, register};
use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::LazyLock;

/// Largest number of retries of a system call that fails temporarily.
const RETRIES: u32 = 100;
/// Number of entries of a ring. A ring has one request in flight at a time.
const ENTRIES: u32 = 2;
/// Number of eventfds that a thread signals by one system call each. A signal to a further eventfd
/// takes three system calls.
const RINGS_OF_A_THREAD: usize = 64;

/// Rings of the process. A ring can only execute no-operation requests, and signal its eventfd when
/// a request completes.
static RESERVE: Reserve = Reserve::new("signals", || {
    let allowed = Allowed {
        opcodes: &[opcode::Nop::CODE],
        registers: &[register::EVENTFD, register::UNREGISTER_EVENTFD],
        ..Allowed::NOTHING
    };
    allowed.build(&IoUring::builder(), ENTRIES, |_| Ok(()))
});

/// Ring that threads share if the sealed reserve has no ring left for them.
static SHARED: Mutex<Option<Ring>> = Mutex::new(None);

/// Creates up to `count` rings. Must be called before the process enters its system call filter. No
/// ring is created later. Returns the number of rings.
pub(super) fn prepare(count: usize) -> usize {
    if !is_available() {
        return 0;
    }
    // The shared ring exists even if `count` is 0, so that each thread can signal.
    *SHARED.lock() = Ring::new().ok();
    RESERVE.seal(count)
}

/// True if this kernel supports and permits io_uring, and changes a ring's eventfd without a wait.
/// Linux 5.18 and later do not wait; an operation that was added in 5.19 is used to detect that.
static IS_AVAILABLE: LazyLock<bool> = LazyLock::new(|| {
    let mut probe = Probe::new();
    let probing = IoUring::new(ENTRIES).and_then(|it| it.submitter().register_probe(&mut probe));
    probing.is_ok() && probe.is_supported(opcode::Socket::CODE) && Ring::new().is_ok()
});

thread_local! {
    static RINGS: RefCell<Rings> = RefCell::default();
}

/// Rings of a thread.
#[derive(Default)]
struct Rings {
    rings: Vec<Ring>,
    /// Index of the ring whose eventfd was last replaced.
    next: usize,
}

struct Ring {
    ring: IoUring,
    /// Registered eventfd. Its descriptor may be closed, because the ring holds the open file.
    event: Option<WeakId>,
}

pub(super) fn is_available() -> bool {
    *IS_AVAILABLE
}

/// Signals the eventfd. Returns true if it was signalled, or if the descriptor is no eventfd.
pub(super) fn notify(event: BorrowedFd<'_>, id: &Id) -> bool {
    // The result is false in a thread that ends, whose rings may have been dropped.
    RINGS.try_with(|rings| rings.borrow_mut().notify(event, id)).unwrap_or(false)
}

impl Rings {
    fn notify(&mut self, event: BorrowedFd<'_>, id: &Id) -> bool {
        let found = self.rings.iter().position(|ring| ring.has(id));
        let Some(at) = found.or_else(|| self.other()) else {
            let mut shared = SHARED.lock();
            let notified = shared.as_mut().map(|ring| ring.notify(event, id));
            if notified.as_ref().is_some_and(Result::is_err) {
                *shared = None;
            }
            return notified.is_some_and(|notified| notified.unwrap_or(false));
        };
        let Some(ring) = self.rings.get_mut(at) else { return false };
        // A ring with a failed request is dropped. Otherwise the request could signal another
        // eventfd later.
        ring.notify(event, id).unwrap_or_else(|_| {
            self.rings.swap_remove(at);
            false
        })
    }

    /// Selects a ring for another eventfd: first a ring whose eventfd was dropped, then a new ring,
    /// then the existing rings in turn. So clients that connect and disconnect do not accumulate
    /// rings.
    fn other(&mut self) -> Option<usize> {
        if let Some(at) = self.rings.iter().position(Ring::is_idle) {
            return Some(at);
        }
        if self.rings.len() < RINGS_OF_A_THREAD
            && let Ok(ring) = Ring::new()
        {
            self.rings.push(ring);
            return Some(self.rings.len() - 1);
        }
        self.next = (self.next + 1).checked_rem(self.rings.len())?;
        Some(self.next)
    }
}

impl Drop for Rings {
    /// Puts the rings back into the reserve when the thread ends.
    fn drop(&mut self) {
        for Ring { ring, event } in self.rings.drain(..) {
            if event.is_none() || ring.submitter().unregister_eventfd().is_ok() {
                RESERVE.put_back(ring);
            }
        }
    }
}

impl Ring {
    fn new() -> io::Result<Self> {
        Ok(Self { ring: RESERVE.take()?, event: None })
    }

    fn has(&self, id: &Id) -> bool {
        self.event.as_ref().is_some_and(|event| event.is(id))
    }

    /// True if the ring has no registered eventfd, or if that eventfd was dropped.
    fn is_idle(&self) -> bool {
        self.event.as_ref().is_none_or(WeakId::is_dropped)
    }

    /// Signals the eventfd. Returns false if the kernel has no memory to register it.
    ///
    /// # Errors
    ///
    /// The error of the system call. The ring is unusable afterwards.
    fn notify(&mut self, event: BorrowedFd<'_>, id: &Id) -> io::Result<bool> {
        if !self.has(id) {
            if self.event.take().is_some() {
                self.ring.submitter().unregister_eventfd()?;
            }
            if let Err(error) = self.ring.submitter().register_eventfd(event.as_raw_fd()) {
                return Ok(error.kind() != io::ErrorKind::OutOfMemory);
            }
            self.event = Some(id.downgrade());
        }
        self.complete_one()?;
        Ok(true)
    }

    fn complete_one(&mut self) -> io::Result<()> {
        // SAFETY: the entry refers to no memory.
        let pushed = unsafe { self.ring.submission().push(&opcode::Nop::new().build()) };
        pushed.map_err(io::Error::other)?;
        let mut tries = 0;
        while let Err(error) = self.ring.submit() {
            tries += 1;
            if tries == RETRIES {
                return Err(error);
            }
        }
        self.ring.completion().for_each(drop);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::{AsFd, OwnedFd};

    #[test]
    fn several_eventfds_by_turns_each_count_their_own() {
        if !is_available() {
            return;
        }
        // The eventfds are blocking, and the count of one is full. No signal waits.
        let events = [0, 1, 2].map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let others = [(); RINGS_OF_A_THREAD].map(|()| eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let others = others.map(|fd| (fd, Id::new()));
        let ids = [0, 1, 2, 3].map(|_| Id::new());
        rustix::io::write(&events[2], &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for turn in 0..100 {
            assert!(notify(events[0].as_fd(), &ids[0]));
            assert!(notify(events[0].as_fd(), &ids[0]));
            if turn % 2 == 0 {
                assert!(notify(events[1].as_fd(), &ids[1]));
            }
            assert!(notify(events[2].as_fd(), &ids[2]));
            if turn % 4 == 0 {
                others.iter().for_each(|(fd, id)| assert!(notify(fd.as_fd(), id)));
            }
            // A descriptor that is no eventfd is skipped.
            assert!(notify(std::io::stderr().as_fd(), &ids[3]));
        }
        let count = |event: &OwnedFd| {
            let mut count = [0; 8];
            rustix::io::read(event, &mut count).unwrap();
            u64::from_ne_bytes(count)
        };
        assert_eq!([count(&events[0]), count(&events[1])], [200, 50]);
        assert!(count(&events[2]) >= u64::MAX - 1);
        assert!(others.iter().all(|(fd, _)| count(fd) == 25));
        assert_eq!(RINGS.with_borrow(|rings| rings.rings.len()), RINGS_OF_A_THREAD);
    }

    #[test]
    fn clients_that_come_and_go_leave_no_ring_behind() {
        if !is_available() {
            return;
        }
        for _ in 0..10 {
            for _ in 0..4 {
                let client =
                    [(); 3].map(|()| (eventfd(0, EventfdFlags::CLOEXEC).unwrap(), Id::new()));
                for (fd, id) in &client {
                    assert!(notify(fd.as_fd(), id));
                }
            }
            assert_eq!(RINGS.with_borrow(|rings| rings.rings.len()), 3);
        }
    }
}
