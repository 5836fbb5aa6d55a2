//! Budget of clients: limits on mapped address space, mappings and file descriptors.
//!
//! A client can map memory at no cost to itself, because a file can have any size without using a
//! page. But a process has only 128 TiB of addresses and 65530 mappings (`vm.max_map_count`). If
//! the addresses or the mappings are used up, the process cannot allocate memory, start threads or
//! accept clients. So all clients together get less than these limits, and each client gets at most
//! **half of what the others leave**. The first client can get much, and there is always room for
//! the next one. (A real machine uses as many addresses as it has memory, and a few dozen
//! mappings.) The same rule applies to the descriptors of the clients' files: this process stores
//! them for the next server process (upgrade or recovery).

use parking_lot::Mutex;
use std::sync::{Arc, LazyLock};

/// Address space for all clients in bytes: half of the address space on x86-64.
const BYTES: u64 = 64 << 40;

/// Default limit of the mappings of a process (`vm.max_map_count`).
const MAX_MAP_COUNT: u64 = 65_530;

/// Assumed limit of descriptors for a process without a limit.
const MAX_DESCRIPTORS: u64 = 1 << 20;

/// Amounts of the limited resources: bytes of address space, mappings, and descriptors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Amount {
    pub(super) bytes: u64,
    pub(super) mappings: u64,
    pub(super) descriptors: u64,
}

/// Resources that all clients of a process share.
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

/// Number of mappings for all clients, if the process can have `count` mappings. Three quarters are
/// for clients. Each client mapping reserves two: if a part of a mapping is lost, the mapping is
/// split in two, and without a spare one the process would crash. The last quarter is for the
/// process itself.
fn mappings(count: u64) -> u64 {
    // The SIGBUS handler can guard at most `MAX_GUARDED` mappings.
    count.min(shadowbell_memory::sigbus::MAX_GUARDED) / 4 * 3 / 2
}

/// Number of descriptors for all clients: a quarter of the limit. Another quarter is for duplicates
/// of these descriptors, for the next server process. The rest is for sockets, interrupts and
/// disks.
fn descriptors() -> u64 {
    use rustix::process::{Resource, getrlimit};
    getrlimit(Resource::Nofile).current.unwrap_or(MAX_DESCRIPTORS).min(MAX_DESCRIPTORS) / 4
}

/// Reads the limits of this process, and stores them. A process with a sandbox has to call this
/// before it enters the sandbox. Otherwise the first controller reads the limits, and the sandbox
/// may forbid that.
pub fn read_limits() {
    LazyLock::force(&PROCESS);
}

impl Budget {
    pub(super) fn new(total: Amount) -> Arc<Self> {
        Arc::new(Self { total, used: Mutex::default() })
    }

    /// The budget of this process.
    pub(super) fn of_process() -> Arc<Self> {
        Arc::clone(&PROCESS)
    }
}

/// Account of one client: the part of a [`Budget`] that the client uses.
#[derive(Clone, Debug)]
pub(super) struct Account {
    budget: Arc<Budget>,
    /// Resources that the client uses. Changed only while the lock of `Budget::used` is held.
    own: Arc<Mutex<Amount>>,
}

/// Resources of a mapping or a descriptor. The drop returns them to the [`Account`].
#[derive(Debug)]
pub(super) struct Reservation {
    account: Account,
    amount: Amount,
}

impl Reservation {
    /// Increases the reserved size of a mapping to `bytes`. Called if the mapping has turned out
    /// larger than requested.
    pub(super) fn grow(&mut self, bytes: u64) -> Result<(), OverBudget> {
        let more = bytes.saturating_sub(self.amount.bytes);
        self.account.charge(Amount { bytes: more, ..Amount::default() })?;
        self.amount.bytes += more;
        Ok(())
    }
}

/// Error of a client's request that exceeds its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it would fill {} GiB and {} mappings of the address space, and a client can have half of what \
     the others leave, which is {} GiB and {} mappings",
    .requested.bytes.div_ceil(1 << 30), .requested.mappings, .limit.bytes >> 30, .limit.mappings
)]
pub(super) struct OverBudget {
    pub(super) requested: Amount,
    pub(super) limit: Amount,
}

impl Account {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self { budget, own: Arc::default() }
    }

    /// Reserves a mapping of `bytes` bytes.
    pub(super) fn take(&self, bytes: u64) -> Result<Reservation, OverBudget> {
        self.reserve(Amount { bytes, mappings: 1, ..Amount::default() })
    }

    /// Reserves a descriptor.
    pub(super) fn take_descriptor(&self) -> Result<Reservation, OverBudget> {
        self.reserve(Amount { descriptors: 1, ..Amount::default() })
    }

    fn reserve(&self, amount: Amount) -> Result<Reservation, OverBudget> {
        self.charge(amount)?;
        Ok(Reservation { account: self.clone(), amount })
    }

    fn charge(&self, more: Amount) -> Result<(), OverBudget> {
        let (mut all, mut own) = (self.budget.used.lock(), self.own.lock());
        let limit = |total: u64, all: u64, own: u64| total.saturating_sub(all - own) / 2;
        let limit = Amount {
            bytes: limit(self.budget.total.bytes, all.bytes, own.bytes),
            mappings: limit(self.budget.total.mappings, all.mappings, own.mappings),
            descriptors: limit(self.budget.total.descriptors, all.descriptors, own.descriptors),
        };
        let requested = Amount {
            bytes: own.bytes.saturating_add(more.bytes),
            mappings: own.mappings + more.mappings,
            descriptors: own.descriptors + more.descriptors,
        };
        // A request is either for a mapping or for a descriptor, so only that resource is checked.
        let has_room = match more.descriptors {
            0 => requested.bytes <= limit.bytes && requested.mappings <= limit.mappings,
            _ => requested.descriptors <= limit.descriptors,
        };
        if !has_room {
            return Err(OverBudget { requested, limit });
        }
        all.bytes += more.bytes;
        all.mappings += more.mappings;
        all.descriptors += more.descriptors;
        *own = requested;
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
    fn a_client_gets_half_of_what_the_others_leave() {
        let budget = Budget::new(Amount { bytes: 1024, mappings: 40, descriptors: 4 });
        let [one, two, three] = [(); 3].map(|()| Account::new(Arc::clone(&budget)));
        let all = one.take(512).unwrap();
        let error = one.take(1).unwrap_err();
        let limit = Amount { bytes: 512, mappings: 20, descriptors: 2 };
        let requested = Amount { bytes: 513, mappings: 2, descriptors: 0 };
        assert_eq!(error, OverBudget { requested, limit });
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
        // The memory that was released increases the share of the remaining clients.
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
            let limit = mappings(count);
            assert!(
                limit * 2 < count && limit < shadowbell_memory::sigbus::MAX_GUARDED,
                "{limit} of {count}"
            );
            assert!(limit > count.min(MAX_MAP_COUNT) / 3, "{limit} of {count}");
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
