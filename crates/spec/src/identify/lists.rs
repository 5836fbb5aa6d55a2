//! Identifier lists of Identify.

use crate::layout::zero_default;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Namespace list: up to 1024 identifiers in ascending order, then zeroes. Base 2.1, 4.6.2
/// "Namespace List".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct NamespaceList {
    /// The identifiers.
    pub nsids: [u32; 1024],
}

impl NamespaceList {
    /// Creates the list for CNS 02h, 07h, 10h or 1Ah with NSID `above`. It has the first 1024 of
    /// the `nsids` that are greater than `above`. `nsids` must be in ascending order.
    pub fn above(above: u32, nsids: impl IntoIterator<Item = u32>) -> Self {
        let mut list = Self::default();
        for (entry, nsid) in
            list.nsids.iter_mut().zip(nsids.into_iter().filter(|&nsid| nsid > above))
        {
            *entry = nsid;
        }
        list
    }

    /// Identifiers up to the first zero.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.nsids.iter().copied().take_while(|&nsid| nsid != 0)
    }
}

/// Controller list: up to 2047 identifiers in ascending order. Base 2.1, 4.6.1 "Controller List".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ControllerList {
    /// Number of identifiers. The value from a peer may exceed the length of the array.
    pub count: u16,
    /// The identifiers.
    pub cntlids: [u16; 2047],
}

impl ControllerList {
    /// Creates the list for CNS 12h or 13h with CNTID `from`. It has the first 2047 of the
    /// `cntlids` that are greater than or equal to `from`. `cntlids` must be in ascending order.
    pub fn from(from: u16, cntlids: impl IntoIterator<Item = u16>) -> Self {
        let mut list = Self::default();
        for (entry, cntlid) in
            list.cntlids.iter_mut().zip(cntlids.into_iter().filter(|&cntlid| cntlid >= from))
        {
            *entry = cntlid;
            list.count += 1;
        }
        list
    }

    /// Identifiers of the list, at most as many as the array has.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.cntlids.iter().copied().take(self.count.into())
    }
}

/// I/O command set combinations of a controller. Each is a bit vector in which bit n stands for
/// Command Set Identifier n. Base 2.1, 5.1.13, "Identify I/O Command Set data structure (CNS 1Ch)".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IoCommandSets {
    /// Combinations, indexed by the I/O Command Set Profile feature.
    pub vectors: [u64; 512],
}

zero_default!(NamespaceList, ControllerList, IoCommandSets);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(NamespaceList, 4096, { nsids: 0 });
        assert_layout!(ControllerList, 4096, { count: 0, cntlids: 2 });
        assert_layout!(IoCommandSets, 4096, { vectors: 0 });
    }

    #[test]
    fn namespaces() {
        let list = NamespaceList::above(0, [1, 2, 5]);
        assert_eq!(list.iter().collect::<Vec<_>>(), [1, 2, 5]);
        assert_eq!(list.nsids[3], 0);
        let list = NamespaceList::above(2, [1, 2, 5]);
        assert_eq!(list.iter().collect::<Vec<_>>(), [5]);
        assert_eq!(NamespaceList::above(5, [1, 2, 5]).iter().count(), 0);
        let list = NamespaceList::above(10, 1..5000);
        assert_eq!(list.iter().count(), 1024);
        assert_eq!(list.nsids[1023], 10 + 1024);
    }

    #[test]
    fn controllers() {
        let list = ControllerList::from(2, [1, 2, 5]);
        assert_eq!(list.count, 2);
        assert_eq!(list.iter().collect::<Vec<_>>(), [2, 5]);
        assert_eq!(ControllerList::from(0, 0..5000).count, 2047);
        let lie = ControllerList { count: u16::MAX, ..ControllerList::default() };
        assert_eq!(lie.iter().count(), 2047);
    }
}
