//! The shadowbell program. What it does is in the library; see [`shadowbell::cli`].
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowbell::cli::main()
}
