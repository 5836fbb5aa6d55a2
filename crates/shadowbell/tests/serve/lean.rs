//! The program `shadowbell-serve`, which `shadowbell serve` executes.

use crate::harness::Server;

/// Crates for plots, the terminal interface and the load generator's histograms.
const TOOLS: [&str; 3] = ["plotters", "ratatui", "hdrhistogram"];

/// Returns true if a program contains this word, for example in the name of a symbol.
fn contains(program: &str, word: &str) -> bool {
    let bytes = std::fs::read(program).unwrap();
    bytes.windows(word.len()).any(|window| window == word.as_bytes())
}

#[test]
fn the_program_for_serve_contains_no_tools() {
    for word in TOOLS {
        assert!(contains(env!("CARGO_BIN_EXE_shadowbell"), word), "{word}: no longer a dependency");
        assert!(!contains(env!("CARGO_BIN_EXE_shadowbell-serve"), word), "{word}");
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
