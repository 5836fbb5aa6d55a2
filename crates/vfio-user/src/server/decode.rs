//! Parser that converts request payloads to the arguments of device methods.

use super::saved::Agreed;
use crate::Errno;
use crate::descriptor::Descriptor;
use crate::device::{DmaMap, DmaUnmap, IrqAction, IrqData, SetIrqs};
use crate::wire::{self, split, split_sized};

/// Maximum number of interrupts that one interrupt index of a PCI function can have (for MSI-X).
pub(super) const MAX_VECTORS: usize = 2048;

pub(super) fn dma_map(payload: &[u8], mut fds: Vec<Descriptor>) -> Result<DmaMap, Errno> {
    let (map, _) = split::<wire::DmaMap>(payload)?;
    if map.size == 0
        || map.address.checked_add(map.size).is_none()
        || map.offset.checked_add(map.size).is_none()
        || fds.len() > 1
    {
        return Err(Errno::INVAL);
    }
    let fd = match fds.pop() {
        None => None,
        Some(Descriptor::Memory(file)) => Some(file),
        Some(_) => return Err(Errno::INVAL),
    };
    Ok(DmaMap {
        iova: map.address,
        len: map.size,
        readable: map.flags & wire::dma_map_flags::READ != 0,
        writable: map.flags & wire::dma_map_flags::WRITE != 0,
        fd,
        fd_offset: map.offset,
    })
}

pub(super) fn dma_unmap(unmap: &wire::DmaUnmap) -> Result<DmaUnmap, Errno> {
    if unmap.flags & wire::dma_unmap_flags::GET_DIRTY_BITMAP != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    if unmap.flags & wire::dma_unmap_flags::ALL != 0 {
        return match (unmap.address, unmap.size) {
            (0, 0) => Ok(DmaUnmap::All),
            _ => Err(Errno::INVAL),
        };
    }
    if unmap.size == 0 || unmap.address.checked_add(unmap.size).is_none() {
        return Err(Errno::INVAL);
    }
    Ok(DmaUnmap::Range { iova: unmap.address, len: unmap.size })
}

pub(super) fn set_irqs(
    agreed: Agreed,
    payload: &[u8],
    fds: Vec<Descriptor>,
) -> Result<SetIrqs, Errno> {
    use wire::set_irqs_flags as flags;
    let (set, rest) = split_sized::<wire::SetIrqs>(payload)?;
    if set.index >= agreed.info.irqs || set.start.checked_add(set.count).is_none() {
        return Err(Errno::INVAL);
    }
    let action = match set.flags & flags::ACTION_BITS {
        flags::ACTION_MASK => IrqAction::Mask,
        flags::ACTION_UNMASK => IrqAction::Unmask,
        flags::ACTION_TRIGGER => IrqAction::Trigger,
        _ => return Err(Errno::INVAL),
    };
    let count = usize::try_from(set.count).map_err(|_| Errno::INVAL)?;
    let data = match set.flags & flags::DATA_MASK {
        flags::DATA_NONE => IrqData::None,
        // No index of a PCI function has more than `MAX_VECTORS` interrupts.
        flags::DATA_BOOL if count <= MAX_VECTORS => {
            let bytes = rest.get(..count).ok_or(Errno::INVAL)?;
            IrqData::Bools(bytes.iter().map(|byte| *byte != 0).collect())
        }
        flags::DATA_EVENTFD if fds.is_empty() || fds.len() == count => {
            let events = fds.into_iter().map(|fd| match fd {
                Descriptor::Event(fd) => Ok(fd),
                _ => Err(Errno::INVAL),
            });
            IrqData::Eventfds(events.collect::<Result<_, _>>()?)
        }
        _ => return Err(Errno::INVAL),
    };
    Ok(SetIrqs { index: set.index, start: set.start, count: set.count, action, data })
}

pub(super) fn flag(set: bool, bit: u32) -> u32 {
    if set { bit } else { 0 }
}
