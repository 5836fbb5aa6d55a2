//! What somebody other than the host asks of a controller.

use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{GetLogPage, Identify};
use shadowbell_spec::log::{ErrorLogEntry, SmartHealth, lid};

/// A structure that a controller shows its host, for
/// [`Controller::inquire`](crate::Controller::inquire).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Inquiry {
    /// What Identify returns: 4096 bytes.
    Identify {
        /// Which structure; see [`shadowbell_spec::identify::cns`].
        cns: u8,
        /// Of which namespace, if it is of one.
        nsid: u32,
    },
    /// A log page, at most 4096 bytes; see [`shadowbell_spec::log::lid`]. No event is cleared by
    /// it, and no list of changes.
    LogPage(u8),
}

impl Inquiry {
    /// The command that asks for it.
    pub(crate) fn command(self) -> Sqe {
        match self {
            Self::Identify { cns, nsid } => {
                Sqe::identify(nsid, Identify { cns, ..Identify::default() }, 0)
            }
            Self::LogPage(lid) => {
                let bytes = match lid {
                    lid::ERROR_INFORMATION => 64 * size_of::<ErrorLogEntry>(),
                    lid::SMART_HEALTH => size_of::<SmartHealth>(),
                    _ => 4096,
                };
                let numd0 = u32::try_from(bytes / 4).map_or(0, |dwords| dwords - 1);
                let fields = GetLogPage { lid, rae: true, numd0, ..GetLogPage::default() };
                Sqe::get_log_page(0, fields, 0)
            }
        }
    }
}
