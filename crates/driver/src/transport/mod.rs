//! How a controller is reached: VFIO, vfio-user, or whatever else implements [`Transport`].

mod interface;
mod vfio;
mod vfio_user;

pub use interface::{BoxError, Transport, TransportError};
pub use vfio::{PciAddress, PciFunction, SYSFS, Vfio, VfioError};
pub use vfio_user::VfioUser;
