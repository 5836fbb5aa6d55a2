//! Sections of the migration stream, and its parser.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_controller::MigrationState;
use shadowbell_state::{Bytes, Parcel};

/// Section names in the stream.
pub(super) const FUNCTION: &str = "function";
pub(super) const CONTROLLER: &str = "controller";

/// Locked while a stream is parsed. Only one stream is parsed at a time, because a parser uses a
/// CPU, and may need thirty times the memory of its stream.
static PARSER: Mutex<()> = Mutex::new(());

/// Serialized PCI function.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MigratedFunction {
    pub(super) config: Bytes,
    pub(super) msix_table: Bytes,
    pub(super) msix_pending: Bytes,
}

/// Parsed state, which no device uses yet.
#[derive(Debug)]
pub(super) struct Parsed {
    pub(super) function: MigratedFunction,
    pub(super) controller: MigrationState,
}

impl Parsed {
    /// Parses a stream. Takes time in proportion to the stream's length.
    pub(super) fn of(stream: &[u8]) -> Result<Self, String> {
        let _one_at_a_time = PARSER.lock();
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let missing = |name: &str| format!("section {name} is missing");
        let mut parcel = Parcel::decode(stream, Vec::new()).map_err(|e| text(&e))?;
        let function = parcel.take::<MigratedFunction>(FUNCTION).map_err(|e| text(&e))?;
        let function = function.ok_or_else(|| missing(FUNCTION))?;
        let controller = parcel.take::<MigrationState>(CONTROLLER).map_err(|e| text(&e))?;
        let controller = controller.ok_or_else(|| missing(CONTROLLER))?;
        parcel.finish().map_err(|e| text(&e))?;
        Ok(Self { function, controller })
    }
}
