//! Telemetry log pages: data about the controller for support engineers, as text. Base 2.1,
//! 5.1.12.1.8 and 5.1.12.1.9.
//!
//! Data is captured on request of the host, or by the controller after a failure.
//! docs/internals/nvme.md describes the contents.

use crate::saved::SavedTelemetry;
use shadowbell_spec::log::{TELEMETRY_BLOCK, TelemetryHeader, lid};
use shadowbell_state::Bytes;
use zerocopy::IntoBytes;

/// Maximum size of the three data areas together, in bytes.
const MAX_BYTES: usize = 16 << 10;
/// Maximum size of the first data area in bytes. A controller-initiated capture has only this area,
/// because every checkpoint of the controller contains the capture.
const MAX_FIRST_AREA: usize = 4 << 10;

/// Captured telemetry data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Capture {
    /// Data in whole blocks.
    data: Vec<u8>,
    /// Number of the last block of each of the three data areas.
    last_blocks: [u16; 3],
    /// Reason Identifier.
    reason: String,
}

/// Text of the three data areas, the most important data first.
pub(crate) type Areas = [String; 3];

/// Host-initiated and controller-initiated telemetry.
#[derive(Debug, Default)]
pub(crate) struct Telemetry {
    host: Capture,
    host_generation: u8,
    controller_initiated: Capture,
    controller_initiated_generation: u8,
    /// True if the host has not read the controller-initiated data yet.
    is_new: bool,
}

impl Capture {
    fn new(reason: &str, areas: &[String]) -> Self {
        let mut capture = Self { reason: reason.to_owned(), ..Self::default() };
        for (place, text) in areas.iter().enumerate() {
            let most = if place == 0 { MAX_FIRST_AREA } else { MAX_BYTES };
            let room = most.saturating_sub(capture.data.len());
            let mut text = text.as_bytes();
            if text.len() > room {
                // Text is cut at the end of a line.
                text = &text[..room];
                let end = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                text = &text[..end];
            }
            capture.data.extend_from_slice(text);
            let blocks = capture.data.len().div_ceil(TELEMETRY_BLOCK);
            capture.data.resize(blocks * TELEMETRY_BLOCK, 0);
            capture.last_blocks[place..].fill(blocks as u16);
        }
        capture
    }

    fn save(&self) -> (Bytes, [u16; 3], String) {
        (Bytes(self.data.clone()), self.last_blocks, self.reason.clone())
    }

    fn restore((Bytes(data), last_blocks, reason): &(Bytes, [u16; 3], String)) -> Self {
        let blocks = data.len() / TELEMETRY_BLOCK;
        let fits = data.len() <= MAX_BYTES
            && data.len() % TELEMETRY_BLOCK == 0
            && last_blocks.is_sorted()
            && usize::from(last_blocks[2]) == blocks
            && reason.len() <= 128;
        let restored =
            || Self { data: data.clone(), last_blocks: *last_blocks, reason: reason.clone() };
        fits.then(restored).unwrap_or_default()
    }
}

impl Telemetry {
    /// Captures host-initiated data.
    pub(crate) fn capture(&mut self, areas: &Areas) {
        self.host = Capture::new("asked for by the host", areas);
        self.host_generation = self.host_generation.wrapping_add(1);
    }

    /// Captures controller-initiated data.
    pub(crate) fn capture_controller_initiated(&mut self, reason: &str, summary: &str) {
        let reason: String = reason.chars().take(120).collect();
        self.controller_initiated = Capture::new(&reason, &[summary.to_owned()]);
        self.controller_initiated_generation = self.controller_initiated_generation.wrapping_add(1);
        self.is_new = true;
    }

    /// Marks controller-initiated data as read. The next capture then counts as new data.
    pub(crate) fn was_read(&mut self) {
        self.is_new = false;
    }

    /// Log page with identifier `of`.
    pub(crate) fn page(&self, of: u8, ieee: [u8; 3]) -> Vec<u8> {
        let by_host = of == lid::TELEMETRY_HOST;
        let capture = if by_host { &self.host } else { &self.controller_initiated };
        let mut header = TelemetryHeader {
            lid: of,
            ieee,
            last_blocks: capture.last_blocks.map(Into::into),
            host_scope: if by_host { TelemetryHeader::CONTROLLER } else { 0 },
            host_generation: if by_host {
                self.host_generation
            } else {
                TelemetryHeader::CONTROLLER
            },
            controller_available: self.is_new.into(),
            controller_generation: self.controller_initiated_generation,
            ..TelemetryHeader::default()
        };
        let reason = capture.reason.as_bytes();
        header.reason.iter_mut().zip(reason).for_each(|(to, from)| *to = *from);
        [header.as_bytes(), &capture.data].concat()
    }

    pub(crate) fn save(&self) -> SavedTelemetry {
        SavedTelemetry {
            host: self.host.save(),
            host_generation: self.host_generation,
            controller_initiated: self.controller_initiated.save(),
            controller_initiated_generation: self.controller_initiated_generation,
            is_new: self.is_new,
        }
    }

    /// Restores a snapshot. Invalid data is dropped.
    pub(crate) fn restore(saved: &SavedTelemetry) -> Self {
        Self {
            host: Capture::restore(&saved.host),
            host_generation: saved.host_generation,
            controller_initiated: Capture::restore(&saved.controller_initiated),
            controller_initiated_generation: saved.controller_initiated_generation,
            is_new: saved.is_new,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    fn text(lines: usize) -> String {
        (0..lines).map(|line| format!("line {line:04}\n")).collect()
    }

    fn header(telemetry: &Telemetry, of: u8) -> (TelemetryHeader, Vec<u8>) {
        let page = telemetry.page(of, [1, 2, 3]);
        let (header, data) = TelemetryHeader::read_from_prefix(&page).unwrap();
        assert_eq!((header.lid, header.ieee), (of, [1, 2, 3]));
        assert_eq!(data.len(), header.blocks() * 512);
        (header, data.to_vec())
    }

    #[test]
    fn areas_begin_with_block_1_and_end_with_a_line() {
        let mut telemetry = Telemetry::default();
        let (empty, _) = header(&telemetry, lid::TELEMETRY_HOST);
        assert_eq!((empty.blocks(), empty.host_generation), (0, 0));
        telemetry.capture(&[text(10), text(100), String::new()]);
        let (first, data) = header(&telemetry, lid::TELEMETRY_HOST);
        assert_eq!(first.last_blocks.map(|last| last.get()), [1, 3, 3]);
        assert_eq!((first.host_scope, first.host_generation), (1, 1));
        assert!(first.reason.starts_with(b"asked for by the host\0"));
        assert!(data.starts_with(b"line 0000\n") && data[512..].starts_with(b"line 0000\n"));
        telemetry.capture(&[text(1000), text(10_000), text(5)]);
        let (cut, data) = header(&telemetry, lid::TELEMETRY_HOST);
        assert_eq!(cut.last_blocks.map(|last| last.get()), [8, 32, 32]);
        let whole = data.split(|byte| *byte == 0).filter(|text| !text.is_empty());
        assert!(whole.clone().all(|text| text.ends_with(b"\n")) && whole.count() == 2);
        assert_eq!(cut.host_generation, 2);
        (0..254).for_each(|_| telemetry.capture(&Areas::default()));
        assert_eq!(header(&telemetry, lid::TELEMETRY_HOST).0.host_generation, 0);
    }

    #[test]
    fn controller_initiated_telemetry_is_available_until_it_is_read() {
        let mut telemetry = Telemetry::default();
        telemetry.capture_controller_initiated(&"why ".repeat(100), &text(3));
        let (controller_initiated, data) = header(&telemetry, lid::TELEMETRY_CONTROLLER);
        assert_eq!(
            (controller_initiated.controller_available, controller_initiated.controller_generation),
            (1, 1)
        );
        // The host scope field is at the offset where the host-initiated page has its generation
        // field.
        assert_eq!(
            (
                controller_initiated.host_scope,
                controller_initiated.host_generation,
                controller_initiated.blocks()
            ),
            (0, 1, 1)
        );
        assert!(data.starts_with(text(3).as_bytes()));
        let (host, _) = header(&telemetry, lid::TELEMETRY_HOST);
        assert_eq!((host.controller_available, host.controller_generation), (1, 1));
        telemetry.was_read();
        let restored = Telemetry::restore(&telemetry.save());
        let (controller_initiated, again) = header(&restored, lid::TELEMETRY_CONTROLLER);
        assert_eq!((controller_initiated.controller_available, again), (0, data));
        let mut saved = telemetry.save();
        saved.controller_initiated.1 = [9, 1, 1];
        let restored = Telemetry::restore(&saved);
        assert_eq!(header(&restored, lid::TELEMETRY_CONTROLLER).0.blocks(), 0);
    }
}
