//! The suite `file`: an image on a file system, next to fio on the same file.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::fio::{self, Job};
use super::format::{count, percent, time};
use super::ours::{Load, Waiting};
use super::plot::{Line, Plot};
use super::samples::{Rounds, Samples};
use super::{Bench, Table, machine};

const DEPTHS: [u32; 3] = [1, 8, 32];
/// How ours wait: the fastest, and what is the default.
const WAITING: [Waiting; 2] = [Waiting::Polling, Waiting::Adaptive];

/// One condition, and what was found.
struct Case {
    rw: &'static str,
    depth: u32,
    fio: Rounds,
    ours: [Rounds; 2],
    /// Ours in percent of fio's IOPS, in each round.
    share: [Samples; 2],
}

pub(super) fn run(bench: &Bench) -> Result<Vec<Table>> {
    let image = Image::new(bench)?;
    let disk = format!("file:{}?direct=on", image.0.display());
    let fio = machine::need("fio", "fio", !bench.quick);
    let mut cases = Vec::new();
    for rw in ["randread", "randwrite"] {
        for depth in bench.some(&DEPTHS) {
            let (fio, ours, share) = Default::default();
            cases.push(Case { rw, depth, fio, ours, share });
        }
    }
    for _ in 0..bench.rounds {
        for case in &mut cases {
            let mut theirs = None;
            if fio.is_ok() {
                let job = Job { file: &image.0, rw: case.rw, bs: 4096, depth: case.depth };
                let row = fio::run(bench, &job)?;
                theirs = row.get("iops").and_then(Value::as_f64).filter(|iops| *iops > 0.0);
                case.fio.push(row);
            }
            for (index, waiting) in WAITING.into_iter().enumerate() {
                let (rw, depth) = (case.rw, case.depth);
                let row =
                    Load { disk: &disk, rw, depth, waiting, ..Load::default() }.measure(bench)?;
                let iops = row.get("iops").and_then(Value::as_f64);
                if let (Some(iops), Some(theirs)) = (iops, theirs) {
                    case.share[index].push(iops / theirs * 100.0);
                }
                case.ours[index].push(row);
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
    table.plots = ["randread", "randwrite"].map(|rw| plot(&cases, rw)).to_vec();
    Ok(vec![table])
}

impl Case {
    fn show(&self, table: &mut Table) {
        let mut line = |name: &str, rounds: &Rounds, share: &Samples| {
            if !rounds.has("iops") {
                return;
            }
            let ours = rounds.has("controller_cpu_ns_per_io");
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
                if ours { time(figure("controller_cpu_ns_per_io")) } else { "-".into() },
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
        for ((waiting, rounds), share) in WAITING.iter().zip(&self.ours).zip(&self.share) {
            line(&format!("shadowbell, {}", waiting.name()), rounds, share);
        }
    }
}

fn plot(cases: &[Case], rw: &str) -> Plot {
    let of = || cases.iter().filter(|case| case.rw == rw);
    let line = |name: String, of_case: &dyn Fn(&Case) -> &Rounds| Line {
        name,
        points: of()
            .map(of_case)
            .map(|rounds| rounds.has("iops").then(|| rounds.samples("iops").point()))
            .collect(),
    };
    let mut lines = vec![line("fio io_uring".into(), &|case| &case.fio)];
    for (index, waiting) in WAITING.iter().enumerate() {
        lines.push(line(format!("shadowbell, {}", waiting.name()), &|case| &case.ours[index]));
    }
    Plot {
        name: format!("file-{rw}"),
        title: format!("A file, 4 KiB {rw}"),
        x: "iodepth".into(),
        y: "IOPS".into(),
        ticks: of().map(|case| case.depth.to_string()).collect(),
        lines,
    }
}

/// A file that is full of bytes, and gone when we are.
struct Image(PathBuf);

impl Image {
    fn new(bench: &Bench) -> Result<Self> {
        let bytes: usize = if bench.quick { 16 << 20 } else { 1 << 30 };
        let path = bench.directory.canonicalize()?.join(format!("{}.img", std::process::id()));
        let image = Self(path);
        image.fill(bytes).with_context(|| image.0.display().to_string())?;
        Ok(image)
    }

    /// Blocks that were never written would be read without asking the device.
    fn fill(&self, bytes: usize) -> std::io::Result<()> {
        let mut file = File::create(&self.0)?;
        let chunk: Vec<u8> =
            (0..1u32 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for _ in 0..bytes.div_ceil(chunk.len()) {
            file.write_all(&chunk)?;
        }
        file.sync_all()
    }

    /// The file system that it is on, as /proc/mounts has it.
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
    // The longest is the innermost; of two on one place the later hides the other.
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
    fn the_innermost_mount_is_the_one() {
        let mounts = "/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n/dev/b /tmp/x xfs rw 0 0\n";
        let kind = |path: &str| file_system(mounts, Path::new(path));
        assert_eq!(kind("/home/disk.img"), Some("ext4"));
        assert_eq!(kind("/tmp/xy"), Some("tmpfs"));
        assert_eq!(kind("/tmp/x/y"), Some("xfs"));
        assert_eq!(file_system("", Path::new("/a")), None);
    }
}
