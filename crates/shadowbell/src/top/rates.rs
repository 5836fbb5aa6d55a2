//! Rates of controllers, namespaces and exports between two snapshots.

use serde_json::json;
use shadowbell_control_api::api::Export;
use shadowbell_control_api::explain::Shares;
use shadowbell_control_api::live_stats::{NamespaceRow, Row, Snapshot};
use shadowbell_controller::latency_stats::Distribution;
use shadowbell_process::units::{bandwidth, count, nanoseconds, per_io};

/// Headings of [`Rates::lines`].
pub(super) const HEADINGS: [&str; 14] = [
    "Controller",
    "State",
    "Waits for",
    "Workers",
    "Queues",
    "IOPS",
    "Read",
    "Written",
    "Rings/IO",
    "Saved",
    "Interrupts/IO",
    "Errors",
    "p50",
    "p99",
];

/// Rates of a server's controllers and exports between two snapshots.
pub(super) fn between(before: Option<&Snapshot>, now: &Snapshot) -> Vec<Rates> {
    // The counters of a new or recovered controller cover an unknown time, so its rates are zero at
    // first.
    let start = |now: &Row| {
        let mut rows = before.iter().flat_map(|before| &before.controllers);
        rows.find(|before| before.socket == now.socket && !before.waiting).unwrap_or(now).clone()
    };
    let since = before.map_or(now.at_ns, |before| before.at_ns);
    let seconds = now.at_ns.saturating_sub(since) as f64 / 1e9;
    let controllers = now.controllers.iter().map(|now| Rates::between(&start(now), now, seconds));
    let exports = now.exports.iter().map(|now| {
        let mut all = before.iter().flat_map(|before| &before.exports);
        Rates::of_export(all.find(|before| before.id == now.id).unwrap_or(now), now, seconds)
    });
    controllers.chain(exports).collect()
}

/// Rates of a controller or an export over an interval.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rates {
    /// Id of the controller or export.
    pub(super) id: String,
    pub(super) socket: String,
    /// Id of the disk of an export; `None` for a controller.
    pub(super) exported: Option<String>,
    pub(super) state: &'static str,
    /// Shares of the interval by the cause for which commands waited.
    pub(super) waits: Shares,
    pub(super) workers: Vec<usize>,
    pub(super) queues: usize,
    pub(super) iops: f64,
    pub(super) read: f64,
    pub(super) written: f64,
    /// Doorbell writes per command. `interrupts`: interrupts per command. Both are `None` without
    /// commands.
    pub(super) rings: Option<f64>,
    pub(super) interrupts: Option<f64>,
    /// Fraction of new doorbell values without a doorbell write; `None` without new values.
    pub(super) saved: Option<f64>,
    pub(super) errors: u64,
    /// Median latency in nanoseconds; `None` if latency is not measured.
    pub(super) p50: Option<u64>,
    /// 99th percentile of the latency in nanoseconds; `None` if latency is not measured.
    pub(super) p99: Option<u64>,
    /// Rates of the namespaces; empty if latency is not measured.
    pub(super) namespaces: Vec<NamespaceRates>,
}

/// Rates of a namespace over an interval.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NamespaceRates {
    pub(super) nsid: u32,
    pub(super) disk: String,
    pub(super) iops: f64,
    pub(super) read: f64,
    pub(super) written: f64,
    pub(super) errors: u64,
    pub(super) p50: Option<u64>,
    pub(super) p99: Option<u64>,
}

fn rate(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

impl Rates {
    pub(super) fn between(before: &Row, now: &Row, seconds: f64) -> Self {
        let grown = |of: fn(&Row) -> u64| of(now).saturating_sub(of(before));
        let rate = |count: u64| rate(count, seconds);
        let part = |count: u64, of: u64| (of != 0).then(|| count as f64 / of as f64);
        let (commands, rings) = (grown(|row| row.commands), grown(|row| row.rings));
        let updates = grown(|row| row.updates);
        let mut all = Distribution::default();
        let namespaces = now.namespaces.iter().map(|now| {
            let before = before.namespaces.iter().find(|before| before.nsid == now.nsid);
            let (rates, latency) = NamespaceRates::between(before, now, seconds);
            all.merge(&latency);
            rates
        });
        let namespaces = namespaces.collect();
        Self {
            id: if now.id.is_empty() { &now.socket } else { &now.id }.clone(),
            socket: now.socket.clone(),
            exported: None,
            waits: Shares::between(&before.waits, &now.waits),
            state: match now {
                Row { stopped: true, .. } => "stopped",
                Row { waiting: true, .. } => "waiting",
                Row { stalled: true, .. } => "stalled",
                _ if commands != 0 => "busy",
                Row { queues: 0, .. } => "off",
                Row { parked: true, .. } => "parked",
                _ => "idle",
            },
            workers: now.workers.clone(),
            queues: now.queues,
            iops: rate(commands),
            read: rate(grown(|row| row.bytes_read)),
            written: rate(grown(|row| row.bytes_written)),
            rings: part(rings, commands),
            interrupts: part(grown(|row| row.interrupts), commands),
            saved: part(updates.saturating_sub(rings), updates),
            errors: grown(|row| row.errors),
            p50: all.quantile(0.5),
            p99: all.quantile(0.99),
            namespaces,
        }
    }

    /// Rates of an export. Its queues are those of its disk.
    fn of_export(before: &Export, now: &Export, seconds: f64) -> Self {
        let row = |export: &Export| Row {
            socket: export.id.clone(),
            queues: export.queues,
            commands: export.requests,
            bytes_read: export.bytes_read,
            bytes_written: export.bytes_written,
            errors: export.failures,
            ..Row::default()
        };
        let exported = Some(now.disk.clone());
        let rates = Self::between(&row(before), &row(now), seconds);
        Self { exported, rings: None, interrupts: None, ..rates }
    }

    /// First column of the line: name of the controller or export.
    pub(super) fn title(&self) -> String {
        match self.exported {
            Some(_) => format!("export {}", self.id),
            None => self.id.clone(),
        }
    }

    /// Main cause for which commands waited, and its share of the interval: `disk 97%`.
    pub(super) fn waits_for(&self) -> String {
        let main = self.waits.main_cause();
        or_none(main.map(|(cause, share)| format!("{} {:.0}%", cause.short_name(), share * 100.0)))
    }

    /// Line of the controller, then a line for each namespace.
    pub(super) fn lines(&self) -> Vec<[String; 14]> {
        let workers: Vec<_> = self.workers.iter().map(ToString::to_string).collect();
        let line = [
            self.title(),
            self.state.into(),
            self.waits_for(),
            or_none((!workers.is_empty()).then(|| workers.join(","))),
            self.queues.to_string(),
            count(self.iops),
            bandwidth(self.read),
            bandwidth(self.written),
            or_none(self.rings.map(per_io)),
            or_none(self.saved.map(percent)),
            or_none(self.interrupts.map(per_io)),
            self.errors.to_string(),
            or_none(self.p50.map(time)),
            or_none(self.p99.map(time)),
        ];
        let namespaces = self.namespaces.iter().map(|namespace| {
            let none = || "-".to_owned();
            [
                namespace.title(),
                none(),
                none(),
                none(),
                none(),
                count(namespace.iops),
                bandwidth(namespace.read),
                bandwidth(namespace.written),
                none(),
                none(),
                none(),
                namespace.errors.to_string(),
                or_none(namespace.p50.map(time)),
                or_none(namespace.p99.map(time)),
            ]
        });
        std::iter::once(line).chain(namespaces).collect()
    }

    pub(super) fn to_json(&self) -> serde_json::Value {
        if let Some(disk) = &self.exported {
            return json!({
                "id": self.id,
                "disk": disk,
                "state": self.state,
                "queues": self.queues,
                "iops": self.iops,
                "read_bytes_per_second": self.read,
                "written_bytes_per_second": self.written,
                "errors": self.errors,
            });
        }
        let namespaces: Vec<_> = self.namespaces.iter().map(NamespaceRates::to_json).collect();
        json!({
            "id": self.id,
            "socket": self.socket,
            "state": self.state,
            "waits_for": self.waits,
            "workers": self.workers,
            "queues": self.queues,
            "iops": self.iops,
            "read_bytes_per_second": self.read,
            "written_bytes_per_second": self.written,
            "rings_per_io": self.rings,
            "doorbells_saved": self.saved,
            "interrupts_per_io": self.interrupts,
            "errors": self.errors,
            "p50_ns": self.p50,
            "p99_ns": self.p99,
            "namespaces": namespaces,
        })
    }
}

impl NamespaceRates {
    fn between(
        before: Option<&NamespaceRow>,
        now: &NamespaceRow,
        seconds: f64,
    ) -> (Self, Distribution) {
        let before = before.unwrap_or(now);
        let grown = |of: fn(&NamespaceRow) -> u64| of(now).saturating_sub(of(before));
        let rate = |count: u64| rate(count, seconds);
        let of = |row: &NamespaceRow| Distribution { total_ns: 0, counts: row.latency.clone() };
        let latency = of(now).since(&of(before));
        let rates = Self {
            nsid: now.nsid,
            disk: now.disk.clone(),
            iops: rate(grown(|row| row.commands)),
            read: rate(grown(|row| row.bytes_read)),
            written: rate(grown(|row| row.bytes_written)),
            errors: grown(|row| row.errors),
            p50: latency.quantile(0.5),
            p99: latency.quantile(0.99),
        };
        (rates, latency)
    }

    /// First column of the namespace's line: NSID and disk.
    pub(super) fn title(&self) -> String {
        format!("  {} {}", self.nsid, self.disk)
    }

    fn to_json(&self) -> serde_json::Value {
        json!({
            "nsid": self.nsid,
            "disk": self.disk,
            "iops": self.iops,
            "read_bytes_per_second": self.read,
            "written_bytes_per_second": self.written,
            "errors": self.errors,
            "p50_ns": self.p50,
            "p99_ns": self.p99,
        })
    }
}

pub(super) fn or_none(value: Option<String>) -> String {
    value.unwrap_or_else(|| "-".into())
}

pub(super) fn percent(part: f64) -> String {
    format!("{:.1} %", part * 100.0)
}

pub(super) fn time(ns: u64) -> String {
    nanoseconds(ns as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_control_api::live_stats::Waits;

    #[test]
    fn rates_are_per_second_between_two_snapshots() {
        let before = Row { socket: "a".into(), queues: 2, commands: 100, ..Row::default() };
        let now = Row {
            commands: 300,
            bytes_read: 8192,
            updates: 50,
            rings: 5,
            interrupts: 20,
            ..before.clone()
        };
        let rates = Rates::between(&before, &now, 2.0);
        assert_eq!((rates.state, rates.iops, rates.read), ("busy", 100.0, 4096.0));
        assert_eq!((rates.rings, rates.interrupts), (Some(0.025), Some(0.1)));
        assert_eq!((rates.saved, rates.p50), (Some(0.9), None));
        // Equal counters, decreased counters, and an interval of length zero.
        for (before, now, seconds) in [(&now, &now, 1.0), (&now, &before, 1.0), (&now, &now, 0.0)] {
            let rates = Rates::between(before, now, seconds);
            assert_eq!((rates.state, rates.iops, rates.rings), ("idle", 0.0, None));
            assert_eq!(rates.lines()[0][9], "-");
        }
        let waits = Waits { disk_ns: 30, limit_ns: 60, nothing_ns: 10, ..Waits::default() };
        let rates = Rates::between(&before, &Row { waits, ..now.clone() }, 2.0);
        assert_eq!(
            (rates.waits_for().as_str(), rates.lines()[0][2].as_str()),
            ("limit 60%", "limit 60%")
        );
        assert_eq!(rates.to_json()["waits_for"]["nothing"], 0.1);
        assert_eq!(Rates::between(&before, &now, 2.0).waits_for(), "-");
        let state = |row: Row| Rates::between(&row, &row, 1.0).state;
        assert_eq!(state(Row { parked: true, ..now }), "parked");
        assert_eq!(state(Row::default()), "off");
    }

    #[test]
    fn namespaces_have_lines_and_latency_percentiles() {
        let namespace = |nsid, commands, bytes_read, latency: [u64; 3]| NamespaceRow {
            nsid,
            disk: "disk.img".into(),
            commands,
            bytes_read,
            latency: latency.to_vec(),
            ..NamespaceRow::default()
        };
        let row = |namespaces| Row { namespaces, ..Row::default() };
        let before = row(vec![namespace(1, 900, 0, [900, 0, 0])]);
        let now =
            row(vec![namespace(1, 1000, 8192, [900, 99, 1]), namespace(2, 5, 4096, [0, 0, 5])]);
        let rates = Rates::between(&before, &now, 2.0);
        let [one, two] = &rates.namespaces[..] else { panic!("{rates:?}") };
        assert_eq!((one.iops, one.read, one.p50, one.p99), (50.0, 4096.0, Some(1280), Some(1280)));
        // The second namespace is not in the first snapshot.
        assert_eq!((two.iops, two.read, two.p50), (0.0, 0.0, None));
        assert_eq!((rates.p50, rates.p99), (Some(1280), Some(1280)));
        let lines = rates.lines();
        assert_eq!((lines.len(), lines[1][0].as_str()), (3, "  1 disk.img"));
        assert_eq!(lines[1][12], "1.28 us");
        assert_eq!(rates.to_json()["namespaces"][0]["p99_ns"], 1280);
    }

    #[test]
    fn an_export_has_a_line_after_the_controllers() {
        let export = |requests| Export {
            id: "vm".into(),
            disk: "data".into(),
            nbd: Some("unix:/a".into()),
            vhost_user_blk: None,
            fuse: None,
            ublk: None,
            name: String::new(),
            tls: false,
            read_only: false,
            share: false,
            requests,
            bytes_read: 512 * requests,
            bytes_written: 0,
            queues: 2,
            failures: 0,
        };
        let look = |at_ns, requests| Snapshot {
            at_ns,
            controllers: vec![Row::default()],
            exports: vec![export(requests)],
        };
        let rates = between(Some(&look(0, 100)), &look(2_000_000_000, 300));
        let rates = rates.last().unwrap();
        assert_eq!((rates.state, rates.iops, rates.read), ("busy", 100.0, 51200.0));
        assert_eq!(rates.lines()[0][..2], ["export vm", "busy"]);
        assert_eq!((rates.to_json()["id"].as_str(), rates.rings), (Some("vm"), None));
        // Without a snapshot before, the rates are zero.
        assert_eq!(between(None, &look(5, 300)).last().unwrap().state, "idle");
    }
}
