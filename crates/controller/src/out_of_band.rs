//! Out-of-band Identify and Get Log Page, for management software.

use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{GetLogPage, Identify};
use shadowbell_spec::log::{ErrorLogEntry, SmartHealth, lid};

/// Structure that [`Controller::out_of_band`](crate::Controller::out_of_band) reads, as an
/// out-of-band admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutOfBandCommand {
    /// Identify data structure of 4096 bytes.
    Identify {
        /// CNS value; see [`shadowbell_spec::identify::cns`].
        cns: u8,
        /// NSID, for structures of a namespace.
        nsid: u32,
    },
    /// Log page of at most 4096 bytes; see [`shadowbell_spec::log::lid`]. It is read with Retain
    /// Asynchronous Event, so neither events nor lists of changes are cleared.
    LogPage(u8),
}

impl OutOfBandCommand {
    /// Equivalent admin command.
    pub(crate) fn sqe(self) -> Sqe {
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
