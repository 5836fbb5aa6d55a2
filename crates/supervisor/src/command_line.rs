//! Command line of the supervisor.

use crate::protocol;
use shadowbell_config::parse;
use std::ffi::{OsStr, OsString};
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

/// Option that marks a supervisor after exec and names the descriptor with its snapshot.
pub(super) const AS_SUPERVISOR: &str = "--as-supervisor";
/// Option for the time limit, in seconds, within which the service ends after a signal.
const STOP_TIMEOUT: &str = "--stop-timeout";
/// Default of the option `--stop-timeout`, in seconds.
pub const DEFAULT_STOP_TIMEOUT: u64 = 5;

/// Returns true if the verb of this command line is `serve` or `export`.
#[must_use]
pub fn is_service(arguments: &[OsString]) -> bool {
    let mut words = arguments.iter().skip(1).skip_while(|word| word.as_bytes().starts_with(b"-"));
    words.next().is_some_and(|word| is_verb(word))
}

/// Returns true if this command line starts a supervisor: it is `serve` or `export` without
/// `--no-supervisor`, `--check` or help. A server process (`--as-worker`) has no supervisor of its
/// own. Nor has an export with `--ublk`: the kernel keeps its requests until the next process is
/// started.
pub fn is_asked_for(arguments: &[OsString]) -> bool {
    let mut options = arguments.iter().take_while(|word| *word != "--");
    let without = ["--no-supervisor", protocol::AS_WORKER, "--check", "--ublk", "--help", "-h"];
    is_service(arguments)
        && !options.any(|word| {
            without.iter().any(|option| word == option)
                || word.as_encoded_bytes().starts_with(b"--check=")
        })
}

/// Path of the configuration file that the command line names.
pub(super) fn config_file(arguments: &[OsString]) -> Option<PathBuf> {
    value_of(arguments, "--config").map(PathBuf::from)
}

/// Time limit within which the service ends after a signal: [`STOP_TIMEOUT`] on the command line,
/// or its default.
pub(super) fn stop_timeout(arguments: &[OsString]) -> Duration {
    let time = value_of(arguments, STOP_TIMEOUT).and_then(|text| parse::time(text.to_str()?).ok());
    time.unwrap_or(Duration::from_secs(DEFAULT_STOP_TIMEOUT))
}

/// Value of an option of the command line.
fn value_of<'a>(arguments: &'a [OsString], option: &str) -> Option<&'a OsStr> {
    let mut words = arguments.iter().take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        match word.as_bytes().strip_prefix(option.as_bytes()) {
            Some([]) => return words.next().map(OsString::as_os_str),
            Some([b'=', value @ ..]) => return Some(OsStr::from_bytes(value)),
            _ => {}
        }
    }
    None
}

/// Returns true if this word is a subcommand that has a supervisor.
pub(super) fn is_verb(word: &OsStr) -> bool {
    word == "serve" || word == "export"
}

/// Adds [`AS_SUPERVISOR`] with the descriptor of the snapshot to the supervisor's command line.
pub(super) fn with_snapshot(arguments: &[OsString], left: RawFd) -> Vec<OsString> {
    let verb = arguments.iter().skip(1).position(|word| is_verb(word)).map_or(1, |at| at + 2);
    let (before, after) = arguments.split_at(verb.min(arguments.len()));
    [before, &[AS_SUPERVISOR.into(), left.to_string().into()], after].concat()
}

/// Removes the option that [`with_snapshot`] added, and returns the descriptor.
pub(super) fn take_snapshot(arguments: &mut Vec<OsString>) -> Option<RawFd> {
    let at = arguments.iter().position(|word| is_verb(word))? + 1;
    if arguments.get(at)? != AS_SUPERVISOR {
        return None;
    }
    let left = arguments.get(at + 1)?.to_str()?.parse().ok();
    arguments.drain(at..at + 2);
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_file_on_the_command_line_is_detected() {
        let file = |line: &str| config_file(&words(line));
        assert_eq!(file("shadowbell serve --config a.toml"), Some("a.toml".into()));
        assert_eq!(file("shadowbell -v serve --config=a.toml"), Some("a.toml".into()));
        assert_eq!(file("shadowbell serve mem:1MiB --socket a -- --config a"), None);
    }

    #[test]
    fn the_stop_timeout_on_the_command_line_is_detected() {
        let seconds = |line: &str| stop_timeout(&words(line)).as_secs();
        assert_eq!(seconds("shadowbell serve mem:1MiB --socket a"), DEFAULT_STOP_TIMEOUT);
        assert_eq!(seconds("shadowbell serve --stop-timeout 7 mem:1MiB"), 7);
        assert_eq!(seconds("shadowbell serve --stop-timeout=8 mem:1MiB"), 8);
        assert_eq!(seconds("shadowbell serve --stop-timeout 2m mem:1MiB"), 120);
    }

    #[test]
    fn command_lines_with_a_supervisor_are_detected() {
        let asks =
            |line: &str| is_asked_for(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
        assert!(asks("shadowbell serve mem:1MiB --socket a"));
        assert!(asks("shadowbell -v serve mem:1MiB --socket a --supervisor"));
        assert!(asks("shadowbell serve --socket a -- --no-supervisor"));
        assert!(asks("shadowbell -q export a.img --nbd unix:/a"));
        for other in [
            "shadowbell",
            "shadowbell serve mem:1MiB --socket a --no-supervisor",
            "shadowbell serve --as-worker start mem:1MiB --socket a",
            "shadowbell export a.img --ublk --ublk-id=1",
            "shadowbell serve --help",
            "shadowbell serve -h",
            "shadowbell serve --check a.toml",
            "shadowbell serve --check=a.toml",
            "shadowbell bench serve",
        ] {
            assert!(!asks(other), "{other}");
        }
    }

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn a_command_line_is_extended_with_the_snapshot() {
        for line in ["sb serve mem:1MiB --socket a", "sb -v serve a --supervisor -- serve"] {
            let line = words(line);
            let mut with = with_snapshot(&line, 77);
            assert!(is_asked_for(&with) && with != line);
            assert_eq!(take_snapshot(&mut with), Some(77));
            assert_eq!(with, line);
            assert_eq!(take_snapshot(&mut with), None);
            assert_eq!(with, line);
        }
    }
}
