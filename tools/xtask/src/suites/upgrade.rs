//! The server is replaced again and again under a Linux guest that knows nothing of it: while it
//! boots, writes, makes a file system, resets its controller. No error, no complaint, nothing lost.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use shadowbell_guest::{Kernel, RunDir};

use super::dmesg;
use super::setup::{MINUTE, Setup, finish, names};
use super::writer::{Writer, patrol};
use crate::report::Report;

const SIZE: u64 = 1 << 30;
/// Between two upgrades.
const PAUSE: Duration = Duration::from_millis(300);

/// Upgrades that go on until they are stopped.
struct Upgrades {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Count>>,
}

/// How many there were.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    done: u32,
    /// The old process went on, because it did not come to rest in time: the guest notices nothing
    /// of those either.
    put_off: u32,
    longest: Duration,
}

impl Upgrades {
    fn start(program: &Path, server: u32) -> Self {
        let (program, stop) = (program.to_owned(), Arc::<AtomicBool>::default());
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut count = Count::default();
            while !stopped.load(Ordering::Relaxed) {
                upgrade(&program, server, &mut count)?;
                std::thread::sleep(PAUSE);
            }
            Ok(count)
        });
        Self { stop, thread }
    }

    /// Ends them. An error if any has failed, or if nearly all were put off.
    fn stop(self) -> Result<Count> {
        self.stop.store(true, Ordering::Relaxed);
        let count = self.thread.join().map_err(|_| anyhow!("upgrades: a thread panicked"))??;
        ensure!(count.done >= 2, "too few upgrades: {count:?}");
        println!("   {count:?}");
        Ok(count)
    }
}

/// One upgrade, to the same program.
fn upgrade(program: &Path, server: u32, count: &mut Count) -> Result<()> {
    let began = Instant::now();
    let output = Command::new(program).args(["upgrade", &server.to_string()]).output()?;
    count.longest = count.longest.max(began.elapsed());
    match output.status.code() {
        Some(0) => count.done += 1,
        Some(1) => {
            let why = String::from_utf8_lossy(&output.stderr);
            // The only reason that is none to worry about.
            ensure!(why.contains(" within "), "an upgrade has failed: {why}");
            count.put_off += 1;
        }
        _ => bail!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)),
    }
    Ok(())
}

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let Some(program) = setup.shadowbell.clone() else {
        println!("   QEMU's own controller is part of QEMU: there is nothing to upgrade");
        return Ok(());
    };
    let image = run.image("disk.img", SIZE)?;
    let disks = [image.display().to_string()];
    let mut disk = setup.serve(run, "dut", &disks, &["--keeper"], None)?;
    let server = disk.server.as_ref().context("no server")?.id();
    let start = |program: &PathBuf| Upgrades::start(program, server);
    let mut writer = Writer::new(run, &image);

    let upgrades = start(&program);
    let booted = setup.boot(run, kernel, vec![disk.device.clone()], |_| {});
    report.check("while the guest boots", |_| upgrades.stop().map(drop));
    let mut guest = booted?;
    let (controller, dev) = names(&mut guest, 0)?;

    report.check("while eight threads write, every acknowledged write counted", |_| {
        let upgrades = start(&program);
        writer.start(&mut guest, &dev, 10)?;
        writer.join(&mut guest)?;
        upgrades.stop()?;
        disk.check()?;
        patrol(&mut guest)?;
        writer.verify().map(drop)
    });
    report.check("while fio writes and verifies, 32 at once", |_| {
        let upgrades = start(&program);
        guest.sh(
            &format!(
                "fio --name=verify --filename=/dev/{dev} --rw=randwrite --bsrange=512-64k \
                 --blockalign=512 --verify=crc32c --verify_fatal=1 --verify_backlog=64 \
                 --offset=512m --size=48m --iodepth=32 --direct=1 --ioengine=libaio \
                 --output-format=terse"
            ),
            Duration::from_secs(180),
        )?;
        upgrades.stop().map(drop)
    });
    report.check("while the controller is reset, eight times under load", |_| {
        let upgrades = start(&program);
        writer.start(&mut guest, &dev, 8)?;
        guest.sh(
            &format!(
                "for i in 1 2 3 4 5 6 7 8; do \
                    echo 1 >/sys/class/nvme/{controller}/reset_controller || exit 1; sleep 0.4; \
                 done"
            ),
            MINUTE,
        )?;
        writer.join(&mut guest)?;
        upgrades.stop()?;
        patrol(&mut guest)?;
        writer.verify().map(drop)
    });
    report.check("while a file system is made, filled and checked", |_| {
        let upgrades = start(&program);
        guest.sh(
            &format!(
                "mkfs.ext4 -q -F /dev/{dev} && mount /dev/{dev} /mnt && \
                 cp -a /usr/bin /mnt/ && sync && echo 3 >/proc/sys/vm/drop_caches && \
                 diff -r /usr/bin /mnt/bin && umount /mnt"
            ),
            Duration::from_secs(180),
        )?;
        upgrades.stop().map(drop)
    });
    report.check("the kernel has nothing to complain of", |_| dmesg::clean(&mut guest, 1));
    report.check("the server lives", |_| disk.check());
    finish(report, guest, disk);
    Ok(())
}
