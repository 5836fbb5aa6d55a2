use super::*;
use crate::admin::self_test::SelfTest;
use proptest::prelude::*;
use zerocopy::FromBytes;

/// Owner of the data from which log pages are built.
#[derive(Default)]
struct Source {
    errors: ErrorLog,
    health: Health,
    changed: ChangedList,
    uncorrectable: Uncorrectable,
    self_test: SelfTest,
    pool: PoolState,
}

impl Source {
    fn ask(&mut self, cmd: &GetLogPage, nsid: u32) -> Result<Vec<u8>, Status> {
        let mut context = LogContext {
            errors: &self.errors,
            health: &self.health,
            changed: &mut self.changed,
            uncorrectable: &self.uncorrectable,
            self_test: &self.self_test.page(&[]),
            pool: Some(&self.pool),
            shadow_doorbells: true,
            volatile_cache: true,
            is_shared: false,
        };
        super::read(cmd, nsid, &mut context)
    }

    fn whole<T: FromBytes>(&mut self, lid: u8) -> T {
        let numd0 = (size_of::<T>() / 4 - 1) as u32;
        let bytes = self.ask(&GetLogPage { lid, numd0, ..GetLogPage::default() }, NSID_ALL);
        T::read_from_bytes(&bytes.unwrap()).unwrap()
    }
}

const INVALID_FIELD: Status = Status::INVALID_FIELD.with_dnr();

fn error(cid: u16) -> ErrorRecord {
    let status = Status::LBA_OUT_OF_RANGE.with_dnr();
    ErrorRecord { sqid: 3, cid, status, nsid: 1, lba: 0x1234_5678_9abc }
}

#[test]
fn errors_are_listed_newest_first() {
    let mut source = Source::default();
    let empty: [ErrorLogEntry; 64] = source.whole(lid::ERROR_INFORMATION);
    assert_eq!(empty, [ErrorLogEntry::default(); 64]);
    (0..3).for_each(|cid| source.errors.push(error(cid)));
    let page: [ErrorLogEntry; 64] = source.whole(lid::ERROR_INFORMATION);
    assert_eq!([0, 1, 2, 3].map(|n| page[n].error_count), [3, 2, 1, 0]);
    assert_eq!([0, 1, 2].map(|n| page[n].cid), [2, 1, 0]);
    // Status as in a completion: DNR is bit 15, SC 80h is in bits 8:1.
    assert_eq!((page[0].status, page[0].sqid, page[0].nsid), (0x8100, 3, 1));
    assert_eq!(page[0].lba, 0x1234_5678_9abc);
    assert_eq!(page[0].parameter, ParameterLocation::NONE);
    assert_eq!(page[3..], [ErrorLogEntry::default(); 61]);

    (0..200).for_each(|cid| source.errors.push(error(cid)));
    assert_eq!(source.errors.count(), 203);
    let page: [ErrorLogEntry; 64] = source.whole(lid::ERROR_INFORMATION);
    assert_eq!((page[0].error_count, page[63].error_count), (203, 140));
    assert!(page.windows(2).all(|pair| pair[0].error_count == pair[1].error_count + 1));
}

#[test]
fn health_is_in_the_units_of_the_page() {
    let mut source = Source::default();
    let page: SmartHealth = source.whole(lid::SMART_HEALTH);
    assert_eq!((page.temperature.get(), page.available_spare), (300, 100));
    assert!(page.available_spare > page.available_spare_threshold);
    assert_eq!(page.critical_warning, CriticalWarning::new());
    assert_eq!(page.data_units_read.get(), 0);

    source.health = Health {
        bytes_read: 512_001,
        bytes_written: 512_000,
        host_reads: 7,
        host_writes: u64::MAX,
        busy: Duration::from_secs(179),
        powered: Duration::from_secs(7200),
        power_cycles: 5,
        unsafe_shutdowns: 2,
        media_errors: 3,
        error_log_entries: 4,
        warning: CriticalWarning::new().with_temperature(true),
        temperature: 350,
    };
    let page: SmartHealth = source.whole(lid::SMART_HEALTH);
    assert_eq!(page.data_units_read.get(), 2, "rounded up");
    assert_eq!(page.data_units_written.get(), 1);
    assert_eq!(page.host_read_commands.get(), 7);
    assert_eq!(page.host_write_commands.get(), u128::from(u64::MAX));
    assert_eq!((page.controller_busy_time.get(), page.power_on_hours.get()), (2, 2));
    assert_eq!((page.power_cycles.get(), page.unsafe_shutdowns.get()), (5, 2));
    assert_eq!((page.media_errors.get(), page.error_log_entries.get()), (3, 4));
    assert_eq!((page.critical_warning.into_bits(), page.temperature.get()), (0b10, 350));
    source.health.bytes_read = u64::MAX;
    let page: SmartHealth = source.whole(lid::SMART_HEALTH);
    assert_eq!(page.data_units_read.get(), u128::from(u64::MAX).div_ceil(512_000));
}

#[test]
fn one_firmware_slot() {
    let page: FirmwareSlot = Source::default().whole(lid::FIRMWARE_SLOT);
    assert_eq!((page.afi.active(), page.afi.next()), (1, 0));
    assert_eq!(page.frs[0], FIRMWARE_REVISION);
    assert_eq!(page.frs[1..], [[0; 8]; 6]);
}

#[test]
fn changed_namespaces_are_reported_once() {
    let mut source = Source::default();
    let lid = lid::CHANGED_ATTACHED_NAMESPACES;
    [5, 2, 5, 9].into_iter().for_each(|nsid| source.changed.insert(nsid));
    let retain = GetLogPage { lid, numd0: 3, rae: true, ..GetLogPage::default() };
    let bytes = [2u32, 5, 9, 0].as_bytes().to_vec();
    assert_eq!(source.ask(&retain, 0), Ok(bytes.clone()));
    assert_eq!(source.ask(&GetLogPage { ot: true, rae: false, ..retain }, 0), Err(INVALID_FIELD));
    assert_eq!(source.ask(&GetLogPage { rae: false, ..retain }, 0), Ok(bytes));
    assert_eq!(source.ask(&retain, 0), Ok(vec![0; 16]));

    (1..=1024).for_each(|nsid| source.changed.insert(nsid));
    let page: ChangedNamespaces = source.whole(lid);
    assert!(!page.overflowed() && page.iter().eq(1..=1024));
    (1..=1025).for_each(|nsid| source.changed.insert(nsid));
    let page: ChangedNamespaces = source.whole(lid);
    assert!(page.overflowed());
    assert_eq!((page.nsids[0], page.nsids[1]), (u32::MAX, 0));
    source.changed.insert(1);
    source.changed.clear();
    let page: ChangedNamespaces = source.whole(lid);
    assert_eq!(page.iter().count(), 0);
}

#[test]
fn commands() {
    let mut source = Source::default();
    let page: CommandsSupportedEffects = source.whole(lid::COMMANDS_SUPPORTED_EFFECTS);
    let supported = |effects: &[CommandEffects]| -> Vec<usize> {
        (0..256).filter(|opcode| effects[*opcode].csupp()).collect()
    };
    let plain = super::commands(true, (false, false)).admin;
    assert_eq!(supported(&plain), [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 0x14, 0x18, 0x7c, 0x86]);
    let with_pool: Vec<_> =
        supported(&page.admin).into_iter().filter(|opcode| !plain[*opcode].csupp()).collect();
    assert_eq!(with_pool, [0x0d, 0x15, 0x80, 0x84]);
    assert_eq!((page.admin[0x80].cse(), page.admin[0x84].cse()), (1, 2));
    assert_eq!(supported(&page.io), [0, 1, 2, 4, 5, 8, 9, 12, 25]);
    let changing: Vec<_> = (0..256).filter(|opcode| page.io[*opcode].lbcc()).collect();
    assert_eq!(changing, [1, 4, 8, 9, 25]);
    let none = CommandEffects::new();
    assert!(page.io.iter().chain(&page.admin).all(|e| e.csupp() || *e == none));
    assert!(page.io.iter().chain(&plain).all(|e| e.cse() == 0));
    // Linux warns of I/O commands with effects other than these two bits.
    let usual = CommandEffects::new().with_csupp(true).with_lbcc(true).into_bits();
    assert!(page.io.iter().all(|e| e.into_bits() & !usual == 0));
    assert!(!super::commands(false, (false, false)).admin[0x7c].csupp());
    let local =
        GetLogPage { lid: lid::COMMANDS_SUPPORTED_EFFECTS, csi: 3, ..GetLogPage::default() };
    assert_eq!(source.ask(&local, 0), Err(INVALID_FIELD));
}

#[test]
fn features_and_log_pages() {
    let mut source = Source::default();
    let page: FeaturesSupportedEffects = source.whole(lid::FEATURES_SUPPORTED_EFFECTS);
    let supported: Vec<_> = (0..256).filter(|fid| page.fids[*fid].fsupp()).collect();
    // 01h to 0Bh except LBA Range Type, then Timestamp, Keep Alive Timer, Host Behavior Support and
    // I/O Command Set Profile.
    assert_eq!(supported, [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 14, 15, 0x16, 0x19]);
    assert_eq!(page.fids[5].fsp(), CommandEffects::SCOPE_NAMESPACE);
    assert_eq!(page.fids[6].fsp(), CommandEffects::SCOPE_CONTROLLER);
    let page: SupportedLogPages = source.whole(lid::SUPPORTED_LOG_PAGES);
    for lid in 0..=255 {
        let listed = page.lids[usize::from(lid)];
        let there = source.ask(&GetLogPage { lid, ..GetLogPage::default() }, 0);
        if is_elsewhere(lid) {
            assert!(listed.lsupp());
            continue;
        }
        assert_eq!(listed.lsupp(), there.is_ok(), "log page {lid:#x}");
        assert!(!listed.ios());
        let missing = Status::INVALID_LOG_PAGE.with_dnr();
        assert!(there.is_ok_and(|part| part.len() == 4) || !listed.lsupp());
        let again = source.ask(&GetLogPage { lid, ..GetLogPage::default() }, 0);
        assert!(listed.lsupp() || again == Err(missing));
    }
    let page: [u8; 4096] = source.whole(lid::MI_COMMANDS_SUPPORTED_EFFECTS);
    assert_eq!(page, [0; 4096]);
}

#[test]
fn namespaces_have_no_pages_of_their_own() {
    let mut source = Source::default();
    for lid in PAGES.iter().filter(|lid| !is_elsewhere(**lid)) {
        let cmd = GetLogPage { lid: *lid, ..GetLogPage::default() };
        assert!(source.ask(&cmd, 0).is_ok());
        assert!(source.ask(&cmd, NSID_ALL).is_ok());
        assert_eq!(source.ask(&cmd, 1), Err(INVALID_FIELD));
    }
}

#[test]
fn parts_of_a_page() {
    let mut source = Source::default();
    (0..64).for_each(|cid| source.errors.push(error(cid)));
    let page: [u8; 4096] = source.whole(lid::ERROR_INFORMATION);
    let mut ask = |lpo, numd0| {
        let cmd = GetLogPage { lid: lid::ERROR_INFORMATION, lpo, numd0, ..GetLogPage::default() };
        source.ask(&cmd, NSID_ALL)
    };
    assert_eq!(ask(0, 0), Ok(page[..4].to_vec()));
    assert_eq!(ask(64, 31), Ok(page[64..192].to_vec()));
    assert_eq!(ask(4092, 0), Ok(page[4092..].to_vec()));
    // Reads beyond the end are shortened.
    assert_eq!(ask(4032, 1023), Ok(page[4032..].to_vec()));
    assert_eq!(ask(0, u32::MAX), Ok(page.to_vec()));
    assert_eq!(ask(4096, 15), Ok(vec![]));
    for lpo in [4100, 1 << 32, u64::MAX - 3, 1, 2, 3, 4095] {
        assert_eq!(ask(lpo, 0), Err(INVALID_FIELD), "offset {lpo}");
    }
}

proptest! {
    #[test]
    fn any_command_ends(
        lid: u8, small in 0..0x14u8, lpo in prop_oneof![any::<u64>(), 0..5000u64], numd0: u32,
        rae: bool, csi in 0..3u8, ot: bool, nsid in prop_oneof![any::<u32>(), Just(0)],
    ) {
        let mut source = Source::default();
        for lid in [lid, small] {
            let cmd = GetLogPage { lid, lpo, numd0, rae, csi, ot, ..GetLogPage::default() };
            match source.ask(&cmd, nsid) {
                Ok(part) => prop_assert!(part.len() as u64 <= cmd.length().min(4096)),
                Err(status) => prop_assert!(status.dnr()),
            }
        }
    }
}

#[test]
fn a_change_counts_once_and_survives() {
    let mut changes = AnaChanges::default();
    let see = |changes: &mut AnaChanges, states: [AnaState; 2]| changes.review((1..).zip(states));
    let (good, bad) = (AnaState::Optimized, AnaState::Inaccessible);
    assert!(!see(&mut changes, [good, bad]), "the first look");
    assert!(see(&mut changes, [bad, bad]) && !see(&mut changes, [bad, bad]));
    assert!(see(&mut changes, [good, good]));
    let namespaces = BTreeMap::from([(1, vec![1, 3]), (2, vec![2])]);
    let log = AnaLog::decode(&changes.page(&namespaces, false)).unwrap();
    assert_eq!(log.changes, 3);
    assert_eq!(log.groups.iter().map(|group| group.changes).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(log.groups[0].nsids, [1, 3]);
    let mut restored = AnaChanges::restore(&changes.save());
    assert_eq!(restored, changes);
    // A change between the snapshot and its restoration is reported as well.
    assert!(see(&mut restored, [good, bad]));
}

fn read(log: &ReservationLog) -> (u64, u8, u8, u32) {
    let page = ReservationNotification::read_from_bytes(&log.page()).unwrap();
    (page.lpcount, page.kind, page.available, page.nsid)
}

#[test]
fn notices_are_read_one_by_one_the_oldest_first() {
    let mut log = ReservationLog::default();
    assert_eq!(read(&log), (0, 0, 0, 0));
    log.set_mask(2, u32::MAX);
    assert_eq!(log.mask(2), 0b1110);
    assert!(
        log.add_notification(1, 1) && !log.add_notification(2, 1) && log.add_notification(1, 3)
    );
    assert_eq!(read(&log), (1, 1, 1, 1));
    assert_eq!(ReservationLog::restore(&log.save(Vec::new(), SavedAna::default())), log);
    log.was_read();
    assert_eq!(read(&log), (2, 3, 0, 1));
    log.was_read();
    assert_eq!(read(&log), (0, 0, 0, 0));
}

#[test]
fn the_reservation_log_keeps_a_bounded_number_of_pages() {
    let mut log = ReservationLog::default();
    (0..1000).for_each(|_| assert!(log.add_notification(1, 2)));
    assert_eq!(read(&log), (937, 2, 63, 1));
    log.clear_namespace(1);
    assert_eq!(read(&log), (0, 0, 0, 0));
}
