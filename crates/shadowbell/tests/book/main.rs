//! Tests of the book in `docs/`: its links resolve, its commands work, and the messages that it
//! explains are in the program.

mod commands;
mod links;
mod messages;
mod pages;
mod settings;
