//! Programs of other projects that tests start, and messages of skipped tests.

use std::fmt::Display;
use std::io::Write;

/// Programs that tests start, and their Debian packages. `cargo xtask test` installs them.
pub const PROGRAMS: [(&str, &str); 8] = [
    ("chromium-headless-shell", "chromium-headless-shell fonts-dejavu-core"),
    ("fio", "fio"),
    ("nbdcopy", "libnbd-bin"),
    ("nbdkit", "nbdkit"),
    ("qemu-img", "qemu-utils"),
    ("script", "bsdutils"),
    ("strace", "strace"),
    ("xfs_io", "xfsprogs"),
];

/// True if a program with this name is in `PATH`. Otherwise prints that the running test is
/// skipped; the caller has to return.
#[must_use]
pub fn can_run(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = std::env::split_paths(&path).any(|place| place.join(program).is_file());
    if !is_there {
        let package = PROGRAMS.iter().find(|(name, _)| *name == program);
        let package = package.map(|(_, package)| format!("; Debian has it in {package}"));
        skipped(format_args!("`{program}` is missing{}", package.unwrap_or_default()));
    }
    is_there
}

/// Prints that the running test, or a part of it, is skipped, and the reason.
pub fn skipped(reason: impl Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // The test harness captures only the output of macros such as `eprintln`. So this message is
    // shown even if the test passes.
    let _ = std::io::stderr().write_all(format!("skipped: {test}: {reason}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_message_of_a_skipped_test_is_shown() {
        const CHILD: &str = "SHADOWBELL_TEST_SKIPS";
        if std::env::var_os(CHILD).is_some() {
            return assert!(can_run("sh") && !can_run("no-such-program"));
        }
        let name = "programs::tests::the_message_of_a_skipped_test_is_shown";
        let mut test = Command::new(std::env::current_exe().unwrap());
        // With several threads, the thread of a test has the name of the test.
        test.args(["--exact", name, "--test-threads=2"]).env(CHILD, "");
        let output = test.output().unwrap();
        assert!(output.status.success());
        let shown = String::from_utf8(output.stderr).unwrap();
        assert_eq!(shown, format!("skipped: {name}: `no-such-program` is missing\n"));
    }
}
