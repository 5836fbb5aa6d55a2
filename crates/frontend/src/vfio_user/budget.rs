//! How much of this process's address space its clients may fill, and how many of its descriptors
//! they may have.
//!
//! Mapping memory costs a client nothing: a file can be of any size without a page in it. But a
//! process has 128 TiB of addresses and 65530 mappings (`vm.max_map_count`), and one that has run
//! out of either gets no memory, no threads and no further clients. So clients share less than
//! that, and each of them can have at most **half of what the others leave**: the first a lot, and
//! after any number of them there is still something left for the next. (An honest machine takes as
//! many addresses as it has memory, and a few dozen mappings.) With the descriptors of their files,
//! which are kept for a successor of this process, it is the same.

use parking_lot::Mutex;
use std::sync::{Arc, LazyLock};

/// Addresses for all clients, in bytes: half of what there is on x86-64.
const BYTES: u64 = 64 << 40;

/// Mappings that a process can have unless the administrator says otherwise.
const MAX_MAP_COUNT: u64 = 65_530;

/// Descriptors of a process that has no limit.
const MAX_DESCRIPTORS: u64 = 1 << 20;

/// An amount of address space, bytes and mappings; and of descriptors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Amount {
    pub(super) bytes: u64,
    pub(super) mappings: u64,
    pub(super) descriptors: u64,
}

/// What all clients of a process share.
#[derive(Debug)]
pub(super) struct Budget {
    total: Amount,
    used: Mutex<Amount>,
}

static PROCESS: LazyLock<Arc<Budget>> = LazyLock::new(|| {
    let count = std::fs::read_to_string("/proc/sys/vm/max_map_count");
    let count = count.ok().and_then(|count| count.trim().parse().ok()).unwrap_or(MAX_MAP_COUNT);
    Budget::new(Amount { bytes: BYTES, mappings: mappings(count), descriptors: descriptors() })
});

/// How many mappings are for clients, of so many that the process can have. One of which part is
/// lost becomes two, and a process that can not have them dies of it; so two are set aside for
/// each, of three quarters. The last quarter is for what this process maps for itself.
fn mappings(count: u64) -> u64 {
    // More than that can not be guarded, whatever the administrator says.
    count.min(shadowbell_memory::sigbus::MOST) / 4 * 3 / 2
}

/// How many descriptors are kept for clients: a quarter of what the process may have. They are
/// duplicated on their way to a successor, and the others are for sockets, interrupts and disks.
fn descriptors() -> u64 {
    use rustix::process::{Resource, getrlimit};
    getrlimit(Resource::Nofile).current.unwrap_or(MAX_DESCRIPTORS).min(MAX_DESCRIPTORS) / 4
}

/// Reads what the system lets this process have for its clients. Otherwise the first controller
/// does so, which may be too late in a process that is to give up files and system calls.
pub fn read_limits() {
    LazyLock::force(&PROCESS);
}

impl Budget {
    pub(super) fn new(total: Amount) -> Arc<Self> {
        Arc::new(Self { total, used: Mutex::default() })
    }

    /// The one of this process.
    pub(super) fn of_process() -> Arc<Self> {
        Arc::clone(&PROCESS)
    }
}

/// What one client has of a [`Budget`].
#[derive(Clone, Debug)]
pub(super) struct Account {
    budget: Arc<Budget>,
    /// Changed under the lock of what all have.
    own: Arc<Mutex<Amount>>,
}

/// What a mapping or a descriptor takes of an [`Account`], until this is dropped.
#[derive(Debug)]
pub(super) struct Reservation {
    account: Account,
    amount: Amount,
}

impl Reservation {
    /// The mapping takes so many bytes, as has turned out.
    pub(super) fn grow(&mut self, bytes: u64) -> Result<(), OverBudget> {
        let more = bytes.saturating_sub(self.amount.bytes);
        self.account.charge(Amount { bytes: more, ..Amount::default() })?;
        self.amount.bytes += more;
        Ok(())
    }
}

/// A client wants more than its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it would fill {} GiB and {} mappings of the address space, and a client can have half of what \
     the others leave, which is {} GiB and {} mappings",
    .wanted.bytes.div_ceil(1 << 30), .wanted.mappings, .most.bytes >> 30, .most.mappings
)]
pub(super) struct OverBudget {
    pub(super) wanted: Amount,
    pub(super) most: Amount,
}

impl Account {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self { budget, own: Arc::default() }
    }

    /// Takes room for a mapping of so many bytes.
    pub(super) fn take(&self, bytes: u64) -> Result<Reservation, OverBudget> {
        self.reserve(Amount { bytes, mappings: 1, ..Amount::default() })
    }

    /// Takes a descriptor.
    pub(super) fn take_descriptor(&self) -> Result<Reservation, OverBudget> {
        self.reserve(Amount { descriptors: 1, ..Amount::default() })
    }

    fn reserve(&self, amount: Amount) -> Result<Reservation, OverBudget> {
        self.charge(amount)?;
        Ok(Reservation { account: self.clone(), amount })
    }

    fn charge(&self, more: Amount) -> Result<(), OverBudget> {
        let (mut all, mut own) = (self.budget.used.lock(), self.own.lock());
        let most = |total: u64, all: u64, own: u64| total.saturating_sub(all - own) / 2;
        let most = Amount {
            bytes: most(self.budget.total.bytes, all.bytes, own.bytes),
            mappings: most(self.budget.total.mappings, all.mappings, own.mappings),
            descriptors: most(self.budget.total.descriptors, all.descriptors, own.descriptors),
        };
        let wanted = Amount {
            bytes: own.bytes.saturating_add(more.bytes),
            mappings: own.mappings + more.mappings,
            descriptors: own.descriptors + more.descriptors,
        };
        // Mappings and descriptors are taken one without the other.
        let has_room = match more.descriptors {
            0 => wanted.bytes <= most.bytes && wanted.mappings <= most.mappings,
            _ => wanted.descriptors <= most.descriptors,
        };
        if !has_room {
            return Err(OverBudget { wanted, most });
        }
        all.bytes += more.bytes;
        all.mappings += more.mappings;
        all.descriptors += more.descriptors;
        *own = wanted;
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let (mut all, mut own) = (self.account.budget.used.lock(), self.account.own.lock());
        for total in [&mut *all, &mut *own] {
            total.bytes -= self.amount.bytes;
            total.mappings -= self.amount.mappings;
            total.descriptors -= self.amount.descriptors;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_half_of_what_the_others_leave() {
        let budget = Budget::new(Amount { bytes: 1024, mappings: 40, descriptors: 4 });
        let [one, two, three] = [(); 3].map(|()| Account::new(Arc::clone(&budget)));
        let all = one.take(512).unwrap();
        let error = one.take(1).unwrap_err();
        let most = Amount { bytes: 512, mappings: 20, descriptors: 2 };
        let wanted = Amount { bytes: 513, mappings: 2, descriptors: 0 };
        assert_eq!(error, OverBudget { wanted, most });
        let files = [one.take_descriptor().unwrap(), one.take_descriptor().unwrap()];
        assert!(one.take_descriptor().is_err());
        let other = two.take_descriptor().unwrap();
        assert!(two.take_descriptor().is_err());
        drop((files, other));
        let half = two.take(256).unwrap();
        assert!(two.take(1).is_err());
        assert!(three.take(129).is_err());
        let small = three.take(128).unwrap();
        drop(all);
        // Now there is more for those who are left.
        let more = two.take((1024 - 128) / 2 - 256).unwrap();
        assert!(two.take(1).is_err());
        drop((half, small, more));
        assert_eq!(*budget.used.lock(), Amount::default());
        assert_eq!(*two.own.lock(), Amount::default());
        assert!(one.take(u64::MAX).is_err());
    }

    #[test]
    fn all_mappings_can_be_lost() {
        for count in [65_530, 1 << 20, 1000] {
            let most = mappings(count);
            assert!(
                most * 2 < count && most < shadowbell_memory::sigbus::MOST,
                "{most} of {count}"
            );
            assert!(most > count.min(MAX_MAP_COUNT) / 3, "{most} of {count}");
        }
    }

    #[test]
    fn mappings_count_however_small_they_are() {
        let budget = Budget::new(Amount { bytes: 1 << 40, mappings: 40, descriptors: 0 });
        let [one, two] = [(); 2].map(|()| Account::new(Arc::clone(&budget)));
        let held: Vec<_> = std::iter::from_fn(|| one.take(1).ok()).collect();
        let others: Vec<_> = std::iter::from_fn(|| two.take(1).ok()).collect();
        assert_eq!((held.len(), others.len()), (20, 10));
    }
}
