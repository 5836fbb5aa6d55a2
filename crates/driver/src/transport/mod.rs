//! Transports: VFIO, vfio-user, and the [`Transport`] trait for other implementations.

mod interface;
#[cfg(feature = "vfio")]
mod vfio;
#[cfg(feature = "vfio-user")]
mod vfio_user;

pub use interface::{BoxError, Transport, TransportError};
#[cfg(feature = "vfio")]
pub use vfio::{PciAddress, PciFunction, SYSFS, Steered, Vfio, VfioError, steer_interrupts};
#[cfg(feature = "vfio-user")]
pub use vfio_user::VfioUser;
