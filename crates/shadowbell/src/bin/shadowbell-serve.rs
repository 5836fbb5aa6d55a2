//! Program for `shadowbell serve`, without the code of the other verbs.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowbell::serve_main()
}
