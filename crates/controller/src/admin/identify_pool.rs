//! Identify with a namespace pool: allocated namespaces, capacity and optional commands. Base 2.1,
//! 5.1.13.

use super::identify::{
    CNTLID, Page, identify_namespace, invalid_namespace, list, nvm_namespace, page,
};
use super::pool_formats::{BlockFormat, add_formats, extended_formats};
use super::sanitize;
use crate::detached::placeholder;
use crate::namespace::{Namespace, Namespaces, Promises};
use crate::pool::{PoolNamespace, PoolState};
use shadowbell_spec::admin::Identify;
use shadowbell_spec::identify::{
    ControllerList, IdentifyController, IdentifyIndependentNamespace, IdentifyNamespace,
    IdentifyNvmNamespace, cns, csi,
};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;
use zerocopy::FromBytes;

/// Identify structures that exist only with a pool, or differ with one. `None` if
/// [`Identity`](super::identify::Identity) has to build the structure.
///
/// # Errors
/// The completion status of the command.
pub(crate) fn identify(
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
            is_valid(nsid, namespaces).map(|()| page(&find(nsid, namespaces, state)))
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

fn find(nsid: u32, namespaces: &Namespaces, state: &PoolState) -> IdentifyNamespace {
    let own = state.get(nsid);
    let mut found = match (namespaces.get(nsid), own) {
        (Some(namespace), _) => identify_namespace(namespace),
        (None, Some(own)) => identify_namespace(&detached(own, &namespaces.promises)),
        (None, None) => return IdentifyNamespace::default(),
    };
    if let Some(own) = own {
        add_formats(&mut found, &format_of(own));
    }
    found
}

/// Namespace structure of a detached namespace, as it will be when attached.
fn detached(own: &PoolNamespace, promises: &Promises) -> Namespace {
    Namespace::new(own.nsid, &placeholder(own), promises)
}

fn format_of(own: &PoolNamespace) -> BlockFormat {
    BlockFormat { block_size: own.block_size, metadata: own.metadata }
}

fn common() -> IdentifyNamespace {
    let mut common = IdentifyNamespace::default();
    add_formats(&mut common, &BlockFormat { block_size: 512, metadata: None });
    common
}

/// Adds a pool's properties to a structure of [`Identity`](super::identify::Identity).
pub(crate) fn amend(
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
