//! Reservation file: stores the reservations of a subsystem.
//!
//! Writes alternate between [two places](AbSlots), so one valid version survives a power loss at
//! any time.

use crate::reservations::{AllReservations, Reservations};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_state::{AbSlots, HeadOrder, Newest};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const MAGIC: [u8; 8] = *b"SBRESV01";
/// Bytes of a place. Large enough for the maximum: 128 registrants in each of 256 namespaces.
const PLACE: u64 = 8 << 20;
const PLACES: AbSlots =
    AbSlots { magic: &MAGIC, order: HeadOrder::LengthFirst, place: PLACE, is_padded: false };

/// File that stores reservations.
#[derive(Debug)]
pub(crate) struct ReservationFile {
    file: File,
    /// Serializes writes.
    writing: Mutex<()>,
}

/// Contents of a place.
#[derive(Default, Serialize, Deserialize)]
struct Content {
    /// Reservations by namespace UUID.
    namespaces: Vec<([u8; 16], Reservations)>,
}

impl ReservationFile {
    pub(crate) fn new(file: File) -> Self {
        Self { file, writing: Mutex::default() }
    }

    /// Newest valid version.
    fn newest(&self) -> Option<Newest<Vec<u8>>> {
        PLACES.read(&self.file, |text| Some(text.to_vec()))
    }

    /// Reads the newest version; an empty file has no reservations.
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

    /// True if power was lost during the first write: the file has at most a partial first place.
    fn is_new(&self) -> io::Result<bool> {
        let mut magic = [0; 8];
        let len = self.file.read_at(&mut magic, 0)?;
        let len_of_all = self.file.metadata()?.len();
        let is_begun = magic[..len] == MAGIC[..len] || magic == [0; 8];
        Ok(is_begun && len_of_all <= PLACE)
    }

    /// Writes a new version. On failure the previous version stays valid.
    ///
    /// # Errors
    /// The error of the system, or the reservations do not fit into a place.
    pub(crate) fn write(&self, all: &AllReservations) -> io::Result<()> {
        let _one_after_the_other = self.writing.lock();
        let namespaces = all.iter().map(|(uuid, its)| (*uuid, its.clone())).collect();
        let text = serde_json::to_vec(&Content { namespaces })?;
        if text.len() > PLACES.room() {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "too many reservations"));
        }
        let newest = self.newest().map(|newest| (newest.number, newest.place));
        let (number, place) = newest.map_or((1, 0), |(number, place)| (number + 1, 1 - place));
        PLACES.write(&self.file, place, number, &text)
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
            // Corrupt each byte of the newest version, as if its write had been lost.
            let Newest { place, value: text, .. } = kept.newest().unwrap();
            for byte in (0..PLACES.head() + text.len()).map(|byte| place * PLACE + byte as u64) {
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
        file.set_len(PLACES.head() as u64 + 3).unwrap();
        assert_eq!(kept.read().unwrap(), AllReservations::new());
        file.write_all_at(b"no such thing", 0).unwrap();
        assert!(kept.read().is_err());
    }

    #[test]
    fn a_file_of_an_earlier_version_is_read_and_written_as_that_would() {
        let file = tempfile::tempfile().unwrap();
        let kept = ReservationFile::new(file.try_clone().unwrap());
        kept.write(&AllReservations::new()).unwrap();
        let mut bytes = vec![0; 64];
        let len = file.read_at(&mut bytes, 0).unwrap();
        let mut as_before = b"SBRESV01\x01\0\0\0\0\0\0\0\x11\0\0\0\0\0\0\0".to_vec();
        as_before.extend_from_slice(&0x8f8654fa2ef6aa34_u64.to_le_bytes());
        as_before.extend_from_slice(b"{\"namespaces\":[]}");
        assert_eq!(bytes[..len], as_before);
        assert_eq!(kept.read().unwrap(), AllReservations::new());
    }
}
