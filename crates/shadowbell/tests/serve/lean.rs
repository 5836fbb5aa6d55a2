//! The program `shadowbell-serve`, which `shadowbell serve` executes.

use crate::harness::Server;

/// Crates that `shadowbell-serve` must not contain: plots, the terminal interface, and the load
/// generator's histograms.
const TOOLS: [&str; 3] = ["plotters", "ratatui", "hdrhistogram"];

/// Returns the symbols of a program, without its debug information, which also describes code that
/// the linker has dropped.
fn symbols(program: &str) -> String {
    let output = std::process::Command::new("nm").arg(program).output().expect("nm of binutils");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_program_for_serve_contains_no_tools() {
    let whole = symbols(env!("CARGO_BIN_EXE_shadowbell"));
    let serve = symbols(env!("CARGO_BIN_EXE_shadowbell-serve"));
    for tool in TOOLS {
        assert!(whole.contains(tool), "{tool}: not a dependency of shadowbell");
        assert!(!serve.contains(tool), "{tool}");
    }
}

#[test]
fn the_processes_that_face_guests_run_the_program_for_serve() {
    let server = Server::start(&["null:1MiB"], &[]);
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_shadowbell-serve"));
    let program = program.canonicalize().unwrap();
    for pid in [server.pid(), crate::supervisor::worker(&server)] {
        assert_eq!(std::fs::read_link(format!("/proc/{pid}/exe")).unwrap(), program);
    }
}
