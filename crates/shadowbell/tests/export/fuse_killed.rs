//! A file mounted by FUSE whose server process is killed again and again.

use crate::killed::{Image, kills_of_each};
use crate::{Export, skipped};
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_testing::wait::until;
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const BYTES: u64 = 16 << 20;
const PAGE: usize = 4096;

/// Writes pages of the mounted file until `is_over`, each filled with a number, and reads some of
/// them back. Stores the number of writes in `written`. Returns the last number of each written
/// page.
fn write_pages(mounted: &Path, is_over: &AtomicBool, written: &AtomicU64) -> HashMap<u64, u64> {
    let file = OpenOptions::new().read(true).write(true).open(mounted).unwrap();
    let mut pages = HashMap::new();
    let mut number = 0_u64;
    while !is_over.load(Ordering::Relaxed) {
        number += 1;
        // Consecutive numbers are far apart, so that most writes of an image allocate clusters.
        let page = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & (BYTES / PAGE as u64 - 1);
        let content: Vec<u8> = number.to_le_bytes().repeat(PAGE / 8);
        file.write_all_at(&content, page * PAGE as u64).unwrap();
        pages.insert(page, number);
        written.store(number, Ordering::Relaxed);
        if number.is_multiple_of(16) {
            let mut read = vec![0; PAGE];
            file.read_exact_at(&mut read, page * PAGE as u64).unwrap();
            assert!(read == content, "page {page} differs from write {number}");
        }
    }
    pages
}

/// A write that was answered is in the image, however often the server process is killed. The test
/// runs for each kind of image, and for an image of an NBD server.
#[test]
fn a_load_on_a_mounted_file_survives_kills_of_the_server_process() {
    let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    if !rustix::process::geteuid().is_root() || fuse.is_err() {
        skipped("this takes root and /dev/fuse");
        return;
    }
    let images = Image::all();
    let disks: Vec<_> =
        images.iter().map(|image| (*image, false)).chain([(Image::Raw, true)]).collect();
    let kills = kills_of_each(disks.len(), 3);
    for (image, is_remote) in disks {
        let mut directory = tempfile::tempdir().unwrap();
        let mut target = image.create(directory.path(), BYTES).to_owned();
        // The image is then exported by another process, which is not killed.
        let below = is_remote.then(|| {
            let image = std::mem::replace(&mut directory, tempfile::tempdir().unwrap());
            let nbd = [&*target, "--nbd", "unix:DIR/nbd", "--no-supervisor"];
            let below = Export::run_with(image, &nbd, &[]);
            until("the NBD server", || below.stderr().contains("exporting"));
            target = format!("nbd+unix:///?socket={}&settle=50ms", below.path("nbd").display());
            below
        });
        let mut export = Export::run_with(directory, &[&target, "--fuse", "DIR/mounted"], &[]);
        until("the export", || {
            let ended = export.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", export.stderr());
            export.stderr().contains("exporting")
        });
        let supervisor = export.child.id();
        let server = || {
            let children = format!("/proc/{supervisor}/task/{supervisor}/children");
            let children = std::fs::read_to_string(children).unwrap();
            children.split_whitespace().next().map(|pid| pid.parse::<i32>().unwrap())
        };
        let (is_over, mounted) = (AtomicBool::new(false), export.path("mounted"));
        let written = AtomicU64::new(0);
        let pages = std::thread::scope(|scope| {
            let load = scope.spawn(|| write_pages(&mounted, &is_over, &written));
            for nth in 0..kills as u64 {
                // Each process serves, so that the supervisor detects no crash loop. The kill comes
                // at an arbitrary moment afterwards.
                let count = written.load(Ordering::Relaxed);
                until("a further write", || {
                    load.is_finished() || written.load(Ordering::Relaxed) > count
                });
                if load.is_finished() {
                    break;
                }
                // The moment of the kill.
                std::thread::sleep(Duration::from_millis(60 + nth * 37 % 90));
                let before = server().unwrap();
                kill_process(Pid::from_raw(before).unwrap(), Signal::KILL).unwrap();
                until("another server process", || server().is_some_and(|now| now != before));
            }
            is_over.store(true, Ordering::Relaxed);
            load.join().unwrap()
        });
        assert!(!pages.is_empty());
        let directory = export.end();
        let directory = below.map_or(directory, Export::end);
        let content = image.content(directory.path());
        for (page, number) in pages {
            let found = &content[page as usize * PAGE..][..PAGE];
            assert!(
                found == number.to_le_bytes().repeat(PAGE / 8),
                "{image:?}: page {page} is lost"
            );
        }
    }
}
