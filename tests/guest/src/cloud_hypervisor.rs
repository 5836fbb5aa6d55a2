//! Cloud Hypervisor with a Shadowbell controller, while the server process is killed or upgraded
//! repeatedly. Cloud Hypervisor reads from the socket without a timeout and never reconnects, so
//! the connection must survive.
//!
//! KVM is not available on every test machine, but it works in a guest whose emulated CPU has SVM.
//! Therefore the server, the VMM and an inner Linux guest run inside a guest. They are slow, so the
//! suite checks only results, not times.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use shadowbell_guest::initramfs::{self, Extra};
use shadowbell_guest::{Config, Guest, Kernel, RunDir};

use super::setup::Setup;
use super::vfio::load;
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

/// File name of the outer guest's archive, in the run's directory of files.
const ARCHIVE: &str = "initramfs-cloud-hypervisor.cpio";
/// KVM modules, in the order of their dependencies. Not every kernel has all of them.
const MODULES: &[&str] = &["irqbypass", "ccp", "kvm", "kvm-amd"];
/// Paths of the inner guest's kernel and user land in the outer guest.
const VMLINUX: &str = "inner/vmlinux";
const INITRAMFS: &str = "inner/initramfs";
/// Time limit of the inner guest, from boot to power-off, with everything emulated.
const INNER_GUEST_TIMEOUT: Duration = Duration::from_secs(600);
/// Seconds between two events.
const PAUSE: &str = "0.7";

/// Init script of the inner guest. The first word of the kernel's command line selects its steps.
/// The inner guest needs no agent, because its steps never change; its console is a file of the
/// outer guest.
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

/// Kinds of replacement of the server process: name, and shell command of the outer guest.
const EVENTS: [(&str, &str); 2] = [
    ("killed", "kill -9 $(awk '{print $NF}' /proc/$(cat /tmp/supervisor)/task/*/children)"),
    ("upgraded", "shadowbell upgrade /tmp/ch.sock"),
];

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let (Some(shadowbell), Some(vmm)) = (&setup.shadowbell, &setup.cloud_hypervisor) else {
        println!("   skipped: needs Cloud Hypervisor (--cloud-hypervisor PATH)");
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
    guest.sh("mkdir -p /run /tmp; [ -e /dev/kvm ]", LIMIT).context("the guest has no KVM")?;
    for (what, event) in EVENTS {
        let check = format!("Cloud Hypervisor's guest works while the server is {what}");
        report.check(&check, |_| {
            let outcome = work(&mut guest, event);
            // The logs are stored, because they explain a failure.
            for log in ["serve", "vmm", "inner", "events"] {
                let text = guest.sh(&format!("cat /tmp/{log}.log"), LIMIT).unwrap_or_default();
                fs::write(run.file(&format!("{what}-{log}.log")), text)?;
            }
            outcome
        });
    }
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    Ok(())
}

/// Runs the server, Cloud Hypervisor and its guest, from boot to power-off, with repeated events.
fn work(guest: &mut Guest, event: &str) -> Result<()> {
    guest.sh(
        "[ -e /tmp/supervisor ] && kill -9 $(cat /tmp/supervisor); sleep 1; \
         rm -f /tmp/*.log /tmp/ch.sock /tmp/stop /tmp/events; truncate -s 256M /tmp/disk.img; \
         setsid shadowbell serve -v --socket /tmp/ch.sock /tmp/disk.img \
             >/tmp/serve.log 2>&1 & \
         echo $! >/tmp/supervisor; \
         for try in $(seq 600); do [ -S /tmp/ch.sock ] && exit 0; sleep 0.1; done; \
         cat /tmp/serve.log; exit 1",
        LIMIT,
    )?;
    guest.sh(
        "setsid cloud-hypervisor --kernel /inner/vmlinux --initramfs /inner/initramfs \
             --cmdline 'console=ttyS0 rdinit=/init quiet panic=-1' --cpus boot=1 \
             --memory size=512M,shared=on --user-device socket=/tmp/ch.sock \
             --serial file=/tmp/inner.log --console off >/tmp/vmm.log 2>&1 & \
         echo $! >/tmp/vmm",
        LIMIT,
    )?;
    guest.sh(
        &format!(
            "cat >/tmp/events.sh <<'END'\n\
             done=0\n\
             is_served() {{ shadowbell ctl -s /tmp/ch.sock status >/dev/null 2>&1; }}\n\
             # The client may not have been accepted yet.\n\
             until shadowbell ctl -s /tmp/ch.sock status | grep -q '1 with a client'; do\n\
                 sleep 0.1\n\
             done\n\
             while [ ! -e /tmp/stop ]; do\n\
                 # A process that dies before it serves is started again only a few times.\n\
                 until is_served || [ -e /tmp/stop ]; do sleep 0.1; done\n\
                 {event} >>/tmp/events.log 2>&1 && done=$((done + 1))\n\
                 echo $done >/tmp/events.now; mv /tmp/events.now /tmp/events\n\
                 sleep {PAUSE}\n\
             done\n\
             END\n\
             setsid sh /tmp/events.sh >/dev/null 2>&1 &"
        ),
        LIMIT,
    )?;
    let began = Instant::now();
    let mut said = String::new();
    loop {
        // The pause is long, because each poll takes CPU time of the outer guest.
        std::thread::sleep(Duration::from_secs(1));
        let now = guest.sh("grep -a @INNER /tmp/inner.log || true", LIMIT)?;
        if now.len() > said.len() {
            let new = now.get(said.len()..).unwrap_or_default();
            print!("{}", new.replace("@INNER", &format!("   {:4.0?}", began.elapsed())));
        }
        said = now;
        if said.contains("ok end") {
            break;
        }
        // This time limit is long enough for any machine.
        ensure!(began.elapsed() < INNER_GUEST_TIMEOUT, "the inner guest did not come to its end");
        guest.sh("[ -e /proc/$(cat /tmp/vmm) ]", LIMIT).context("Cloud Hypervisor has ended")?;
    }
    let events = guest.sh("touch /tmp/stop; sleep 2; cat /tmp/events", LIMIT)?;
    let events: u32 = events.trim().parse().context("a number of events")?;
    println!("   {events} times");
    for step in STEPS {
        ensure!(said.contains(&format!("ok {step}")), "the inner guest failed at `{step}`");
    }
    ensure!(events >= 10, "only {events} times");
    // Waits for the end of the VMM (it ends together with its guest), and then ends the server by
    // SIGTERM.
    guest.sh(
        "for pid in $(cat /tmp/vmm); do \
            for try in $(seq 600); do [ -e /proc/$pid ] || break; sleep 0.1; done; \
            [ ! -e /proc/$pid ] || { echo it is still there; exit 1; }; \
         done; \
         kill $(cat /tmp/supervisor); \
         for try in $(seq 600); do [ -e /proc/$(cat /tmp/supervisor) ] || exit 0; sleep 0.1; done; \
         exit 1",
        LIMIT,
    )?;
    Ok(())
}

/// Kernel as an uncompressed ELF file, which Cloud Hypervisor boots.
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
            // The program writes the whole kernel and then fails because of the data after the
            // compressed kernel. Therefore its exit status is ignored.
            let output = command.output().with_context(|| program.to_owned())?.stdout;
            if output.starts_with(b"\x7fELF") {
                return Ok(output);
            }
        }
    }
    bail!("the kernel's image has no ELF file that zstd, xz or gzip unpacks")
}
