//! Tests of the crates, executed in a guest on character devices of namespaces: a disk model,
//! cancels and resets during I/O, and hung storage.

use shadowbell_testing::wait;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use shadowbell_bench::workspace;
use shadowbell_guest::{Device, Drive, Firmware, Guest, Kernel, RunDir, Serve, Server};

use crate::dmesg;
use crate::exporter::Exporter;
use crate::setup::{Setup, character_device};
use crate::vfio::{boot, pack_with};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

/// Test programs: the disk model, cancels, and tests with a server.
const SOURCES: [&str; 3] = [
    "crates/disk-file/tests/model.rs",
    "crates/disk-file/tests/namespace.rs",
    "crates/shadowbell/tests/serve/main.rs",
];
/// Size of the disk for the model.
const SMALL: u64 = 1 << 20;
const SIZE: u64 = 16 << 20;
/// Injected delay of every command. The command can be cancelled during the delay.
const DELAY_FAULT: &str = "stall=30ms";
const HUNG_STORAGE: &str = "hung_storage::character_device_namespaces_pass";
/// Time limit of a test, in an emulated guest.
const TEST_TIMEOUT: Duration = Duration::from_secs(300);

/// Controllers, in the order of their PCI addresses.
const MODEL: usize = 0;
const LARGE_BLOCKS: usize = 1;
const QEMU_MODEL: usize = 2;
const SLOW: usize = 3;
const QEMU: usize = 4;
const STALLED: usize = 5;

/// Servers outside of the guest.
struct OutsideServers {
    servers: Vec<Server>,
    exporter: Exporter,
    devices: Vec<Device>,
}

impl OutsideServers {
    fn start(run: &RunDir, program: &Path) -> Result<Self> {
        let mut servers = Vec::new();
        let mut ours = |name: &str, disk: String, faults: &[&str]| -> Result<Device> {
            let serve =
                Serve { binary: program, name, disks: &[disk], options: faults, small: None };
            servers.push(Server::start(run, &serve)?);
            Ok(Device::VfioUser { socket: name.into() })
        };
        let qemu = |drive| Device::QemuNvme { drive, dbcs: true };
        let exporter = Exporter::start(&run.image("export.img", SIZE)?, &run.socket("export"))?;
        run.image("model.img", SMALL)?;
        run.image("qemu.img", SIZE)?;
        let export = format!("nbd+unix:///?socket={}", run.socket("export").display());
        let devices = vec![
            ours("model", format!("mem:{SMALL}"), &[])?,
            ours("large-blocks", format!("mem:{SMALL}?block-size=4096"), &[])?,
            qemu(Drive::Image("model.img".into())),
            ours("slow", format!("mem:{SIZE}"), &["--faults", DELAY_FAULT])?,
            qemu(Drive::Image("qemu.img".into())),
            ours("stalled", export, &[])?,
        ];
        Ok(Self { servers, exporter, devices })
    }
}

pub(super) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let program = setup.faulty()?;
    let tests = workspace::build_tests(&SOURCES)?;
    pack_with(setup, kernel, run, &[], &[], &tests)?;
    let OutsideServers { servers, exporter, devices } = OutsideServers::start(run, &program)?;
    let mut guest = booted(setup, kernel, run, devices.clone(), "")?;
    let mut check = |name: &str, source: usize, test: &str, device: usize| {
        report.check(name, |_| run_test(&mut guest, &tests, source, test, device, &exporter));
    };
    for (what, device) in
        [("ours", MODEL), ("ours, blocks of 4096 bytes", LARGE_BLOCKS), ("QEMU's", QEMU_MODEL)]
    {
        check(&format!("{what}: against a model"), 0, "namespaces", device);
    }
    check("requests are cancelled during I/O", 1, "requests_can_be_cancelled_in_mid_io", SLOW);
    let kinds = "disk_types::character_device_namespaces_pass";
    for (what, device) in [("ours, which is late", SLOW), ("QEMU's", QEMU)] {
        check(&format!("{what}: `verify`, and resets during I/O"), 2, kinds, device);
    }
    check("hung storage", 2, HUNG_STORAGE, STALLED);
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, 1));
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    let stalled: Vec<_> = devices.into_iter().skip(STALLED).take(1).collect();
    let name = "hung storage: the guest's kernel aborts commands and resets the device";
    report.check(name, |_| {
        let mut guest = booted(setup, kernel, run, stalled, "nvme_core.io_timeout=1")?;
        run_test(&mut guest, &tests, 2, HUNG_STORAGE, 0, &exporter)?;
        let log = guest.dmesg()?;
        for word in ["aborting", "reset controller"] {
            let times = log.lines().filter(|line| line.contains(word)).count();
            println!("         {times} times: {word}");
            ensure!(times > 0, "the kernel has waited: {log}");
        }
        guest.power_off(LIMIT)
    });
    for server in servers {
        report.check("the server ends without an error", |_| server.stop());
    }
    Ok(())
}

fn booted(
    setup: &Setup,
    kernel: Kernel,
    run: &RunDir,
    devices: Vec<Device>,
    words: &str,
) -> Result<Guest> {
    boot(setup, run, kernel, devices, |config| {
        config.iommu = false;
        // Multipath is off, because with it, two paths to a namespace have one character device.
        // The test needs one for each controller.
        config.firmware = Firmware::Direct { append: format!("nvme_core.multipath=0 {words}") };
    })
}

/// Executes a test on the character device of this controller. The test requests that the storage
/// behind the controller is stopped and resumed. This function does so.
fn run_test(
    guest: &mut Guest,
    tests: &[PathBuf],
    source: usize,
    test: &str,
    device: usize,
    exporter: &Exporter,
) -> Result<()> {
    let program = tests.get(source).and_then(|path| path.file_name()).context("no program")?;
    let program = program.to_string_lossy();
    let device = character_device(guest, device)?;
    guest.sh(
        &format!(
            "rm -rf /tmp/asks /tmp/code; mkdir /tmp/asks; \
             (SHADOWBELL_TEST_PROGRAM=/usr/sbin/shadowbell SHADOWBELL_TEST_STORAGE=/tmp/asks \
              SHADOWBELL_TEST_NAMESPACES={device} RUST_BACKTRACE=1 \
              {program} --exact {test} --nocapture >/tmp/test 2>&1; echo $? >/tmp/code.now; \
              mv /tmp/code.now /tmp/code) </dev/null >/dev/null 2>&1 &"
        ),
        LIMIT,
    )?;
    let ended = wait_for_end(guest, exporter);
    // The storage is resumed in any case, because a process that waits for hung storage cannot be
    // killed.
    exporter.resume()?;
    let said = guest.sh("cat /tmp/test", LIMIT)?;
    let code = ended.with_context(|| said.clone())?;
    ensure!(code == "0" && said.contains("1 passed"), "it ended with {code}: {said}");
    ensure!(!said.contains("skipped"), "{said}");
    Ok(())
}

/// Waits for the end of the test. Returns its exit status.
fn wait_for_end(guest: &mut Guest, exporter: &Exporter) -> Result<String> {
    let until = Instant::now() + TEST_TIMEOUT;
    loop {
        let said = guest.sh("[ -e /tmp/code ] && cat /tmp/code; ls /tmp/asks", LIMIT)?;
        for word in said.split_whitespace() {
            match word {
                "stall" => exporter.stall()?,
                "go-on" => exporter.resume()?,
                code => return Ok(code.to_owned()),
            }
            guest.sh(&format!("rm /tmp/asks/{word}"), LIMIT)?;
        }
        ensure!(Instant::now() < until, "it does not end");
        wait::pause();
    }
}
