//! SIGSYS handler that reports a system call forbidden by the sandbox (seccomp).
//!
//! The kernel does not execute a forbidden call, but raises SIGSYS in the calling thread. The
//! handler prints the name of the call, and ends the process by SIGSYS, so that the parent process
//! sees the reason. If the filter made the call fail instead, the cause of the resulting error
//! would be hard to find.

use std::io;
use std::sync::OnceLock;

/// Function that returns the name of a system call.
pub type NameOf = fn(usize) -> Option<&'static str>;

static NAME_OF: OnceLock<NameOf> = OnceLock::new();

/// Longest line of output; a longer one is cut.
const LINE: usize = 200;

/// Leading fields of the `siginfo_t` that the kernel passes with SIGSYS for a forbidden system
/// call.
#[repr(C)]
struct Forbidden {
    signal: libc::c_int,
    errno: libc::c_int,
    code: libc::c_int,
    address: *const libc::c_void,
    number: libc::c_int,
    architecture: libc::c_uint,
}

/// Installs the handler: a forbidden system call then ends the process with a line on standard
/// error. `name_of` must be async-signal-safe.
///
/// # Errors
/// The error of the system call.
pub fn report(name_of: NameOf) -> io::Result<()> {
    let _ = NAME_OF.set(name_of);
    // SAFETY: the structure is valid for the call, zero is a valid `sigaction`, and the handler
    // has the signature that SA_SIGINFO requires.
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

/// Makes the system call `number`. For tests of filters.
#[cfg(feature = "attempts")]
#[doc(hidden)]
pub fn attempt(number: i64, arguments: [usize; 4]) -> io::Result<i64> {
    let [a, b, c, d] = arguments;
    // SAFETY: addresses are those of the test's constants. A call that is not refused can affect
    // only this process as a whole, which the test has started for this purpose.
    match unsafe { libc::syscall(number, a, b, c, d, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

/// Signal handler. It is async-signal-safe, because it uses only a buffer on the stack and system
/// calls.
extern "C" fn on_sigsys(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to an SA_SIGINFO handler, which is longer
    // than `Forbidden`. If another process sent the signal, the fields hold other numbers.
    let number = unsafe { (*info.cast::<Forbidden>()).number };
    let name = usize::try_from(number).ok().and_then(|number| NAME_OF.get()?(number));
    let mut line = Line { bytes: [0; LINE], len: 0 };
    line.message(name, number);
    // SAFETY: both calls get memory that is valid for their time. If the reader of standard error
    // is stopped, the write is skipped, so that the process ends in any case. Then the handler
    // calls `ptrace`, which is also forbidden. SIGSYS is blocked while its handler runs, so the
    // kernel ends the process by SIGSYS.
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

/// Line of text in a fixed buffer.
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
        self.add(": this process ends now (SIGSYS)\n");
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
    fn a_line_is_formatted_without_allocation() {
        let say = |name, number| {
            let mut line = Line { bytes: [0; LINE], len: 0 };
            line.message(name, number);
            String::from_utf8(line.bytes[..line.len].to_vec()).unwrap()
        };
        assert_eq!(
            say(Some("execve"), 59),
            "error: the sandbox forbids the system call execve (59): this process ends now (SIGSYS)\n"
        );
        assert!(say(None, 0).contains("call 0: this"));
        assert!(say(None, i32::MAX).contains("call 2147483647: this"));
        assert!(say(None, i32::MIN).contains("call -2147483648: this"));
        assert_eq!(say(Some(&"x".repeat(LINE)), 1).len(), LINE);
    }
}
