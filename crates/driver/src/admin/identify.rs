//! Identify command. Base 2.1, 5.1.13.

use super::plane::AdminCommands;
use super::queue::AdminData;
use crate::error::CommandError;
use crate::namespace::Namespace;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::Identify;
use shadowbell_spec::identify::{
    IDENTIFY_SIZE, IdentifyController, IdentifyNamespace, IdentifyNvmNamespace, NamespaceIds,
    NamespaceList, cns,
};
use shadowbell_spec::regs::Vs;
use zerocopy::{FromBytes, Immutable, KnownLayout};

/// Limit on the number of namespaces. A larger number from the controller is not trusted.
const MAX_NAMESPACES: usize = 4096;

/// Identify with any CNS.
pub(super) fn identify(
    admin: &dyn AdminCommands,
    nsid: u32,
    fields: Identify,
) -> Result<Vec<u8>, CommandError> {
    let sqe = Sqe::identify(nsid, fields, 0);
    Ok(admin.succeed(sqe, AdminData::FromController(IDENTIFY_SIZE))?.data)
}

fn identify_as<T: FromBytes + KnownLayout + Immutable>(
    admin: &dyn AdminCommands,
    nsid: u32,
    cns: u8,
) -> Result<T, CommandError> {
    let data = identify(admin, nsid, Identify { cns, ..Identify::default() })?;
    T::read_from_bytes(&data).map_err(|_| invalid_data(admin, "its data are too short"))
}

fn invalid_data(admin: &dyn AdminCommands, what: impl Into<String>) -> CommandError {
    CommandError::invalid_data(admin.plane().name(), "Identify", what)
}

/// Identify Controller, CNS 01h.
pub(crate) fn identify_controller(
    admin: &dyn AdminCommands,
) -> Result<IdentifyController, CommandError> {
    identify_as(admin, 0, cns::CONTROLLER)
}

/// Identify Namespace, CNS 00h.
pub(super) fn identify_namespace(
    admin: &dyn AdminCommands,
    nsid: u32,
) -> Result<IdentifyNamespace, CommandError> {
    identify_as(admin, nsid, cns::NAMESPACE)
}

/// Namespace Identification Descriptors, CNS 03h.
pub(super) fn identify_namespace_ids(
    admin: &dyn AdminCommands,
    nsid: u32,
) -> Result<NamespaceIds, CommandError> {
    identify_as(admin, nsid, cns::NAMESPACE_IDS)
}

/// Extended LBA format of a namespace, CNS 05h. `None` unless the blocks have protection
/// information and the controller supports extended formats.
fn extended_format(
    admin: &dyn AdminCommands,
    nsid: u32,
    controller: &IdentifyController,
    identity: &IdentifyNamespace,
) -> Result<Option<u32>, CommandError> {
    if identity.dps.pit() == 0 || !controller.ctratt.elbas() {
        return Ok(None);
    }
    let found: IdentifyNvmNamespace = identify_as(admin, nsid, cns::CSI_NAMESPACE)?;
    Ok(found.elbaf.get(usize::from(identity.flbas.index())).copied())
}

/// Active namespace identifiers in ascending order (CNS 02h, in as many commands as needed).
pub(super) fn active_namespaces(admin: &dyn AdminCommands) -> Result<Vec<u32>, CommandError> {
    let mut all = Vec::new();
    let mut last = 0;
    loop {
        let list: NamespaceList = identify_as(admin, last, cns::ACTIVE_NAMESPACES)?;
        let before = all.len();
        for nsid in list.iter() {
            if nsid <= last {
                let what = format!("the list of active namespaces has {nsid} after {last}");
                return Err(invalid_data(admin, what));
            }
            last = nsid;
            all.push(nsid);
        }
        if all.len() > MAX_NAMESPACES {
            tracing::warn!(
                "{} has more than {MAX_NAMESPACES} namespaces; the others are ignored",
                admin.plane().name()
            );
            all.truncate(MAX_NAMESPACES);
            return Ok(all);
        }
        if all.len() - before < list.nsids.len() {
            return Ok(all);
        }
    }
}

/// Identifies all active namespaces.
pub(crate) fn identify_namespaces(
    admin: &dyn AdminCommands,
    controller: &IdentifyController,
    max_transfer: u64,
) -> Result<Vec<Namespace>, CommandError> {
    let vs = admin.plane().device.vs;
    let nsids = match active_namespaces(admin) {
        Ok(nsids) => nsids,
        // Controllers before version 1.1 have no list of active namespaces: every NSID up to NN may
        // be active.
        Err(error) if error.status().is_some() && vs.into_bits() < Vs::of(1, 1, 0).into_bits() => {
            (1..=controller.nn).take(MAX_NAMESPACES).collect()
        }
        Err(error) => return Err(error),
    };
    let mut namespaces = Vec::with_capacity(nsids.len());
    for nsid in nsids {
        let identity = match identify_namespace(admin, nsid) {
            Ok(identity) if identity.nsze == 0 => continue,
            Ok(identity) => identity,
            // The namespace was detached after the list was read, or its command set has no
            // Identify Namespace data structure.
            Err(error) if error.status().is_some() => {
                tracing::warn!(nsid, "a namespace is ignored: {error}");
                continue;
            }
            Err(error) => return Err(error),
        };
        // Identifiers are optional: a controller without them still works.
        let ids = if vs.into_bits() >= Vs::V1_3.into_bits() {
            match identify_namespace_ids(admin, nsid) {
                Ok(ids) => Some(ids),
                Err(error) if error.status().is_some() => None,
                Err(error) => return Err(error),
            }
        } else {
            None
        };
        let elbaf = match extended_format(admin, nsid, controller, &identity) {
            Ok(elbaf) => elbaf,
            // The namespace was deleted or formatted after Identify Namespace. An event will report
            // the change.
            Err(error) if error.status().is_some() => {
                tracing::warn!(nsid, "a namespace is ignored: {error}");
                continue;
            }
            Err(error) => return Err(error),
        };
        let described = (identity, elbaf, ids.as_ref());
        let namespace = Namespace::new(nsid, controller, described, max_transfer);
        if let Some(what) = namespace.unusable() {
            tracing::warn!(
                nsid,
                "a namespace {what}: it can be identified, but not read or written"
            );
        }
        namespaces.push(namespace);
    }
    Ok(namespaces)
}
