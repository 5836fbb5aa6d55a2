//! Third-party NBD clients.

use crate::nbd::Rig;
use shadowbell_block::BlockOptions;
use shadowbell_testing::programs::{can_run, skipped};
use std::path::Path;
use std::process::Command;

pub(crate) fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

#[track_caller]
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let (out, err) = (&output.stdout, &output.stderr);
    let (out, err) = (String::from_utf8_lossy(out), String::from_utf8_lossy(err));
    assert!(output.status.success(), "{program} {arguments:?}: {out}{err}");
    out.into_owned()
}

fn rig(mebibytes: u64) -> Rig {
    Rig::new(mebibytes << 11, &BlockOptions::default())
}

/// Pseudorandom bytes.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(len / 8).flatten().collect()
}

#[test]
fn nbdinfo_reports_the_export() {
    if !can_run("nbdinfo") {
        return;
    }
    let rig = rig(8);
    let uri = uri(&rig.socket());
    assert_eq!(run("nbdinfo", &["--size", &uri]).trim(), "8388608");
    let about = run("nbdinfo", &[&uri]);
    for words in [
        "using structured packets",
        "base:allocation",
        "can_multi_conn: true",
        "can_fast_zero: true",
        "can_fua: true",
        "is_read_only: false",
    ] {
        assert!(about.contains(words), "{words}: {about}");
    }
    let map = run("nbdinfo", &["--map", &uri]);
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["0", "8388608", "0", "data"]);
    run("nbdinfo", &["--list", &uri]);
    rig.end();
}

#[test]
fn nbdcopy_copies_in_both_directions() {
    if !can_run("nbdcopy") {
        return;
    }
    let rig = rig(32);
    let directory = tempfile::tempdir().unwrap();
    let (source, back) = (directory.path().join("source"), directory.path().join("back"));
    let data = noise(32 << 20);
    std::fs::write(&source, &data).unwrap();
    std::fs::write(&back, []).unwrap();
    let (source, back) = (source.to_str().unwrap(), back.to_str().unwrap());
    let uri = uri(&rig.socket());
    let many = ["--connections=4", "--requests=64", "--flush"];
    run("nbdcopy", &[&many[..], &[source, &uri]].concat());
    run("nbdcopy", &[&many[..], &[&uri, back]].concat());
    assert!(std::fs::read(back).unwrap() == data);
    rig.end();
}

#[test]
fn qemu_writes_reads_and_compares() {
    if !can_run("qemu-img") || !can_run("qemu-io") {
        return;
    }
    let rig = rig(32);
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    let mut data = noise(16 << 20);
    data.resize(32 << 20, 0);
    std::fs::write(&source, &data).unwrap();
    let (source, uri) = (source.to_str().unwrap(), uri(&rig.socket()));
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", "-W", source, &uri]);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", source, &uri]);
    let about = run("qemu-img", &["info", "--output=json", &uri]);
    assert!(about.contains("\"virtual-size\": 33554432"), "{about}");
    let steps = [
        "write -P 7 1000 12345",
        "read -P 7 1000 12345",
        "write -f -P 9 13345 77",
        "read -P 9 13345 77",
        "write -z -u 2000 3000",
        "read -P 0 2000 3000",
        "read -P 7 1000 1000",
        "read -P 7 5000 8345",
        "aio_write -P 5 1M 1M",
        "aio_write -P 6 2M 1M",
        "aio_flush",
        "read -P 5 1M 1M",
        "read -P 6 2M 1M",
        "discard 1M 1M",
        "read -P 0 1M 1M",
        "flush",
    ];
    let mut arguments = vec!["-f", "raw"];
    steps.iter().for_each(|step| arguments.extend(["-c", step]));
    arguments.push(&uri);
    let said = run("qemu-io", &arguments);
    assert!(!said.contains("mismatch") && !said.contains("failed"), "{said}");
    run("qemu-img", &["bench", "-f", "raw", "-w", "-c", "5000", "-d", "64", "--pattern=3", &uri]);
    rig.end();
}

#[test]
fn fio_verifies_its_writes() {
    if !can_run("fio") {
        return;
    }
    if !run("fio", &["--enghelp"]).contains("nbd") {
        skipped("this fio has no nbd engine");
        return;
    }
    let rig = rig(32);
    let uri = format!("--uri={}", uri(&rig.socket()));
    let directory = tempfile::tempdir().unwrap();
    let auxiliary = format!("--aux-path={}", directory.path().display());
    let job = [
        "--name=job",
        "--ioengine=nbd",
        "--rw=randrw",
        "--bsrange=512-64k",
        "--iodepth=32",
        "--size=32m",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
    ];
    let said = run("fio", &[&job[..], &[&uri, &auxiliary]].concat());
    assert!(said.contains("err= 0"), "{said}");
    rig.end();
}
