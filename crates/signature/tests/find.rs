//! The crate finds the signatures that `mkfs` and other programs write, and reports no signature in
//! other contents.

use shadowbell_signature::{FindError, SPAN, find};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

const BYTES: u64 = 64 << 20;

/// Returns the signature that is found in `image`, read as a caller of the crate does.
fn found(image: &File) -> Option<String> {
    let (mut first, mut last) = (vec![0; SPAN], vec![0; SPAN]);
    image.read_exact_at(&mut first, 0).unwrap();
    image.read_exact_at(&mut last, BYTES - SPAN as u64).unwrap();
    match find(BYTES, &first, &last) {
        Ok(found) => found.map(|found| found.to_string()),
        Err(FindError::Library(why)) => panic!("every Debian has libblkid: {why}"),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn signatures_of_common_formats_are_found() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let image = file.as_file();
    image.set_len(BYTES).unwrap();
    assert_eq!(found(image), None);
    image.write_all_at(&[0xa5; 65536], 0).unwrap();
    assert_eq!(found(image), None, "blocks of our own are nothing to keep");

    // A swap area. Its signature is at the end of the first page.
    let mut swap = vec![0; SPAN];
    swap[4086..4096].copy_from_slice(b"SWAPSPACE2");
    swap[1024] = 1;
    swap[1028] = 255;
    image.write_all_at(&swap, 0).unwrap();
    assert_eq!(found(image).as_deref(), Some("swap"));
    image.write_all_at(&vec![0; SPAN], 0).unwrap();
    for (program, arguments, name) in [
        ("mkfs.ext4", &["-q", "-F"][..], "ext4"),
        ("sfdisk", &["--quiet", "--label", "gpt"], "a partition table (gpt)"),
        ("mkfs.xfs", &["-q", "-f"], "xfs"),
        ("mkfs.btrfs", &["-q", "-f"], "btrfs"),
    ] {
        let mut command = Command::new(program);
        command.args(arguments).arg(file.path()).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // A program is skipped if it is not installed or needs a larger image.
        if !command.status().is_ok_and(|status| status.success()) {
            println!("{program}: not here");
            continue;
        }
        assert_eq!(found(image).as_deref(), Some(name));
        image.set_len(0).unwrap();
        image.set_len(BYTES).unwrap();
    }
}

#[test]
fn small_and_large_disks_are_accepted() {
    assert_eq!(find(512, &[0; 512], &[0; 512]).unwrap(), None);
    assert_eq!(find(1 << 50, &[0; 4096], &[0; 4096]).unwrap(), None);
    find(512, &[0; 1024], &[]).unwrap_err();
}
