//! How large zones are, and how many may be open.

use crate::size::{format_size, parse_size};
use serde::{Deserialize, Serialize};

/// What the zones of a disk are. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ZoneFormat {
    /// From the start of a zone to that of the next; a power of two, at least
    /// [`SMALLEST`](Self::SMALLEST).
    pub size: u64,
    /// How much of it can be written.
    pub capacity: u64,
    /// How many zones may be open at a time; 0 for no limit.
    pub max_open: u32,
    /// How many may be open or closed; 0 for no limit.
    pub max_active: u32,
    /// Zone Append Size Limit: the longest Zone Append, a power of two; 0 for that of all
    /// transfers.
    pub append_limit: u64,
    /// Units of 64 bytes that a host may keep with each zone (Zone Descriptor Extension).
    pub extension: u8,
    /// A read may go on in the next zone.
    pub read_across: bool,
}

impl ZoneFormat {
    /// Options of a disk that say such a format.
    pub const OPTIONS: [&str; 7] = [
        "zoned",
        "zone-capacity",
        "max-open",
        "max-active",
        "append-limit",
        "zone-extension",
        "read-across",
    ];

    /// The smallest zone.
    pub const SMALLEST: u64 = 64 << 10;
    /// The most zones: looking through all of them takes a fraction of a millisecond.
    pub const MOST: u64 = 1 << 18;

    /// Zones of this size, which can all be written whole, and be open at the same time. `None` if
    /// no zone is so large.
    #[must_use]
    pub fn new(size: u64) -> Option<Self> {
        let format = Self::whole(size);
        format.check(512).is_ok().then_some(format)
    }

    /// The same, whatever the size.
    fn whole(size: u64) -> Self {
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

    /// Whether the fields fit each other, and blocks of this size.
    ///
    /// # Errors
    /// Why not, in a sentence.
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

    /// The format that these options of a disk say, and `None` if they say nothing of one.
    ///
    /// # Errors
    /// What is wrong with them, in a sentence.
    pub fn parse<'a>(
        options: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<Option<Self>, String> {
        let options: Vec<_> = options.collect();
        let Some((name, _)) = options.first() else { return Ok(None) };
        let size = options.iter().find(|(name, _)| *name == "zoned");
        let (_, size) = size.ok_or_else(|| {
            format!(
                "the option `{name}` is about zones; say how large these are with `zoned=64MiB`"
            )
        })?;
        let mut format = Self::whole(parse_size(size)?);
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
                _ => return Err(format!("there is no option `{name}` about zones")),
            }
        }
        // Whoever says how many may be active means that at least as many may be open.
        if format.max_active != 0 && format.max_open == 0 {
            format.max_open = format.max_active;
        }
        // Of the smallest blocks; the disk looks again.
        format.check(512)?;
        Ok(Some(format))
    }

    /// Bytes that a host may keep with each zone.
    #[must_use]
    pub fn extension_bytes(&self) -> usize {
        usize::from(self.extension) * 64
    }
}
