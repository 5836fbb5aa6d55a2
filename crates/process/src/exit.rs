//! Exit statuses of the program, and output of errors.

use crate::error_text::without_numbers;
use crate::logging;
use crate::output::without_control;
use std::fmt;
use std::io;
use std::process::ExitCode;

/// Exit status of the program, for all verbs. docs/reference/exit-status.md has the same table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitStatus {
    /// Success.
    Success = 0,
    /// Failure during execution.
    Failed = 1,
    /// Unusable input. The parser of the command line exits with the same status, and the systemd
    /// units do not restart a service that ends with it.
    BadInput = 2,
    /// The named object does not exist.
    NotFound = 3,
    /// Not possible in the current state of the server.
    Conflict = 4,
    /// The storage had not answered all requests when the service ended.
    Unanswered = 5,
}

impl ExitStatus {
    /// All exit statuses.
    pub const ALL: [Self; 6] = [
        Self::Success,
        Self::Failed,
        Self::BadInput,
        Self::NotFound,
        Self::Conflict,
        Self::Unanswered,
    ];

    /// Meaning for users.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Success => "success; `serve`: ended by a signal",
            Self::Failed => {
                "failure during execution; `serve`: the service has failed, a disk may have lost \
                 data, or it could not start for a cause that can pass: a disk or a directory is \
                 missing, or a disk, a socket or an address is in use"
            }
            Self::BadInput => {
                "unusable input: the command line, a configuration file, or a disk or a path that \
                 they name"
            }
            Self::NotFound => "no such server, controller, disk or export",
            Self::Conflict => {
                "not possible in the current state of the server, or only with `--force`"
            }
            Self::Unanswered => {
                "`serve`: the storage had not answered all requests within `--stop-timeout`"
            }
        }
    }
}

/// [`ExitStatus::Success`].
pub const SUCCESS: u8 = ExitStatus::Success as u8;
/// [`ExitStatus::Failed`].
pub const FAILED: u8 = ExitStatus::Failed as u8;
/// [`ExitStatus::BadInput`].
pub const BAD_INPUT: u8 = ExitStatus::BadInput as u8;
/// [`ExitStatus::NotFound`].
pub const NOT_FOUND: u8 = ExitStatus::NotFound as u8;
/// [`ExitStatus::Conflict`].
pub const CONFLICT: u8 = ExitStatus::Conflict as u8;
/// [`ExitStatus::Unanswered`].
pub const UNANSWERED: u8 = ExitStatus::Unanswered as u8;

/// Help text about exit statuses, after `text`.
#[must_use]
pub fn help(text: &str) -> String {
    let lines = ExitStatus::ALL.map(|status| format!("  {}  {}\n", status as u8, status.meaning()));
    let gap = if text.is_empty() { "" } else { "\n\n" };
    format!(
        "{text}{gap}Exit status:\n{}After an internal error, the program ends with SIGABRT (134 in a \
         shell), so that it can be restarted",
        lines.concat()
    )
}

/// Error with its exit status.
#[derive(Debug)]
struct WithStatus {
    status: u8,
    /// True if `--force` overrides the refusal.
    needs_force: bool,
    /// True if the same input may be usable later.
    is_transient: bool,
    error: anyhow::Error,
}

impl WithStatus {
    fn error(status: u8, error: impl Into<anyhow::Error>) -> anyhow::Error {
        let error = error.into();
        anyhow::Error::new(Self { status, needs_force: false, is_transient: false, error })
    }
}

impl fmt::Display for WithStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for WithStatus {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// Marks an error as an error of the user's input. If it reaches `main`, with or without added
/// context, the exit status is [`BAD_INPUT`].
pub fn bad_input(error: impl Into<anyhow::Error>) -> anyhow::Error {
    WithStatus::error(BAD_INPUT, error)
}

/// Marks an error with the exit status [`NOT_FOUND`].
pub fn not_found(error: impl Into<anyhow::Error>) -> anyhow::Error {
    WithStatus::error(NOT_FOUND, error)
}

/// Marks an error with the exit status [`CONFLICT`].
pub fn conflict(error: impl Into<anyhow::Error>) -> anyhow::Error {
    WithStatus::error(CONFLICT, error)
}

/// Marks an error as a refusal that `--force` overrides. The exit status is [`CONFLICT`].
pub fn needs_force(error: impl Into<anyhow::Error>) -> anyhow::Error {
    let error = error.into();
    let status = CONFLICT;
    anyhow::Error::new(WithStatus { status, needs_force: true, is_transient: false, error })
}

/// Marks an error of the user's input whose cause can pass without a change of the input: a file
/// is missing or in use. The exit status is [`BAD_INPUT`], and [`FAILED`] for a
/// [service](for_service).
pub fn unavailable(error: impl Into<anyhow::Error>) -> anyhow::Error {
    let error = error.into();
    let status = BAD_INPUT;
    anyhow::Error::new(WithStatus { status, needs_force: false, is_transient: true, error })
}

/// Marks an error of the user's input by its cause: as [`unavailable`] if an error of the system
/// can pass, otherwise as [`bad_input`].
pub fn unusable(error: impl Into<anyhow::Error>) -> anyhow::Error {
    let error = error.into();
    let is_transient = error.chain().filter_map(|cause| cause.downcast_ref()).any(can_pass);
    if is_transient { unavailable(error) } else { bad_input(error) }
}

/// True if a retry of the same operation may succeed.
fn can_pass(error: &io::Error) -> bool {
    use io::ErrorKind;
    let is_limit = || {
        use rustix::io::Errno;
        let errno = Errno::from_io_error(error);
        matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NODEV))
    };
    matches!(
        error.kind(),
        ErrorKind::NotFound
            | ErrorKind::AddrInUse
            | ErrorKind::AddrNotAvailable
            | ErrorKind::ResourceBusy
            | ErrorKind::WouldBlock
            | ErrorKind::TimedOut
            | ErrorKind::StorageFull
            | ErrorKind::ConnectionRefused
            | ErrorKind::ConnectionReset
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
            | ErrorKind::NetworkDown
    ) || is_limit()
}

/// Converts the error of a service: if its cause can pass, the exit status is [`FAILED`], because
/// the units do not restart a service that ends with [`BAD_INPUT`].
#[must_use]
pub fn for_service(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<WithStatus>() {
        Some(WithStatus { is_transient: true, .. }) => WithStatus::error(FAILED, error),
        _ => error,
    }
}

/// True if `--force` overrides the refusal.
#[must_use]
pub fn is_forceable(error: &anyhow::Error) -> bool {
    error.downcast_ref::<WithStatus>().is_some_and(|error| error.needs_force)
}

/// Exit status of an error that has reached `main`.
#[must_use]
pub fn status(error: &anyhow::Error) -> u8 {
    if is_broken_pipe(error) {
        SUCCESS
    } else {
        error.downcast_ref::<WithStatus>().map_or(FAILED, |error| error.status)
    }
}

/// True if the reader of this program's output, such as `head`, has closed the pipe. That is not a
/// failure. Only an error whose outermost layer is an I/O error counts: a broken pipe as the cause
/// of another error, such as the socket of a dead server, is a failure.
#[must_use]
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Prints an error on standard error and returns the exit status.
#[must_use]
pub fn report(error: &anyhow::Error) -> ExitCode {
    if !is_broken_pipe(error) {
        logging::final_message(&format!("shadowbell: {}\n", without_control(&line(error))));
    }
    ExitCode::from(status(error))
}

/// Error text with the texts of its causes. A cause is left out if its text is already included.
#[must_use]
pub fn line(error: &anyhow::Error) -> String {
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

/// Advice for errors of the system whose text suggests no remedy.
fn advice(error: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    let error = error.downcast_ref::<io::Error>()?;
    match rustix::io::Errno::from_io_error(error)? {
        // `descriptor_limit` has raised the soft limit already.
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
    fn added_context_keeps_the_exit_status() {
        let error = Err::<(), _>(bad_input(anyhow::anyhow!("no such disk")))
            .context("controller vm0")
            .unwrap_err();
        assert_eq!(status(&error), BAD_INPUT);
        assert_eq!(format!("{error:#}"), "controller vm0: no such disk");
        assert_eq!(status(&anyhow::anyhow!("no more memory")), FAILED);
    }

    #[test]
    fn a_service_is_restarted_after_a_cause_that_can_pass() {
        use io::ErrorKind::{AddrInUse, NotFound, PermissionDenied, ResourceBusy};
        let of = |kind| unusable(anyhow::Error::new(io::Error::from(kind)).context("export a"));
        for (error, expected) in [
            (of(AddrInUse), FAILED),
            (of(ResourceBusy), FAILED),
            (of(NotFound), FAILED),
            (of(PermissionDenied), BAD_INPUT),
            (unavailable(anyhow::anyhow!("in use")), FAILED),
            (bad_input(anyhow::anyhow!("no such option")), BAD_INPUT),
        ] {
            let error = error.context("vm.toml:3");
            let line = line(&error);
            assert_eq!(status(&error), BAD_INPUT, "{line}");
            let error = for_service(error);
            assert_eq!(status(&error), expected, "{line}");
            assert_eq!(super::line(&error), line);
        }
    }

    #[test]
    fn a_cause_in_the_text_is_not_repeated() {
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
    fn a_closed_output_pipe_is_no_failure() {
        let error =
            anyhow::Error::new(io::Error::from(io::ErrorKind::BrokenPipe)).context("printing");
        assert_eq!(status(&error), SUCCESS);
        #[derive(Debug, thiserror::Error)]
        #[error("the server is gone")]
        struct Gone(#[source] io::Error);
        let error = Gone(io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!(status(&anyhow::Error::new(error).context("vm0")), FAILED);
    }
}
