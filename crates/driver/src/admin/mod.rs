//! Admin commands: Identify, features, log pages, and any other.
//!
//! | module | contents |
//! |---|---|
//! | `queue` | the admin queue pair, shared by threads; data and result of a command |
//! | `plane` | registers and admin queue: execution of admin commands, usable before Identify |
//! | `identify`, `log` | Identify and Get Log Page |
//! | `lba_status` | Get LBA Status |
//! | `namespaces` | Namespace Management and Attachment, Format NVM, Sanitize |
//! | `diagnostics` | self-test, telemetry, persistent event log |
//! | `handle` | [`Admin`], the public handle of an attached controller |

mod diagnostics;
mod handle;
mod identify;
mod lba_status;
mod log;
mod namespaces;
mod plane;
mod queue;

pub use self::diagnostics::Telemetry;
pub use self::handle::Admin;
pub(crate) use self::identify::{identify_controller, identify_namespaces};
pub use self::lba_status::AllocatedBlocks;
pub use self::log::LogRequest;
pub(crate) use self::log::read_log_page;
pub(crate) use self::plane::{AdminCommands, AdminPlane};
pub use self::queue::{AdminData, AdminResult};
