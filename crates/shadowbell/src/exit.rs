//! What the exit status of the program means.

use crate::logging;
use crate::plain_words::without_numbers;
use std::fmt;
use std::io;
use std::process::ExitCode;

/// What was asked for was done.
pub(crate) const FINE: u8 = 0;
/// It could be asked for, but something went wrong while it was done.
pub(crate) const FAILED: u8 = 1;
/// It can not be asked for like that: the command line, a configuration file, a disk or a path
/// that it names. The parser of the command line ends with this status too.
pub(crate) const BAD_INPUT: u8 = 2;
/// `ctl`: there is no such server, controller or namespace.
pub(crate) const NOT_THERE: u8 = 3;
/// `ctl`: it is not possible as the server is now.
pub(crate) const CONFLICT: u8 = 4;

/// The exit statuses, for the help text.
pub(crate) const HELP: &str = "\
Exit status:
  0  what was asked for was done
  1  something went wrong while it was done
  2  it can not be done as asked: the command line, a configuration file, or a disk or a path that \
they name
  3  ctl: there is no such server, controller or namespace
  4  ctl: it is not possible as the server is now
A fault of the program itself ends it by SIGABRT (134 to a shell), so that it can be started again";

/// An error with the exit status that it means.
#[derive(Debug)]
struct WithStatus(u8, anyhow::Error);

impl fmt::Display for WithStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.1.fmt(f)
    }
}

impl std::error::Error for WithStatus {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.1.source()
    }
}

/// Makes an error one of what the person asked for: the program ends with [`BAD_INPUT`] if it gets
/// as far as `main`, whatever context is added on the way.
pub(crate) fn bad_input(error: impl Into<anyhow::Error>) -> anyhow::Error {
    anyhow::Error::new(WithStatus(BAD_INPUT, error.into()))
}

/// The same for [`NOT_THERE`].
pub(crate) fn not_there(error: impl Into<anyhow::Error>) -> anyhow::Error {
    anyhow::Error::new(WithStatus(NOT_THERE, error.into()))
}

/// The same for [`CONFLICT`].
pub(crate) fn conflict(error: impl Into<anyhow::Error>) -> anyhow::Error {
    anyhow::Error::new(WithStatus(CONFLICT, error.into()))
}

/// The exit status for an error that got as far as `main`.
#[must_use]
pub(crate) fn status(error: &anyhow::Error) -> u8 {
    if is_broken_pipe(error) {
        FINE
    } else {
        error.downcast_ref::<WithStatus>().map_or(FAILED, |WithStatus(status, _)| *status)
    }
}

/// Whoever reads our output wants no more of it (`shadowbell trace FILE | head`), which is no
/// failure. A pipe that breaks further down (the socket of a server that died) is one: only an
/// error that began as one of output counts.
#[must_use]
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Says what went wrong, on standard error, and gives the exit status.
#[must_use]
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if !is_broken_pipe(error) {
        logging::last_words(&format!("shadowbell: {}\n", line(error)));
    }
    ExitCode::from(status(error))
}

/// An error with its causes. Many already say what their source says.
#[must_use]
pub(crate) fn line(error: &anyhow::Error) -> String {
    let mut line = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !line.contains(&cause) {
            line.push_str(": ");
            line.push_str(&cause);
        }
    }
    if let Some(advice) = error.chain().find_map(advice) {
        line.push_str("; ");
        line.push_str(advice);
    }
    without_numbers(&line).into_owned()
}

/// What to do about an error of the system that says nothing of it.
fn advice(error: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    let error = error.downcast_ref::<io::Error>()?;
    match rustix::io::Errno::from_io_error(error)? {
        // This process has raised what it may itself.
        rustix::io::Errno::MFILE => Some(
            "raise the hard limit of open files: `ulimit -Hn`, or LimitNOFILE= of the service's \
             unit",
        ),
        rustix::io::Errno::NFILE => Some("raise the system's limit: `sysctl fs.file-max`"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_bad_input_stays_one_under_context() {
        let error = Err::<(), _>(bad_input(anyhow::anyhow!("no such disk")))
            .context("controller vm0")
            .unwrap_err();
        assert_eq!(status(&error), BAD_INPUT);
        assert_eq!(format!("{error:#}"), "controller vm0: no such disk");
        assert_eq!(status(&anyhow::anyhow!("no more memory")), FAILED);
    }

    #[test]
    fn what_an_error_says_of_its_source_is_not_said_again() {
        let source = || io::Error::from_raw_os_error(1);
        let error =
            anyhow::Error::new(source()).context(format!("refused ({}); do this", source()));
        assert_eq!(line(&error), "refused (Operation not permitted); do this");
        let error = anyhow::Error::new(source()).context("refused");
        assert_eq!(line(&error), "refused: Operation not permitted");
    }

    #[test]
    fn too_many_open_files_come_with_advice() {
        let errno = rustix::io::Errno::MFILE.raw_os_error();
        let error = anyhow::Error::new(io::Error::from_raw_os_error(errno)).context("vm0.sock");
        let line = line(&error);
        assert!(line.starts_with("vm0.sock: Too many open files"), "{line}");
        assert!(line.ends_with("`ulimit -Hn`, or LimitNOFILE= of the service's unit"), "{line}");
    }

    #[test]
    fn a_reader_that_has_enough_is_no_failure() {
        let error =
            anyhow::Error::new(io::Error::from(io::ErrorKind::BrokenPipe)).context("printing");
        assert_eq!(status(&error), FINE);
        let error = shadowbell_driver::TransportError::Gone {
            device: "vm0".into(),
            doing: "ringing a doorbell",
            source: io::Error::from(io::ErrorKind::BrokenPipe).into(),
        };
        assert_eq!(status(&anyhow::Error::new(error).context("vm0")), FAILED);
    }
}
