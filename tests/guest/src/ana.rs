//! Asymmetric Namespace Access in a Linux guest: checks which of two paths the kernel uses,
//! depending on their ANA states.

use shadowbell_testing::wait;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use shadowbell_guest::Guest;

use super::dmesg;
use super::nvme_cli::{json, number, nvme, refused};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const INACCESSIBLE: u16 = 0x302;

/// Control socket of a server, and the program that sends requests to it.
pub(crate) struct Control<'a> {
    pub(crate) program: &'a Path,
    pub(crate) socket: PathBuf,
    /// Sockets of the two controllers.
    pub(crate) controllers: &'a [PathBuf; 2],
}

impl Control<'_> {
    fn ctl(&self, words: &[&str]) -> Result<String> {
        let mut command = Command::new(self.program);
        command.arg("ctl").arg("--server").arg(&self.socket).args(words);
        let output = command.output().context("shadowbell ctl")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ctl {}: {errors}", words.join(" "));
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Sets the ANA state of the namespace for one controller.
    fn set(&self, which: usize, state: &str) -> Result<()> {
        let controller = self.controllers[which].display().to_string();
        self.ctl(&["ana", &controller, "1", state]).map(drop)
    }

    /// Number of reads and writes that each controller has executed.
    fn counts(&self) -> Result<[u64; 2]> {
        let stats: Value = serde_json::from_str(&self.ctl(&["stats", "--json"])?)?;
        let all = stats["controllers"].as_array().context("no controllers")?;
        let count = |socket: &PathBuf| -> Result<u64> {
            let name = socket.display().to_string();
            let of = all.iter().find(|one| one["socket"].as_str() == Some(&name));
            let io = &of.with_context(|| format!("no {name} in {stats}"))?["io"];
            Ok(number(io, "reads")? + number(io, "writes")?)
        };
        let [one, other] = self.controllers;
        Ok([count(one)?, count(other)?])
    }

    /// Number of commands that each controller executes in the time `length`.
    fn commands_within(&self, length: Duration) -> Result<[u64; 2]> {
        let before = self.counts()?;
        // Duration of the measurement, in which the commands are counted.
        sleep(length);
        let after = self.counts()?;
        Ok([after[0] - before[0], after[1] - before[1]])
    }

    /// Waits until a controller has executed 20 more commands. No rate is required, because the
    /// guest may be slow.
    fn wait_for_commands(&self, which: usize) -> Result<()> {
        let (before, until) = (self.counts()?[which], Instant::now() + LIMIT);
        while self.counts()?[which] < before + 20 {
            ensure!(Instant::now() < until, "controller {which} executes no commands");
            wait::pause();
        }
        Ok(())
    }
}

/// Waits until the guest reports the ANA state `state` for a path.
fn wait_for_ana_state(guest: &mut Guest, controller: &str, state: &str) -> Result<()> {
    let script = format!(
        "for try in $(seq 600); do \
            now=$(cat $(find /sys/class/nvme/{controller}/ -name ana_state | head -n 1)); \
            [ \"$now\" = {state} ] && exit 0; sleep 0.1; \
         done; echo it is \"$now\"; exit 1"
    );
    guest.sh(&script, LIMIT).map(drop)
}

/// Sets the round-robin policy. With it the kernel uses both paths if their ANA states are equal.
fn set_round_robin(guest: &mut Guest) -> Result<()> {
    let script = "for policy in /sys/class/nvme-subsystem/nvme-subsys*/iopolicy; do \
                    echo round-robin >$policy; done";
    guest.sh(script, LIMIT).map(drop)
}

/// Checks of ANA. `names` are the names of the two controllers, and `disk` is that of the disk that
/// they share. A load runs in the background until the file /tmp/enough exists, and then writes its
/// exit status to /tmp/fio.done.
pub(crate) fn check(
    guest: &mut Guest,
    report: &mut Report,
    control: &Control<'_>,
    (names, disk): (&[String; 2], &str),
    load: &str,
) {
    report.check("the guest reports the ANA states of its paths", |_| {
        let id = json(guest, &format!("id-ctrl /dev/{}", names[0]))?;
        ensure!(number(&id, "cmic")? & 8 != 0, "CMIC");
        ensure!(number(&id, "anacap")? == 0x5f && number(&id, "anatt")? == 60, "ANACAP, ANATT");
        let id = json(guest, &format!("id-ns /dev/{disk}"))?;
        ensure!(number(&id, "anagrpid")? == 1, "ANAGRPID");
        for state in ["inaccessible", "persistent-loss", "non-optimized", "change", "optimized"] {
            control.set(0, state)?;
            wait_for_ana_state(guest, &names[0], state)?;
            wait_for_ana_state(guest, &names[1], "optimized")?;
        }
        control.set(0, "inaccessible")?;
        wait_for_ana_state(guest, &names[0], "inaccessible")?;
        let list = nvme(guest, &format!("list-subsys /dev/{disk}"))?;
        let states = ["inaccessible", "optimized"].map(|state| list.matches(state).count());
        ensure!(states == [1, 1], "list-subsys: {list}");
        let log = nvme(guest, &format!("ana-log /dev/{}", names[0]))?;
        ensure!(log.contains("inaccessible"), "ana-log: {log}");
        let read = format!(
            "io-passthru /dev/{} --opcode=2 --namespace-id=1 --data-len=512 --read >/dev/null",
            names[0]
        );
        refused(guest, &read, &[INACCESSIBLE])?;
        // The kernel logs that the passthrough command was refused, which the test expects. The log
        // is cleared, because later checks would count this line as an error.
        guest.sh("dmesg -c >/dev/null", LIMIT)?;
        control.set(0, "optimized")?;
        wait_for_ana_state(guest, &names[0], "optimized")
    });
    report.check("a non-optimized path is not used beside an optimized one", |_| {
        set_round_robin(guest)?;
        guest.sh(load, LIMIT)?;
        // Both paths are optimized, so both must execute commands.
        control.wait_for_commands(0)?;
        control.wait_for_commands(1)?;
        for which in [0, 1] {
            control.set(which, "non-optimized")?;
            wait_for_ana_state(guest, &names[which], "non-optimized")?;
            // The commands in flight on this path have ended. In these two seconds, the path must
            // receive no further command, and the other path must receive the load.
            let counts = control.commands_within(Duration::from_secs(2))?;
            ensure!(
                counts[which] == 0 && counts[1 - which] > 50,
                "while {which} is not: {counts:?}"
            );
            control.set(which, "optimized")?;
            wait_for_ana_state(guest, &names[which], "optimized")?;
            control.wait_for_commands(which)?;
        }
        // Two non-optimized paths are used if there is no optimized one.
        control.set(0, "non-optimized")?;
        control.set(1, "non-optimized")?;
        control.wait_for_commands(0)?;
        for which in [0, 1] {
            control.set(which, "optimized")?;
            wait_for_ana_state(guest, &names[which], "optimized")?;
        }
        Ok(())
    });
    report.check("an inaccessible path is not used: ten changes under a verifying load", |_| {
        for round in 0..10 {
            let which = round % 2;
            control.set(which, "inaccessible")?;
            // Time in which the path must receive no command.
            let counts = control.commands_within(Duration::from_millis(500))?;
            ensure!(counts[which] == 0, "round {round}: {counts:?}");
            control.wait_for_commands(1 - which)?;
            control.set(which, "optimized")?;
            // The guest must read the new state of the optimized path before the other path becomes
            // inaccessible. Otherwise the kernel logs that no path is usable.
            wait_for_ana_state(guest, &names[which], "optimized")?;
        }
        Ok(())
    });
    report.check("the kernel logs no warning about the changes", |_| dmesg::clean(guest, 2));
    report.check("without a usable path the load waits, and then continues", |_| {
        for state in ["inaccessible", "change"] {
            control.set(0, state)?;
            control.set(1, state)?;
            // Time in which neither path must receive a command.
            let counts = control.commands_within(Duration::from_secs(1))?;
            ensure!(counts == [0, 0], "{state}: {counts:?}");
            control.set(1, "optimized")?;
            control.wait_for_commands(1)?;
            control.set(0, "optimized")?;
        }
        let log = guest.dmesg()?;
        ensure!(log.contains("no usable path"), "{log}");
        guest.sh("dmesg -c >/dev/null", LIMIT).map(drop)
    });
    report.check("the load has no error", |_| wait_for_end(guest));
}

/// Waits for the end of the load. The load must have succeeded.
pub(crate) fn wait_for_end(guest: &mut Guest) -> Result<()> {
    let wait = "touch /tmp/enough; for try in $(seq 600); do [ -e /tmp/fio.done ] && break; \
                sleep 0.1; done; tail -n 20 /tmp/fio.out; code=$(cat /tmp/fio.done || echo 99); \
                rm -f /tmp/enough /tmp/fio.done; exit $code";
    let output = guest.run(wait, LIMIT)?;
    if output.code != 0 {
        let more = guest.run(PRINT_LOAD_STATE, LIMIT)?;
        bail!("fio: {}{}", output.text, more.text);
    }
    Ok(())
}

/// Shell commands that print the guest's state, for a load that makes no progress.
const PRINT_LOAD_STATE: &str = "\
    for disk in /sys/block/nvme*; do echo $disk in flight: $(cat $disk/inflight); done; \
    for path in /sys/class/nvme/*/nvme*/ana_state; do echo $path $(cat $path); done; \
    cat /sys/class/nvme/*/state; \
    for process in $(pidof fio); do cat /proc/$process/stack; done; \
    grep -i nvme /proc/interrupts; dmesg | tail -n 15";
