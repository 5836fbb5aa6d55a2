//! `cargo xtask run-alone`: the runner of test programs.

use std::process::{Command, Output};

fn run_alone(grace: &str, script: &str) -> Output {
    let mut runner = Command::new(env!("CARGO_BIN_EXE_xtask"));
    runner.args(["run-alone", "--grace", grace, "--", "sh", "-c", script]).output().unwrap()
}

#[test]
fn a_program_without_descendants_ends_as_it_would_without_the_runner() {
    assert_eq!(run_alone("300", "exit 0").status.code(), Some(0));
    assert_eq!(run_alone("300", "exit 3").status.code(), Some(3));
    let killed = run_alone("300", "kill -9 $$");
    assert_eq!(killed.status.code(), Some(101));
    assert!(String::from_utf8_lossy(&killed.stdout).contains("ended by signal 9 ... FAILED"));
}

#[test]
fn an_orphan_that_ends_by_itself_is_waited_for() {
    // The program ends at once and leaves two orphans. The first orphan ends when the second orphan
    // closes the pipe. The runner must not have an end of the pipe open, because then the first
    // orphan would never end.
    let script = "mkfifo $0.$$; (read line < $0.$$; rm $0.$$) & (: > $0.$$) & exit 0";
    let script = format!("cd {} && {script}", env!("CARGO_TARGET_TMPDIR"));
    assert_eq!(run_alone("300", &script).status.code(), Some(0));
}

#[test]
fn a_process_that_stays_fails_the_program_and_is_killed() {
    // The program ends as soon as its descendant executes a shell. The runner's report must contain
    // the command line of this shell.
    let script = "mkfifo $0.$$; \
                  setsid sh -c ': > $0; while :; do sleep 3600; done' $0.$$ > /dev/null 2>&1 & \
                  read line < $0.$$; rm $0.$$; exit 0";
    let left = run_alone("0", &format!("cd {} && {script}", env!("CARGO_TARGET_TMPDIR")));
    let printed = String::from_utf8_lossy(&left.stdout);
    assert_eq!(left.status.code(), Some(1), "{printed}");
    assert!(printed.contains(" sh -c : > $0; while "), "{printed}");
    assert!(printed.contains("test sh: no process is left behind ... FAILED"), "{printed}");
}

#[test]
fn processes_that_fork_all_the_time_are_killed() {
    // Each shell starts another one and ends. All shells have the pipe of standard output open, so
    // `output` returns only if the runner has ended every one of them.
    let script = "f() { sh -c \"$1\" sh \"$1\" & }; for n in 1 2 3; do f 'sh -c \"$1\" sh \"$1\" &'; done; exit 0";
    let left = run_alone("0", script);
    assert_eq!(left.status.code(), Some(1), "{left:?}");
}
