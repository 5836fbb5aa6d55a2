//! Serialization of a checkpoint with its descriptors.

use crate::checkpoint::{Body, Checkpoint, Item};
use serde::{Deserialize, Serialize};
use shadowbell_state::{Bytes, Descriptors, FdRef, StateError};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Descriptors that the serialized state refers to, in order.
pub(crate) type Fds<'a> = Vec<BorrowedFd<'a>>;

/// Adds a descriptor and returns its reference for the serialized state.
pub(crate) fn add<'a>(fds: &mut Fds<'a>, fd: BorrowedFd<'a>) -> FdRef {
    fds.push(fd);
    FdRef::at(fds.len() - 1)
}

/// Serialized checkpoint, without the changes of an unfinished transaction.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct SavedCheckpoint {
    all: Vec<(String, SavedItem)>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedItem {
    body: SavedBody,
    fds: Vec<FdRef>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SavedBody {
    Here(Bytes),
    There(FdRef),
}

impl Item {
    fn save<'a>(&'a self, fds: &mut Fds<'a>) -> SavedItem {
        let body = match &self.body {
            Body::Here(body) => SavedBody::Here(Bytes(body.clone())),
            Body::There(memory) => SavedBody::There(add(fds, memory.as_fd())),
        };
        SavedItem { body, fds: self.fds.iter().map(|fd| add(fds, fd.as_fd())).collect() }
    }

    fn restore(saved: SavedItem, fds: &mut Descriptors) -> Result<Self, StateError> {
        let body = match saved.body {
            SavedBody::Here(Bytes(body)) => Body::Here(body),
            SavedBody::There(memory) => Body::There(fds.take(memory)?),
        };
        let its: Result<_, _> = saved.fds.into_iter().map(|fd| fds.take(fd)).collect();
        Ok(Self { body, fds: its? })
    }
}

impl Checkpoint {
    /// Serializes the checkpoint.
    pub(crate) fn save<'a>(&'a self, fds: &mut Fds<'a>) -> SavedCheckpoint {
        SavedCheckpoint {
            all: self.all.iter().map(|(key, item)| (key.clone(), item.save(fds))).collect(),
        }
    }

    /// Deserializes a checkpoint.
    ///
    /// # Errors
    /// A descriptor is missing.
    pub(crate) fn restore(
        saved: SavedCheckpoint,
        fds: &mut Descriptors,
    ) -> Result<Self, StateError> {
        let mut items = Self::default();
        for (key, item) in saved.all {
            items.all.insert(key, Arc::new(Item::restore(item, fds)?));
        }
        Ok(items)
    }
}
