//! Speed and CPU time of a ublk device, with zero copy and with copies, in turn.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use shadowbell_bench::table::Table;
use shadowbell_guest::{Guest, Kernel};
use shadowbell_testing::wait::LIMIT;

use super::super::readers::Export;

/// Duration of a measurement.
const TIME: Duration = Duration::from_millis(1500);
const WORK: [(&str, u32, u32); 6] = [
    ("randread", 4096, 1),
    ("randread", 4096, 32),
    ("randwrite", 4096, 1),
    ("randwrite", 4096, 32),
    ("randread", 131_072, 8),
    ("randwrite", 131_072, 8),
];

/// I/O rate and CPU time of one data path.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Figures {
    iops: f64,
    /// CPU time per I/O in microseconds: of the server process, and of the whole system.
    server: f64,
    system: f64,
}

/// Results of one fio load, for both data paths.
#[derive(Debug)]
pub(super) struct Row {
    rw: &'static str,
    bytes: u32,
    depth: u32,
    zero_copy: Figures,
    copied: Figures,
}

pub(super) fn measure(guest: &mut Guest, raw: &str, rounds: usize) -> Result<Vec<Row>> {
    let mut turns = WORK.map(|_| [Vec::new(), Vec::new()]);
    for round in 0..rounds {
        // Every second round measures the two data paths in reverse order.
        let mut ways = [(0, ""), (1, "--ublk-copy")];
        if round % 2 == 1 {
            ways.reverse();
        }
        for (way, options) in ways {
            let export = Export::start(guest, raw, options)?;
            for (work, turns) in WORK.into_iter().zip(&mut turns) {
                let figures = once(guest, &export.disk, work)?;
                turns.get_mut(way).context("two ways")?.push(figures);
            }
            export.stop(guest)?;
        }
    }
    let rows = WORK.into_iter().zip(turns).map(|((rw, bytes, depth), [zero_copy, copied])| {
        let (zero_copy, copied) = (median(zero_copy)?, median(copied)?);
        Ok(Row { rw, bytes, depth, zero_copy, copied })
    });
    rows.collect()
}

fn once(guest: &mut Guest, disk: &str, (rw, bytes, depth): (&str, u32, u32)) -> Result<Figures> {
    // CPU ticks of the server process, and of the system without idle time.
    let ticks = "cut -d' ' -f14,15 /proc/$(cat /tmp/pid0)/stat; \
                 awk '/^cpu /{print $2+$3+$4+$7+$8}' /proc/stat";
    let text = guest.sh(
        &format!(
            "{ticks}; fio --name=turn --filename=/dev/{disk} --rw={rw} --bs={bytes} \
             --iodepth={depth} --direct=1 --ioengine=libaio --norandommap --time_based \
             --size=128m --runtime={}ms --output-format=json >/tmp/fio.json || exit 1; \
             {ticks}; cat /tmp/fio.json",
            TIME.as_millis()
        ),
        LIMIT + TIME,
    )?;
    parse(&text, rw).with_context(|| format!("{text:.300}"))
}

fn parse(text: &str, rw: &str) -> Result<Figures> {
    let (ticks, rest) = text.split_once('{').context("no JSON")?;
    let json: Value = serde_json::from_str(&format!("{{{rest}"))?;
    let kind = rw.trim_start_matches("rand");
    let number = |name: &str| {
        let path = format!("/jobs/0/{kind}/{name}");
        json.pointer(&path).and_then(Value::as_f64).with_context(|| format!("no {path}"))
    };
    let ticks: Vec<f64> = ticks.split_whitespace().map_while(|word| word.parse().ok()).collect();
    let &[user, kernel, system, user_then, kernel_then, system_then] = &ticks[..] else {
        anyhow::bail!("the ticks are {ticks:?}");
    };
    let (iops, ios) = (number("iops")?, number("total_ios")?.max(1.0));
    // A tick is 10 ms.
    let each = |ticks: f64| ticks * 10_000.0 / ios;
    let server = each(user_then + kernel_then - user - kernel);
    Ok(Figures { iops, server, system: each(system_then - system) })
}

/// Median of each figure.
fn median(turns: Vec<Figures>) -> Result<Figures> {
    let middle = |of: fn(&Figures) -> f64| {
        let mut all: Vec<f64> = turns.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied().context("nothing was measured")
    };
    Ok(Figures {
        iops: middle(|it| it.iops)?,
        server: middle(|it| it.server)?,
        system: middle(|it| it.system)?,
    })
}

pub(super) fn table(rows: &[Row], kernel: Kernel) -> Table {
    let head = [
        "rw",
        "bytes",
        "depth",
        "IOPS",
        "copied",
        "times",
        "server us",
        "copied",
        "system us",
        "copied",
    ];
    let mut table = Table::new("", &head);
    for row in rows {
        let (zero_copy, copied) = (row.zero_copy, row.copied);
        let mut cells = vec![row.rw.to_owned(), row.bytes.to_string(), row.depth.to_string()];
        cells.extend([zero_copy.iops, copied.iops].map(|iops| format!("{iops:.0}")));
        cells.push(format!("{:.2}", zero_copy.iops / copied.iops.max(1.0)));
        let times = [zero_copy.server, copied.server, zero_copy.system, copied.system];
        cells.extend(times.map(|time| format!("{time:.0}")));
        let of =
            |it: Figures| json!({"iops": it.iops, "server_us": it.server, "system_us": it.system});
        let json = json!({
            "table": "ublk", "kernel": kernel.to_string(), "rw": row.rw, "bs": row.bytes,
            "iodepth": row.depth, "straight": of(zero_copy), "copied": of(copied),
        });
        table.push(cells, json);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_converted_to_time_per_io() {
        let json = r#"{"jobs": [{"write": {"iops": 250.0, "total_ios": 1000}}]}"#;
        let text = format!("10 20\n1000\n30 50\n1200\n{json}");
        let figures = parse(&text, "randwrite").unwrap();
        assert_eq!(figures, Figures { iops: 250.0, server: 500.0, system: 2000.0 });
        assert!(parse(&text, "randread").is_err());
        assert!(parse(&format!("10 20\n1000\n{json}"), "randwrite").is_err());
    }

    #[test]
    fn the_median_is_taken_of_each_figure() {
        let turn = |n: f64| Figures { iops: n, server: 10.0 - n, system: 1.0 };
        let middle = median(vec![turn(1.0), turn(3.0), turn(2.0)]).unwrap();
        assert_eq!(middle, Figures { iops: 2.0, server: 8.0, system: 1.0 });
        assert!(median(Vec::new()).is_err());
    }
}
