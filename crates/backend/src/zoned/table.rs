//! Where zones and data lie on the disk below, and what is written down of a zone.
//!
//! The first part of the disk below is the *table*: a page that says what the zones are, a word for
//! each zone, and what the host keeps with it. A word is stored at once, and has a checksum of its
//! own: whoever stores a zone's state has stored all of it. The data follow.

use super::format::ZoneFormat;
use shadowbell_memory::SharedBytes;
use shadowbell_spec::protection::GuardKind;
use shadowbell_spec::zns::ZoneState;

/// What the header begins with.
const MAGIC: [u8; 8] = *b"SBZONES1";
/// The header has a page of its own.
const HEADER: usize = 4096;
/// Bytes of it that are covered by its checksum, which follows.
const COVERED: usize = 56;
/// Data begin at a multiple of this: whatever the storage below likes is aligned to it.
const ALIGNMENT: u64 = 1 << 20;
/// Bytes of the checksum before what a host keeps with a zone.
const SEAL: usize = 8;

/// Bits of a zone's word.
const WRITTEN: u64 = (1 << 40) - 1;
const STATE: u32 = 40;
const HAS_EXTENSION: u64 = 1 << 44;
const CHECKSUM: u32 = 48;

/// Where what is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) format: ZoneFormat,
    pub(super) block_size: u32,
    pub(super) zones: u64,
    /// Where the data of the first zone begin.
    pub(super) data: u64,
}

/// What is written down of a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Blocks that were written, from its start on.
    pub(super) written: u64,
    pub(super) state: ZoneState,
    pub(super) has_extension: bool,
}

impl Record {
    pub(super) const EMPTY: Self =
        Self { written: 0, state: ZoneState::Empty, has_extension: false };

    fn checksum(zone: u64, low: u64) -> u64 {
        let (zone, low) = (zone.to_le_bytes(), low.to_le_bytes());
        GuardKind::Crc16.guard(&zone, &low) & 0xffff
    }

    pub(super) fn pack(self, zone: u64) -> u64 {
        let extension = if self.has_extension { HAS_EXTENSION } else { 0 };
        let low = self.written & WRITTEN | (self.state as u64) << STATE | extension;
        low | Self::checksum(zone, low) << CHECKSUM
    }

    /// `None` if the word is none that was stored for this zone.
    pub(super) fn unpack(zone: u64, word: u64) -> Option<Self> {
        let low = word & ((1 << CHECKSUM) - 1);
        if word >> CHECKSUM != Self::checksum(zone, low) {
            return None;
        }
        Some(Self {
            written: low & WRITTEN,
            state: ZoneState::from_bits((low >> STATE & 0xf) as u8)?,
            has_extension: low & HAS_EXTENSION != 0,
        })
    }
}

impl Layout {
    /// As many zones as fit a disk of so many bytes.
    pub(super) fn fitting(format: ZoneFormat, block_size: u32, bytes: u64) -> Option<Self> {
        let mut zones = (bytes / format.size + 1).min(ZoneFormat::MOST);
        loop {
            let layout = Self::of(format, block_size, zones);
            if zones == 0 {
                return None;
            }
            if layout.fits(bytes) {
                return Some(layout);
            }
            zones -= 1;
        }
    }

    fn of(format: ZoneFormat, block_size: u32, zones: u64) -> Self {
        let table = HEADER as u64 + zones * (8 + Self::slot(&format) as u64);
        Self { format, block_size, zones, data: table.next_multiple_of(ALIGNMENT) }
    }

    /// Whether a disk of so many bytes has room for it.
    pub(super) fn fits(&self, bytes: u64) -> bool {
        self.end() <= bytes
    }

    /// The first byte of the disk below that is not used.
    fn end(&self) -> u64 {
        let last = self.zones.saturating_sub(1).saturating_mul(self.format.size);
        self.data.saturating_add(last).saturating_add(self.format.capacity)
    }

    /// Bytes of the table for what a host keeps with a zone.
    fn slot(format: &ZoneFormat) -> usize {
        let bytes = format.extension_bytes();
        if bytes == 0 { 0 } else { SEAL + bytes }
    }

    /// Bytes of the table.
    pub(super) fn table_bytes(&self) -> u64 {
        HEADER as u64 + self.zones * (8 + Self::slot(&self.format) as u64)
    }

    fn header(&self) -> [u8; COVERED + 8] {
        let mut header = [0; COVERED + 8];
        let words = [
            u64::from_le_bytes(MAGIC),
            self.format.size,
            self.format.capacity,
            u64::from(self.block_size),
            u64::from(self.format.extension),
            self.zones,
            self.data,
        ];
        for (to, word) in header.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let sum = GuardKind::Crc64.guard(&header[..COVERED], &[]);
        header[COVERED..].copy_from_slice(&sum.to_le_bytes());
        header
    }
}

/// What the first page of a disk says of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing was ever there.
    Nothing,
    /// There are so many zones of this layout.
    Zones(Layout),
    /// Something else is there.
    Else(String),
}

/// The table of a disk, in memory that is a part of it.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) layout: Layout,
    memory: SharedBytes,
}

impl Table {
    /// Bytes that are to be looked at to [find](Self::find) one.
    pub(super) const LOOKS_AT: u64 = HEADER as u64;

    /// What the first page of a disk says, that is to be of this format.
    pub(super) fn find(page: &SharedBytes, wanted: ZoneFormat, block_size: u32) -> Found {
        let mut header = [0; HEADER];
        if page.read_into(0, &mut header).is_none() {
            return Found::Else("its first page can not be read".to_owned());
        }
        if header.iter().all(|byte| *byte == 0) {
            return Found::Nothing;
        }
        let word = |nth: usize| {
            let bytes = header.get(nth * 8..nth * 8 + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(0, u64::from_le_bytes)
        };
        if word(0) != u64::from_le_bytes(MAGIC) {
            return Found::Else(
                "it holds something that is no zones; zones are made on a disk whose first page \
                 is zeroes"
                    .to_owned(),
            );
        }
        let sum = GuardKind::Crc64.guard(&header[..COVERED], &[]);
        if word(COVERED / 8) != sum {
            return Found::Else("what it says of its zones is damaged".to_owned());
        }
        let is_as_wanted = word(1) == wanted.size
            && word(2) == wanted.capacity
            && word(3) == u64::from(block_size)
            && word(4) == u64::from(wanted.extension);
        if !is_as_wanted {
            return Found::Else(format!(
                "it was made with `zoned={}&zone-capacity={}&zone-extension={}&block-size={}`",
                word(1),
                word(2),
                word(4) * 64,
                word(3)
            ));
        }
        let zones = word(5);
        if zones == 0 || zones > ZoneFormat::MOST {
            return Found::Else("what it says of its zones is not possible".to_owned());
        }
        let layout = Layout::of(wanted, block_size, zones);
        if word(6) != layout.data {
            return Found::Else("what it says of its zones is not possible".to_owned());
        }
        Found::Zones(layout)
    }

    /// The table of this layout in this memory.
    pub(super) fn new(layout: Layout, memory: SharedBytes) -> Self {
        Self { layout, memory }
    }

    /// Makes the table anew: all zones are empty. What it is is said last.
    pub(super) fn make(&self) -> Option<()> {
        (0..self.layout.zones).try_for_each(|zone| self.store(zone, Record::EMPTY))?;
        self.memory.write_from(0, &self.layout.header())
    }

    /// What is written down of a zone; `None` if that is damaged, or not possible.
    pub(super) fn load(&self, zone: u64) -> Option<Record> {
        let word = self.memory.load_u64_acquire(Self::word_at(zone))?;
        let capacity = self.layout.format.capacity / u64::from(self.layout.block_size);
        Record::unpack(zone, word).filter(|record| record.written <= capacity)
    }

    /// Writes a zone down. Memory that is read-only stays as it is.
    pub(super) fn store(&self, zone: u64, record: Record) -> Option<()> {
        self.memory.store_u64_release(Self::word_at(zone), record.pack(zone))
    }

    fn word_at(zone: u64) -> usize {
        HEADER + zone as usize * 8
    }

    fn slot_at(&self, zone: u64) -> usize {
        let slot = Layout::slot(&self.layout.format);
        HEADER + self.layout.zones as usize * 8 + zone as usize * slot
    }

    /// What a host keeps with a zone; `None` if that is damaged.
    pub(super) fn load_extension(&self, zone: u64) -> Option<Vec<u8>> {
        let (at, len) = (self.slot_at(zone), self.layout.format.extension_bytes());
        let mut bytes = vec![0; len];
        self.memory.read_into(at + SEAL, &mut bytes)?;
        let seal: u64 = self.memory.read(at)?;
        (seal == GuardKind::Crc64.guard(&bytes, &zone.to_le_bytes())).then_some(bytes)
    }

    /// Keeps these bytes with a zone.
    pub(super) fn store_extension(&self, zone: u64, bytes: &[u8]) -> Option<()> {
        let at = self.slot_at(zone);
        self.memory.write_from(at + SEAL, bytes)?;
        self.memory.write(at, &GuardKind::Crc64.guard(bytes, &zone.to_le_bytes()))
    }
}
