//! Option for the doorbell mechanism of a controller.

use serde::{Deserialize, Serialize};

/// Doorbell mechanism that a controller offers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OfferedDoorbells {
    /// Shadow doorbells (Doorbell Buffer Config); guests without support for them trap
    #[default]
    Shadow,
    /// MMIO only: every doorbell write traps
    Mmio,
    /// Doorbells mapped into the client: no doorbell write traps, and the controller polls
    Mapped,
}
