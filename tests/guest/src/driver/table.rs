//! Speed of the driver through VFIO (rows of the table `S2`). A controller is driven by the kernel,
//! and read through linux-aio and io_uring; by QEMU's `nvme://`; and by Shadowbell, polling and
//! with interrupts. One guest has two controllers without a backing store. All drivers execute the
//! same sequential reads.
//!
//! `qemu-img bench` and `shadowbell bench` print the time, without start and attach. Doorbells and
//! interrupts are counted at the device in a separate run, because QEMU's trace makes each of them
//! slower.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use shadowbell_guest::trace::Stretch;
use shadowbell_guest::{Device, Drive, Guest, Kernel, RunDir, Server, config};

use crate::setup::{Setup, names};
use crate::vfio::{MODULES, allow_unsafe_interrupts, boot, json_of, load, shadowbell};
use shadowbell_bench::figures::count as short;
use shadowbell_bench::table::Table;
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const DISK_BYTES: u64 = 1 << 40;
/// Queue depth, bytes of each read, number of reads, and number of reads with the trace on.
pub(crate) const PATTERNS: [(u32, u32, u64, u64); 4] = [
    (1, 4096, 4000, 1000),
    (1, 65_536, 2000, 500),
    (64, 4096, 20_000, 4000),
    (64, 65_536, 4000, 1000),
];

/// Software through which the program that reads accesses the controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DataPath {
    LinuxAio,
    IoUring,
    QemuNvme,
    /// `shadowbell export --nbd`, read by qemu-img as an NBD client.
    Nbd,
    Interrupts,
    Polling,
}

impl DataPath {
    /// All paths. The paths through the kernel's driver come first: for the others, the controller
    /// is bound to VFIO.
    const ALL: [Self; 6] =
        [Self::LinuxAio, Self::IoUring, Self::QemuNvme, Self::Nbd, Self::Interrupts, Self::Polling];

    /// Device name in the rows and tables.
    fn device(self) -> &'static str {
        match self {
            Self::LinuxAio => "linux-aio",
            Self::IoUring => "io_uring",
            Self::QemuNvme => "qemu-nvme",
            Self::Nbd | Self::Interrupts | Self::Polling => "shadowbell",
        }
    }

    /// Layer between the program that reads and the NVMe driver.
    fn through(self) -> &'static str {
        match self {
            Self::LinuxAio | Self::IoUring => "kernel",
            Self::Nbd => "nbd",
            Self::QemuNvme | Self::Interrupts | Self::Polling => "none",
        }
    }

    fn completion(self) -> &'static str {
        match self {
            Self::Polling => "poll",
            Self::Nbd => "adaptive",
            _ => "interrupt",
        }
    }

    /// True if a check of the suite compares the counts of this path. The others are only measured.
    fn is_checked(self) -> bool {
        matches!(self, Self::QemuNvme | Self::Interrupts | Self::Polling)
    }

    fn needs_kernel_driver(self) -> bool {
        matches!(self, Self::LinuxAio | Self::IoUring)
    }
}

/// A controller under test.
struct Controller {
    name: &'static str,
    address: String,
    /// Block device of the controller while it is bound to the kernel's driver.
    disk: String,
    server: Option<Server>,
    /// True if QEMU's `nvme://` can drive the controller.
    nvme: bool,
}

/// A row of the table.
struct Row {
    controller: &'static str,
    path: DataPath,
    depth: u32,
    bs: u32,
    ios: u64,
    seconds: f64,
    /// Number of I/Os of the run that counts doorbells and interrupts.
    counted: u64,
    doorbells: u64,
    interrupts: u64,
}

impl Row {
    fn iops(&self) -> f64 {
        self.ios as f64 / self.seconds.max(1e-9)
    }

    fn per_io(&self, count: u64) -> f64 {
        count as f64 / self.counted.max(1) as f64
    }

    /// Interrupts per I/O. `None` for QEMU's `nvme://`, which uses the vector of the admin queue
    /// for all queues; interrupts of this vector are not counted.
    fn interrupts_per_io(&self) -> Option<f64> {
        (self.path != DataPath::QemuNvme).then(|| self.per_io(self.interrupts))
    }

    fn json(&self, kernel: Kernel) -> Value {
        let mut row = json!({
            "table": "S2",
            "device": self.path.device(),
            "controller": self.controller,
            "completion": self.path.completion(),
            "through": self.path.through(),
            // QEMU's `nvme://` does not support shadow doorbells.
            "doorbells": if self.path == DataPath::QemuNvme { "mmio" } else { "shadow" },
            "kernel": kernel.to_string(),
            "backing": "null",
            "rw": "read",
            "iodepth": self.depth,
            "numjobs": 1,
            "bs": self.bs,
            "commands": self.ios,
            "seconds": self.seconds,
            "iops": self.iops(),
            "bandwidth_bytes": self.iops() * f64::from(self.bs),
            "doorbell_mmio_writes": self.doorbells,
            "mmio_per_io": self.per_io(self.doorbells),
        });
        // Figures that were not measured are omitted.
        if let (Some(each), Some(row)) = (self.interrupts_per_io(), row.as_object_mut()) {
            row.insert("interrupts_per_io".into(), each.into());
        }
        row
    }
}

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    // The emulated guest is slow, so the I/O threads poll for longer than usual before they sleep.
    let disk = setup.serve(
        run,
        "driver",
        &[format!("null:{DISK_BYTES}")],
        &["--poll-max", "1000"],
        None,
    )?;
    let devices =
        vec![Device::QemuNvme { drive: Drive::Null(DISK_BYTES), dbcs: true }, disk.device.clone()];
    // The guest has one CPU, so the other CPU of the machine is free for the device.
    let mut guest = boot(setup, run, kernel, devices, |config| config.cpus = 1)?;
    load(&mut guest, MODULES)?;
    allow_unsafe_interrupts(&mut guest)?;
    let mut controllers = Vec::new();
    for (index, (name, server)) in
        [("qemu", None), ("shadowbell", disk.server)].into_iter().enumerate()
    {
        let disk = names(&mut guest, index)?.1;
        guest.sh(&format!("echo none >/sys/block/{disk}/queue/scheduler"), LIMIT)?;
        controllers.push(Controller {
            name,
            address: config::pci_address(index),
            disk,
            server,
            nvme: false,
        });
    }
    let rows = report
        .check("sequential reads, by every way, on both controllers in turn", |_| {
            measure(&mut guest, &mut controllers, setup.rounds)
        })
        .context("no figures")?;
    report.table(table(&rows, kernel));
    check_targets(report, &rows);
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    for server in controllers.into_iter().filter_map(|controller| controller.server) {
        report.check("the server ends without an error", |_| server.stop());
    }
    Ok(())
}

fn measure(guest: &mut Guest, controllers: &mut [Controller], rounds: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut bound = true;
    // Without rounds, speeds are not wanted.
    for path in DataPath::ALL.into_iter().filter(|path| rounds > 0 || path.is_checked()) {
        if bound && !path.needs_kernel_driver() {
            let addresses: Vec<_> = controllers.iter().map(|c| c.address.as_str()).collect();
            shadowbell(guest, &format!("bind {}", addresses.join(" ")))?.success()?;
            bound = false;
            for controller in &mut *controllers {
                controller.nvme = can_be_driven_by_qemu(guest, controller)?;
            }
        }
        for (depth, bs, ios, counted) in PATTERNS {
            let mut times: Vec<Vec<f64>> = controllers.iter().map(|_| Vec::new()).collect();
            for _ in 0..rounds {
                // The controllers are measured in turn, so that other load of this machine
                // affects all of them.
                for (controller, times) in controllers.iter().zip(&mut times) {
                    if path == DataPath::QemuNvme && !controller.nvme {
                        continue;
                    }
                    times.push(time(guest, controller, path, depth, bs, ios)?);
                }
            }
            for (controller, mut times) in controllers.iter_mut().zip(times) {
                if path == DataPath::QemuNvme && !controller.nvme {
                    continue;
                }
                let run = count(guest, controller, path, depth, bs, counted)?;
                let (doorbells, interrupts) = (run.doorbells, run.interrupts);
                times.sort_by(f64::total_cmp);
                // If no rounds are requested, the run that counts doorbells is the only result.
                let (ios, seconds) = match times.get(times.len() / 2) {
                    Some(&seconds) => (ios, seconds),
                    None => (counted, run.seconds),
                };
                let controller = controller.name;
                rows.push(Row {
                    controller,
                    path,
                    depth,
                    bs,
                    ios,
                    seconds,
                    counted,
                    doorbells,
                    interrupts,
                });
            }
        }
    }
    Ok(rows)
}

/// True if QEMU's `nvme://` completes a read from the controller. Debian's QEMU 11.1 writes ACQ
/// only after CC.EN, which the specification does not allow (Base 2.1, 3.5.1). So the controller
/// posts completions to the previous address in ACQ, and the first attempt hangs. QEMU's own
/// controller keeps ACQ over a function level reset, so ACQ is already correct in the second
/// attempt.
fn can_be_driven_by_qemu(guest: &mut Guest, controller: &Controller) -> Result<bool> {
    let command =
        format!("timeout 10 qemu-img bench -f raw -c 1 -s 4096 nvme://{}/1", controller.address);
    for _ in 0..2 {
        if guest.run(&command, LIMIT)?.code == 0 {
            return Ok(true);
        }
    }
    println!(
        "   QEMU's nvme:// enables a controller before it writes ACQ; the controller of `{}` does not \
         accept this, so it has no rows of QEMU's nvme://",
        controller.name
    );
    Ok(false)
}

/// Seconds that `ios` reads take.
fn time(
    guest: &mut Guest,
    controller: &Controller,
    path: DataPath,
    depth: u32,
    bs: u32,
    ios: u64,
) -> Result<f64> {
    let image = match path {
        DataPath::LinuxAio => format!("-t none -i native -n /dev/{}", controller.disk),
        DataPath::IoUring => format!("-t none -i io_uring -n /dev/{}", controller.disk),
        // Without `-t none`, because there is no host cache to bypass. The option would change the
        // controller's write cache for one namespace only, which QEMU's own controller refuses.
        DataPath::QemuNvme => format!("nvme://{}/1", controller.address),
        DataPath::Nbd => "'nbd+unix:///?socket=/tmp/nbd.sock'".to_owned(),
        DataPath::Interrupts | DataPath::Polling => {
            let command = format!(
                "bench nvme://{} --rw read --bs {bs} --iodepth {depth} --number-ios {ios} \
                 --completion {} --latency-sample 1000000",
                controller.address,
                path.completion()
            );
            let row = json_of(guest, &command)?["rows"][0].take();
            ensure!(row["commands"] == ios && row["doorbells"] == "shadow", "{row}");
            return row["seconds"].as_f64().context("no seconds");
        }
    };
    let mut command = format!("qemu-img bench -f raw -c {ios} -d {depth} -s {bs} {image}");
    if path == DataPath::Nbd {
        command = format!(
            "rm -f /tmp/nbd.sock; shadowbell -q export nvme://{} --nbd unix:/tmp/nbd.sock & \
             for i in $(seq 600); do [ -S /tmp/nbd.sock ] && break; sleep 0.1; done; \
             {command}; code=$?; kill $!; wait $! || exit 1; exit $code",
            controller.address
        );
    }
    let text = guest.sh(&command, LIMIT)?;
    seconds(&text).with_context(|| format!("qemu-img bench: {text:.400}"))
}

/// Parses `Run completed in 1.234 seconds.`
pub(crate) fn seconds(text: &str) -> Option<f64> {
    text.split_once("completed in ")?.1.split(' ').next()?.parse().ok()
}

/// Counts of one run.
struct Counted {
    /// Number of trapped doorbell writes.
    doorbells: u64,
    interrupts: u64,
    seconds: f64,
}

/// Runs `ios` reads, and counts trapped doorbell writes and interrupts.
fn count(
    guest: &mut Guest,
    controller: &mut Controller,
    path: DataPath,
    depth: u32,
    bs: u32,
    ios: u64,
) -> Result<Counted> {
    let Some(server) = &mut controller.server else {
        let stretch = Stretch::begin(guest)?;
        let timed = time(guest, controller, path, depth, bs, ios);
        let counts = stretch.end(guest)?;
        return Ok(Counted {
            doorbells: counts.sq_doorbells + counts.cq_doorbells,
            interrupts: counts.interrupts,
            seconds: timed?,
        });
    };
    let before = server.stats()?;
    let timed = time(guest, controller, path, depth, bs, ios);
    let Some(server) = &mut controller.server else { bail!("the server is gone") };
    let after = server.stats()?;
    let seconds = timed?;
    let grown = |name: &str| {
        let of = |stats: &Value| stats.get(name).and_then(Value::as_u64).context(name.to_owned());
        Ok::<u64, anyhow::Error>(of(&after)?.saturating_sub(of(&before)?))
    };
    let (doorbells, interrupts) = (grown("doorbell_mmio_writes")?, grown("interrupts")?);
    Ok(Counted { doorbells, interrupts, seconds })
}

/// Checks the targets of the table. Counts are checked; speeds are only printed, because they
/// depend on other load of this machine.
fn check_targets(report: &mut Report, rows: &[Row]) {
    let find = |controller: &str, path: DataPath, depth: u32, bs: u32| {
        rows.iter()
            .find(|row| {
                (row.controller, row.path, row.depth, row.bs) == (controller, path, depth, bs)
            })
            .with_context(|| format!("no row of {controller} by {path:?} at {depth}"))
    };
    report.check("fewer doorbells per I/O than QEMU's nvme://, everywhere", |_| {
        let mut compared = 0;
        for row in
            rows.iter().filter(|row| matches!(row.path, DataPath::Interrupts | DataPath::Polling))
        {
            let qemu = find(row.controller, DataPath::QemuNvme, row.depth, row.bs);
            let Ok(qemu) = qemu else { continue };
            compared += 1;
            let (a, b) = (row.per_io(row.doorbells), qemu.per_io(qemu.doorbells));
            ensure!(a < b, "{} at {}: {a:.3}, nvme:// {b:.3}", row.controller, row.depth);
        }
        ensure!(compared > 0, "no row of QEMU's nvme:// to compare with");
        Ok(())
    });
    for (depth, bs, ..) in PATTERNS {
        for controller in ["qemu", "shadowbell"] {
            let rate = |path| find(controller, path, depth, bs).map(Row::iops);
            for path in [DataPath::Polling, DataPath::Interrupts, DataPath::Nbd] {
                let (Ok(mine), Ok(aio)) = (rate(path), rate(DataPath::LinuxAio)) else { continue };
                let nvme = rate(DataPath::QemuNvme)
                    .map(|nvme| format!(", {:.2} times QEMU's nvme://", mine / nvme))
                    .unwrap_or_default();
                println!(
                    "   iodepth {depth}, {bs} bytes, {controller}, {path:?}: {:.2} times linux-aio{nvme}",
                    mine / aio
                );
            }
        }
    }
}

fn table(rows: &[Row], kernel: Kernel) -> Table {
    let head =
        ["controller", "iodepth", "bytes", "way", "seconds", "IOPS", "MMIO/IO", "interrupts/IO"];
    let mut table = Table::new("", &head);
    for row in rows {
        let cells = vec![
            row.controller.to_owned(),
            row.depth.to_string(),
            row.bs.to_string(),
            match row.path {
                DataPath::Nbd => "shadowbell by nbd".to_owned(),
                path => format!("{} {}", path.device(), path.completion()),
            },
            format!("{:.3}", row.seconds),
            short(row.iops()),
            format!("{:.3}", row.per_io(row.doorbells)),
            row.interrupts_per_io().map_or("-".to_owned(), |each| format!("{each:.3}")),
        ];
        table.push(cells, row.json(kernel));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_qemu_img_is_parsed() {
        let text = "Sending 75000 read requests, 4096 bytes each, 64 in parallel\n\
                    Run completed in 1.234 seconds.\n";
        assert_eq!(seconds(text), Some(1.234));
        assert_eq!(seconds("qemu-img: Could not open"), None);
        assert_eq!(seconds("completed in a while"), None);
    }

    fn row(path: DataPath, doorbells: u64) -> Row {
        let (controller, depth, bs) = ("qemu", 1, 4096);
        let (ios, seconds, counted, interrupts) = (1000, 0.5, 100, 50);
        Row { controller, path, depth, bs, ios, seconds, counted, doorbells, interrupts }
    }

    #[test]
    fn rows_have_the_agreed_names() {
        let json = row(DataPath::Polling, 25).json(Kernel::V7_2);
        assert_eq!((&json["table"], &json["device"]), (&json!("S2"), &json!("shadowbell")));
        assert_eq!((&json["iops"], &json["mmio_per_io"]), (&json!(2000.0), &json!(0.25)));
        assert_eq!((&json["completion"], &json["seconds"]), (&json!("poll"), &json!(0.5)));
        let qemu = row(DataPath::QemuNvme, 1).json(Kernel::V6_1);
        assert_eq!((&qemu["doorbells"], qemu.get("interrupts_per_io")), (&json!("mmio"), None));
        assert_eq!(json["interrupts_per_io"], 0.5);
    }

    #[test]
    fn a_missed_target_fails() {
        for (doorbells, failed) in [(10, 0), (200, 1), (300, 1)] {
            let mut report = Report::default();
            check_targets(
                &mut report,
                &[row(DataPath::QemuNvme, 200), row(DataPath::Polling, doorbells)],
            );
            assert_eq!(report.failed(), failed);
        }
        let mut report = Report::default();
        check_targets(&mut report, &[row(DataPath::Polling, 0)]);
        assert_eq!(report.failed(), 1, "nothing to compare with is no success");
    }
}
