//! Identify structures of the Zoned Namespace command set.

use crate::namespace::{Namespace, Namespaces};
use shadowbell_spec::status::Status;
use shadowbell_spec::zns::{IdentifyZonedController, IdentifyZonedNamespace, ZonedLbaFormat};

/// Structure of a zoned namespace; all zeroes for an inactive one.
pub(super) fn namespace(namespace: Option<&Namespace>) -> Result<IdentifyZonedNamespace, Status> {
    let Some(namespace) = namespace else {
        return Ok(IdentifyZonedNamespace::default());
    };
    let format = namespace.info().zoned.as_ref().ok_or(Status::INVALID_FIELD.with_dnr())?;
    // 0's based; all ones mean "no limit".
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

/// Controller structure. ZASL is the smallest limit of all namespaces, because it applies to all.
pub(super) fn controller(namespaces: &Namespaces) -> IdentifyZonedController {
    let limits = namespaces.iter().filter_map(|namespace| namespace.info().zoned.as_ref());
    let shortest = limits.map(|format| format.append_limit).filter(|limit| *limit != 0).min();
    IdentifyZonedController {
        zasl: shortest.map_or(0, |limit| (limit / 4096).max(1).ilog2() as u8),
        ..IdentifyZonedController::default()
    }
}
