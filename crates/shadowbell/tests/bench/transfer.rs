//! Integration tests of `read`, `write` and `copy`.

use crate::harness::{Server, bytes, file, line, shadowbell, stderr_of_failure};
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait::until;
use std::fs;

#[test]
fn write_and_read_transfer_unaligned_ranges() {
    let server = Server::start(&["mem:8MiB", "mem:8MiB?block-size=4096"]);
    let directory = server.directory.path();
    // More than one request, unaligned at both ends.
    let content = bytes(3_000_001);
    for nsid in [1, 2] {
        let target = server.target(nsid);
        let input = file(directory, "in", &content);
        line(&format!("write {target} --offset 12345 -i {input}")).assert().success();
        let read =
            line(&format!("read {target} --offset 12345 --length 3000001")).assert().success();
        assert!(read.get_output().stdout == content, "namespace {nsid}");
        // `-` is standard output, and not a file name.
        let mut dash = line(&format!("read {target} --offset 12345 --length 100 -o -"));
        let dash = dash.current_dir(directory).assert().success();
        assert_eq!(dash.get_output().stdout, &content[..100]);
        assert!(!directory.join("-").exists());
        let output = directory.join("out");
        line(&format!("read {target} -o {}", output.display())).assert().success();
        let all = fs::read(output).unwrap();
        assert_eq!(all.len(), 8 << 20);
        assert!(all[12_345..12_345 + content.len()] == content);
        // The other bytes of the first and last block are unchanged.
        assert!(all[..12_345].iter().all(|byte| *byte == 0));
        assert!(all[12_345 + content.len()..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn a_partial_block_write_keeps_the_other_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let image = file(directory.path(), "disk.img", &[b'.'; 4096]);
    let mut write = line(&format!("write {image} --offset 1000 --input -"));
    write.write_stdin("a few bytes").assert().success();
    let mut expected = [b'.'; 4096];
    expected[1000..1011].copy_from_slice(b"a few bytes");
    assert!(fs::read(&image).unwrap() == expected);
    let read = line(&format!("read {image} --offset 1002 --length 3")).assert().success();
    assert_eq!(read.get_output().stdout, b"few");
    let mut write = line(&format!("write {image} --length 2"));
    write.write_stdin("only two of these").assert().success();
    assert!(fs::read(&image).unwrap().starts_with(b"on.."));
    // Empty input and an empty range are accepted.
    line(&format!("write {image}")).write_stdin("").assert().success();
    let read = line(&format!("read {image} --offset 4096")).assert().success();
    assert!(read.get_output().stdout.is_empty());
}

#[test]
fn disks_are_copied() {
    let server = Server::start(&["mem:4MiB", "mem:5MiB"]);
    let directory = server.directory.path();
    let content = bytes(4 << 20);
    let image = file(directory, "disk.img", &content);
    let [one, two] = [server.target(1), server.target(2)];
    line(&format!("copy {image} {one}")).assert().success();
    // Copies between two namespaces of one controller. A controller has only one host at a time.
    line(&format!("copy {one} {two}")).assert().success();
    // Copies into a file that `copy` creates.
    let backup = directory.join("backup.img");
    line(&format!("copy {two} {}", backup.display())).assert().success();
    let copied = fs::read(&backup).unwrap();
    assert_eq!(copied.len(), 5 << 20);
    assert!(copied.starts_with(&content));
    assert!(copied[content.len()..].iter().all(|byte| *byte == 0));
}

#[test]
fn invalid_transfers_are_refused_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let small = file(directory.path(), "small.img", &[0; 4096]);
    let large = file(directory.path(), "large.img", &[1; 8192]);
    let path = directory.path().display();
    for (arguments, words) in [
        (format!("read {small} --offset 5000"), "past the end"),
        (format!("read {small} --offset 4000 --length 97"), "past the end"),
        (format!("read {small} -o {path}/no/file"), "no/file"),
        (format!("write {small} -i {large}"), "do not fit"),
        (format!("write {small} -i {path}/missing"), "missing"),
        (format!("write {small} -i {path}"), "is a directory"),
        (format!("write {small}?read-only=on -i {small}"), "read-only"),
        (format!("copy {large} {small}"), "has room for only 4096"),
        (format!("copy {small} {small}"), "the source and the destination"),
        (format!("copy {path}/missing {small}"), "missing"),
        (format!("copy {small} {path}/no/new.img"), "new.img"),
        (format!("read {small} --length lots"), "no size"),
    ] {
        let text = stderr_of_failure(&mut line(&arguments), 2);
        assert!(text.contains(words), "{arguments}: {text}");
    }
    assert_eq!(fs::read(&small).unwrap(), [0; 4096], "nothing was written");
    // A disk in use is not accepted as the output: neither the input of the same program under
    // another name, nor a disk of another program.
    let link = directory.path().join("link.img");
    fs::hard_link(&large, &link).unwrap();
    let server = Server::start(&[&small]);
    for (from, output) in [(&*large, &*large), (&large, link.to_str().unwrap()), (&large, &small)] {
        let text = stderr_of_failure(&mut line(&format!("read {from} -o {output}")), 2);
        assert!(text.contains(&format!("{output} is a disk that is in use")), "{text}");
    }
    assert_eq!(fs::read(&large).unwrap(), [1; 8192]);
    assert_eq!(fs::read(&small).unwrap(), [0; 4096]);
    drop(server);
    // A stream of unknown length is found to be too long while it is copied.
    let mut write = shadowbell(["write", &small]);
    let text = stderr_of_failure(write.write_stdin(vec![2; 5000]), 1);
    assert!(text.contains("full after 4096 bytes"), "{text}");
}

/// Zeroes take no space in a copy, and a qcow2 image is read as the disk that it contains.
#[test]
fn copies_are_sparse_and_qcow2_is_decoded() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let mut content = vec![0; 32 << 20];
    let data = bytes(300_000);
    content[(20 << 20) + 4096..][..data.len()].copy_from_slice(&data);
    let raw = file(directory.path(), "disk.img", &content);
    for (from, to) in
        [(raw, at("a.qcow2")), (at("a.qcow2"), at("b.qcow2")), (at("b.qcow2"), at("c.img"))]
    {
        line(&format!("copy {from} {to}")).assert().success();
        let taken = fs::metadata(&to).unwrap().blocks() * 512;
        assert!(taken < 2 << 20, "{to} takes {taken} bytes");
        let read = line(&format!("read {to}")).assert().success();
        assert!(read.get_output().stdout == content, "{to}");
    }
    assert!(fs::read(at("a.qcow2")).unwrap().starts_with(b"QFI\xfb"));
    assert!(fs::read(at("c.img")).unwrap() == content);
    // The qcow2 file itself, with `format=raw`.
    let image = at("a.qcow2");
    let read = line(&format!("read {image}?format=raw --length 4")).assert().success();
    assert_eq!(read.get_output().stdout, b"QFI\xfb");
    for options in ["?format=qcow3", "?format=raw&allow-backing=on", "?read-zeroes=on"] {
        line(&format!("read {image}{options} --length 4")).assert().code(2);
    }
    let vmdk = file(directory.path(), "disk.vmdk", &[b"KDMV".as_slice(), &[0; 508]].concat());
    assert!(
        stderr_of_failure(&mut line(&format!("read {vmdk} --length 4")), 2)
            .contains("is a VMDK image")
    );
    let corrupt = file(
        directory.path(),
        "corrupt.qcow2",
        &[b"QFI\xfb\0\0\0\x03".as_slice(), &[0xff; 504]].concat(),
    );
    assert!(
        stderr_of_failure(&mut line(&format!("read {corrupt} --length 4")), 2)
            .contains("corrupt.qcow2: it is")
    );
}

/// Holes of the source are not read, and become holes of the destination whatever its content was,
/// also with different block sizes and at both ends of the disk.
#[test]
fn holes_of_the_source_are_holes_in_the_copy() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let (size, data) = (64 << 20, bytes(1 << 20));
    // First page and length in bytes of each piece of data.
    for (n, places) in [
        &[(5u64, 70_000usize), (1000, 300_000), (16_383, 4096)][..],
        &[(0, 4096), (4000, 1_000_000)],
        &[],
    ]
    .into_iter()
    .enumerate()
    {
        let source = at(&format!("source-{n}"));
        let image = fs::File::create_new(&source).unwrap();
        image.set_len(size).unwrap();
        for (page, len) in places {
            image.write_all_at(&data[..*len], page * 4096).unwrap();
        }
        for (k, (from, to)) in
            [("", "?block-size=4096"), ("?block-size=4096", ""), ("", "")].into_iter().enumerate()
        {
            let copy = file(directory.path(), &format!("copy-{n}-{k}"), &vec![0xff; size as usize]);
            line(&format!("copy {source}{from} {copy}{to} --force")).assert().success();
            assert!(fs::read(&copy).unwrap() == fs::read(&source).unwrap(), "{copy}");
            let taken = fs::metadata(&copy).unwrap().blocks() * 512;
            assert!(taken < 4 << 20, "{copy} takes {taken} bytes");
        }
    }
    // A hole of a terabyte is copied without reading or writing its blocks.
    line("copy null:1TiB?read-zeroes=on null:1TiB --force").assert().success();
}

/// A disk with a file system is not overwritten without `--force`, by any command.
#[test]
fn a_file_system_is_overwritten_only_with_force() {
    let server = Server::start(&["mem:4MiB"]);
    let directory = server.directory.path();
    // The signature that mkswap writes.
    let mut content = vec![0; 1 << 20];
    content[4086..4096].copy_from_slice(b"SWAPSPACE2");
    content[1024] = 1;
    content[1028] = 255;
    let image = file(directory, "disk.img", &content);
    let target = server.target(1);
    let other = file(directory, "other.img", &bytes(1 << 20));
    line(&format!("copy {image} {target}")).assert().success();
    for holder in [&image, &target] {
        for verb in [
            format!("verify {holder} --number-ios 10 --max-bs 4k"),
            format!("bench {holder} --rw randrw --number-ios 10"),
            format!("write {holder} -i {other}"),
            format!("copy {other} {holder}"),
        ] {
            let printed = stderr_of_failure(&mut line(&verb), 2);
            let words = format!("{holder} holds swap, which would be overwritten");
            assert!(printed.contains(&words) && printed.contains("--force"), "{verb}: {printed}");
        }
        // Reading commands need no `--force`.
        line(&format!("bench {holder} --number-ios 10")).assert().success();
    }
    assert!(fs::read(&image).unwrap() == content);
    line(&format!("verify {target} --number-ios 10 --max-bs 4k --force")).assert().success();
    // A copy over the swap signature needs `--force`; a copy after that does not.
    line(&format!("copy {other} {target} --force")).assert().success();
    line(&format!("copy {other} {target}")).assert().success();
    line(&format!("copy {other} {image} --force")).assert().success();
    line(&format!("bench {image} --rw write --number-ios 10")).assert().success();
}

/// An interrupted copy leaves no file that could be mistaken for a complete one.
#[test]
fn an_interrupted_copy_removes_a_new_file_or_reports_an_old_one() {
    const SLOW: &str = "mem:64MiB?read-bandwidth=1MiB";
    let directory = tempfile::tempdir().unwrap();
    let interrupt = |destination: &std::path::Path, began: &dyn Fn() -> bool| {
        let mut copy = std::process::Command::new(env!("CARGO_BIN_EXE_shadowbell"));
        copy.args(["copy", SLOW, destination.to_str().unwrap(), "-v"]);
        let copy = ProcessGroup::spawn(copy.stderr(std::process::Stdio::piped())).unwrap();
        until("the first blocks", began);
        copy.signal(rustix::process::Signal::INT);
        let output = copy.output();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let new = directory.path().join("new.img");
    let text = interrupt(&new, &|| new.exists());
    assert!(!new.exists() && text.contains("new.img was incomplete, and is removed"), "{text}");
    // An existing destination is not removed. It contains the data that were copied so far.
    let there = directory.path().join("there.img");
    fs::write(&there, vec![7; 64 << 20]).unwrap();
    let text = interrupt(&there, &|| fs::read(&there).is_ok_and(|bytes| bytes[0] == 0));
    assert!(text.contains("there.img has the first ") && text.contains(" of 67108864"), "{text}");
    assert!(there.exists() && !text.contains("removed"), "{text}");
}
