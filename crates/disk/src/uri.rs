//! Disks as people write them.

use crate::{Disk, MemDisk, NullDisk, OpenError};
use bytesize::ByteSize;
use std::sync::Arc;

/// Opens the disk that `spec` names.
///
/// | `spec` | the disk |
/// |---|---|
/// | `disk.img`, `./disk.img`, `/dev/sdb`, `file:disk.img`, `file:///srv/disk.img` | a raw image or a block device |
/// | `mem:1GiB` | memory of this process, zeroes at first, gone with it |
/// | `null:1TiB` | keeps nothing, answers at once |
///
/// Options follow a `?`, joined by `&`: `disk.img?block-size=4096&read-only=on`.
///
/// | option | of | value | default |
/// |---|---|---|---|
/// | `block-size` | all | `512` or `4096` | `512`; a block device's own |
/// | `read-only` | all | `on`, `off` | `off`; `on` for a file that we may not write |
/// | `direct` | file | `on`: bypass the page cache or fail; `off`: use it; `auto`: bypass it if the file system and the block size allow | `auto` |
/// | `read-zeroes` | null | `on`, `off`: leave the read buffer as it was | `off` |
///
/// Sizes take a unit: `512MiB`, `1.5TiB`, `1G` (binary, as the tools around disks have it), `1GB`
/// (decimal), or none for bytes.
///
/// A bare path is taken as it is, up to the first `?`. A path that holds a `?`, or starts like
/// `word:`, is written with `file:`, in which `%` and two hexadecimal digits stand for a byte:
/// `file:what%3F.img`, `file:100%25.img`.
///
/// # Errors
/// [`OpenError`], in a sentence for the person who wrote the specification.
pub fn open(spec: &str) -> Result<Arc<dyn Disk>, OpenError> {
    let parsed = parse(spec).map_err(|why| OpenError::Spec { spec: spec.to_owned(), why })?;
    Ok(match parsed {
        Parsed::Mem { size, block_size, read_only } => {
            let disk = MemDisk::new(size / u64::from(block_size), block_size)?;
            Arc::new(disk.with_read_only(read_only))
        }
        Parsed::Null { size, block_size, read_only, read_zeroes } => {
            let disk = NullDisk::new(size / u64::from(block_size), block_size);
            Arc::new(disk.with_read_only(read_only).with_read_zeroes(read_zeroes))
        }
    })
}

/// A specification, understood.
#[derive(Debug, PartialEq, Eq)]
enum Parsed {
    Mem { size: u64, block_size: u32, read_only: bool },
    Null { size: u64, block_size: u32, read_only: bool, read_zeroes: bool },
}

fn parse(spec: &str) -> Result<Parsed, String> {
    let (name, options) = spec.split_once('?').map_or((spec, None), |(n, o)| (n, Some(o)));
    let mut options = Options::parse(options)?;
    let block_size = options.block_size()?;
    let read_only = options.switch("read-only")?;
    let (scheme, rest) = name.split_once(':').unwrap_or(("file", name));
    let parsed = match scheme {
        "mem" | "null" => {
            let block_size = block_size.unwrap_or(512);
            let size = disk_size(scheme, rest, block_size)?;
            let read_only = read_only.unwrap_or(false);
            if scheme == "mem" {
                Parsed::Mem { size, block_size, read_only }
            } else {
                let read_zeroes = options.switch("read-zeroes")?.unwrap_or(false);
                Parsed::Null { size, block_size, read_only, read_zeroes }
            }
        }
        _ => {
            return Err(format!("there is no kind of disk called `{scheme}`"));
        }
    };
    options.none_left(scheme)?;
    Ok(parsed)
}

fn disk_size(scheme: &str, size: &str, block_size: u32) -> Result<u64, String> {
    if size.is_empty() {
        return Err(format!("it lacks a size; write for example `{scheme}:1GiB`"));
    }
    let bytes = parse_size(size)?;
    if !bytes.is_multiple_of(u64::from(block_size)) {
        return Err(format!(
            "its size of {bytes} bytes is no multiple of the block size of {block_size} bytes"
        ));
    }
    Ok(bytes)
}

/// Parses a size as people write it: `512MiB`, `1.5TiB`, `1G` (binary), `1GB` (decimal), `4096`.
///
/// # Errors
/// A sentence, for what is no size, is zero, or is more than 8 EiB less one byte.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let bad = || format!("`{text}` is no size; write for example `512MiB`, `10GiB` or `1TiB`");
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').trim();
    let binary = matches!(unit, "k" | "K" | "m" | "M" | "g" | "G" | "t" | "T" | "p" | "P");
    let parsed =
        if binary { format!("{text}iB").parse::<ByteSize>() } else { text.parse::<ByteSize>() };
    let bytes = parsed.map_err(|_| bad())?.as_u64();
    if bytes == 0 {
        return Err("its size is zero".to_owned());
    }
    if i64::try_from(bytes).is_err() {
        return Err(format!("the size `{text}` is more than a disk can have"));
    }
    Ok(bytes)
}

/// A size as people write it, exact: `1TiB`, `1536MiB`, `1000B`.
pub(crate) fn format_size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut value, mut unit) = (bytes, 0);
    while value != 0 && value.is_multiple_of(1024) && unit + 1 < units.len() {
        value /= 1024;
        unit += 1;
    }
    format!("{value}{}", units.get(unit).copied().unwrap_or("B"))
}

/// What follows the `?`.
struct Options<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Options<'a> {
    fn parse(text: Option<&'a str>) -> Result<Self, String> {
        let mut list: Vec<(&str, &str)> = Vec::new();
        for option in text.into_iter().flat_map(|t| t.split('&')) {
            let (name, value) = option.split_once('=').ok_or_else(|| {
                format!("`{option}` after the `?` is no option; options are written `name=value`")
            })?;
            if list.iter().any(|(other, _)| *other == name) {
                return Err(format!("the option `{name}` is given twice"));
            }
            list.push((name, value));
        }
        Ok(Self(list))
    }

    fn take(&mut self, name: &str) -> Option<&'a str> {
        let index = self.0.iter().position(|(n, _)| *n == name)?;
        Some(self.0.swap_remove(index).1)
    }

    fn switch(&mut self, name: &str) -> Result<Option<bool>, String> {
        match self.take(name) {
            None => Ok(None),
            Some("on" | "true" | "yes") => Ok(Some(true)),
            Some("off" | "false" | "no") => Ok(Some(false)),
            Some(other) => Err(format!("the option `{name}` is `on` or `off`, not `{other}`")),
        }
    }

    fn block_size(&mut self) -> Result<Option<u32>, String> {
        match self.take("block-size") {
            None => Ok(None),
            Some("512") => Ok(Some(512)),
            Some("4096" | "4k" | "4K" | "4KiB") => Ok(Some(4096)),
            Some(other) => Err(format!("the block size is 512 or 4096, not `{other}`")),
        }
    }

    fn none_left(&self, scheme: &str) -> Result<(), String> {
        let known = match scheme {
            "null" => "`block-size`, `read-only`, `read-zeroes`",
            "mem" => "`block-size`, `read-only`",
            _ => "`block-size`, `read-only`, `direct`",
        };
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => {
                Err(format!("a `{scheme}` disk has no option `{name}`; its options are {known}"))
            }
        }
    }
}
