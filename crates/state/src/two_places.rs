//! A file of two places, which take turns: the newer one that is whole counts.
//!
//! A place is written as a whole, with a number that counts and a checksum, and synchronised. Until
//! that has ended the other one counts, whenever the power goes. Nothing has to be made or renamed:
//! a server in a sandbox has the file, and no right in its directory.

use rustix::io::{ReadWriteFlags, pwritev2, retry_on_intr};
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;

/// The order of the two words behind the number of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// The length, and then the checksum.
    LengthFirst,
    /// The checksum, and then the length.
    ChecksumFirst,
}

/// How a file of two places is laid out. A place is the magic bytes, three words (the number
/// first), and the body.
#[derive(Clone, Copy, Debug)]
pub struct TwoPlaces {
    /// How a place begins.
    pub magic: &'static [u8],
    /// What follows the number.
    pub order: HeadOrder,
    /// Bytes of a place.
    pub place: u64,
    /// Whether a place is written to its end, with zeroes.
    pub is_padded: bool,
}

/// What counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Newest<T> {
    /// The number that it was written with.
    pub number: u64,
    /// The place that it is in: 0 or 1.
    pub place: u64,
    /// What it is.
    pub value: T,
}

/// A hash that tells a body which was written as a whole from one that was not (64-bit FNV-1a).
fn checksum(number: u64, body: &[u8]) -> u64 {
    number.to_le_bytes().iter().chain(body).fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl TwoPlaces {
    /// Bytes before the body.
    #[must_use]
    pub const fn head(&self) -> usize {
        self.magic.len() + 3 * 8
    }

    /// The longest body.
    #[must_use]
    pub const fn room(&self) -> usize {
        self.place as usize - self.head()
    }

    /// What is whole in a place: its number, and its body.
    fn whole(&self, file: &File, nth: u64) -> Option<(u64, Vec<u8>)> {
        let at = nth * self.place;
        let mut head = vec![0; self.head()];
        file.read_exact_at(&mut head, at).ok()?;
        let (magic, words) = head.split_at(self.magic.len());
        let word = |nth: usize| {
            let bytes = words.get(8 * nth..8 * nth + 8)?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        let number = word(0)?;
        let (len, sum) = match self.order {
            HeadOrder::LengthFirst => (word(1)?, word(2)?),
            HeadOrder::ChecksumFirst => (word(2)?, word(1)?),
        };
        let len = usize::try_from(len).ok().filter(|len| *len <= self.room())?;
        if magic != self.magic {
            return None;
        }
        let mut body = vec![0; len];
        file.read_exact_at(&mut body, at + head.len() as u64).ok()?;
        (checksum(number, &body) == sum).then_some((number, body))
    }

    /// What counts: the newer of those that are whole and that `understand` takes. `None`: there is
    /// nothing, or what there is can not be read.
    pub fn read<T>(
        &self,
        file: &File,
        understand: impl Fn(&[u8]) -> Option<T>,
    ) -> Option<Newest<T>> {
        let places = (0..2).filter_map(|place| {
            let (number, body) = self.whole(file, place)?;
            Some(Newest { number, place, value: understand(&body)? })
        });
        places.max_by_key(|newest| newest.number)
    }

    /// Writes a body to a place, with its number, and has it on stable storage.
    ///
    /// # Errors
    /// The system's: which of the two places counts is not known then, until they are read again.
    /// Or the body is longer than a place.
    pub fn write(&self, file: &File, place: u64, number: u64, body: &[u8]) -> io::Result<()> {
        if body.len() > self.room() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let (len, sum) = (body.len() as u64, checksum(number, body));
        let words = match self.order {
            HeadOrder::LengthFirst => [number, len, sum],
            HeadOrder::ChecksumFirst => [number, sum, len],
        };
        let mut bytes = Vec::with_capacity(self.head() + body.len());
        bytes.extend_from_slice(self.magic);
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend_from_slice(body);
        if self.is_padded {
            bytes.resize(self.place as usize, 0);
        }
        write_at(file, &bytes, place * self.place)?;
        file.sync_data()
    }
}

/// By the system call that disks are written with, which a sandbox allows.
fn write_at(file: &File, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let piece = [IoSlice::new(bytes)];
        let write = || pwritev2(file, &piece, at, ReadWriteFlags::empty());
        match retry_on_intr(write)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => (bytes, at) = (&bytes[written..], at + written as u64),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUTS: [TwoPlaces; 2] = [
        TwoPlaces {
            magic: b"8 bytes!",
            order: HeadOrder::LengthFirst,
            place: 1 << 20,
            is_padded: false,
        },
        TwoPlaces {
            magic: b"a longer name of",
            order: HeadOrder::ChecksumFirst,
            place: 4096,
            is_padded: true,
        },
    ];

    #[test]
    fn what_is_torn_does_not_count_whichever_byte_it_is() {
        for layout in LAYOUTS {
            let file = tempfile::tempfile().unwrap();
            let read = || {
                layout.read(&file, |body| Some(body.to_vec())).map(|newest| {
                    assert_eq!(newest.place, newest.number % 2);
                    newest.value
                })
            };
            assert_eq!(read(), None);
            for number in 1..=5_u64 {
                let body = vec![number as u8; 10 * number as usize];
                layout.write(&file, number % 2, number, &body).unwrap();
                assert_eq!(read(), Some(body.clone()));
                let before =
                    (number > 1).then(|| vec![number as u8 - 1; 10 * number as usize - 10]);
                for byte in 0..layout.head() + body.len() {
                    let at = number % 2 * layout.place + byte as u64;
                    let mut was = [0];
                    file.read_exact_at(&mut was, at).unwrap();
                    file.write_all_at(&[!was[0]], at).unwrap();
                    assert_eq!(read(), before, "byte {byte}");
                    file.write_all_at(&was, at).unwrap();
                }
            }
            let len = file.metadata().unwrap().len();
            let ends = layout.place + if layout.is_padded { layout.place } else { 32 + 50 };
            assert_eq!(len, ends);
        }
    }

    #[test]
    fn a_body_that_makes_no_sense_does_not_count_and_one_too_long_is_refused() {
        let [_, layout] = LAYOUTS;
        let file = tempfile::tempfile().unwrap();
        layout.write(&file, 0, 1, b"good").unwrap();
        layout.write(&file, 1, 2, b"bad").unwrap();
        let newest = layout.read(&file, |body| (body == b"good").then_some(()));
        assert_eq!(newest, Some(Newest { number: 1, place: 0, value: () }));
        let most = vec![7; layout.room()];
        layout.write(&file, 1, 3, &most).unwrap();
        assert_eq!(layout.read(&file, |body| Some(body.len())).unwrap().value, most.len());
        let error = layout.write(&file, 0, 4, &vec![7; layout.room() + 1]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        // A length that the place has not.
        file.write_all_at(&u64::MAX.to_le_bytes(), layout.place + 16 + 16).unwrap();
        assert_eq!(layout.read(&file, |_| Some(())).unwrap().number, 1);
    }
}
