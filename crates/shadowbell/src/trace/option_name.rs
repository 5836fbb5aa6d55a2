//! How a kind of record is written in options, and in what is for machines.

use shadowbell_controller::trace::Kind;

/// `EventIdx armed` is `eventidx-armed`.
pub(super) fn option_name(kind: Kind) -> String {
    kind.name().to_lowercase().replace(' ', "-")
}
