//! Lists of identifiers that Identify returns.

use crate::layout::zero_default;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A namespace list: up to 1024 identifiers in ascending order, zeroes after the last. Base 2.1,
/// 4.6.2 "Namespace List".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct NamespaceList {
    /// The identifiers.
    pub nsids: [u32; 1024],
}

impl NamespaceList {
    /// The list that answers CNS 02h (and its kin) for `above`: of the ascending `nsids`, the first
    /// 1024 that are greater.
    pub fn above(above: u32, nsids: impl IntoIterator<Item = u32>) -> Self {
        let mut list = Self::default();
        for (entry, nsid) in
            list.nsids.iter_mut().zip(nsids.into_iter().filter(|&nsid| nsid > above))
        {
            *entry = nsid;
        }
        list
    }

    /// The identifiers up to the first zero.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.nsids.iter().copied().take_while(|&nsid| nsid != 0)
    }
}

/// A controller list: up to 2047 identifiers in ascending order. Base 2.1, 4.6.1 "Controller List".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ControllerList {
    /// How many identifiers follow; a peer may say more than there is room for.
    pub count: u16,
    /// The identifiers.
    pub cntlids: [u16; 2047],
}

impl ControllerList {
    /// The list that answers CNS 12h and 13h for `from`: of the ascending `cntlids`, the first 2047
    /// that are greater or equal.
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

    /// The identifiers, at most as many as there is room for.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.cntlids.iter().copied().take(self.count.into())
    }
}

/// The I/O command set combinations that a controller supports: a vector of bits each, bit n for
/// command set identifier n. Base 2.1, 5.1.13, "Identify I/O Command Set data structure (CNS 1Ch)".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IoCommandSets {
    /// The combinations, in the order that the I/O Command Set Profile feature indexes.
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
