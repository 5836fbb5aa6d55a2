//! Repeated replacement of the server process of a Linux guest, by restart for upgrade or by `kill
//! -9`. Meanwhile the guest boots, writes, makes a file system and resets its controller. No
//! command may fail, no acknowledged write may be lost, and the guest's kernel may log no warning.

mod count;
mod kill;
mod upgrade;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use shadowbell_guest::{Kernel, RunDir};

use self::count::Count;
pub(super) use self::kill::kill_worker;
pub(super) use self::upgrade::upgrade_worker;
use super::dmesg;
use super::setup::{Disk, Setup, finish, names};
use super::writer::{Writer, patrol};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const SIZE: u64 = 1 << 30;
/// Pause between two events.
const PAUSE: Duration = Duration::from_millis(300);

/// Kind of replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// `shadowbell upgrade`, to the same program.
    Upgrade,
    /// `kill -9` of the server process.
    Kill,
}

/// A server, and the kind of replacement that it undergoes.
#[derive(Debug, Clone)]
struct Subject {
    event: Event,
    program: PathBuf,
    /// Process id of the supervisor.
    server: u32,
}

impl Subject {
    fn once(&self, count: &mut Count) -> Result<()> {
        let began = Instant::now();
        match self.event {
            Event::Upgrade => upgrade::once(&self.program, self.server, count)?,
            Event::Kill => kill::once(self.server, count)?,
        }
        count.longest = count.longest.max(began.elapsed());
        Ok(())
    }

    /// Starts a thread that repeats the kind of replacement under test until it is stopped.
    fn start(&self) -> Events {
        let (subject, stop) = (self.clone(), Arc::<AtomicBool>::default());
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut count = Count::default();
            while !stopped.load(Ordering::Relaxed) {
                subject.once(&mut count)?;
                std::thread::sleep(PAUSE);
            }
            Ok(count)
        });
        Events { stop, thread }
    }
}

/// A thread that replaces the server process again and again until it is stopped.
struct Events {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Count>>,
}

impl Events {
    /// Stops the thread, and adds the number of replacements to `all`. Fails if a replacement has
    /// failed, or if there were fewer than two.
    fn stop(self, all: &mut u32) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let count = self.thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        ensure!(count.done >= 2, "too few: {count:?}");
        println!("   {count:?}");
        *all += count.done;
        Ok(())
    }
}

pub(crate) fn run(
    setup: &Setup,
    report: &mut Report,
    kernel: Kernel,
    run: &RunDir,
    event: Event,
) -> Result<()> {
    let Some(program) = setup.shadowbell.clone() else {
        println!("   skipped: QEMU's own controller has no server process");
        return Ok(());
    };
    let image = run.image("disk.img", SIZE)?;
    let disks = [image.display().to_string()];
    let mut disk = setup.serve(run, "dut", &disks, &[], None)?;
    let server = disk.server.as_ref().context("no server")?.id();
    let subject = Subject { event, program, server };
    let mut writer = Writer::new(run, &image);
    let mut all = 0;

    let events = subject.start();
    let booted = setup.boot(run, kernel, vec![disk.device.clone()], |_| {});
    report.check("while the guest boots", |_| events.stop(&mut all));
    let mut guest = booted?;
    let (controller, dev) = names(&mut guest, 0)?;

    report.check("while eight threads write, every acknowledged write counted", |_| {
        let events = subject.start();
        writer.start(&mut guest, &dev, 10)?;
        writer.join(&mut guest)?;
        events.stop(&mut all)?;
        disk.check()?;
        patrol(&mut guest)?;
        writer.verify().map(drop)
    });
    report.check("while fio writes and verifies, 32 at once", |_| {
        let events = subject.start();
        guest.sh(&fio(&dev, "--size=48m"), LIMIT)?;
        events.stop(&mut all)
    });
    report.check("while the controller is reset, eight times under load", |_| {
        let events = subject.start();
        writer.start(&mut guest, &dev, 8)?;
        guest.sh(
            &format!(
                "for i in 1 2 3 4 5 6 7 8; do \
                    echo 1 >/sys/class/nvme/{controller}/reset_controller || exit 1; sleep 0.4; \
                 done"
            ),
            LIMIT,
        )?;
        writer.join(&mut guest)?;
        events.stop(&mut all)?;
        patrol(&mut guest)?;
        writer.verify().map(drop)
    });
    report.check("while a file system is made, filled and checked", |_| {
        let events = subject.start();
        guest.sh(
            &format!(
                "mkfs.ext4 -q -F /dev/{dev} && mount /dev/{dev} /mnt && \
                 cp -a /usr/bin /mnt/ && sync && echo 3 >/proc/sys/vm/drop_caches && \
                 diff -r /usr/bin /mnt/bin && umount /mnt"
            ),
            LIMIT,
        )?;
        events.stop(&mut all)
    });
    // Replaces the server process again and again while fio runs, as often as the command line
    // requests.
    while all < setup.events {
        let before = all;
        let left = setup.events - all;
        let more = report.check(&format!("{left} more, while fio writes and verifies"), |_| {
            let events = subject.start();
            let some = "--size=48m --time_based --runtime=20";
            guest.sh(&fio(&dev, some), LIMIT)?;
            events.stop(&mut all)
        });
        if more.is_none() || all == before {
            break;
        }
    }
    println!("   {all} in all");
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, 1));
    report.check("the server is running", |_| is_running(&mut disk));
    finish(report, guest, disk);
    Ok(())
}

/// Fails if a client has lost its controller, or if the server has ended.
fn is_running(disk: &mut Disk) -> Result<()> {
    disk.check()?;
    let log = disk.server.as_ref().context("no server")?.log()?;
    let lost = log.lines().find(|line| line.contains("have lost"));
    ensure!(lost.is_none(), "{}", lost.unwrap_or_default());
    Ok(())
}

/// fio job that writes and verifies with 32 commands in flight.
fn fio(dev: &str, how_much: &str) -> String {
    format!(
        "fio --name=verify --filename=/dev/{dev} --rw=randwrite --bsrange=512-64k \
         --blockalign=512 --verify=crc32c --verify_fatal=1 --verify_backlog=64 \
         --offset=512m {how_much} --iodepth=32 --direct=1 --ioengine=libaio \
         --output-format=terse"
    )
}
