//! Reservations by nvme-cli in two guests. Each guest has its own Host Identifier and its own
//! controller, and both share one disk. After a preemption, writes of the host that has lost the
//! reservation must fail.

use anyhow::{Context, Result, ensure};
use shadowbell_guest::{Device, Guest, Kernel, RunDir};

use super::dmesg;
use super::nvme_cli::{json, number, nvme, refused};
use super::setup::{Setup, names};
use super::shared::Served;
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const DISK: u64 = 64 << 20;
const CONFLICT: u16 = 0x083;
/// RTYPE Write Exclusive: only the holder writes, all hosts may read.
const WRITE_EXCLUSIVE: u8 = 1;
const ROUNDS: u64 = 5;

/// A guest, and the name of the disk in it.
struct ReservationHost {
    guest: Guest,
    controller: String,
    disk: String,
    key: u64,
}

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let Some(program) = setup.shadowbell.clone() else {
        println!("   QEMU's own controller is another suite's");
        return Ok(());
    };
    let image = run.image("disk.img", DISK)?;
    // Each guest needs a directory of its own. That of the second guest is deleted at the end,
    // because its logs contain nothing that the first does not.
    let second = RunDir::new(setup.roots.directory())?;
    let sockets = [run.socket("one"), second.socket("other")];
    let served = Served::start(&program, run, &sockets, &image)?;
    // QEMU ends together with the thread that started it. So this thread boots both guests, one
    // after the other.
    let mut one = ReservationHost::boot(setup, kernel, run, "one", 1)?;
    let mut other = ReservationHost::boot(setup, kernel, &second, "other", 2)?;
    report.check("both guests register, and one reserves the disk", |_| {
        one.register()?;
        other.register()?;
        one.acquire(None)?;
        one.reports(2)?;
        other.reports(2)
    });
    report.check(
        "the other guest reads the holder's writes, and its own writes are refused",
        |_| {
            one.write('1')?;
            other.reads('1')?;
            other.is_excluded()?;
            other.reads('1')
        },
    );
    report.check("a guest that is preempted while it writes writes no more", |_| {
        one.writes_all_the_time()?;
        other.acquire(Some(&one))?;
        other.write('2')?;
        one.wait_for_failed_write()?;
        other.reads('2')?;
        one.reads('2')?;
        one.is_excluded()?;
        one.has_preemption_notice()
    });
    report.check("the preempted guest registers again and preempts the holder, five times", |_| {
        for round in 0..ROUNDS {
            let (loser, winner) = match round % 2 {
                0 => (&mut one, &mut other),
                _ => (&mut other, &mut one),
            };
            // An unregistered host can neither acquire nor preempt.
            let acquisition = loser.acquisition(Some(winner));
            refused(&mut loser.guest, &acquisition, &[CONFLICT])?;
            loser.register()?;
            loser.is_excluded()?;
            loser.acquire(Some(winner))?;
            let byte = char::from(b'a' + round as u8);
            loser.write(byte)?;
            winner.is_excluded()?;
            winner.reads(byte)?;
            loser.reports(1)?;
        }
        Ok(())
    });
    report.check("after the release both guests write", |_| {
        let (holder, free) =
            if ROUNDS.is_multiple_of(2) { (&mut other, &mut one) } else { (&mut one, &mut other) };
        holder.release()?;
        free.write('x')?;
        holder.reads('x')?;
        holder.write('y')?;
        free.reads('y')
    });
    report.check("the kernels log only reservation conflicts", |_| {
        for rival in [&mut one, &mut other] {
            // The kernel logs every refused write.
            let log = rival.guest.dmesg()?;
            let others = log.lines().filter(|line| !is_expected(line));
            dmesg::clean_in(&others.collect::<Vec<_>>().join("\n"), 1)?;
        }
        Ok(())
    });
    report.check("the guests power off", |_| {
        one.guest.power_off(LIMIT)?;
        other.guest.power_off(LIMIT)
    });
    drop(served);
    Ok(())
}

fn is_expected(line: &str) -> bool {
    // Before Linux 6.4, the block layer logs a reservation conflict as "critical nexus error".
    let is_conflict = ["reservation conflict", "Reservation Conflict", "critical nexus error"]
        .iter()
        .any(|sentence| line.contains(sentence));
    // Newer kernels also log failed passthrough commands.
    is_conflict
        || line.contains("(sct 0x0 / sc 0x83)")
        || line.contains("deprecated NVME_IOCTL_IO_CMD")
}

impl ReservationHost {
    fn boot(setup: &Setup, kernel: Kernel, run: &RunDir, socket: &str, id: u64) -> Result<Self> {
        let devices = vec![Device::VfioUser { socket: socket.to_owned() }];
        let mut guest = setup.boot(run, kernel, devices, |config| config.cpus = 1)?;
        let (controller, disk) = names(&mut guest, 0)?;
        let mut rival = Self { guest, controller, disk, key: 0x10 * id };
        let identifier = format!("for n in $(seq 16); do printf '\\00{id}'; done >/tmp/host");
        rival.guest.sh(&identifier, LIMIT)?;
        rival.command("set-feature", "-f 0x81 --value=1 -l 16 -d /tmp/host")?;
        Ok(rival)
    }

    fn command(&mut self, verb: &str, options: &str) -> Result<String> {
        nvme(&mut self.guest, &format!("{verb} /dev/{} {options}", self.controller))
    }

    /// Registers with a new key.
    fn register(&mut self) -> Result<()> {
        self.key += 1;
        let options = format!("-n 1 --nrkey={} --rrega=0", self.key);
        self.command("resv-register", &options).map(drop)
    }

    fn acquisition(&self, from: Option<&Self>) -> String {
        let (action, of) = from.map_or((0, 0), |rival| (2, rival.key));
        format!(
            "resv-acquire /dev/{} -n 1 --crkey={} --prkey={of} --rtype={WRITE_EXCLUSIVE} \
             --racqa={action}",
            self.controller, self.key
        )
    }

    /// Acquires the reservation. With `from`, preempts the reservation of that host and aborts its
    /// commands in flight.
    fn acquire(&mut self, from: Option<&Self>) -> Result<()> {
        let acquisition = self.acquisition(from);
        nvme(&mut self.guest, &acquisition).map(drop)
    }

    fn release(&mut self) -> Result<()> {
        let options = format!("-n 1 --crkey={} --rtype={WRITE_EXCLUSIVE} --rrela=0", self.key);
        self.command("resv-release", &options).map(drop)
    }

    /// Checks the Reservation Report: the number of registrants, and the type of the reservation.
    fn reports(&mut self, registrants: u64) -> Result<()> {
        let report =
            json(&mut self.guest, &format!("resv-report /dev/{} -n 1 --eds", self.controller))?;
        let now = (number(&report, "regctl")?, number(&report, "rtype")?);
        ensure!(now == (registrants, WRITE_EXCLUSIVE.into()), "regctl and rtype are {now:?}");
        Ok(())
    }

    /// Writes 256 KiB filled with `byte`, without the guest's page cache.
    fn write(&mut self, byte: char) -> Result<()> {
        let script = format!(
            "head -c 262144 /dev/zero | tr '\\0' '{byte}' >/tmp/data && \
             dd if=/tmp/data of=/dev/{} bs=4k oflag=direct 2>/dev/null",
            self.disk
        );
        self.guest.sh(&script, LIMIT).map(drop)
    }

    /// Checks that each byte of these 256 KiB is `byte`.
    fn reads(&mut self, byte: char) -> Result<()> {
        let script = format!(
            "head -c 262144 /dev/zero | tr '\\0' '{byte}' >/tmp/wanted && \
             dd if=/dev/{} bs=4k count=64 iflag=direct 2>/dev/null | cmp - /tmp/wanted",
            self.disk
        );
        self.guest.sh(&script, LIMIT).map(drop)
    }

    /// Checks that the controller refuses a write, and that a write to the block device fails.
    fn is_excluded(&mut self) -> Result<()> {
        self.guest.sh("head -c 4096 /dev/zero | tr '\\0' '!' >/tmp/block", LIMIT)?;
        let write = format!(
            "io-passthru /dev/{} --opcode=1 --namespace-id=1 --data-len=4096 --cdw12=7 --write \
             --input-file=/tmp/block >/dev/null",
            self.controller
        );
        refused(&mut self.guest, &write, &[CONFLICT])?;
        let script = format!("dd if=/tmp/block of=/dev/{} bs=4k oflag=direct", self.disk);
        let output = self.guest.run(&script, LIMIT)?;
        ensure!(output.code != 0, "the disk has taken a write: {}", output.text);
        Ok(())
    }

    /// Writes in the background until a write fails.
    fn writes_all_the_time(&mut self) -> Result<()> {
        let script = format!(
            "rm -f /tmp/lost; (while dd if=/tmp/data of=/dev/{} bs=4k oflag=direct 2>/tmp/why; do \
                echo >>/tmp/rounds; \
             done; touch /tmp/lost) & \
             for try in $(seq 600); do [ -e /tmp/rounds ] && exit 0; sleep 0.1; done; exit 1",
            self.disk
        );
        self.guest.sh(&script, LIMIT).map(drop)
    }

    /// Waits until a write of the background loop has failed.
    fn wait_for_failed_write(&mut self) -> Result<()> {
        let script =
            "for try in $(seq 600); do [ -e /tmp/lost ] && exit 0; sleep 0.1; done; exit 1";
        self.guest.sh(script, LIMIT).context("writes did not fail").map(drop)
    }

    /// Checks that the reservation log page reports the preempted registration.
    fn has_preemption_notice(&mut self) -> Result<()> {
        let script = format!(
            "nvme get-log /dev/{} -i 0x80 -l 64 -b | od -An -tu1 -j8 -N1 | tr -d ' '",
            self.controller
        );
        let kind = self.guest.sh(&script, LIMIT)?;
        ensure!(kind.trim() == "1", "the notice is of type {kind}");
        Ok(())
    }
}
