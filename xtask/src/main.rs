//! `cargo xtask`: every chore has one name.
#![forbid(unsafe_code)]

fn main() {}
