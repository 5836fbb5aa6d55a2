//! The shadowbell program; see the library.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowbell::main()
}
