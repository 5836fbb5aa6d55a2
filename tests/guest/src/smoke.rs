//! Basic test: the kernel and nvme-cli use the controller, and invalid commands are refused.

use anyhow::{Context, Result, bail, ensure};
use shadowbell_guest::{Firmware, Guest, Kernel, RunDir};

use super::nvme_cli::{json, number, nvme, refused, text};
use super::setup::{ControllerKind, Setup, finish, names};
use super::{dmesg, idle};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const SIZE: u64 = 1 << 30;
const CPUS: u32 = 2;

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let image = run.image("disk.img", SIZE)?;
    let mut disk = setup.disk(run, &image)?;
    let mut guest =
        setup.boot(run, kernel, vec![disk.device.clone()], |config| config.cpus = CPUS)?;
    let (ctrl, dev) = names(&mut guest, 0)?;
    let shadowbell = setup.controller == ControllerKind::Shadowbell;

    report
        .check("attaching causes no warning in the kernel's log", |_| dmesg::clean(&mut guest, 1));
    report.check("a queue pair and an interrupt vector per processor", |_| {
        let queues = guest.sh(&format!("grep -c ' {ctrl}q' /proc/interrupts"), LIMIT)?;
        ensure!(queues.trim() == (CPUS + 1).to_string(), "{queues} vectors for {CPUS} processors");
        Ok(())
    });
    identify(report, &mut guest, &ctrl, &dev, shadowbell);
    logs(report, &mut guest, &ctrl, &dev, shadowbell);
    features(report, &mut guest, &ctrl, shadowbell);
    data_commands(report, &mut guest, &dev, shadowbell);
    if shadowbell {
        diagnostics(report, &mut guest, &ctrl, &dev);
    }
    refusals(report, &mut guest, &ctrl, &dev);
    if let Some(server) = &disk.server {
        report.check("an idle controller sleeps: no processor time, no context switch", |_| {
            idle::check(server.id())
        });
    }
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, 1));
    report.check("the server is running", |_| disk.check());
    finish(report, guest, disk);
    if shadowbell {
        report.check("a QEMU without shared memory gets the name of the missing option", |_| {
            without_shared_memory(setup, kernel, run, &image)
        });
    }
    Ok(())
}

fn identify(report: &mut Report, guest: &mut Guest, ctrl: &str, dev: &str, shadowbell: bool) {
    report.check("nvme list", |_| {
        let list = json(guest, "list")?;
        let entry = list.pointer("/Devices/0").context("no devices")?;
        ensure!(text(entry, "DevicePath")? == format!("/dev/{dev}"), "{entry}");
        ensure!(number(entry, "PhysicalSize")? == SIZE, "{entry}");
        text(entry, "ModelNumber")?;
        text(entry, "SerialNumber")
    });
    report.check("nvme id-ctrl", |_| {
        let id = json(guest, &format!("id-ctrl /dev/{ctrl}"))?;
        for name in ["sn", "mn", "fr"] {
            text(&id, name)?;
        }
        ensure!(text(&id, "subnqn")?.starts_with("nqn."), "subnqn");
        ensure!(number(&id, "cntrltype")? == 1, "not an I/O controller");
        // Required and maximum sizes of queue entries: 64 and 16 bytes.
        ensure!(number(&id, "sqes")? & 0xf == 6 && number(&id, "cqes")? & 0xf == 4, "sqes, cqes");
        ensure!(number(&id, "nn")? >= 1, "nn");
        ensure!(number(&id, "vwc")? & 1 == 1, "no volatile write cache, but an image has one");
        let doorbells = 1 << 8;
        ensure!(number(&id, "oacs")? & doorbells != 0, "no Doorbell Buffer Config");
        if shadowbell {
            ensure!(number(&id, "ver")? >= 0x2_0000, "older than NVMe 2.0");
            let mdts = number(&id, "mdts")?;
            ensure!(mdts == 0 || mdts >= 8, "less than 1 MiB in one command");
        }
        Ok(())
    });
    report.check("nvme id-ns", |_| {
        let id = json(guest, &format!("id-ns /dev/{dev}"))?;
        let (nsze, ncap, nuse) = (number(&id, "nsze")?, number(&id, "ncap")?, number(&id, "nuse")?);
        ensure!(nuse <= ncap && ncap <= nsze, "nsze {nsze}, ncap {ncap}, nuse {nuse}");
        let format = number(&id, "flbas")? & 0xf;
        let shift = id
            .pointer(&format!("/lbafs/{format}"))
            .context("the format in use is not listed")
            .and_then(|format| number(format, "ds"))?;
        ensure!(nsze << shift == SIZE, "{nsze} blocks of {} bytes", 1 << shift);
        let sectors = guest.sh(&format!("cat /sys/block/{dev}/size"), LIMIT)?;
        ensure!(sectors.trim() == (SIZE / 512).to_string(), "the kernel reports {sectors} sectors");
        Ok(())
    });
    report.check("namespaces, their descriptors, and the lists of NVMe 2.0", |_| {
        let list = json(guest, &format!("list-ns /dev/{ctrl}"))?;
        ensure!(list.pointer("/nsid_list/0/nsid") == Some(&1.into()), "{list}");
        let descriptors = json(guest, &format!("ns-descs /dev/{dev}"))?.to_string();
        ensure!(descriptors.contains("csi"), "no command set identifier: {descriptors}");
        if shadowbell {
            let unique = ["eui64", "nguid", "uuid"].iter().any(|name| descriptors.contains(name));
            ensure!(unique, "no unique identifier: {descriptors}");
        }
        for verb in ["cmdset-ind-id-ns", "nvm-id-ns"] {
            nvme(guest, &format!("{verb} /dev/{dev}"))?;
        }
        for verb in ["nvm-id-ctrl", "id-iocs"] {
            nvme(guest, &format!("{verb} /dev/{ctrl}"))?;
        }
        Ok(())
    });
}

fn logs(report: &mut Report, guest: &mut Guest, ctrl: &str, dev: &str, shadowbell: bool) {
    report.check("nvme smart-log counts reads and writes", |_| {
        let before = json(guest, &format!("smart-log /dev/{ctrl}"))?;
        let mib = 64;
        guest.sh(
            &format!(
                "dd if=/dev/zero of=/dev/{dev} bs=64k count={0} oflag=direct && \
                 dd if=/dev/{dev} of=/dev/null bs=64k count={0} iflag=direct",
                mib * 16
            ),
            LIMIT,
        )?;
        let after = json(guest, &format!("smart-log /dev/{ctrl}"))?;
        ensure!(number(&after, "critical_warning")? == 0, "critical_warning");
        ensure!((273..373).contains(&number(&after, "temperature")?), "temperature in Kelvin");
        ensure!(number(&after, "media_errors")? == 0, "media_errors");
        // A Data Unit is a thousand blocks of 512 bytes.
        let units = mib * (1 << 20) / 512_000;
        for (name, least) in [
            ("data_units_read", units),
            ("data_units_written", units),
            ("host_read_commands", mib * 16),
            ("host_write_commands", mib * 16),
        ] {
            let grown = number(&after, name)?.saturating_sub(number(&before, name)?);
            ensure!((least..=least + least / 10).contains(&grown), "{name}: {grown}, not {least}");
        }
        Ok(())
    });
    report.check("nvme error-log contains the errors", |_| {
        let newest = |log: &serde_json::Value| log.pointer("/errors/0").cloned();
        let log = |guest: &mut Guest| json(guest, &format!("error-log /dev/{ctrl}"));
        let before = newest(&log(guest)?).context("an empty log")?;
        refused(guest, &format!("read /dev/{dev} -s 0x7fffffff -c 0 -z 512"), &[0x080])?;
        let after = newest(&log(guest)?).context("an empty log")?;
        // QEMU's controller has no error log.
        if shadowbell {
            let grown =
                number(&after, "error_count")?.saturating_sub(number(&before, "error_count")?);
            ensure!(grown == 1, "error_count grew by {grown}");
            ensure!(number(&after, "status_field")? & 0x7ff == 0x080, "status_field: {after}");
            ensure!(number(&after, "lba")? == 0x7fff_ffff, "lba: {after}");
            ensure!(number(&after, "nsid")? == 1 && number(&after, "sqid")? > 0, "{after}");
        }
        Ok(())
    });
    report.check("firmware, changed namespaces, command effects", |_| {
        nvme(guest, &format!("fw-log /dev/{ctrl}"))?;
        nvme(guest, &format!("changed-ns-list-log /dev/{ctrl}"))?;
        // The log page has four bytes for each opcode: admin commands in the first KiB, I/O
        // commands in the second.
        let hex =
            guest.sh(&format!("nvme get-log /dev/{ctrl} -i 5 -l 2048 -b | xxd -p -c 4"), LIMIT)?;
        let effects: Vec<_> = hex.lines().collect();
        for (what, entry) in [("Identify", 0x06), ("Read", 256 + 0x02), ("Write", 256 + 0x01)] {
            let supported = effects.get(entry).is_some_and(|e| e.get(1..2) == Some("1"));
            let writes = effects.get(entry).is_some_and(|e| e.get(1..2) == Some("3"));
            ensure!(supported || writes, "{what} is not listed: {:?}", effects.get(entry));
        }
        if shadowbell {
            nvme(guest, &format!("supported-log-pages /dev/{ctrl}"))?;
        }
        Ok(())
    });
}

fn features(report: &mut Report, guest: &mut Guest, ctrl: &str, shadowbell: bool) {
    report.check("nvme get-feature of every mandatory feature, and more", |_| {
        for feature in [0x01, 0x02, 0x04, 0x06, 0x07, 0x08, 0x0b] {
            get_feature(guest, ctrl, feature)?;
        }
        // Error Recovery is a namespace feature.
        nvme(guest, &format!("get-feature /dev/{ctrl} -f 0x05 -n 1"))?;
        nvme(guest, &format!("get-feature /dev/{ctrl} -f 0x09 --cdw11=1"))?;
        nvme(guest, &format!("get-feature /dev/{ctrl} -f 0x0e --data-len=8 -H"))?;
        let queues = get_feature(guest, ctrl, 0x07)?;
        // The numbers are zero-based: submission queues in the lower half, completion queues in the
        // upper half.
        let (submission, completion) = ((queues & 0xffff) + 1, (queues >> 16) + 1);
        ensure!(submission >= CPUS && completion >= CPUS, "{submission} and {completion} queues");
        Ok(())
    });
    report.check("nvme set-feature takes effect, and can be taken back", |_| {
        let mut settings = vec![(0x06, 0), (0x04, 0x0160), (0x0b, 0x0100)];
        // QEMU's controller does not support changes of Interrupt Coalescing.
        settings.extend(shadowbell.then_some((0x08, 0x0203)));
        for (feature, value) in settings {
            let before = get_feature(guest, ctrl, feature)?;
            for value in [value, before] {
                nvme(guest, &format!("set-feature /dev/{ctrl} -f {feature} --value={value}"))?;
                let now = get_feature(guest, ctrl, feature)?;
                ensure!(now == value, "feature {feature:#x}: {now:#x} after setting {value:#x}");
            }
        }
        Ok(())
    });
}

/// Current value of a feature.
fn get_feature(guest: &mut Guest, ctrl: &str, feature: u32) -> Result<u32> {
    let text = nvme(guest, &format!("get-feature /dev/{ctrl} -f {feature}"))?;
    feature_value(&text).with_context(|| format!("no value: {text}"))
}

/// Parses `get-feature:0x06 (Volatile Write Cache), Current value:0x00000001`; zero has no `0x`.
fn feature_value(text: &str) -> Option<u32> {
    let (_, value) = text.rsplit_once("value:")?;
    let digits = value.split_whitespace().next()?;
    u32::from_str_radix(digits.strip_prefix("0x").unwrap_or(digits), 16).ok()
}

fn data_commands(report: &mut Report, guest: &mut Guest, dev: &str, shadowbell: bool) {
    report.check(
        "write, read, compare, write-zeroes, verify, deallocate, flush by nvme-cli",
        |_| {
            guest.sh(
                &format!(
                    "set -e; cd /tmp; at='/dev/{dev} --start-block=1000 --block-count=7'; \
                 dd if=/dev/urandom of=data bs=4096 count=1; \
                 nvme write $at --data-size=4096 --data=data; \
                 nvme read $at --data-size=4096 --data=back; cmp data back; \
                 nvme compare $at --data-size=4096 --data=data; \
                 nvme write $at --data-size=4096 --data=data --force-unit-access; \
                 nvme verify $at; nvme flush /dev/{dev}; \
                 nvme write-zeroes $at; \
                 nvme read $at --data-size=4096 --data=back; cmp -n 4096 back /dev/zero; \
                 nvme dsm /dev/{dev} --ad --blocks=8 --slbs=1000"
                ),
                LIMIT,
            )
        },
    );
    report.check("copy by nvme-cli: two ranges, in the other order", |_| {
        // QEMU's controller supports Copy, but its namespaces report a maximum length of zero for
        // it.
        let most = number(&json(guest, &format!("id-ns /dev/{dev}"))?, "mcl")?;
        if !shadowbell && most < 8 {
            return Ok(String::new());
        }
        guest.sh(
            &format!(
                "set -e; cd /tmp; dd if=/dev/urandom of=data bs=4096 count=1; \
                 nvme write /dev/{dev} -s 2000 -c 7 -z 4096 -d data; \
                 nvme copy /dev/{dev} --sdlba=3000 --blocks=2,4 --slbs=2005,2000; \
                 nvme read /dev/{dev} -s 3000 -c 7 -z 4096 -d back; \
                 tail -c 1536 data > expected; head -c 2560 data >> expected; cmp expected back"
            ),
            LIMIT,
        )
    });
    report.check("a failed comparison has its status", |_| {
        guest.sh("dd if=/dev/urandom of=/tmp/data bs=4096 count=1", LIMIT)?;
        let at = format!("/dev/{dev} -s 1000 -c 7 -z 4096 -d /tmp/data");
        refused(guest, &format!("compare {at}"), &[0x285])
    });
}

/// Diagnostics for support engineers, and Write Uncorrectable.
fn diagnostics(report: &mut Report, guest: &mut Guest, ctrl: &str, dev: &str) {
    report.check("a self-test and its log by nvme-cli", |_| {
        guest.sh(&format!("nvme device-self-test /dev/{ctrl} -n 1 -s 1"), LIMIT)?;
        guest.sh(
            &format!(
                "for n in $(seq 600); do nvme self-test-log /dev/{ctrl} -o json > /tmp/log; \
                 grep -q 'Self-Test Operation\"[ :]*\"*0' /tmp/log && break; sleep 0.1; done; \
                 cat /tmp/log; nvme self-test-log /dev/{ctrl} | grep -i 'result *: 0'"
            ),
            LIMIT,
        )
    });
    report.check("telemetry and the log of events by nvme-cli", |_| {
        guest.sh(
            &format!(
                "set -e; cd /tmp; nvme telemetry-log /dev/{ctrl} -O telemetry -g 1; \
                 grep -a -q '^resets ' telemetry; grep -a -q '^cq 1 ' telemetry; \
                 nvme persistent-event-log /dev/{ctrl} -a 1 -l 4096 > events; \
                 nvme persistent-event-log /dev/{ctrl} -a 2 -l 512 > released; \
                 cat events | head -n 40; grep -qi 'power' events"
            ),
            LIMIT,
        )
    });
    report.check("a block marked by Write Uncorrectable is unreadable until it is written", |_| {
        guest.sh(&format!("nvme write-uncor /dev/{dev} -s 4000 -c 0"), LIMIT)?;
        refused(guest, &format!("read /dev/{dev} -s 4000 -c 0 -z 512"), &[0x281])?;
        guest.sh(
            &format!(
                "set -e; cd /tmp; rm -f data back; nvme lba-status-log /dev/{ctrl}; \
                 dd if=/dev/urandom of=data bs=512 count=1; \
                 nvme write /dev/{dev} -s 4000 -c 0 -z 512 -d data; \
                 nvme read /dev/{dev} -s 4000 -c 0 -z 512 -d back; cmp data back"
            ),
            LIMIT,
        )
    });
}

/// Commands that must be refused, and their statuses. A command has several statuses if the
/// specification allows a choice, or if the status depends on supported features.
fn refusals(report: &mut Report, guest: &mut Guest, ctrl: &str, dev: &str) {
    const INVALID_OPCODE: u16 = 0x001;
    const INVALID_FIELD: u16 = 0x002;
    const INVALID_NAMESPACE: u16 = 0x00b;
    const INVALID_QUEUE: u16 = 0x101;
    const INVALID_LOG_PAGE: u16 = 0x109;
    const INVALID_FORMAT: u16 = 0x10a;
    let admin = |rest: &str| format!("admin-passthru /dev/{ctrl} {rest}");
    let list = [
        (format!("format /dev/{dev} --lbaf=9 -f"), vec![INVALID_OPCODE, INVALID_FORMAT]),
        (format!("fw-commit /dev/{ctrl} -s 1 -a 1"), vec![INVALID_OPCODE]),
        (format!("sanitize /dev/{ctrl} -a 2"), vec![INVALID_OPCODE]),
        (format!("security-recv /dev/{ctrl} -p 1 -s 1 -x 16"), vec![INVALID_OPCODE, INVALID_FIELD]),
        (admin("--opcode=0xc0"), vec![INVALID_OPCODE]),
        (admin("--opcode=0x06 --cdw10=0xfe -r -l 4096"), vec![INVALID_FIELD]),
        (admin("--opcode=0x00 --cdw10=0"), vec![INVALID_QUEUE]),
        (admin("--opcode=0x00 --cdw10=60000"), vec![INVALID_QUEUE]),
        // QEMU's controller returns Completion Queue Invalid for this command.
        (admin("--opcode=0x04 --cdw10=0"), vec![INVALID_QUEUE]),
        (admin("--opcode=0x05 --cdw10=0"), vec![INVALID_QUEUE]),
        (format!("get-log /dev/{ctrl} -i 0xef -l 64"), vec![INVALID_LOG_PAGE, INVALID_FIELD]),
        (format!("get-feature /dev/{ctrl} -f 0xbf"), vec![INVALID_FIELD]),
        (format!("set-feature /dev/{ctrl} -f 0xbf --value=1"), vec![INVALID_FIELD]),
        (format!("id-ns /dev/{ctrl} -n 0xfffffffe"), vec![INVALID_NAMESPACE]),
        (format!("io-passthru /dev/{dev} --opcode=0x7f -n 1"), vec![INVALID_OPCODE]),
        (format!("read /dev/{dev} -s 0x1fffff -c 1 -z 1024"), vec![0x080]),
        (format!("copy /dev/{dev} --sdlba=0 --blocks=65535 --slbs=0"), vec![0x183]),
        (format!("copy /dev/{dev} --sdlba=0x200000 --blocks=7 --slbs=0"), vec![0x080, 0x183]),
    ];
    report.check("unsupported and invalid commands are refused with the right status", |_| {
        let wrong: Vec<String> = list
            .iter()
            .filter_map(|(command, statuses)| refused(guest, command, statuses).err())
            .map(|error| format!("{error:#}"))
            .collect();
        if !wrong.is_empty() {
            bail!("{}", wrong.join("\n"));
        }
        Ok(())
    });
    report.check("an abort of no command aborts none", |_| {
        let text = nvme(guest, &admin("--opcode=0x08 --cdw10=0x77770001"))?;
        ensure!(text.contains("0x00000001") || text.contains("0x1"), "{text}");
        Ok(())
    });
    report.check("the disk is still readable", |_| {
        guest.sh(&format!("dd if=/dev/{dev} of=/dev/null bs=1M count=4 iflag=direct"), LIMIT)
    });
}

/// A guest without shared memory: the server must log the missing QEMU option, and continue to run.
fn without_shared_memory(
    setup: &Setup,
    kernel: Kernel,
    run: &RunDir,
    image: &std::path::Path,
) -> Result<()> {
    let mut disk = setup.disk(run, image)?;
    let guest = setup.boot(run, kernel, vec![disk.device.clone()], |config| {
        config.share = false;
        // The controller does not answer. With this timeout the kernel does not wait a minute for
        // each command.
        config.firmware = Firmware::Direct { append: "nvme_core.admin_timeout=2".to_owned() };
    });
    drop(guest);
    disk.check()?;
    let log = disk.server.as_ref().context("no server")?.log()?;
    ensure!(log.contains("share=on"), "the server did not name the option:\n{log}");
    disk.stop()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feature_values_are_parsed_in_both_forms() {
        let text = "get-feature:0x06 (Volatile Write Cache), Current value:0x00000a01\n";
        assert_eq!(feature_value(text), Some(0xa01));
        assert_eq!(feature_value("x (y), Current value:00000000"), Some(0));
        assert_eq!(feature_value("error"), None);
    }
}
