//! The shadowbell program.
#![forbid(unsafe_code)]

fn main() {}
