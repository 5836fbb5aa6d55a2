//! File with two slots that are written alternately (A/B update). The newer valid slot is the
//! current one.
//!
//! A slot is written completely, with a sequence number and a checksum, and synchronised. If the
//! power fails during the write, the other slot is still valid. No file is created or renamed. So
//! the format is suitable for a sandboxed server, which has the open file but no access to its
//! directory.

use rustix::io::{ReadWriteFlags, pwritev2, retry_on_intr};
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;

/// Order of the two words after the sequence number of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// Length, then checksum.
    LengthFirst,
    /// Checksum, then length.
    ChecksumFirst,
}

/// Layout of a file with two slots. A slot consists of the magic bytes, three 64-bit words
/// (sequence number, and length and checksum in the order of [`HeadOrder`]), and the body.
#[derive(Clone, Copy, Debug)]
pub struct AbSlots {
    /// Magic bytes at the start of a slot.
    pub magic: &'static [u8],
    /// Order of the words after the sequence number.
    pub order: HeadOrder,
    /// Size of a slot in bytes.
    pub place: u64,
    /// True if a slot is padded with zeroes to its end.
    pub is_padded: bool,
}

/// Content of the current slot: the newer one of the valid slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Newest<T> {
    /// Sequence number of the slot.
    pub number: u64,
    /// Index of the slot in the file: 0 or 1.
    pub place: u64,
    /// Decoded body.
    pub value: T,
}

/// Checksum by which an incompletely written body is detected (64-bit FNV-1a).
fn checksum(number: u64, body: &[u8]) -> u64 {
    number.to_le_bytes().iter().chain(body).fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl AbSlots {
    /// Size of the header in bytes.
    #[must_use]
    pub const fn head(&self) -> usize {
        self.magic.len() + 3 * 8
    }

    /// Longest body in bytes.
    #[must_use]
    pub const fn room(&self) -> usize {
        self.place as usize - self.head()
    }

    /// Sequence number and body of a slot. `None` if the slot is invalid.
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

    /// Reads the newer one of the slots that are valid and that `understand` can decode. `None` if
    /// there is no such slot.
    pub fn read<T>(
        &self,
        file: &File,
        understand: impl Fn(&[u8]) -> Option<T>,
    ) -> Option<Newest<T>> {
        let slots = (0..2).filter_map(|place| {
            let (number, body) = self.whole(file, place)?;
            Some(Newest { number, place, value: understand(&body)? })
        });
        slots.max_by_key(|newest| newest.number)
    }

    /// Writes a body to the slot `place` with the sequence number `number`, and synchronises it
    /// to stable storage.
    ///
    /// # Errors
    /// If the body is longer than a slot, or a system call fails. After a failed system call, the
    /// slots must be read again to find the current one.
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

/// Writes by `pwritev2`, because the sandbox (seccomp) allows this system call for disks anyway.
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

    const LAYOUTS: [AbSlots; 2] = [
        AbSlots {
            magic: b"8 bytes!",
            order: HeadOrder::LengthFirst,
            place: 1 << 20,
            is_padded: false,
        },
        AbSlots {
            magic: b"a longer name of",
            order: HeadOrder::ChecksumFirst,
            place: 4096,
            is_padded: true,
        },
    ];

    #[test]
    fn a_torn_record_is_ignored() {
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
    fn an_invalid_body_is_ignored_and_a_long_one_is_refused() {
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
        // The length in the header exceeds the slot.
        file.write_all_at(&u64::MAX.to_le_bytes(), layout.place + 16 + 16).unwrap();
        assert_eq!(layout.read(&file, |_| Some(())).unwrap().number, 1);
    }
}
