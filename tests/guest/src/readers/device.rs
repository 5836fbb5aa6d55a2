//! The disk as a ublk device of the guest's kernel: its attributes, the integrity of its data, and
//! the end of its server process, by a signal or by `kill -9`.

use anyhow::{Context, Result, ensure};
use shadowbell_guest::Guest;

use super::controller::{Controller, SIZE};
use crate::dmesg;
use crate::vfio::shadowbell;
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

/// A disk that is exported as a ublk device in the guest.
pub(crate) struct Export {
    /// Name of the block device.
    pub(crate) disk: String,
    number: u32,
}

impl Export {
    /// Starts `shadowbell export TARGET --ublk` with the options `options`, and waits for the
    /// device.
    pub(crate) fn start(guest: &mut Guest, target: &str, options: &str) -> Result<Self> {
        let number = 0;
        guest.sh(
            &format!(
                "shadowbell export {target} --ublk --ublk-id {number} {options} \
                    >/tmp/export{number} 2>&1 & echo $! >/tmp/pid{number}; \
                 for i in $(seq 600); do \
                    grep -q 'exporting' /tmp/export{number} && exit 0; \
                    [ -d /proc/$(cat /tmp/pid{number}) ] || break; sleep 0.1; \
                 done; cat /tmp/export{number}; exit 1"
            ),
            LIMIT,
        )?;
        Ok(Self { disk: format!("ublkb{number}"), number })
    }

    /// Number of times that the server's threads have slept so far.
    pub(crate) fn sleeps(&self, guest: &mut Guest) -> Result<u64> {
        let text = guest.sh(
            &format!(
                "sed -n 's/^voluntary_ctxt_switches:[[:space:]]*//p' \
                 /proc/$(cat /tmp/pid{})/task/*/status",
                self.number
            ),
            LIMIT,
        )?;
        text.split_whitespace().map(|n| n.parse::<u64>().context("a count of sleeps")).sum()
    }

    pub(crate) fn signal(&self, guest: &mut Guest, signal: &str) -> Result<()> {
        guest.sh(&format!("kill -{signal} $(cat /tmp/pid{})", self.number), LIMIT).map(drop)
    }

    /// Waits for the end of the server. Returns its output.
    pub(crate) fn ended(&self, guest: &mut Guest) -> Result<String> {
        let number = self.number;
        guest.sh(
            &format!(
                "for i in $(seq 600); do [ -d /proc/$(cat /tmp/pid{number}) ] || break; \
                    sleep 0.1; done; cat /tmp/export{number}; ! [ -d /proc/$(cat /tmp/pid{number}) ]"
            ),
            LIMIT,
        )
    }

    /// Ends the server as an operator does. Its log must report the end without a warning, and the
    /// device must disappear.
    pub(crate) fn stop(self, guest: &mut Guest) -> Result<()> {
        self.signal(guest, "TERM")?;
        let said = self.ended(guest)?;
        ensure!(said.contains("ended") && !said.contains("WARN"), "{said}");
        guest.sh(&format!("! [ -e /dev/{} ]", self.disk), LIMIT).context("the device is there")?;
        Ok(())
    }
}

/// Checks a refusal: exit status 2, a message of the program as the last line, and an output that
/// contains all of `words`.
pub(crate) fn refused(guest: &mut Guest, arguments: &str, words: &[&str]) -> Result<()> {
    let output = shadowbell(guest, &format!("export {arguments}"))?;
    ensure!(output.code == 2, "`{arguments}` ended with {}: {}", output.code, output.text);
    let line = output.text.lines().last().unwrap_or_default();
    ensure!(line.starts_with("shadowbell: "), "no sentence at the end: {}", output.text);
    for word in words {
        ensure!(line.contains(word), "`{arguments}` does not say `{word}`: {}", output.text);
    }
    Ok(())
}

pub(crate) fn kernel_driver_only(report: &mut Report, guest: &mut Guest) {
    report.check("without ublk's module the error contains the remedy", |_| {
        refused(guest, "mem:16MiB --ublk", &["modprobe ublk_drv"])
    });
}

pub(crate) fn checks(
    report: &mut Report,
    guest: &mut Guest,
    shadowbell_controller: &Controller,
    qemu: &Controller,
) {
    let mut check = |name: &str, run: &dyn Fn(&mut Guest) -> Result<()>| {
        report.check(name, |_| run(guest).or_else(|error| clean_up(guest).and(Err(error))))
    };
    check("users other than root are refused with the reason", &unprivileged);
    check(
        "the block device has the disk's attributes: size, blocks, cache, discard, queues",
        &|guest| attributes(guest, shadowbell_controller, qemu),
    );
    for controller in [shadowbell_controller, qemu] {
        let name = controller.name;
        check(&format!("{name}: written, trimmed, verified through ublk"), &|guest| {
            content(guest, controller)
        });
    }
    check("a file system is written, mounted again, trimmed, and clean", &|guest| {
        file_system(guest, shadowbell_controller)
    });
    check("SIGTERM waits until the device is unmounted, and then removes it", &|guest| {
        in_use(guest, shadowbell_controller)
    });
    check("three kills under load: --recover recovers the device without data loss", &|guest| {
        killed(guest, &shadowbell_controller.target(), "exporting")
    });
    check("a device that cannot be recovered is refused with the reason", &|guest| {
        check_not_claimed(guest, shadowbell_controller)
    });
    report.check("the kernel logs no warning", |_| kernel_logged_no_warning(guest));
}

/// Fails if the guest's kernel has logged a warning.
pub(crate) fn kernel_logged_no_warning(guest: &mut Guest) -> Result<()> {
    let log = guest.dmesg()?;
    let bad = ["ublk", "blocked for more than", "BUG:", "WARNING:", "Oops"];
    let found: Vec<_> = log
        .lines()
        .filter(|line| bad.iter().any(|word| line.contains(word)))
        .filter(|line| dmesg::level(line) <= 4)
        .collect();
    ensure!(found.is_empty(), "{}", found.join("\n"));
    Ok(())
}

/// Removes what a failed check has left, so that the next check can use the controller.
fn clean_up(guest: &mut Guest) -> Result<()> {
    let script = "umount /mnt; for signal in TERM KILL; do \
            kill -$signal $(cat /tmp/pid0); \
            for i in $(seq 600); do [ -d /proc/$(cat /tmp/pid0) ] || exit 0; sleep 0.1; done; \
        done";
    guest.run(script, LIMIT).map(drop)
}

fn unprivileged(guest: &mut Guest) -> Result<()> {
    guest.sh("id other || echo other:x:1000:1000::/:/bin/sh >>/etc/passwd", LIMIT)?;
    for change in ["chmod 600", "chmod 666"] {
        guest.sh(&format!("{change} /dev/ublk-control"), LIMIT)?;
        let output = guest.run("su other -c 'shadowbell export mem:16MiB --ublk'", LIMIT)?;
        let (code, text) = (output.code, output.text);
        ensure!(code == 2 && text.contains("needs root"), "{change}: {code}: {text}");
    }
    guest.sh("chmod 600 /dev/ublk-control", LIMIT).map(drop)
}

/// Attribute of a block device in sysfs.
fn attribute(guest: &mut Guest, disk: &str, name: &str) -> Result<String> {
    Ok(guest.sh(&format!("cat /sys/block/{disk}/{name}"), LIMIT)?.trim().to_owned())
}

fn attributes(
    guest: &mut Guest,
    shadowbell_controller: &Controller,
    qemu: &Controller,
) -> Result<()> {
    let expect = |guest: &mut Guest, disk: &str, list: &[(&str, &str)]| -> Result<()> {
        for (name, want) in list {
            let found = attribute(guest, disk, name)?;
            ensure!(found == *want, "{disk}: {name} is `{found}`, not `{want}`");
        }
        Ok(())
    };
    let sectors = (SIZE / 512).to_string();
    // The memory disk of Shadowbell's controller has no volatile write cache. QEMU's controller has
    // one.
    for (controller, cache, fua) in
        [(shadowbell_controller, "write through", "0"), (qemu, "write back", "1")]
    {
        let export = Export::start(guest, &controller.target(), "--queues 2")?;
        let list = [
            ("size", sectors.as_str()),
            ("ro", "0"),
            ("queue/logical_block_size", "512"),
            ("queue/write_cache", cache),
            ("queue/fua", fua),
            ("queue/discard_granularity", "512"),
        ];
        expect(guest, &export.disk, &list)?;
        for name in ["queue/discard_max_bytes", "queue/write_zeroes_max_bytes"] {
            ensure!(attribute(guest, &export.disk, name)? != "0", "{name}");
        }
        let queues = guest.sh(&format!("ls /sys/block/{}/mq | wc -l", export.disk), LIMIT)?;
        ensure!(queues.trim() == "2", "{queues} queues");
        export.stop(guest)?;
    }

    let target = "local:mem:64MiB?block-size=4096";
    let export = Export::start(guest, &format!("'{target}'"), "--read-only")?;
    expect(guest, &export.disk, &[("queue/logical_block_size", "4096"), ("ro", "1")])?;
    let write = format!("dd if=/dev/zero of=/dev/{} bs=4096 count=1 conv=fsync", export.disk);
    ensure!(guest.run(&write, LIMIT)?.code != 0, "a disk that is read-only was written");
    export.stop(guest)
}

fn content(guest: &mut Guest, controller: &Controller) -> Result<()> {
    let export = Export::start(guest, &controller.target(), "")?;
    let disk = &export.disk;
    let fio = "--direct=1 --ioengine=libaio --verify=crc32c --verify_fatal=1 --output-format=terse";
    guest.sh(
        &format!(
            "fio --name=verify --filename=/dev/{disk} --rw=randrw --bsrange=512-512k \
             --blockalign=512 --do_verify=1 --numjobs=2 --size=24m --offset_increment=24m \
             --iodepth=16 --fsync=32 {fio}"
        ),
        LIMIT,
    )?;
    guest.sh(
        &format!(
            "fio --name=trim --filename=/dev/{disk} --rw=randtrimwrite --bs=16k --size=16m \
             --offset=64m --iodepth=8 --direct=1 --ioengine=libaio --output-format=terse"
        ),
        LIMIT,
    )?;
    // Two steps: a Write Zeroes to blocks between others with data, and a write that stays in the
    // page cache until the end of the export flushes it.
    guest.sh(
        &format!(
            "yes shadowbell | dd of=/dev/{disk} bs=1M seek=100 count=8 iflag=fullblock oflag=direct && \
             blkdiscard -f -z -o 101M -l 4M /dev/{disk} && \
             dd if=/dev/{disk} bs=1M skip=101 count=4 iflag=direct | cmp -n 4194304 - /dev/zero && \
             head -c 3000000 /dev/urandom >/tmp/data && \
             dd if=/tmp/data of=/dev/{disk} bs=1M seek=200"
        ),
        LIMIT,
    )?;
    export.stop(guest)?;
    // The driver reads data that were written through the kernel.
    let read = format!(
        "shadowbell read {} --offset 200M --length 3000000 -o /tmp/back && cmp /tmp/data /tmp/back",
        controller.target()
    );
    guest.sh(&read, LIMIT).map(drop)
}

/// Checksum of every file, sorted by path, for a comparison.
const SUMS: &str = "find usr -xdev -type f | sort | xargs sha256sum";

fn file_system(guest: &mut Guest, controller: &Controller) -> Result<()> {
    let target = controller.target();
    let export = Export::start(guest, &target, "")?;
    let disk = export.disk.clone();
    guest.sh(&format!("mkfs.ext4 -q -F /dev/{disk} && mount /dev/{disk} /mnt"), LIMIT)?;
    guest.sh(&format!("cd / && {SUMS} >/tmp/before && cp -a usr /mnt/ && umount /mnt"), LIMIT)?;
    export.stop(guest)?;
    // A new server serves the disk, and its file system is mounted again.
    let export = Export::start(guest, &target, "")?;
    guest.sh(&format!("mount /dev/{disk} /mnt && cd /mnt && {SUMS} >/tmp/after"), LIMIT)?;
    guest.sh("[ -s /tmp/before ] && cmp /tmp/before /tmp/after", LIMIT)?;
    guest.sh("rm -r /mnt/usr/lib && fstrim /mnt && umount /mnt", LIMIT)?;
    guest.sh(&format!("e2fsck -fn /dev/{disk}"), LIMIT)?;
    export.stop(guest)
}

fn in_use(guest: &mut Guest, controller: &Controller) -> Result<()> {
    let export = Export::start(guest, &controller.target(), "")?;
    let disk = &export.disk;
    guest.sh(&format!("mkfs.ext4 -q -F /dev/{disk} && mount /dev/{disk} /mnt"), LIMIT)?;
    export.signal(guest, "TERM")?;
    let said = guest.sh(
        "for i in $(seq 600); do grep -q 'is in use' /tmp/export0 && break; sleep 0.1; done; \
         cat /tmp/export0; [ -d /proc/$(cat /tmp/pid0) ] && echo more >/mnt/file && sync",
        LIMIT,
    )?;
    ensure!(said.contains("is in use, waiting for its users"), "{said}");
    guest.sh("umount /mnt", LIMIT)?;
    let said = export.ended(guest)?;
    ensure!(said.contains("ended"), "{said}");
    guest.sh(&format!("! [ -e /dev/{disk} ]"), LIMIT).context("the device is still there")?;
    Ok(())
}

/// Runs fio, which writes and verifies, while the server process of its disk is killed repeatedly.
/// The log of each next server process must contain `words`.
pub(crate) fn killed(guest: &mut Guest, target: &str, words: &str) -> Result<()> {
    let mut export = Export::start(guest, target, "--recover")?;
    let disk = export.disk.clone();
    guest.sh(
        &format!(
            "(fio --name=killed --filename=/dev/{disk} --rw=randwrite --bs=4k-64k --size=48m \
              --verify=crc32c --verify_fatal=1 --do_verify=1 --iodepth=32 --fsync=64 \
              --direct=1 --ioengine=libaio --rate=3m --output-format=terse; echo ended $?) \
              >/tmp/fio 2>&1 &"
        ),
        LIMIT,
    )?;
    for _ in 0..3 {
        guest.sh("sleep 0.7; ! grep ended /tmp/fio", LIMIT).context("fio was too fast")?;
        export.signal(guest, "KILL")?;
        // Waits for the end of the killed process: until the kernel has released its memory, the
        // controller is in use.
        export.ended(guest)?;
        // Without --recover, a new server must refuse the device of the dead process.
        refused(guest, &format!("{target} --ublk --ublk-id 0"), &["--recover"]).or_else(
            |error| {
                // The killed process may still exist. Then the refusal has another message.
                if error.to_string().contains("is served by") { Ok(()) } else { Err(error) }
            },
        )?;
        export = Export::start(guest, target, "--recover")?;
        let said = guest.sh("cat /tmp/export0", LIMIT)?;
        ensure!(said.contains(": recovered") && said.contains(words), "{said}");
    }
    let said = guest.sh(
        "for i in $(seq 600); do grep -q ended /tmp/fio && break; sleep 0.1; done; cat /tmp/fio",
        LIMIT,
    )?;
    ensure!(said.contains("ended 0"), "{said}");
    export.stop(guest)
}

fn check_not_claimed(guest: &mut Guest, controller: &Controller) -> Result<()> {
    let target = controller.target();
    let export = Export::start(guest, "local:null:1GiB", "")?;
    let taken = format!("local:null:1GiB --ublk --ublk-id {}", export.number);
    refused(guest, &taken, &["is served by process"])?;
    refused(guest, &format!("{taken} --recover"), &["is served by process"])?;
    export.signal(guest, "KILL")?;
    export.ended(guest)?;
    refused(guest, &format!("{target} --ublk --ublk-id 0 --recover"), &["bytes", "536870912"])?;
    refused(guest, "local:mem:1GiB --ublk --ublk-id 0 --recover", &["was lost"])?;
    // Another target, because the killed process may still hold the lock of the first one.
    let export = Export::start(guest, "local:null:1GiB", "--recover")?;
    export.stop(guest)
}
