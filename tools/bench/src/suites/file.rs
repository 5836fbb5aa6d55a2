//! The suite `file`: an image on a file system, next to fio on the same file.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::figures::{count, percent, time};
use crate::fio::{self, Job, Source};
use crate::load::{Load, Waiting};
use crate::machine;
use crate::samples::{Rounds, Samples};
use crate::settings::Settings;
use crate::table::Table;

const DEPTHS: [u32; 3] = [1, 8, 32];
/// Waiting modes of shadowbell: polling; adaptive with the default poll time; and adaptive with a
/// poll time of 500 µs, which is longer than an I/O of this disk takes.
const WAITING: [(Waiting, Option<u32>); 3] =
    [(Waiting::Polling, None), (Waiting::Adaptive, None), (Waiting::Adaptive, Some(500))];

/// One combination of operation and queue depth, and its results.
struct Case {
    rw: &'static str,
    depth: u32,
    fio: Rounds,
    measured: [Rounds; WAITING.len()],
    /// IOPS of shadowbell in each waiting mode, in percent of fio's, for each round.
    share: [Samples; WAITING.len()],
}

pub(crate) fn run(settings: &Settings) -> Result<Vec<Table>> {
    let image = Image::new(settings)?;
    let disk = format!("file:{}?direct=on", image.0.display());
    let fio = machine::need("fio", "fio", !settings.quick);
    let mut cases = Vec::new();
    for rw in ["randread", "randwrite"] {
        for depth in settings.some(&DEPTHS) {
            let (fio, measured, share) = Default::default();
            cases.push(Case { rw, depth, fio, measured, share });
        }
    }
    for _ in 0..settings.rounds {
        for case in &mut cases {
            let mut fio_iops = None;
            if fio.is_ok() {
                let job = Job {
                    source: Source::File(&image.0),
                    rw: case.rw,
                    bs: 4096,
                    depth: case.depth,
                };
                let row = fio::run(settings, &job)?;
                fio_iops = row.get("iops").and_then(Value::as_f64).filter(|iops| *iops > 0.0);
                case.fio.push(row);
            }
            for (index, (waiting, poll_max)) in WAITING.into_iter().enumerate() {
                let (rw, depth) = (case.rw, case.depth);
                let row = Load { disk: &disk, rw, depth, waiting, poll_max, ..Load::default() }
                    .measure(settings)?;
                let iops = row.get("iops").and_then(Value::as_f64);
                if let (Some(iops), Some(fio_iops)) = (iops, fio_iops) {
                    case.share[index].push(iops / fio_iops * 100.0);
                }
                case.measured[index].push(row);
            }
        }
    }
    let mut table = Table {
        title: format!("A file on {}, 4 KiB, past the page cache", image.file_system()),
        head: vec![
            "rw",
            "iodepth",
            "contestant",
            "IOPS",
            "of fio",
            "p50",
            "p99",
            "driver/IO",
            "controller/IO",
        ],
        ..Table::default()
    };
    if let Err(why) = &fio {
        table.notes.push(format!("No comparison: {why}."));
    }
    for case in &cases {
        case.show(&mut table);
    }
    Ok(vec![table])
}

impl Case {
    fn show(&self, table: &mut Table) {
        let mut line = |name: &str, rounds: &Rounds, share: &Samples| {
            if !rounds.has("iops") {
                return;
            }
            let has_controller = rounds.has("controller_cpu_ns_per_io");
            let figure = |name: &str| rounds.median(name);
            table.rows.push(vec![
                self.rw.into(),
                self.depth.to_string(),
                name.into(),
                count(figure("iops")),
                if share.median() > 0.0 { percent(share.median()) } else { "-".into() },
                time(figure("latency_ns/p50")),
                time(figure("latency_ns/p99")),
                time(figure("cpu_ns_per_io")),
                if has_controller { time(figure("controller_cpu_ns_per_io")) } else { "-".into() },
            ]);
            let mut row = rounds.row("file");
            if let Some(fields) = row.as_object_mut()
                && share.median() > 0.0
            {
                fields.insert("fio_percent".into(), json!(share.median()));
            }
            table.json.push(row);
        };
        line("fio io_uring", &self.fio, &Samples::default());
        let rows = WAITING.iter().zip(&self.measured).zip(&self.share);
        for (((waiting, poll_max), rounds), share) in rows {
            let most = poll_max.map_or_else(String::new, |micros| format!(", {micros} us"));
            line(&format!("shadowbell, {}{most}", waiting.name()), rounds, share);
        }
    }
}

/// A file with all blocks allocated. Removed when dropped.
struct Image(PathBuf);

impl Image {
    fn new(settings: &Settings) -> Result<Self> {
        let bytes: usize = if settings.quick { 16 << 20 } else { 1 << 30 };
        let path = settings.directory.canonicalize()?.join(format!("{}.img", std::process::id()));
        let image = Self(path);
        image.fill(bytes).with_context(|| image.0.display().to_string())?;
        Ok(image)
    }

    /// Writes the whole file. Reads of blocks that were never written would not access the device.
    fn fill(&self, bytes: usize) -> std::io::Result<()> {
        let mut file = File::create(&self.0)?;
        let chunk: Vec<u8> =
            (0..1u32 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for _ in 0..bytes.div_ceil(chunk.len()) {
            file.write_all(&chunk)?;
        }
        file.sync_all()
    }

    /// File system of the file, from /proc/mounts.
    fn file_system(&self) -> String {
        let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
        file_system(&mounts, &self.0).unwrap_or("an unknown file system").to_owned()
    }
}

fn file_system<'a>(mounts: &'a str, path: &Path) -> Option<&'a str> {
    let mounted = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        Some((words.next()?, words.next()?))
    });
    // The file is in the mount whose mount point is the longest prefix of its path. Of two mounts
    // at the same point, the later one hides the earlier one.
    mounted
        .filter(|(at, _)| path.starts_with(at))
        .max_by_key(|(at, _)| at.len())
        .map(|(_, kind)| kind)
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_mount_is_found() {
        let mounts = "/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n/dev/b /tmp/x xfs rw 0 0\n";
        let kind = |path: &str| file_system(mounts, Path::new(path));
        assert_eq!(kind("/home/disk.img"), Some("ext4"));
        assert_eq!(kind("/tmp/xy"), Some("tmpfs"));
        assert_eq!(kind("/tmp/x/y"), Some("xfs"));
        assert_eq!(file_system("", Path::new("/a")), None);
    }
}
