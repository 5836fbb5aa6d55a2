//! BAR0: registers and doorbells, mapped where the kernel permits.

use super::info::RegionInfo;
use super::sys;
use shadowbell_memory::{MapError, Mapping, Protection, SharedBytes, SharedU32};
use shadowbell_spec::regs;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use vfio_bindings::bindings::vfio;

/// Minimum size of BAR0: the controller properties and the doorbells of the admin queue.
const BAR0_MIN: u64 = regs::DOORBELLS + 8;
/// Number of doorbells with a precomputed address: those of 1024 queue pairs if CAP.DSTRD is 0.
const DOORBELLS: u64 = 2048;

/// A region of the device's file: offset and size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    offset: u64,
    size: u64,
}

impl Window {
    /// Looks up region `index`. `None` unless it is readable and writable.
    pub(super) fn find(
        device: BorrowedFd<'_>,
        index: u32,
    ) -> io::Result<Option<(Self, RegionInfo)>> {
        let info = RegionInfo::parse(&sys::region_info(device, index)?)
            .ok_or_else(|| io::Error::other("the kernel returned no region description"))?;
        let usable = info.readable && info.writable && info.size != 0;
        let window = Self { offset: info.offset, size: info.size };
        Ok(usable.then_some((window, info)))
    }

    fn file_offset(self, offset: u64, len: usize) -> io::Result<u64> {
        offset
            .checked_add(len as u64)
            .filter(|end| *end <= self.size)
            .and_then(|_| self.offset.checked_add(offset))
            .ok_or_else(|| io::Error::other(format!("{offset:#x} lies outside of the region")))
    }

    pub(super) fn read<const N: usize>(
        self,
        device: BorrowedFd<'_>,
        offset: u64,
    ) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        let count = rustix::io::pread(device, &mut bytes, self.file_offset(offset, N)?)?;
        if count == N { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    pub(super) fn write(self, device: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let count = rustix::io::pwrite(device, bytes, self.file_offset(offset, bytes.len())?)?;
        if count == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

/// BAR0 of an NVMe controller.
#[derive(Debug)]
pub(super) struct Bar {
    window: Window,
    areas: Vec<(u64, SharedBytes)>,
    /// Mapped doorbells, four bytes each; empty if they cannot be mapped.
    doorbells: Vec<SharedU32>,
}

/// Unusable BAR0.
#[derive(Debug, thiserror::Error)]
pub(super) enum BarError {
    #[error("its BAR0 has {0} bytes, too few for an NVMe controller")]
    Small(u64),
    #[error("its BAR0 is not readable and writable")]
    Missing,
    #[error("its BAR0 cannot be mapped: {0}")]
    Map(#[from] MapError),
    #[error("its BAR0: {0}")]
    System(#[from] io::Error),
}

impl Bar {
    pub(super) fn open(device: BorrowedFd<'_>) -> Result<Self, BarError> {
        let found = Window::find(device, vfio::VFIO_PCI_BAR0_REGION_INDEX)?;
        let (window, info) = found.ok_or(BarError::Missing)?;
        if window.size < BAR0_MIN {
            return Err(BarError::Small(window.size));
        }
        let mut areas = Vec::new();
        for (start, len) in info.areas {
            // The sum cannot overflow, because `RegionInfo::parse` has checked it.
            let mapping =
                Mapping::from_fd(device, window.offset + start, len, Protection::ReadWrite)?;
            areas.push((start, mapping.bytes()));
        }
        Ok(Self::new(window, areas))
    }

    fn new(window: Window, areas: Vec<(u64, SharedBytes)>) -> Self {
        let mut bar = Self { window, areas, doorbells: Vec::new() };
        let cells = (0..DOORBELLS).map(|n| {
            let (bytes, at) = bar.mapped(regs::DOORBELLS + 4 * n, 4)?;
            bytes.cell(at)
        });
        bar.doorbells = cells.map_while(|cell| cell).collect();
        bar
    }

    /// Finds a mapping that contains `len` bytes at `offset`. Returns it with the offset in the
    /// mapping.
    fn mapped(&self, offset: u64, len: u64) -> Option<(&SharedBytes, usize)> {
        self.areas.iter().find_map(|(start, bytes)| {
            let at = offset.checked_sub(*start)?;
            let inside = at.checked_add(len)? <= bytes.len() as u64;
            inside.then_some((bytes, usize::try_from(at).ok()?))
        })
    }

    /// True if the doorbells are mapped.
    pub(super) fn is_mapped(&self) -> bool {
        !self.doorbells.is_empty()
    }

    pub(super) fn read32(&self, device: BorrowedFd<'_>, offset: u64) -> io::Result<u32> {
        match self.mapped(offset, 4) {
            Some((bytes, at)) => {
                let value = bytes.load_u32_acquire(at).ok_or_else(misaligned)?;
                check_not_removed(bytes).map(|()| value)
            }
            None => Ok(u32::from_le_bytes(self.window.read(device, offset)?)),
        }
    }

    pub(super) fn write32(
        &self,
        device: BorrowedFd<'_>,
        offset: u64,
        value: u32,
    ) -> io::Result<()> {
        match self.mapped(offset, 4) {
            Some((bytes, at)) => {
                bytes.cell(at).ok_or_else(misaligned)?.store(value, Ordering::Release);
                check_not_removed(bytes)
            }
            None => self.window.write(device, offset, &value.to_le_bytes()),
        }
    }

    /// Rings a doorbell, by a posted store if it is mapped. A store does not detect that the device
    /// was removed; the next register read does.
    #[inline]
    pub(super) fn ring(&self, device: BorrowedFd<'_>, offset: u64, value: u32) -> io::Result<()> {
        let cell = offset
            .checked_sub(regs::DOORBELLS)
            .and_then(|at| self.doorbells.get(usize::try_from(at / 4).ok()?));
        match cell {
            Some(cell) => {
                cell.store(value, Ordering::Release);
                Ok(())
            }
            None => self.write32(device, offset, value),
        }
    }
}

/// Returns an error if the device was removed. An access to its mapping has then raised SIGBUS, and
/// the handler has marked the mapping as poisoned. A poisoned mapping reads as zeroes.
fn check_not_removed(bytes: &SharedBytes) -> io::Result<()> {
    if bytes.mapping().is_poisoned() {
        return Err(io::Error::other("its registers are not mapped any more"));
    }
    Ok(())
}

fn misaligned() -> io::Error {
    io::Error::other("a register that is not aligned to 4 bytes")
}

/// True if the error means that the device is permanently unreachable.
pub(super) fn is_removal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EIO | libc::ENXIO))
        || (error.raw_os_error().is_none() && error.kind() == io::ErrorKind::Other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    /// Creates a BAR that is the second 16 KiB of a file. The `areas` of the BAR are mapped.
    fn bar(areas: &[(u64, u64)]) -> (File, Bar) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x8000).unwrap();
        let window = Window { offset: 0x4000, size: 0x4000 };
        let mapped = areas.iter().map(|&(start, len)| {
            let mapping =
                Mapping::from_fd(&file, 0x4000 + start, len, Protection::ReadWrite).unwrap();
            (start, mapping.bytes())
        });
        let bar = Bar::new(window, mapped.collect());
        (file, bar)
    }

    fn word(file: &File, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, 0x4000 + offset).unwrap();
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn registers_are_reached_mapped_or_not() {
        for areas in [&[][..], &[(0, 0x4000)], &[(0x1000, 0x1000)], &[(0, 0x1000)]] {
            let (file, bar) = bar(areas);
            for offset in [0, 0x14, 0x1000, 0x1ffc, 0x2000, 0x3ffc] {
                bar.write32(file.as_fd(), offset, 0x1234_5678).unwrap();
                assert_eq!(word(&file, offset), 0x1234_5678);
                assert_eq!(bar.read32(file.as_fd(), offset).unwrap(), 0x1234_5678);
                bar.ring(file.as_fd(), offset, 7).unwrap();
                assert_eq!(word(&file, offset), 7, "{offset:#x} with {areas:x?}");
            }
        }
    }

    #[test]
    fn accesses_outside_of_the_bar_are_errors() {
        for areas in [&[][..], &[(0, 0x4000)]] {
            let (file, bar) = bar(areas);
            for offset in [0x4000, 0x3fff, u64::MAX, u64::MAX - 3] {
                assert!(bar.read32(file.as_fd(), offset).is_err());
                assert!(bar.write32(file.as_fd(), offset, 1).is_err());
                assert!(bar.ring(file.as_fd(), offset, 1).is_err());
            }
        }
    }

    #[test]
    fn only_mapped_areas_have_mapped_doorbells() {
        assert!(!bar(&[]).1.is_mapped());
        assert!(!bar(&[(0, 0x1000)]).1.is_mapped());
        assert_eq!(bar(&[(0x1000, 0x1000)]).1.doorbells.len(), 1024);
        assert_eq!(bar(&[(0, 0x4000)]).1.doorbells.len(), 2048);
    }

    #[test]
    fn a_removed_device_is_detected() {
        let (file, bar) = bar(&[(0, 0x4000)]);
        assert_eq!(bar.read32(file.as_fd(), 0x1c).unwrap(), 0);
        file.set_len(0).unwrap();
        let error = bar.read32(file.as_fd(), 0x1c).unwrap_err();
        assert!(is_removal(&error), "{error}");
        assert!(bar.ring(file.as_fd(), 0x1000, 1).is_ok(), "doorbell writes are posted");
    }
}
