//! A qcow2 image by an untrusted author, and requests on it.
//!
//! The image is valid at first: tables, data, zero clusters, a snapshot. Then any of its fields are
//! changed. This body checks that
//!
//! * opening the image, and each request, ends without a panic and with bounded memory;
//! * requests on an unchanged image succeed and have the results of a model;
//! * an unchanged image can be opened again, with the same content.

use crate::limits::Limits;
use crate::source::Source;
use rustix::fs::{MemfdFlags, memfd_create};
use shadowbell_disk::{Disk, Op};
use shadowbell_disk_file::{Aio, Direct, FileOptions};
use shadowbell_disk_qcow2::Qcow2Disk;
use shadowbell_memory::{Segments, is_panic_contained};
use shadowbell_testing::disks::{content, memory, run_one};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

const ACTIONS: usize = 40;
const BLOCK: u64 = 512;
/// Maximum length of a request.
const MOST: u64 = 128 << 10;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// Number of panics that the qcow2 crate has caught.
static PANICS: AtomicU64 = AtomicU64::new(0);

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    count_panics();
    let mut source = Source::new(input);
    let limits = Limits::begin();
    let before = PANICS.load(Ordering::Relaxed);
    let mut image = Image::new(&mut source);
    image.damage(&mut source);
    let disk = image.open(source.bool());
    limits.step("qcow2");
    if let Some(disk) = disk {
        let mut queue = disk.queue().expect("a queue");
        for _ in 0..ACTIONS {
            if source.is_empty() {
                break;
            }
            image.act(&disk, &mut *queue, &mut source);
            limits.step("qcow2");
        }
    }
    if let Some(model) = &image.model {
        let disk = image.open(true).expect("an unchanged image is valid");
        assert!(content(&disk) == *model, "the image differs when it is opened again");
    }
    assert_eq!(PANICS.load(Ordering::Relaxed), before, "a panic was contained");
    limits.step("qcow2");
}

/// Installs a panic hook that counts the panics that the qcow2 crate catches.
fn count_panics() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if is_panic_contained() {
                PANICS.fetch_add(1, Ordering::Relaxed);
            }
            previous(info);
        }));
    });
}

struct Image {
    file: File,
    /// Content of the disk. `None` if it is unknown, because the image was changed.
    model: Option<Vec<u8>>,
    bits: u32,
    size: u64,
    /// Fields of the image's structures that the program may change: offset and length, in bytes.
    fields: Vec<(u64, usize)>,
    /// Number of clusters of the file.
    clusters: u64,
}

impl Image {
    /// Creates a valid image.
    fn new(source: &mut Source<'_>) -> Self {
        let version = source.of(&[2, 3, 3, 3]);
        let bits = source.of(&[9, 9, 10, 12, 14, 16]);
        let has_subclusters = version == 3 && bits >= 14 && source.bool();
        let order = if version == 3 { source.of(&[4, 0, 3, 5, 6]) } else { 4 };
        let cluster = 1_u64 << bits;
        let entry = if has_subclusters { 16 } else { 8 };
        let per_table = cluster / entry;
        let tables = 1 + source.below(3) as u64;
        // The disk is larger than the image's L2 tables cover, so that writes allocate up to two
        // more tables.
        let size = ((tables + 2) * per_table * cluster).min(1 << 20);
        let l1_entries = size.div_ceil(per_table * cluster);
        let l1 = 3 * cluster;
        let l2 = l1 + (l1_entries * 8).div_ceil(cluster) * cluster;
        let data = l2 + tables * cluster;
        let most = ((cluster * 8) >> order).saturating_sub(data / cluster);
        let clusters = (source.below(40) as u64).min(most).min(size / cluster);

        let file = memfd_create("image", MemfdFlags::CLOEXEC).expect("a memfd");
        let mut image = Self {
            file: File::from(file),
            model: None,
            bits,
            size,
            fields: Vec::new(),
            clusters: data / cluster + clusters,
        };
        image.file.set_len(image.clusters << bits).expect("a length");
        image.bytes(0, b"QFI\xfb");
        for (at, value) in [(4, version), (20, bits), (32, 0), (36, l1_entries as u32), (56, 1)] {
            image.field32(at, value);
        }
        for (at, value) in [(8, 0), (24, size), (40, l1), (48, cluster), (64, 0)] {
            image.field64(at, value);
        }
        image.field32(16, 0);
        image.field32(60, 0);
        if version == 3 {
            image.field64(72, if has_subclusters { 16 } else { 0 });
            image.field64(80, 0);
            image.field64(88, 0);
            image.field32(96, order);
            image.field32(100, 104);
            image.field32(104, 0);
            image.field32(108, 0);
        }
        image.field64(cluster, 2 * cluster);
        image.counts(2 * cluster, order);
        let mut model = vec![0; size as usize];
        for table in 0..tables.min(l1_entries) {
            image.field64(l1 + table * 8, (l2 + table * cluster) | COPIED);
        }
        for nth in 0..clusters {
            // Spreads the clusters over the L2 tables. Each fifth one is a zero cluster.
            let guest = (nth * 7) % (size / cluster).min(tables * per_table);
            let at = l2 + guest * entry;
            let host = data + nth * cluster;
            let is_zero = version == 3 && nth % 5 == 4;
            let flag = u64::from(is_zero && !has_subclusters);
            image.field64(at, host | COPIED | flag);
            if has_subclusters {
                image.field64(at + 8, if is_zero { 0xffff_ffff << 32 } else { 0xffff_ffff });
            }
            let content: Vec<u8> = (0..cluster).map(|n| (n + 3 * nth + 1) as u8).collect();
            image.bytes(host, &content);
            let place = (guest * cluster) as usize;
            model[place..place + cluster as usize].fill(0);
            if !is_zero {
                model[place..place + cluster as usize].copy_from_slice(&content);
            }
        }
        image.model = Some(model);
        image
    }

    fn bytes(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at).expect("a write to memory");
    }

    fn field32(&mut self, at: u64, value: u32) {
        self.fields.push((at, 4));
        self.bytes(at, &value.to_be_bytes());
    }

    fn field64(&mut self, at: u64, value: u64) {
        self.fields.push((at, 8));
        self.bytes(at, &value.to_be_bytes());
    }

    /// Writes a refcount block that counts each cluster of the file once.
    fn counts(&mut self, at: u64, order: u32) {
        let mut block = vec![0; 1 << self.bits];
        for cluster in 0..self.clusters as usize {
            let bit = cluster << order;
            // Counts of at least 8 bits are big-endian.
            let last = if order > 3 { (1 << (order - 3)) - 1 } else { 0 };
            block[bit / 8 + last] |= 1 << (bit % 8);
        }
        self.bytes(at, &block);
        self.fields.push((at, 8));
    }

    /// Changes some fields.
    fn damage(&mut self, source: &mut Source<'_>) {
        for _ in 0..source.below(6) {
            self.model = None;
            let (at, len) = match source.below(4) {
                0 => (source.below(256) as u64, 1 + source.below(8)),
                _ => source.of(&self.fields),
            };
            let place = (source.below(self.clusters as usize + 4) as u64) << self.bits;
            let flags = source.of(&[0, COPIED, COMPRESSED, 1, COPIED | 1]);
            let usual = [place | flags, place | COPIED, 1, 3, self.size, 1 << self.bits];
            let value = source.near(&usual).to_be_bytes();
            self.bytes(at, &value[8 - len..]);
        }
        if source.rarely(8) {
            self.model = None;
            let len = source.below((self.clusters << self.bits) as usize);
            self.file.set_len(len as u64).expect("a length");
        }
    }

    fn open(&self, writes: bool) -> Option<Qcow2Disk> {
        let mut options = FileOptions::default();
        options.read_only = !writes;
        options.direct = Direct::Off;
        options.aio = if self.clusters.is_multiple_of(2) { Aio::Threads } else { Aio::Auto };
        let path = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        match Qcow2Disk::open(&path, &options) {
            Ok(disk) => Some(disk),
            Err(error) => {
                assert!(self.model.is_none(), "a valid image was refused: {error}");
                None
            }
        }
    }

    /// Executes a request.
    fn act(
        &mut self,
        disk: &Qcow2Disk,
        queue: &mut dyn shadowbell_disk::Queue,
        source: &mut Source<'_>,
    ) {
        let blocks = disk.info().blocks;
        let range = source.near(&[0, 1, blocks / 2, blocks.saturating_sub(8)]) % blocks;
        let len = (1 + source.below((MOST / BLOCK) as usize) as u64).min(blocks - range) * BLOCK;
        let offset = range * BLOCK;
        let op = match source.below(10) {
            0..3 => Op::Read,
            3..6 => Op::Write { fua: source.rarely(4) },
            6 => Op::WriteZeroes { deallocate: source.bool(), fua: false },
            7 => Op::Discard,
            8 => Op::Flush,
            _ => {
                let mut sum = 0;
                disk.extents(offset, len, &mut |extent| {
                    sum += extent.len;
                    true
                });
                assert_eq!(sum, len, "the extents of a range");
                return;
            }
        };
        let len = if op == Op::Flush { 0 } else { len };
        let bytes = memory(MOST as usize);
        let data = source.pattern(len as usize);
        bytes.write_from(0, &data).expect("memory of the host");
        let has_data = matches!(op, Op::Read | Op::Write { .. });
        let segments = match has_data {
            true => Segments::from_bytes(&bytes.slice(0, len as usize).expect("a part")),
            false => Segments::new(),
        };
        let offset = if op == Op::Flush { 0 } else { offset };
        let result = run_one(queue, op, offset, len, segments);
        let Some(model) = &mut self.model else { return };
        let info = disk.info();
        let writes = !matches!(op, Op::Read | Op::Flush);
        if info.read_only && writes {
            assert!(result.is_err() || op == Op::Discard, "{op:?} of a disk that is only read");
            return;
        }
        assert_eq!(result, Ok(()), "{op:?} at {offset:#x}");
        let part = &mut model[offset as usize..(offset + len) as usize];
        match op {
            Op::Read => {
                let mut found = vec![0; len as usize];
                bytes.read_into(0, &mut found).expect("memory of the host");
                assert!(found == part, "a read at {offset:#x}");
            }
            Op::Write { .. } => part.copy_from_slice(&data),
            Op::Discard if !info.discard => {}
            Op::Discard | Op::WriteZeroes { .. } => part.fill(0),
            _ => {}
        }
    }
}
