//! Names of record kinds in options and JSON.

use shadowbell_controller::trace::Kind;

/// Name of a kind in lower case with hyphens: `EventIdx armed` is `eventidx-armed`.
pub(super) fn option_name(kind: Kind) -> String {
    kind.name().to_lowercase().replace(' ', "-")
}
