//! File descriptors of a state. The sections of the state refer to them by number.

use crate::error::StateError;
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;

/// Reference to a descriptor, stored in a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FdRef(u32);

impl FdRef {
    /// Creates a reference to the descriptor at index `place`.
    #[must_use]
    pub fn at(place: usize) -> Self {
        Self(u32::try_from(place).unwrap_or(u32::MAX))
    }
}

/// File descriptors of a state.
///
/// If a sender transfers one snapshot of a state after the other, some descriptors may be
/// *lasting*: a lasting descriptor is sent with one snapshot only, and the receiver holds it until
/// the sender removes it.
#[derive(Debug, Default)]
pub struct Descriptors {
    all: Vec<Option<OwnedFd>>,
    lasting: Vec<LastingChange>,
}

/// Change of the lasting descriptors. Each of them is identified by a number.
#[derive(Debug)]
pub enum LastingChange {
    /// Adds a lasting descriptor.
    Put(u64, OwnedFd),
    /// Removes a lasting descriptor.
    Remove(u64),
}

impl Descriptors {
    /// Adds a descriptor. Returns the reference to store in a section.
    pub fn add(&mut self, fd: OwnedFd) -> FdRef {
        self.all.push(Some(fd));
        FdRef::at(self.all.len() - 1)
    }

    /// Takes a descriptor out.
    ///
    /// # Errors
    ///
    /// [`StateError::NoDescriptor`] if the descriptor does not exist or was already taken.
    pub fn take(&mut self, fd: FdRef) -> Result<OwnedFd, StateError> {
        let place = self.all.get_mut(fd.0 as usize);
        place.and_then(Option::take).ok_or(StateError::NoDescriptor(fd.0))
    }

    /// Number of descriptors, including those that were taken.
    #[must_use]
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// True if no descriptor was ever added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Descriptors that were not taken, in the order of addition.
    pub fn iter(&self) -> impl Iterator<Item = &OwnedFd> {
        self.all.iter().flatten()
    }

    /// Returns the descriptors that were not taken. If none was taken, [`Descriptors::from`]
    /// restores this value from them.
    #[must_use]
    pub fn into_fds(self) -> Vec<OwnedFd> {
        self.all.into_iter().flatten().collect()
    }
}

/// Lasting descriptors.
impl Descriptors {
    /// Adds a lasting descriptor, for this snapshot and later ones.
    pub fn add_lasting(&mut self, number: u64, fd: OwnedFd) {
        self.lasting.push(LastingChange::Put(number, fd));
    }

    /// Removes the lasting descriptor `number`.
    pub fn remove_lasting(&mut self, number: u64) {
        self.lasting.push(LastingChange::Remove(number));
    }

    /// Takes the changes of the lasting descriptors, in order. A process that recovers from the
    /// last snapshot gets all lasting descriptors that were added and not removed.
    pub fn take_changes(&mut self) -> Vec<LastingChange> {
        std::mem::take(&mut self.lasting)
    }
}

impl From<Vec<OwnedFd>> for Descriptors {
    fn from(fds: Vec<OwnedFd>) -> Self {
        Self { all: fds.into_iter().map(Some).collect(), lasting: Vec::new() }
    }
}
