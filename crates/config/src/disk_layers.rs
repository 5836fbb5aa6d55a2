//! Layers around a disk in a specification: metadata or zones, error policy, rate limits.

use crate::limits::{DiskLimits, GROUP};
use shadowbell_disk::{Disk, MetadataFormat, ZoneFormat};
use shadowbell_disk_layers::{ErrorPolicy, HoldingDisk, Limits, MetadataDisk, ZonedDisk};
use std::sync::Arc;

/// Layers around a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layers {
    /// Metadata of each block.
    pub metadata: Option<MetadataFormat>,
    /// Zones.
    pub zoned: Option<ZoneFormat>,
    /// Policy for requests that fail because of the storage.
    pub on_error: ErrorPolicy,
    /// Rate limits and limit group.
    pub limits: DiskLimits,
}

impl Layers {
    /// Splits `spec` into the options of layers and the rest.
    ///
    /// # Errors
    /// A sentence about an invalid option.
    pub fn split(spec: &str) -> Result<(String, Self), String> {
        let (spec, limits) = DiskLimits::split(spec)?;
        let Some((disk, options)) = spec.split_once('?') else {
            return Ok((spec, Self { limits, ..Self::default() }));
        };
        let is_of = |options: &[&str], option: &str| {
            option.split_once('=').is_some_and(|(name, _)| options.contains(&name))
        };
        let (metadata, rest): (Vec<&str>, Vec<_>) =
            options.split('&').partition(|option| is_of(&MetadataFormat::OPTIONS, option));
        let (zoned, rest): (Vec<&str>, Vec<_>) =
            rest.into_iter().partition(|option| is_of(&ZoneFormat::OPTIONS, option));
        let metadata =
            MetadataFormat::parse(metadata.iter().filter_map(|option| option.split_once('=')))?;
        let zoned = ZoneFormat::parse(zoned.iter().filter_map(|option| option.split_once('=')))?;
        let (on_error, rest): (Vec<&str>, Vec<_>) =
            rest.into_iter().partition(|option| is_of(&[ErrorPolicy::OPTION], option));
        let on_error = on_error.first().and_then(|option| option.split_once('='));
        let on_error = on_error.map_or(Ok(ErrorPolicy::Report), |(_, policy)| policy.parse())?;
        let rest = match &rest[..] {
            [] => disk.to_owned(),
            rest => format!("{disk}?{}", rest.join("&")),
        };
        Ok((rest, Self { metadata, zoned, on_error, limits }))
    }

    /// Names of the options that all disks have: those of layers, and the UUID of the namespace.
    pub fn options() -> impl Iterator<Item = &'static str> {
        let of_layers = MetadataFormat::OPTIONS.into_iter().chain(ZoneFormat::OPTIONS);
        let others = [GROUP, ErrorPolicy::OPTION];
        ["uuid"].into_iter().chain(Limits::NAMES).chain(others).chain(of_layers)
    }

    /// Wraps `disk` in the layers. Rate limits are the outermost layer: they count the requests of
    /// the host, not the additional I/O for metadata, and not repetitions of failed requests. The
    /// layer that holds failed requests (`on-error`) is above the metadata layer, so it repeats a
    /// request with its metadata. It is below the zone layer, so a held request does not fail there
    /// and write pointers stay correct. `recovers` is true if this process recovers the disk of
    /// another process.
    ///
    /// # Errors
    /// A sentence about a layer that the disk does not support.
    pub fn wrap_disk(&self, disk: Arc<dyn Disk>, recovers: bool) -> Result<Arc<dyn Disk>, String> {
        let disk = match self.metadata {
            None => disk,
            Some(format) => Arc::new(MetadataDisk::new(disk, format)?),
        };
        let disk = HoldingDisk::wrap(disk, self.on_error);
        let disk = match self.zoned {
            None => disk,
            Some(format) => {
                let disk = ZonedDisk::new(disk, format, recovers)?;
                if let Some(damaged) = disk.damaged() {
                    tracing::warn!("{damaged}");
                }
                Arc::new(disk) as Arc<dyn Disk>
            }
        };
        Ok(self.limits.limit(disk))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_disk_layers::LimitedDisk;

    #[test]
    fn layers_are_options_of_any_disk() {
        let (rest, layers) = Layers::split("a.img?pi=1&direct=on&metadata=8&iops=7").unwrap();
        assert_eq!(rest, "a.img?direct=on");
        assert_eq!(layers.metadata.map(|format| (format.size, format.protection)), Some((8, 1)));
        let disk = shadowbell_disk_file::open("mem:1MiB").unwrap();
        let disk = layers.wrap_disk(disk, false).unwrap();
        assert_eq!(
            (disk.info().metadata, LimitedDisk::of(&*disk).unwrap().limiters().len()),
            (layers.metadata, 1)
        );
        for spec in ["a.img", "a.img?direct=on", "mem:1MiB?x", "a?"] {
            assert_eq!(Layers::split(spec), Ok((spec.to_owned(), Layers::default())));
        }
        assert_eq!(Layers::split("a?metadata=0").unwrap().0, "a");
        for spec in ["a?metadata=9", "a?pi=1", "a?metadata=8&guard=64", "a?iops=fast"] {
            Layers::split(spec).unwrap_err();
        }
        let (rest, layers) =
            Layers::split("mem:4MiB?zoned=1MiB&max-open=2&block-size=4096&iops=7").unwrap();
        assert_eq!(rest, "mem:4MiB?block-size=4096");
        let disk = shadowbell_disk_file::open(&rest).unwrap();
        let disk = layers.wrap_disk(disk, false).unwrap();
        assert_eq!((disk.info().zoned, disk.info().blocks), (layers.zoned, 3 << 8));
        for spec in ["a?zoned=1000", "a?max-open=1", "a?zoned=1MiB&zone-capacity=2MiB"] {
            Layers::split(spec).unwrap_err();
        }
        let (_, layers) = Layers::split("a?metadata=8&zoned=64KiB").unwrap();
        let both = layers.wrap_disk(shadowbell_disk_file::open("mem:4MiB").unwrap(), false);
        assert!(both.unwrap_err().contains("cannot have metadata"));
        let (rest, layers) = Layers::split("mem:4MiB?on-error=stop&block-size=4096").unwrap();
        assert_eq!((&rest[..], layers.on_error), ("mem:4MiB?block-size=4096", ErrorPolicy::Stop));
        let disk = shadowbell_disk_file::open(&rest).unwrap();
        let held = layers.wrap_disk(Arc::clone(&disk), false).unwrap();
        assert!(held.inner().is_some_and(|inner| Arc::ptr_eq(inner, &disk)));
        let (_, layers) = Layers::split("mem:4MiB?on-error=report").unwrap();
        assert!(Arc::ptr_eq(&layers.wrap_disk(Arc::clone(&disk), false).unwrap(), &disk));
        let why = Layers::split("a?on-error=halt").unwrap_err();
        assert!(why.contains("`stop-on-full`, not `halt`"), "{why}");
        let (_, layers) = Layers::split("a?metadata=8&pi=1").unwrap();
        let small = shadowbell_disk_file::open("mem:512").unwrap();
        layers.wrap_disk(small, false).unwrap_err();
    }
}
