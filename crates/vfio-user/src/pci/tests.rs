use proptest::prelude::*;

use super::*;

fn nvme() -> Function {
    Function {
        vendor: 0x1b36,
        device: 0x0010,
        subsystem_vendor: 0x1af4,
        subsystem: 0x1100,
        revision: 2,
        class: 0x010802,
        bars: vec![
            Bar { index: 0, size: 0x4000, prefetchable: false },
            Bar { index: 4, size: 0x8000, prefetchable: true },
        ],
        msix: Some(Msix { vectors: 65, table: (4, 0), pba: (4, 0x4000) }),
        interrupt_pin: true,
        serial: Some(0x0011_2233_4455_6677),
    }
}

fn space() -> ConfigSpace {
    ConfigSpace::new(&nvme()).unwrap()
}

fn read<const N: usize>(space: &ConfigSpace, offset: u64) -> [u8; N] {
    let mut data = [0; N];
    space.read(offset, &mut data).unwrap();
    data
}

#[test]
fn the_header_is_byte_exact() {
    let header: [u8; 64] = read(&space(), 0);
    #[rustfmt::skip]
    let expected: [u8; 64] = [
        0x36, 0x1b, 0x10, 0x00,  0x00, 0x00, 0x10, 0x00,
        0x02, 0x02, 0x08, 0x01,  0x00, 0x00, 0x00, 0x00,
        0x04, 0x00, 0x00, 0x00,  0x00, 0x00, 0x00, 0x00,
        0x00, 0x00, 0x00, 0x00,  0x00, 0x00, 0x00, 0x00,
        0x0c, 0x00, 0x00, 0x00,  0x00, 0x00, 0x00, 0x00,
        0x00, 0x00, 0x00, 0x00,  0xf4, 0x1a, 0x00, 0x11,
        0x00, 0x00, 0x00, 0x00,  0x40, 0x00, 0x00, 0x00,
        0x00, 0x00, 0x00, 0x00,  0x00, 0x01, 0x00, 0x00,
    ];
    assert_eq!(header, expected);
}

#[test]
fn the_capabilities_are_byte_exact() {
    let space = space();
    // The Power Management capability has version 3 and No_Soft_Reset.
    assert_eq!(read(&space, 0x40), [0x01, 0x50, 0x03, 0x00, 0x08, 0x00, 0x00, 0x00]);
    // The MSI-X capability has 65 vectors, and both structures are in BAR4.
    let msix = [0x11, 0x60, 0x40, 0x00, 0x04, 0x00, 0x00, 0x00, 0x04, 0x40, 0x00, 0x00];
    assert_eq!(read(&space, 0x50), msix);
    #[rustfmt::skip]
    let express: [u8; 60] = [
        0x10, 0x00, 0x02, 0x00,  0x22, 0x80, 0x00, 0x10,
        0x10, 0x28, 0x00, 0x00,  0x43, 0x00, 0x00, 0x00,
        0x00, 0x00, 0x43, 0x00,  0x00, 0x00, 0x00, 0x00,
        0x00, 0x00, 0x00, 0x00,  0x00, 0x00, 0x00, 0x00,
        0x00, 0x00, 0x00, 0x00,  0x10, 0x00, 0x00, 0x00,
        0x00, 0x00, 0x00, 0x00,  0x0e, 0x00, 0x00, 0x00,
        0x03, 0x00, 0x00, 0x00,  0x00, 0x00, 0x00, 0x00,
        0x00, 0x00, 0x00, 0x00,
    ];
    assert_eq!(read(&space, 0x60), express);
    let serial = [0x03, 0x00, 0x01, 0x00, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x00];
    assert_eq!(read(&space, 0x100), serial);
}

#[test]
fn the_capability_list_ends_and_is_complete() {
    for msix in [true, false] {
        let mut function = nvme();
        if !msix {
            function.msix = None;
        }
        let space = ConfigSpace::new(&function).unwrap();
        let mut found = Vec::new();
        let [mut at] = read::<1>(&space, 0x34);
        while at != 0 {
            let [id, next] = read(&space, at.into());
            found.push(id);
            assert!(found.len() < 10, "the list has no end");
            at = next;
        }
        assert_eq!(found, if msix { vec![0x01, 0x11, 0x10] } else { vec![0x01, 0x10] });
        assert_eq!(space.msix(), MsixControl::default());
    }
    let without_serial = ConfigSpace::new(&Function { serial: None, ..nvme() }).unwrap();
    assert_eq!(read(&without_serial, 0x100), [0; 12]);
}

#[test]
fn a_base_address_register_reports_its_size_and_stores_its_address() {
    let mut space = space();
    assert_eq!(
        space.write(0x10, &[0xff; 4]).unwrap(),
        Effects { bars: true, ..Effects::default() }
    );
    space.write(0x14, &[0xff; 4]).unwrap();
    assert_eq!(read(&space, 0x10), 0xffff_ffff_ffff_c004u64.to_le_bytes());
    space.write(0x20, &[0xff; 8]).unwrap();
    assert_eq!(read(&space, 0x20), 0xffff_ffff_ffff_800cu64.to_le_bytes());
    // An absent BAR reads as 0 after every write, so a host finds its size to be 0.
    assert_eq!(space.write(0x18, &[0xff; 8]).unwrap(), Effects::default());
    assert_eq!(read(&space, 0x18), [0; 8]);

    assert!(space.write(0x10, &0x12_3456_8000u64.to_le_bytes()).unwrap().bars);
    assert_eq!(read(&space, 0x10), 0x12_3456_8004u64.to_le_bytes());
    assert_eq!(space.bar(0), 0x12_3456_8000);
    // The absent expansion ROM has no size.
    space.write(0x30, &[0xff; 4]).unwrap();
    assert_eq!(read(&space, 0x30), [0; 4]);
}

#[test]
fn identities_cannot_be_written() {
    let mut space = space();
    let before: [u8; 16] = read(&space, 0);
    assert_eq!(space.write(0, &[0xff; 4]).unwrap(), Effects::default());
    assert_eq!(space.write(8, &[0xff; 4]).unwrap(), Effects::default());
    assert_eq!(read::<4>(&space, 0), before[..4]);
    assert_eq!(read::<4>(&space, 8), before[8..12]);
}

#[test]
fn the_command_register_accepts_accesses_of_any_size() {
    let mut space = space();
    let effects = space.write(4, &[0xff, 0xff]).unwrap();
    let all = Command { memory: true, bus_master: true, intx_disabled: true };
    assert_eq!(effects, Effects { command: Some(all), ..Effects::default() });
    assert_eq!(read(&space, 4), 0x0546u16.to_le_bytes());
    // The status register, the upper half of the dword at offset 4, has no writable bits.
    assert_eq!(read(&space, 6), 0x0010u16.to_le_bytes());
    assert_eq!(space.write(4, &[0xff; 4]).unwrap(), Effects::default());
    assert_eq!(read(&space, 6), 0x0010u16.to_le_bytes());
    // A write of one byte changes only half of the command register.
    let effects = space.write(4, &[0x02]).unwrap();
    assert_eq!(
        effects.command,
        Some(Command { memory: true, bus_master: false, intx_disabled: true })
    );
    let effects = space.write(5, &[0]).unwrap();
    assert!(!effects.command.unwrap().intx_disabled);
}

#[test]
fn msix_is_switched_and_masked() {
    let mut space = space();
    let effects = space.write(0x52, &0xc000u16.to_le_bytes()).unwrap();
    assert_eq!(effects.msix, Some(MsixControl { enabled: true, masked: true }));
    let effects = space.write(0x50, &0x8000_0000u32.to_le_bytes()).unwrap();
    assert_eq!(effects.msix, Some(MsixControl { enabled: true, masked: false }));
    assert_eq!(read(&space, 0x50), [0x11, 0x60, 0x40, 0x80]);
}

#[test]
fn power_states_are_d0_and_d3hot() {
    let mut space = space();
    assert_eq!(space.write(0x44, &[3]).unwrap().power, Some(Power::D3Hot));
    for unsupported in [1, 2] {
        assert_eq!(space.write(0x44, &[unsupported]).unwrap(), Effects::default());
        assert_eq!(space.power(), Power::D3Hot);
    }
    assert_eq!(space.write(0x44, &[0, 0]).unwrap().power, Some(Power::D0));
    assert_eq!(read(&space, 0x44), [0x08, 0x00]);
}

#[test]
fn a_function_level_reset_is_reported_and_clears_registers() {
    let mut space = space();
    space.write(4, &[0x06, 0x04]).unwrap();
    space.write(0x10, &[0xff; 8]).unwrap();
    space.write(0x52, &[0x00, 0x80]).unwrap();
    space.write(0x44, &[3]).unwrap();
    let effects = space.write(0x68, &0x8000u16.to_le_bytes()).unwrap();
    assert_eq!(
        effects,
        Effects {
            command: Some(Command::default()),
            msix: Some(MsixControl::default()),
            power: Some(Power::D0),
            bars: true,
            function_level_reset: true,
        }
    );
    assert_eq!(space.bytes(), super::ConfigSpace::new(&nvme()).unwrap().bytes());
    // Device Control is at 0x68, and its bit 15 (Initiate Function Level Reset) is in the upper
    // byte. So only a write of this byte with the bit set resets the function.
    assert!(!space.write(0x68, &[0xff]).unwrap().function_level_reset);
    assert!(space.write(0x69, &[0xff]).unwrap().function_level_reset);
    assert!(!space.write(0x69, &[0x7f]).unwrap().function_level_reset);
}

#[test]
fn accesses_outside_of_configuration_space_are_refused() {
    let mut space = space();
    assert_eq!(space.read(4096, &mut [0]), Err(Errno::INVAL));
    assert_eq!(space.read(4095, &mut [0; 2]), Err(Errno::INVAL));
    assert_eq!(space.read(u64::MAX, &mut [0; 4]), Err(Errno::INVAL));
    assert_eq!(space.write(4094, &[0; 4]), Err(Errno::INVAL));
    assert_eq!(space.write(u64::MAX - 1, &[0; 4]), Err(Errno::INVAL));
    assert!(space.read(0, &mut [0; 4096]).is_ok());
    assert!(space.read(4096, &mut []).is_ok());
}

#[test]
fn impossible_functions_are_refused() {
    let bar = |index, size| Bar { index, size, prefetchable: false };
    let with = |change: &dyn Fn(&mut Function)| {
        let mut function = nvme();
        change(&mut function);
        ConfigSpace::new(&function).map(drop).unwrap_err()
    };
    assert_eq!(with(&|f| f.bars[0] = bar(1, 4096)), FunctionError::BarIndex(1));
    assert_eq!(with(&|f| f.bars[0] = bar(4, 4096)), FunctionError::BarIndex(4));
    assert_eq!(with(&|f| f.bars[0] = bar(6, 4096)), FunctionError::BarIndex(6));
    assert_eq!(with(&|f| f.bars[0] = bar(0, 4097)), FunctionError::BarSize(0));
    assert_eq!(with(&|f| f.bars[0] = bar(0, 0)), FunctionError::BarSize(0));
    assert_eq!(with(&|f| f.class = 1 << 24), FunctionError::Class(1 << 24));
    let msix = |vectors, table, pba| {
        with(&|f| f.msix = Some(Msix { vectors, table: (4, table), pba: (4, pba) }))
    };
    assert_eq!(msix(0, 0, 0x4000), FunctionError::Vectors(0));
    assert_eq!(msix(2049, 0, 0x4000), FunctionError::Vectors(2049));
    assert_eq!(msix(65, 4, 0x4000), FunctionError::MsixLocation);
    assert_eq!(msix(65, 0, 0x8000), FunctionError::MsixLocation);
    assert_eq!(msix(65, 0, 0x400), FunctionError::MsixLocation);
    assert_eq!(msix(65, 0x8, 0), FunctionError::MsixLocation);
    assert_eq!(msix(65, !7, 0), FunctionError::MsixLocation);
    let nowhere = with(&|f| f.msix = Some(Msix { vectors: 1, table: (2, 0), pba: (4, 0) }));
    assert_eq!(nowhere, FunctionError::MsixLocation);
}

#[test]
fn the_interrupt_status_follows_the_pin() {
    let mut space = space();
    space.set_interrupt_status(true);
    assert_eq!(read(&space, 6), [0x18, 0x00]);
    space.set_interrupt_status(false);
    assert_eq!(read(&space, 6), [0x10, 0x00]);
}

#[test]
fn the_msix_table_stores_only_writable_bits() {
    let mut table = MsixTable::new(3);
    assert!((0..3).all(|vector| table.is_masked(vector)));
    assert!(table.is_masked(3));
    table.write_table(16, &[0xff; 16]).unwrap();
    let mut entry = [0; 16];
    table.read_table(16, &mut entry).unwrap();
    assert_eq!(entry[..4], 0xffff_fffcu32.to_le_bytes());
    assert_eq!(entry[12..], 1u32.to_le_bytes());
    table.write_table(28, &[0; 4]).unwrap();
    assert!(table.is_masked(0) && !table.is_masked(1) && table.is_masked(2));
    assert_eq!(table.write_table(44, &[0; 8]), Err(Errno::INVAL));
    assert_eq!(table.read_table(48, &mut [0]), Err(Errno::INVAL));

    table.set_pending(2, true);
    table.set_pending(500, true);
    let mut pending = [0; 8];
    table.read_pending(0, &mut pending).unwrap();
    assert_eq!(pending, [4, 0, 0, 0, 0, 0, 0, 0]);
    table.reset();
    assert_eq!(table, MsixTable::new(3));
}

proptest! {
    /// Writes never change read-only bits, and a restore reproduces the writable ones.
    #[test]
    fn writes_change_only_writable_bits(
        writes in prop::collection::vec((0u64..4200, prop::collection::vec(any::<u8>(), 0..9)), 0..40)
    ) {
        let fresh = space();
        let mut space = space();
        for (offset, data) in writes {
            let inside = offset + data.len() as u64 <= 4096;
            prop_assert_eq!(space.write(offset, &data).is_ok(), inside);
        }
        for at in 0..CONFIG_SIZE {
            let mask = space.writable[at];
            prop_assert_eq!(space.bytes[at] & !mask, fresh.bytes[at] & !mask);
        }
        let mut restored = fresh;
        restored.restore(space.bytes());
        prop_assert_eq!(restored.bytes(), space.bytes());
    }
}
