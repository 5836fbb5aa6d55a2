//! Admin commands: Identify, features, log pages, and any other.
//!
//! | module | what it is |
//! |---|---|
//! | `data` | what goes with an admin command, and what comes of it |
//! | `queue` | the admin queue pair, shared by threads |
//! | `plane` | the registers and the admin queue: what there is before Identify |
//! | `identify`, `log` | Identify and Get Log Page |
//! | `lba_status` | Get LBA Status |
//! | `ana` | the ways to namespaces that several controllers have |
//! | `namespaces` | namespaces that are made, formatted, sanitized |
//! | `diagnostics` | self-tests, telemetry, the log of events |
//! | `handle` | [`Admin`], the program's handle on an attached controller |

mod ana;
mod data;
mod diagnostics;
mod handle;
mod identify;
mod lba_status;
mod log;
mod namespaces;
mod plane;
mod queue;

pub use self::data::{AdminData, AdminResult};
pub use self::diagnostics::Telemetry;
pub use self::handle::Admin;
pub(crate) use self::identify::{identify_controller, identify_namespaces};
pub use self::lba_status::AllocatedBlocks;
pub use self::log::LogRequest;
pub(crate) use self::log::read_log_page;
pub(crate) use self::plane::{AdminCommands, AdminPlane};
