//! Zones of a zoned disk (ZNS): zone format, checks of reads and writes, and Report Zones.

use crate::request::DiskError;
use crate::size::{format_size, parse_size};
use serde::{Deserialize, Serialize};
use shadowbell_spec::zns::ZoneState;

/// Zone format of a disk. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ZoneFormat {
    /// Zone size: distance between the starts of two zones. A power of two, at least
    /// [`SMALLEST`](Self::SMALLEST).
    pub size: u64,
    /// Zone capacity: writable bytes of a zone.
    pub capacity: u64,
    /// Maximum number of open zones; 0 for no limit.
    pub max_open: u32,
    /// Maximum number of active zones (open or closed); 0 for no limit.
    pub max_active: u32,
    /// Zone Append Size Limit, a power of two; 0 for the limit of all transfers.
    pub append_limit: u64,
    /// Zone Descriptor Extension size in units of 64 bytes.
    pub extension: u8,
    /// True if reads may cross zone boundaries.
    pub read_across: bool,
}

impl ZoneFormat {
    /// Disk options that specify a zone format.
    pub const OPTIONS: [&str; 7] = [
        "zoned",
        "zone-capacity",
        "max-open",
        "max-active",
        "append-limit",
        "zone-extension",
        "read-across",
    ];

    /// Minimum zone size in bytes.
    pub const SMALLEST: u64 = 64 << 10;
    /// Maximum number of zones. A scan of that many zones takes a fraction of a millisecond.
    pub const MAX_ZONES: u64 = 1 << 18;

    /// Format with zones of this size. The zones are writable up to their end, and all of them can
    /// be open. `None` if the size is not supported.
    #[must_use]
    pub fn new(size: u64) -> Option<Self> {
        let format = Self::unchecked(size);
        format.check(512).is_ok().then_some(format)
    }

    /// Creates a format like [`new`](Self::new), without a check of the size.
    fn unchecked(size: u64) -> Self {
        Self {
            size,
            capacity: size,
            max_open: 0,
            max_active: 0,
            append_limit: 0,
            extension: 0,
            read_across: false,
        }
    }

    /// Checks that the fields are consistent, and fit the block size.
    ///
    /// # Errors
    /// A sentence with the reason.
    pub fn check(&self, block_size: u32) -> Result<(), String> {
        let block = u64::from(block_size);
        if !self.size.is_power_of_two() || self.size < Self::SMALLEST || self.size > 1 << 46 {
            return Err(format!(
                "the size of a zone is a power of two, of at least {}, not {}",
                format_size(Self::SMALLEST),
                format_size(self.size)
            ));
        }
        if self.capacity == 0 || self.capacity > self.size || !self.capacity.is_multiple_of(block) {
            return Err(format!(
                "`zone-capacity` is at most the size of a zone, and a multiple of {block_size} \
                 bytes, not {}",
                self.capacity
            ));
        }
        if self.max_active != 0 && (self.max_open == 0 || self.max_open > self.max_active) {
            return Err("`max-open` is not more than `max-active`".to_owned());
        }
        let limit = self.append_limit;
        if limit != 0 && (!limit.is_power_of_two() || limit < 4096) {
            return Err("`append-limit` is a power of two, and at least 4096".to_owned());
        }
        Ok(())
    }

    /// Parses the zone options of a disk. `None` if there are none.
    ///
    /// # Errors
    /// A sentence that names the mistake.
    pub fn parse<'a>(
        options: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<Option<Self>, String> {
        let options: Vec<_> = options.collect();
        let Some((name, _)) = options.first() else { return Ok(None) };
        let size = options.iter().find(|(name, _)| *name == "zoned");
        let (_, size) = size
            .ok_or_else(|| format!("the option `{name}` needs a zone size, as in `zoned=64MiB`"))?;
        let mut format = Self::unchecked(parse_size(size)?);
        let mut seen = Vec::new();
        for (name, value) in options {
            if seen.contains(&name) {
                return Err(format!("the option `{name}` is given twice"));
            }
            seen.push(name);
            let number = || {
                value.parse().map_err(|_| format!("the option `{name}` is a number, not `{value}`"))
            };
            match name {
                "zoned" => {}
                "zone-capacity" => format.capacity = parse_size(value)?,
                "max-open" => format.max_open = number()?,
                "max-active" => format.max_active = number()?,
                "append-limit" => format.append_limit = parse_size(value)?,
                "zone-extension" => {
                    let bytes = number()?;
                    format.extension = u8::try_from(bytes / 64)
                        .ok()
                        .filter(|_| bytes.is_multiple_of(64))
                        .ok_or_else(|| {
                            format!("`zone-extension` is a multiple of 64 below 16384, not {value}")
                        })?;
                }
                "read-across" => {
                    format.read_across = match value {
                        "on" | "true" | "yes" => true,
                        "off" | "false" | "no" => false,
                        _ => {
                            return Err(format!(
                                "the option `{name}` is `on` or `off`, not `{value}`"
                            ));
                        }
                    }
                }
                _ => return Err(format!("there is no zone option `{name}`")),
            }
        }
        // Every open zone is active, so a limit of active zones also limits the open ones.
        if format.max_active != 0 && format.max_open == 0 {
            format.max_open = format.max_active;
        }
        // The smallest block size is assumed here; opening the disk checks the actual one.
        format.check(512)?;
        Ok(Some(format))
    }

    /// Zone Descriptor Extension size in bytes.
    #[must_use]
    pub fn extension_bytes(&self) -> usize {
        usize::from(self.extension) * 64
    }
}

/// Parameters of Report Zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneReport {
    /// Offset on the disk in bytes. The report begins with the zone that contains this offset.
    pub from: u64,
    /// Zone state to report; `None` for all.
    pub which: Option<ZoneState>,
    /// True for a partial report: its number of zones counts only the reported zones.
    pub partial: bool,
    /// True for an extended report, with Zone Descriptor Extensions.
    pub extended: bool,
    /// Length of the report buffer in bytes.
    pub len: usize,
}

/// Zones of a disk, for the controller. Offsets and lengths are in bytes.
pub trait Zones {
    /// Zone format.
    fn format(&self) -> &ZoneFormat;

    /// Number of zones.
    fn count(&self) -> u64;

    /// Checks that a write of these bytes is possible now.
    ///
    /// # Errors
    /// The error with which the write would fail.
    fn check_write(&self, offset: u64, len: u64) -> Result<(), DiskError>;

    /// Checks that a host may read these bytes.
    ///
    /// # Errors
    /// The error with which the read would fail.
    fn check_read(&self, offset: u64, len: u64) -> Result<(), DiskError>;

    /// Builds a Report Zones data structure of at most [`ZoneReport::len`] bytes.
    ///
    /// # Errors
    /// [`DiskError::OutOfRange`]; [`DiskError::InvalidZone`] if the buffer is too short for the
    /// header, or if an extended report is requested and the zones have no extensions.
    fn report(&self, report: &ZoneReport) -> Result<Vec<u8>, DiskError>;
}
