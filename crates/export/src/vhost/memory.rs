//! Guest memory: the files that the frontend shares, in guarded mappings.
//!
//! A truncated file reads as zeroes and is reported by [`Mapping::is_poisoned`], so its owner
//! cannot crash this process.

use ::shadowbell_memory::{
    DmaError, DmaSpace, DmaTable, MapError, Mapping, Protection, page_tables,
};
use std::os::fd::AsFd;
use std::sync::Arc;

/// Region of the guest's memory.
#[derive(Clone)]
pub(super) struct Region {
    /// Guest address.
    guest: u64,
    len: u64,
    /// Start address in the frontend's address space. The frontend names the rings of queues by
    /// addresses of this space.
    user: u64,
    mapping: Arc<Mapping>,
}

impl Region {
    /// Maps `len` bytes of a file from `offset`.
    pub(super) fn map(
        file: impl AsFd,
        offset: u64,
        (guest, len, user): (u64, u64, u64),
    ) -> Result<Self, MapError> {
        let mapping = Mapping::from_fd(file, offset, len, Protection::ReadWrite)?;
        page_tables::watch(&mapping);
        Ok(Self { guest, len, user, mapping })
    }

    /// True if the region has this guest address and length.
    pub(super) fn is_at(&self, guest: u64, len: u64) -> bool {
        (self.guest, self.len) == (guest, len)
    }
}

/// All regions, with the table for accesses by guest address.
pub(super) struct GuestMemory {
    pub(super) regions: Vec<Region>,
    pub(super) table: Arc<DmaTable>,
}

impl GuestMemory {
    pub(super) fn new(regions: Vec<Region>) -> Result<Self, DmaError> {
        let mut space = DmaSpace::default();
        for region in &regions {
            space.map(region.guest, region.len, &region.mapping.bytes())?;
        }
        Ok(Self { table: Arc::clone(space.table()), regions })
    }

    /// Guest address of an address of the frontend's address space.
    pub(super) fn guest_address(&self, user: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = user.checked_sub(region.user).filter(|offset| *offset < region.len)?;
            region.guest.checked_add(offset)
        })
    }

    pub(super) fn lengths(&self) -> impl Iterator<Item = u64> {
        self.regions.iter().map(|region| region.len)
    }

    /// True if part of the memory was lost: its file was truncated, or no huge pages were left.
    pub(super) fn is_poisoned(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_poisoned())
    }
}
