//! Blocks with metadata: what they have, the commands that move it, and protection information
//! made and checked by the host. NVM 1.1, 5.2 "End-to-end Data Protection".
//!
//! | module | what it is |
//! |---|---|
//! | `format` | [`BlockMetadata`]: what a namespace's blocks have |
//! | `command` | [`MetadataCommand`]: a command that says all of it |

mod command;
mod format;

pub(crate) use self::command::Tags;
pub use self::command::{MetadataCommand, ProtectionError};
pub use self::format::BlockMetadata;
