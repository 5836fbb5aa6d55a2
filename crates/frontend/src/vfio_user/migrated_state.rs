//! Sections of the migration stream, and its parser.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_controller::MigrationState;
use shadowbell_state::{Bytes, Parcel};
use std::time::{Duration, Instant};

/// Section names in the stream.
pub(super) const FUNCTION: &str = "function";
pub(super) const CONTROLLER: &str = "controller";

/// Locked while a stream is parsed. Only one stream is parsed at a time, because a parser uses a
/// CPU, and may need thirty times the memory of its stream.
static PARSER: Mutex<()> = Mutex::new(());

/// Longest pause between two pieces of a stream.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

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
    /// Parses a stream. The parser takes time in proportion to the stream's length. After each 64
    /// KiB the parser pauses for as long as it has worked, so it uses at most half of a CPU.
    pub(super) fn of(stream: &[u8]) -> Result<Self, String> {
        let _one_at_a_time = PARSER.lock();
        let mut began = Instant::now();
        Self::parse(stream, &mut || {
            std::thread::sleep(began.elapsed().min(LONGEST_PAUSE));
            began = Instant::now();
        })
    }

    fn parse(stream: &[u8], pause: &mut dyn FnMut()) -> Result<Self, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let missing = |name: &str| format!("section {name} is missing");
        let mut parcel = Parcel::decode_in_pieces(stream, pause).map_err(|e| text(&e))?;
        let function = parcel.take_in_pieces::<MigratedFunction>(FUNCTION, pause);
        let function = function.map_err(|e| text(&e))?;
        let function = function.ok_or_else(|| missing(FUNCTION))?;
        let controller = parcel.take_in_pieces::<MigrationState>(CONTROLLER, pause);
        let controller = controller.map_err(|e| text(&e))?;
        let controller = controller.ok_or_else(|| missing(CONTROLLER))?;
        parcel.finish().map_err(|e| text(&e))?;
        Ok(Self { function, controller })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream of 1 MiB is parsed in pieces of at most 64 KiB: the list of its sections, and each
    /// section.
    #[test]
    fn a_long_stream_is_parsed_in_pieces() {
        let mut parcel = Parcel::new();
        let long = Bytes(vec![7; 700_000]);
        let function = MigratedFunction {
            config: long,
            msix_table: Bytes::default(),
            msix_pending: Bytes::default(),
        };
        parcel.add(FUNCTION, true, &function).unwrap();
        let stream = parcel.encode(0).unwrap();
        let mut pauses = 0;
        let error = Parsed::parse(&stream, &mut || pauses += 1).unwrap_err();
        assert_eq!(error, "section controller is missing");
        let pieces = stream.len() / (64 << 10);
        assert!(pieces >= 14 && pauses >= 2 * pieces - 1, "{pauses} pauses in {pieces} pieces");
    }
}
