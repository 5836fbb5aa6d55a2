//! Integration tests of the measuring, inspecting and copying commands, over in-process
//! controllers and over a served socket. No test depends on the speed of the machine.

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
