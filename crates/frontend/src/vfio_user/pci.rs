//! PCI function: configuration, BARs and MSI-X structures.

use shadowbell_spec::pci::CLASS_CODE;
use shadowbell_vfio_user::Errno;
use shadowbell_vfio_user::pci::{Bar, Function, Msix, MsixTable};

/// Size of BAR0. Registers and doorbells take 8 KiB. The rest is reserved for doorbells with a
/// larger stride.
pub const BAR0_SIZE: u64 = 16 << 10;
const _: () = assert!(BAR0_SIZE >= shadowbell_controller::BAR0_BYTES);

/// BAR of the MSI-X structures. It is not BAR0, because a VMM does not map pages with these
/// structures to the guest, and the doorbell page must be mappable.
pub const MSIX_BAR: u32 = 4;
pub(super) const MSIX_BAR_SIZE: u64 = 4 << 10;
/// Offset of the pending bits in the BAR. The table before them can have 128 vectors.
const PENDING: u64 = 0x800;

/// PCI device ID, in the number space of the vendor ID.
const DEVICE_ID: u16 = 0x0001;

/// Creates the description of a PCI function with `vectors` MSI-X vectors.
pub(super) fn function(vendor: u16, vectors: u16) -> Function {
    let bar = |index, size| Bar { index, size, prefetchable: false };
    Function {
        vendor,
        device: DEVICE_ID,
        subsystem_vendor: vendor,
        subsystem: DEVICE_ID,
        revision: 1,
        class: CLASS_CODE,
        bars: vec![bar(0, BAR0_SIZE), bar(MSIX_BAR as u8, MSIX_BAR_SIZE)],
        msix: Some(Msix {
            vectors,
            table: (MSIX_BAR as u8, 0),
            pba: (MSIX_BAR as u8, PENDING as u32),
        }),
        interrupt_pin: false,
        serial: None,
    }
}

/// Reads from the MSI-X BAR. Bytes outside of both structures read as zeroes.
pub(super) fn read_msix(table: &MsixTable, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
    check_range(offset, data.len(), MSIX_BAR_SIZE)?;
    data.fill(0);
    let outcome = match offset.checked_sub(PENDING) {
        Some(offset) => table.read_pending(offset, data),
        None => table.read_table(offset, data),
    };
    if outcome.is_err() {
        data.fill(0);
    }
    Ok(())
}

/// Writes to the MSI-X BAR. Only the table is writable; other writes are ignored.
pub(super) fn write_msix(table: &mut MsixTable, offset: u64, data: &[u8]) -> Result<(), Errno> {
    check_range(offset, data.len(), MSIX_BAR_SIZE)?;
    if offset < PENDING {
        // A write beyond the table is ignored.
        let _ = table.write_table(offset, data);
    }
    Ok(())
}

/// Checks that an access of `len` bytes at `offset` does not exceed a region of `size` bytes.
pub(super) fn check_range(offset: u64, len: usize, size: u64) -> Result<(), Errno> {
    match offset.checked_add(len as u64) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_vfio_user::pci::ConfigSpace;

    #[test]
    fn the_configuration_space_is_valid() {
        ConfigSpace::new(&function(1, 65)).unwrap();
        ConfigSpace::new(&function(1, 128)).unwrap();
    }

    // Windows does not start a controller with a smaller BAR0 (SPDK issue 2576, commit 4acc9aefa8).
    #[test]
    fn bar0_has_16_kib() {
        let bar = function(1, 65).bars.into_iter().find(|bar| bar.index == 0).unwrap();
        assert_eq!(bar.size, 16 << 10);
    }

    #[test]
    fn the_table_keeps_what_is_written_and_the_rest_reads_as_zero() {
        let mut table = MsixTable::new(65);
        write_msix(&mut table, 16, &0xfee0_0000u32.to_le_bytes()).unwrap();
        let mut back = [0; 4];
        read_msix(&table, 16, &mut back).unwrap();
        assert_eq!(u32::from_le_bytes(back), 0xfee0_0000);
        write_msix(&mut table, PENDING, &[0xff; 8]).unwrap();
        for offset in [65 * 16, PENDING, PENDING + 16, MSIX_BAR_SIZE - 4] {
            let mut back = [0xff; 4];
            read_msix(&table, offset, &mut back).unwrap();
            assert_eq!(back, [0; 4], "{offset:#x}");
        }
        assert_eq!(read_msix(&table, MSIX_BAR_SIZE - 3, &mut back), Err(Errno::INVAL));
        assert_eq!(write_msix(&mut table, u64::MAX, &[0]), Err(Errno::INVAL));
    }
}
