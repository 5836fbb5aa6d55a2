//! The book of `docs/`: its links lead somewhere, its commands do what they should, and the messages
//! that it explains are those of the program.

mod commands;
mod links;
mod messages;
mod pages;
