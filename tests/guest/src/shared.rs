//! Two controllers of one subsystem in a Linux guest: a disk with two paths. The suite changes the
//! ANA states of the paths (module `ana`), removes a path under load, and tests reservations by
//! nvme-cli through one controller against the other.

use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use shadowbell_guest::config::pci_address;
use shadowbell_guest::{Device, Guest, Kernel, RunDir};

use super::ana::{self, Control};
use super::dmesg;
use super::nvme_cli::{json, number, nvme, refused};
use super::setup::{Setup, names};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const DISK: u64 = 256 << 20;
const CONFLICT: u16 = 0x083;

/// A server with a configuration file. Killed when dropped.
pub(crate) struct Served(ProcessGroup);

impl Served {
    /// Starts a server with two controllers of one subsystem at these sockets, on this image.
    pub(crate) fn start(
        binary: &Path,
        run: &RunDir,
        sockets: &[PathBuf; 2],
        image: &Path,
    ) -> Result<Self> {
        let state = run.file("reservations");
        let controllers = sockets.iter().map(|socket| {
            let (socket, image) = (socket.display(), image.display());
            format!(
                "[[controller]]\nsocket = \"{socket}\"\ndisks = [\"{image}\"]\n\
                 subsystem = \"pair\"\n"
            )
        });
        let text = format!(
            "workers = 2\ncontrol-socket = \"{}\"\n[[subsystem]]\nname = \"pair\"\n\
             state = \"{}\"\n{}",
            run.socket("control").display(),
            state.display(),
            controllers.collect::<String>(),
        );
        let config = run.file("pair.toml");
        fs::write(&config, text)?;
        let log = fs::File::create(run.file("serve-pair.log"))?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(binary).arg("serve").arg("--config").arg(config);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut served = Self(ProcessGroup::spawn(&mut command).context("shadowbell serve")?);
        let until = wait::deadline();
        while !sockets.iter().all(|socket| socket.exists()) {
            if let Some(status) = served.0.try_wait()? {
                let log = fs::read_to_string(run.file("serve-pair.log"))?;
                bail!("the server ended ({status}): {log}");
            }
            ensure!(Instant::now() < until, "the server does not serve");
            wait::pause();
        }
        Ok(served)
    }
}

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let Some(program) = setup.shadowbell.clone() else {
        println!("   QEMU's own controller is another suite's");
        return Ok(());
    };
    let image = run.image("disk.img", DISK)?;
    let sockets = ["one", "other"].map(|name| run.socket(name));
    let served = Served::start(&program, run, &sockets, &image)?;
    let devices = ["one", "other"].map(|socket| Device::VfioUser { socket: socket.to_owned() });
    let mut guest = setup.boot(run, kernel, devices.to_vec(), |config| config.cpus = 2)?;
    let (one, disk) = names(&mut guest, 0)?;
    let (other, same) = names(&mut guest, 1)?;
    report.check("one disk with two paths, of controllers 1 and 2", |_| {
        ensure!(disk == same, "two disks: {disk} and {same}");
        let cntlids = guest.sh("cat /sys/class/nvme/nvme*/cntlid | sort | xargs", LIMIT)?;
        ensure!(cntlids.trim() == "1 2", "controllers {cntlids}");
        let id = json(&mut guest, &format!("id-ctrl /dev/{one}"))?;
        ensure!(number(&id, "cmic")? & 0b11 == 0b11, "CMIC");
        let id = json(&mut guest, &format!("id-ns /dev/{disk}"))?;
        ensure!((number(&id, "nmic")?, number(&id, "rescap")?) == (1, 0xff), "NMIC, RESCAP");
        let list = nvme(&mut guest, &format!("list-ctrl /dev/{one}"))?;
        ensure!(list.matches("0x").count() >= 2, "list-ctrl: {list}");
        Ok(())
    });
    let names_of_both = [one.clone(), other.clone()];
    let control =
        Control { program: &program, socket: run.socket("control"), controllers: &sockets };
    ana::check(&mut guest, report, &control, (&names_of_both, &disk), &load(&disk));
    report.check("a path is removed and added again, five times, while fio verifies", |_| {
        guest.sh(&load(&disk), LIMIT)?;
        let address = pci_address(0);
        for _ in 0..5 {
            let away = format!("sleep 1; echo 1 > /sys/bus/pci/devices/{address}/remove");
            guest.sh(&away, LIMIT)?;
            guest.sh("sleep 1; echo 1 > /sys/bus/pci/rescan", LIMIT)?;
            names(&mut guest, 0)?;
        }
        ana::wait_for_end(&mut guest)
    });
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, 2));
    let one = names(&mut guest, 0).map_or(one, |(name, _)| name);
    report.check(
        "a reservation of one controller excludes the other, until the other preempts it",
        |_| reserve(&mut guest, &one, &other),
    );
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    drop(served);
    Ok(())
}

/// fio job that reads and writes with checksums until the file /tmp/enough exists.
fn load(disk: &str) -> String {
    format!(
        "(until [ -e /tmp/enough ]; do \
            fio --name=paths --filename=/dev/{disk} --rw=randrw --bs=4k --iodepth=8 --size=8m \
                --direct=1 --ioengine=libaio --verify=crc32c --verify_state_save=0 \
                >/tmp/fio.out 2>&1 || break; \
         done; [ -e /tmp/enough ]; echo $? >/tmp/fio.done) &"
    )
}

/// nvme-cli command that writes or reads one block through a controller.
fn transfer(controller: &str, writes: bool) -> String {
    let (opcode, way) = if writes { (1, "--write --input-file=/tmp/block") } else { (2, "--read") };
    format!(
        "io-passthru /dev/{controller} --opcode={opcode} --namespace-id=1 --data-len=512 {way} \
         >/dev/null"
    )
}

fn reserve(guest: &mut Guest, one: &str, other: &str) -> Result<()> {
    guest.sh("head -c 512 /dev/zero >/tmp/block", LIMIT)?;
    let unknown = format!("resv-register /dev/{one} -n 1 --nrkey=10 --rrega=0");
    // 027h is Host Identifier Not Initialized.
    refused(guest, &unknown, &[0x027])?;
    for (controller, id) in [(one, "1"), (other, "2")] {
        let identifier = format!("for n in $(seq 16); do printf '\\00{id}'; done >/tmp/host");
        guest.sh(&identifier, LIMIT)?;
        nvme(
            guest,
            &format!("set-feature /dev/{controller} -f 0x81 --value=1 -l 16 -d /tmp/host"),
        )?;
    }
    nvme(guest, &format!("resv-register /dev/{one} -n 1 --nrkey=10 --rrega=0"))?;
    nvme(guest, &format!("resv-register /dev/{other} -n 1 --nrkey=11 --rrega=0"))?;
    nvme(guest, &format!("resv-acquire /dev/{one} -n 1 --crkey=10 --rtype=2 --racqa=0"))?;
    nvme(guest, &transfer(one, true))?;
    refused(guest, &transfer(other, true), &[CONFLICT])?;
    refused(guest, &transfer(other, false), &[CONFLICT])?;
    let report = nvme(guest, &format!("resv-report /dev/{other} -n 1 --eds"))?;
    ensure!(report.contains("regctl"), "resv-report: {report}");
    let preempt =
        format!("resv-acquire /dev/{other} -n 1 --crkey=11 --prkey=10 --rtype=2 --racqa=2");
    nvme(guest, &preempt)?;
    nvme(guest, &transfer(other, true))?;
    refused(guest, &transfer(one, true), &[CONFLICT])?;
    let acquire = format!("resv-acquire /dev/{one} -n 1 --crkey=10 --rtype=2 --racqa=0");
    refused(guest, &acquire, &[CONFLICT])?;
    nvme(guest, &format!("resv-release /dev/{other} -n 1 --crkey=11 --rtype=2 --rrela=0"))?;
    nvme(guest, &transfer(one, true))?;
    nvme(guest, &format!("resv-release /dev/{other} -n 1 --crkey=11 --rrela=1"))?;
    Ok(())
}
