//! Metadata of logical blocks: format of a disk, and parameters of a request.

use serde::{Deserialize, Serialize};
use shadowbell_spec::protection::{GuardKind, ProtectionFields};

/// Metadata format of each logical block of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MetadataFormat {
    /// Metadata size in bytes: 8, 16 or 64.
    pub size: u16,
    /// True if metadata are transferred at the end of each block (extended LBA), false if in a
    /// separate buffer.
    pub extended: bool,
    /// Protection information type, 1 to 3; 0 for none.
    pub protection: u8,
    /// True if the guard of the protection information has 64 bits, false if it has 16.
    pub wide_guard: bool,
    /// True if protection information is in the first bytes of the metadata, false if in the last.
    pub first: bool,
}

impl MetadataFormat {
    /// Disk options that specify a metadata format.
    pub const OPTIONS: [&str; 5] = ["metadata", "extended", "pi", "guard", "pi-first"];

    /// Format of `size` bytes without protection information, in a separate buffer. `None` if the
    /// size is not supported.
    #[must_use]
    pub fn new(size: u16) -> Option<Self> {
        let plain = Self { size, extended: false, protection: 0, wide_guard: false, first: false };
        matches!(size, 8 | 16 | 64).then_some(plain)
    }

    /// CRC that forms the guard of the protection information.
    #[must_use]
    pub fn guard(&self) -> GuardKind {
        if self.wide_guard { GuardKind::Crc64 } else { GuardKind::Crc16 }
    }

    /// Size of the protection information in bytes; 0 if there is none.
    #[must_use]
    pub fn protection_size(&self) -> usize {
        if self.protection == 0 { 0 } else { self.guard().size() }
    }

    /// Offset of the protection information in the metadata of a block.
    #[must_use]
    pub fn protection_at(&self) -> usize {
        if self.first { 0 } else { usize::from(self.size).saturating_sub(self.protection_size()) }
    }

    /// True if the combination of the fields is valid.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        Self::new(self.size).is_some()
            && self.protection <= 3
            && self.protection_size() <= self.size.into()
            && (!self.wide_guard || self.size >= 16)
            && (self.protection != 0 || !self.first)
    }

    /// Size in bytes that the disk below needs for `blocks` blocks and their metadata; `None` if it
    /// exceeds 64 bits.
    #[must_use]
    pub fn bytes_for(&self, blocks: u64, block_size: u32) -> Option<u64> {
        let block = u64::from(block_size);
        let metadata = blocks.checked_mul(self.size.into())?.checked_next_multiple_of(block)?;
        blocks.checked_mul(block)?.checked_add(metadata)
    }

    /// Formats the disk options that specify this format.
    #[must_use]
    pub fn options(&self) -> String {
        let Self { size, extended, protection, wide_guard, first } = *self;
        let switch = |on| if on { "on" } else { "off" };
        let guard = if wide_guard { 64 } else { 16 };
        format!(
            "metadata={size}&extended={}&pi={protection}&guard={guard}&pi-first={}",
            switch(extended),
            switch(first)
        )
    }

    /// Parses the metadata options of a disk. `None` if they specify no metadata.
    ///
    /// # Errors
    /// A sentence that names the mistake.
    pub fn parse<'a>(
        options: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<Option<Self>, String> {
        let mut format: Option<Self> = None;
        let mut others = Vec::new();
        for (name, value) in options {
            match (name, value) {
                ("metadata", "0") => {}
                ("metadata", _) => {
                    let size = value.parse().ok().and_then(Self::new).ok_or_else(|| {
                        format!("`metadata={value}`: a block has 0, 8, 16 or 64 bytes of metadata")
                    })?;
                    format = Some(size);
                }
                other => others.push(other),
            }
        }
        let Some(mut format) = format else {
            return match others.first() {
                None => Ok(None),
                Some((name, _)) => {
                    Err(format!("`{name}` needs a metadata size, as in `metadata=8`"))
                }
            };
        };
        for (name, value) in others {
            match (name, value) {
                ("extended", "on") => format.extended = true,
                ("pi", "1" | "2" | "3") => format.protection = value.as_bytes()[0] - b'0',
                ("guard", "64") => format.wide_guard = true,
                ("pi-first", "on") => format.first = true,
                ("extended" | "pi-first", "off") | ("pi", "0") | ("guard", "16") => {}
                ("extended" | "pi-first", _) => {
                    return Err(format!("`{name}={value}`: it is `on` or `off`"));
                }
                ("pi", _) => {
                    return Err(format!("`pi={value}`: protection information has type 1, 2 or 3"));
                }
                _ => return Err(format!("`{name}={value}`: a guard has 16 or 64 bits")),
            }
        }
        if format.wide_guard && format.size < 16 {
            return Err("a guard of 64 bits takes 16 bytes of metadata or 64".to_owned());
        }
        if !format.is_possible() {
            return Err(
                "`pi-first` needs a type of protection information, as in `pi=1`".to_owned()
            );
        }
        Ok(Some(format))
    }
}

/// Position of the metadata in a request's buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MetadataBuffer {
    /// Not transferred. The metadata of written blocks are zeroes, except for generated protection
    /// information.
    #[default]
    None,
    /// After the data of the last block.
    Behind,
    /// After the data of each block (extended LBA).
    Extended,
}

/// Metadata parameters of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// Protection information fields of the command. With PRACT, protection information is
    /// generated for written blocks. Only `buffer`, and not PRACT, determines if metadata are
    /// transferred.
    pub fields: ProtectionFields,
    /// Position of the metadata.
    pub buffer: MetadataBuffer,
}

impl Metadata {
    /// Parameters for the part of a request that begins with block number `nth` of the request: the
    /// reference tag is advanced.
    #[must_use]
    pub fn after(self, nth: u64, format: &MetadataFormat) -> Self {
        let ref_tag = self.fields.ref_tag_of(format.protection, format.guard(), nth);
        Self { fields: ProtectionFields { ref_tag, ..self.fields }, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Option<MetadataFormat>, String> {
        MetadataFormat::parse(text.split('&').filter_map(|option| option.split_once('=')))
    }

    #[test]
    fn formats_are_options() {
        assert_eq!(parse(""), Ok(None));
        assert_eq!(parse("metadata=0"), Ok(None));
        let plain = MetadataFormat::new(8).unwrap();
        assert_eq!(parse("metadata=8"), Ok(Some(plain)));
        assert_eq!(parse("pi=1&metadata=8"), Ok(Some(MetadataFormat { protection: 1, ..plain })));
        let all = parse("metadata=64&extended=on&pi=3&guard=64&pi-first=on").unwrap().unwrap();
        assert_eq!((all.size, all.extended, all.protection), (64, true, 3));
        assert_eq!(parse(&all.options()), Ok(Some(all)));
        assert_eq!(parse(&plain.options()), Ok(Some(plain)));
        assert_eq!((all.protection_size(), all.protection_at()), (16, 0));
        let last = parse("metadata=64&pi=2").unwrap().unwrap();
        assert_eq!((last.protection_size(), last.protection_at()), (8, 56));
        for wrong in [
            "metadata=7",
            "pi=1",
            "metadata=8&pi=4",
            "metadata=8&guard=64",
            "metadata=16&guard=32",
            "metadata=16&pi-first=on",
            "metadata=16&extended=1",
        ] {
            parse(wrong).unwrap_err();
        }
    }
}
