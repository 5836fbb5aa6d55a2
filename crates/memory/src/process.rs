//! Inherited descriptors, `exec`, and signal masks.

use rustix::io::FdFlags;
use std::ffi::{CString, OsStr};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;

/// Takes ownership of the descriptor `number` if the parent process passed it.
///
/// An inherited descriptor does not have the close-on-exec flag, but all descriptors that this
/// program opens have it. This call sets the flag, so that a descriptor can be taken only once.
/// Standard input, output and error are not taken.
///
/// This function would also take descriptors that other code has opened without the flag. So it is
/// only for the start of a program.
#[must_use]
pub fn take_inherited(number: RawFd) -> Option<OwnedFd> {
    if number <= 2 {
        return None;
    }
    // SAFETY: the number is used only by calls that fail without an effect if it is not open. The
    // borrow ends before the descriptor is owned.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = rustix::io::fcntl_getfd(borrowed).ok()?;
    if flags.contains(FdFlags::CLOEXEC) {
        return None;
    }
    rustix::io::fcntl_setfd(borrowed, flags | FdFlags::CLOEXEC).ok()?;
    // SAFETY: the descriptor is open, and no code of this process has opened it, because the
    // close-on-exec flag was clear. The flag is set now, so no other caller gets the descriptor.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Replaces this process by another program, with the same environment (`execv`). Returns only if
/// `execv` fails, and then nothing has changed. The new program inherits ignored and blocked
/// signals.
///
/// # Errors
///
/// Always the reason of the failure.
pub fn execute(
    program: &OsStr,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> io::Error {
    let text = |text: &OsStr| CString::new(text.as_bytes());
    let arguments: Result<Vec<_>, _> =
        arguments.into_iter().map(|argument| text(argument.as_ref())).collect();
    let (Ok(program), Ok(arguments)) = (text(program), arguments) else {
        return io::ErrorKind::InvalidInput.into();
    };
    let mut pointers: Vec<_> = arguments.iter().map(|argument| argument.as_ptr()).collect();
    pointers.push(std::ptr::null());
    // SAFETY: the strings end with NUL, and their list ends with null. All of them live until the
    // call returns.
    unsafe { libc::execv(program.as_ptr(), pointers.as_ptr()) };
    io::Error::last_os_error()
}

/// Signals that this thread blocks until the value is dropped. The drop restores the signal mask
/// that the thread had before, so that a signal that was blocked already stays blocked.
pub struct BlockedSignals {
    before: libc::sigset_t,
    /// The mask belongs to the thread.
    _thread: PhantomData<*const ()>,
}

impl BlockedSignals {
    /// Blocks signals in this thread and in the threads that it starts meanwhile.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn new(signals: &[i32]) -> io::Result<Self> {
        let before = change_mask(libc::SIG_BLOCK, &set_of(signals))?;
        Ok(Self { before, _thread: PhantomData })
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // The call fails only for an invalid operation.
        let _ = change_mask(libc::SIG_SETMASK, &self.before);
    }
}

/// Unblocks signals in this thread, for a program that was executed with blocked signals. Pending
/// signals are delivered at once.
///
/// # Errors
/// The error of the system call.
pub fn unblock_signals(signals: &[i32]) -> io::Result<()> {
    change_mask(libc::SIG_UNBLOCK, &set_of(signals)).map(drop)
}

fn set_of(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: a set is plain data, `sigemptyset` initializes it, and the calls write to nothing
    // else.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// Changes the signal mask of this thread, and returns the mask before.
fn change_mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    let mut before = set_of(&[]);
    // SAFETY: both sets are initialized and live until the call returns.
    let outcome = unsafe { libc::pthread_sigmask(how, &raw const *set, &raw mut before) };
    if outcome == 0 { Ok(before) } else { Err(io::Error::from_raw_os_error(outcome)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn only_inherited_descriptors_are_taken_and_once() {
        let (own, left) = io::pipe().unwrap();
        assert!(take_inherited(own.as_raw_fd()).is_none(), "it was opened here");
        assert!(take_inherited(1).is_none() && take_inherited(-1).is_none());
        assert!(take_inherited(RawFd::MAX).is_none());
        // Simulates a descriptor that the process inherited.
        let number = OwnedFd::from(left);
        rustix::io::fcntl_setfd(&number, FdFlags::empty()).unwrap();
        let number = std::os::fd::IntoRawFd::into_raw_fd(number);
        let taken = take_inherited(number).expect("it was left to us");
        assert!(take_inherited(number).is_none(), "twice");
        assert!(rustix::io::fcntl_getfd(&taken).unwrap().contains(FdFlags::CLOEXEC));
    }

    #[test]
    fn a_failed_exec_changes_nothing() {
        let error = execute(OsStr::new("/nonexistent/program"), ["program"]);
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let error = execute(OsStr::new("a\0b"), ["program"]);
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    /// Signals that this thread blocks, as `/proc` shows them.
    fn blocked() -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        status.lines().find(|line| line.starts_with("SigBlk:")).unwrap().to_owned()
    }

    #[test]
    fn a_nested_block_leaves_the_outer_one() {
        let before = blocked();
        let outer = BlockedSignals::new(&[libc::SIGURG]).unwrap();
        let in_outer = blocked();
        assert_ne!(in_outer, before);
        drop(BlockedSignals::new(&[libc::SIGURG, libc::SIGWINCH]).unwrap());
        assert_eq!(blocked(), in_outer, "SIGURG stays blocked");
        drop(outer);
        assert_eq!(blocked(), before);
    }

    #[test]
    fn an_executed_program_can_unblock_signals() {
        let before = blocked();
        std::mem::forget(BlockedSignals::new(&[libc::SIGURG]).unwrap());
        unblock_signals(&[libc::SIGURG]).unwrap();
        assert_eq!(blocked(), before);
    }
}
