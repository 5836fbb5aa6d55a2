//! Reservations of namespaces (Base 2.1, 8.1.22): state machine and reservation file.
//!
//! The state machine of one namespace has its registrants, their keys and the holder of the
//! reservation. It does not depend on controllers, queues or files. The file stores the
//! reservations of a subsystem.
//!
//! The file has [two slots](AbSlots), which are written alternately. So one valid version of the
//! contents survives a power loss at any time.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_spec::log::AnaState;
use shadowbell_spec::reservation::{ReservationNotification, ReservationType};
use shadowbell_spec::status::Status;
use shadowbell_state::{AbSlots, HeadOrder, Newest};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Maximum number of registrants of a namespace. Without a limit, a host could add registrants by
/// changing its Host Identifier after each reset.
const MAX_REGISTRANTS: usize = 128;

/// Host Identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum HostId {
    /// Host Identifier of 64 bits.
    Short(u64),
    /// Extended Host Identifier of 128 bits.
    Extended([u8; 16]),
}

impl HostId {
    /// Decodes the data of the Host Identifier feature; `None` if it is zero, which means "none".
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.iter().all(|byte| *byte == 0) {
            return None;
        }
        if let Ok(extended) = bytes.try_into() {
            return Some(Self::Extended(extended));
        }
        bytes.try_into().ok().map(|short| Self::Short(u64::from_le_bytes(short)))
    }

    /// True if the identifier has 128 bits.
    pub(crate) fn is_extended(self) -> bool {
        matches!(self, Self::Extended(_))
    }

    /// Encodes the identifier as data of the Host Identifier feature.
    pub(crate) fn bytes(self) -> Vec<u8> {
        match self {
            Self::Short(id) => id.to_le_bytes().to_vec(),
            Self::Extended(id) => id.to_vec(),
        }
    }
}

/// Access rights of a controller to a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    /// True if commands of the read group are allowed.
    pub(crate) read: bool,
    /// True if commands of the write group are allowed.
    pub(crate) write: bool,
    /// ANA state of the namespace's group, independent of reservations.
    pub(crate) ana: AnaState,
}

impl Access {
    /// Unrestricted access.
    pub(crate) const ALL: Self = Self { read: true, write: true, ana: AnaState::Optimized };

    /// True if some commands are refused. The non-optimized ANA state refuses no commands.
    pub(crate) fn restricts(self) -> bool {
        !self.read || !self.write || self.ana.refusal().is_some()
    }
}

/// Reservation command that changes the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Reservation Register, register.
    Register { key: u64 },
    /// Reservation Register, unregister. `key` is the current key, or `None` to ignore the key.
    Unregister { key: Option<u64> },
    /// Reservation Register, replace. `key` is the current key, or `None` to ignore the key.
    Replace { key: Option<u64>, new: u64 },
    /// Reservation Acquire.
    Acquire { key: u64, kind: ReservationType },
    /// Reservation Acquire, Preempt. Registrants with the key `of` are preempted.
    Preempt { key: u64, of: u64, kind: ReservationType },
    /// Reservation Release. `kind` may be an undefined type.
    Release { key: u64, kind: u8 },
    /// Reservation Release, Clear.
    Clear { key: u64 },
}

/// Reservation notification for a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Notification {
    RegistrationPreempted,
    ReservationReleased,
    ReservationPreempted,
}

impl Notification {
    /// Notification type in the Reservation Notification log page.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::RegistrationPreempted => ReservationNotification::REGISTRATION_PREEMPTED,
            Self::ReservationReleased => ReservationNotification::RESERVATION_RELEASED,
            Self::ReservationPreempted => ReservationNotification::RESERVATION_PREEMPTED,
        }
    }
}

/// Effects of a change on hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Consequences {
    /// Notifications to send.
    pub(crate) notifications: Vec<(HostId, Notification)>,
    /// Hosts that lost their registration.
    pub(crate) unregistered: Vec<HostId>,
}

/// Reservation state of one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reservations {
    /// Generation of the Reservation Status: number of registration changes.
    pub(crate) generation: u32,
    /// Persist Through Power Loss.
    pub(crate) persistent: bool,
    /// Registrants and their keys.
    registrants: Vec<(HostId, u64)>,
    /// RTYPE and holder of the reservation. For the types whose holders are all registrants, the
    /// host that acquired the reservation is stored but not used.
    held: Option<(u8, HostId)>,
}

const CONFLICT: Status = Status::RESERVATION_CONFLICT.with_dnr();
const INVALID: Status = Status::INVALID_FIELD.with_dnr();

impl Reservations {
    /// Type of the reservation, if one is held.
    pub(crate) fn kind(&self) -> Option<ReservationType> {
        self.held.and_then(|(kind, _)| ReservationType::from_bits(kind))
    }

    /// Registrants and their keys.
    pub(crate) fn registrants(&self) -> impl Iterator<Item = (HostId, u64)> {
        self.registrants.iter().copied()
    }

    /// True if the host holds the reservation.
    pub(crate) fn is_holder(&self, host: HostId) -> bool {
        match (self.kind(), self.held) {
            (Some(kind), _) if kind.is_of_all_registrants() => self.key(host).is_some(),
            (Some(_), Some((_, holder))) => holder == host,
            _ => false,
        }
    }

    /// Access rights of a host. A host without an identifier is not a registrant.
    pub(crate) fn access(&self, host: Option<HostId>) -> Access {
        let Some(kind) = self.kind() else { return Access::ALL };
        let is_registrant = host.is_some_and(|host| self.key(host).is_some());
        let is_holder = host.is_some_and(|host| self.is_holder(host));
        if is_holder || is_registrant && !kind.is_of_the_holder_alone() {
            return Access::ALL;
        }
        Access { read: !kind.is_exclusive_access(), write: false, ..Access::ALL }
    }

    fn key(&self, host: HostId) -> Option<u64> {
        self.registrants.iter().find(|(other, _)| *other == host).map(|(_, key)| *key)
    }

    /// Executes a reservation command of `host`. On failure the state is unchanged.
    ///
    /// # Errors
    /// The completion status of the command.
    pub(crate) fn act(&mut self, host: HostId, action: Action) -> Result<Consequences, Status> {
        let mut then = Consequences::default();
        match action {
            Action::Register { key: 0 } | Action::Replace { new: 0, .. } => return Err(INVALID),
            Action::Register { key } => match self.key(host) {
                Some(present) if present != key => return Err(CONFLICT),
                Some(_) => self.count(),
                None => self.add(host, key)?,
            },
            Action::Unregister { key } => {
                self.check(host, key)?;
                self.unregister(host, &mut then);
                self.count();
            }
            // With Ignore Existing Key, Replace registers a host that is not registered yet.
            Action::Replace { key: None, new } if self.key(host).is_none() => {
                self.add(host, new)?
            }
            Action::Replace { key, new } => {
                self.check(host, key)?;
                let mine = self.registrants.iter_mut().filter(|(other, _)| *other == host);
                mine.for_each(|(_, key)| *key = new);
                self.count();
            }
            Action::Acquire { key, kind } => {
                self.check(host, Some(key))?;
                match self.kind() {
                    None => self.held = Some((kind as u8, host)),
                    Some(present) if present == kind && self.is_holder(host) => {}
                    Some(_) => return Err(CONFLICT),
                }
            }
            Action::Preempt { key, of, kind } => {
                self.check(host, Some(key))?;
                self.preempt(host, of, kind, &mut then)?;
                self.count();
            }
            Action::Release { key, kind } => {
                self.check(host, Some(key))?;
                self.release(host, kind, &mut then)?;
            }
            Action::Clear { key } => {
                self.check(host, Some(key))?;
                let others = self.registrants().filter(|(other, _)| *other != host);
                then.notifications =
                    others.map(|(host, _)| (host, Notification::ReservationPreempted)).collect();
                then.unregistered = self.registrants().map(|(host, _)| host).collect();
                self.registrants.clear();
                self.held = None;
                self.count();
            }
        }
        Ok(then)
    }

    fn count(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    fn add(&mut self, host: HostId, key: u64) -> Result<(), Status> {
        if self.registrants.len() >= MAX_REGISTRANTS {
            return Err(Status::INTERNAL);
        }
        self.registrants.push((host, key));
        self.count();
        Ok(())
    }

    /// Checks that the host is registered with `key`. If `key` is `None`, any key is valid.
    fn check(&self, host: HostId, key: Option<u64>) -> Result<(), Status> {
        match (self.key(host), key) {
            (None, _) => Err(CONFLICT),
            (Some(present), Some(key)) if present != key => Err(CONFLICT),
            _ => Ok(()),
        }
    }

    /// Adds a notification for all registrants except `host`.
    fn notify_others(&self, host: HostId, notifications: Notification, then: &mut Consequences) {
        let others = self.registrants().filter(|(other, _)| *other != host);
        then.notifications.extend(others.map(|(other, _)| (other, notifications)));
    }

    /// Unregisters a host. If it was the last holder, releases the reservation.
    fn unregister(&mut self, host: HostId, then: &mut Consequences) {
        let was_holder = self.is_holder(host);
        self.registrants.retain(|(other, _)| *other != host);
        then.unregistered.push(host);
        let Some(kind) = self.kind().filter(|_| was_holder) else { return };
        if kind.is_of_all_registrants() && !self.registrants.is_empty() {
            return;
        }
        self.held = None;
        if !kind.is_of_the_holder_alone() {
            self.notify_others(host, Notification::ReservationReleased, then);
        }
    }

    /// Unregisters the registrants that `whom` selects, on behalf of host `by`, which preempts
    /// them.
    fn remove(&mut self, by: HostId, whom: impl Fn(HostId, u64) -> bool, then: &mut Consequences) {
        let chosen: Vec<_> = self.registrants().filter(|(host, key)| whom(*host, *key)).collect();
        for (host, _) in chosen {
            self.unregister(host, then);
            if host != by {
                then.notifications.push((host, Notification::RegistrationPreempted));
            }
        }
    }

    fn preempt(
        &mut self,
        host: HostId,
        of: u64,
        kind: ReservationType,
        then: &mut Consequences,
    ) -> Result<(), Status> {
        let present = self.held.and_then(|(bits, holder)| {
            let kind = ReservationType::from_bits(bits)?;
            Some((kind, holder))
        });
        if let Some((before, _)) = present
            && before.is_of_all_registrants()
            && of == 0
        {
            self.remove(host, |other, _| other != host, then);
            self.held = Some((kind as u8, host));
            return Ok(());
        }
        if let Some((before, holder)) = present
            && !before.is_of_all_registrants()
        {
            if of == 0 {
                return Err(INVALID);
            }
            if self.key(holder) == Some(of) {
                self.held = Some((kind as u8, host));
                self.remove(host, |other, key| other != host && key == of, then);
                if before != kind {
                    self.notify_others(host, Notification::ReservationReleased, then);
                }
                return Ok(());
            }
        }
        // Registrants with the given key are unregistered. The reservation is released only if its
        // holder is one of them.
        if of == 0 || self.registrants().all(|(_, key)| key != of) {
            return Err(CONFLICT);
        }
        self.remove(host, |_, key| key == of, then);
        Ok(())
    }

    fn release(&mut self, host: HostId, kind: u8, then: &mut Consequences) -> Result<(), Status> {
        let Some(present) = self.kind() else { return Ok(()) };
        if !self.is_holder(host) {
            return Ok(());
        }
        if present as u8 != kind {
            return Err(INVALID);
        }
        self.held = None;
        if !present.is_of_the_holder_alone() {
            self.notify_others(host, Notification::ReservationReleased, then);
        }
        Ok(())
    }

    /// State after a power loss.
    pub(crate) fn after_power_loss(self) -> Self {
        if self.persistent { self } else { Self::default() }
    }

    /// True if the state equals that of an unused namespace.
    pub(crate) fn is_untouched(&self) -> bool {
        *self == Self::default()
    }
}

/// Reservations of a subsystem's namespaces, by UUID.
pub(crate) type AllReservations = BTreeMap<[u8; 16], Reservations>;

const MAGIC: [u8; 8] = *b"SBRESV01";
/// Size of a slot in bytes, sufficient for the maximum: 128 registrants in each of 256 namespaces.
const SLOT_SIZE: u64 = 8 << 20;
const SLOTS: AbSlots =
    AbSlots { magic: &MAGIC, order: HeadOrder::LengthFirst, place: SLOT_SIZE, is_padded: false };

/// File that stores reservations.
#[derive(Debug)]
pub(crate) struct ReservationFile {
    file: File,
    /// Serializes writes.
    writing: Mutex<()>,
}

/// Contents of a slot of the file.
#[derive(Default, Serialize, Deserialize)]
struct Content {
    /// Reservations by namespace UUID.
    namespaces: Vec<([u8; 16], Reservations)>,
}

impl ReservationFile {
    pub(crate) fn new(file: File) -> Self {
        Self { file, writing: Mutex::default() }
    }

    /// Newest valid version in the file.
    fn newest(&self) -> Option<Newest<Vec<u8>>> {
        SLOTS.read(&self.file, |text| Some(text.to_vec()))
    }

    /// Reads the newest version. An empty file contains no reservations.
    ///
    /// # Errors
    /// The file is not a reservation file, or cannot be read.
    pub(crate) fn read(&self) -> io::Result<AllReservations> {
        let wrong = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let Some(Newest { value: text, .. }) = self.newest() else {
            if self.file.metadata()?.len() == 0 || self.is_new()? {
                return Ok(AllReservations::new());
            }
            return Err(wrong("the file has no valid reservations: use an empty file".into()));
        };
        let content: Content = serde_json::from_slice(&text)
            .map_err(|error| wrong(format!("the file has invalid reservations: {error}")))?;
        Ok(content.namespaces.into_iter().collect())
    }

    /// True if the file has at most a partial first slot, because power was lost during the first
    /// write.
    fn is_new(&self) -> io::Result<bool> {
        let mut magic = [0; 8];
        let len = self.file.read_at(&mut magic, 0)?;
        let len_of_all = self.file.metadata()?.len();
        let is_begun = magic[..len] == MAGIC[..len] || magic == [0; 8];
        Ok(is_begun && len_of_all <= SLOT_SIZE)
    }

    /// Writes a new version. On failure the previous version stays valid.
    ///
    /// # Errors
    /// The error of the system, or an error if the reservations do not fit into a slot.
    pub(crate) fn write(&self, all: &AllReservations) -> io::Result<()> {
        let _one_after_the_other = self.writing.lock();
        let namespaces = all.iter().map(|(uuid, its)| (*uuid, its.clone())).collect();
        let text = serde_json::to_vec(&Content { namespaces })?;
        if text.len() > SLOTS.room() {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "too many reservations"));
        }
        let newest = self.newest().map(|newest| (newest.number, newest.place));
        let (number, place) = newest.map_or((1, 0), |(number, place)| (number + 1, 1 - place));
        SLOTS.write(&self.file, place, number, &text)
    }
}

#[cfg(test)]
mod tests;
