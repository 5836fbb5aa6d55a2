//! Layout of a zoned disk, and its stored zone table.
//!
//! The first part of the disk below is the table: a page with the zone format, a 64-bit word per
//! zone, and the zone descriptor extensions. A word is stored atomically and contains its own
//! checksum. So after a crash, a word is either old or new, and damage is detected. The data follow
//! the table.

use shadowbell_disk::ZoneFormat;
use shadowbell_memory::SharedBytes;
use shadowbell_spec::protection::GuardKind;
use shadowbell_spec::zns::ZoneState;

/// First bytes of the header.
const MAGIC: [u8; 8] = *b"SBZONES1";
/// Size of the header in bytes: one page.
const HEADER: usize = 4096;
/// Number of header bytes that the checksum covers. The checksum follows them.
const COVERED: usize = 56;
/// Alignment of the data in bytes, large enough for any storage.
const ALIGNMENT: u64 = 1 << 20;
/// Size in bytes of the checksum that precedes an extension.
const SEAL: usize = 8;

/// Fields of a zone's word in the table: mask of the number of written blocks, bit position of the
/// state, flag that the zone has an extension, and bit position of the checksum.
const WRITTEN: u64 = (1 << 40) - 1;
const STATE: u32 = 40;
const HAS_EXTENSION: u64 = 1 << 44;
const CHECKSUM: u32 = 48;

/// Layout of a zoned disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) format: ZoneFormat,
    pub(super) block_size: u32,
    pub(super) zones: u64,
    /// Offset in bytes of the first zone's data.
    pub(super) data: u64,
}

/// Stored state of a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Number of written blocks, from the start of the zone.
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

    /// Decodes the word of a zone. `None` if the checksum does not match this zone.
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
    /// Layout with the largest number of zones that fits a disk of `bytes` bytes.
    pub(super) fn fitting(format: ZoneFormat, block_size: u32, bytes: u64) -> Option<Self> {
        let mut zones = (bytes / format.size + 1).min(ZoneFormat::MAX_ZONES);
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

    /// True if the layout fits a disk of `bytes` bytes.
    pub(super) fn fits(&self, bytes: u64) -> bool {
        self.end() <= bytes
    }

    /// End of the used part of the disk below, in bytes.
    fn end(&self) -> u64 {
        let last = self.zones.saturating_sub(1).saturating_mul(self.format.size);
        self.data.saturating_add(last).saturating_add(self.format.capacity)
    }

    /// Size of a zone descriptor extension in the table, in bytes, with its checksum.
    fn slot(format: &ZoneFormat) -> usize {
        let bytes = format.extension_bytes();
        if bytes == 0 { 0 } else { SEAL + bytes }
    }

    /// Size of the table in bytes.
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

/// Content of a disk's first page.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Empty: no zones were created.
    Nothing,
    /// Zones of this layout.
    Zones(Layout),
    /// Other content, with the reason why it is refused.
    Else(String),
}

/// Zone table, in the mapped memory of the disk.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) layout: Layout,
    memory: SharedBytes,
}

impl Table {
    /// Number of bytes that [`find`](Self::find) reads.
    pub(super) const HEADER_BYTES: u64 = HEADER as u64;

    /// Interprets the first page of a disk. The zones on it must have the format `wanted`.
    pub(super) fn find(page: &SharedBytes, wanted: ZoneFormat, block_size: u32) -> Found {
        let mut header = [0; HEADER];
        if page.read_into(0, &mut header).is_none() {
            return Found::Else("its first page cannot be read".to_owned());
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
                "it holds something other than zones; zones are created on a disk whose first \
                 page is zero"
                    .to_owned(),
            );
        }
        let sum = GuardKind::Crc64.guard(&header[..COVERED], &[]);
        if word(COVERED / 8) != sum {
            return Found::Else("its zone table header is damaged".to_owned());
        }
        let is_same_format = word(1) == wanted.size
            && word(2) == wanted.capacity
            && word(3) == u64::from(block_size)
            && word(4) == u64::from(wanted.extension);
        if !is_same_format {
            return Found::Else(format!(
                "it was made with `zoned={}&zone-capacity={}&zone-extension={}&block-size={}`",
                word(1),
                word(2),
                word(4) * 64,
                word(3)
            ));
        }
        let zones = word(5);
        if zones == 0 || zones > ZoneFormat::MAX_ZONES {
            return Found::Else("its zone table header is invalid".to_owned());
        }
        let layout = Layout::of(wanted, block_size, zones);
        if word(6) != layout.data {
            return Found::Else("its zone table header is invalid".to_owned());
        }
        Found::Zones(layout)
    }

    /// Creates the table for this layout in `memory`, without access to it.
    pub(super) fn new(layout: Layout, memory: SharedBytes) -> Self {
        Self { layout, memory }
    }

    /// Writes a table of empty zones. The header is written last. So after a crash during this call
    /// there is no header, and the table is created again.
    pub(super) fn create(&self) -> Option<()> {
        (0..self.layout.zones).try_for_each(|zone| self.store(zone, Record::EMPTY))?;
        self.memory.write_from(0, &self.layout.header())
    }

    /// Loads the record of a zone. `None` if the record is damaged or not valid for the layout.
    pub(super) fn load(&self, zone: u64) -> Option<Record> {
        let word = self.memory.load_u64_acquire(Self::word_at(zone))?;
        let capacity = self.layout.format.capacity / u64::from(self.layout.block_size);
        Record::unpack(zone, word).filter(|record| record.written <= capacity)
    }

    /// Stores the record of a zone. Fails on read-only memory.
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

    /// Loads the extension of a zone. `None` if it is damaged.
    pub(super) fn load_extension(&self, zone: u64) -> Option<Vec<u8>> {
        let (at, len) = (self.slot_at(zone), self.layout.format.extension_bytes());
        let mut bytes = vec![0; len];
        self.memory.read_into(at + SEAL, &mut bytes)?;
        let seal: u64 = self.memory.read(at)?;
        (seal == GuardKind::Crc64.guard(&bytes, &zone.to_le_bytes())).then_some(bytes)
    }

    /// Stores the extension of a zone.
    pub(super) fn store_extension(&self, zone: u64, bytes: &[u8]) -> Option<()> {
        let at = self.slot_at(zone);
        self.memory.write_from(at + SEAL, bytes)?;
        self.memory.write(at, &GuardKind::Crc64.guard(bytes, &zone.to_le_bytes()))
    }
}
