use super::*;
use crate::config::{NamespaceConfig, uuid_from};
use crate::test_disk::TestDisk;
use proptest::prelude::*;
use std::sync::Arc;
use zerocopy::FromBytes;

fn config(disks: Vec<TestDisk>) -> Config {
    let namespaces = (1..)
        .zip(disks)
        .map(|(n, disk): (u32, _)| NamespaceConfig {
            disk: Arc::new(disk),
            uuid: uuid_from(&n.to_string()),
        })
        .collect();
    Config { serial: "SB 1".into(), model: "A Model".into(), namespaces, ..Config::default() }
}

fn namespaces(config: &Config) -> Namespaces {
    Namespaces::new(config)
}

fn three() -> Config {
    let mut read_only = TestDisk::new(3000, 512);
    read_only.0.read_only = true;
    read_only.0.volatile_cache = false;
    read_only.0.discard = false;
    let mut coarse = TestDisk::new(2000, 512);
    coarse.0.granularity = 8;
    config(vec![TestDisk::new(1000, 4096), coarse, read_only])
}

fn ask(config: &Config, cns: u8, nsid: u32) -> Result<Page, Status> {
    let cmd = Identify { cns, ..Identify::default() };
    Identity::new(config).identify(&cmd, nsid, &namespaces(config))
}

fn read<T: FromBytes>(config: &Config, cns: u8, nsid: u32) -> T {
    T::read_from_bytes(&ask(config, cns, nsid).unwrap()[..]).unwrap()
}

const INVALID_FIELD: Status = Status::INVALID_FIELD.with_dnr();
const INVALID_NAMESPACE: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();

/// CNS 12h and 13h: one controller exists, and every namespace is attached to it.
#[test]
fn controller_lists() {
    let config = three();
    let of = |cns, cntid, nsid| -> Result<Vec<u16>, Status> {
        let cmd = Identify { cns, cntid, ..Identify::default() };
        let page = Identity::new(&config).identify(&cmd, nsid, &namespaces(&config))?;
        Ok(ControllerList::read_from_bytes(&page[..]).unwrap().iter().collect())
    };
    for from in [0, CNTLID] {
        assert_eq!(of(cns::CONTROLLERS, from, 0), Ok(vec![CNTLID]));
        assert_eq!(of(cns::NAMESPACE_CONTROLLERS, from, 3), Ok(vec![CNTLID]));
    }
    assert_eq!(of(cns::CONTROLLERS, CNTLID + 1, 0), Ok(vec![]));
    assert_eq!(of(cns::NAMESPACE_CONTROLLERS, CNTLID + 1, 1), Ok(vec![]));
    assert_eq!(of(cns::NAMESPACE_CONTROLLERS, 0, 4), Err(INVALID_NAMESPACE));
    assert_eq!(of(cns::NAMESPACE_CONTROLLERS, 0, NSID_ALL), Err(INVALID_FIELD));
}

#[test]
fn controller_structure() {
    let config = three();
    config.validate().unwrap();
    let id: IdentifyController = read(&config, cns::CONTROLLER, 0);
    assert_eq!(id.serial().to_string(), "SB 1");
    assert_eq!(id.model().to_string(), "A Model");
    assert_eq!(id.firmware().to_string(), env!("CARGO_PKG_VERSION"));
    assert_eq!(id.qualified_name().to_string(), "nqn.2026-11.io.shadowbell:SB 1");
    assert_eq!((id.ver, id.cntrltype, id.cntlid), (0x0002_0000, 1, 1));
    assert_eq!((id.nn, id.mdts, id.maxcmd), (3, 8, 4096));
    assert_eq!((id.acl, id.aerl, id.elpe, id.npss), (3, 3, 63, 0));
    assert_eq!((id.sqes.into_bits(), id.cqes.into_bits()), (0x66, 0x44));
    assert_eq!(id.oacs.into_bits(), 1 << 4 | 1 << 8 | 1 << 9);
    assert_eq!((id.edstt, id.dsto, id.pels), (30, 1, 1));
    assert_eq!((id.fuses, id.acwu), (1, 0));
    assert_eq!(id.oncs.into_bits(), 0b1_1101_1111);
    assert_eq!(id.ocfs, 0b1111);
    assert_eq!(id.vwc.into_bits(), 0b111);
    assert_eq!(id.sgls.into_bits(), 1 | 1 << 16 | 1 << 18);
    assert_eq!(id.frmw.into_bits(), 0b011);
    assert_eq!(id.lpa.into_bits(), 0b11_1110);
    assert_eq!(id.oaes.into_bits(), 1 << 8);
    assert_eq!((id.kas, id.fna.into_bits(), id.cmic.into_bits()), (10, 0, 0));
    assert_eq!(id.rtd3e / 1_000_000, 5, "what Linux takes without a word");
    assert!(0 < id.wctemp && id.wctemp < id.cctemp);
    assert_eq!(id.ieee, [0x42, 0x53, 0x02]);
    assert_eq!(id.tnvmcap.get(), 1000 * 4096 + 5000 * 512);
}

#[test]
fn the_configuration_determines_identify_controller_fields() {
    let controller = |config: &Config| -> IdentifyController { read(config, cns::CONTROLLER, 0) };
    let without = Config { shadow_doorbells: false, mdts: 9, max_queue_entries: 64, ..three() };
    let id = controller(&without);
    assert_eq!((id.oacs.into_bits(), id.mdts, id.maxcmd), (1 << 4 | 1 << 9, 9, 64));
    let mut disk = TestDisk::new(1, 512);
    disk.0.volatile_cache = false;
    let id = controller(&config(vec![disk]));
    assert_eq!(id.vwc.into_bits(), 0b110, "no cache, but a flush of all namespaces");
    let longest = Config { serial: "S".repeat(20), ..three() };
    let id = controller(&longest);
    assert_eq!(id.serial().to_string(), longest.serial);
    assert!(id.qualified_name().to_string().ends_with(&longest.serial));
}

#[test]
fn namespace_structure() {
    let config = three();
    let [first, second, third]: [IdentifyNamespace; 3] =
        [1, 2, 3].map(|nsid| read(&config, cns::NAMESPACE, nsid));
    assert_eq!((first.nsze, first.ncap, first.nuse), (1000, 1000, 1000));
    assert_eq!(first.nvmcap.get(), 4_096_000);
    assert_eq!(first.format().and_then(|format| format.block_size()), Some(4096));
    assert_eq!(second.format().and_then(|format| format.block_size()), Some(512));
    assert_eq!((first.nlbaf, first.flbas.into_bits(), first.nsfeat.into_bits()), (0, 0, 1 << 1));
    assert_eq!(first.dlfeat.into_bits(), 0b1001);
    assert_eq!(second.nsfeat.into_bits(), 1 << 4 | 1 << 1);
    // All fields are 0: writes of a single block are atomic, and there are no atomic boundaries.
    let atoms = [first.nawun, first.nawupf, first.nacwu, first.nabsn, first.nabo, first.nabspf];
    assert_eq!(atoms, [0; 6]);
    let optimal = [second.npwg, second.npwa, second.npdg, second.npda, second.nows];
    assert_eq!(optimal, [7; 5]);
    assert_eq!([first.nsattr, second.nsattr, third.nsattr], [0, 0, 1]);
    assert_eq!(third.dlfeat.into_bits(), 1, "reads as zeroes, is not deallocated");
    let ours = namespaces(&config);
    let ours = ours.get(3).unwrap();
    assert_eq!((third.nguid, third.eui64), (ours.nguid(), ours.eui64()));
}

#[test]
fn a_granularity_that_does_not_fit_is_left_out() {
    for (granularity, reported) in [(0, 0), (1, 0), (2, 1), (65536, 65535), (65537, 0)] {
        let mut disk = TestDisk::new(1 << 20, 512);
        disk.0.granularity = granularity;
        let id: IdentifyNamespace = read(&config(vec![disk]), cns::NAMESPACE, 1);
        assert_eq!(id.npwg, reported);
        assert_eq!(id.nsfeat.optperf() != 0, reported != 0);
    }
}

#[test]
fn independent_structure() {
    let config = three();
    let [first, third]: [IdentifyIndependentNamespace; 2] =
        [1, 3].map(|nsid| read(&config, cns::INDEPENDENT_NAMESPACE, nsid));
    assert_eq!((first.nstat, first.nsattr, first.nsfeat), (1, 0, 0));
    assert_eq!((third.nstat, third.nsattr, third.nsfeat), (1, 1, 1 << 5));
}

#[test]
fn identifiers_are_the_same_everywhere_and_of_one_namespace() {
    let config = three();
    let mut seen = Vec::new();
    for nsid in 1..=3 {
        let list: NamespaceIds = read(&config, cns::NAMESPACE_IDS, nsid);
        let ids: Vec<_> = list.iter().collect();
        let structure: IdentifyNamespace = read(&config, cns::NAMESPACE, nsid);
        let uuid = config.namespaces[nsid as usize - 1].uuid;
        assert_eq!(
            ids,
            [
                NamespaceId::Uuid(uuid),
                NamespaceId::Nguid(structure.nguid),
                NamespaceId::Eui64(structure.eui64),
                NamespaceId::Csi(0),
            ]
        );
        for id in &ids[..3] {
            let text = format!("{id:?}");
            assert!(!seen.contains(&text), "{text} is of two namespaces");
            seen.push(text);
        }
    }
}

#[test]
fn lists() {
    let config = three();
    for cns in [cns::ACTIVE_NAMESPACES, cns::CSI_ACTIVE_NAMESPACES] {
        let above = |nsid| -> Vec<u32> {
            let list: NamespaceList = read(&config, cns, nsid);
            list.iter().collect()
        };
        assert_eq!(above(0), [1, 2, 3]);
        assert_eq!(above(1), [2, 3]);
        assert_eq!(above(3), [0; 0]);
        assert_eq!(above(NSID_ALL - 2), [0; 0]);
        for nsid in [NSID_ALL - 1, NSID_ALL] {
            assert_eq!(ask(&config, cns, nsid), Err(INVALID_NAMESPACE));
        }
    }
}

#[test]
fn inactive_namespaces_read_as_zeroes_and_invalid_ones_are_refused() {
    let config = three();
    let identity = Identity::new(&config);
    let present = namespaces(&config).with(2, None);
    let structures = [cns::NAMESPACE, cns::CSI_NAMESPACE, cns::INDEPENDENT_NAMESPACE];
    for cns in structures {
        let cmd = Identify { cns, ..Identify::default() };
        let inactive = identity.identify(&cmd, 2, &present).unwrap();
        assert!(inactive.iter().all(|byte| *byte == 0), "zero filled: CNS {cns:#x}");
    }
    let cmd = Identify { cns: cns::NAMESPACE_IDS, ..Identify::default() };
    assert_eq!(identity.identify(&cmd, 2, &present), Err(INVALID_NAMESPACE));
    for cns in structures.into_iter().chain([cns::NAMESPACE_IDS]) {
        for nsid in [0, 4, NSID_ALL - 1, NSID_ALL] {
            assert_eq!(ask(&config, cns, nsid), Err(INVALID_NAMESPACE), "CNS {cns:#x}");
        }
    }
    let cmd = Identify { cns: cns::ACTIVE_NAMESPACES, ..Identify::default() };
    let list = identity.identify(&cmd, 0, &present).unwrap();
    let list = NamespaceList::read_from_bytes(&list[..]).unwrap();
    assert!(list.iter().eq([1, 3]));
}

#[test]
fn command_sets() {
    let config = three();
    let ask = |cns, csi, cntid| {
        let cmd = Identify { cns, csi, cntid, ..Identify::default() };
        Identity::new(&config).identify(&cmd, 1, &namespaces(&config))
    };
    let sets = ask(cns::IO_COMMAND_SETS, 0, 0xffff).unwrap();
    assert_eq!((sets[0], &sets[1..]), (0b101, &[0; 4095][..]));
    assert_eq!(ask(cns::IO_COMMAND_SETS, 0, 1), Ok(sets));
    assert_eq!(ask(cns::IO_COMMAND_SETS, 0, 2), Err(INVALID_FIELD), "another controller");
    // No zoned namespace exists.
    assert_eq!(ask(cns::CSI_NAMESPACE, csi::ZONED, 0), Err(INVALID_FIELD));
    assert_eq!(ask(cns::CSI_ACTIVE_NAMESPACES, csi::ZONED, 0), Ok(Box::new([0; 4096])));
    assert_eq!(ask(cns::CSI_CONTROLLER, csi::ZONED, 0), Ok(Box::new([0; 4096])));
    for csi in (1..=255).filter(|csi| *csi != csi::ZONED) {
        assert_eq!(ask(cns::CSI_CONTROLLER, csi, 0), Err(INVALID_FIELD));
        assert_eq!(ask(cns::CSI_ACTIVE_NAMESPACES, csi, 0), Err(INVALID_FIELD));
        let other = Err(Status::INVALID_IO_COMMAND_SET.with_dnr());
        assert_eq!(ask(cns::CSI_NAMESPACE, csi, 0), other);
    }
}

#[test]
fn write_zeroes_fits_its_command() {
    for (block_sizes, expected) in
        [(&[512][..], 32 << 20), (&[4096], 256 << 20), (&[4096, 512], 32 << 20)]
    {
        let disks = block_sizes.iter().map(|size| TestDisk::new(1 << 20, *size)).collect();
        let nvm: IdentifyNvmController = read(&config(disks), cns::CSI_CONTROLLER, 0);
        let bytes = 4096_u64 << nvm.wzsl;
        assert_eq!(bytes, expected);
        // A command's NLB (16 bits, 0's based) must be able to express this size in every
        // namespace.
        assert!(block_sizes.iter().all(|size| bytes / u64::from(*size) <= 1 << 16));
        assert_eq!((nvm.vsl, nvm.dmrl, nvm.dmrsl, nvm.dmsl), (0, 0, 0, 0));
    }
}

#[test]
fn other_structures_are_refused() {
    let known = [0, 1, 2, 3, 5, 6, 7, 8, 0x12, 0x13];
    for cns in (0..=255).filter(|cns| !known.contains(cns)) {
        // CNTID 0 is not a controller of this subsystem, so CNS 1Ch fails as well.
        assert_eq!(ask(&three(), cns, 1), Err(INVALID_FIELD), "CNS {cns:#x}");
    }
}

proptest! {
    #[test]
    fn any_command_ends(cns: u8, cntid: u16, cnssid: u16, csi: u8, nsid: u32, small in 0..5u32) {
        let config = three();
        let cmd = Identify { cns, cntid, cnssid, csi, uuid: 0 };
        let identity = Identity::new(&config);
        for nsid in [nsid, small] {
            if let Err(status) = identity.identify(&cmd, nsid, &namespaces(&config)) {
                prop_assert!(status.dnr(), "a host that tries again gets the same");
            }
        }
    }
}
