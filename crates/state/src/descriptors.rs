//! Descriptors beside a state, which names them by number.

use crate::error::StateError;
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;

/// A descriptor, in a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FdRef(u32);

impl FdRef {
    /// The descriptor at this place of those that go with a state.
    #[must_use]
    pub fn at(place: usize) -> Self {
        Self(u32::try_from(place).unwrap_or(u32::MAX))
    }
}

/// The descriptors that belong to a state.
///
/// Of a state that is written down again and again, some may be *lasting*: they are not given with
/// each record, but stay with whoever has been given them until they are removed.
#[derive(Debug, Default)]
pub struct Descriptors {
    all: Vec<Option<OwnedFd>>,
    lasting: Vec<LastingChange>,
}

/// A change of the lasting descriptors, which have numbers.
#[derive(Debug)]
pub enum LastingChange {
    /// There is one more.
    Put(u64, OwnedFd),
    /// There is one less.
    Remove(u64),
}

impl Descriptors {
    /// Adds one: how the state names it.
    pub fn add(&mut self, fd: OwnedFd) -> FdRef {
        self.all.push(Some(fd));
        FdRef::at(self.all.len() - 1)
    }

    /// Takes one out.
    ///
    /// # Errors
    /// [`StateError::NoDescriptor`], if it is not there, or not any more.
    pub fn take(&mut self, fd: FdRef) -> Result<OwnedFd, StateError> {
        let place = self.all.get_mut(fd.0 as usize);
        place.and_then(Option::take).ok_or(StateError::NoDescriptor(fd.0))
    }

    /// How many there are, with those that were taken.
    #[must_use]
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there have never been any.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Those that were not taken, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = &OwnedFd> {
        self.all.iter().flatten()
    }

    /// Those that were not taken. If none was, [`Descriptors::from`] makes the same of them again.
    #[must_use]
    pub fn into_fds(self) -> Vec<OwnedFd> {
        self.all.into_iter().flatten().collect()
    }
}

/// The lasting ones.
impl Descriptors {
    /// One more with this number, for this record and those that follow.
    pub fn put_lasting(&mut self, number: u64, fd: OwnedFd) {
        self.lasting.push(LastingChange::Put(number, fd));
    }

    /// The one with this number is not needed any more.
    pub fn remove_lasting(&mut self, number: u64) {
        self.lasting.push(LastingChange::Remove(number));
    }

    /// What is to be done with those that were given before, in this order; for who goes on from
    /// the last record, all that have stayed.
    pub fn take_changes(&mut self) -> Vec<LastingChange> {
        std::mem::take(&mut self.lasting)
    }
}

impl From<Vec<OwnedFd>> for Descriptors {
    fn from(fds: Vec<OwnedFd>) -> Self {
        Self { all: fds.into_iter().map(Some).collect(), lasting: Vec::new() }
    }
}
