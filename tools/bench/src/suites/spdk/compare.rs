//! All pairs of the suite `spdk`, under all conditions.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::huge_pages::HugePages;
use super::target::Target;
use super::tree::{DiskKind, HOW_TO_BUILD, Tree};
use crate::figures::{bandwidth, count, percent, size, time};
use crate::load::Load;
use crate::samples::{Rounds, Samples};
use crate::settings::Settings;
use crate::table::Table;

/// One end of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Spdk,
    Shadowbell,
}

impl End {
    fn name(self) -> &'static str {
        match self {
            Self::Spdk => "SPDK",
            Self::Shadowbell => "shadowbell",
        }
    }
}

/// Pairs of client and controller. The first pair is the reference for the others.
const PAIRS: [[End; 2]; 4] = [
    [End::Spdk, End::Spdk],
    [End::Shadowbell, End::Shadowbell],
    [End::Spdk, End::Shadowbell],
    [End::Shadowbell, End::Spdk],
];

/// One combination of disk type, block size and queue depth, and the result of each pair.
struct Case {
    kind: DiskKind,
    bs: u32,
    depth: u32,
    found: [Rounds; 4],
    /// IOPS in percent of the pair SPDK and SPDK, in each round.
    share: [Samples; 4],
}

impl Case {
    fn new(kind: DiskKind, bs: u32, depth: u32) -> Self {
        let (found, share) = Default::default();
        Self { kind, bs, depth, found, share }
    }

    /// All conditions, or in a quick run one for each disk type.
    fn all(quick: bool) -> Vec<Self> {
        let null = |bs, depth| Self::new(DiskKind::Null, bs, depth);
        let memory = |bs, depth| Self::new(DiskKind::Memory, bs, depth);
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
        let fill = self.kind == DiskKind::Memory;
        let disk = self.kind.disk();
        Load { disk, bs: self.bs, depth: self.depth, fill, ..Load::default() }
    }
}

/// Prerequisites of a measurement: a built SPDK tree, and huge pages for its programs.
struct Ready<'a> {
    tree: &'a Tree,
    pages: HugePages,
}

/// Measures all pairs. Without a tree, returns a table that only contains the instructions how to
/// build one.
pub(crate) fn run(settings: &Settings, tree: Option<&Tree>) -> Result<Vec<Table>> {
    let Some(tree) = tree else {
        let title = "SPDK: not compared".into();
        return Ok(vec![Table { title, notes: vec![HOW_TO_BUILD.into()], ..Table::default() }]);
    };
    let tree = &Ready { tree, pages: HugePages::reserve()? };
    let mut cases = Case::all(settings.quick);
    for round in 0..settings.rounds {
        for case in &mut cases {
            case.measure(settings, tree, round)?;
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
        "SPDK's client maps the doorbells of every controller; this driver uses shadow doorbells if \
         the controller has them."
            .into(),
    );
    Ok(vec![table])
}

impl Case {
    /// Measures each pair once. The order of the pairs is different in each round.
    fn measure(&mut self, settings: &Settings, tree: &Ready<'_>, round: u32) -> Result<()> {
        let mut iops = [0.0; PAIRS.len()];
        for turn in 0..PAIRS.len() {
            let index = (turn + round as usize) % PAIRS.len();
            let [client, controller] = PAIRS[index];
            let mut row =
                self.measure_pair(settings, tree, client, controller).with_context(|| {
                    format!("{}'s client, {}'s controller", client.name(), controller.name())
                })?;
            if let Some(fields) = row.as_object_mut() {
                fields.insert("disk".into(), self.kind.name().into());
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
        settings: &Settings,
        tree: &Ready<'_>,
        client: End,
        controller: End,
    ) -> Result<Value> {
        let load = self.load();
        match (client, controller) {
            (End::Shadowbell, End::Shadowbell) => load.measure(settings),
            (End::Shadowbell, End::Spdk) => {
                let target = Target::start(tree.tree, self.kind, settings.cpus[0])?;
                // With `auto`, the driver uses shadow doorbells if SPDK's target supports them.
                Load { doorbells: "auto", ..load }.measure_at(settings, &target.target())
            }
            (End::Spdk, End::Spdk) => {
                let target = Target::start(tree.tree, self.kind, settings.cpus[0])?;
                self.perf(settings, tree, &target.directory())
            }
            (End::Spdk, End::Shadowbell) => {
                let server = Load { doorbells: "mapped", ..load }.serve(settings)?;
                // SPDK expects a socket with a fixed name in a directory.
                let directory = tempfile::tempdir()?;
                std::os::unix::fs::symlink(server.socket(0), directory.path().join("cntrl"))?;
                let row = self.perf(settings, tree, directory.path())?;
                server.stop()?;
                Ok(row)
            }
        }
    }

    fn perf(&self, settings: &Settings, tree: &Ready<'_>, directory: &Path) -> Result<Value> {
        super::perf::run(settings, &tree.tree.perf, &tree.pages, directory, self.bs, self.depth)
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
                self.kind.name().into(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_compared_with_spdk_alone() {
        assert_eq!(PAIRS[0], [End::Spdk, End::Spdk]);
        let mut case = Case::new(DiskKind::Null, 4096, 8);
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
    }
}
