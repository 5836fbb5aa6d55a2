//! Random images that QEMU has created, with all features of the format in random combinations.
//! QEMU and this crate write to an image alternately. After each change, both read the same data,
//! and `qemu-img check` finds no error.

mod common;

use common::{Random, check_whole, content, directory, open, qemu_img_does, run_one, write};
use shadowbell_disk::{Disk, Op};
use shadowbell_memory::Segments;
use shadowbell_testing::programs::can_run;
use std::path::Path;
use std::process::Command;

const SIZE: u64 = 2 << 20;
/// Number of images per test, and number of times that both programs change an image.
const IMAGES: u64 = 12;
const TURNS: u64 = 3;

/// Random features of an image.
struct Features {
    options: String,
    cluster: u64,
    has_base: bool,
    has_snapshot: bool,
}

impl Features {
    fn random(random: &mut Random) -> Self {
        let has_subclusters = random.below(4) == 0;
        let bits = if has_subclusters { 14 + random.below(5) } else { 9 + random.below(13) };
        let width = 1 << random.below(7);
        let version = if has_subclusters || random.below(4) != 0 { "1.1" } else { "0.10" };
        let mut options = format!("cluster_size={},compat={version}", 1 << bits);
        if version == "1.1" {
            let method = ["zlib", "zstd"][random.below(2) as usize];
            options += &format!(",refcount_bits={width},compression_type={method}");
            options += if has_subclusters { ",extended_l2=on" } else { "" };
            options += if random.below(3) == 0 { ",lazy_refcounts=on" } else { "" };
        }
        Self {
            options,
            cluster: 1 << bits,
            has_base: random.below(2) == 0,
            has_snapshot: width > 1 && random.below(2) == 0,
        }
    }
}

/// Changes an image by `qemu-io`: single bytes that are repeated, zeroes, and compressed clusters
/// if nothing was written before.
fn change_by_qemu(path: &Path, model: &mut [u8], random: &mut Random, compress: Option<u64>) {
    let mut arguments = vec!["-f".to_owned(), "qcow2".to_owned()];
    let mut add = |command: String| arguments.extend(["-c".to_owned(), command]);
    for cluster in 0..compress.map_or(0, |cluster| SIZE / cluster).min(64) {
        if random.below(3) == 0 {
            let (at, len) = (cluster * compress.unwrap(), compress.unwrap());
            let byte = 1 + random.below(255) as u8;
            add(format!("write -c -P {byte} {at} {len}"));
            model[at as usize..(at + len) as usize].fill(byte);
        }
    }
    for _ in 0..6 {
        let (at, len) = range(random);
        let byte = random.below(256) as u8;
        let (command, byte) = match random.below(4) {
            0 => (format!("write -z {at} {len}"), 0),
            1 => (format!("write -z -u {at} {len}"), 0),
            _ => (format!("write -P {byte} {at} {len}"), byte),
        };
        add(command);
        model[at as usize..(at + len) as usize].fill(byte);
    }
    arguments.push(path.to_str().unwrap().to_owned());
    let output = Command::new("qemu-io").args(&arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && !said.contains("failed"), "{arguments:?}: {output:?}");
}

fn range(random: &mut Random) -> (u64, u64) {
    let first = random.below(SIZE / 512);
    let most = if random.below(3) == 0 { SIZE / 512 } else { 64 };
    (first * 512, (1 + random.below(most.min(SIZE / 512 - first))) * 512)
}

/// Changes an image by this crate.
fn change(disk: &dyn Disk, model: &mut [u8], random: &mut Random) {
    let mut queue = disk.queue().unwrap();
    for _ in 0..6 {
        let (at, len) = range(random);
        let op = match random.below(5) {
            0 => Op::Discard,
            1 => Op::WriteZeroes { deallocate: random.below(2) == 0, fua: false },
            _ => Op::Write { fua: false },
        };
        let part = &mut model[at as usize..(at + len) as usize];
        if matches!(op, Op::Write { .. }) {
            part.copy_from_slice(&random.bytes(len as usize));
            write(&mut *queue, at, part).unwrap();
            continue;
        }
        run_one(&mut *queue, op, at, len, Segments::new()).unwrap();
        if op != Op::Discard || disk.info().discard {
            part.fill(0);
        }
    }
}

fn same_to_qemu(path: &Path, model: &[u8]) {
    let raw = path.with_extension("raw");
    std::fs::write(&raw, model).unwrap();
    let (path, raw) = (path.to_str().unwrap(), raw.to_str().unwrap());
    qemu_img_does(&["compare", "-f", "qcow2", "-F", "raw", path, raw]);
}

fn images(seed: u64) {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    let (name, size) = (path.to_str().unwrap(), SIZE.to_string());
    if !qemu_img_does(&["--version"]) || !can_run("qemu-io") {
        return;
    }
    let mut random = Random(seed);
    let base = Random(seed + 1).bytes(SIZE as usize / 3 / 512 * 512);
    std::fs::write(directory.path().join("base"), &base).unwrap();
    for nth in 0..IMAGES {
        let features = Features::random(&mut random);
        println!("image {nth}: {}, base {}", features.options, features.has_base);
        let _ = std::fs::remove_file(&path);
        let below: &[&str] = if features.has_base { &["-b", "base", "-F", "raw"] } else { &[] };
        let create = ["create", "-q", "-f", "qcow2", "-o", &features.options];
        qemu_img_does(&[&create, below, &[name, &size]].concat());
        let mut model = vec![0; SIZE as usize];
        if features.has_base {
            model[..base.len()].copy_from_slice(&base);
        }
        let mut kept = None;
        for turn in 0..TURNS {
            let compress = (turn == 0).then_some(features.cluster);
            change_by_qemu(&path, &mut model, &mut random, compress);
            if turn == 1 && features.has_snapshot {
                qemu_img_does(&["snapshot", "-c", "one", name]);
                kept = Some(model.clone());
            }
            let disk = open(&path, "?allow-backing=on");
            assert!(content(&disk) == model, "turn {turn}: written by QEMU");
            change(&disk, &mut model, &mut random);
            assert!(content(&disk) == model, "turn {turn}: written here");
            drop(disk);
            check_whole(&path);
            same_to_qemu(&path, &model);
        }
        if let Some(kept) = kept {
            qemu_img_does(&["snapshot", "-a", "one", name]);
            same_to_qemu(&path, &kept);
        }
    }
}

#[test]
fn random_images_in_turns_with_qemu() {
    images(101);
}

#[test]
fn more_random_images_in_turns_with_qemu() {
    images(202);
}
