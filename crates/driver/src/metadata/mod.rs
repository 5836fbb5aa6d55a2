//! Metadata: formats, commands that transfer metadata, and protection information that the host
//! generates and checks. NVM 1.1, 5.2 "End-to-end Data Protection".
//!
//! | module | contents |
//! |---|---|
//! | `format` | [`BlockMetadata`]: metadata format of a namespace |
//! | `command` | [`MetadataCommand`]: a command with metadata and explicit protection information |

mod command;
mod format;

pub(crate) use self::command::Tags;
pub use self::command::{MetadataCommand, ProtectionError};
pub use self::format::BlockMetadata;
