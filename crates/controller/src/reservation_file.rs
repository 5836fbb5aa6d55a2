//! The file in which reservations are kept.
//!
//! It has two places, which take turns. Each is written as a whole, with a number that counts and a
//! checksum, and so there is always one that counts, whenever the power goes. A name is of no use
//! for that: a server in a sandbox has the file, and no right in its directory.

use crate::reservations::{AllReservations, Reservations};
use parking_lot::Mutex;
use rustix::io::{ReadWriteFlags, pwritev2, retry_on_intr};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;

const MAGIC: [u8; 8] = *b"SBRESV01";
/// Magic number, count, length, checksum.
const HEAD: usize = 32;
/// Bytes of a place. All that there can be is less: 128 registrants in each of 256 namespaces.
const PLACE: usize = 8 << 20;

/// The file in which reservations are kept.
#[derive(Debug)]
pub(crate) struct ReservationFile {
    file: File,
    /// One change at a time.
    writing: Mutex<()>,
}

/// What a place has.
#[derive(Default, Serialize, Deserialize)]
struct Content {
    /// By UUID.
    namespaces: Vec<([u8; 16], Reservations)>,
}

fn checksum(count: u64, text: &[u8]) -> u64 {
    let bytes = count.to_le_bytes();
    let all = bytes.iter().chain(text);
    all.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}

impl ReservationFile {
    pub(crate) fn new(file: File) -> Self {
        Self { file, writing: Mutex::default() }
    }

    /// What is in a place, and the number of that; `None` if that is nothing whole.
    fn place(&self, nth: u64) -> Option<(u64, Vec<u8>)> {
        let at = nth * PLACE as u64;
        let mut head = [0; HEAD];
        self.file.read_exact_at(&mut head, at).ok()?;
        let word = |nth: usize| {
            let bytes = head.get(8 * nth..8 * nth + 8)?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        let (count, len, sum) = (word(1)?, usize::try_from(word(2)?).ok()?, word(3)?);
        if head[..8] != MAGIC || len > PLACE - HEAD {
            return None;
        }
        let mut text = vec![0; len];
        self.file.read_exact_at(&mut text, at + HEAD as u64).ok()?;
        (checksum(count, &text) == sum).then_some((count, text))
    }

    /// What counts, with the number of its place.
    fn newest(&self) -> Option<(u64, u64, Vec<u8>)> {
        let places = (0..2).filter_map(|nth| {
            let (count, text) = self.place(nth)?;
            Some((count, nth, text))
        });
        places.max_by_key(|(count, ..)| *count)
    }

    /// What was written last; nothing, if the file is empty.
    ///
    /// # Errors
    /// It is another file.
    pub(crate) fn read(&self) -> io::Result<AllReservations> {
        let wrong = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let Some((_, _, text)) = self.newest() else {
            if self.file.metadata()?.len() == 0 || self.is_new()? {
                return Ok(AllReservations::new());
            }
            return Err(wrong("the file has no reservations; give an empty one".into()));
        };
        let content: Content = serde_json::from_slice(&text)
            .map_err(|error| wrong(format!("these are no reservations: {error}")))?;
        Ok(content.namespaces.into_iter().collect())
    }

    /// The power went while it was written for the first time.
    fn is_new(&self) -> io::Result<bool> {
        let mut magic = [0; 8];
        let len = self.file.read_at(&mut magic, 0)?;
        let len_of_all = self.file.metadata()?.len();
        let is_begun = magic[..len] == MAGIC[..len] || magic == [0; 8];
        Ok(is_begun && len_of_all <= PLACE as u64)
    }

    /// By the system call that disks are written with, which a sandbox allows.
    fn write_at(&self, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            let piece = [IoSlice::new(bytes)];
            let write = || pwritev2(&self.file, &piece, at, ReadWriteFlags::empty());
            match retry_on_intr(write)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                written => (bytes, at) = (&bytes[written..], at + written as u64),
            }
        }
        Ok(())
    }

    /// Has the file have this, or what it had before.
    ///
    /// # Errors
    /// The system's; or there is too much.
    pub(crate) fn write(&self, all: &AllReservations) -> io::Result<()> {
        let _one_after_the_other = self.writing.lock();
        let namespaces = all.iter().map(|(uuid, its)| (*uuid, its.clone())).collect();
        let text = serde_json::to_vec(&Content { namespaces })?;
        if text.len() > PLACE - HEAD {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "too many reservations"));
        }
        let (count, nth) = self.newest().map_or((1, 0), |(count, nth, _)| (count + 1, 1 - nth));
        let mut bytes = Vec::with_capacity(HEAD + text.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&count.to_le_bytes());
        bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&checksum(count, &text).to_le_bytes());
        bytes.extend_from_slice(&text);
        self.write_at(&bytes, nth * PLACE as u64)?;
        self.file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reservations::{Action, HostId};

    fn with_key(key: u64) -> AllReservations {
        let mut its = Reservations::default();
        its.act(HostId::Short(1), Action::Register { key }).unwrap();
        AllReservations::from([([3; 16], its)])
    }

    #[test]
    fn whatever_is_torn_there_is_what_was_before() {
        let file = tempfile::tempfile().unwrap();
        let kept = ReservationFile::new(file.try_clone().unwrap());
        assert_eq!(kept.read().unwrap(), AllReservations::new());
        for key in 1..=5 {
            kept.write(&with_key(key)).unwrap();
            assert_eq!(kept.read().unwrap(), with_key(key));
            if key == 1 {
                continue;
            }
            // Each byte of the place that was written last, as it would be if it had not come.
            let (_, nth, text) = kept.newest().unwrap();
            for byte in (0..HEAD + text.len()).map(|byte| nth * PLACE as u64 + byte as u64) {
                let mut was = [0];
                file.read_exact_at(&mut was, byte).unwrap();
                file.write_all_at(&[!was[0]], byte).unwrap();
                assert_eq!(kept.read().unwrap(), with_key(key - 1), "byte {byte}");
                file.write_all_at(&was, byte).unwrap();
            }
        }
    }

    #[test]
    fn the_first_that_is_torn_is_nothing_and_another_file_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let kept = ReservationFile::new(file.try_clone().unwrap());
        kept.write(&with_key(1)).unwrap();
        file.set_len(HEAD as u64 + 3).unwrap();
        assert_eq!(kept.read().unwrap(), AllReservations::new());
        file.write_all_at(b"no such thing", 0).unwrap();
        assert!(kept.read().is_err());
    }
}
