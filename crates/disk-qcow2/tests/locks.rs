//! Locks of images, with QEMU's programs: each detects the other.

mod common;

use common::{directory, open, qemu_img_does, try_open};
use shadowbell_disk_qcow2::{OpenError, Qcow2Disk};
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::programs::skipped;
use shadowbell_testing::wait::until;
use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};

/// Use of an image.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Use {
    Read,
    Write,
    /// `qemu-img resize`.
    Resize,
    /// The image is read because it is the backing file of another image.
    Base,
    /// Read although others may write (`-U`).
    ForceShare,
}

/// Program that uses an image until it is dropped.
enum Holder {
    Ours { _disk: Box<Qcow2Disk> },
    Qemu { _process: ProcessGroup, _input: ChildStdin },
}

/// Image with an overlay.
struct Images {
    directory: tempfile::TempDir,
}

impl Images {
    fn new() -> Option<Self> {
        let directory = directory();
        let images = Self { directory };
        let is_qemu_io_there = Command::new("qemu-io").arg("--version").output().is_ok();
        if !is_qemu_io_there {
            skipped("`qemu-io` is not here; it is in Debian's qemu-utils");
            return None;
        }
        let (base, top) = (images.path(Use::Read), images.path(Use::Base));
        (qemu_img_does(&["create", "-q", "-fqcow2", &base, "1M"])
            && qemu_img_does(&["create", "-q", "-fqcow2", "-b", &base, "-Fqcow2", &top]))
        .then_some(images)
    }

    /// Path of the image to open. For the use as a base, it is the path of the overlay.
    fn path(&self, how: Use) -> String {
        let name = if how == Use::Base { "top.qcow2" } else { "base.qcow2" };
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    /// Opens the image with Shadowbell.
    fn ours(&self, how: Use) -> Result<Qcow2Disk, OpenError> {
        let options = match how {
            Use::Read => "?read-only=on",
            Use::Write => "",
            Use::Base => "?allow-backing=on",
            Use::Resize | Use::ForceShare => unreachable!("no use of ours"),
        };
        try_open(Path::new(&self.path(how)), options)
    }

    /// QEMU's command for this use of the image: `qemu-img resize`, or a `qemu-io` that waits for
    /// commands on its standard input.
    fn qemu(&self, how: Use) -> Command {
        let mut command = Command::new("qemu-io");
        match how {
            Use::Read => command.arg("-r"),
            Use::Write | Use::Base => &mut command,
            Use::ForceShare => command.args(["-r", "-U"]),
            Use::Resize => {
                let mut resize = Command::new("qemu-img");
                resize.args(["resize", "-q", "-fqcow2", &self.path(how), "+64K"]);
                return resize;
            }
        };
        command.args(["-fqcow2", &self.path(how)]);
        command
    }

    /// Returns true if QEMU can use the image. Otherwise, QEMU must report that the image is
    /// locked.
    fn qemu_may(&self, how: Use) -> bool {
        let mut command = self.qemu(how);
        if how != Use::Resize {
            command.args(["-c", "read 0 512"]);
        }
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let is_locked = said.contains("Failed to get");
        assert_eq!(is_locked, !output.status.success(), "{how:?}: {output:?}");
        !is_locked
    }

    fn ours_may(&self, how: Use) -> bool {
        match self.ours(how) {
            Ok(_) => true,
            Err(OpenError::File(shadowbell_disk::OpenError::Busy { .. })) => false,
            Err(error) => panic!("{how:?}: {error}"),
        }
    }

    /// Uses the image until the result is dropped.
    fn hold(&self, is_ours: bool, how: Use) -> Holder {
        if is_ours {
            let mut disk = None;
            until("the image is free", || {
                disk = self.ours(how).ok();
                disk.is_some()
            });
            return Holder::Ours { _disk: Box::new(disk.unwrap()) };
        }
        until("the image is free", || self.qemu_may(how));
        let mut command = self.qemu(how);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = ProcessGroup::spawn(&mut command).unwrap();
        let mut input = process.stdin.take().unwrap();
        input.write_all(b"read 0 512\n").unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let opened =
            lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("read 512/512")));
        assert!(opened.is_some(), "{how:?}: qemu-io did not open the image");
        Holder::Qemu { _process: process, _input: input }
    }
}

/// True if `second` is possible while the image is used as in `first`. By QEMU's rules, no program
/// permits others to write, and a resize is a write.
fn is_possible(first: Use, second: Use) -> bool {
    let writes = |how| matches!(how, Use::Write | Use::Resize);
    match (first, second) {
        (Use::ForceShare, _) | (_, Use::ForceShare) => true,
        (first, second) => !writes(first) && !writes(second),
    }
}

#[test]
fn the_locks_of_an_image_are_those_of_qemu() {
    let Some(images) = Images::new() else { return };
    let ours = [Use::Read, Use::Write, Use::Base];
    let qemus = [Use::Read, Use::Write, Use::Resize, Use::Base, Use::ForceShare];
    let mut tried = 0;
    for first_is_ours in [true, false] {
        let firsts = if first_is_ours { &ours[..] } else { &qemus[..] };
        for first in firsts.iter().copied().filter(|how| *how != Use::Resize) {
            for second_is_ours in [true, false] {
                let seconds = if second_is_ours { &ours[..] } else { &qemus[..] };
                for second in seconds.iter().copied() {
                    // Both programs would write to the same overlay. Then the overlay's lock would
                    // exclude the second program, and the lock of the base image would not be
                    // tested.
                    if (first, second) == (Use::Base, Use::Base) {
                        continue;
                    }
                    let what = format!(
                        "{first:?} (ours: {first_is_ours}), then {second:?} (ours: {second_is_ours})"
                    );
                    let _held = images.hold(first_is_ours, first);
                    let may = || {
                        if second_is_ours {
                            images.ours_may(second)
                        } else {
                            images.qemu_may(second)
                        }
                    };
                    if is_possible(first, second) {
                        // The attempt is repeated: another test may have forked a child process,
                        // which still holds locks of earlier uses.
                        until(&what, may);
                    } else {
                        assert!(!may(), "{what}: both may");
                    }
                    tried += 1;
                }
            }
        }
    }
    assert_eq!(tried, 7 * 8 - 4);
}

/// A Shadowbell server and a VM share a base image, and no program can write it.
#[test]
fn readers_of_a_shared_base_exclude_writers_only() {
    let Some(images) = Images::new() else { return };
    let base = images.path(Use::Read);
    let second = images.directory.path().join("second.qcow2");
    let second = second.to_str().unwrap();
    assert!(qemu_img_does(&["create", "-q", "-fqcow2", "-b", &base, "-Fqcow2", second]));
    let _first = images.hold(true, Use::Base);
    let _second = open(Path::new(second), "?allow-backing=on");
    assert!(!images.qemu_may(Use::Write) && !images.ours_may(Use::Write));
    assert!(images.qemu_may(Use::Read) && images.ours_may(Use::Read));
}
