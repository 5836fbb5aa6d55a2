//! Cloud Hypervisor on a controller of shadowbell's, while the process that serves is killed or
//! upgraded again and again: it reads from the socket without a limit of time, and never connects
//! again.
//!
//! KVM does not work on every machine that tests run on, but it does in a guest whose processor is
//! emulated with SVM. So server, VMM and a Linux of its own run inside of the guest, where each is
//! slow, and only what comes of it counts.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use shadowbell_guest::initramfs::{self, Extra};
use shadowbell_guest::{Config, Guest, Kernel, RunDir};

use super::setup::{MINUTE, Setup};
use super::vfio::load;
use crate::report::Report;

/// The outer guest's archive, in the run's directory of files.
const ARCHIVE: &str = "initramfs-cloud-hypervisor.cpio";
/// What has KVM, each module after those that it needs. Not every kernel has all of them.
const MODULES: &[&str] = &["irqbypass", "ccp", "kvm", "kvm-amd"];
/// The inner guest's kernel and user land, in the outer one.
const VMLINUX: &str = "inner/vmlinux";
const INITRAMFS: &str = "inner/initramfs";
/// What the inner guest may take for all that it does, with everything emulated.
const PATIENCE: Duration = Duration::from_secs(600);
/// Between two events.
const PAUSE: &str = "0.7";

/// What the inner guest does, told from its kernel's lines by the first word. It has no agent: the
/// steps are the same each time, and the console is a file of the outer one.
const INNER: &str = r#"#!/usr/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/opt/busybox HOME=/root TERM=dumb LANG=C
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs devtmpfs /dev
busybox mkdir -p /tmp /run /mnt /root /opt/busybox
busybox mount -t tmpfs tmpfs /tmp
busybox --install -s /opt/busybox 2>/dev/null
say() { echo "@INNER $*" >/dev/ttyS0; }
step() {
    name=$1; shift
    if "$@" >/tmp/step 2>&1; then say "ok $name"; else
        say "failed $name"
        tail -n 20 /tmp/step >/dev/ttyS0
    fi
}
disk=
for try in $(seq 600); do
    for path in /sys/class/nvme/nvme*/nvme*n1; do
        name=$(basename $path | sed 's/c[0-9]*n/n/')
        [ -b /dev/$name ] && disk=/dev/$name
    done
    [ -n "$disk" ] && break
    sleep 0.1
done
[ -n "$disk" ] || { say "failed disk"; dmesg | grep -i nvme >/dev/ttyS0; }
say "ok disk"
verify="fio --filename=$disk --rw=randwrite --bsrange=512-64k --blockalign=512 --verify=crc32c \
    --verify_fatal=1 --verify_backlog=64 --offset=128m --size=24m --iodepth=32 --direct=1 \
    --ioengine=libaio --output-format=terse"
step verify $verify --name=a
resets() {
    $verify --name=b & fio=$!
    for i in 1 2 3 4; do
        sleep 1
        echo 1 >/sys/class/nvme/nvme0/reset_controller || return 1
    done
    wait $fio
}
step resets resets
files() {
    mkfs.ext4 -q -F $disk 96m && mount $disk /mnt && cp -a /usr/bin /mnt/ && sync &&
        echo 3 >/proc/sys/vm/drop_caches && diff -r /usr/bin /mnt/bin && umount /mnt
}
step files files
complaints() {
    # That a processor stood still is the emulator's, on a machine that has other work.
    dmesg -r | grep -E '^<[0-4]>' | grep -iE 'nvme|ext4|I/O error|blocked for' >/tmp/complaints
    cat /tmp/complaints
    [ ! -s /tmp/complaints ]
}
step complaints complaints
say "ok end"
poweroff -f
"#;
const STEPS: [&str; 6] = ["disk", "verify", "resets", "files", "complaints", "end"];

/// What is done to the server: a shell command of the outer guest, and how it is called.
const EVENTS: [(&str, &str); 2] = [
    ("killed", "kill -9 $(awk '{print $NF}' /proc/$(cat /tmp/keeper)/task/*/children)"),
    ("upgraded", "shadowbell upgrade /tmp/ch.sock"),
];

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let (Some(shadowbell), Some(vmm)) = (&setup.shadowbell, &setup.cloud_hypervisor) else {
        println!("   left out: give Cloud Hypervisor's program with --cloud-hypervisor PATH");
        return Ok(());
    };
    let vmm = vmm.canonicalize().with_context(|| vmm.display().to_string())?;
    let inner = Extra { init: Some(INNER), ..Extra::default() };
    let inner = initramfs::pack(&setup.roots, initramfs::FULL, inner)?;
    let vmlinux = unpacked(setup, kernel, run)?;
    let modules = setup.roots.modules(kernel, MODULES);
    let extra = Extra {
        linked: &[shadowbell, &vmm],
        modules: &modules,
        files: &[(VMLINUX, &vmlinux), (INITRAMFS, &inner)],
        ..Extra::default()
    };
    let archive = initramfs::pack(&setup.roots, initramfs::FULL, extra)?;
    fs::write(run.file(ARCHIVE), archive).context("the initramfs")?;
    let mut config = Config::new(kernel, Vec::new());
    config.memory_mib = 4096;
    let mut guest = Guest::boot(&setup.roots, run, &config, ARCHIVE)?;
    load(&mut guest, MODULES)?;
    guest.sh("mkdir -p /run /tmp; [ -e /dev/kvm ]", MINUTE).context("the guest has no KVM")?;
    for (what, event) in EVENTS {
        let check = format!("Cloud Hypervisor's guest works while the server is {what}");
        report.check(&check, |_| {
            let outcome = work(&mut guest, event);
            // What the server says in between is of use afterwards.
            for log in ["serve", "vmm", "inner", "events"] {
                let text = guest.sh(&format!("cat /tmp/{log}.log"), MINUTE).unwrap_or_default();
                fs::write(run.file(&format!("{what}-{log}.log")), text)?;
            }
            outcome
        });
    }
    report.check("the guest powers off", |_| guest.power_off(MINUTE));
    Ok(())
}

/// A server, Cloud Hypervisor and its guest, from its boot to its end, with events all along.
fn work(guest: &mut Guest, event: &str) -> Result<()> {
    guest.sh(
        "[ -e /tmp/keeper ] && kill -9 $(cat /tmp/keeper); sleep 1; \
         rm -f /tmp/*.log /tmp/ch.sock /tmp/stop /tmp/events; truncate -s 256M /tmp/disk.img; \
         setsid shadowbell serve -v --socket /tmp/ch.sock /tmp/disk.img \
             >/tmp/serve.log 2>&1 & \
         echo $! >/tmp/keeper; \
         for try in $(seq 300); do [ -S /tmp/ch.sock ] && exit 0; sleep 0.1; done; \
         cat /tmp/serve.log; exit 1",
        2 * MINUTE,
    )?;
    guest.sh(
        "setsid cloud-hypervisor --kernel /inner/vmlinux --initramfs /inner/initramfs \
             --cmdline 'console=ttyS0 rdinit=/init quiet panic=-1' --cpus boot=1 \
             --memory size=512M,shared=on --user-device socket=/tmp/ch.sock \
             --serial file=/tmp/inner.log --console off >/tmp/vmm.log 2>&1 & \
         echo $! >/tmp/vmm",
        MINUTE,
    )?;
    guest.sh(
        &format!(
            "cat >/tmp/events.sh <<'END'\n\
             done=0\n\
             is_served() {{ shadowbell ctl -s /tmp/ch.sock status >/dev/null 2>&1; }}\n\
             # A client that is about to be accepted is nobody's yet.\n\
             until shadowbell ctl -s /tmp/ch.sock status | grep -q '1 have a client'; do\n\
                 sleep 0.1\n\
             done\n\
             while [ ! -e /tmp/stop ]; do\n\
                 # Who dies before it serves is started again a few times only.\n\
                 until is_served || [ -e /tmp/stop ]; do sleep 0.1; done\n\
                 {event} >>/tmp/events.log 2>&1 && done=$((done + 1))\n\
                 echo $done >/tmp/events.now; mv /tmp/events.now /tmp/events\n\
                 sleep {PAUSE}\n\
             done\n\
             END\n\
             setsid sh /tmp/events.sh >/dev/null 2>&1 &"
        ),
        MINUTE,
    )?;
    let began = Instant::now();
    let mut said = String::new();
    loop {
        // Each look takes processor time of the guest.
        std::thread::sleep(Duration::from_secs(1));
        let now = guest.sh("grep -a @INNER /tmp/inner.log || true", MINUTE)?;
        if now.len() > said.len() {
            let new = now.get(said.len()..).unwrap_or_default();
            print!("{}", new.replace("@INNER", &format!("   {:4.0?}", began.elapsed())));
        }
        said = now;
        if said.contains("ok end") {
            break;
        }
        // Long enough for any machine.
        ensure!(began.elapsed() < PATIENCE, "the inner guest did not come to its end");
        guest.sh("[ -e /proc/$(cat /tmp/vmm) ]", MINUTE).context("Cloud Hypervisor has ended")?;
    }
    let events = guest.sh("touch /tmp/stop; sleep 2; cat /tmp/events", MINUTE)?;
    let events: u32 = events.trim().parse().context("a number of events")?;
    println!("   {events} times");
    for step in STEPS {
        ensure!(said.contains(&format!("ok {step}")), "the inner guest failed at `{step}`");
    }
    ensure!(events >= 10, "only {events} times");
    // The VMM ends with its guest, and the server when it is told to.
    guest.sh(
        "for pid in $(cat /tmp/vmm); do \
            for try in $(seq 300); do [ -e /proc/$pid ] || break; sleep 0.1; done; \
            [ ! -e /proc/$pid ] || { echo it is still there; exit 1; }; \
         done; \
         kill $(cat /tmp/keeper); \
         for try in $(seq 300); do [ -e /proc/$(cat /tmp/keeper) ] || exit 0; sleep 0.1; done; \
         exit 1",
        2 * MINUTE,
    )?;
    Ok(())
}

/// The kernel as an ELF file, which is what Cloud Hypervisor starts best.
fn unpacked(setup: &Setup, kernel: Kernel, run: &RunDir) -> Result<Vec<u8>> {
    let image = setup.roots.kernel(kernel)?;
    let image = fs::read(&image).with_context(|| image.display().to_string())?;
    let kinds: [(&[u8], &str, &[&str]); 3] = [
        (b"\x28\xb5\x2f\xfd", "zstd", &["-dcq"]),
        (b"\xfd7zXZ\0", "xz", &["-dc", "--single-stream", "-q"]),
        (b"\x1f\x8b\x08", "gzip", &["-dcq"]),
    ];
    let packed: PathBuf = run.file("kernel.packed");
    for (magic, program, options) in kinds {
        let places = image.windows(magic.len()).enumerate().filter(|(_, bytes)| *bytes == magic);
        for (at, _) in places {
            fs::write(&packed, image.get(at..).unwrap_or_default())?;
            let mut command = setup.roots.command(&[], program)?;
            command.args(options).stdin(fs::File::open(&packed)?).stderr(Stdio::null());
            // What follows it in the image is none of it, which the program complains of.
            let output = command.output().with_context(|| program.to_owned())?.stdout;
            if output.starts_with(b"\x7fELF") {
                return Ok(output);
            }
        }
    }
    bail!("the kernel's image has no ELF file that zstd, xz or gzip unpacks")
}
