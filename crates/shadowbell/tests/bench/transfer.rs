//! `read`, `write` and `copy`.

use crate::harness::{Server, bytes, complaint, file, line, shadowbell};
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait::until;
use std::fs;

#[test]
fn what_was_written_is_read() {
    let server = Server::start(&["mem:8MiB", "mem:8MiB?block-size=4096"]);
    let directory = server.directory.path();
    // More than one request, and odd at both ends.
    let content = bytes(3_000_001);
    for nsid in [1, 2] {
        let target = server.target(nsid);
        let input = file(directory, "in", &content);
        line(&format!("write {target} --offset 12345 -i {input}")).assert().success();
        let read =
            line(&format!("read {target} --offset 12345 --length 3000001")).assert().success();
        assert!(read.get_output().stdout == content, "namespace {nsid}");
        // `-` is standard output, and no file.
        let mut dash = line(&format!("read {target} --offset 12345 --length 100 -o -"));
        let dash = dash.current_dir(directory).assert().success();
        assert_eq!(dash.get_output().stdout, &content[..100]);
        assert!(!directory.join("-").exists());
        let output = directory.join("out");
        line(&format!("read {target} -o {}", output.display())).assert().success();
        let all = fs::read(output).unwrap();
        assert_eq!(all.len(), 8 << 20);
        assert!(all[12_345..12_345 + content.len()] == content);
        // The rest of the blocks at both ends is as it was.
        assert!(all[..12_345].iter().all(|byte| *byte == 0));
        assert!(all[12_345 + content.len()..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn a_few_bytes_in_a_block_leave_the_rest_alone() {
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
    // Nothing at all is not much, but possible.
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
    // Between two namespaces of a controller, which has one host at a time.
    line(&format!("copy {one} {two}")).assert().success();
    // Into a file that is made for it.
    let backup = directory.join("backup.img");
    line(&format!("copy {two} {}", backup.display())).assert().success();
    let copied = fs::read(&backup).unwrap();
    assert_eq!(copied.len(), 5 << 20);
    assert!(copied.starts_with(&content));
    assert!(copied[content.len()..].iter().all(|byte| *byte == 0));
}

#[test]
fn what_can_not_be_moved_is_refused_with_the_reason() {
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
        (format!("copy {large} {small}"), "room for 4096 only"),
        (format!("copy {small} {small}"), "the source and the destination"),
        (format!("copy {path}/missing {small}"), "missing"),
        (format!("copy {small} {path}/no/new.img"), "new.img"),
        (format!("read {small} --length lots"), "no size"),
    ] {
        let text = complaint(&mut line(&arguments), 2);
        assert!(text.contains(words), "{arguments}: {text}");
    }
    assert_eq!(fs::read(&small).unwrap(), [0; 4096], "nothing was written");
    // A disk that is in use does not become the output: not that of this program, by whatever name,
    // and not that of another.
    let link = directory.path().join("link.img");
    fs::hard_link(&large, &link).unwrap();
    let server = Server::start(&[&small]);
    for (from, output) in [(&*large, &*large), (&large, link.to_str().unwrap()), (&large, &small)] {
        let text = complaint(&mut line(&format!("read {from} -o {output}")), 2);
        assert!(text.contains(&format!("{output} is a disk that is in use")), "{text}");
    }
    assert_eq!(fs::read(&large).unwrap(), [1; 8192]);
    assert_eq!(fs::read(&small).unwrap(), [0; 4096]);
    drop(server);
    // A stream whose length nobody knows is found out about on the way.
    let mut write = shadowbell(["write", &small]);
    let text = complaint(write.write_stdin(vec![2; 5000]), 1);
    assert!(text.contains("full after 4096 bytes"), "{text}");
}

/// What is zero takes no room in a copy, and an image of QEMU's is served as the disk that it is.
#[test]
fn copies_are_sparse_and_qcow2_images_are_disks() {
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
    // The file itself, for whoever asks for it.
    let image = at("a.qcow2");
    let read = line(&format!("read {image}?format=raw --length 4")).assert().success();
    assert_eq!(read.get_output().stdout, b"QFI\xfb");
    for options in ["?format=qcow3", "?format=raw&allow-backing=on", "?read-zeroes=on"] {
        line(&format!("read {image}{options} --length 4")).assert().code(2);
    }
    let vmdk = file(directory.path(), "disk.vmdk", &[b"KDMV".as_slice(), &[0; 508]].concat());
    assert!(
        complaint(&mut line(&format!("read {vmdk} --length 4")), 2).contains("is a VMDK image")
    );
    let corrupt = file(
        directory.path(),
        "corrupt.qcow2",
        &[b"QFI\xfb\0\0\0\x03".as_slice(), &[0xff; 504]].concat(),
    );
    assert!(
        complaint(&mut line(&format!("read {corrupt} --length 4")), 2)
            .contains("corrupt.qcow2: it is")
    );
}

/// Holes of the source are not read, and are holes afterwards, whatever was there before: also where
/// the blocks of the two differ, and at the ends.
#[test]
fn holes_are_holes_in_the_copy() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let (size, data) = (64 << 20, bytes(1 << 20));
    // Where data begin, in pages, and how many bytes of them there are.
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
    // A terabyte of nothing is no work.
    line("copy null:1TiB?read-zeroes=on null:1TiB --force").assert().success();
}

/// What somebody has made is not overwritten unasked, whatever the way to it is.
#[test]
fn a_file_system_is_overwritten_if_that_is_meant() {
    let server = Server::start(&["mem:4MiB"]);
    let directory = server.directory.path();
    // What mkswap leaves.
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
            let said = complaint(&mut line(&verb), 2);
            let words = format!("{holder} holds swap, which would be overwritten");
            assert!(said.contains(&words) && said.contains("--force"), "{verb}: {said}");
        }
        // Who only reads is not asked.
        line(&format!("bench {holder} --number-ios 10")).assert().success();
    }
    assert!(fs::read(&image).unwrap() == content);
    line(&format!("verify {target} --number-ios 10 --max-bs 4k --force")).assert().success();
    // Now it holds nothing.
    line(&format!("copy {other} {target} --force")).assert().success();
    line(&format!("copy {other} {target}")).assert().success();
    line(&format!("copy {other} {image} --force")).assert().success();
    line(&format!("bench {image} --rw write --number-ios 10")).assert().success();
}

/// What an interrupted copy has made is no disk that somebody could take for the whole one.
#[test]
fn an_interrupted_copy_removes_or_names_what_it_has_written() {
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
    // What was there before stays, with what has come to it. Written blocks begin at the first.
    let there = directory.path().join("there.img");
    fs::write(&there, vec![7; 64 << 20]).unwrap();
    let text = interrupt(&there, &|| fs::read(&there).is_ok_and(|bytes| bytes[0] == 0));
    assert!(text.contains("there.img has the first ") && text.contains(" of 67108864"), "{text}");
    assert!(there.exists() && !text.contains("removed"), "{text}");
}
