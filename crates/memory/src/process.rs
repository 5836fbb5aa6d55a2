//! What a process takes along when it replaces itself by another program, or was started with.

use rustix::io::FdFlags;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;

/// The descriptor with this number, if whoever started this process has left it to it.
///
/// Such a descriptor does not close when another program is executed, or it would not be here.
/// All that this program opens itself does. It is marked so as well when it is taken, so it can be
/// taken once. Standard input, output and error are not taken.
///
/// What other code has opened without that mark could be taken from it: this is for the beginning
/// of a program.
#[must_use]
pub fn take_inherited(number: RawFd) -> Option<OwnedFd> {
    if number <= 2 {
        return None;
    }
    // SAFETY: it is looked at by calls that do no harm if nothing is open under this number; the
    // borrow ends here.
    let looked_at = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = rustix::io::fcntl_getfd(looked_at).ok()?;
    if flags.contains(FdFlags::CLOEXEC) {
        return None;
    }
    rustix::io::fcntl_setfd(looked_at, flags | FdFlags::CLOEXEC).ok()?;
    // SAFETY: it is open, and nobody here has opened it, as it was not marked. From now on it is
    // marked, so nobody gets it twice.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Replaces this process by another program, with the same environment. Returns only if that
/// fails; then nothing has changed. Nothing is done to signals: what is ignored and blocked stays
/// so.
///
/// # Errors
/// Always: why it has failed.
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
    // SAFETY: strings that end with zero, and a list of them that ends with null; all of them live
    // until the call returns, if it does.
    unsafe { libc::execv(program.as_ptr(), pointers.as_ptr()) };
    io::Error::last_os_error()
}

/// From now on these signals wait, those that come to this thread, and to those that it starts;
/// if all threads have them wait, those that come to the process do.
///
/// # Errors
/// The system's.
pub fn block_signals(signals: &[i32]) -> io::Result<()> {
    change_mask(libc::SIG_BLOCK, signals)
}

/// The other way round: those that wait come now.
///
/// # Errors
/// The system's.
pub fn unblock_signals(signals: &[i32]) -> io::Result<()> {
    change_mask(libc::SIG_UNBLOCK, signals)
}

fn change_mask(how: libc::c_int, signals: &[i32]) -> io::Result<()> {
    // SAFETY: the set is made empty before it is used, and the calls write to nothing else.
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
    fn what_was_inherited_is_taken_once_and_nothing_else_is() {
        let (own, left) = io::pipe().unwrap();
        assert!(take_inherited(own.as_raw_fd()).is_none(), "it was opened here");
        assert!(take_inherited(1).is_none() && take_inherited(-1).is_none());
        assert!(take_inherited(RawFd::MAX).is_none());
        // As one is that was there before this program.
        let number = OwnedFd::from(left);
        rustix::io::fcntl_setfd(&number, FdFlags::empty()).unwrap();
        let number = std::os::fd::IntoRawFd::into_raw_fd(number);
        let taken = take_inherited(number).expect("it was left to us");
        assert!(take_inherited(number).is_none(), "twice");
        assert!(rustix::io::fcntl_getfd(&taken).unwrap().contains(FdFlags::CLOEXEC));
    }

    #[test]
    fn what_can_not_be_executed_changes_nothing() {
        let error = execute(OsStr::new("/nonexistent/program"), ["program"]);
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let error = execute(OsStr::new("a\0b"), ["program"]);
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn signals_wait_until_they_may_come() {
        block_signals(&[libc::SIGURG]).unwrap();
        unblock_signals(&[libc::SIGURG]).unwrap();
        assert!(block_signals(&[]).is_ok());
    }
}
