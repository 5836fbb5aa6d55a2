//! Commands of a namespace pool: Namespace Management, Namespace Attachment and Format NVM.
//!
//! * Namespace Management and Namespace Attachment, and the LBA formats of the pool. Base 2.1,
//!   5.1.20 and 5.1.21; NVM 1.1, 4.1.6.
//! * Format NVM: changes the block format and erases the contents. Base 2.1, 5.1.10; NVM 1.1,
//!   4.1.2.

use crate::pool::{PoolAct, PoolState, bytes_of};
use shadowbell_disk::MetadataFormat;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{FormatNvm, NamespaceAttachment, NamespaceManagement};
use shadowbell_spec::identify::{
    ControllerList, Dpc, Dps, Flbas, IdentifyNamespace, IdentifyNvmNamespace, LbaFormat, Mc,
    NamespaceToCreate, csi,
};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;
use zerocopy::FromBytes;

/// Number of bytes that Namespace Management and Namespace Attachment transfer from the host.
pub(crate) const DATA: usize = 4096;

const INVALID_FIELD: Status = Status::INVALID_FIELD.with_dnr();
const INVALID_NAMESPACE: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();

/// Checks that the pool contains namespace `nsid`.
///
/// # Errors
/// Invalid Namespace or Format if the namespace does not exist. Operation Denied if `is_given` is
/// true: the namespace is not in the pool, but in the controller's configuration.
pub(crate) fn find(nsid: u32, state: &PoolState, is_given: bool) -> Result<(), Status> {
    if is_given {
        // Operation Denied is the closest status in the specification: the host may use the
        // namespace, but not delete it.
        return Err(Status::OPERATION_DENIED.with_dnr());
    }
    state.get(nsid).map(drop).ok_or(INVALID_NAMESPACE)
}

/// Number of bytes that a Namespace Management command transfers from the host.
pub(crate) fn data_length(sqe: &Sqe) -> usize {
    let is_creation = NamespaceManagement::decode(sqe).sel == NamespaceManagement::CREATE;
    if is_creation { DATA } else { 0 }
}

/// Decodes and checks Namespace Management. `uuid` is the UUID for a created namespace. `is_given`
/// is true if the command's NSID belongs to a namespace outside the pool.
///
/// # Errors
/// The completion status of the command.
pub(crate) fn management(
    sqe: &Sqe,
    data: Option<&[u8]>,
    state: &PoolState,
    (uuid, is_given): ([u8; 16], bool),
) -> Result<PoolAct, Status> {
    let command = NamespaceManagement::decode(sqe);
    match command.sel {
        NamespaceManagement::CREATE => {
            if command.csi != csi::NVM {
                return Err(Status::INVALID_IO_COMMAND_SET.with_dnr());
            }
            let wanted = data.and_then(|data| NamespaceToCreate::read_from_bytes(data).ok());
            let wanted = wanted.ok_or(Status::INTERNAL)?;
            let (blocks, BlockFormat { block_size, metadata }) = create(&wanted)?;
            let bytes = bytes_of(blocks, block_size, metadata.as_ref());
            if bytes.is_none_or(|bytes| bytes > state.unallocated()) {
                return Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY.with_dnr());
            }
            Ok(PoolAct::Create { uuid, blocks, block_size, metadata })
        }
        NamespaceManagement::DELETE if sqe.nsid == NSID_ALL => {
            Ok(PoolAct::Delete(state.namespaces.iter().map(|namespace| namespace.nsid).collect()))
        }
        NamespaceManagement::DELETE => {
            find(sqe.nsid, state, is_given)?;
            Ok(PoolAct::Delete(vec![sqe.nsid]))
        }
        _ => Err(INVALID_FIELD),
    }
}

/// Decodes number of blocks and block format of a namespace to create.
fn create(wanted: &NamespaceToCreate) -> Result<(u64, BlockFormat), Status> {
    let NamespaceToCreate { nsze, ncap, flbas, dps, nmic, anagrpid, nvmsetid, endgid, .. } =
        *wanted;
    let protection = (dps.pit(), dps.pip());
    let format = block_format(flbas.index(), flbas.extended(), protection)?;
    // Thin provisioning is not supported: a capacity below the size is refused (Base 2.1, 3.2.1.6,
    // NSFEAT.THINP). ANA groups, NVM sets and endurance groups do not exist, so their identifiers
    // must be 0.
    if nsze != ncap {
        return Err(Status::THIN_PROVISIONING_NOT_SUPPORTED.with_dnr());
    }
    let is_plain = dps.into_bits() >> 4 == 0 && nmic.into_bits() == 0;
    let has_no_group = anagrpid == 0 && nvmsetid == 0 && endgid == 0;
    if nsze == 0 || !is_plain || !has_no_group {
        return Err(INVALID_FIELD);
    }
    Ok((nsze, format))
}

/// Decodes and checks Namespace Attachment. `cntlid` is the identifier of the controller that
/// processes the command. It is the only controller of the subsystem.
///
/// # Errors
/// The completion status of the command.
pub(crate) fn attachment(
    sqe: &Sqe,
    data: Option<&[u8]>,
    state: &PoolState,
    (cntlid, is_given, is_repeat): (u16, bool, bool),
) -> Result<PoolAct, Status> {
    let command = NamespaceAttachment::decode(sqe);
    let list = data.and_then(|data| ControllerList::read_from_bytes(data).ok());
    let list = list.ok_or(Status::INTERNAL)?;
    find(sqe.nsid, state, is_given)?;
    let is_attached = state.get(sqe.nsid).is_some_and(|namespace| namespace.attached);
    let act = match command.sel {
        NamespaceAttachment::ATTACH => PoolAct::Attach(sqe.nsid),
        NamespaceAttachment::DETACH => PoolAct::Detach(sqe.nsid),
        _ => return Err(INVALID_FIELD),
    };
    // A valid list contains exactly this controller.
    if list.count != 1 || list.cntlids.first() != Some(&cntlid) {
        return Err(Status::CONTROLLER_LIST_INVALID.with_dnr());
    }
    match act {
        PoolAct::Attach(_) if is_attached && !is_repeat => {
            Err(Status::NAMESPACE_ALREADY_ATTACHED.with_dnr())
        }
        PoolAct::Detach(_) if !is_attached && !is_repeat => {
            Err(Status::NAMESPACE_NOT_ATTACHED.with_dnr())
        }
        act => Ok(act),
    }
}

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
/// end of the data. `protection` is the type of protection information, and `first` is true if the
/// protection information is in the first bytes of the metadata.
///
/// # Errors
/// Invalid Format.
fn block_format(
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
    // Without protection information, its position in the metadata has no meaning.
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

/// Secure Erase Settings: no secure erase. A format erases the contents in this case too.
const NO_ERASE: u8 = 0;
const USER_DATA_ERASE: u8 = 1;

/// Decodes and checks a Format NVM command. `is_given` is true if the command's NSID belongs to a
/// namespace outside the pool. `given` is true if any namespace of the controller is outside the
/// pool.
///
/// # Errors
/// The completion status of the command.
pub(crate) fn format(
    sqe: &Sqe,
    state: &PoolState,
    (is_given, given): (bool, bool),
) -> Result<PoolAct, Status> {
    let command = FormatNvm::decode(sqe);
    let protection = (command.pi, command.pil);
    let BlockFormat { block_size, metadata } =
        block_format(command.lbaf, command.mset, protection)?;
    let least = bytes_of(1, block_size, metadata.as_ref()).unwrap_or(u64::MAX);
    if !matches!(command.ses, NO_ERASE | USER_DATA_ERASE) {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    let nsids = if sqe.nsid == NSID_ALL {
        // The command formats all attached namespaces, but namespaces outside the pool cannot be
        // formatted.
        if given {
            return Err(Status::OPERATION_DENIED.with_dnr());
        }
        let attached = state.namespaces.iter().filter(|namespace| namespace.attached);
        attached.map(|namespace| namespace.nsid).collect()
    } else {
        find(sqe.nsid, state, is_given)?;
        vec![sqe.nsid]
    };
    for namespace in state.namespaces.iter().filter(|ns| nsids.contains(&ns.nsid)) {
        if namespace.bytes() < least {
            return Err(Status::INVALID_FORMAT.with_dnr());
        }
    }
    Ok(PoolAct::Format { nsids, block_size, metadata })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_lba_format_has_its_metadata_and_protection_capabilities() {
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
