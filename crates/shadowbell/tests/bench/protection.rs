//! Disks with metadata, for every command that reads or writes.

use crate::harness::{Server, bytes, file, json, line, output, stderr_of_failure};
use std::fs;

#[test]
fn every_verb_reads_and_writes_blocks_with_protection_information() {
    let directory = tempfile::tempdir().unwrap();
    let image = file(directory.path(), "a.img", &vec![0; 3 << 20]);
    let of_type_3 = format!("{image}?metadata=8&pi=3");
    let server = Server::start(&[
        "mem:3MiB?metadata=8&pi=1",
        "mem:3MiB?metadata=16&guard=64&pi=2&extended=on&block-size=4096",
        &of_type_3,
        "mem:3MiB?metadata=64&pi=1&extended=on",
    ]);
    let content = bytes(1_000_001);
    let input = file(directory.path(), "in", &content);
    for nsid in [1, 2, 3] {
        let target = server.target(nsid);
        line(&format!("write {target} --offset 12345 -i {input}")).assert().success();
        let read = line(&format!("read {target} --offset 12345 --length 1000001"));
        assert!({ read }.assert().success().get_output().stdout == content, "namespace {nsid}");
        let copied = directory.path().join("copied");
        line(&format!("copy {target} {}", copied.display())).assert().success();
        assert!(fs::read(&copied).unwrap()[12_345..].starts_with(&content));
        fs::remove_file(copied).unwrap();
        let verified = "--number-ios 300 --iodepth 8 --size 1m --max-bs 16k --force";
        line(&format!("verify {target} {verified}")).assert().success();
    }
    for nsid in 1..=4 {
        let target = server.target(nsid);
        let all = "--verify crc32c --bs 8k --size 1m --force --json";
        let made = format!("bench {target} {all} --rw write --number-ios 128 --metadata host");
        let row = &json(&mut line(&made))["rows"][0];
        // All data are read back, and the protection information of each block is checked.
        assert_eq!((&row["verified_blocks"], &row["verify_errors"]), (&256.into(), &0.into()));
        let read = format!("bench {target} {all} --rw randread --number-ios 300");
        if nsid == 4 {
            let words = stderr_of_failure(&mut line(&read), 2);
            assert!(words.contains("metadata that are more than protection"), "{words}");
        } else {
            let row = &json(&mut line(&read))["rows"][0];
            assert_eq!((&row["verified_blocks"], &row["verify_errors"]), (&300.into(), &0.into()));
        }
    }
    let list = output(&mut line(&format!("list vfio-user:{}", server.socket().display())));
    for words in ["512 B + 8 B", "4096 B + 16 B", "512 B + 64 B"] {
        assert!(list.contains(words), "{list}");
    }
    let words =
        stderr_of_failure(&mut line("bench local:mem:1MiB --metadata host --number-ios 1"), 2);
    assert!(words.contains("no metadata"), "{words}");
}
