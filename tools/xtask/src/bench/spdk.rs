//! The suite `spdk`: the same wire with SPDK at one end, at the other, at both.
//!
//! SPDK's vfio-user target (`nvmf_tgt`) is what our controller is compared to, and its client
//! (`spdk_nvme_perf`) what our driver is. All four pairs are measured in turns, each end pinned to a
//! processor of its own: so each end is also seen next to the other's with the same partner.

mod huge_pages;
mod perf;
mod target;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::format::{bandwidth, count, percent, size, time};
use super::ours::Load;
use super::plot::{Line, Plot};
use super::samples::{Rounds, Samples};
use super::{Bench, Table};
use huge_pages::HugePages;
use target::Target;

/// How to come by a tree that this can use.
pub(super) const HOW: &str = "--spdk DIR names a built tree of SPDK: in it, after `git submodule \
    update --init`, `./configure --with-vfio-user && make`";

/// One end of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Spdk,
    Ours,
}

impl End {
    fn name(self) -> &'static str {
        match self {
            Self::Spdk => "SPDK",
            Self::Ours => "shadowbell",
        }
    }
}

/// A client and a controller; the first pair is what the others are compared to.
const PAIRS: [[End; 2]; 4] = [
    [End::Spdk, End::Spdk],
    [End::Ours, End::Ours],
    [End::Spdk, End::Ours],
    [End::Ours, End::Spdk],
];

/// What stands behind the queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Medium {
    Null,
    Memory,
}

/// SPDK's name for the subsystem. Ours has another and answers all the same.
const NQN: &str = "nqn.2016-06.io.spdk:bench";

/// Of a memory disk: several times what the caches hold.
const MEMORY: &str = "mem:256MiB";
const MEMORY_BYTES: u64 = 256 << 20;

impl Medium {
    fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Memory => "memory",
        }
    }

    /// As `shadowbell serve` takes it.
    fn disk(self) -> &'static str {
        match self {
            Self::Null => "null:1TiB",
            Self::Memory => MEMORY,
        }
    }
}

/// One condition, and what each pair came to.
struct Case {
    medium: Medium,
    bs: u32,
    depth: u32,
    found: [Rounds; 4],
    /// IOPS in percent of SPDK's with itself, in each round.
    share: [Samples; 4],
}

impl Case {
    fn new(medium: Medium, bs: u32, depth: u32) -> Self {
        let (found, share) = Default::default();
        Self { medium, bs, depth, found, share }
    }

    /// All of them, or in a quick run one of each medium.
    fn all(quick: bool) -> Vec<Self> {
        let null = |bs, depth| Self::new(Medium::Null, bs, depth);
        let memory = |bs, depth| Self::new(Medium::Memory, bs, depth);
        if quick {
            return vec![null(4096, 8), memory(131_072, 8)];
        }
        vec![
            null(4096, 1),
            null(4096, 8),
            null(4096, 32),
            null(4096, 128),
            null(512, 32),
            memory(4096, 1),
            memory(4096, 32),
            memory(131_072, 32),
        ]
    }

    fn load(&self) -> Load<'static> {
        let fill = self.medium == Medium::Memory;
        let disk = self.medium.disk();
        Load { disk, bs: self.bs, depth: self.depth, fill, ..Load::default() }
    }
}

/// A built tree of SPDK.
#[derive(Debug)]
pub(super) struct Tree {
    nvmf_tgt: PathBuf,
    perf: PathBuf,
    version: String,
}

impl Tree {
    /// Looks whether what is needed was built there.
    pub(super) fn new(directory: &Path) -> Result<Self> {
        let program = |name: &str| {
            let path = directory.join("build/bin").join(name);
            if !path.is_file() {
                bail!("{} is not there: {HOW}", path.display());
            }
            path.canonicalize().with_context(|| path.display().to_string())
        };
        let version = std::fs::read_to_string(directory.join("VERSION")).unwrap_or_default();
        Ok(Self {
            nvmf_tgt: program("nvmf_tgt")?,
            perf: program("spdk_nvme_perf")?,
            version: version.trim().to_owned(),
        })
    }
}

/// A tree, and the memory that its programs take.
struct Ready<'a> {
    tree: &'a Tree,
    pages: HugePages,
}

/// Compares; without a tree, says that there is none.
pub(super) fn run(bench: &Bench, tree: Option<&Tree>) -> Result<Vec<Table>> {
    let Some(tree) = tree else {
        let title = "SPDK: not compared".into();
        return Ok(vec![Table { title, notes: vec![HOW.into()], ..Table::default() }]);
    };
    let tree = &Ready { tree, pages: HugePages::reserve()? };
    let mut cases = Case::all(bench.quick);
    for round in 0..bench.rounds {
        for case in &mut cases {
            case.measure(bench, tree, round)?;
        }
    }
    let mut table = Table {
        title: format!("SPDK {} and shadowbell, random read, all sides polling", tree.tree.version),
        head: vec![
            "disk",
            "bs",
            "iodepth",
            "client",
            "controller",
            "IOPS",
            "min",
            "max",
            "of SPDK",
            "bandwidth",
            "mean latency",
        ],
        ..Table::default()
    };
    for case in &cases {
        case.show(&mut table);
    }
    table.notes.push(
        "SPDK's client maps the doorbells of whatever it talks to; our driver takes the shadow \
         doorbells if there are any."
            .into(),
    );
    table.plots.extend(plot(&cases));
    Ok(vec![table])
}

impl Case {
    /// One round: each pair once, in another order each time.
    fn measure(&mut self, bench: &Bench, tree: &Ready<'_>, round: u32) -> Result<()> {
        let mut iops = [0.0; PAIRS.len()];
        for turn in 0..PAIRS.len() {
            let index = (turn + round as usize) % PAIRS.len();
            let [client, controller] = PAIRS[index];
            let mut row =
                self.measure_pair(bench, tree, client, controller).with_context(|| {
                    format!("{}'s client, {}'s controller", client.name(), controller.name())
                })?;
            if let Some(fields) = row.as_object_mut() {
                fields.insert("disk".into(), self.medium.name().into());
                fields.insert("client".into(), client.name().into());
                fields.insert("controller".into(), controller.name().into());
            }
            iops[index] = row.get("iops").and_then(Value::as_f64).unwrap_or_default();
            self.found[index].push(row);
        }
        for (share, mine) in self.share.iter_mut().zip(iops) {
            if iops[0] > 0.0 {
                share.push(mine / iops[0] * 100.0);
            }
        }
        Ok(())
    }

    fn measure_pair(
        &self,
        bench: &Bench,
        tree: &Ready<'_>,
        client: End,
        controller: End,
    ) -> Result<Value> {
        let load = self.load();
        match (client, controller) {
            (End::Ours, End::Ours) => load.measure(bench),
            (End::Ours, End::Spdk) => {
                let target = Target::start(tree.tree, self.medium, bench.cpus[0])?;
                // Whatever it offers.
                Load { doorbells: "auto", ..load }.measure_at(bench, &target.target())
            }
            (End::Spdk, End::Spdk) => {
                let target = Target::start(tree.tree, self.medium, bench.cpus[0])?;
                self.perf(bench, tree, &target.directory())
            }
            (End::Spdk, End::Ours) => {
                let server = Load { doorbells: "mapped", ..load }.serve(bench)?;
                // SPDK looks for a name in a directory.
                let directory = tempfile::tempdir()?;
                std::os::unix::fs::symlink(server.socket(0), directory.path().join("cntrl"))?;
                let row = self.perf(bench, tree, directory.path())?;
                server.stop()?;
                Ok(row)
            }
        }
    }

    fn perf(&self, bench: &Bench, tree: &Ready<'_>, directory: &Path) -> Result<Value> {
        perf::run(bench, &tree.tree.perf, &tree.pages, directory, self.bs, self.depth)
    }

    fn show(&self, table: &mut Table) {
        for (([client, controller], rounds), share) in
            PAIRS.iter().zip(&self.found).zip(&self.share)
        {
            let [min, median, max] = rounds.samples("iops").point();
            let mut row = rounds.row("spdk");
            if let Some(fields) = row.as_object_mut() {
                fields.insert("spdk_percent".into(), json!(share.median()));
            }
            table.json.push(row);
            table.rows.push(vec![
                self.medium.name().into(),
                size(self.bs),
                self.depth.to_string(),
                client.name().into(),
                controller.name().into(),
                count(median),
                count(min),
                count(max),
                percent(share.median()),
                bandwidth(rounds.median("bandwidth_bytes")),
                time(rounds.median("latency_ns/mean")),
            ]);
        }
    }
}

/// 4 KiB from nothing, by depth; nothing to draw in a quick run.
fn plot(cases: &[Case]) -> Option<Plot> {
    let of = || cases.iter().filter(|case| case.medium == Medium::Null && case.bs == 4096);
    let line = |(index, [client, controller]): (usize, &[End; 2])| Line {
        name: format!("{}'s client, {}'s controller", client.name(), controller.name()),
        points: of().map(|case| Some(case.found[index].samples("iops").point())).collect(),
    };
    (of().count() > 1).then(|| Plot {
        name: "spdk".into(),
        title: "Null disk, 4 KiB random read, all sides polling".into(),
        x: "iodepth".into(),
        y: "IOPS".into(),
        ticks: of().map(|case| case.depth.to_string()).collect(),
        lines: PAIRS.iter().enumerate().map(line).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_that_was_not_built_is_refused_with_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let error = Tree::new(directory.path()).unwrap_err().to_string();
        assert!(error.contains("nvmf_tgt") && error.contains("--with-vfio-user"), "{error}");
        let programs = directory.path().join("build/bin");
        std::fs::create_dir_all(&programs).unwrap();
        std::fs::write(programs.join("nvmf_tgt"), "").unwrap();
        let error = Tree::new(directory.path()).unwrap_err().to_string();
        assert!(error.contains("spdk_nvme_perf"), "{error}");
        std::fs::write(programs.join("spdk_nvme_perf"), "").unwrap();
        std::fs::write(directory.path().join("VERSION"), "26.09-pre\n").unwrap();
        assert_eq!(Tree::new(directory.path()).unwrap().version, "26.09-pre");
    }

    #[test]
    fn pairs_are_compared_with_spdk_alone() {
        assert_eq!(PAIRS[0], [End::Spdk, End::Spdk]);
        let mut case = Case::new(Medium::Null, 4096, 8);
        for (index, iops) in [2.0, 5.0, 3.0, 4.0].into_iter().enumerate() {
            case.found[index].push(json!({
                "iops": iops, "bandwidth_bytes": iops * 4096.0, "latency_ns": { "mean": 7.0 },
            }));
            case.share[index].push(iops / 2.0 * 100.0);
        }
        let mut table = Table::default();
        case.show(&mut table);
        let shares: Vec<&str> = table.rows.iter().map(|row| row[8].as_str()).collect();
        assert_eq!(shares, ["100.0 %", "250.0 %", "150.0 %", "200.0 %"]);
        assert_eq!(table.rows[2][3..5], ["SPDK", "shadowbell"]);
        assert_eq!(table.json[1]["spdk_percent"], 250.0);
        assert!(plot(&[case]).is_none());
    }
}
