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
#[derive(Debug, Default)]
pub struct Descriptors(Vec<Option<OwnedFd>>);

impl Descriptors {
    /// Adds one: how the state names it.
    pub fn add(&mut self, fd: OwnedFd) -> FdRef {
        self.0.push(Some(fd));
        FdRef::at(self.0.len() - 1)
    }

    /// Takes one out.
    ///
    /// # Errors
    /// [`StateError::NoDescriptor`], if it is not there, or not any more.
    pub fn take(&mut self, fd: FdRef) -> Result<OwnedFd, StateError> {
        let place = self.0.get_mut(fd.0 as usize);
        place.and_then(Option::take).ok_or(StateError::NoDescriptor(fd.0))
    }

    /// How many there are, with those that were taken.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there have never been any.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those that were not taken, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = &OwnedFd> {
        self.0.iter().flatten()
    }

    /// Those that were not taken. If none was, [`Descriptors::from`] makes the same of them again.
    #[must_use]
    pub fn into_fds(self) -> Vec<OwnedFd> {
        self.0.into_iter().flatten().collect()
    }
}

impl From<Vec<OwnedFd>> for Descriptors {
    fn from(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }
}
