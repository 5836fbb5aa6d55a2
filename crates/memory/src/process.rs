//! Inherited descriptors, `exec`, and signal masks.

use rustix::io::FdFlags;
use std::ffi::{CString, OsStr};
use std::io;
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

/// Blocks signals in this thread and in threads that it starts later. A signal to the process
/// stays pending if all threads block it.
///
/// # Errors
/// The error of the system call.
pub fn block_signals(signals: &[i32]) -> io::Result<()> {
    change_mask(libc::SIG_BLOCK, signals)
}

/// Unblocks signals in this thread. Pending signals are delivered at once.
///
/// # Errors
/// The error of the system call.
pub fn unblock_signals(signals: &[i32]) -> io::Result<()> {
    change_mask(libc::SIG_UNBLOCK, signals)
}

fn change_mask(how: libc::c_int, signals: &[i32]) -> io::Result<()> {
    // SAFETY: the set is initialized before it is used, and the calls write to nothing else.
    let outcome = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut())
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(outcome)) }
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

    #[test]
    fn signals_are_blocked_and_unblocked() {
        block_signals(&[libc::SIGURG]).unwrap();
        unblock_signals(&[libc::SIGURG]).unwrap();
        assert!(block_signals(&[]).is_ok());
    }
}
