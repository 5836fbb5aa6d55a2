//! A controller and the way to it: what an integrator embeds.
//!
//! | module | who reaches the controller |
//! |---|---|
//! | [`vfio_user`] | a VMM or a driver in another process, over a vfio-user socket |
//! | [`in_process`] | the driver in the same process, by function calls |
#![forbid(unsafe_code)]

pub mod in_process;
pub mod vfio_user;

pub use in_process::{InProcess, StartError};
pub use vfio_user::ControllerDevice;
