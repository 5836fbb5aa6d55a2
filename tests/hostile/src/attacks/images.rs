//! Attacks by qcow2 images whose tables are far larger than those of ordinary images. They are
//! evaluated by counts.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_spec::Sqe;
use shadowbell_testing::wait;

use super::isolation::victim_is_served;
use crate::attack::{Attack, Field, Kind};
use crate::server::worker_of;

/// Size of a cluster in bytes: the smallest that the format permits.
const CLUSTER: u64 = 512;
/// Size of the disk in bytes. Its L2 tables have 128 MiB, and its refcounts 32 MiB.
const DISK: u64 = 8 << 30;
/// Size of the disk part that an L2 table covers, in bytes.
const PER_TABLE: u64 = CLUSTER / 8 * CLUSTER;
/// Duration of a recovery, after which an image that is ready before the victim is served must have
/// delayed the victim.
const QUICK: Duration = Duration::from_secs(1);
/// Number of completed reads that show that the victim is served.
const PROGRESS: u64 = 20;

const IMAGE: &[&str] = &["DIR/tables.qcow2?format=qcow2"];

pub(crate) const ATTACKS: &[Attack] = &[
    Attack {
        prepare: Some(image),
        kind: Kind::Counted,
        ..Attack::new("slow-image", "an image that takes long to open, and crashes", IMAGE, slow)
    },
    Attack {
        prepare: Some(image),
        ..Attack::new("tables", "reads that need 128 MiB of tables of a qcow2 image", IMAGE, tables)
    },
];

/// Makes a qcow2 image with the smallest clusters, all of which are allocated. The data clusters
/// are a hole of the file.
fn image(directory: &Path) -> Result<()> {
    let (data, tables) = (DISK / CLUSTER, DISK / PER_TABLE);
    let l1 = (tables * 8).div_ceil(CLUSTER);
    // A refcount block has 256 counts, and describes itself and the refcount table too.
    let others = 1 + l1 + tables + data;
    let blocks = (others + others / 200).div_ceil(CLUSTER / 2);
    let list = (blocks * 8).div_ceil(CLUSTER);
    // Clusters in order: header, refcount table, refcount blocks, L1 table, L2 tables, data.
    let l1_at = 1 + list + blocks;
    let tables_at = l1_at + l1;
    let data_at = tables_at + tables;
    let all = data_at + data;
    let mut file = BufWriter::new(File::create(directory.join("tables.qcow2"))?);
    let mut header = b"QFI\xfb".to_vec();
    let fields = [
        // Version 3, no backing file, cluster bits, size, no encryption.
        (3, 4),
        (0, 8),
        (0, 4),
        (CLUSTER.ilog2().into(), 4),
        (DISK, 8),
        (0, 4),
        // L1 table, refcount table, no snapshots.
        (tables, 4),
        (l1_at * CLUSTER, 8),
        (CLUSTER, 8),
        (list, 4),
        (0, 4),
        (0, 8),
        // No features, refcounts of 16 bits, length of the header.
        (0, 8),
        (0, 8),
        (0, 8),
        (4, 4),
        (104, 4),
    ];
    fields.iter().for_each(|(field, bytes)| header.extend(&u64::to_be_bytes(*field)[8 - bytes..]));
    header.resize(CLUSTER as usize, 0);
    file.write_all(&header)?;
    let mut section = |clusters: u64, entries: &mut dyn Iterator<Item = u64>, bytes: usize| {
        let mut left = clusters * CLUSTER;
        for entry in entries {
            file.write_all(&entry.to_be_bytes()[8 - bytes..])?;
            left -= bytes as u64;
        }
        file.write_all(&vec![0; left as usize])
    };
    const COPIED: u64 = 1 << 63;
    section(list, &mut (0..blocks).map(|n| (1 + list + n) * CLUSTER), 8)?;
    section(blocks, &mut (0..all).map(|_| 1), 2)?;
    section(l1, &mut (0..tables).map(|n| COPIED | ((tables_at + n) * CLUSTER)), 8)?;
    section(tables, &mut (0..data).map(|n| COPIED | ((data_at + n) * CLUSTER)), 8)?;
    Ok(file.into_inner().context("the image")?.set_len(all * CLUSTER)?)
}

/// Kills the server process. The victim must be served before the attacker's image is ready, unless
/// that takes little time.
fn slow(field: &mut Field) -> Result<()> {
    while !field.is_over() {
        let mut guest = field.guest_with(1, 64)?;
        let (prp1, prp2) = guest.buffer(4096)?;
        victim_is_served(field, "between two crashes");
        let old = worker_of(field.server).context("no server process")?;
        let pid = Pid::from_raw(old.cast_signed()).context("a process number")?;
        kill_process(pid, Signal::KILL)?;
        let (began, deadline) = (Instant::now(), wait::deadline());
        while worker_of(field.server).is_none_or(|pid| pid == old) && Instant::now() < deadline {
            wait::pause();
        }
        field.top_up(&mut guest, 1, &mut |_| Sqe::read(1, 0, 7, 0).with_prps(prp1, prp2))?;
        let wanted = field.clock.reads() + PROGRESS;
        let (mut ready, mut served) = (None, None);
        while ready.is_none() || served.is_none() {
            let now = began.elapsed();
            ready = ready.or(guest.queues[0].pop().map(|_| now));
            served = served.or((field.clock.reads() >= wanted).then_some(now));
            if Instant::now() > deadline {
                field.found(format!("after a crash, the victim: {served:?}, the image: {ready:?}"));
                return Ok(());
            }
            wait::pause();
        }
        if ready < served && ready > Some(QUICK) {
            field.found(format!("the victim waits for an image that needs {ready:?}: {served:?}"));
        }
        field.done += 1;
    }
    Ok(())
}

/// Reads a block from each L2 table. The bound on the growth of the server's memory also applies to
/// the tables.
fn tables(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(1, 256)?;
    let (prp1, prp2) = guest.buffer(4096)?;
    let tables = DISK / PER_TABLE;
    field.begin();
    let read = |n: u64| Sqe::read(1, n % tables * (PER_TABLE / 512), 0, 0);
    while field.done < tables && !field.is_over() || guest.queues[0].outstanding() > 0 {
        let depth = if field.done < tables { 255 } else { 0 };
        field.top_up(&mut guest, depth, &mut |n| read(n).with_prps(prp1, prp2))?;
        wait::pause();
    }
    field.guests.push(guest);
    Ok(())
}
