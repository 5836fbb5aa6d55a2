//! Identify command, with the structures for namespace pools and zoned namespaces. Base 2.1,
//! 5.1.13; NVM 1.1, 4.1.5.

use super::logs::TRANSITION_SECONDS;
use super::namespace_management::{BlockFormat, add_formats, extended_formats};
use super::{
    ABORT_LIMIT, CRITICAL_TEMPERATURE, ERROR_LOG_ENTRIES, EXTENDED_MINUTES, FIRMWARE_REVISION,
    MAX_EVENT_REQUESTS, PELS, WARNING_TEMPERATURE, features, sanitize,
};
use crate::config::{Config, PCI_VENDOR_ID};
use crate::namespace::{
    COPY_BYTES, COPY_RANGES, Guarantees, IEEE_OUI, Namespace, Namespaces, placeholder,
};
use crate::pool::{PoolNamespace, PoolState};
use crate::subsystem::{MAX_ANA_GROUPS, Member};
use crate::uncorrectable::COMMAND_BYTES;
use shadowbell_disk::MetadataFormat;
use shadowbell_spec::admin::Identify;
use shadowbell_spec::identify::{
    Cmic, ControllerList, ControllerType, Ctratt, Dlfeat, Dpc, Dps, EntrySizes, Frmw,
    IDENTIFY_SIZE, IdentifyController, IdentifyIndependentNamespace, IdentifyNamespace,
    IdentifyNvmController, IdentifyNvmNamespace, IoCommandSets, LbaFormat, Lpa, Mc, NamespaceId,
    NamespaceIds, NamespaceList, Nmic, Nsfeat, Oacs, Oaes, Oncs, Sgls, Vwc, ascii_field, cns, csi,
    nqn_field,
};
use shadowbell_spec::log::{ANACAP_ALL_STATES, ANACAP_FIXED_GROUPS, AnaState};
use shadowbell_spec::regs::Vs;
use shadowbell_spec::reservation::{RESCAP_ALL, RESCAP_PTPL};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;
use shadowbell_spec::zns::{IdentifyZonedController, IdentifyZonedNamespace, ZonedLbaFormat};
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// Specification version of the controller: VS and VER.
pub(crate) const VERSION: Vs = Vs::V2_0;
/// Controller identifier of the only controller of an NVM subsystem.
pub(crate) const CNTLID: u16 = 1;
/// RTD3 Entry Latency: maximum duration of a normal shutdown, including the flush of all disks. The
/// value is the default of Linux, 5 seconds. Linux logs any other value as unusual.
pub(crate) const SHUTDOWN_MICROSECONDS: u32 = 5_000_000;
/// Namespace Attributes: currently write protected.
const NSATTR_WRITE_PROTECTED: u8 = 1;
/// Common Namespace Features: the namespace has no volatile write cache, independent of VWC of the
/// controller. Base 2.1, "I/O Command Set Independent Identify Namespace data structure".
const VOLATILE_CACHE_NOT_PRESENT: u8 = 1 << 5;
/// CNTID of Identify: the controller that processes the command.
const THIS_CONTROLLER: u16 = 0xffff;

pub(super) type Page = Box<[u8; IDENTIFY_SIZE]>;

/// Constant identity of a controller.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    controller: Box<IdentifyController>,
    member: Option<Arc<Member>>,
}

impl Identity {
    /// Identity for a valid configuration.
    pub(crate) fn new(config: &Config) -> Self {
        Self { controller: Box::new(controller(config)), member: config.member.clone() }
    }

    /// Controller identifier in the subsystem.
    pub(crate) fn cntlid(&self) -> u16 {
        self.controller.cntlid
    }

    /// Serial number, model number and NQN of the subsystem.
    pub(crate) fn names(&self) -> ([u8; 20], [u8; 40], [u8; 256]) {
        let IdentifyController { sn, mn, subnqn, .. } = &*self.controller;
        (*sn, *mn, *subnqn)
    }

    /// Identifiers of all controllers of the subsystem. They share all namespaces.
    fn controllers(&self) -> Vec<u16> {
        self.member.as_ref().map_or_else(|| vec![CNTLID], |member| member.controllers())
    }

    /// Executes Identify.
    ///
    /// # Errors
    /// The completion status of the command.
    pub(crate) fn identify(
        &self,
        cmd: &Identify,
        nsid: u32,
        namespaces: &Namespaces,
    ) -> Result<Page, Status> {
        let nsids = || namespaces.iter().map(Namespace::nsid);
        match cmd.cns {
            cns::NAMESPACE => {
                let namespace = find(nsid, namespaces)?;
                Ok(page(&namespace.map(identify_namespace).unwrap_or_default()))
            }
            cns::CONTROLLER => {
                let mut controller = self.controller.clone();
                let bytes = namespaces.iter().map(|ns| u128::from(ns.info().bytes())).sum::<u128>();
                controller.tnvmcap = bytes.into();
                controller.nn = namespaces.highest();
                // Base 2.1, "Maximum Number of Allowed Namespaces": nonzero with ANA reporting.
                controller.mnan = if controller.cmic.anars() { controller.nn } else { 0 };
                controller.vwc.set_vwcp(namespaces.guarantees.volatile_cache);
                Ok(page(&*controller))
            }
            cns::ACTIVE_NAMESPACES => list(nsid, nsids()),
            cns::NAMESPACE_IDS => {
                // If the namespace is inactive, Identify fails for this list. For other structures,
                // Identify returns zeroes.
                let namespace = find(nsid, namespaces)?.ok_or(invalid_namespace())?;
                Ok(page(&ids(namespace)))
            }
            cns::CSI_NAMESPACE => {
                let namespace = find(nsid, namespaces)?;
                match cmd.csi {
                    csi::NVM => Ok(page(&namespace.map(nvm_namespace).unwrap_or_default())),
                    csi::ZONED => Ok(page(&zoned_namespace(namespace)?)),
                    _ => Err(Status::INVALID_IO_COMMAND_SET.with_dnr()),
                }
            }
            cns::CSI_CONTROLLER if cmd.csi == csi::NVM => {
                Ok(page(&nvm_controller(&namespaces.guarantees)))
            }
            cns::CSI_CONTROLLER if cmd.csi == csi::ZONED => Ok(page(&zoned_controller(namespaces))),
            cns::CSI_ACTIVE_NAMESPACES if matches!(cmd.csi, csi::NVM | csi::ZONED) => {
                let own = namespaces.iter().filter(|namespace| namespace.csi() == cmd.csi);
                list(nsid, own.map(Namespace::nsid))
            }
            cns::INDEPENDENT_NAMESPACE => {
                let namespace = find(nsid, namespaces)?;
                Ok(page(&namespace.map(independent).unwrap_or_default()))
            }
            cns::NAMESPACE_CONTROLLERS if nsid != NSID_ALL => {
                let namespace = find(nsid, namespaces)?;
                let all = namespace.map(|_| self.controllers()).unwrap_or_default();
                Ok(page(&ControllerList::from(cmd.cntid, all)))
            }
            cns::CONTROLLERS => Ok(page(&ControllerList::from(cmd.cntid, self.controllers()))),
            cns::IO_COMMAND_SETS
                if cmd.cntid == THIS_CONTROLLER || self.controllers().contains(&cmd.cntid) =>
            {
                let mut sets = IoCommandSets::default();
                sets.vectors[0] = 1 << csi::NVM | 1 << csi::ZONED;
                Ok(page(&sets))
            }
            _ => Err(Status::INVALID_FIELD.with_dnr()),
        }
    }
}

pub(super) fn page(structure: &(impl IntoBytes + zerocopy::Immutable)) -> Page {
    let mut page = Box::new([0; IDENTIFY_SIZE]);
    // The page and every structure have the same size. `zip` cannot panic even if the sizes
    // differed.
    page.iter_mut().zip(structure.as_bytes()).for_each(|(to, from)| *to = *from);
    page
}

pub(super) fn invalid_namespace() -> Status {
    Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr()
}

/// Finds namespace `nsid`. Returns `None` if the NSID is valid and inactive.
///
/// NSID FFFFFFFFh is refused: it requests the common properties of all namespaces, and only a
/// controller with Namespace Management reports these.
fn find(nsid: u32, namespaces: &Namespaces) -> Result<Option<&Namespace>, Status> {
    if nsid == 0 || nsid > namespaces.highest() {
        return Err(invalid_namespace());
    }
    Ok(namespaces.get(nsid))
}

/// List of the NSIDs greater than `above`.
pub(super) fn list(above: u32, nsids: impl Iterator<Item = u32>) -> Result<Page, Status> {
    // The specification requires an error for NSIDs FFFFFFFEh and FFFFFFFFh.
    if above >= NSID_ALL - 1 {
        return Err(invalid_namespace());
    }
    Ok(page(&NamespaceList::above(above, nsids)))
}

/// NQN of the NVM subsystem, unique by the serial number. If two controllers report the same NQN, a
/// host treats them as two paths to the same namespaces.
fn qualified_name(serial: &str) -> String {
    format!("nqn.2026-11.io.shadowbell:{serial}")
}

fn controller(config: &Config) -> IdentifyController {
    let [oui0, oui1, oui2] = IEEE_OUI;
    let member = config.member.as_ref();
    let mut controller = IdentifyController {
        vid: PCI_VENDOR_ID,
        ssvid: PCI_VENDOR_ID,
        sn: ascii_field(&config.serial),
        mn: ascii_field(&config.model),
        fr: FIRMWARE_REVISION,
        rab: 6,
        ieee: [oui2, oui1, oui0],
        mdts: config.mdts,
        cntlid: member.map_or(CNTLID, |member| member.cntlid()),
        cmic: Cmic::new()
            .with_mports(member.is_some())
            .with_mctrs(member.is_some())
            .with_anars(member.is_some()),
        ctratt: Ctratt::new().with_hids(member.is_some()).with_elbas(true),
        ver: VERSION.into_bits(),
        rtd3e: SHUTDOWN_MICROSECONDS,
        oaes: Oaes::new().with_nsan(true).with_anacn(member.is_some()),
        cntrltype: ControllerType::Io as u8,
        oacs: Oacs::new()
            .with_doorbell_buffer_config(config.shadow_doorbells)
            .with_get_lba_status(true)
            .with_self_test(true),
        acl: (ABORT_LIMIT - 1) as u8,
        aerl: (MAX_EVENT_REQUESTS - 1) as u8,
        // One firmware slot, read-only.
        frmw: Frmw::new().with_ffsro(true).with_nofs(1),
        lpa: Lpa::new()
            .with_cses(true)
            .with_lpeds(true)
            .with_ts(true)
            .with_pes(true)
            .with_mlps(true),
        elpe: (ERROR_LOG_ENTRIES - 1) as u8,
        wctemp: WARNING_TEMPERATURE,
        cctemp: CRITICAL_TEMPERATURE,
        edstt: EXTENDED_MINUTES,
        // One self-test operation at a time.
        dsto: 1,
        pels: PELS,
        kas: (features::KEEP_ALIVE_GRANULARITY_MS / 100) as u16,
        sqes: EntrySizes::new().with_min(6).with_max(6),
        cqes: EntrySizes::new().with_min(4).with_max(4),
        maxcmd: u16::try_from(config.max_queue_entries).unwrap_or(u16::MAX),
        oncs: Oncs::new()
            .with_compare(true)
            .with_write_uncorrectable(true)
            .with_dataset_management(true)
            .with_write_zeroes(true)
            .with_save_and_select(true)
            .with_timestamp(true)
            .with_verify(true)
            .with_copy(true)
            .with_reservations(member.is_some()),
        // Fused Compare and Write, atomic for one block (ACWU).
        fuses: 1,
        // Copy descriptor formats 0h to 3h; a host has to enable 2h and 3h.
        ocfs: 0b1111,
        // Flush supports NSID FFFFFFFFh (all namespaces), with or without a volatile write cache.
        vwc: Vwc::new().with_fb(0b11),
        sgls: Sgls::new().with_support(0b01).with_bit_bucket(true).with_longer_than_data(true),
        ..IdentifyController::default()
    };
    if member.is_some() {
        controller.anacap = ANACAP_ALL_STATES | ANACAP_FIXED_GROUPS;
        controller.anatt = TRANSITION_SECONDS;
        (controller.anagrpmax, controller.nanagrpid) = (MAX_ANA_GROUPS, MAX_ANA_GROUPS);
    }
    if let Some(name) = nqn_field(&qualified_name(&config.serial)) {
        controller.subnqn = name;
    }
    controller
}

fn nvm_controller(guarantees: &Guarantees) -> IdentifyNvmController {
    // Without WZSL, hosts limit Write Zeroes to MDTS. The controller does not have this limit: a
    // command may have up to 65536 blocks.
    let pages = (guarantees.zeroes / 4096).max(1);
    IdentifyNvmController {
        wzsl: pages.ilog2() as u8,
        wusl: (COMMAND_BYTES / 4096).ilog2() as u8,
        aocs: IdentifyNvmController::REPORTS_ALLOCATED,
        ..IdentifyNvmController::default()
    }
}

fn identify_namespace(namespace: &Namespace) -> IdentifyNamespace {
    let info = namespace.info();
    let blocks = namespace.blocks();
    let mut identify = IdentifyNamespace {
        // Single blocks are atomic: NAWUN, NAWUPF and NACWU are 0's based, and no boundaries exist
        // (NABSN, NABO, NABSPF). Larger atomic writes are not reported, because they would depend
        // on the layout of host memory and on other commands in flight.
        nsfeat: Nsfeat::new().with_nsabp(true),
        nsze: blocks,
        ncap: blocks,
        nuse: blocks,
        // Deallocated blocks read as zeroes.
        dlfeat: Dlfeat::new().with_drb(1).with_wzds(info.discard),
        nvmcap: u128::from(info.bytes()).into(),
        nsattr: if namespace.read_only() { NSATTR_WRITE_PROTECTED } else { 0 },
        nguid: namespace.nguid(),
        eui64: namespace.eui64(),
        mssrl: (COPY_BYTES >> namespace.block_shift()) as u16,
        mcl: (COPY_BYTES >> namespace.block_shift()) as u32,
        msrc: (COPY_RANGES - 1) as u8,
        nmic: nmic(namespace),
        rescap: rescap(namespace),
        anagrpid: ana_group(namespace),
        ..IdentifyNamespace::default()
    };
    // Base 2.1, "Namespace Utilization": NUSE is 0 in the states inaccessible and persistent loss.
    // NSZE and NCAP keep their values, because a host would treat a namespace of size 0 as removed.
    let state = namespace.member().map(|member| member.ana_state(identify.anagrpid));
    if matches!(state, Some(AnaState::Inaccessible | AnaState::PersistentLoss)) {
        identify.nuse = 0;
    }
    let granularity0 = info.granularity.saturating_sub(1);
    if let Some(granularity0) = u16::try_from(granularity0).ok().filter(|g| *g != 0) {
        identify.nsfeat.set_optperf(0b01);
        identify.npwg = granularity0;
        identify.npwa = granularity0;
        identify.npdg = granularity0;
        identify.npda = granularity0;
        identify.nows = granularity0;
    }
    if let Some(format) = identify.lbaf.first_mut() {
        let ms = info.metadata.map_or(0, |metadata| metadata.size);
        *format = LbaFormat { ms, lbads: namespace.block_shift() as u8, rp: 0 };
    }
    if let Some(metadata) = &info.metadata {
        add_metadata(&mut identify, metadata);
    }
    identify
}

/// Adds the metadata properties of a namespace. The capabilities contain only the namespace's own
/// format.
fn add_metadata(identify: &mut IdentifyNamespace, metadata: &MetadataFormat) {
    let MetadataFormat { extended, protection, first, .. } = *metadata;
    identify.flbas.set_extended(extended);
    identify.mc = Mc::new().with_extended(extended).with_separate(!extended);
    identify.dps = Dps::new().with_pit(protection).with_pip(first);
    if protection != 0 {
        let types = Dpc::from_bits(1 << (protection - 1));
        identify.dpc = types.with_first(first).with_last(!first);
    }
}

/// NVM command set structure: extended LBA format with the guard type, and no storage tag bits.
fn nvm_namespace(namespace: &Namespace) -> IdentifyNvmNamespace {
    let mut identify = IdentifyNvmNamespace::default();
    if let (Some(format), Some(metadata)) = (identify.elbaf.first_mut(), &namespace.info().metadata)
    {
        *format = metadata.guard().code() << 7;
    }
    identify
}

fn nmic(namespace: &Namespace) -> Nmic {
    Nmic::new().with_shrns(namespace.member().is_some())
}

/// ANA Group Identifier; 0 for a namespace that is not shared.
fn ana_group(namespace: &Namespace) -> u32 {
    namespace.member().map_or(0, |member| member.ana_group(namespace.nsid()))
}

/// Reservation Capabilities (RESCAP).
fn rescap(namespace: &Namespace) -> u8 {
    match namespace.member() {
        None => 0,
        Some(member) if member.can_persist() => RESCAP_ALL,
        Some(_) => RESCAP_ALL & !RESCAP_PTPL,
    }
}

fn independent(namespace: &Namespace) -> IdentifyIndependentNamespace {
    IdentifyIndependentNamespace {
        nsfeat: if namespace.info().volatile_cache { 0 } else { VOLATILE_CACHE_NOT_PRESENT },
        nsattr: if namespace.read_only() { NSATTR_WRITE_PROTECTED } else { 0 },
        nstat: IdentifyIndependentNamespace::NSTAT_READY,
        nmic: nmic(namespace),
        rescap: rescap(namespace),
        anagrpid: ana_group(namespace),
        ..IdentifyIndependentNamespace::default()
    }
}

fn ids(namespace: &Namespace) -> NamespaceIds {
    NamespaceIds::new([
        NamespaceId::Uuid(namespace.uuid()),
        NamespaceId::Nguid(namespace.nguid()),
        NamespaceId::Eui64(namespace.eui64()),
        NamespaceId::Csi(namespace.csi()),
    ])
}

/// Builds an Identify structure that exists only with a namespace pool, or differs with one. `None`
/// if [`Identity`] has to build the structure.
///
/// # Errors
/// The completion status of the command.
pub(crate) fn with_pool(
    cmd: &Identify,
    nsid: u32,
    (namespaces, state): (&Namespaces, &PoolState),
) -> Option<Result<Page, Status>> {
    let is_nvm = cmd.csi == csi::NVM;
    Some(match cmd.cns {
        // NSID FFFFFFFFh: properties that are common to all namespaces.
        cns::NAMESPACE if nsid == NSID_ALL => Ok(page(&common())),
        cns::CSI_NAMESPACE if nsid == NSID_ALL && is_nvm => Ok(page(&extended_formats())),
        cns::CSI_NAMESPACE if state.get(nsid).is_some() && is_nvm => is_valid(nsid, namespaces)
            .map(|()| match namespaces.get(nsid) {
                Some(_) => page(&extended_formats()),
                None => page(&IdentifyNvmNamespace::default()),
            }),
        cns::INDEPENDENT_NAMESPACE if nsid == NSID_ALL => {
            Ok(page(&IdentifyIndependentNamespace::default()))
        }
        cns::ALLOCATED_NAMESPACES => list(nsid, allocated(namespaces, state).into_iter()),
        cns::CSI_ALLOCATED_NAMESPACES if is_nvm => {
            list(nsid, allocated(namespaces, state).into_iter())
        }
        cns::ALLOCATED_NAMESPACE => {
            is_valid(nsid, namespaces).map(|()| page(&allocated_namespace(nsid, namespaces, state)))
        }
        cns::CSI_ALLOCATED_NAMESPACE if is_nvm => {
            is_valid(nsid, namespaces).map(|()| match (state.get(nsid), namespaces.get(nsid)) {
                (Some(_), _) => page(&extended_formats()),
                (None, Some(given)) => page(&nvm_namespace(given)),
                (None, None) => page(&IdentifyNvmNamespace::default()),
            })
        }
        cns::NAMESPACE_CONTROLLERS if nsid != NSID_ALL => is_valid(nsid, namespaces).map(|()| {
            let attached = namespaces.get(nsid).map(|_| CNTLID);
            page(&ControllerList::from(cmd.cntid, attached))
        }),
        _ => return None,
    })
}

fn is_valid(nsid: u32, namespaces: &Namespaces) -> Result<(), Status> {
    let is_valid = (1..=namespaces.highest()).contains(&nsid);
    is_valid.then_some(()).ok_or(invalid_namespace())
}

/// NSIDs of the pool's namespaces and of the controller's other namespaces.
fn allocated(namespaces: &Namespaces, state: &PoolState) -> Vec<u32> {
    let own = state.namespaces.iter().map(|namespace| namespace.nsid);
    let mut all: Vec<_> = own.chain(namespaces.iter().map(Namespace::nsid)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn allocated_namespace(nsid: u32, namespaces: &Namespaces, state: &PoolState) -> IdentifyNamespace {
    let own = state.get(nsid);
    let mut found = match (namespaces.get(nsid), own) {
        (Some(namespace), _) => identify_namespace(namespace),
        (None, Some(own)) => identify_namespace(&detached(own, &namespaces.guarantees)),
        (None, None) => return IdentifyNamespace::default(),
    };
    if let Some(own) = own {
        add_formats(&mut found, &format_of(own));
    }
    found
}

/// Namespace structure of a detached namespace, with the values that it will have when attached.
fn detached(own: &PoolNamespace, guarantees: &Guarantees) -> Namespace {
    Namespace::new(own.nsid, &placeholder(own), guarantees)
}

fn format_of(own: &PoolNamespace) -> BlockFormat {
    BlockFormat { block_size: own.block_size, metadata: own.metadata }
}

fn common() -> IdentifyNamespace {
    let mut common = IdentifyNamespace::default();
    add_formats(&mut common, &BlockFormat { block_size: 512, metadata: None });
    common
}

/// Adds a pool's properties to a structure of [`Identity`].
pub(crate) fn amend_with_pool(
    structure: &mut [u8],
    cmd: &Identify,
    nsid: u32,
    (namespaces, state): (&Namespaces, &PoolState),
) {
    match cmd.cns {
        cns::CONTROLLER => {
            let Ok(controller) = IdentifyController::mut_from_bytes(structure) else {
                return;
            };
            let given = namespaces.iter().filter(|ns| state.get(ns.nsid()).is_none());
            let given: u128 = given.map(|ns| u128::from(ns.info().bytes())).sum();
            controller.tnvmcap = (given + u128::from(state.capacity)).into();
            controller.unvmcap = u128::from(state.unallocated()).into();
            controller.oacs.set_format_nvm(true);
            controller.oacs.set_namespace_management(true);
            controller.sanicap = sanitize::capabilities();
        }
        cns::NAMESPACE if namespaces.get(nsid).is_some() => {
            let namespace = IdentifyNamespace::mut_from_bytes(structure);
            if let (Ok(namespace), Some(own)) = (namespace, state.get(nsid)) {
                add_formats(namespace, &format_of(own));
            }
        }
        _ => {}
    }
}

/// Structure of a zoned namespace; all zeroes for an inactive one.
fn zoned_namespace(namespace: Option<&Namespace>) -> Result<IdentifyZonedNamespace, Status> {
    let Some(namespace) = namespace else {
        return Ok(IdentifyZonedNamespace::default());
    };
    let format = namespace.info().zoned.as_ref().ok_or(Status::INVALID_FIELD.with_dnr())?;
    // The fields are 0's based. A limit of 0 in the format means "no limit", and so do all ones in
    // the fields.
    let limit = |most: u32| most.wrapping_sub(1);
    let mut identify = IdentifyZonedNamespace {
        ozcs: if format.read_across { IdentifyZonedNamespace::READ_ACROSS } else { 0 },
        mar: limit(format.max_active),
        mor: limit(format.max_open),
        ..IdentifyZonedNamespace::default()
    };
    if let Some(first) = identify.lbafe.first_mut() {
        let zsze = format.size >> namespace.block_shift();
        *first = ZonedLbaFormat { zsze, zdes: format.extension, ..ZonedLbaFormat::default() };
    }
    Ok(identify)
}

/// Controller structure. ZASL applies to all namespaces, so it is the smallest of their limits.
fn zoned_controller(namespaces: &Namespaces) -> IdentifyZonedController {
    let limits = namespaces.iter().filter_map(|namespace| namespace.info().zoned.as_ref());
    let shortest = limits.map(|format| format.append_limit).filter(|limit| *limit != 0).min();
    IdentifyZonedController {
        zasl: shortest.map_or(0, |limit| (limit / 4096).max(1).ilog2() as u8),
        ..IdentifyZonedController::default()
    }
}

#[cfg(test)]
mod tests;
