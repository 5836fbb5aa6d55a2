//! Shape of the JSON output: names and types of nvme-cli and of fio.

use crate::harness::{Server, json, line, stderr_of_failure};
use serde_json::Value;
use shadowbell_testing::programs::can_run;
use std::collections::BTreeMap;
use std::process::Command;

/// Keys that nvme-cli 2.3 to 2.16 all print with `-o json`. Numbers unless marked otherwise.
const ID_CTRL: &str = "\
    acl acwu aerl anacap anagrpmax anatt apsta avscc awun awupf cctemp cmic cntlid cntrltype cqes \
    crdt1 crdt2 crdt3 ctratt domainid dsto edstt elpe endgidmax fcatt fguid:string fna fr:string \
    frmw fuses fwug hctma hmmaxd hmmin hmminds hmpre icdoff icsvscc ieee ioccsz iorcsz kas lpa \
    maxcmd maxcna maxdna mdts mec megcap mn:string mnan mntmt msdbd mtfa mxtmt nanagrpid nn npss \
    nsetidmax nvmsr nwpc oacs oaes ocfs ofcs oncs pels psds:array rab rpmbs rrls rtd3e rtd3r \
    sanicap sgls sn:string sqes ssvid subnqn:string tnvmcap unvmcap ver vid vwc vwci wctemp";
const POWER_STATE: &str = "\
    max_power entry_lat exit_lat read_tput read_lat write_tput write_lat idle_power idle_scale \
    active_power active_power_work active_scale";
const ID_NS: &str = "\
    anagrpid dlfeat dpc dps endgid eui64:string flbas fpi lbafs:array mc mcl msrc mssrl nabo nabsn \
    nabspf nacwu nawun nawupf ncap nguid:string nlbaf nmic noiob nows npda npdg npwa npwg nsattr \
    nsfeat nsze nulbaf nuse nvmcap nvmsetid rescap";
const BLOCK_FORMAT: &str = "ms ds rp";
const SMART_LOG: &str = "\
    avail_spare controller_busy_time critical_comp_time critical_warning data_units_read \
    data_units_written endurance_grp_critical_warning_summary host_read_commands \
    host_write_commands media_errors num_err_log_entries percent_used power_cycles power_on_hours \
    spare_thresh temperature thm_temp1_total_time thm_temp1_trans_count thm_temp2_total_time \
    thm_temp2_trans_count unsafe_shutdowns warning_temp_time";
const ERROR: &str = "\
    error_count sqid cmdid status_field phase_tag parm_error_location lba nsid vs trtype cs \
    trtype_spec_info";
const DEVICE: &str = "\
    NameSpace DevicePath:string GenericPath:string Firmware:string ModelNumber:string \
    SerialNumber:string UsedBytes MaximumLBA PhysicalSize SectorSize";

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Checks that each of `names` is a key of the stated type.
#[track_caller]
fn has_all(object: &Value, names: &str) {
    for word in names.split_whitespace() {
        let (name, expected) = word.split_once(':').unwrap_or((word, "number"));
        assert_eq!(object.get(name).map(kind), Some(expected), "{name}: {object}");
    }
}

#[test]
fn json_output_has_nvme_clis_keys() {
    let server = Server::start(&["mem:4MiB?block-size=4096", "--serial", "SHAPES"]);
    let target = server.target(1);
    let ask = |verb: &str| json(&mut line(&format!("{verb} {target} -o json")));

    let list = ask("list");
    has_all(&list, "Devices:array");
    has_all(&list["Devices"][0], DEVICE);
    assert_eq!(list["Devices"][0]["DevicePath"], target);

    let controller = ask("id-ctrl");
    has_all(&controller, ID_CTRL);
    let states = controller["psds"].as_array().unwrap();
    assert_eq!(states.len() as u64, controller["npss"].as_u64().unwrap() + 1);
    states.iter().for_each(|state| has_all(state, POWER_STATE));
    assert!(controller.get("ps0").is_none(), "prose is for people");

    let namespace = ask("id-ns");
    has_all(&namespace, ID_NS);
    let formats = namespace["lbafs"].as_array().unwrap();
    assert_eq!(formats.len() as u64, namespace["nlbaf"].as_u64().unwrap() + 1);
    formats.iter().for_each(|format| has_all(format, BLOCK_FORMAT));
    let in_use = namespace["flbas"].as_u64().unwrap() & 0xf;
    assert_eq!(formats[in_use as usize]["ds"], 12);
    assert!(namespace.get("lbaf0").is_none(), "prose is for people");

    let health = ask("smart-log");
    has_all(&health, SMART_LOG);
    assert!((273..373).contains(&health["temperature"].as_u64().unwrap()), "Kelvin: {health}");

    stderr_of_failure(&mut line(&format!("get-feature {target} -f 0xc5")), 2);
    let log = ask("error-log");
    has_all(&log, "errors:array");
    log["errors"].as_array().unwrap().iter().for_each(|error| has_all(error, ERROR));
    assert!(!log["errors"].as_array().unwrap().is_empty());
}

#[test]
fn json_output_has_three_equivalent_options() {
    let verbs = ["list", "id-ctrl", "id-ns", "smart-log", "error-log", "get-feature"];
    for verb in verbs.map(|verb| format!("{verb} local:mem:1MiB")) {
        let keys = |option: &str| {
            let answer = json(&mut line(&format!("{verb} {option}")));
            answer.as_object().unwrap().keys().cloned().collect::<Vec<_>>()
        };
        let first = keys("--json");
        assert!(first == keys("-o json") && first == keys("--output-format=json"), "{verb}");
        let text = crate::harness::output(&mut line(&format!("{verb} -o normal")));
        assert!(!text.starts_with('{'), "{verb}: {text}");
    }
    let said = stderr_of_failure(&mut line("id-ctrl local:mem:1MiB -o binary"), 2);
    assert!(said.contains("normal, json"), "{said}");
    let verified = json(&mut line("verify local:mem:1MiB --number-ios 100 -o json"));
    assert!(verified["rows"].is_array(), "{verified}");
}

/// Collects every leaf of a value with its path.
fn leaves(value: &Value, path: &str, found: &mut BTreeMap<String, &'static str>) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                leaves(value, &format!("{path}/{name}"), found);
            }
        }
        other => {
            found.insert(path.to_owned(), kind(other));
        }
    }
}

#[test]
fn bench_json_has_the_shape_of_fios() {
    let ours = json(&mut line(
        "bench local:mem:4MiB --rw randrw --rwmixread 50 --number-ios 1000 --iodepth 4 --force \
         --output-format=json",
    ));
    let job = &ours["jobs"][0];
    let numbers = ["read", "write"].map(|way| job[way]["total_ios"].as_u64().unwrap());
    assert_eq!(numbers.iter().sum::<u64>(), 1000);
    for (way, ios) in ["read", "write"].into_iter().zip(numbers) {
        assert!((300..700).contains(&ios), "{way}: {ios}");
        assert_eq!(job[way]["io_bytes"], ios * 4096);
        // With `--number-ios` there is no warm-up to choose a sampling interval, so every I/O is
        // measured.
        assert_eq!(job[way]["clat_ns"]["N"], ios);
    }
    let rows = json(&mut line("bench local:mem:4MiB --number-ios 100 --json"));
    let keys = |row: &Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&rows["rows"][0]), keys(&ours["shadowbell"]), "the row is included");

    if !can_run("fio") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new("fio")
        .args(["--name=job", "--rw=randrw", "--bs=4k", "--size=1m", "--output-format=json"])
        .args(["--ioengine=psync", "--filename=fio.img"])
        .current_dir(directory.path())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let start = text.find('{').unwrap_or(0);
    let fios: Value = serde_json::from_str(&text[start..]).expect(&text);
    let (mut theirs, mut here) = (BTreeMap::new(), BTreeMap::new());
    leaves(&fios["jobs"][0], "", &mut theirs);
    leaves(job, "", &mut here);
    assert!(here.len() > 60, "{here:?}");
    for (path, kind) in here {
        // Under `job options`, fio repeats its own options, which differ.
        if !path.starts_with("/job options/") {
            assert_eq!(theirs.get(&path), Some(&kind), "{path}");
        }
    }
    for name in ["timestamp", "timestamp_ms", "time"] {
        assert_eq!(kind(&ours[name]), kind(&fios[name]), "{name}");
    }
}
