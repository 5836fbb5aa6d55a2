use super::*;
use proptest::prelude::*;

const LIMITS: Limits = Limits {
    is_shared: false,
    io_queues: 64,
    queues_exist: false,
    vectors: 65,
    namespaces: 3,
    active: true,
    volatile_cache: true,
};

fn set(features: &mut Features, fid: u8, cdw11: u32) -> Result<Set, Status> {
    let cmd = SetFeatures { fid, cdw11, ..SetFeatures::default() };
    features.set(&cmd, if fid == fid::ERROR_RECOVERY { 1 } else { 0 }, None, &LIMITS)
}

fn get_with(features: &Features, fid: u8, sel: Select, cdw11: u32) -> Result<u32, Status> {
    let cmd = GetFeatures { fid, sel: sel as u8, cdw11, ..GetFeatures::default() };
    let nsid = if fid == fid::ERROR_RECOVERY { 1 } else { 0 };
    features.get(&cmd, nsid, &LIMITS).map(|get| get.dw0)
}

fn get(features: &Features, fid: u8) -> u32 {
    get_with(features, fid, Select::Current, 0).unwrap()
}

const INVALID_FIELD: Status = Status::INVALID_FIELD.with_dnr();
const INVALID_NAMESPACE: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();

/// Feature identifier, value to set, and value to read back.
const VALUES: &[(u8, u32, u32)] = &[
    (fid::ARBITRATION, 0x1122_33fc, 0x1122_3304),
    (fid::POWER_MANAGEMENT, 0x0000_0120, 0x20),
    (fid::TEMPERATURE_THRESHOLD, 0x0000_0150, 0x150),
    (fid::ERROR_RECOVERY, 0x0000_1234, 0x1234),
    (fid::VOLATILE_WRITE_CACHE, 0x0000_0000, 0),
    (fid::NUMBER_OF_QUEUES, 0x0007_0003, 0x0007_0003),
    (fid::INTERRUPT_COALESCING, 0xffff_0a05, 0x0a05),
    (fid::INTERRUPT_VECTOR_CONFIGURATION, 0x0001_0000, 0x0001_0000),
    (fid::WRITE_ATOMICITY, 0xffff_ffff, 1),
    (fid::ASYNC_EVENT_CONFIGURATION, 0xffff_ffff, 0x05ff),
];

#[test]
fn feature_values_are_stored_until_a_reset() {
    let mut features = Features::at_reset(0);
    let rest = [
        fid::TIMESTAMP,
        fid::KEEP_ALIVE_TIMER,
        fid::HOST_BEHAVIOR_SUPPORT,
        fid::IO_COMMAND_SET_PROFILE,
    ];
    let listed = VALUES.iter().map(|(fid, ..)| *fid).chain(rest);
    assert!(listed.eq(FEATURES.iter().map(|(fid, _)| *fid)), "each feature is in the table");
    for (fid, value, read) in VALUES {
        let default = get(&features, *fid);
        assert_ne!(default, *read, "feature {fid:#x}: a change must be seen");
        set(&mut features, *fid, *value).unwrap();
        assert_eq!(get(&features, *fid), *read, "feature {fid:#x}");
        for sel in [Select::Default, Select::Saved] {
            assert_eq!(get_with(&features, *fid, sel, 0), Ok(default), "feature {fid:#x}");
        }
    }
    features.reset();
    assert_eq!(Features { clock: Features::at_reset(0).clock, ..features }, Features::at_reset(0));
}

#[test]
fn a_host_that_may_be_silent_for_so_long() {
    let mut features = Features::at_reset(0);
    let fid = fid::KEEP_ALIVE_TIMER;
    assert_eq!(get(&features, fid), 0, "it is off");
    for (wanted, granted) in [(1, 1000), (1000, 1000), (119_001, 120_000), (0, 0)] {
        let set = set(&mut features, fid, wanted).unwrap();
        assert_eq!(set, Set { dw0: 0, effect: Effect::KeepAlive(granted) });
        assert_eq!(get(&features, fid), granted);
    }
    set(&mut features, fid, 5000).unwrap();
    let invalid = Err(Status::KEEP_ALIVE_TIMEOUT_INVALID.with_dnr());
    assert_eq!(set(&mut features, fid, u32::MAX), invalid);
    assert_eq!(Features::restore(&features.save()), features);
    assert_eq!(get_with(&features, fid, Select::Default, 0), Ok(0));
}

#[test]
fn only_one_combination_of_command_sets() {
    let mut features = Features::at_reset(0);
    let fid = fid::IO_COMMAND_SET_PROFILE;
    set(&mut features, fid, 0xffff_fe00).unwrap();
    for index in [1, 2, 511] {
        let rejected = Err(Status::IO_COMMAND_SET_COMBINATION_REJECTED.with_dnr());
        assert_eq!(set(&mut features, fid, index), rejected);
    }
    assert_eq!(get(&features, fid), 0);
}

#[test]
fn defaults() {
    let features = Features::at_reset(0);
    assert_eq!(get(&features, fid::ARBITRATION), 7);
    assert_eq!(get(&features, fid::TEMPERATURE_THRESHOLD), 343);
    assert_eq!(get(&features, fid::VOLATILE_WRITE_CACHE), 1);
    assert_eq!(get(&features, fid::NUMBER_OF_QUEUES), 0x003f_003f);
    for fid in [2, 5, 8, 9, 10, 11] {
        assert_eq!(get(&features, fid), 0);
    }
}

#[test]
fn capabilities() {
    for (fid, scope) in FEATURES {
        let expected = if *scope == Scope::Namespace { 0b110 } else { 0b100 };
        let sel = Select::SupportedCapabilities;
        assert_eq!(get_with(&Features::at_reset(0), *fid, sel, 0), Ok(expected));
    }
    let timestamp = GetFeatures { fid: fid::TIMESTAMP, sel: 3, cdw11: 0, ..GetFeatures::default() };
    assert_eq!(Features::at_reset(0).get(&timestamp, 0, &LIMITS).unwrap().data, None);
}

#[test]
fn unsupported_features_and_selections_are_refused() {
    let mut features = Features::at_reset(0);
    for fid in (0..=255).filter(|fid| FEATURES.iter().all(|(known, _)| known != fid)) {
        assert_eq!(set(&mut features, fid, 0), Err(INVALID_FIELD));
        assert_eq!(get_with(&features, fid, Select::Current, 0), Err(INVALID_FIELD));
    }
    for sel in 4..8 {
        let cmd = GetFeatures { fid: fid::ARBITRATION, sel, ..GetFeatures::default() };
        assert_eq!(features.get(&cmd, 0, &LIMITS), Err(INVALID_FIELD));
    }
    for (fid, _) in FEATURES {
        let cmd = SetFeatures { fid: *fid, sv: true, ..SetFeatures::default() };
        let error = features.set(&cmd, 1, Some(&[0; 8]), &LIMITS);
        assert_eq!(error, Err(Status::FEATURE_NOT_SAVEABLE.with_dnr()));
    }
    assert_eq!(features, Features::at_reset(0));
}

#[test]
fn volatile_write_cache_is_unsupported_without_a_cache() {
    let limits = Limits { volatile_cache: false, ..LIMITS };
    let mut features = Features::at_reset(0);
    let cmd = SetFeatures { fid: fid::VOLATILE_WRITE_CACHE, ..SetFeatures::default() };
    assert_eq!(features.set(&cmd, 0, None, &limits), Err(INVALID_FIELD));
    let cmd = GetFeatures { fid: fid::VOLATILE_WRITE_CACHE, ..GetFeatures::default() };
    assert_eq!(features.get(&cmd, 0, &limits), Err(INVALID_FIELD));
    assert_eq!(supported(true, false).count(), FEATURES.len());
    assert_eq!(supported(false, false).count(), FEATURES.len() - 1);
    assert!(supported(false, false).all(|(fid, _)| fid != fid::VOLATILE_WRITE_CACHE));
}

#[test]
fn a_feature_of_the_controller_may_be_set_for_a_namespace() {
    let mut features = Features::at_reset(0);
    for nsid in [0, 1, 3, NSID_ALL] {
        let cmd =
            SetFeatures { fid: fid::VOLATILE_WRITE_CACHE, cdw11: 1, ..SetFeatures::default() };
        let set = features.set(&cmd, nsid, None, &LIMITS).unwrap();
        assert_eq!(set, Set { dw0: 0, effect: Effect::VolatileWriteCache(true) });
        let cmd = GetFeatures { fid: fid::VOLATILE_WRITE_CACHE, ..GetFeatures::default() };
        assert_eq!(features.get(&cmd, nsid, &LIMITS).unwrap().dw0, 1);
    }
    for nsid in [4, NSID_ALL - 1] {
        let cmd = SetFeatures { fid: fid::VOLATILE_WRITE_CACHE, ..SetFeatures::default() };
        assert_eq!(features.set(&cmd, nsid, None, &LIMITS), Err(INVALID_NAMESPACE));
    }
}

#[test]
fn error_recovery_is_of_a_namespace() {
    let mut features = Features::at_reset(0);
    let mut set = |nsid, cdw11| {
        let cmd = SetFeatures { fid: fid::ERROR_RECOVERY, cdw11, ..SetFeatures::default() };
        features.set(&cmd, nsid, None, &LIMITS)
    };
    set(NSID_ALL, 7).unwrap();
    set(2, 9).unwrap();
    assert_eq!(set(0, 1), Err(INVALID_NAMESPACE));
    assert_eq!(set(4, 1), Err(INVALID_NAMESPACE));
    assert_eq!(set(1, 1 << 16), Err(INVALID_FIELD), "DULBE");
    let get = |nsid| {
        let cmd = GetFeatures { fid: fid::ERROR_RECOVERY, ..GetFeatures::default() };
        features.get(&cmd, nsid, &LIMITS).map(|get| get.dw0)
    };
    assert_eq!([1, 2, 3].map(get), [Ok(7), Ok(9), Ok(7)]);
    assert_eq!(get(NSID_ALL), Err(INVALID_NAMESPACE));
    assert_eq!(get(0), Ok(0), "the default");
}

#[test]
fn host_behavior_support_is_stored_and_validated() {
    let mut features = Features::at_reset(0);
    let acre = |features: &Features| {
        let cmd = GetFeatures { fid: fid::HOST_BEHAVIOR_SUPPORT, ..GetFeatures::default() };
        let data = features.get(&cmd, 0, &LIMITS).unwrap().data.unwrap();
        HostBehaviorSupport::read_from_bytes(&data).unwrap().acre
    };
    assert_eq!(data_length(fid::HOST_BEHAVIOR_SUPPORT), 512);
    assert_eq!(acre(&features), 0);
    let set = |features: &mut Features, behavior: HostBehaviorSupport| {
        let cmd = SetFeatures { fid: fid::HOST_BEHAVIOR_SUPPORT, ..SetFeatures::default() };
        features.set(&cmd, 0, Some(behavior.as_bytes()), &LIMITS).map(|set| set.effect)
    };
    let plain = HostBehaviorSupport::default();
    let knows = HostBehaviorSupport { acre: 1, ..plain };
    assert_eq!(set(&mut features, knows), Ok(Effect::CopyFormats(0)));
    assert_eq!(acre(&features), 1);
    assert_eq!(acre(&Features::restore(&features.save())), 1);
    // Unsupported and invalid values.
    for odd in [
        HostBehaviorSupport { acre: 2, ..plain },
        HostBehaviorSupport { lbafee: 2, ..plain },
        HostBehaviorSupport { cdfe: 1 << 4, ..plain },
        HostBehaviorSupport { cdfe: 1, ..plain },
    ] {
        assert_eq!(set(&mut features, odd), Err(INVALID_FIELD));
    }
    assert_eq!(acre(&features), 1);
    let copies = HostBehaviorSupport { cdfe: 0b1100, ..knows };
    assert_eq!(set(&mut features, copies), Ok(Effect::CopyFormats(0b1100)));
    assert_eq!(Features::restore(&features.save()), features);
    // LBAFEE (guards of more than 16 bits) is stored beside the formats of Copy.
    let extended = HostBehaviorSupport { lbafee: 1, ..copies };
    assert_eq!(set(&mut features, extended), Ok(Effect::CopyFormats(0b1100 | 1 << 15)));
    assert_eq!(set(&mut features, copies), Ok(Effect::CopyFormats(0b1100)));
    features.reset();
    assert_eq!(acre(&features), 0);
    assert_eq!(features.save().copy_formats, 0);
}

#[test]
fn coalescing_that_is_set_to_zero_differs_from_the_default() {
    let mut features = Features::at_reset(0);
    let chosen = |features: &Features| features.save().coalescing().map(|c| c.into_bits());
    assert_eq!(chosen(&features), None);
    set(&mut features, fid::INTERRUPT_COALESCING, 0).unwrap();
    assert_eq!(chosen(&features), Some(0));
    assert_eq!(chosen(&Features::restore(&features.save())), Some(0));
    features.reset();
    assert_eq!(chosen(&features), None);
}

#[test]
fn queues_are_granted_up_to_the_limit() {
    let mut features = Features::at_reset(0);
    let limits = Limits { io_queues: 8, ..LIMITS };
    let mut ask = |cdw11, limits: &Limits| {
        let cmd = SetFeatures { fid: fid::NUMBER_OF_QUEUES, cdw11, ..SetFeatures::default() };
        features.set(&cmd, 0, None, limits)
    };
    let granted = |dw0, submission, completion| {
        Ok(Set { dw0, effect: Effect::NumberOfQueues { submission, completion } })
    };
    assert_eq!(ask(0x00ff_00ff, &limits), granted(0x0007_0007, 8, 8));
    assert_eq!(ask(0x0000_fffe, &limits), granted(0x0000_0007, 8, 1));
    assert_eq!(ask(0x0003_0002, &limits), granted(0x0003_0002, 3, 4));
    assert_eq!(ask(0x0003_ffff, &limits), Err(INVALID_FIELD));
    assert_eq!(ask(0xffff_0003, &limits), Err(INVALID_FIELD));
    let later = Limits { queues_exist: true, ..limits };
    assert_eq!(ask(0, &later), Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr()));
    assert_eq!(get(&features, fid::NUMBER_OF_QUEUES), 0x0003_0002);
}

#[test]
fn each_vector_has_its_own_coalescing() {
    let mut features = Features::at_reset(0);
    let fid = fid::INTERRUPT_VECTOR_CONFIGURATION;
    let effect = set(&mut features, fid, 0x0001_0040).unwrap().effect;
    assert_eq!(effect, Effect::InterruptVector { vector: 64, coalescing_disabled: true });
    assert_eq!(set(&mut features, fid, 0x0001_0041), Err(INVALID_FIELD));
    let at = |features: &_, iv| get_with(features, fid, Select::Current, iv);
    assert_eq!(at(&features, 64), Ok(0x0001_0040));
    assert_eq!(at(&features, 63), Ok(63));
    assert_eq!(at(&features, 65), Err(INVALID_FIELD));
    let effect = set(&mut features, fid, 0x0000_0040).unwrap().effect;
    assert_eq!(effect, Effect::InterruptVector { vector: 64, coalescing_disabled: false });
    assert_eq!(at(&features, 64), Ok(64));
}

#[test]
fn temperature_thresholds() {
    let mut features = Features::at_reset(0);
    let fid = fid::TEMPERATURE_THRESHOLD;
    assert!(!features.temperature_warning(300));
    assert!(features.temperature_warning(343));
    assert!(!features.temperature_warning(342));
    let over = TemperatureThreshold::new().with_tmpth(290);
    let changed = set(&mut features, fid, over.into_bits()).unwrap();
    assert_eq!(changed.effect, Effect::TemperatureThreshold);
    assert!(features.temperature_warning(300));
    let everywhere = over.with_tmpth(310).with_tmpsel(0xf);
    set(&mut features, fid, everywhere.into_bits()).unwrap();
    assert!(!features.temperature_warning(300));
    let under = TemperatureThreshold::new().with_tmpth(300).with_thsel(1);
    set(&mut features, fid, under.into_bits()).unwrap();
    assert!(features.temperature_warning(300));
    assert_eq!(get(&features, fid), 310);
    assert_eq!(get_with(&features, fid, Select::Current, 1 << 20), Ok(300));
    assert_eq!(get_with(&features, fid, Select::Default, 1 << 20), Ok(0));
    for wrong in [1 << 16, 9 << 16, 2 << 20, 3 << 20] {
        assert_eq!(set(&mut features, fid, wrong), Err(INVALID_FIELD));
        assert_eq!(get_with(&features, fid, Select::Current, wrong), Err(INVALID_FIELD));
    }
    let all = get_with(&features, fid, Select::Current, 0xf << 16);
    assert_eq!(all, Err(INVALID_FIELD), "which of them?");
}

#[test]
fn only_one_power_state() {
    let mut features = Features::at_reset(0);
    assert_eq!(set(&mut features, fid::POWER_MANAGEMENT, 1), Err(INVALID_FIELD));
    assert_eq!(set(&mut features, fid::POWER_MANAGEMENT, 0x1f), Err(INVALID_FIELD));
    assert_eq!(get(&features, fid::POWER_MANAGEMENT), 0);
}

#[test]
fn the_timestamp_runs() {
    let mut features = Features::at_reset(400);
    let cmd = SetFeatures { fid: fid::TIMESTAMP, ..SetFeatures::default() };
    let read_as = |features: &Features, now_ms, sel| {
        let cmd = GetFeatures { fid: fid::TIMESTAMP, sel, ..GetFeatures::default() };
        let get = features.get_at(&cmd, 0, &LIMITS, now_ms).unwrap();
        assert_eq!(get.dw0, 0);
        Timestamp::read_from_bytes(&get.data.unwrap()).unwrap()
    };
    let read = |features: &Features, now_ms| read_as(features, now_ms, 0);
    assert_eq!(read(&features, 1000), Timestamp::new().with_millis(600));
    assert_eq!(data_length(fid::TIMESTAMP), 8);
    assert_eq!(data_length(fid::ARBITRATION), 0);
    // Bits outside the timestamp are ignored.
    let data = (0xffff_0000_0000_0000_u64 | 1_700_000_000_000).to_le_bytes();
    let done = features.set_at(&cmd, 0, Some(&data), &LIMITS, 1000).unwrap();
    assert_eq!(done, Set { dw0: 0, effect: Effect::None });
    let expected = Timestamp::new().with_millis(1_700_000_000_500).with_origin(1);
    assert_eq!(read(&features, 1500), expected);
    assert_eq!(read(&features, 0).millis(), 1_700_000_000_000, "a clock that went back");
    assert_eq!(read_as(&features, 1500, 1), Timestamp::new(), "the default");
    // The timestamp wraps at 48 bits.
    features.set_at(&cmd, 0, Some(&[0xff; 8]), &LIMITS, 1000).unwrap();
    assert_eq!(read(&features, 1002), Timestamp::new().with_millis(1).with_origin(1));
    assert_eq!(features.set(&cmd, 0, None, &LIMITS), Err(INVALID_FIELD));
    assert_eq!(features.set(&cmd, 0, Some(&[0; 7]), &LIMITS), Err(INVALID_FIELD));
}

#[test]
fn the_clock_is_a_real_one() {
    let mut features = Features::new();
    let cmd = SetFeatures { fid: fid::TIMESTAMP, ..SetFeatures::default() };
    let read = |features: &Features| {
        let cmd = GetFeatures { fid: fid::TIMESTAMP, ..GetFeatures::default() };
        let get = features.get(&cmd, 0, &LIMITS).unwrap();
        Timestamp::read_from_bytes(&get.data.unwrap()).unwrap().millis()
    };
    features.set(&cmd, 0, Some(&1_000_000_u64.to_le_bytes()), &LIMITS).unwrap();
    // The timestamp has to advance by at least these milliseconds.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let shown = read(&features);
    assert!(shown >= 1_000_020, "{shown}");
    features.reset();
    assert!(read(&features) < 1_000_000);
}

proptest! {
    #[test]
    fn any_set_feature_is_refused_or_read_back(
        cmds in prop::collection::vec((0..0x20u8, any::<u32>(), 0..6u32, any::<u64>()), 0..50),
    ) {
        let mut features = Features::at_reset(0);
        for (fid, cdw11, nsid, data) in cmds {
            let cmd = SetFeatures { fid, cdw11, ..SetFeatures::default() };
            let before = features.clone();
            if features.set(&cmd, nsid, Some(&data.to_le_bytes()), &LIMITS).is_err() {
                prop_assert_eq!(&features, &before);
            } else {
                let cmd = GetFeatures { fid, cdw11: cdw11 & 0xffff, ..GetFeatures::default() };
                let got = features.get(&cmd, nsid, &LIMITS);
                let odd = nsid == NSID_ALL || fid == fid::TEMPERATURE_THRESHOLD;
                prop_assert!(got.is_ok() || odd);
            }
        }
    }
}

#[test]
fn the_keep_alive_timer_expires_once() {
    let (mut timer, now) = (KeepAlive::default(), Instant::now());
    let after = |ms| now + Duration::from_millis(ms);
    assert_eq!(timer.expires_at(), None, "it is off");
    assert!(!timer.expires(after(1 << 40)));
    timer.set(5000, now);
    assert_eq!(timer.expires_at(), Some(after(5000)));
    timer.restart(after(3000));
    assert!(!timer.expires(after(5000)));
    assert_eq!(timer.expires_at(), Some(after(8000)));
    timer.set(1000, after(6000));
    assert_eq!(timer.expires_at(), Some(after(7000)));
    assert!(timer.expires(after(7000)));
    assert!(!timer.expires(after(7000)), "once");
    assert_eq!(timer.expires_at(), None);
    timer.set(1000, after(7000));
    timer.set(0, after(7000));
    assert!(!timer.expires(after(9000)));
}
