//! Test of every operation on every kind of qcow2 image, in batches, against a model in memory.
//! Afterwards, QEMU checks the image.

mod common;

use common::{check_whole, content, directory, open, qemu_img_does};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use shadowbell_disk::Disk;
use shadowbell_testing::disks::{Random, batch};
use std::path::Path;

/// Size of the disk in bytes.
const SIZE: usize = 4 << 20;
const BATCHES: usize = 12;

/// Runs random batches on images that `fresh` creates. `fresh` returns the initial contents of the
/// image.
fn cases(path: &Path, options: &str, fresh: impl Fn() -> Vec<u8>) {
    let config = Config { cases: 5, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&any::<u64>(), |seed| {
            let _ = std::fs::remove_file(path);
            let mut model = fresh();
            let mut random = Random(seed | 1);
            let mut disk = open(path, options);
            assert_eq!(disk.info().bytes(), SIZE as u64);
            for _ in 0..1 + random.below(3) {
                let mut queue = disk.queue().unwrap();
                for _ in 0..random.below(BATCHES as u64) {
                    batch(&disk, &mut *queue, &mut model, &mut random);
                }
                drop(queue);
                drop(disk);
                check_whole(path);
                disk = open(path, options);
            }
            assert!(content(&disk) == model, "the disk differs at the end");
            drop(disk);
            same_to_qemu(path, &model);
            Ok(())
        })
        .unwrap();
}

/// Checks that QEMU reads the same contents as the model has.
fn same_to_qemu(path: &Path, model: &[u8]) {
    let raw = path.with_extension("raw");
    std::fs::write(&raw, model).unwrap();
    let (path, raw) = (path.to_str().unwrap(), raw.to_str().unwrap());
    qemu_img_does(&["compare", "-f", "qcow2", "-F", "raw", path, raw]);
}

fn on_new(options: &str) {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    cases(&path, options, || {
        shadowbell_disk_qcow2::create(&path, SIZE as u64).unwrap();
        vec![0; SIZE]
    });
}

fn on_qemus(create: &str) {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    let name = path.to_str().unwrap();
    if !qemu_img_does(&["create", "-f", "qcow2", "-o", create, name, "4M"]) {
        return;
    }
    cases(&path, "", || {
        qemu_img_does(&["create", "-f", "qcow2", "-o", create, name, "4M"]);
        vec![0; SIZE]
    });
}

#[test]
fn new_512() {
    on_new("");
}

#[test]
fn new_4096() {
    on_new("?block-size=4096");
}

#[test]
fn new_through_the_page_cache() {
    on_new("?direct=off");
}

#[test]
fn smallest_clusters() {
    on_qemus("cluster_size=512");
}

#[test]
fn largest_clusters() {
    on_qemus("cluster_size=2M");
}

#[test]
fn narrow_reference_counts() {
    on_qemus("cluster_size=1k,refcount_bits=1");
}

#[test]
fn version_2() {
    on_qemus("compat=0.10");
}

#[test]
fn preallocated() {
    on_qemus("preallocation=metadata");
}

#[test]
fn wide_reference_counts() {
    on_qemus("cluster_size=512,refcount_bits=64");
}

#[test]
fn subclusters() {
    on_qemus("extended_l2=on,cluster_size=64k");
}

#[test]
fn small_subclusters_without_the_fast_path() {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    let create = ["create", "-f", "qcow2", "-o", "extended_l2=on,cluster_size=16k"];
    let create = [&create[..], &[path.to_str().unwrap(), "4M"]].concat();
    if qemu_img_does(&create) {
        cases(&path, "?aio=threads", || {
            qemu_img_does(&create);
            vec![0; SIZE]
        });
    }
}

fn on_data_file(options: &str) {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    let name = path.to_str().unwrap();
    let data = directory.path().join("data");
    let options = format!("data_file={},{options}", data.display());
    let create = ["create", "-f", "qcow2", "-o", &options, name, "4M"];
    if qemu_img_does(&create) {
        cases(&path, "?allow-backing=on", || {
            let _ = std::fs::remove_file(&data);
            qemu_img_does(&create);
            vec![0; SIZE]
        });
    }
}

#[test]
fn data_file() {
    on_data_file("cluster_size=64k");
}

#[test]
fn raw_data_file() {
    on_data_file("data_file_raw=on");
}

#[test]
fn compressed_clusters() {
    on_compressed("compression_type=zlib");
}

#[test]
fn compressed_clusters_with_zstd() {
    on_compressed("compression_type=zstd,cluster_size=32k");
}

fn on_compressed(options: &str) {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    let source = directory.path().join("source.raw");
    let first: Vec<u8> = (0..SIZE).map(|at| (at >> 12) as u8).collect();
    std::fs::write(&source, &first).unwrap();
    let (source, name) = (source.to_str().unwrap(), path.to_str().unwrap());
    let convert = ["convert", "-c", "-o", options, "-f", "raw", "-O", "qcow2", source, name];
    if qemu_img_does(&convert) {
        cases(&path, "", || {
            qemu_img_does(&convert);
            first.clone()
        });
    }
}

fn on_backing(format: &str, options: &str) {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    let base = directory.path().join("base");
    let raw = directory.path().join("base.raw");
    let first = Random(7).bytes(SIZE / 2);
    std::fs::write(&raw, &first).unwrap();
    let name = |path: &Path| path.to_str().unwrap().to_owned();
    // The backing file is shorter than the disk. The disk reads as zeroes beyond the end of that
    // file.
    if !qemu_img_does(&["convert", "-f", "raw", "-O", format, &name(&raw), &name(&base)]) {
        return;
    }
    cases(&path, "?allow-backing=on", || {
        let create = ["create", "-f", "qcow2", "-o", options, "-b", "base", "-F", format];
        qemu_img_does(&[&create[..], &[&name(&path), "4M"]].concat());
        let mut content = first.clone();
        content.resize(SIZE, 0);
        content
    });
    assert!(std::fs::read(&raw).unwrap() == first);
    let (base, raw) = (name(&base), name(&raw));
    qemu_img_does(&["compare", "-f", format, "-F", "raw", &base, &raw]);
}

#[test]
fn above_a_raw_image() {
    on_backing("raw", "cluster_size=64k");
}

#[test]
fn above_a_qcow2_image() {
    on_backing("qcow2", "cluster_size=4k");
}

#[test]
fn version_2_above_a_qcow2_image() {
    on_backing("qcow2", "compat=0.10");
}

#[test]
fn subclusters_above_a_qcow2_image() {
    on_backing("qcow2", "extended_l2=on,cluster_size=32k");
}

/// Writes to the image do not change the contents of its snapshots.
#[test]
fn above_snapshots() {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    shadowbell_disk_qcow2::create(&path, SIZE as u64).unwrap();
    let mut random = Random(99);
    let mut model = vec![0; SIZE];
    let name = path.to_str().unwrap();
    let step = |model: &mut [u8], random: &mut Random| {
        let disk = open(&path, "");
        let mut queue = disk.queue().unwrap();
        for _ in 0..10 {
            batch(&disk, &mut *queue, model, random);
        }
    };
    step(&mut model, &mut random);
    let before = model.clone();
    if !qemu_img_does(&["snapshot", "-c", "one", name]) {
        return;
    }
    for _ in 0..5 {
        step(&mut model, &mut random);
        check_whole(&path);
    }
    same_to_qemu(&path, &model);
    qemu_img_does(&["snapshot", "-a", "one", name]);
    same_to_qemu(&path, &before);
}
