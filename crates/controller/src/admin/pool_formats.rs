//! LBA formats of a namespace pool.

use shadowbell_backend::MetadataFormat;
use shadowbell_spec::identify::{
    Dpc, Dps, Flbas, IdentifyNamespace, IdentifyNvmNamespace, LbaFormat, Mc,
};
use shadowbell_spec::status::Status;

/// LBA formats by index: bytes of data, bytes of metadata, and true for a 64-bit guard.
const FORMATS: [(u32, u16, bool); 12] = [
    (512, 0, false),
    (4096, 0, false),
    (512, 8, false),
    (4096, 8, false),
    (512, 16, false),
    (4096, 16, false),
    (512, 64, false),
    (4096, 64, false),
    (512, 16, true),
    (4096, 16, true),
    (512, 64, true),
    (4096, 64, true),
];

/// Block size and metadata format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockFormat {
    pub(crate) block_size: u32,
    pub(crate) metadata: Option<MetadataFormat>,
}

/// Block format of LBA format index `lbaf`. `extended` is true if metadata is transferred at the
/// end of the data. `protection` is the type of protection information, and `first` is true if it
/// is in the first bytes of the metadata.
///
/// # Errors
/// Invalid Format.
pub(crate) fn block_format(
    lbaf: u8,
    extended: bool,
    (protection, first): (u8, bool),
) -> Result<BlockFormat, Status> {
    let invalid = Status::INVALID_FORMAT.with_dnr();
    let (block_size, size, wide_guard) = *FORMATS.get(usize::from(lbaf)).ok_or(invalid)?;
    let Some(mut metadata) = MetadataFormat::new(size) else {
        let is_plain = !extended && protection == 0 && !first;
        return is_plain.then_some(BlockFormat { block_size, metadata: None }).ok_or(invalid);
    };
    // Without protection information its position has no meaning.
    let first = first && protection != 0;
    (metadata.extended, metadata.protection) = (extended, protection);
    (metadata.wide_guard, metadata.first) = (wide_guard, first);
    let metadata = Some(metadata).filter(MetadataFormat::is_possible).ok_or(invalid)?;
    Ok(BlockFormat { block_size, metadata: Some(metadata) })
}

fn index_of(format: &BlockFormat) -> u8 {
    let (size, wide) = format.metadata.map_or((0, false), |own| (own.size, own.wide_guard));
    let wanted = (format.block_size, size, wide);
    FORMATS.iter().position(|format| *format == wanted).unwrap_or_default() as u8
}

/// Adds the list of LBA formats, and marks `format` as the namespace's format.
pub(super) fn add_formats(namespace: &mut IdentifyNamespace, format: &BlockFormat) {
    let metadata = format.metadata;
    namespace.nlbaf = (FORMATS.len() - 1) as u8;
    let extended = metadata.is_some_and(|own| own.extended);
    namespace.flbas = Flbas::new().with_low(index_of(format)).with_extended(extended);
    namespace.mc = Mc::new().with_extended(true).with_separate(true);
    namespace.dpc = Dpc::new()
        .with_type1(true)
        .with_type2(true)
        .with_type3(true)
        .with_first(true)
        .with_last(true);
    if let Some(own) = metadata {
        namespace.dps = Dps::new().with_pit(own.protection).with_pip(own.first);
    }
    for (to, (block_size, ms, _)) in namespace.lbaf.iter_mut().zip(FORMATS) {
        *to = LbaFormat { ms, lbads: block_size.trailing_zeros() as u8, rp: 0 };
    }
}

/// Extended LBA formats, which are common to all namespaces of a pool.
pub(super) fn extended_formats() -> IdentifyNvmNamespace {
    let mut identify = IdentifyNvmNamespace::default();
    for (to, (_, size, wide_guard)) in identify.elbaf.iter_mut().zip(FORMATS) {
        if let Some(mut metadata) = MetadataFormat::new(size) {
            metadata.wide_guard = wide_guard;
            *to = metadata.guard().code() << 7;
        }
    }
    identify
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_and_what_goes_with_them() {
        let invalid = Err(Status::INVALID_FORMAT.with_dnr());
        for lbaf in 0..FORMATS.len() as u8 {
            let plain = block_format(lbaf, false, (0, false)).unwrap();
            assert_eq!(index_of(&plain), lbaf);
            let mut identify = IdentifyNamespace::default();
            add_formats(&mut identify, &plain);
            let format = identify.format().unwrap();
            assert_eq!(format.block_size(), Some(plain.block_size.into()));
            assert_eq!(format.ms, plain.metadata.map_or(0, |own| own.size));
            for (extended, protection) in
                [(true, (0, false)), (true, (1, true)), (false, (2, false)), (false, (3, true))]
            {
                let all = block_format(lbaf, extended, protection);
                assert_eq!(all.is_ok(), plain.metadata.is_some());
                let Ok(all) = all else { continue };
                add_formats(&mut identify, &all);
                assert_eq!((identify.dps.pit(), identify.dps.pip()), protection);
                assert_eq!((identify.flbas.index(), identify.flbas.extended()), (lbaf, extended));
            }
            assert_eq!(block_format(lbaf, false, (4, false)), invalid);
        }
        assert_eq!(block_format(12, false, (0, false)), invalid);
        let elbaf = extended_formats().elbaf;
        assert_eq!((elbaf[0], elbaf[7], elbaf[8], elbaf[11], elbaf[12]), (0, 0, 256, 256, 0));
    }
}
