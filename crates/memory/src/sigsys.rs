//! A process in a sandbox that makes a system call which its filter forbids.
//!
//! Such a call is not carried out; the system raises SIGSYS in the thread that made it. The handler
//! here says which call it was and ends the process by that signal, which whoever started it sees.
//! A call that fails instead would be a silent fault somewhere else.

use std::io;
use std::sync::OnceLock;

/// The name of a system call.
pub type NameOf = fn(usize) -> Option<&'static str>;

static NAME_OF: OnceLock<NameOf> = OnceLock::new();

/// The longest line, a name of any length cut.
const LINE: usize = 200;

/// What the system says of a forbidden call, at the start of a `siginfo_t`.
#[repr(C)]
struct Forbidden {
    signal: libc::c_int,
    errno: libc::c_int,
    code: libc::c_int,
    address: *const libc::c_void,
    number: libc::c_int,
    architecture: libc::c_uint,
}

/// From now on a call that the filter of this process forbids ends it with a line on standard
/// error. `name_of` may do nothing that a signal handler may not.
///
/// # Errors
/// The system's.
pub fn report(name_of: NameOf) -> io::Result<()> {
    let _ = NAME_OF.set(name_of);
    // SAFETY: the structure is valid for the call, zero is a valid `sigaction`, and the handler has
    // the signature that SA_SIGINFO asks for.
    let outcome = unsafe {
        let mut new: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_sigsys;
        new.sa_sigaction = handler as usize;
        new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut new.sa_mask);
        libc::sigaction(libc::SIGSYS, &raw const new, std::ptr::null_mut())
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes a system call without arguments, whatever it is and comes to: for tests of filters.
#[cfg(feature = "attempts")]
#[doc(hidden)]
pub fn attempt(number: i32) -> io::Result<()> {
    // SAFETY: without arguments there is nothing that a call could write to but this process as a
    // whole, and the caller has one for that.
    match unsafe { libc::syscall(number.into(), 0, 0, 0, 0, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Async-signal-safe: a buffer on the stack and system calls only.
extern "C" fn on_sigsys(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to an SA_SIGINFO handler, which is longer than
    // what is read of it. If the signal was sent by somebody else, there are other numbers there.
    let number = unsafe { (*info.cast::<Forbidden>()).number };
    let name = usize::try_from(number).ok().and_then(|number| NAME_OF.get()?(number));
    let mut line = Line { bytes: [0; LINE], len: 0 };
    line.message(name, number);
    // SAFETY: both calls get memory that is valid for their time. Who reads standard error may
    // stand still, and this process is to end all the same. The last call is as forbidden as the
    // first, and the signal is blocked while its handler runs: then the system ends the process by
    // it, whoever has changed what.
    unsafe {
        let mut there = libc::pollfd { fd: 2, events: libc::POLLOUT, revents: 0 };
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        if libc::ppoll(&raw mut there, 1, &raw const now, std::ptr::null()) == 1 {
            libc::write(2, line.bytes.as_ptr().cast(), line.len);
        }
        libc::syscall(libc::SYS_ptrace, 0, 0, 0, 0);
        libc::abort();
    }
}

/// A line that needs no memory but its own.
struct Line {
    bytes: [u8; LINE],
    len: usize,
}

impl Line {
    fn message(&mut self, name: Option<&str>, number: i32) {
        self.add("error: the sandbox forbids the system call ");
        match name {
            Some(name) => {
                self.add(name);
                self.add(" (");
                self.number(number);
                self.add(")");
            }
            None => self.number(number),
        }
        self.add(", which this process has made: it ends now (SIGSYS)\n");
    }

    fn add(&mut self, text: &str) {
        let room = self.bytes.get_mut(self.len..).unwrap_or_default();
        for (to, from) in room.iter_mut().zip(text.as_bytes()) {
            *to = *from;
            self.len += 1;
        }
    }

    fn number(&mut self, number: i32) {
        if number < 0 {
            self.add("-");
        }
        let (mut digits, mut rest, mut first) = ([0; 10], number.unsigned_abs(), 10);
        loop {
            first -= 1;
            if let Some(digit) = digits.get_mut(first) {
                *digit = b'0' + (rest % 10) as u8;
            }
            rest /= 10;
            if rest == 0 || first == 0 {
                break;
            }
        }
        self.add(str::from_utf8(digits.get(first..).unwrap_or_default()).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::{LINE, Line};

    #[test]
    fn a_line_is_made_without_memory() {
        let say = |name, number| {
            let mut line = Line { bytes: [0; LINE], len: 0 };
            line.message(name, number);
            String::from_utf8(line.bytes[..line.len].to_vec()).unwrap()
        };
        assert_eq!(
            say(Some("execve"), 59),
            "error: the sandbox forbids the system call execve (59), which this process has made: \
             it ends now (SIGSYS)\n"
        );
        assert!(say(None, 0).contains("call 0, which"));
        assert!(say(None, i32::MAX).contains("call 2147483647, which"));
        assert!(say(None, i32::MIN).contains("call -2147483648, which"));
        assert_eq!(say(Some(&"x".repeat(LINE)), 1).len(), LINE);
    }
}
