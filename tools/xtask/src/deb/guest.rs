//! Test of the package in a new Debian system: installation, use, upgrade under a client,
//! removal.

use shadowbell_testing::wait;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::boot::{self, BLOCK_DEVICE, Debian, Machine};
use super::tools::directory;
use shadowbell_harness::Report;

/// Prefix of a command of a client like QEMU: a user in the group of the sockets.
const CLIENT: &str = "setpriv --reuid=64000 --regid=64000 --groups=kvm";
/// Prefix of a command of a user outside of that group.
const OUTSIDER: &str = "setpriv --reuid=64001 --regid=64001 --clear-groups";
/// Command of a client that verifies its data until SIGINT.
const VERIFY: &str = "shadowbell verify --force --runtime 100 --size 32M";
/// File with the client's process id.
const CLIENT_PID: &str = "/run/client.pid";
const SOCKET: &str = "/run/shadowbell/vm0.sock";

/// Step of the test.
type Step = fn(&Machine) -> Result<()>;

/// Root directory of a Debian that boots, which is downloaded once.
pub(super) fn root() -> Result<PathBuf> {
    let debian = Debian { name: "root", suite: "bookworm", backports: None, packages: "" };
    boot::root(&directory(), &debian)
}

/// Runs all steps, with a package and a newer one.
pub(super) fn test(report: &mut Report, package: &Path, newer: &Path) {
    let machine = report.check("a fresh Debian boots", |_| {
        let root = root()?;
        let shared = directory().join("shared");
        fs::create_dir_all(&shared)?;
        fs::copy(package, shared.join("shadowbell.deb"))?;
        fs::copy(newer, shared.join("newer.deb"))?;
        Machine::boot(&root, &shared)
    });
    let Some(machine) = machine else { return };
    let steps: [(&str, Step); 9] = [
        ("the package installs, and its service starts", check_installation),
        ("a reload applies the configuration, and refuses an invalid one", check_reload),
        ("only clients in the group of the sockets are served", check_socket_access),
        (
            "a killed server process is recovered without an error of a client",
            check_server_recovery,
        ),
        (
            "a killed supervisor is restarted without an error of a client",
            check_supervisor_recovery,
        ),
        ("a newer package upgrades the server without an error of a client", check_upgrade),
        ("an instance of shadowbell@.service serves one virtual machine", check_instance),
        (
            "a block device, exports by NBD over TCP and by FUSE, and metrics survive a killed supervisor",
            check_exports,
        ),
        ("removal stops the services, and purging keeps images", check_removal),
    ];
    for (name, step) in steps {
        let outcome = report.check(name, |_| {
            step(&machine).with_context(|| {
                let log = machine.run("journalctl --no-pager --lines 30 --unit 'shadowbell*'");
                format!("the journal:\n{}", log.unwrap_or_default())
            })
        });
        if outcome.is_none() {
            break;
        }
    }
}

fn check_installation(machine: &Machine) -> Result<()> {
    machine.run("dpkg --install /shared/shadowbell.deb")?;
    expect_output(machine, "systemctl is-active shadowbell", "active")?;
    expect_output(machine, "systemctl is-enabled shadowbell", "enabled")?;
    expect_output(
        machine,
        "systemctl show --property StatusText --value shadowbell",
        "serves 0 controllers",
    )?;
    expect_output(machine, "shadowbell ctl status --json", "\"controllers\": 0")?;
    expect_output(
        machine,
        "stat --format '%U:%G %a' /var/lib/shadowbell",
        "shadowbell:shadowbell 750",
    )?;
    for pid in [main_pid(machine)?, worker_pid(machine)?] {
        expect_output(machine, &format!("stat --format %U /proc/{pid}"), "shadowbell")?;
    }
    // dpkg must find no missing or changed file.
    expect_output(machine, "dpkg --verify shadowbell; echo fine", "fine")?;
    for page in ["", "-serve", "-ctl", "-ctl-apply", "-bench"] {
        machine
            .run(&format!("zcat /usr/share/man/man1/shadowbell{page}.1.gz | grep -q '^\\.TH'"))?;
    }
    machine.run("bash -n /usr/share/bash-completion/completions/shadowbell")?;
    Ok(())
}

/// Configuration with a controller.
const CONFIGURED: &str = r#"
socket-mode = "0660"
socket-group = "kvm"
[[controller]]
id = "vm0"
socket = "/run/shadowbell/vm0.sock"
disks = ["/var/lib/shadowbell/vm0.img", "mem:64MiB"]
"#;

fn check_reload(machine: &Machine) -> Result<()> {
    machine.run(
        "setpriv --reuid=shadowbell --regid=shadowbell --clear-groups \
         truncate --size 64M /var/lib/shadowbell/vm0.img",
    )?;
    machine.run(&write("/etc/shadowbell/shadowbell.toml", CONFIGURED))?;
    let before = main_pid(machine)?;
    machine.run("systemctl reload shadowbell")?;
    wait(machine, &format!("test -S {SOCKET}"))?;
    expect_output(machine, &format!("stat --format '%G %a' {SOCKET}"), "kvm 660")?;
    let bad = CONFIGURED.replace("disks", "disk");
    machine.run(&write("/etc/shadowbell/shadowbell.toml", &bad))?;
    machine.run("systemctl reload shadowbell")?;
    let said = "journalctl --no-pager --unit shadowbell | grep 'the configuration is refused'";
    wait(machine, said)?;
    expect_output(machine, "shadowbell ctl status --json", "\"controllers\": 1")?;
    ensure!(main_pid(machine)? == before, "the server was restarted");
    machine.run(&write("/etc/shadowbell/shadowbell.toml", CONFIGURED))?;
    machine.run("systemctl reload shadowbell").map(drop)
}

fn check_socket_access(machine: &Machine) -> Result<()> {
    for namespace in 1..=2 {
        let target = format!("vfio-user:{SOCKET}/{namespace}");
        machine.run(&format!("{CLIENT} shadowbell verify --number-ios 2000 {target}"))?;
    }
    let refused =
        machine.run(&format!("{OUTSIDER} shadowbell list vfio-user:{SOCKET} 2>&1 || true"))?;
    ensure!(
        refused.contains("this user may not connect"),
        "a user outside of the group gets: {refused}"
    );
    expect_output(machine, "shadowbell ctl namespaces", "vm0.img")?;
    Ok(())
}

/// Starts a client that verifies its data until [`expect_success`].
fn client(machine: &Machine) -> Result<Child> {
    let client = machine
        .start(&format!("echo $$ >{CLIENT_PID}; exec {CLIENT} {VERIFY} vfio-user:{SOCKET}/1"))?;
    wait(machine, "shadowbell ctl status --json | grep '\"clients\": 1'")?;
    wait_for_commands(machine)?;
    Ok(client)
}

/// Waits until the server process has executed more commands than now.
fn wait_for_commands(machine: &Machine) -> Result<()> {
    let commands = || -> Result<u64> {
        let stats = machine.run("shadowbell ctl stats --json")?;
        let stats: serde_json::Value = serde_json::from_str(&stats).context(stats.clone())?;
        stats["commands"].as_u64().context("the statistics have no commands")
    };
    let (before, deadline) = (commands()?, wait::deadline());
    while commands()? <= before {
        ensure!(Instant::now() < deadline, "the client's commands are not executed");
        wait::pause();
    }
    Ok(())
}

/// Ends the client, which must still be running now and must succeed.
fn expect_success(machine: &Machine, client: Child) -> Result<()> {
    let served = wait_for_commands(machine);
    // This command fails if the client has already ended.
    let signal = machine.run(&format!("kill -INT $(cat {CLIENT_PID})"));
    let output = client.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "the client ({}):\n{said}{errors}", output.status);
    served.and(signal.map(drop))
}

fn check_server_recovery(machine: &Machine) -> Result<()> {
    let (main, before) = (main_pid(machine)?, worker_pid(machine)?);
    let client = client(machine)?;
    machine.run(&format!("kill -KILL {before}"))?;
    wait(machine, &format!("shadowbell ctl status --json | grep '\"pid\"' | grep -v {before}"))?;
    expect_success(machine, client)?;
    ensure!(main_pid(machine)? == main, "the supervisor was restarted");
    expect_output(machine, "systemctl show --property NRestarts shadowbell", "NRestarts=0")
}

fn check_supervisor_recovery(machine: &Machine) -> Result<()> {
    let (main, before) = (main_pid(machine)?, worker_pid(machine)?);
    expect_output(machine, "systemctl show --property NFileDescriptorStore shadowbell", "=2")?;
    let client = client(machine)?;
    machine.run(&format!("kill -KILL {main}"))?;
    wait(machine, &format!("shadowbell ctl status --json | grep '\"pid\"' | grep -v {before}"))?;
    expect_success(machine, client)?;
    ensure!(main_pid(machine)? != main, "the same process is there");
    expect_output(machine, "systemctl show --property NRestarts shadowbell", "NRestarts=1")?;
    expect_output(machine, "systemctl show --property NFileDescriptorStore shadowbell", "=2")
}

fn check_upgrade(machine: &Machine) -> Result<()> {
    let (main, before) = (main_pid(machine)?, worker_pid(machine)?);
    let client = client(machine)?;
    let said = machine.run("dpkg --install /shared/newer.deb 2>&1")?;
    ensure!(worker_pid(machine)? != before, "the old process still serves:\n{said}");
    expect_success(machine, client)?;
    ensure!(main_pid(machine)? == main, "the supervisor was restarted:\n{said}");
    let now = worker_pid(machine)?;
    // Both the supervisor and the server process are killed.
    for pid in [main, now] {
        expect_output(
            machine,
            &format!("readlink /proc/{pid}/exe"),
            "/usr/bin/shadowbell-serve\n",
        )?;
    }
    expect_output(machine, "dpkg-query --show --showformat '${Version}' shadowbell", "+newer")?;
    expect_output(machine, "systemctl is-active shadowbell", "active")
}

fn check_instance(machine: &Machine) -> Result<()> {
    let text = CONFIGURED.replace("vm0", "vm1").replace("\"/var/lib/shadowbell/vm1.img\", ", "");
    machine.run(&write("/etc/shadowbell/vm1.toml", &text))?;
    machine.run("systemctl start shadowbell@vm1")?;
    expect_output(machine, "shadowbell ctl --server vm1 status --json", "\"controllers\": 1")?;
    // The UUIDs of its disks are in a directory of its own.
    expect_output(
        machine,
        "stat --format '%U:%G %a' /var/lib/shadowbell/vm1",
        "shadowbell:shadowbell 700",
    )?;
    machine.run("test -f /var/lib/shadowbell/vm1/disk-uuids")?;
    let target = "vfio-user:/run/shadowbell/vm1.sock";
    machine.run(&format!("{CLIENT} shadowbell verify --number-ios 2000 {target}"))?;
    // `ctl` grants a path beside the sockets of other instances, where the server process by itself
    // may not listen.
    let add = "shadowbell ctl --server vm1 controller add more mem:1MiB --socket /run/shadowbell";
    machine.run(&format!("{add}/more.sock && test -S /run/shadowbell/more.sock"))?;
    machine.run("systemctl stop shadowbell@vm1")?;
    expect_output(machine, "systemctl show --property Result shadowbell@vm1", "Result=success")?;
    expect_output(machine, "systemctl show --property NFileDescriptorStore shadowbell@vm1", "=0")?;
    machine.run("test ! -e /run/shadowbell/vm1.sock && test -S /run/shadowbell/vm0.sock")?;
    machine.run("systemctl start shadowbell@vm1").map(drop)
}

/// Configuration with metrics, an export over TCP, and a disk for an export by FUSE.
const EXPORTED: &str = r#"
metrics = "127.0.0.1:9477"
[[controller]]
id = "vm2"
socket = "/run/shadowbell/vm2.sock"
disks = ["mem:16MiB"]
[[disk]]
id = "data"
source = "/var/lib/shadowbell/data.img"
[[disk]]
id = "more"
source = "/var/lib/shadowbell/more.img"
[[export]]
id = "tcp"
disk = "data"
nbd = "tcp:127.0.0.1:10809"
"#;

fn check_exports(machine: &Machine) -> Result<()> {
    machine.run(
        "setpriv --reuid=shadowbell --regid=shadowbell --clear-groups \
         truncate --size 64M /var/lib/shadowbell/data.img /var/lib/shadowbell/more.img",
    )?;
    // The machine that runs the container may have neither of these devices.
    let has = |device: &str| machine.run(&format!("test -e {device}")).is_ok();
    let (has_device, has_fuse) = (has(BLOCK_DEVICE), has("/dev/fuse"));
    println!("         block device: {has_device}, FUSE: {has_fuse}");
    let mut config = EXPORTED.to_owned();
    if has_device {
        machine.run(&format!("chown shadowbell:shadowbell {BLOCK_DEVICE}"))?;
        config = config.replace("\"mem:16MiB\"", &format!("\"mem:16MiB\", {BLOCK_DEVICE:?}"));
    }
    machine.run(&write("/etc/shadowbell/vm2.toml", &config))?;
    machine.run("systemctl start shadowbell@vm2")?;
    let metrics = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/9477; printf \"GET /metrics HTTP/1.1\\r\\n\
                   Host: localhost\\r\\nConnection: close\\r\\n\\r\\n\" >&3; cat <&3'";
    let check = || {
        if has_device {
            let target = "vfio-user:/run/shadowbell/vm2.sock/2";
            machine.run(&format!("shadowbell verify --force --number-ios 2000 {target}"))?;
            // The data are on the device.
            machine.run(&format!(
                "tr -d '\\0' <{BLOCK_DEVICE} | head --bytes 1 | wc --bytes | grep 1"
            ))?;
            machine
                .run(&format!("dd if=/dev/zero of={BLOCK_DEVICE} bs=1M count=64 status=none"))?;
        }
        let target = "nbd://127.0.0.1:10809";
        machine.run(&format!("{OUTSIDER} shadowbell verify --force --number-ios 2000 {target}"))?;
        expect_output(machine, metrics, "shadowbell_export_requests_total")
    };
    check()?;
    if has_fuse {
        // `ctl` mounts the file, and passes the descriptor of /dev/fuse to the service.
        machine.run("shadowbell ctl --server vm2 export add file more --fuse /run/more.disk")?;
        machine.run("head --bytes 4M /dev/urandom >/run/data")?;
        machine.run("dd if=/run/data of=/run/more.disk bs=1M conv=notrunc,fsync status=none")?;
    }
    let main = main_pid_of(machine, "shadowbell@vm2")?;
    machine.run(&format!("kill -KILL {main}"))?;
    wait(machine, "systemctl show --property NRestarts shadowbell@vm2 | grep '=1$'")?;
    wait(machine, "systemctl is-active shadowbell@vm2")?;
    ensure!(main_pid_of(machine, "shadowbell@vm2")? != main, "the same process is there");
    check()?;
    if has_fuse {
        machine.run("echo 3 >/proc/sys/vm/drop_caches || true")?;
        machine.run("cmp --bytes 4194304 /run/data /run/more.disk")?;
        machine.run("shadowbell ctl --server vm2 export remove file")?;
        machine.run("! grep ' /run/more.disk ' /proc/self/mountinfo")?;
    }
    machine.run("systemctl stop shadowbell@vm2")?;
    expect_output(machine, "systemctl show --property Result shadowbell@vm2", "Result=success")
}

fn check_removal(machine: &Machine) -> Result<()> {
    machine.run("dpkg --remove shadowbell")?;
    let processes = "cat /proc/[0-9]*/comm 2>/dev/null | grep --count '^shadowbell' || true";
    expect_output(machine, processes, "0\n")?;
    expect_output(machine, "systemctl list-units --plain --no-legend 'shadowbell*' | wc -l", "0")?;
    machine.run("test -e /etc/shadowbell/shadowbell.toml && test ! -e /usr/bin/shadowbell")?;
    machine.run("dpkg --purge shadowbell")?;
    expect_output(machine, "dpkg-query --show shadowbell 2>&1 || true", "no packages found")?;
    // Removal keeps configuration files and images that a user has made.
    machine.run("test -e /etc/shadowbell/vm1.toml && test ! -e /etc/shadowbell/shadowbell.toml")?;
    machine.run("test -e /var/lib/shadowbell/vm0.img && test ! -e /run/shadowbell")?;
    expect_output(machine, "systemctl is-system-running", "running")
}

fn main_pid(machine: &Machine) -> Result<u32> {
    main_pid_of(machine, "shadowbell")
}

fn main_pid_of(machine: &Machine, unit: &str) -> Result<u32> {
    let pid = machine.run(&format!("systemctl show --property MainPID --value {unit}"))?;
    pid.trim().parse().context("systemd reports no main process")
}

fn worker_pid(machine: &Machine) -> Result<u32> {
    let status = machine.run("shadowbell ctl status --json")?;
    let status: serde_json::Value = serde_json::from_str(&status).context(status.clone())?;
    let pid = status.get("pid").and_then(serde_json::Value::as_u64);
    pid.and_then(|pid| pid.try_into().ok()).context("the server has no process")
}

/// Shell script that writes a file.
pub(super) fn write(path: &str, text: &str) -> String {
    format!("cat >{path} <<'END'\n{text}END\n")
}

/// Checks that the output of a script contains `words`.
pub(super) fn expect_output(machine: &Machine, script: &str, words: &str) -> Result<()> {
    let said = machine.run(script)?;
    ensure!(said.contains(words), "{script}: {words:?} is not in:\n{said}");
    Ok(())
}

/// Waits until a script succeeds.
pub(super) fn wait(machine: &Machine, script: &str) -> Result<()> {
    let deadline = wait::deadline();
    while machine.run(script).is_err() {
        ensure!(Instant::now() < deadline, "the condition is not reached: {script}");
        wait::pause();
    }
    Ok(())
}
