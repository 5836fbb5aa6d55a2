//! How doorbells come to a controller, as a person asks for it.

use serde::{Deserialize, Serialize};

/// How the doorbells of a controller come to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OfferedDoorbells {
    /// Offer shadow doorbells (Doorbell Buffer Config); a guest that does not use them traps
    #[default]
    Shadow,
    /// Do not offer them: every doorbell traps
    Mmio,
    /// Let the client map the doorbells: none traps, and the controller polls
    Mapped,
}
