//! The verbs that measure, look and move bytes, from outside: over controllers in the same process
//! and over a served socket. Nothing here depends on how fast anything is.

mod content;
mod demo;
mod harness;
mod inspect;
mod measure;
mod protection;
mod report;
mod shapes;
mod transfer;
mod verify;
